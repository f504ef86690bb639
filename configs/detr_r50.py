"""DETR-R50 on COCO 2017 (Carion et al. 2020, https://arxiv.org/abs/2005.12872).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/detr_r50.py
Reference: 39.5 box AP at 150 epochs, 42.0 at 500, dropping at 400 (original README). 41.5 M parameters,
           86 GMACs (paper, table 1). Here: not yet run.
Weights:   detr-r50-e632da11.pth
"""

from vitkit.configs.parts.coco import coco_detection


def config():
    return dict(
        model=dict(
            type="DETR", num_queries=100,
            backbone=dict(type="ResNet", depth=50, norm="frozen_bn", frozen_stages=1),
            neck=dict(type="ChannelProjection", out_channels=256),
            head=dict(
                type="DETRHead", d_model=256, num_heads=8, d_ffn=2048, dropout=0.1,
                num_encoder_layers=6, num_decoder_layers=6,
            ),
        ),
        criterion=dict(
            type="SetCriterion", no_object_weight=0.1,
            weights=dict(labels=1.0, l1=5.0, giou=2.0),
            matcher=dict(type="HungarianMatcher", cost_labels=1.0, cost_l1=5.0, cost_giou=2.0),
        ),
        data=coco_detection(images_per_gpu=2),
        optimizer=dict(type="AdamW", lr=1e-4, backbone_lr=1e-5, weight_decay=1e-4),
        schedule=dict(type="MultiStepLR", drop_at_epochs=[100]),
        evaluator=dict(type="CocoEvaluator", iou_types=["bbox"]),
        train=dict(epochs=150, clip_grad_norm=0.1, seed=42, reference_batch_size=16),
    )  # fmt: skip
