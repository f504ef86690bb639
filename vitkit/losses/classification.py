"""The loss of image classification."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.distributed import RatioMeter
from vitkit.errors import ConfigError, DataError
from vitkit.losses.class_weights import ClassWeights, make_weights_tensor
from vitkit.losses.matched import normalizers
from vitkit.protocols import Criterion
from vitkit.registry import CRITERIA


@CRITERIA.register
class ClassificationLoss(Criterion):
    """Cross entropy with labels, or with class weights if images are mixed.

    `meters["accuracy"]` counts the images whose most probable class is correct; for mixed images, that of the largest
    weight.

    Args:
        label_smoothing: part of each target that is spread over all classes (https://arxiv.org/abs/1512.00567); only
            used in training.
        class_weights: how much an image of each class weighs in the mean, see `ClassWeights`; None: 1.
    Raises:
        ConfigError: label_smoothing is negative, or 1 or more; or a class weight is not positive.
    """

    needs_outputs = ("logits",)

    def __init__(self, *, label_smoothing: float = 0.0, class_weights: ClassWeights | None = None):
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise ConfigError(f"label_smoothing={label_smoothing}: expected at least 0 and below 1.")
        self.label_smoothing = label_smoothing
        self.register_buffer("class_weights", make_weights_tensor(class_weights), persistent=False)
        self.meters = {"accuracy": RatioMeter()}

    def forward(self, outputs: Mapping[str, Tensor], targets: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Compute the loss.

        Args:
            outputs: logits (B, C).
            targets: B targets with `label` in 0..C-1, or with `class_weights` (C,) that sum to 1.
        Returns:
            cross_entropy: the mean over the batch, weighted by class if there are class weights.
        Raises:
            DataError: a label is out of range.
        """
        logits = outputs["logits"]
        smoothing = self.label_smoothing if self.training else 0.0
        with torch.autocast(logits.device.type, enabled=False):
            logits = logits.float()
            class_targets, labels = self._class_targets(targets, logits)
            if self.class_weights is None:
                # All ranks train on batches of equal size, so the mean of their gradients is that of the joined batch.
                loss = F.cross_entropy(logits, class_targets, label_smoothing=smoothing)
            else:
                loss = self._weighted_loss(logits, class_targets, smoothing)
        correct = (logits.detach().argmax(-1) == labels).sum()
        self.meters["accuracy"].add(correct, torch.full_like(correct, len(targets)))
        return {"cross_entropy": loss}

    def count(self, targets: Sequence[Mapping[str, Any]]) -> float:
        """Return the number of images, or the sum of the weights of their classes."""
        if self.class_weights is None:
            return len(targets)
        weights = self.class_weights.cpu()
        mixed = "class_weights" in targets[0]
        return sum(float(t["class_weights"].cpu() @ weights if mixed else weights[t["label"]]) for t in targets)

    def _weighted_loss(self, logits: Tensor, class_targets: Tensor, smoothing: float) -> Tensor:
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
