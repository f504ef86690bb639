"""The loss of image classification."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.distributed import RatioMeter
from vitkit.errors import ConfigError, DataError
from vitkit.losses.class_weights import ClassWeights, make_weights_tensor
from vitkit.losses.matched import normalizers
from vitkit.protocols.criterion import Criterion
from vitkit.registry import CRITERIA, nearest


class DistillationOptions(TypedDict, total=False):
    """Options for learning from a teacher's logits; see `distillation_loss`."""

    kind: Literal["hard", "soft"]
    """"hard" (the default): the cross entropy with the teacher's most probable class; "soft": the divergence from its
    probabilities."""
    weight: float
    """The share of the distillation in the loss, alpha in DeiT, where the cross entropy has the rest; default 0.5. In
    timm, `distill_loss_weight` a and `task_loss_weight` b make a + b times the loss of weight a / (a + b)."""
    temperature: float
    """Of "soft": what the logits of both are divided by, tau in DeiT; the loss is multiplied by its square; default
    1."""
    divide_by: Literal["images", "elements"]
    """Of "soft": what the sum of the divergence is divided by. "images" (the default): the number of images, as in timm
    ("batchmean") and Hinton et al. 2015 (https://arxiv.org/abs/1503.02531); "elements": that of images times classes,
    as in DeiT's code, whose weight and temperature fit only this."""


def distillation_loss(
    logits: Tensor,
    teacher_logits: Tensor,
    *,
    kind: Literal["hard", "soft"] = "hard",
    temperature: float = 1.0,
    divide_by: Literal["images", "elements"] = "images",
) -> Tensor:
    """Compute the loss of a student against its teacher (Touvron et al. 2020, https://arxiv.org/abs/2012.12877).

    Args:
        logits, teacher_logits: (B, C), for the same images.
        kind, temperature, divide_by: see `DistillationOptions`.
    """
    if kind == "hard":
        return F.cross_entropy(logits, teacher_logits.argmax(-1))
    predicted, taught = ((x / temperature).log_softmax(-1) for x in (logits, teacher_logits))
    total = F.kl_div(predicted, taught, reduction="sum", log_target=True)
    return total * temperature**2 / (len(logits) if divide_by == "images" else logits.numel())


