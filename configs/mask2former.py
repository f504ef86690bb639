"""Mask2Former (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

With masked denoising it is MP-Former (Zhang et al. 2023, https://arxiv.org/abs/2303.07336): in training, as many noised
copies of the targets' classes and masks as fit into 100 queries are added to the learned ones. They attend within the
targets' masks in every layer, and have to predict the targets. Inference is the same.

On plain ViTs (DINOv2, https://arxiv.org/abs/2304.07193, and DINOv3, https://arxiv.org/abs/2508.10104) the recipe is
that of R50 with layer-wise rates.

Run:       torchrun --nproc-per-node 8 tools/train.py mask2former_r50_coco_instance train.precision=bf16
           The original trains in mixed precision. A frozen ViT: model.backbone.frozen_stages=12
           mask2former:backbone=swin_small,data=ade20k,task=instance is one of those that the table leaves out.
Data:      ADE20K is prepared by Mask2Former's prepare_ade20k_pan_seg.py and prepare_ade20k_ins_seg.py.
Reference: the original model zoo. AP is of masks; mIoU in parentheses is with several scales and flips; AP and mIoU of
           a panoptic model are of the same model. Swin base and large start from ImageNet-22k; base from ImageNet-1k
           (model.backbone.pretrained=true): 52.4 mIoU on ADE20K, 46.7 AP and 55.1 PQ on COCO.
Size:      in M parameters, and GMACs on COCO and for ADE20K's semantic classes (paper): R50 44.0, 226, 71; R101 63.0,
           293, 90; Swin tiny 47.4, 232, 74; small 68.7, 313, 98; base 106.9, 466, 223; large 215.5, 868, 403.
Differing: the published AP on Cityscapes is computed by Cityscapes' own script, here it is COCO's; that of panoptic
           models on COCO against the instances file, whose masks may overlap, here against the things of the panoptic
           maps. Batch norms that are trained (Cityscapes, and R101 on ADE20K's semantic classes) are synchronized over
           the GPUs there; here each GPU has its own statistics.
Here:      not yet run.
"""

from typing import Literal

from vitkit.configs.parts import ade20k, cityscapes
from vitkit.configs.parts.coco_instance import coco_instance
from vitkit.configs.parts.coco_panoptic import PANOPTIC as COCO_PANOPTIC
from vitkit.configs.parts.coco_panoptic import coco_panoptic
from vitkit.configs.parts.dino import PLAIN_VITS, with_plain_vit
from vitkit.configs.parts.panoptic import with_instances, with_panoptic
from vitkit.configs.parts.swin import with_swin
from vitkit.errors import ConfigError

