"""The set prediction loss of DETR (https://arxiv.org/abs/2005.12872) and its successors."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.kernels.whole_mask_losses import whole_mask_losses
from vitkit.losses.class_losses import sigmoid_loss, sigmoid_settings
from vitkit.losses.class_weights import ClassWeights
from vitkit.losses.federated import NOT_COUNTED, make_class_frequencies, sample_classes
from vitkit.losses.matched import MatchedCriterion, MatchedLayers, SetLayers, normalizers
from vitkit.ops.boxes import box_iou, cxcywh_to_xyxy, generalized_box_iou
from vitkit.ops.masks import pad_masks
from vitkit.registry import CRITERIA, Spec
from vitkit.structures import DetectionTarget


@CRITERIA.register
class SetCriterion(MatchedCriterion):
    """Class loss of every query, and L1 and GIoU losses of the matched ones, for every decoder layer.

    Each layer is matched separately and all layers have the same weight. A subclass adds terms to `terms` and
    `box_losses`.

    Args:
        matcher: a spec of the matcher (see `HungarianMatcher`), or the matcher.
        weights: the weight of each of `terms`; and, for a model that predicts masks, of mask (focal) and dice, which
            are computed for its last layer.
        class_loss: "cross_entropy", whose last logit is "no object" (DETR); or a sigmoid loss of every class, divided
            by the number of targets: "focal" (Deformable DETR), or "varifocal", "mal" or "iou_aware", which teach the
            class probability to reflect how well the box fits. See `class_losses`.
        no_object_weight: the weight of unmatched queries in the cross entropy; matched ones have 1.
        focal_alpha: for the focal loss, the weight of a matched query's class, all others having 1 - alpha (0.25 if
            None); for varifocal, the weight of negatives (0.75 if None); for iou_aware, that of the prediction in the
            target (0.25 if None); mal has none.
        focal_gamma: exponent by which a sigmoid loss down-weights well classified examples; if None 2, or 1.5 for mal.
        class_weights: how much a query that is matched with each class weighs in the class loss, see `ClassWeights`;
            None: 1.
        federated_classes: with a sigmoid loss, the number of classes that count in the class loss of a training step:
            those of the batch's targets, and others drawn at random (see `federated`). None: all.
        image_counts: the number of training images of each class; classes are drawn in proportion to its square root.
            A run counts the images of data.train. None: all are drawn equally often.
    Raises:
        ConfigError: the class loss or a term is unknown, a term is missing, no_object_weight or a class weight is not
            positive, the class loss does not have an argument that is set, or the matcher's costs are for other logits.
    """

    terms = ("labels", "l1", "giou")
    mask_terms = ("mask", "dice")
    needs_outputs = ("pred_logits", "pred_boxes")
    further_targets: Sequence[str] = ()
    """Fields of targets that a subclass also needs."""

    def __init__(
        self,
        matcher: Spec | nn.Module,
        weights: Mapping[str, float],
        *,
        class_loss: Literal["cross_entropy", "focal", "varifocal", "mal", "iou_aware"] = "cross_entropy",
        no_object_weight: float | None = None,
        focal_alpha: float | None = None,
        focal_gamma: float | None = None,
        class_weights: ClassWeights | None = None,
        federated_classes: int | None = None,
        image_counts: Sequence[int] | None = None,
    ):
        self.check_arguments(weights)
        super().__init__(matcher, weights, no_object_weight or 0, class_weights)
        self.sigmoid_settings = sigmoid_settings(class_loss, alpha=focal_alpha, gamma=focal_gamma)
        if class_loss == "cross_entropy" and not (no_object_weight or 0) > 0:
            raise ConfigError(
                f"no_object_weight={no_object_weight}: expected a positive number, since class_loss='cross_entropy' is "
                'for models with a class "no object" (DETR). Deformable DETR and DINO have a sigmoid per class: set '
                "class_loss to 'focal', 'varifocal', 'mal' or 'iou_aware'."
            )
        if class_loss != "cross_entropy" and no_object_weight is not None:
            raise ConfigError(
                f'no_object_weight={no_object_weight}: class_loss={class_loss!r} has no class "no object". Leave it '
                "out."
            )
        self.class_activation = "softmax" if class_loss == "cross_entropy" else "sigmoid"
        if self.matcher.activation != self.class_activation:
            raise ConfigError(
                f"matcher.activation={self.matcher.activation!r} is for other logits than class_loss={class_loss!r}: "
                f"expected {self.class_activation!r}."
            )
        masks = ["masks"] if "mask" in weights else []
        self.needs_targets = ("labels", "boxes_cxcywh", *masks, *self.further_targets)
        self.class_loss = class_loss
        if federated_classes is not None and (class_loss == "cross_entropy" or federated_classes < 1):
            raise ConfigError(
                f"federated_classes={federated_classes}: expected a number from 1, and a sigmoid loss of every class; "
                f"class_loss is {class_loss!r}."
            )
        self.federated_classes = federated_classes
        self.register_buffer("class_frequencies", make_class_frequencies(image_counts), persistent=False)

    def forward(self, outputs: Mapping[str, Any], targets: Sequence[DetectionTarget]) -> dict[str, Tensor]:
        """Match queries to targets, and compute the losses of every layer.

        Args:
            outputs: pred_logits (B, Q, C + 1), the last class being "no object", or (B, Q, C) for sigmoid losses;
                pred_boxes (B, Q, 4) cxcywh in 0..1; and optionally aux_outputs, a list of such dicts for the earlier
                layers, and training_outputs, a list of `QuerySet` for queries that exist only in training. With
                mask terms also pred_masks (B, Q, h, w) logits and input_size (height, width) that they cover.
            targets: B targets with labels in 0..C-1 and, for mask terms, masks (N, H, W) bool.
        Returns:
            Weighted scalars whose sum is the loss: `labels l1 giou` for the last layer, `aux0_labels ...` for the
            others; for training_outputs with a name `NAME_labels ... NAME_aux0_labels ...`; `mask dice` for mask terms.
            Queries with the same name have one loss, the average. The keys are the same for any targets, and each term
            depends on the outputs even when it is zero.
        Raises:
            DataError: a label is out of range.
            ConfigError: mask terms have weights, but the model predicts no masks.
        """
        losses = {}
        with torch.autocast(outputs["pred_logits"].device.type, enabled=False):
            for sets in self.match(outputs, targets, **self.matching_inputs(outputs)):
                losses |= self.set_losses(sets, outputs)
        return losses

    def box_losses(self, pred_cxcywh: Tensor, target_cxcywh: Tensor) -> dict[str, Tensor]:
        """Return the loss of each matched box by term; both arguments are (L, M, 4) in 0..1, for L layers: (L, M)."""
        giou = generalized_box_iou(cxcywh_to_xyxy(pred_cxcywh), cxcywh_to_xyxy(target_cxcywh))
        return {"l1": (pred_cxcywh - target_cxcywh).abs().sum(-1), "giou": 1 - giou}

    def matching_inputs(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the matcher takes besides layers and targets."""
        return {}

    def set_losses(self, sets: SetLayers, outputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the weighted losses of each layer, averaged over the sets."""
        matched = self.collect_matched_layers(sets)
        losses = sets.name_losses(self.set_terms(sets, matched), self.weights)
        return losses | self.further_losses(sets, matched, outputs)

    def further_losses(self, sets: SetLayers, matched: MatchedLayers, outputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return weighted losses of some of the layers, besides those of classes and boxes: of the main queries' masks
        in the last layer, if they have weights."""
        return self._mask_losses(outputs, sets) if sets.is_main and "mask" in self.weights else {}

    def set_terms(self, sets: SetLayers, matched: MatchedLayers) -> dict[str, Tensor]:
        """Return the class and box losses by term, (L,) for all layers of all sets."""
        boxes = sets.stack("pred_boxes")[tuple(matched.indices)]  # (L, M, 4), all sets' layers
        target_boxes = torch.cat([t["boxes_cxcywh"] for t in sets.targets]).float()[matched.target]  # (L, M, 4)
        box_normalizer = sets.repeats * matched.num_targets
        if self.class_loss == "cross_entropy":
            class_losses = self.cross_entropy(matched)
        else:
            ious = box_iou(cxcywh_to_xyxy(boxes.detach()), cxcywh_to_xyxy(target_boxes))
            counted = replace(matched, logits=self._exclude_uncounted_classes(matched, sets))
            class_losses = sigmoid_loss(self.class_loss, counted, ious, **self.sigmoid_settings) / box_normalizer
        box_losses = self.box_losses(boxes, target_boxes)
        terms = {name: values.sum(1) / box_normalizer for name, values in box_losses.items()}
        return {"labels": class_losses, **terms}

    def _exclude_uncounted_classes(self, matched: MatchedLayers, sets: SetLayers) -> Tensor:
        """Return the logits, replaced by a value whose loss is 0 for classes that do not count in this step."""
        logits = matched.logits
        if self.federated_classes is None or not self.training or sets.class_agnostic:
            return logits
        frequencies = self.class_frequencies
        if frequencies is None:
            frequencies = logits.new_ones(logits.shape[-1])
        if len(frequencies) != logits.shape[-1]:
            raise ConfigError(
                f"image_counts: got {len(frequencies)} numbers of images; the model has {logits.shape[-1]} classes."
            )
        labels = torch.cat([target["labels"] for target in sets.targets])
        return logits.masked_fill(~sample_classes(labels, frequencies, self.federated_classes), NOT_COUNTED)

    def _mask_losses(self, outputs: Mapping[str, Any], sets: SetLayers) -> dict[str, Tensor]:
        """Return the weighted mask terms of the main queries' last layer, for full masks at the input's size."""
        if "pred_masks" not in outputs:
            raise ConfigError(
                "SetCriterion: weights has mask and dice, but the model predicts no masks. Leave them out of "
                "criterion.weights, or use a model that predicts masks (model.type=DETRSegmentation)."
            )
        masks = outputs["pred_masks"].float()
        _, image, query, target = sets.list_matched_indices()
        if query.numel():
            target_masks = torch.cat([pad_masks(t["masks"], outputs["input_size"]) for t in sets.targets])
            focal, dice = whole_mask_losses(masks[image[0], query[0]], target_masks[target[0]])
        else:
            focal = dice = 0.0 * masks
        _, num_targets = normalizers(self, 0, sum(sets.counts), masks.device)
        sums = {"mask": focal.sum(), "dice": dice.sum()}
        return {name: self.weights[name] * value / num_targets for name, value in sums.items()}
