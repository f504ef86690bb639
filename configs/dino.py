"""DINO on COCO 2017 (Zhang et al. 2022, https://arxiv.org/abs/2203.03605).

Two-stage Deformable DETR with box refinement, and the additions of DINO: contrastive denoising, mixed query selection,
look forward twice, and heads shared by all layers. The box noise of 1.0 is that of the original's training scripts; its
config file says 0.4. Five scales are the four and res2, at stride 4, which makes the encoder's tokens four times as
many. Swin (https://arxiv.org/abs/2103.14030) base and large start from ImageNet-22k at 384 pixels, with windows of 12.
On LVIS (Gupta et al. 2019, https://arxiv.org/abs/1908.03195), with its 1203 classes, images of rare classes are
repeated, and each step has class losses of 50 classes (Zhou et al. 2021, https://arxiv.org/abs/2103.07461).

Run:       torchrun --nproc-per-node 8 tools/train.py dino_r50_4scale    (16 GPUs with five scales)
Reference: the original README; of Swin tiny detrex's projects/dino/README.md, whose weights the model zoo lists.
Here: not yet run.
"""

from typing import Literal

from vitkit.configs.parts.coco import coco_detection
from vitkit.configs.parts.lvis import lvis_detection
from vitkit.configs.parts.masks import with_masks
from vitkit.configs.parts.swin import BACKBONES
from vitkit.errors import ConfigError

VARIANTS = {
    "dino_r50_4scale": (dict(), "49.0 box AP; 46,893,182 parameters with 91 classes"),
    "dino_r50_4scale_24ep": (dict(epochs=24), "50.4 box AP"),
    "dino_r50_4scale_36ep": (dict(epochs=36), "50.9 box AP"),
    "dino_r50_5scale": (dict(scales=5), "49.4 box AP; 47,255,806 parameters with 91 classes"),
    "dino_r50_5scale_24ep": (dict(scales=5, epochs=24), "51.3 box AP"),
    "dino_r50_5scale_36ep": (dict(scales=5, epochs=36), "51.2 box AP"),
    "dino_swin_tiny_4scale": (
        dict(backbone="swin_tiny"),
        "51.3 box AP with detrex's heads and positions; 47,436,216 parameters with 91 classes",
    ),
    "dino_swin_tiny_4scale_24ep": (dict(backbone="swin_tiny", epochs=24), "none published with 24 epochs"),
    "dino_swin_tiny_4scale_36ep": (dict(backbone="swin_tiny", epochs=36), "none published with 36 epochs"),
    "dino_swin_large_4scale": (dict(backbone="swin_large"), "56.8 box AP; 217,230,066 parameters with 91 classes"),
    "dino_swin_large_4scale_24ep": (dict(backbone="swin_large", epochs=24), "none published with 24 epochs"),
    "dino_swin_large_4scale_36ep": (dict(backbone="swin_large", epochs=36), "58.0 box AP"),
    "dino_r50_4scale_lvis": (dict(data="lvis"), "none published with this recipe on LVIS"),
    "dino_r50_4scale_masks": (
        dict(masks=True),
        "none published with these masks; 47,964,031 parameters with 91 classes",
    ),
}
"""Name -> arguments of `config`, and what is published."""

DROP_AT = {12: 11, 24: 20, 36: 30}
"""Epochs -> the epoch at which the rate drops."""


def config(
    backbone: Literal["r50", "swin_tiny", "swin_small", "swin_base", "swin_large"] = "r50",
    scales: Literal[4, 5] = 4,
    epochs: Literal[12, 24, 36] = 12,
    data: Literal["coco", "lvis"] = "coco",
    masks: bool = False,
):
    if masks and data == "lvis":
        raise ConfigError("masks are those of data=coco, as the losses of masks have no federated classes.")
    cfg = dict(
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
        schedule=dict(type="MultiStepLR", drop_at_epochs=[DROP_AT[epochs]]),
        evaluator=dict(type="CocoEvaluator", iou_types=["bbox"]),
        train=dict(epochs=epochs, clip_grad_norm=0.1, seed=42, reference_batch_size=16),
    )  # fmt: skip
    if backbone != "r50":
        cfg["model"]["backbone"] = dict(**BACKBONES[backbone], drop_path=0.2)
    if backbone == "swin_large":
        cfg["train"]["activation_checkpointing"] = True  # the original does so only for the backbone
    if data == "lvis":
        cfg["data"] = lvis_detection(images_per_gpu=2)
        cfg["criterion"]["federated_classes"] = 50
        cfg["evaluator"] = dict(type="LvisEvaluator", iou_types=["bbox"])
    if scales == 5:
        cfg["model"]["neck"].update(in_features=["res2", "res3", "res4", "res5"], num_levels=5)
        cfg["data"]["images_per_gpu"] = 1
    return with_masks(cfg) if masks else cfg