@CRITERIA.register
class ClassificationLoss(Criterion):
    """Cross entropy with labels, or with class weights if images are mixed.

    `meters["accuracy"]` counts the images whose most probable class is correct; for mixed images, that of the largest
    weight.

    Args:
        label_smoothing: part of each target that is spread over all classes (https://arxiv.org/abs/1512.00567); only
            used in training.
        class_weights: how much an image of each class weighs in the mean, see `ClassWeights`; None: 1.
        distillation: how the student also learns from a teacher in training, for `DistilledClassifier`; a dict of
            `DistillationOptions`. None: it does not.
    Raises:
        ConfigError: label_smoothing is negative, or 1 or more; a class weight is not positive; or an option of the
            distillation is unknown or out of range.
    """

    needs_outputs = ("logits",)

    def __init__(
        self,
        *,
        label_smoothing: float = 0.0,
        class_weights: ClassWeights | None = None,
        distillation: DistillationOptions | None = None,
    ):
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise ConfigError(f"label_smoothing={label_smoothing}: expected at least 0 and below 1.")
        self.label_smoothing = label_smoothing
        self.register_buffer("class_weights", make_weights_tensor(class_weights), persistent=False)
        self.meters = {"accuracy": RatioMeter()}
        self.distillation = None if distillation is None else _check_distillation(distillation)

    def forward(self, outputs: Mapping[str, Tensor], targets: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Compute the loss.

        Args:
            outputs: logits (B, C); with distillation, in training, also distillation_logits and teacher_logits (B, C).
            targets: B targets with `label` in 0..C-1, or with `class_weights` (C,) that sum to 1.
        Returns:
            cross_entropy: the mean over the batch, weighted by class if there are class weights,
            distillation: with distillation, in training; both are then multiplied by their shares.
        Raises:
            DataError: a label is out of range.
            ConfigError: only one of the criterion and the model has a teacher.
        """
        if ("teacher_logits" in outputs) != (self.distillation is not None and self.training):
            raise ConfigError(_TEACHER_MISSING if self.distillation else _DISTILLATION_MISSING)
        logits = outputs["logits"]
        smoothing = self.label_smoothing if self.training else 0.0
        with torch.autocast(logits.device.type, enabled=False):
            logits = logits.float()
            class_targets, labels = self._class_targets(targets, logits)
            if self.class_weights is None:
                # All ranks train on batches of equal size, so the mean of their gradients is that of the joined batch.
                loss = F.cross_entropy(logits, class_targets, label_smoothing=smoothing)
            else:
                loss = self._compute_weighted_loss(logits, class_targets, smoothing)
            losses = {"cross_entropy": loss}
            if self.distillation is not None and self.training:
                share, options = self.distillation
                pair = (outputs[name].float() for name in ("distillation_logits", "teacher_logits"))
                losses = {
                    "cross_entropy": (1 - share) * loss,
                    "distillation": share * distillation_loss(*pair, **options),
                }
        correct = (logits.detach().argmax(-1) == labels).sum()
        self.meters["accuracy"].add(correct, torch.full_like(correct, len(targets)))
        return losses

    def count(self, targets: Sequence[Mapping[str, Any]]) -> float:
        """Return the number of images, or the sum of the weights of their classes."""
        if self.class_weights is None:
            return len(targets)
        weights = self.class_weights.cpu()
        mixed = "class_weights" in targets[0]
        return sum(float(t["class_weights"].cpu() @ weights if mixed else weights[t["label"]]) for t in targets)

    def _compute_weighted_loss(self, logits: Tensor, class_targets: Tensor, smoothing: float) -> Tensor:
        """Return the cross entropy divided by the sum of the weights of the true classes, averaged over ranks."""
        weights = self.class_weights
        if len(weights) != logits.shape[-1]:
            raise ConfigError(f"class_weights: got {len(weights)}; the model has {logits.shape[-1]} classes.")
        total = F.cross_entropy(logits, class_targets, weights, label_smoothing=smoothing, reduction="sum")
        weight_sum = (class_targets @ weights if class_targets.is_floating_point() else weights[class_targets]).sum()
        normalizer, _ = normalizers(self, weight_sum, len(logits), logits.device)
        return total / normalizer

    def _class_targets(self, targets: Sequence[Mapping[str, Any]], logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the targets of the cross entropy, and each image's main class, (B,) int64."""
        if "class_weights" in targets[0]:
            weights = torch.stack([target["class_weights"] for target in targets])
            return weights, weights.argmax(-1)
        labels, num_classes = [target["label"] for target in targets], logits.shape[-1]
        if not 0 <= min(labels) <= max(labels) < num_classes:
            raise DataError(
                f"labels {min(labels)} to {max(labels)}, but the model has {num_classes} classes. Was it built for "
                "another dataset?"
            )
        labels = torch.tensor(labels).to(logits.device, non_blocking=True)
        return labels, labels


_TEACHER_MISSING = (
    "distillation: the model's outputs have no teacher_logits. Expected the model DistilledClassifier with a teacher, "
    "which a run loads (vitkit train)."
)
_DISTILLATION_MISSING = (
    "distillation: not set, so the model's teacher has no effect. Set criterion.distillation=\"dict(kind='hard')\", or "
    "use the model Classifier."
)


def _check_distillation(options: DistillationOptions) -> tuple[float, dict[str, Any]]:
    """Check a distillation's options; return its share of the loss, and the others, which `distillation_loss` takes."""
    choices = {"kind": ("hard", "soft"), "divide_by": ("images", "elements")}
    for name, value in options.items():
        if name not in DistillationOptions.__annotations__:
            raise ConfigError(
                f"distillation: unknown key {name!r}. {nearest(name, DistillationOptions.__annotations__)}"
            )
        if name in choices and value not in choices[name]:
            raise ConfigError(f"distillation.{name}={value!r}: unknown. {nearest(str(value), choices[name])}")
    others = dict(options)
    share, temperature = others.pop("weight", 0.5), options.get("temperature", 1.0)
    if not 0 <= share <= 1:
        raise ConfigError(f"distillation.weight={share}: expected 0 to 1, the share of the distillation in the loss.")
    if temperature <= 0:
        raise ConfigError(f"distillation.temperature={temperature}: expected above 0.")
    of_soft = sorted({"temperature", "divide_by"} & others.keys())
    if options.get("kind", "hard") == "hard" and of_soft:
        raise ConfigError(f"distillation.{of_soft[0]}: only kind='soft' has one. Leave it out, or set kind='soft'.")
    return share, others
