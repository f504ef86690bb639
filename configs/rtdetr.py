"""RT-DETR on COCO 2017, 72 epochs (Zhao et al. 2023, https://arxiv.org/abs/2304.08069).

Stem and batch norms of ResNet-50 and -101 are frozen.

Run:       torchrun --nproc-per-node 4 tools/train.py rtdetr_r18
Reference: the original README, weights converted from Paddle's; parameters are with 80 classes. Here: not yet run.
"""

from typing import Literal

from vitkit.configs.parts.masks import with_masks
from vitkit.configs.parts.realtime import dfine_data

VARIANTS = {
    "rtdetr_r18": (dict(depth=18), "46.4 box AP, 63.7 AP50; 20,184,464 parameters"),
    "rtdetr_r34": (dict(depth=34), "48.9 box AP, 66.8 AP50; 31,441,668 parameters"),
    "rtdetr_r50": (dict(depth=50), "53.1 box AP, 71.2 AP50; 42,891,372 parameters"),
    "rtdetr_r101": (dict(depth=101), "54.3 box AP, 72.8 AP50; 76,556,268 parameters"),
    "rtdetr_r50_masks": (dict(depth=50, masks=True), "none published with masks; 43,962,221 parameters"),
}
"""Name -> arguments of `config`, and what is published."""

SIZES = {
    18: dict(channels=256, d_ffn=1024, expansion=0.5, num_decoder_layers=3),
    34: dict(channels=256, d_ffn=1024, expansion=0.5, num_decoder_layers=4),
    50: dict(channels=256, d_ffn=1024, expansion=1.0, num_decoder_layers=6),
    101: dict(channels=384, d_ffn=2048, expansion=1.0, num_decoder_layers=6),
}
"""Depth of the ResNet -> sizes of the hybrid encoder, and layers of the decoder."""


def config(depth: Literal[18, 34, 50, 101] = 50, masks: bool = False):
    sizes = SIZES[depth]
    cfg = dict(
        model=dict(
            type="RTDETR", num_queries=300,
            backbone=dict(
                type="ResNetVD", depth=depth, norm="bn" if depth < 50 else "frozen_bn", frozen_stem=depth >= 50,
                out_features=["res3", "res4", "res5"], pixel_mean=[0.0, 0.0, 0.0], pixel_std=[1.0, 1.0, 1.0],
            ),
            neck=dict(
                type="HybridEncoder", out_channels=sizes["channels"], num_heads=8, d_ffn=sizes["d_ffn"], num_blocks=3,
                expansion=sizes["expansion"],
            ),
            head=dict(
                type="RTDETRHead", d_model=256, num_heads=8, num_points=4, d_ffn=1024, dropout=0.0,
                num_decoder_layers=sizes["num_decoder_layers"],
            ),
            training_queries=[
                dict(
                    type="BoxDenoising", num_queries=100, contrastive=True, label_noise=0.5, box_noise=1.0, eps=1e-5,
                    padding=0.0,
                ),
            ],
        ),
        criterion=dict(
            type="SetCriterion", class_loss="varifocal",
            weights=dict(labels=1.0, l1=5.0, giou=2.0),
            matcher=dict(type="HungarianMatcher", activation="sigmoid", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0),
        ),
        # D-FINE took these augmentations and squares from RT-DETR, where they last to the end.
        data=dfine_data(strong_until=72, size_repeats=3),
        optimizer=dict(
            type="AdamW", lr=1e-4, backbone_lr=1e-6 if depth == 101 else 1e-5, weight_decay=1e-4,
            no_weight_decay=[] if depth == 101 else ["vectors"],
        ),
        schedule=dict(type="ConstantLR"),
        evaluator=dict(type="CocoEvaluator", iou_types=["bbox"]),
        train=dict(
            epochs=72, clip_grad_norm=0.1, ema_decay=0.9999, ema_ramp_steps=2000, seed=42, reference_batch_size=16,
        ),
    )  # fmt: skip
    return with_masks(cfg) if masks else cfg
