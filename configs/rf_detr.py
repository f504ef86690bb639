"""RF-DETR, RF-DETR-Seg and RF-DETR's preview of keypoints on COCO 2017 (Robinson et al. 2025,
https://arxiv.org/abs/2511.09554).

The original starts from weights that it pre-trained on Objects365 and does not publish; training here starts from
DINOv2's. Its rates decrease from block to block of the backbone, below a last norm with the rate of 0.7^2 of 1.5e-4;
here, the last norm has 0.8 of that. The scales of the backbone's branches have weight decay there, and none here.

With keypoints, a training step takes 2.8 times that of the same network without (two images, one thread), as all 13
groups of queries have points.

Run:       torchrun --nproc-per-node 4 tools/train.py rf_detr_n_coco
Reference: the original README; parameters are with 91 classes and 13 groups. Here: not yet run.
"""

from typing import Literal

from vitkit.configs.parts.coco import coco_detection
from vitkit.configs.parts.coco_instance import coco_instance
from vitkit.configs.parts.coco_keypoints import coco_keypoints
from vitkit.configs.parts.masks import mask_criterion

VARIANTS = {
    "rf_detr_n_coco": (dict(size="n"), "48.4 box AP, 67.6 AP50; 30,466,914 parameters"),
    "rf_detr_s_coco": (dict(size="s"), "53.0 box AP, 72.1 AP50; 32,110,786 parameters"),
    "rf_detr_m_coco": (dict(size="m"), "54.7 box AP, 73.6 AP50; 33,687,074 parameters"),
    "rf_detr_l_coco": (dict(size="l"), "56.5 box AP, 75.1 AP50; 33,932,834 parameters"),
    "rf_detr_seg_n_coco": (dict(size="n", masks=True), "40.3 mask AP, 63.0 AP50; 33,577,091 parameters"),
    "rf_detr_seg_s_coco": (dict(size="s", masks=True), "43.1 mask AP, 66.2 AP50; 33,710,723 parameters"),
    "rf_detr_seg_m_coco": (dict(size="m", masks=True), "45.3 mask AP, 68.4 AP50; 35,693,875 parameters"),
    "rf_detr_seg_l_coco": (dict(size="l", masks=True), "47.1 mask AP, 70.5 AP50; 35,873,587 parameters"),
    "rf_detr_keypoints_coco": (dict(size="x", keypoints=True), "71.8 keypoint AP; 41,044,086 parameters"),
}
"""Name -> arguments of `config`, and what is published."""

SIZES = {
    "n": dict(resolution=384, num_decoder_layers=2),
    "s": dict(resolution=512, num_decoder_layers=3),
    "m": dict(resolution=576, num_decoder_layers=4),
    "l": dict(resolution=704, num_decoder_layers=4),
}
"""Size -> the side of the squares in pixels, and the decoder's layers."""

SEG_SIZES = {
    "n": dict(resolution=312, num_decoder_layers=4, num_queries=100, num_windows=1),
    "s": dict(resolution=384, num_decoder_layers=4, num_queries=100, num_windows=2),
    "m": dict(resolution=432, num_decoder_layers=5, num_queries=200, num_windows=2),
    "l": dict(resolution=504, num_decoder_layers=5, num_queries=200, num_windows=2),
}
"""Size with masks -> also its queries, and the windows of the backbone along a side."""

KEYPOINT_SIZES = {"x": dict(resolution=576, num_decoder_layers=4, num_queries=100, num_windows=2)}
"""The same with keypoints; there is one size."""