TABLE = {
    ("coco", "instance"): [
        ("mask2former_r50_coco_instance", "r50", "43.7 AP"),
        ("mask2former_r101_coco_instance", "r101", "44.2 AP"),
        ("mask2former_swin_tiny_coco_instance", "swin_tiny", "45.0 AP"),
        ("mask2former_swin_small_coco_instance", "swin_small", "46.3 AP"),
        ("mask2former_swin_base_coco_instance", "swin_base", "48.1 AP"),
        ("mask2former_swin_large_coco_instance", "swin_large", "50.1 AP"),
        ("mask2former_dinov3_base_coco_instance", "dinov3_base", "none published"),
    ],
    ("coco", "panoptic"): [
        ("mask2former_r50_coco_panoptic", "r50", "51.9 PQ, 41.7 AP, 61.7 mIoU"),
        ("mask2former_r101_coco_panoptic", "r101", "52.6 PQ, 42.6 AP, 62.4 mIoU"),
        ("mask2former_swin_tiny_coco_panoptic", "swin_tiny", "53.2 PQ, 43.3 AP, 63.2 mIoU"),
        ("mask2former_swin_small_coco_panoptic", "swin_small", "54.6 PQ, 44.7 AP, 64.2 mIoU"),
        ("mask2former_swin_base_coco_panoptic", "swin_base", "56.4 PQ, 46.3 AP, 67.1 mIoU"),
        ("mask2former_swin_large_coco_panoptic", "swin_large", "57.8 PQ, 48.6 AP, 67.4 mIoU"),
    ],
    ("ade20k", "instance"): [
        ("mask2former_r50_ade20k_instance", "r50", "26.4 AP"),
        ("mask2former_r101_ade20k_instance", "r101", "none published"),
        ("mask2former_swin_tiny_ade20k_instance", "swin_tiny", "none published"),
        ("mask2former_swin_small_ade20k_instance", "swin_small", "none published"),
        ("mask2former_swin_base_ade20k_instance", "swin_base", "none published"),
        ("mask2former_swin_large_ade20k_instance", "swin_large", "34.9 AP"),
    ],
    ("ade20k", "panoptic"): [
        ("mask2former_r50_ade20k_panoptic", "r50", "39.7 PQ, 26.5 AP, 46.1 mIoU"),
        ("mask2former_r101_ade20k_panoptic", "r101", "none published"),
        ("mask2former_swin_tiny_ade20k_panoptic", "swin_tiny", "none published"),
        ("mask2former_swin_small_ade20k_panoptic", "swin_small", "none published"),
        ("mask2former_swin_base_ade20k_panoptic", "swin_base", "none published"),
        ("mask2former_swin_large_ade20k_panoptic", "swin_large", "48.1 PQ, 34.2 AP, 54.5 mIoU"),
    ],
    ("ade20k", "semantic"): [
        ("mask2former_r50_ade20k_semantic", "r50", "47.2 mIoU (49.2)"),
        ("mask2former_r101_ade20k_semantic", "r101", "47.8 mIoU (50.1)"),
        ("mask2former_swin_tiny_ade20k_semantic", "swin_tiny", "47.7 mIoU (49.6)"),
        ("mask2former_swin_small_ade20k_semantic", "swin_small", "51.3 mIoU (52.4)"),
        ("mask2former_swin_base_ade20k_semantic", "swin_base", "53.9 mIoU (55.1)"),
        ("mask2former_swin_large_ade20k_semantic", "swin_large", "56.1 mIoU (57.3)"),
        ("mask2former_dinov3_base_ade20k_semantic", "dinov3_base", "none published"),
    ],
    ("cityscapes", "instance"): [
        ("mask2former_r50_cityscapes_instance", "r50", "37.4 AP"),
        ("mask2former_r101_cityscapes_instance", "r101", "38.5 AP"),
        ("mask2former_swin_tiny_cityscapes_instance", "swin_tiny", "39.7 AP"),
        ("mask2former_swin_small_cityscapes_instance", "swin_small", "41.8 AP"),
        ("mask2former_swin_base_cityscapes_instance", "swin_base", "42.0 AP"),
        ("mask2former_swin_large_cityscapes_instance", "swin_large", "43.7 AP"),
    ],
    ("cityscapes", "panoptic"): [
        ("mask2former_r50_cityscapes_panoptic", "r50", "62.1 PQ, 37.3 AP, 77.5 mIoU"),
        ("mask2former_r101_cityscapes_panoptic", "r101", "62.4 PQ, 37.7 AP, 78.6 mIoU"),
        ("mask2former_swin_tiny_cityscapes_panoptic", "swin_tiny", "63.9 PQ, 39.1 AP, 80.5 mIoU"),
        ("mask2former_swin_small_cityscapes_panoptic", "swin_small", "64.8 PQ, 40.7 AP, 81.8 mIoU"),
        ("mask2former_swin_base_cityscapes_panoptic", "swin_base", "66.1 PQ, 42.8 AP, 82.7 mIoU"),
        ("mask2former_swin_large_cityscapes_panoptic", "swin_large", "66.6 PQ, 43.6 AP, 82.9 mIoU"),
    ],
    ("cityscapes", "semantic"): [
        ("mask2former_r50_cityscapes_semantic", "r50", "79.4 mIoU (82.2)"),
        ("mask2former_r101_cityscapes_semantic", "r101", "80.1 mIoU (81.9)"),
        ("mask2former_swin_tiny_cityscapes_semantic", "swin_tiny", "82.1 mIoU (83.0)"),
        ("mask2former_swin_small_cityscapes_semantic", "swin_small", "82.6 mIoU (83.6)"),
        ("mask2former_swin_base_cityscapes_semantic", "swin_base", "83.3 mIoU (84.5)"),
        ("mask2former_swin_large_cityscapes_semantic", "swin_large", "83.3 mIoU (84.3)"),
    ],
}
"""Data and task -> name, backbone, and what is published."""

VARIANTS = {
    name: (dict(backbone=backbone, data=data, task=task), published)
    for (data, task), rows in TABLE.items()
    for name, backbone, published in rows
} | {
    "mask2former_r50_coco_instance_mp": (
        dict(mask_denoising=True),
        "2.3 AP more than without on Cityscapes (MP-Former, abstract)",
    )
}
"""Name -> arguments of `config`, and what is published."""


