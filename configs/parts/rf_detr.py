"""What the sizes of RF-DETR and RF-DETR-Seg share on COCO 2017 (Robinson et al. 2025, https://arxiv.org/abs/2511.09554).

The original starts from weights that it pre-trained on Objects365 and does not publish; training here starts from
DINOv2's. Its rates decrease from block to block of the backbone, below a last norm with the rate of 0.7^2 of 1.5e-4;
here, the last norm has 0.8 of that. The scales of the backbone's branches have weight decay there, and none here.
"""

from vitkit.configs.parts.coco import coco_detection
from vitkit.configs.parts.coco_instance import coco_instance

COSTS = dict(activation="sigmoid", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0)


def rf_detr(resolution, num_decoder_layers, images_per_gpu=4):
    """RF-DETR for squares of `resolution` pixels."""
    return dict(
        model=dict(
            type="RFDETR", num_queries=300, num_detections=300,
            backbone=_backbone(resolution, patch_size=16, num_windows=2),
            neck=dict(type="C2fProjection", out_channels=256),
            head=_head(num_decoder_layers, masks=False),
            training_queries=[dict(type="QueryGroups", groups=13)],
        ),
        criterion=dict(
            type="SetCriterion", class_loss="iou_aware",
            weights=dict(labels=1.0, l1=5.0, giou=2.0),
            matcher=dict(type="HungarianMatcher", **COSTS),
        ),
        data=in_squares(coco_detection(images_per_gpu), resolution, step=32),
        optimizer=_optimizer(),
        schedule=dict(type="ConstantLR"),
        evaluator=dict(type="CocoEvaluator", iou_types=["bbox"], max_dets=500),
        train=_train(),
    )  # fmt: skip


def rf_detr_seg(resolution, num_decoder_layers, num_queries, num_windows=2, images_per_gpu=4):
    """RF-DETR-Seg for squares of `resolution` pixels."""
    return dict(
        model=dict(
            type="RFDETRSeg", num_queries=num_queries, num_detections=num_queries,
            backbone=_backbone(resolution, patch_size=12, num_windows=num_windows),
            neck=dict(type="C2fProjection", out_channels=256),
            head=_head(num_decoder_layers, masks=True),
            training_queries=[dict(type="QueryGroups", groups=13)],
        ),
        # The original's settings say 5 for the class loss, which takes effect as 1 (version 1.11.2 states it so).
        criterion=dict(
            type="BoxMaskCriterion", class_loss="iou_aware",
            weights=dict(labels=1.0, l1=5.0, giou=2.0, mask=5.0, dice=5.0),
            pixels_per_point=16, oversample=3.0, importance=0.75,
            matcher=dict(type="HungarianBoxMaskMatcher", **COSTS, cost_mask=5.0, cost_dice=5.0, pixels_per_point=16),
        ),
        data=in_squares(coco_instance(images_per_gpu), resolution, step=12 * num_windows),
        optimizer=_optimizer(),
        schedule=dict(type="ConstantLR"),
        evaluator=dict(type="CocoEvaluator", iou_types=["segm", "bbox"], max_dets=500),
        train=_train(),
    )  # fmt: skip


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


def _backbone(resolution, patch_size, num_windows):
    return dict(
        type="WindowedViT", patch_size=patch_size, d_model=384, depth=12, num_heads=6, image_size=resolution,
        num_windows=num_windows, global_blocks=[3, 6, 9], out_features=["block3", "block6", "block9", "block12"],
        pretrained=True,
    )  # fmt: skip


def _head(num_decoder_layers, masks):
    return dict(
        type="RFDETRHead", d_model=256, num_heads=8, num_cross_heads=16, num_points=2, d_ffn=2048, dropout=0.0,
        num_decoder_layers=num_decoder_layers, masks=masks,
    )  # fmt: skip


def _optimizer():
    return dict(
        type="AdamW", lr=1e-4, weight_decay=1e-4, lr_multipliers={"head.decoder.": 0.7},
        # 1.5e-4 * 0.7^2 * 0.8: the original counts one layer more between the last block and the rest.
        backbone_lr=5.88e-5, layer_decay=0.8,
        no_weight_decay=["backbone.vectors", "pos_embed", "cls_token", "patch_embed"],
    )  # fmt: skip


def _train():
    return dict(
        epochs=100, precision="auto", clip_grad_norm=0.1, seed=42, reference_batch_size=16, ema_decay=0.993,
        ema_ramp_steps=100,
    )  # fmt: skip