def config(size: Literal["n", "s", "m", "l", "x"] = "n", masks: bool = False, keypoints: bool = False):
    boxes = {name: dict(num_queries=300, num_windows=2, **sizes) for name, sizes in SIZES.items()}
    sizes = (SEG_SIZES if masks else KEYPOINT_SIZES if keypoints else boxes)[size]
    resolution, num_queries, num_windows = sizes["resolution"], sizes["num_queries"], sizes["num_windows"]
    patch_size = 12 if masks or keypoints else 16
    coco = coco_instance if masks else coco_keypoints if keypoints else coco_detection
    costs = dict(activation="sigmoid", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0)
    cfg = dict(
        model=dict(
            type="RFDETR", num_queries=num_queries, num_detections=num_queries,
            backbone=dict(
                type="WindowedViT", patch_size=patch_size, d_model=384, depth=12, num_heads=6, image_size=resolution,
                num_windows=num_windows, global_blocks=[3, 6, 9],
                out_features=["block3", "block6", "block9", "block12"], pretrained=True,
            ),
            neck=dict(type="C2fProjection", out_channels=256),
            head=dict(
                type="RFDETRHead", d_model=256, num_heads=8, num_cross_heads=16, num_points=2, d_ffn=2048, dropout=0.0,
                num_decoder_layers=sizes["num_decoder_layers"], masks=masks,
            ),
            training_queries=[dict(type="QueryGroups", groups=13)],
        ),
        criterion=dict(
            type="SetCriterion", class_loss="iou_aware",
            weights=dict(labels=1.0, l1=5.0, giou=2.0),
            matcher=dict(type="HungarianMatcher", **costs),
        ),
        data=in_squares(coco(4), resolution, step=patch_size * num_windows),
        optimizer=dict(
            type="AdamW", lr=1e-4, weight_decay=1e-4, lr_multipliers={"head.decoder.": 0.7},
            # 1.5e-4 * 0.7^2 * 0.8: the original counts one layer more between the last block and the rest.
            backbone_lr=5.88e-5, layer_decay=0.8,
            no_weight_decay=["backbone.vectors", "pos_embed", "cls_token", "patch_embed"],
        ),
        schedule=dict(type="ConstantLR"),
        evaluator=dict(type="CocoEvaluator", iou_types=["bbox"], max_dets=500),
        train=dict(
            epochs=100, precision="auto", clip_grad_norm=0.1, seed=42, reference_batch_size=16, ema_decay=0.993,
            ema_ramp_steps=100,
        ),
    )  # fmt: skip
    if masks:
        cfg["model"]["type"] = "RFDETRSeg"
        # The original's settings say 5 for the class loss, which takes effect as 1 (version 1.11.2 states it so).
        per_point = dict(pixels_per_point=16)
        losses = dict(per_point, oversample=3.0, importance=0.75)
        cfg["criterion"] = mask_criterion(cfg["criterion"], 5.0, losses=losses, costs=per_point)
        cfg["evaluator"]["iou_types"] = ["segm", "bbox"]
        cfg["train"]["best_metric"] = "segm/AP"
    if keypoints:
        cfg["model"] |= dict(type="RFDETRKeypoints", num_keypoints=17, score_uncertainty=0.2)
        cfg["model"]["neck"]["type"] = "C2fProjectionPair"
        points = {f"keypoint_{name}": 1.0 for name in ("l1", "findable", "visible", "nll")}
        cfg["criterion"] = dict(
            type="BoxKeypointCriterion", class_loss="iou_aware", weights=dict(labels=2.0, l1=5.0, giou=2.0, **points),
            matcher=dict(
                type="HungarianBoxKeypointMatcher", **costs, **{f"cost_{name}": cost for name, cost in points.items()}
            ),
        )  # fmt: skip
        # What the original's decoder has, and so its rate.
        rates = cfg["optimizer"]["lr_multipliers"]
        rates |= {"head.keypoint_head.layers.": 0.7, "head.keypoint_head.positions": 0.7}
        cfg["evaluator"]["iou_types"] = ["keypoints", "bbox"]
        cfg["train"]["best_metric"] = "keypoints/AP"
    return cfg


def in_squares(data, resolution, step):
    """Train on flipped images, half of them cropped, in batches of squares of several sizes; changes `data` in place.

    Args:
        step: difference between two sizes; the least side is two of it.
    """
    data["train"]["transforms"] = dict(type="DETRTrainTransforms", scales=[resolution], max_size=2 * resolution)
    data["val"]["transforms"] = dict(type="EvalResize", size=[resolution, resolution])
    data["aspect_ratio_grouping"] = False
    base = resolution // step
    data["squares"] = dict(sizes=[step * n for n in range(max(base - 5, 2), base + 6)])
    return data
