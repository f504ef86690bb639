"""MaskFormer, for the semantic classes of ADE20K and COCO's panoptic ones (Cheng et al. 2021,
https://arxiv.org/abs/2107.06278).

Run:       torchrun --nproc-per-node 8 tools/train.py maskformer_r50_ade20k
Reference: the original model zoo; parameters and GMACs of the paper. mIoU in parentheses is with several scales and
           flips. Swin base and large start from ImageNet-22k; base from ImageNet-1k (model.backbone.pretrained=true):
           51.1 mIoU on ADE20K, 51.1 PQ on COCO.
Here:      not yet run.
"""

from typing import Literal

from vitkit.configs.parts.ade20k import SEMANTIC, ade20k_semantic
from vitkit.configs.parts.coco_panoptic import PANOPTIC, coco_panoptic_multi_scale
from vitkit.configs.parts.swin import with_swin

VARIANTS = {
    "maskformer_r50_ade20k": (dict(backbone="r50", data="ade20k"), "44.5 mIoU (46.7); 41.3 M, 53 GMACs"),
    "maskformer_r101_ade20k": (dict(backbone="r101", data="ade20k"), "45.5 mIoU (47.2); 60.2 M, 73 GMACs"),
    "maskformer_swin_tiny_ade20k": (dict(backbone="swin_tiny", data="ade20k"), "46.7 mIoU (48.8); 41.8 M, 55 GMACs"),
    "maskformer_swin_small_ade20k": (dict(backbone="swin_small", data="ade20k"), "49.8 mIoU (51.0); 63.1 M, 79 GMACs"),
    "maskformer_swin_base_ade20k": (dict(backbone="swin_base", data="ade20k"), "52.7 mIoU (53.9); 101.8 M, 195 GMACs"),
    "maskformer_swin_large_ade20k": (
        dict(backbone="swin_large", data="ade20k"),
        "54.1 mIoU (55.6); 211.6 M, 375 GMACs",
    ),
    "maskformer_r50_coco_panoptic": (dict(backbone="r50", data="coco"), "46.5 PQ; 45.0 M, 181 GMACs"),
    "maskformer_r101_coco_panoptic": (dict(backbone="r101", data="coco"), "47.6 PQ; 64.0 M, 248 GMACs"),
    "maskformer_swin_tiny_coco_panoptic": (dict(backbone="swin_tiny", data="coco"), "47.7 PQ; 41.8 M, 179 GMACs"),
    "maskformer_swin_small_coco_panoptic": (dict(backbone="swin_small", data="coco"), "49.7 PQ; 63.1 M, 259 GMACs"),
    "maskformer_swin_base_coco_panoptic": (dict(backbone="swin_base", data="coco"), "51.8 PQ; 101.8 M, 411 GMACs"),
    "maskformer_swin_large_coco_panoptic": (dict(backbone="swin_large", data="coco"), "52.7 PQ; 211.6 M, 792 GMACs"),
}
"""Name -> arguments of `config`, and what is published."""


def config(
    backbone: Literal["r50", "r101", "swin_tiny", "swin_small", "swin_base", "swin_large"] = "r50",
    data: Literal["ade20k", "coco"] = "ade20k",
):
    is_swin = backbone.startswith("swin")
    cfg = dict(
        model=dict(
            type="MaskFormer", tasks=["semantic"], num_queries=100, **SEMANTIC,
            backbone=dict(type="ResNet", depth=101 if backbone == "r101" else 50, norm="frozen_bn"),
            neck=dict(type="FPNPixelDecoder", out_channels=256),
            head=dict(
                type="MaskFormerHead", d_model=256, num_heads=8, d_ffn=2048, dropout=0.1, num_decoder_layers=6,
            ),
        ),
        criterion=dict(
            type="MaskCriterion", mask_loss="focal", no_object_weight=0.1,
            weights=dict(labels=1.0, mask=20.0, dice=1.0),
            matcher=dict(
                type="HungarianMaskMatcher", mask_cost="focal", cost_labels=1.0, cost_mask=20.0, cost_dice=1.0,
            ),
        ),
        data=ade20k_semantic(images_per_gpu=2, size=640 if backbone in ("swin_base", "swin_large") else 512),
        optimizer=dict(
            type="AdamW", lr=1e-4, backbone_lr=1e-5, weight_decay=1e-4, no_weight_decay=["norms", "embeddings"],
        ),
        schedule=dict(type="PolyLR", power=0.9),
        evaluator=dict(type="SemanticEvaluator"),
        # The original's 160,000 steps of 16 images are 126.7 passes over the 20,210 images.
        train=dict(
            epochs=127, eval_every=4, clip_grad_norm=0.01, seed=42, reference_batch_size=16, best_metric="mIoU",
        ),
    )  # fmt: skip
    if data == "coco":
        cfg["model"].update(tasks=["panoptic"], size_divisibility=1, **PANOPTIC)
        # The paper has no encoder in the pixel decoder if the backbone is a transformer.
        cfg["model"]["neck"]["type"] = "FPNPixelDecoder" if is_swin else "TransformerPixelDecoder"
        cfg["data"] = coco_panoptic_multi_scale(images_per_gpu=8)
        # The original's 554,400 steps of 64 images are 300 passes over the 118,287 images; it drops after 369,600.
        cfg["schedule"] = dict(type="MultiStepLR", drop_at_epochs=[200])
        cfg["evaluator"] = dict(type="PanopticEvaluator")
        cfg["train"].update(epochs=300, eval_every=1, reference_batch_size=64, best_metric="PQ")
        if backbone == "swin_large":
            cfg["data"]["train"]["transforms"]["max_size"] = 1000
    if is_swin:  # one learning rate for all, and a warm-up
        with_swin(cfg, backbone)
        cfg["optimizer"].update(lr=6e-5, backbone_lr=6e-5, weight_decay=0.01)
        cfg["schedule"]["warmup_steps"] = 1500
    return cfg
