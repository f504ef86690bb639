"""The set prediction loss of DETR (https://arxiv.org/abs/2005.12872) and its successors."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from vitkit.distributed import RatioMeter
from vitkit.errors import ConfigError
from vitkit.kernels.whole_mask_losses import whole_mask_losses
from vitkit.losses.boxes import box_giou_loss, box_l1_loss
from vitkit.losses.class_losses import sigmoid_loss, sigmoid_settings
from vitkit.losses.set_terms import (
    SurplusWarning,
    check_weights,
    class_weight_sum,
    count_correct_classes,
    decoder_layers,
    layers_of_groups,
    matched_indices,
    mean_of_groups,
    normalizers,
    repeat_targets,
    set_cross_entropy,
)
from vitkit.ops.boxes import box_iou, cxcywh_to_xyxy
from vitkit.ops.masks import pad_masks
from vitkit.protocols import Criterion
from vitkit.registry import CRITERIA, MATCHERS, Spec
from vitkit.structures import DetectionTarget, Matches

TERMS = ("labels", "l1", "giou")
MASK_TERMS = ("mask", "dice")


class Layers(NamedTuple):
    """The outputs of L decoder layers, with what the loss needs to know about them."""

    prefixes: Sequence[str]
    """Prefixes of the layers' losses."""
    logits: Tensor
    """(L, B, Q, C) or, with "no object", (L, B, Q, C + 1); float32."""
    boxes: Tensor
    """(L, B, Q, 4) cxcywh float32."""
    targets: Sequence[DetectionTarget]

    @classmethod
    def of(cls, layers: Mapping[str, Mapping[str, Tensor]], targets: Sequence[DetectionTarget]) -> "Layers":
        """Stack the outputs of layers, a dict by prefix."""
        logits = torch.stack([layer["pred_logits"] for layer in layers.values()]).float()
        boxes = torch.stack([layer["pred_boxes"] for layer in layers.values()]).float()
        return cls(list(layers), logits, boxes, targets)


