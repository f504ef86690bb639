"""Masks for a detector of boxes, with its own criterion: what RF-DETR-Seg (https://arxiv.org/abs/2511.09554) and ECSeg
(https://arxiv.org/abs/2603.18739) add to theirs."""

CRITERIA = {"SetCriterion": "BoxMaskCriterion", "DFINECriterion": "DFINEMaskCriterion"}
"""Criterion of boxes -> the same with masks."""


def with_masks(cfg, masks="BlockMasks", weight=5.0, point_padding="border", **losses):
    """Add masks to a detector's config: what predicts them, losses, costs, polygons of the data, and mask AP; changes
    `cfg` in place.

    Args:
        masks: what predicts them, "BlockMasks" or "PyramidMasks", as model.head.masks.
        weight: of each of the two losses, and of each of the two costs.
        point_padding, losses: of the criterion and of its matcher, see `DFINEMaskCriterion`; of the criterion alone.
    """
    cfg["model"]["head"]["masks"] = masks
    criterion = cfg["criterion"]
    criterion.update(type=CRITERIA[criterion["type"]], point_padding=point_padding, **losses)
    criterion["weights"].update(mask=weight, dice=weight)
    criterion["matcher"].update(
        type="HungarianBoxMaskMatcher", cost_mask=weight, cost_dice=weight, point_padding=point_padding
    )
    for split in ("train", "val"):
        cfg["data"][split]["masks"] = True
    cfg["evaluator"]["iou_types"] = ["segm", "bbox"]
    return cfg
