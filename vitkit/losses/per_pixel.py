"""The loss of models that classify each pixel independently."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.distributed import RatioMeter
from vitkit.errors import ConfigError, DataError
from vitkit.losses.class_weights import ClassWeights, make_weights_tensor
from vitkit.losses.matched import decoder_layers, normalizers
from vitkit.protocols.criterion import Criterion
from vitkit.registry import CRITERIA
from vitkit.structures import DetectionTarget, describe_image

_NO_CLASS = -1


@CRITERIA.register
class PerPixelCriterion(Criterion):
    """Mean cross entropy over the labeled pixels of all ranks, for every decoder layer or auxiliary classifier; and
    optionally the dice loss of the last layer, over the pixels of a batch (D-FINE-seg's).

    `meters["pixel_accuracy"]` counts the pixels whose class has the highest logit in the last layer.

    Args:
        class_weights: how much a pixel of each class weighs in the mean, see `ClassWeights`; None: 1.
        dice_weight: weight of the dice loss; 0 leaves it out.
        aux_weight: weight of the cross entropy of each of `aux_outputs`.
    Raises:
        ConfigError: a class weight is not positive, or another weight is negative.
    """

    needs_outputs = ("pred_semantic", "input_size")
    needs_targets = ("labels", "masks")

    def __init__(self, *, class_weights: ClassWeights | None = None, dice_weight: float = 0.0, aux_weight: float = 1.0):
        super().__init__()
        for name, weight in (("dice_weight", dice_weight), ("aux_weight", aux_weight)):
            if not weight >= 0:
                raise ConfigError(f"{name}: got {weight}; expected at least 0.")
        self.dice_weight, self.aux_weight = dice_weight, aux_weight
        self.register_buffer("class_weights", make_weights_tensor(class_weights), persistent=False)
        self.meters = {"pixel_accuracy": RatioMeter()}

    def count(self, targets: Sequence[DetectionTarget]) -> float:
        """Return the number of labeled pixels, or the sum of the weights of their classes."""
        if self.class_weights is None:
            return sum(int(target["masks"].any(0).sum()) for target in targets)
        weights, total = self.class_weights.cpu(), 0.0
        for target in targets:
            masks, labels = target["masks"].bool(), target["labels"].cpu().clamp(0, len(weights) - 1)
            areas = masks.flatten(1).sum(1).cpu()
            if areas.sum() > masks.any(0).sum():  # some overlap
                areas = torch.bincount(masks.byte().argmax(0)[masks.any(0)], minlength=len(masks)).cpu()
            total += float(areas.float() @ weights[labels])
        return total

    def forward(self, outputs: Mapping[str, Any], targets: Sequence[DetectionTarget]) -> dict[str, Tensor]:
        """Compute the losses.

        Args:
            outputs: pred_semantic (B, C, h, w) logits; input_size (height, width) that they cover; optionally
                aux_outputs, a list of such dicts for the earlier layers.
            targets: B targets with labels (N,) in 0..C-1 and masks (N, H, W) bool of the unpadded images; a pixel that
                is in no mask is ignored, and one in several masks belongs to the first.
        Returns:
            `semantic` and, if it has a weight, `dice` for the last layer, `aux0_semantic` ... for the others, scalars.
            The keys are the same for any targets, and each term depends on the outputs even when it is zero.
        Raises:
            DataError: a label is out of range.
        """
        size, device = outputs["input_size"], outputs["pred_semantic"].device
        labels = torch.stack([label_map(target, size) for target in targets])  # (B, H, W)
        num_labeled = _count_labeled(labels, targets, num_classes=outputs["pred_semantic"].shape[1])
        weight_sum = 0 if self.class_weights is None else self.class_weights[labels[labels != _NO_CLASS]].sum()
        weighted, unweighted = normalizers(self, weight_sum, num_labeled, device)
        normalizer = unweighted if self.class_weights is None else weighted.clamp(min=1e-6)
        losses = {}
        with torch.autocast(device.type, enabled=False):
            for prefix, layer in decoder_layers(outputs).items():
                logits = F.interpolate(layer["pred_semantic"].float(), size=size, mode="bilinear", align_corners=False)
                total = F.cross_entropy(logits, labels, self.class_weights, ignore_index=_NO_CLASS, reduction="sum")
                losses[f"{prefix}semantic"] = (self.aux_weight if prefix else 1.0) * total / normalizer
                if not prefix:
                    if self.dice_weight:
                        losses["dice"] = self.dice_weight * dice_loss(logits, labels)
                    correct = (logits.detach().argmax(1) == labels).sum()
                    self.meters["pixel_accuracy"].add(correct, torch.full_like(correct, num_labeled))
        return losses


def dice_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return 1 minus the dice coefficient of each class, averaged over all classes, a scalar.

    The coefficient's sums are over all labeled pixels of the batch; 1 is added to numerator and denominator, so that a
    class that is neither in the labels nor predicted has no loss.

    Args:
        logits: (B, C, H, W).
        labels: (B, H, W) int64, -1 for none.
    """
    probabilities = logits.softmax(1)
    labeled = (labels != _NO_CLASS).to(logits.dtype)
    classes = labels.clamp(min=0)
    correct = labeled * probabilities.gather(1, classes[:, None])[:, 0]
    # The sums of rows come first: adding millions of pixels to one value in turn would lose precision.
    rows = logits.new_zeros(*labels.shape[:2], logits.shape[1])
    overlap, size = (rows.scatter_add(2, classes, values).sum((0, 1)) for values in (correct, labeled))
    predicted = torch.einsum("bchw,bhw->bhc", probabilities, labeled).sum((0, 1))
    return 1 - ((2 * overlap + 1) / (predicted + size + 1)).mean()


def label_map(target: DetectionTarget, size: tuple[int, int]) -> Tensor:
    """Return (*size) int64, the class of every pixel, -1 for none; the map is padded at the right and bottom."""
    masks = target["masks"].bool()  # decoded once
    if not len(masks):
        return target["labels"].new_full(size, _NO_CLASS)
    height, width = masks.shape[-2:]
    labels = target["labels"][masks.byte().argmax(0)].masked_fill(~masks.any(0), _NO_CLASS)
    return F.pad(labels, (0, size[1] - width, 0, size[0] - height), value=_NO_CLASS)


def _count_labeled(labels: Tensor, targets: Sequence[DetectionTarget], *, num_classes: int) -> int:
    """Return the number of pixels with a class; raise a DataError if a class is out of range."""
    wrong = (labels < _NO_CLASS) | (labels >= num_classes)
    # One transfer from the device for both.
    num_wrong, num_labeled = torch.stack([wrong.sum(), (labels != _NO_CLASS).sum()]).tolist()
    if num_wrong:
        image = int(wrong.flatten(1).any(1).nonzero()[0])
        target = targets[image]
        raise DataError(
            f"cross entropy: {describe_image(image, target)} has labels {target['labels'].unique().tolist()}; "
            f"expected 0..{num_classes - 1}. Is the model's num_classes that of the dataset?"
        )
    return num_labeled
