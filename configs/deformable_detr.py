"""Deformable DETR on COCO 2017, 50 epochs (Zhu et al. 2021, https://arxiv.org/abs/2010.04159).

The weights of the single-scale model with dilation (DC5) have the same names and shapes as of that without: be careful
which you load. Other backbones: Swin-T (https://arxiv.org/abs/2103.14030), and plain ViTs, DINOv2
(https://arxiv.org/abs/2304.07193), whose patches of 14 pixels are resampled to 16, and DINOv3
(https://arxiv.org/abs/2508.10104), with rates that decrease from block to block.

Run:       torchrun --nproc-per-node 8 tools/train.py deformable_detr_r50
           A frozen ViT: deformable_detr_dinov3_small model.backbone.frozen_stages=12
Reference: the original README. Nothing is published for other backbones with this recipe, which is that of R50.
Here:      not yet run.
"""

from typing import Literal

from vitkit.configs.parts.coco import coco_detection
from vitkit.configs.parts.dino import PLAIN_VITS, with_plain_vit
from vitkit.configs.parts.masks import with_masks
from vitkit.errors import ConfigError

VARIANTS = {
    "deformable_detr_r50": (dict(), "44.5 box AP; 39.8 M parameters (40,069,665 with 91 classes), 173 GMACs"),
    "deformable_detr_r50_single_scale": (dict(single_scale=True), "39.4 box AP"),
    "deformable_detr_r50_single_scale_dc5": (dict(single_scale=True, dc5=True), "41.5 box AP"),
    "deformable_detr_r50_refine": (dict(refine_boxes=True), "46.2 box AP"),
    "deformable_detr_r50_two_stage": (dict(refine_boxes=True, two_stage=True), "46.9 box AP"),
    "deformable_detr_swin_tiny": (dict(backbone="swin_tiny", refine_boxes=True), "none published"),
    "deformable_detr_dinov2_small": (
        dict(backbone="dinov2_small", refine_boxes=True, two_stage=True),
        "none published",
    ),
    "deformable_detr_dinov3_small": (
        dict(backbone="dinov3_small", refine_boxes=True, two_stage=True),
        "none published",
    ),
    "deformable_detr_r50_masks": (
        dict(refine_boxes=True, two_stage=True, masks=True),
        "none published with masks; 42,252,378 parameters with 91 classes",
    ),
}
"""Name -> arguments of `config`, and what is published."""


def config(
    backbone: Literal[
        "r50", "swin_tiny",
        "dinov2_small", "dinov2_base", "dinov2_large", "dinov3_small", "dinov3_base", "dinov3_large",
    ] = "r50",
    refine_boxes: bool = False,
    two_stage: bool = False,
    single_scale: bool = False,
    dc5: bool = False,
    masks: bool = False,
):  # fmt: skip
    """Refined boxes are the paper's iterative refinement; the single scale is res5, which DC5 dilates."""
    cfg = dict(
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
    if backbone != "r50" and (single_scale or dc5):
        raise ConfigError(f"single_scale and dc5 are those of backbone=r50, not of {backbone}.")
    if single_scale:
        cfg["model"]["neck"].update(in_features=["res5"], num_levels=1)
    if dc5:
        cfg["model"]["backbone"]["dilation"] = True
    if refine_boxes:
        cfg["model"]["head"]["refine_boxes"] = True
    if two_stage:
        cfg["model"]["head"]["two_stage"] = True
        cfg["optimizer"]["lr_multipliers"] = {"sampling_offsets": 0.1}  # no learned reference points
    if backbone == "swin_tiny":
        cfg["model"]["backbone"] = dict(type="swin_tiny", pretrained=True)
    elif backbone != "r50":
        with_plain_vit(cfg, PLAIN_VITS[backbone], strides=(8, 16, 32))
    return with_masks(cfg) if masks else cfg
