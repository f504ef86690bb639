"""D-FINE-seg on COCO 2017 (2026, https://arxiv.org/abs/2602.23043): D-FINE with masks.

The original trains with its own mosaics for 55 epochs, and by default with Muon; the recipe here is its rates for AdamW
with D-FINE's augmentation.

Run:       torchrun --nproc-per-node 8 tools/train.py dfine_seg_s_coco
Reference: the paper publishes no mask AP on COCO; on TACO it has 9.4, 17.7, 15.7, 21.2 and 24.2 (N to X). Here: not yet
           run.
"""

from typing import Literal

from vitkit.configs.dfine import NORMS_AND_BIASES, adamw, dfine_criterion, dfine_model
from vitkit.configs.parts.coco_instance import coco_instance
from vitkit.configs.parts.masks import mask_criterion
from vitkit.configs.parts.realtime import dfine_data, training

VARIANTS = {
    "dfine_seg_n_coco": (dict(size="n"), "no mask AP is published; 4,193,955 parameters"),
    "dfine_seg_s_coco": (dict(size="s"), "no mask AP is published; 11,898,067 parameters"),
    "dfine_seg_m_coco": (dict(size="m"), "no mask AP is published; 21,166,254 parameters"),
    "dfine_seg_l_coco": (dict(size="l"), "no mask AP is published; 32,820,342 parameters"),
    "dfine_seg_x_coco": (dict(size="x"), "no mask AP is published; 64,296,054 parameters"),
}
"""Name -> arguments of `config`, and what is published; parameters are with 80 classes."""

TRAINING = {
    "n": dict(lr=8e-4, backbone_lr=4e-4, weight_decay=1e-4),
    "s": dict(lr=2.5e-4, backbone_lr=6e-5, weight_decay=1e-4),
    "m": dict(lr=1.5e-4, backbone_lr=2e-5, weight_decay=1e-4),
    "l": dict(lr=1.6e-4, backbone_lr=1e-5, weight_decay=1.25e-4),
    "x": dict(lr=2e-4, backbone_lr=2e-6, weight_decay=1.25e-4),
}
"""Size -> the optimizer's settings."""

EPOCHS, STRONG_UNTIL = 55, 50


def config(size: Literal["n", "s", "m", "l", "x"] = "s"):
    return dict(
        model=dfine_seg_model(size),
        criterion=dfine_seg_criterion(),
        data=dfine_data(STRONG_UNTIL, data=coco_instance(4)),
        optimizer=adamw(TRAINING[size], no_weight_decay=NORMS_AND_BIASES),
        schedule=dict(type="CosineLR", warmup_steps=500),
        evaluator=dict(type="CocoEvaluator", iou_types=["segm", "bbox"]),
        train=training(EPOCHS, STRONG_UNTIL, restart_ema_decay=0.9998),
    )


def dfine_seg_model(size):
    model = dfine_model(size, freezes=size in ("l", "x"))
    model["head"]["masks"] = dict(type="PyramidMasks", channels=128 if size == "n" else 256)
    if size == "n":  # its encoder has no map of stride 8
        model["backbone"]["out_features"] = ["res3", "res4", "res5"]
        model["neck"]["finer"] = "res3"
    return model


def dfine_seg_criterion():
    losses, costs = dict(mask_loss="boxes"), dict(mask_cost="focal")
    return mask_criterion(dfine_criterion("varifocal"), 1.0, losses=losses, costs=costs)
