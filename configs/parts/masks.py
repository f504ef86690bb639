"""Masks for a detector of boxes, with the weights of RF-DETR-Seg (https://arxiv.org/abs/2511.09554) and ECSeg
(https://arxiv.org/abs/2603.18739); those of classes and boxes stay."""

CRITERIA = {"SetCriterion": "BoxMaskCriterion", "DFINECriterion": "DFINEMaskCriterion"}
"""Criterion of boxes -> the same with masks."""


def with_masks(cfg, masks="BlockMasks", point_padding="border"):
    """Add masks to a detector's config: what predicts them, losses and costs, the data's polygons, and mask AP; changes
    `cfg` in place.

    Args:
        masks: what predicts them, as model.head.masks.
        point_padding: of the losses and of the costs.
    """
    padding = dict(point_padding=point_padding)
    cfg["model"]["head"]["masks"] = masks
    cfg["criterion"] = mask_criterion(cfg["criterion"], 5.0, losses=padding, costs=padding)
    for split in ("train", "val"):
        cfg["data"][split]["masks"] = True
    cfg["evaluator"]["iou_types"] = ["segm", "bbox"]
    return cfg


def mask_criterion(criterion, weight, losses, costs):
    """The criterion with losses of masks.

    Args:
        weight: of each of the two losses, and of each of the two costs.
        losses, costs: further arguments of the criterion and of its matcher.
    """
    matcher = criterion["matcher"] | dict(type="HungarianBoxMaskMatcher", cost_mask=weight, cost_dice=weight, **costs)
    weights = criterion["weights"] | dict(mask=weight, dice=weight)
    return criterion | dict(type=CRITERIA[criterion["type"]], weights=weights, matcher=matcher, **losses)
