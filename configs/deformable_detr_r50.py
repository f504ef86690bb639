"""Deformable DETR-R50 on COCO 2017 (Zhu et al. 2021, https://arxiv.org/abs/2010.04159).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/deformable_detr_r50.py
Reference: 44.5 box AP at 50 epochs (original README). 39.8 M parameters (40,069,665 with 91 classes), 173
           GMACs (original README). Here: not yet run.
"""

from vitkit.configs.parts.coco import coco_detection


def config():
    return dict(
        model=dict(
            type="DeformableDETR", num_queries=300,
            backbone=dict(type="ResNet", depth=50, norm="frozen_bn", frozen_stages=1),
            neck=dict(
                type="PyramidProjection", in_features=["res3", "res4", "res5"], out_channels=256, num_levels=4
            ),
            head=dict(
                type="DeformableDETRHead", d_model=256, num_heads=8, num_points=4, d_ffn=1024, dropout=0.1,
                num_encoder_layers=6, num_decoder_layers=6,
            ),
        ),
        criterion=dict(
            type="SetCriterion", class_loss="focal",
            weights=dict(labels=2.0, l1=5.0, giou=2.0),
            matcher=dict(type="HungarianMatcher", activation="sigmoid", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0),
        ),
        data=coco_detection(images_per_gpu=4),
        optimizer=dict(
            type="AdamW", lr=2e-4, backbone_lr=2e-5, weight_decay=1e-4,
            lr_multipliers={"reference_points": 0.1, "sampling_offsets": 0.1},
        ),
        schedule=dict(type="MultiStepLR", drop_at_epochs=[40]),
        evaluator=dict(type="CocoEvaluator", iou_types=["bbox"]),
        train=dict(epochs=50, clip_grad_norm=0.1, seed=42, reference_batch_size=32),
    )  # fmt: skip
