"""DETR on COCO 2017 (Carion et al. 2020, https://arxiv.org/abs/2005.12872); detr_r50.py is the one to read first.

DC5 dilates the last stage of the backbone, which doubles the resolution of the transformer's input; one image per GPU,
as in the original. Panoptic segmentation takes two steps (section 4.4): DETR on the boxes of things and stuff, then a
mask head on that DETR, which is frozen.

Run:       torchrun --nproc-per-node 8 tools/train.py detr_r101
           torchrun --nproc-per-node 8 tools/train.py detr:task=panoptic_boxes,backbone=r101
           torchrun --nproc-per-node 8 tools/train.py detr_r101_panoptic --init runs/detr_panoptic_boxes_r101/best.pth
           LR-Net has no published weights: train lrnet50_in1k first, and set model.backbone.pretrained=FILE.
Reference: the original README, at 500 epochs with a drop at 400, and the paper's table 1. Nothing is published for the
           last four backbones with this recipe, which is that of DETR-R50.
Here:      not yet run to the end.
"""

from typing import Literal

from vitkit.configs.detr_r50 import config as detr_r50
from vitkit.configs.parts.coco_panoptic import RAW_IDS, coco_panoptic_multi_scale
from vitkit.errors import ConfigError

VARIANTS = {
    "detr_r50_dc5": (dict(dc5=True), "43.3 box AP; 41.5 M parameters, 187 GMACs"),
    "detr_r101": (dict(backbone="r101"), "43.5 box AP; 60.5 M parameters, 152 GMACs"),
    "detr_r101_dc5": (dict(backbone="r101", dc5=True), "44.9 box AP; 60.5 M parameters, 253 GMACs"),
    "detr_r50_panoptic_boxes": (
        dict(task="panoptic_boxes"),
        "none published for this step; with the mask head 38.8 box AP of the things",
    ),
    "detr_r50_panoptic": (
        dict(task="panoptic"),
        "38.8 box AP, 31.1 mask AP, 43.4 PQ; 42.9 M parameters with 250 classes",
    ),
    "detr_r50_dc5_panoptic": (
        dict(task="panoptic", dc5=True),
        "40.2 box AP, 31.9 mask AP, 44.6 PQ; 42.9 M parameters with 250 classes",
    ),
    "detr_r101_panoptic": (
        dict(task="panoptic", backbone="r101"),
        "40.1 box AP, 33.0 mask AP, 45.1 PQ; 61.8 M parameters with 250 classes",
    ),
    "detr_swin_tiny": (dict(backbone="swin_tiny"), "none published"),
    "detr_mvitv2_tiny": (dict(backbone="mvitv2_tiny"), "none published"),
    "detr_vit_b16": (dict(backbone="vit_b16"), "none published; one map of stride 16, the blocks attend globally"),
    "detr_lrnet50": (dict(backbone="lrnet50"), "none published"),
}
"""Name -> arguments of `config`, and what is published."""

BACKBONES = {
    "r50": dict(type="ResNet", depth=50, norm="frozen_bn", frozen_stages=1),
    "r101": dict(type="ResNet", depth=101, norm="frozen_bn", frozen_stages=1),
    "swin_tiny": dict(type="swin_tiny", pretrained=True),
    "mvitv2_tiny": dict(type="mvitv2_tiny", pretrained=True, drop_path=0.2),
    "vit_b16": dict(type="vit_base_patch16", pretrained=True, drop_path=0.1),
    "lrnet50": dict(type="lrnet50"),
}


def config(
    backbone: Literal["r50", "r101", "swin_tiny", "mvitv2_tiny", "vit_b16", "lrnet50"] = "r50",
    task: Literal["boxes", "panoptic_boxes", "panoptic"] = "boxes",
    dc5: bool = False,
):
    cfg = detr_r50()
    cfg["model"]["backbone"] = dict(BACKBONES[backbone])
    if dc5:
        if backbone not in ("r50", "r101"):
            raise ConfigError(f"dc5: dilates the last stage of r50 or r101; {backbone} has none to dilate.")
        cfg["model"]["backbone"]["dilation"] = True
        if task == "boxes":
            cfg["data"]["images_per_gpu"] = 1
            cfg["train"]["accumulate"] = 2  # 16 images per step on 8 GPUs, as without dilation
    if task != "boxes":
        cfg["data"] = coco_panoptic_multi_scale(images_per_gpu=2)
        cfg["schedule"] = dict(type="MultiStepLR", drop_at_epochs=[200])
        cfg["train"]["epochs"] = 300
    if task == "panoptic":
        cfg["model"].update(type="DETRSegmentation", freeze_detr=True, tasks=["panoptic", "instance"], **RAW_IDS)
        cfg["criterion"]["weights"].update(mask=1.0, dice=1.0)
        cfg["schedule"] = dict(type="MultiStepLR", drop_at_epochs=[15])
        cfg["evaluator"] = dict(
            type="CombinedEvaluator",
            evaluator=[dict(type="PanopticEvaluator"), dict(type="CocoEvaluator", iou_types=["bbox", "segm"])],
        )
        cfg["train"].update(epochs=25, best_metric="PQ")
    return cfg