def config(
    backbone: Literal[
        "r50", "r101", "swin_tiny", "swin_small", "swin_base", "swin_large",
        "dinov2_small", "dinov2_base", "dinov2_large", "dinov3_small", "dinov3_base", "dinov3_large",
    ] = "r50",
    data: Literal["coco", "ade20k", "cityscapes"] = "coco",
    task: Literal["instance", "panoptic", "semantic"] = "instance",
    mask_denoising: bool = False,
):  # fmt: skip
    cfg = dict(
        model=dict(
            type="Mask2Former", tasks=["instance"], num_queries=100,
            backbone=dict(type="ResNet", depth=50, norm="frozen_bn"),
            neck=dict(type="DeformablePixelDecoder", out_channels=256),
            head=dict(type="Mask2FormerHead", d_model=256, num_heads=8, d_ffn=2048, num_decoder_layers=9),
        ),
        criterion=dict(
            type="MaskCriterion", no_object_weight=0.1, weights=dict(labels=2.0, mask=5.0, dice=5.0),
            matcher=dict(type="HungarianMaskMatcher", cost_labels=2.0, cost_mask=5.0, cost_dice=5.0),
        ),
        data=coco_instance(images_per_gpu=2),
        optimizer=dict(
            type="AdamW", lr=1e-4, backbone_lr=1e-5, weight_decay=0.05, no_weight_decay=["norms", "embeddings"],
        ),
        # The original's 368,750 steps of 16 images are 50 passes; it drops after 327,778 and 355,092 of them.
        schedule=dict(type="MultiStepLR", drop_at_epochs=[44.44, 48.15]),
        evaluator=dict(type="CocoEvaluator", iou_types=["segm"]),
        train=dict(epochs=50, clip_grad_norm=0.01, seed=42, reference_batch_size=16, best_metric="segm/AP"),
    )  # fmt: skip
    set_task(cfg, data, task, crop_size=640 if backbone in ("swin_base", "swin_large") else 512)
    if data != "coco":
        # The original's 160,000 steps of 16 images on ADE20K are 126.7 passes over the 20,210 images, its 90,000 steps
        # on Cityscapes 484 passes over the 2,975 images.
        cfg["schedule"] = dict(type="PolyLR", power=0.9)
        cfg["train"].update(dict(epochs=127, eval_every=4) if data == "ade20k" else dict(epochs=484, eval_every=27))

    if backbone in PLAIN_VITS:
        with_plain_vit(cfg, PLAIN_VITS[backbone])
    elif backbone.startswith("swin"):
        with_swin(cfg, backbone)
    else:
        trains_norms = data == "cityscapes" or (backbone, data, task) == ("r101", "ade20k", "semantic")
        cfg["model"]["backbone"].update(depth=int(backbone[1:]), norm="bn" if trains_norms else "frozen_bn")
    if backbone == "swin_large" and task != "semantic":
        cfg["model"]["num_queries"] = 200
    if backbone == "swin_large" and data == "coco":
        # The original's 737,500 steps of 16 images are 100 passes; it drops after 655,556 and 710,184 of them.
        cfg["schedule"]["drop_at_epochs"] = [88.89, 96.30]
        cfg["train"]["epochs"] = 100

    if mask_denoising:
        cfg["model"]["training_queries"] = [
            dict(type="MaskDenoising", num_queries=100, label_flips=0.2, mask_flips=0.2),
        ]  # fmt: skip
    return cfg


def set_task(cfg, data, task, crop_size):
    """Set the data, and what model and evaluator need for them; `crop_size` is that of ADE20K's semantic classes."""
    if task == "semantic":
        if data == "coco":
            raise ConfigError("task: got 'semantic' with data=coco, which has 'instance' and 'panoptic'.")
        on_ade20k = data == "ade20k"
        cfg["model"].update(tasks=["semantic"], **(ade20k.SEMANTIC if on_ade20k else cityscapes.SEMANTIC))
        cfg["data"] = ade20k.ade20k_semantic(2, crop_size) if on_ade20k else cityscapes.cityscapes_semantic(2)
        cfg["evaluator"] = dict(type="SemanticEvaluator")
        cfg["train"]["best_metric"] = "mIoU"
    elif task == "panoptic":
        with_panoptic(
            cfg,
            *{
                "coco": (coco_panoptic(2), COCO_PANOPTIC),
                "ade20k": (ade20k.ade20k_panoptic(2), ade20k.PANOPTIC),
                "cityscapes": (cityscapes.cityscapes_panoptic(2), cityscapes.PANOPTIC),
            }[data],
        )
    elif data != "coco":
        with_instances(
            cfg,
            *{
                "ade20k": (ade20k.ade20k_instance(2), ade20k.INSTANCE),
                "cityscapes": (cityscapes.cityscapes_instance(2), cityscapes.INSTANCE),
            }[data],
        )
