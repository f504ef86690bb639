"""Self-distillation without labels, DINO (Caron et al. 2021, https://arxiv.org/abs/2104.14294).

A student predicts, from any crop of an image, what a teacher sees in two large crops of it. The teacher is the moving
average of the student. The detector of the same name is in dino.py.

Shapes: B images; two large crops and n small ones of each, view by view; D features; K prototypes.
"""

from collections.abc import Sequence
from copy import deepcopy

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from vitkit.backbones.base import init_linear
from vitkit.errors import ConfigError
from vitkit.models.pretraining import PretrainingModel, pooled_features
from vitkit.protocols.backbone import Backbone, with_defaults
from vitkit.registry import MODELS, Spec


@MODELS.register
class SelfDistillation(PretrainingModel):
    """A student and its teacher, each a backbone and a `ProjectionHead`.

    `backbone` and `head` are the teacher's, which a run is for; `student` has those that are trained. The hook
    `SelfDistillationSchedules` moves the teacher towards the student after each step.

    Args:
        backbone: spec or module; its stochastic depth (`drop_path`) is the student's only.
        num_prototypes: K, the number of outputs, which the paper calls dimensions; 65,536 there, and fewer for few
            images.
        hidden_channels, bottleneck_channels, batch_norm, norm_last_layer: see `ProjectionHead`.
    Raises:
        ConfigError: there are less than two prototypes; and see `PretrainingModel`.
    """

    training_parts = ("student", "teacher", "dino_loss")
    student_backbone = "student.backbone"
    """See `vitkit.protocols.learning.LearnsFromItself`."""

    def __init__(
        self,
        backbone: Spec | nn.Module,
        *,
        num_prototypes: int = 65536,
        hidden_channels: int = 2048,
        bottleneck_channels: int = 256,
        batch_norm: bool = False,
        norm_last_layer: bool = True,
    ):
        super().__init__(backbone)
        if num_prototypes < 2:
            raise ConfigError(
                f"num_prototypes={num_prototypes}: expected at least 2, as with one every image has the same."
            )
        *_, (coarsest, info) = self.backbone.feature_info.items()
        with_defaults(self.backbone, Backbone).keep_features([coarsest])  # the others would never get a gradient
        self.head = ProjectionHead(
            info.channels,
            num_prototypes,
            hidden_channels=hidden_channels,
            bottleneck_channels=bottleneck_channels,
            batch_norm=batch_norm,
            norm_last_layer=norm_last_layer,
        )
        self.student = nn.ModuleDict(dict(backbone=deepcopy(self.backbone), head=deepcopy(self.head)))
        for part in (self.backbone, self.head):
            part.requires_grad_(False)
        remove_drop_path(self.backbone)
        # Updated by `SelfDistillationLoss`; here, so that checkpoints have it.
        self.register_buffer("center", torch.zeros(1, num_prototypes))

    def forward(
        self, images: Tensor, padding_mask: Tensor | None = None, small_images: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Compute what the criterion compares, or in evaluation mode the features of the teacher's backbone.

        Args:
            images: in training (2 B, 3, H, W), the large views, see `Batch`; else see `PretrainingModel`.
            padding_mask: ignored.
            small_images: (n B, 3, h, w), only in training.
        Returns:
            student_logits: ((2 + n) B, K), those of the large views first.
            teacher_logits: (2 B, K), without gradients.
            teacher_features: (2 B, D).
            center: (1, K), the buffer.
        """
        if not self.training:
            return super().forward(images, padding_mask)
        large = self.prepare(images)
        sizes = [large] if small_images is None else [large, self.prepare(small_images)]
        features = torch.cat([pooled_features(self.student["backbone"], views) for views in sizes])
        with torch.no_grad():
            teacher_features = pooled_features(self.backbone, large)
            teacher_logits = self.head(teacher_features)
        return {
            "student_logits": self.student["head"](features),
            "teacher_logits": teacher_logits,
            "teacher_features": teacher_features,
            "center": self.center,
        }

    def last_layer(self) -> Sequence[nn.Parameter]:
        """Return the parameters of the student's last layer, which is frozen at first."""
        return list(self.student["head"].last_layer.parameters())

    @torch.no_grad()
    def update_teacher(self, momentum: float) -> None:
        """Move the teacher's parameters, and not its buffers, towards the student's: by 1 - momentum."""
        teacher = [*self.backbone.parameters(), *self.head.parameters()]
        torch._foreach_mul_(teacher, momentum)
        torch._foreach_add_(teacher, list(self.student.parameters()), alpha=1 - momentum)

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Start the student from a backbone whose checkpoint has no student, as the teacher does."""
        ours, theirs = f"{prefix}backbone.", f"{prefix}student.backbone."
        if not any(key.startswith(theirs) for key in state):
            state |= {theirs + key.removeprefix(ours): x for key, x in state.items() if key.startswith(ours)}

    def after_pretrained(self) -> None:
        """Start the student from the weights of the teacher's backbone, which have been loaded."""
        self.student["backbone"].load_state_dict(self.backbone.state_dict())


class ProjectionHead(nn.Module):
    """Three linear layers with GELU, down to a bottleneck that is normalized, and the cosine with each prototype
    (appendix C of the paper).

    Args:
        in_channels: D.
        num_prototypes: K.
        hidden_channels, bottleneck_channels: width of the hidden layers and of their output.
        batch_norm: whether there are batch norms before the activations.
        norm_last_layer: keep the prototypes at length 1; False: their lengths are learned, which can be better but also
            unstable.
    """

    def __init__(
        self,
        in_channels: int,
        num_prototypes: int,
        *,
        hidden_channels: int = 2048,
        bottleneck_channels: int = 256,
        batch_norm: bool = False,
        norm_last_layer: bool = True,
    ):
        super().__init__()
        layers: list[nn.Module] = []
        for channels in (in_channels, hidden_channels):
            norm = [nn.BatchNorm1d(hidden_channels)] if batch_norm else []
            layers += [nn.Linear(channels, hidden_channels), *norm, nn.GELU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(hidden_channels, bottleneck_channels))
        self.mlp.apply(init_linear)
        self.last_layer = WeightNormLinear(bottleneck_channels, num_prototypes)
        self.last_layer.weight_g.requires_grad_(not norm_last_layer)

    def forward(self, x: Tensor) -> Tensor:
        """(B, D) -> (B, K)."""
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))


class WeightNormLinear(nn.Module):
    """A linear layer without bias whose rows have their length as a parameter (Salimans & Kingma 2016,
    https://arxiv.org/abs/1602.07868); lengths begin at 1. Names are those of `torch.nn.utils.weight_norm`."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight_g = nn.Parameter(torch.ones(out_features, 1))
        self.weight_v = nn.Parameter(nn.Linear(in_features, out_features, bias=False).weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_features) -> (B, out_features)."""
        return F.linear(x, self.weight_g * F.normalize(self.weight_v, dim=1))


def remove_drop_path(module: nn.Module) -> None:
    """Never skip a block, also in training mode."""
    for part in module.modules():
        if isinstance(part, StochasticDepth):
            part.p = 0.0
        elif isinstance(part, DropPath):
            part.drop_prob = 0.0