@CRITERIA.register
class SetCriterion(Criterion):
    """Class loss of every query, and L1 and GIoU losses of the matched ones, for every decoder layer.

    Each layer is matched separately and all layers have the same weight. `meters["matched_accuracy"]` counts how many
    of the last layer's matched queries predict their target's class.

    Args:
        matcher: a spec of the matcher (see `HungarianMatcher`), or the matcher.
        weights: the weight of each of the terms labels, l1, giou; and, for a model that predicts masks, of mask (focal)
            and dice, which are computed for its last layer.
        class_loss: "cross_entropy", whose last logit is "no object" (DETR); or a sigmoid loss of every class, divided
            by the number of targets: "focal" (Deformable DETR), or "varifocal" or "mal", which teach the class
            probability to reflect how well the box fits. See `class_losses`.
        no_object_weight: the weight of unmatched queries in the cross entropy; matched ones have 1.
        focal_alpha: for the focal loss, the weight of a matched query's class, all others having 1 - alpha (0.25 if
            None); for varifocal, the weight of negatives (0.75 if None); mal has none.
        focal_gamma: exponent by which a sigmoid loss down-weights well classified examples; if None 2, or 1.5 for mal.
    Raises:
        ConfigError: the class loss or a term is unknown, a term is missing, no_object_weight is not positive, the class
            loss does not have an argument that is set, or the matcher's costs are for other logits.
    """

    def __init__(
        self,
        matcher: Spec | nn.Module,
        weights: Mapping[Literal["labels", "l1", "giou", "mask", "dice"], float],
        *,
        class_loss: Literal["cross_entropy", "focal", "varifocal", "mal"] = "cross_entropy",
        no_object_weight: float | None = None,
        focal_alpha: float | None = None,
        focal_gamma: float | None = None,
    ):
        super().__init__()
        check_weights(weights, TERMS, optional=MASK_TERMS)
        self.sigmoid_settings = sigmoid_settings(class_loss, alpha=focal_alpha, gamma=focal_gamma)
        if class_loss == "cross_entropy" and not (no_object_weight or 0) > 0:
            raise ConfigError(
                f"criterion.no_object_weight: got {no_object_weight}; expected a positive number, since "
                "class_loss='cross_entropy' is for models with a class \"no object\" (DETR). Deformable DETR and DINO "
                "have a sigmoid per class: set class_loss to 'focal', 'varifocal' or 'mal'."
            )
        if class_loss != "cross_entropy" and no_object_weight is not None:
            raise ConfigError(
                f"criterion.no_object_weight={no_object_weight}: the {class_loss} loss has no such class. Leave it out."
            )
        self.matcher = MATCHERS.build(matcher)
        expected = "softmax" if class_loss == "cross_entropy" else "focal"
        class_cost = getattr(self.matcher, "class_cost", expected)
        if class_cost != expected:
            raise ConfigError(
                f"criterion.matcher.class_cost={class_cost!r} is for other logits than "
                f"criterion.class_loss={class_loss!r}: expected {expected!r}."
            )
        self.weights = dict(weights)
        self.class_loss = class_loss
        self.class_activation = "softmax" if class_loss == "cross_entropy" else "sigmoid"
        self.no_object_weight = no_object_weight
        self.meters = {"matched_accuracy": RatioMeter()}
        self._warn_of_surplus = SurplusWarning()

    def forward(self, outputs: Mapping[str, Any], targets: Sequence[DetectionTarget]) -> dict[str, Tensor]:
        """Match queries to targets, and compute the losses of every layer.

        Args:
            outputs: pred_logits (B, Q, C + 1), the last class being "no object", or (B, Q, C) for sigmoid losses;
                pred_boxes (B, Q, 4) cxcywh in 0..1; and optionally: aux_outputs, a list of such dicts for the earlier
                layers; enc_outputs, such a dict for the first of two stages, for which every target has class 0 (an
                object of any class); selected_outputs, such a dict for a first stage that distinguishes the classes;
                denoising, such a dict, with aux_outputs, for queries that are already matched, with the matches of a
                layer and num_groups, the number of times that each target is matched; groups, a list of such dicts for
                groups of queries that are matched separately like the usual ones; one_to_many, such a dict for queries
                that each target is matched to `repeats` times. With mask terms also pred_masks (B, Q, h, w) logits and
                input_size (height, width) that they cover.
            targets: B targets with labels in 0..C-1 and, for mask terms, masks (N, H, W) bool.
        Returns:
            Weighted scalars whose sum is the loss: `labels l1 giou` (`mask dice`) for the last layer, `aux0_labels ...`
            for the others, each averaged over the groups; `enc_labels ...` for the first stage; `many_labels ...
            many_aux0_labels ...` for one-to-many; `dn_labels ... dn_aux0_labels ...` for denoising. The keys are the
            same for any targets, and each term depends on the outputs even when it is zero.
        Raises:
            DataError: a label is out of range.
            ConfigError: mask terms have weights, but the model predicts no masks.
        """
        self._warn_of_surplus(targets, outputs["pred_logits"].shape[1])
        with torch.autocast(outputs["pred_logits"].device.type, enabled=False):
            accuracy = self.meters["matched_accuracy"]
            sets = self._matched_sets(outputs, targets)
            all_matches = self.matcher.match_all([layers[1:] for layers in sets])
            losses, normalizer = self._layer_losses(sets[0], all_matches[0], accuracy=accuracy)
            losses = mean_of_groups(losses)
            if "mask" in self.weights:
                for name, value in self._mask_losses(outputs, all_matches[0][0], targets).items():
                    losses[name] = self.weights[name] * value / normalizer
            for layers, matches in zip(sets[1:], all_matches[1:]):
                losses |= self._layer_losses(layers, matches)[0]
            if "denoising" in outputs:
                noised = outputs["denoising"]
                layers = {f"dn_{prefix}": layer for prefix, layer in decoder_layers(noised).items()}
                matches = [noised["matches"]] * len(layers)
                losses |= self._layer_losses(Layers.of(layers, targets), matches, copies=noised["num_groups"])[0]
        return losses

    def _matched_sets(self, outputs: Mapping[str, Any], targets: Sequence[DetectionTarget]) -> list[Layers]:
        """Return the sets of layers to be matched, the usual queries first."""
        sets = [Layers.of(layers_of_groups(outputs), targets)]
        if "enc_outputs" in outputs:
            objects = [{**target, "labels": torch.zeros_like(target["labels"])} for target in targets]
            sets.append(Layers.of({"enc_": outputs["enc_outputs"]}, objects))
        if "selected_outputs" in outputs:
            sets.append(Layers.of({"enc_": outputs["selected_outputs"]}, targets))
        if "one_to_many" in outputs:
            many = outputs["one_to_many"]
            layers = {f"many_{prefix}": layer for prefix, layer in decoder_layers(many).items()}
            sets.append(Layers.of(layers, repeat_targets(targets, many["repeats"])))
        return sets

    def _layer_losses(
        self, layers: Layers, matches: Matches, *, copies: int = 1, accuracy: RatioMeter | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the weighted losses of the layers, and the normaliser of sums over the matched queries.

        Args:
            copies: number of queries that each target is matched with.
            accuracy: meter that counts the first layer's matched queries that predict their target's class.
        """
        prefixes, logits, boxes, targets = layers
        counts = [len(target["labels"]) for target in targets]
        layer, image, query, target = matched_indices(matches, counts, logits.device)
        labels = torch.cat([t["labels"] for t in targets])[target]  # (L, M)
        target_boxes = torch.cat([t["boxes_cxcywh"] for t in targets]).float()[target]  # (L, M, 4)
        matched_boxes = boxes[layer, image, query]
        if accuracy is not None:
            count_correct_classes(accuracy, logits[0, image[0], query[0]], labels[0])

        num_queries, num_matched = logits[0, ..., 0].numel(), labels.shape[1]
        class_weights = class_weight_sum(num_queries, num_matched, self.no_object_weight or 0)
        class_normalizer, box_normalizer = normalizers(
            class_weights, sum(counts), logits.device, training=self.training
        )
        box_normalizer = copies * box_normalizer
        where = (layer, image, query)
        if self.class_loss == "cross_entropy":
            losses = set_cross_entropy(logits, where, labels, no_object_weight=self.no_object_weight)
            class_losses = losses / class_normalizer.clamp(min=1e-6)  # 0 if no rank has queries to denoise
        else:
            ious = box_iou(cxcywh_to_xyxy(matched_boxes.detach()), cxcywh_to_xyxy(target_boxes))
            losses = sigmoid_loss(self.class_loss, logits, where, labels, ious, **self.sigmoid_settings)
            class_losses = losses / box_normalizer
        terms = {
            "labels": class_losses,
            "l1": box_l1_loss(matched_boxes, target_boxes).sum(1) / box_normalizer,
            "giou": box_giou_loss(matched_boxes, target_boxes).sum(1) / box_normalizer,
        }
        losses = {
            f"{prefix}{name}": self.weights[name] * terms[name][i]
            for i, prefix in enumerate(prefixes)
            for name in TERMS
        }
        return losses, box_normalizer

    def _mask_losses(
        self, layer: Mapping[str, Any], matches: Sequence[tuple[Tensor, Tensor]], targets: Sequence[DetectionTarget]
    ) -> dict[str, Tensor]:
        """Return the mask terms of one layer as sums over its matched queries, for full masks at the input's size."""
        if "pred_masks" not in layer:
            raise ConfigError(
                "criterion.weights: mask and dice are of a model that predicts masks (model.type=DETRSegmentation); "
                "this one does not. Leave them out."
            )
        masks = layer["pred_masks"].float()
        _, image, query, target = matched_indices([matches], [len(t["labels"]) for t in targets], masks.device)
        if not query.numel():
            return dict.fromkeys(MASK_TERMS, 0.0 * masks.sum())
        target_masks = torch.cat([pad_masks(t["masks"], layer["input_size"]) for t in targets])
        focal, dice = whole_mask_losses(masks[image[0], query[0]], target_masks[target[0]])
        return {"mask": focal.sum(), "dice": dice.sum()}
