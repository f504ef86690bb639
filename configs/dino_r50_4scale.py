"""DINO-R50 with four scales on COCO 2017, 12 epochs (Zhang et al. 2022, https://arxiv.org/abs/2203.03605).

Two-stage Deformable DETR with box refinement, and the additions of DINO: contrastive denoising, mixed query selection,
look forward twice, and heads shared by all layers. The box noise of 1.0 is that of the original's training scripts; its
config file says 0.4.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/dino_r50_4scale.py
Reference: 49.0 box AP at 12 epochs (original README). 46,893,182 parameters with 91 classes. Here: not yet run.
"""

from vitkit.configs.parts.coco import coco_detection


def config():
    return dict(
        model=dict(
            type="DINO", num_queries=900, num_detections=300,
            backbone=dict(type="ResNet", depth=50, norm="frozen_bn", frozen_stages=1),
            neck=dict(
                type="PyramidProjection", in_features=["res3", "res4", "res5"], out_channels=256, num_levels=4
            ),
            head=dict(
                type="DINOHead", d_model=256, num_heads=8, num_points=4, d_ffn=2048, dropout=0.0,
                num_encoder_layers=6, num_decoder_layers=6,
            ),
            training_queries=[
                dict(type="BoxDenoising", num_queries=100, contrastive=True, label_noise=0.5, box_noise=1.0),
            ],
        ),
        criterion=dict(
            type="SetCriterion", class_loss="focal",
            weights=dict(labels=1.0, l1=5.0, giou=2.0),
            matcher=dict(type="HungarianMatcher", activation="sigmoid", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0),
        ),
        data=coco_detection(images_per_gpu=2),
        optimizer=dict(type="AdamW", lr=1e-4, backbone_lr=1e-5, weight_decay=1e-4),
        schedule=dict(type="MultiStepLR", drop_at_epochs=[11]),
        evaluator=dict(type="CocoEvaluator", iou_types=["bbox"]),
        train=dict(epochs=12, clip_grad_norm=0.1, seed=42, reference_batch_size=16),
    )  # fmt: skip
