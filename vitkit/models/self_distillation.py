"""Self-distillation without labels, DINO (Caron et al. 2021, https://arxiv.org/abs/2104.14294).

A student predicts, from any crop of an image, what a teacher sees in two large crops of it. The teacher is the moving
average of the student. The detector of the same name is in dino.py.

    SelfDistillation           student and teacher, and how the teacher and its center move
    SelfDistillationLoss       what is compared (equations 1 to 4)
    SelfDistillationSchedules  when and how far they move, in a run

Shapes: B images; two large crops and n small ones of each, view by view; D features; K prototypes.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from vitkit.backbones.base import init_linear
from vitkit.distributed import RatioMeter, all_reduce_mean, is_main
from vitkit.errors import ConfigError
from vitkit.models.pretraining import PretrainingModel, pooled_features
from vitkit.protocols.backbone import Backbone, with_defaults
from vitkit.protocols.criterion import Criterion
from vitkit.protocols.learning import Hook
from vitkit.registry import CRITERIA, HOOKS, MODELS, Spec

logger = logging.getLogger("vitkit")
_MIN_PROGRESS = 0.1
"""The fraction of a run after which a collapse is looked for; at first, all features are nearly equal anyway."""
_UNIFORM, _ONE, _EQUAL = 0.999, 0.02, 0.02
"""The entropy above which a teacher is uniform, and that of the mean below which all images have one prototype, as
fractions of ln K; and the spread below which features are equal."""


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
        self.register_buffer("center", torch.zeros(1, num_prototypes))

    def forward(
        self, images: Tensor, padding_mask: Tensor | None = None, small_images: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Compute the outputs of student and teacher, or in evaluation mode the features of the teacher's backbone.

        Args:
            images: in training (2 B, 3, H, W), the large views, see `Batch`; else see `PretrainingModel`.
            padding_mask: ignored, see `PretrainingModel`.
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

    @torch.no_grad()
    def update_center(self, batch_means: Sequence[Tensor], momentum: float) -> None:
        """Move the center of the teacher's outputs towards their mean over all ranks: by 1 - momentum.

        Args:
            batch_means: (1, K), the mean of each batch of a step.
        """
        # All batches have the same size, so the mean of their means is that of all images.
        mean = all_reduce_mean(torch.stack(list(batch_means)).mean(0))
        self.center.mul_(momentum).add_(mean, alpha=1 - momentum)

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Start the student from a backbone whose checkpoint has no student, as the teacher does."""
        ours, theirs = f"{prefix}backbone.", f"{prefix}student.backbone."
        if not any(key.startswith(theirs) for key in state):
            state |= {theirs + key.removeprefix(ours): x for key, x in state.items() if key.startswith(ours)}

    def after_pretrained(self) -> None:
        """Start the student from the weights of the teacher's backbone, which have been loaded."""
        self.student["backbone"].load_state_dict(self.backbone.state_dict())


@CRITERIA.register
class SelfDistillationLoss(Criterion):
    """Cross entropy of the student's prediction from one view with the teacher's from another one of the same image.

    The teacher's outputs are centered, so that no prototype wins everywhere, and sharpened by a low temperature, so
    that they do not all become equal; without either, the features collapse. Their entropy, and that of their mean over
    the batch, are between 0 and ln K for K prototypes.

    `meters`: `teacher_entropy`; `mean_entropy`, that of the mean over a batch's images; and `feature_spread`, the
    standard deviation of the teacher's L2-normalized features over the batch, times the square root of their number: 0
    if all are equal, 1 if they are evenly spread. A batch of one image has only the first.

    Args:
        student_temperature: temperature of the student's softmax; the hook `SelfDistillationSchedules` sets the
            teacher's.
        center_momentum: weight of the previous center in the next one.
    Raises:
        ConfigError: an argument is out of range.
    """

    training_only = True
    needs_outputs = ("student_logits", "teacher_logits", "teacher_features", "center")
    teacher_temperature: float | None = None

    def __init__(self, *, student_temperature: float = 0.1, center_momentum: float = 0.9):
        super().__init__()
        if student_temperature <= 0:
            raise ConfigError(f"student_temperature={student_temperature}: expected above 0.")
        if not 0 <= center_momentum <= 1:
            raise ConfigError(f"center_momentum={center_momentum}: expected 0 to 1, where 1 means no centering.")
        self.student_temperature = student_temperature
        self.center_momentum = center_momentum
        self.meters = {name: RatioMeter() for name in ("teacher_entropy", "mean_entropy", "feature_spread")}
        self.batch_means: list[Tensor] = []
        """The mean of the teacher's outputs, (1, K), in each batch since the last step."""

    def forward(self, outputs: Mapping[str, Tensor], targets: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Compute the loss.

        Args:
            outputs: outputs of `SelfDistillation` in training.
            targets: a target for each of the B images; only their number is used.
        Returns:
            distillation: the mean over images and pairs of a large view and another view.
        Raises:
            ConfigError: the outputs are not those of several views, or no hook sets the teacher's temperature.
        """
        self._check(outputs, len(targets))
        with torch.autocast(outputs["student_logits"].device.type, enabled=False):
            teacher_logits = outputs["teacher_logits"].detach().float()
            teacher = ((teacher_logits - outputs["center"]) / self.teacher_temperature).softmax(-1)
            student = (outputs["student_logits"].float() / self.student_temperature).log_softmax(-1)
            teacher, student = (x.unflatten(0, (-1, len(targets))) for x in (teacher, student))  # (views, B, K)
            # (2, views), summed over the images.
            cross_entropy = -torch.einsum("tbk,sbk->ts", teacher, student)
            others = cross_entropy.sum() - cross_entropy.diagonal().sum()
            loss = others / (len(targets) * (cross_entropy.numel() - len(teacher)))
        self.batch_means.append(teacher_logits.mean(0, keepdim=True))
        self._measure(teacher, outputs["teacher_features"].detach().float())
        return {"distillation": loss}

    def _check(self, outputs: Mapping[str, Tensor], num_images: int) -> None:
        missing = [name for name in self.needs_outputs if name not in outputs]
        if missing:
            raise ConfigError(
                f"SelfDistillationLoss: the model returns no {missing[0]!r}. It is for model.type=SelfDistillation."
            )
        if self.teacher_temperature is None:
            raise ConfigError(
                "SelfDistillationLoss: nothing moves the teacher. Add dict(type='SelfDistillationSchedules') to "
                "train.hooks."
            )
        teacher, student = len(outputs["teacher_logits"]), len(outputs["student_logits"])
        if teacher != 2 * num_images or student % num_images:
            raise ConfigError(
                f"SelfDistillationLoss: got {teacher} large and {student - teacher} small views of {num_images} "
                "images; expected two large views of each image and the same number of small ones. Set "
                "data.train.transforms=dict(type='MultiCrop')."
            )

    def _measure(self, teacher: Tensor, features: Tensor) -> None:
        count = torch.tensor(float(len(features)), device=teacher.device)
        values = {"teacher_entropy": entropy(teacher).mean()}
        if teacher.shape[1] > 1:  # two views of one image are alike, which is no collapse
            values["mean_entropy"] = entropy(teacher.mean((0, 1)))
            values["feature_spread"] = F.normalize(features, dim=-1).std(0).mean() * math.sqrt(features.shape[-1])
        for name, value in values.items():
            self.meters[name].add(value * count, count)


@HOOKS.register
@dataclass(eq=False, kw_only=True)
class SelfDistillationSchedules(Hook):
    """Train a student and its teacher as DINO does (Caron et al. 2021, https://arxiv.org/abs/2104.14294).

    After each step the teacher's parameters move towards the student's by 1 - momentum, and the center of its outputs
    moves towards their mean. Momentum and weight decay follow half a cosine over the steps of the run, the teacher's
    temperature is one for each epoch. All depend only on the progress, so a resumed run continues as if it had not been
    interrupted.

    Args:
        momentum: the teacher's at the first step; 1 at the end. For batches smaller than 1024 images it is larger, such
            as 0.9995 for 256.
        teacher_temperature: from `warmup_epochs` on; above 0.07 it is unstable.
        warmup_teacher_temperature: in the first epoch, from which it rises linearly.
        warmup_epochs: number of epochs of that rise.
        final_weight_decay: the optimizer's at the end, in the groups that have any; None: it is constant.
        clip_parameter_norm: maximum norm of the gradient of each parameter by itself; None: no clipping.
        frozen_last_layer_epochs: number of epochs in which the last layer is not trained.
    Raises:
        ConfigError: an argument is out of range.
    """

    momentum: float = 0.996
    teacher_temperature: float = 0.04
    warmup_teacher_temperature: float = 0.04
    warmup_epochs: int = 0
    final_weight_decay: float | None = 0.4
    clip_parameter_norm: float | None = 3.0
    frozen_last_layer_epochs: int = 1

    def __post_init__(self):
        ranges = {
            "momentum": (0 <= self.momentum <= 1, "0 to 1"),
            "teacher_temperature": (self.teacher_temperature > 0, "above 0"),
            "warmup_teacher_temperature": (self.warmup_teacher_temperature > 0, "above 0"),
            "warmup_epochs": (self.warmup_epochs >= 0, "at least 0"),
            "final_weight_decay": ((self.final_weight_decay or 0) >= 0, "at least 0"),
            "clip_parameter_norm": (self.clip_parameter_norm is None or self.clip_parameter_norm > 0, "above 0"),
            "frozen_last_layer_epochs": (self.frozen_last_layer_epochs >= 0, "at least 0"),
        }
        for name, (is_in_range, expected) in ranges.items():
            if not is_in_range:
                raise ConfigError(f"SelfDistillationSchedules: {name}={getattr(self, name)}: expected {expected}.")
        self._has_collapsed = False

    @contextmanager
    def during_training(self, run: Any) -> Iterator[None]:
        """See `Hook`.

        Raises:
            ConfigError: the model or its criterion has no teacher.
        """
        for part, expected in ((run.model, SelfDistillation), (run.criterion, SelfDistillationLoss)):
            if not isinstance(part, expected):
                raise ConfigError(
                    f"train.hooks: SelfDistillationSchedules: {type(part).__name__} has no teacher. It is for "
                    "model.type=SelfDistillation with criterion.type=SelfDistillationLoss."
                )
        for group in run.optimizer.param_groups:
            group.setdefault("initial_weight_decay", group["weight_decay"])  # checkpoints keep it
        handle = run.optimizer.register_step_pre_hook(lambda *_: self._change_gradients(run))
        try:
            yield
        finally:
            handle.remove()

    def before_epoch(self, run: Any) -> None:
        """Set the epoch's temperature, and the weight decay of the first step."""
        run.criterion.teacher_temperature = self.temperature(run.progress.epoch)
        self._set_weight_decay(run)

    def after_step(self, run: Any, step: Any) -> None:
        """Move the teacher and the center, and set the weight decay of the next step; not after a skipped one."""
        if step.decision.take:
            momentum = cosine(self.momentum, 1.0, run.progress.step - 1, total_steps(run))
            run.model.update_teacher(momentum)
            run.model.update_center(run.criterion.batch_means, run.criterion.center_momentum)
            self._set_weight_decay(run)
        run.criterion.batch_means.clear()

    def after_epoch(self, run: Any) -> None:
        """Report once if the features have collapsed."""
        values = {name: meter.compute(run.device)[0] for name, meter in run.meters.items()}
        is_early = run.progress.step < _MIN_PROGRESS * total_steps(run)
        message = None if is_early or self._has_collapsed else self.describe_collapse(values, run.model.center.numel())
        if message is not None:
            self._has_collapsed = True
            if is_main():
                logger.warning("%s", message)

    def temperature(self, epoch: int) -> float:
        """Return the teacher's temperature in an epoch, counted from 0."""
        if epoch >= self.warmup_epochs:
            return self.teacher_temperature
        fraction = epoch / max(1, self.warmup_epochs - 1)
        start = self.warmup_teacher_temperature
        return start + fraction * (self.teacher_temperature - start)

    def describe_collapse(self, values: dict[str, float], num_prototypes: int) -> str | None:
        """Return a line about a collapse, with a remedy; None if the epoch's meters show none.

        Args:
            values: the meters of `SelfDistillationLoss`; nan for what batches of one image do not tell.
        """
        largest = math.log(num_prototypes)
        names = ("teacher_entropy", "mean_entropy", "feature_spread")
        teacher_entropy, mean_entropy, spread = (values[name] for name in names)
        if teacher_entropy > _UNIFORM * largest:
            what = f"the teacher's outputs are uniform (entropy {teacher_entropy:.4g} of at most ln K = {largest:.4g})"
            remedy = (
                "Set model.batch_norm=True, which keeps images apart in the head, lower the hook's "
                "teacher_temperature and warmup_teacher_temperature "
                f"(now {self.teacher_temperature:g} and {self.warmup_teacher_temperature:g}; published 0.04), or use "
                "fewer model.num_prototypes"
            )
        elif mean_entropy < _ONE * largest:
            what = f"the teacher gives all images the same prototype (entropy of the mean {mean_entropy:.2g})"
            remedy = (
                "Raise the hook's teacher_temperature, or lower criterion.center_momentum (published: 0.04 and 0.9)"
            )
        elif spread < _EQUAL:
            what = f"all images have nearly the same features (spread {spread:.2g}; 1 is even)"
            remedy = "Lower optimizer.lr, raise the hook's momentum, or train on more and more varied images"
        else:
            return None
        return f"self-distillation has collapsed: {what}, so nothing is learned. {remedy}, and start anew."

    def _set_weight_decay(self, run: Any) -> None:
        if self.final_weight_decay is None:
            return
        for group in run.optimizer.param_groups:
            if group["initial_weight_decay"] > 0:
                start = group["initial_weight_decay"]
                group["weight_decay"] = cosine(start, self.final_weight_decay, run.progress.step, total_steps(run))

    def _change_gradients(self, run: Any) -> None:
        """Clip the gradient of each parameter, and leave out those of the last layer while it is frozen."""
        if self.clip_parameter_norm is not None:
            gradients = [parameter.grad for parameter in run.parameters if parameter.grad is not None]
            norms = torch._foreach_norm(gradients)
            factors = [(self.clip_parameter_norm / (norm + 1e-6)).clamp(max=1.0) for norm in norms]
            torch._foreach_mul_(gradients, factors)
        if run.progress.epoch < self.frozen_last_layer_epochs:
            for parameter in run.model.last_layer():
                parameter.grad = None


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


def total_steps(run: Any) -> int:
    """Return the number of optimizer steps of a whole run."""
    return run.settings.epochs * run.settings.steps_per_epoch(len(run.loader))


def cosine(start: float, end: float, step: int, steps: int) -> float:
    """Return the value after `step` of `steps` steps along half a cosine from `start` to `end`."""
    return end + (start - end) * (1 + math.cos(math.pi * step / steps)) / 2


def entropy(probabilities: Tensor) -> Tensor:
    """Return the entropy in nats over the last axis."""
    return torch.special.entr(probabilities).sum(-1)
