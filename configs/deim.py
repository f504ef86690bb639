"""DEIM-D-FINE on COCO 2017 (Huang et al. 2024, https://arxiv.org/abs/2412.04234): D-FINE in less training, with
mosaics, mixup and another class loss, and with stem and batch norms trained in all sizes.

Run:       torchrun --nproc-per-node 8 tools/train.py deim_dfine_s_coco
Reference: the original README; parameters are with 80 classes. Here: not yet run.
"""

from typing import Literal

from vitkit.configs.dfine import (
    BATCH_SIZE,
    NORMS,
    NORMS_AND_BIASES,
    RESTART_EMA_DECAY,
    adamw,
    dfine_criterion,
    dfine_model,
)
from vitkit.configs.parts.masks import with_masks
from vitkit.configs.parts.realtime import deim_data, flat_cosine, training

VARIANTS = {
    "deim_dfine_n_coco": (dict(size="n"), "43.0 box AP, 160 epochs; 3,782,691 parameters"),
    "deim_dfine_s_coco": (dict(size="s"), "49.0 box AP, 132 epochs; 10,321,875 parameters"),
    "deim_dfine_m_coco": (dict(size="m"), "52.7 box AP, 102 epochs; 19,590,062 parameters"),
    "deim_dfine_l_coco": (dict(size="l"), "54.7 box AP, 58 epochs; 31,244,150 parameters"),
    "deim_dfine_x_coco": (dict(size="x"), "56.5 box AP, 58 epochs; 62,621,558 parameters"),
    "deim_dfine_s_masks_coco": (dict(size="s", masks=True), "none published with masks; 11,186,132 parameters"),
}
"""Name -> arguments of `config`, and what is published."""

TRAINING = {
    "n": dict(lr=8e-4, backbone_lr=4e-4, weight_decay=1e-4, epochs=160, mosaic_until=78, strong_until=148),
    "s": dict(lr=4e-4, backbone_lr=2e-4, weight_decay=1e-4, epochs=132, mosaic_until=64, strong_until=120),
    "m": dict(lr=4e-4, backbone_lr=4e-5, weight_decay=1e-4, epochs=102, mosaic_until=49, strong_until=90),
    "l": dict(lr=5e-4, backbone_lr=2.5e-5, weight_decay=1.25e-4, epochs=58, mosaic_until=29, strong_until=50),
    "x": dict(lr=5e-4, backbone_lr=5e-6, weight_decay=1.25e-4, epochs=58, mosaic_until=29, strong_until=50),
}
"""Size -> the optimizer's settings, and the epochs of `deim_data`."""

NO_WEIGHT_DECAY = dict(n=NORMS_AND_BIASES, s=["norms"], m=["norms"], l=NORMS, x=NORMS)
SIZE_REPEATS = dict(n=None, s=20, m=6, l=4, x=3)


def config(size: Literal["n", "s", "m", "l", "x"] = "s", masks: bool = False):
    of_size = TRAINING[size]
    mosaic_until, strong_until = of_size["mosaic_until"], of_size["strong_until"]
    schedule = flat_cosine(mosaic_until, strong_until)
    optimizer = adamw(of_size, NO_WEIGHT_DECAY[size])
    if size in ("s", "m"):
        optimizer["lr_multipliers"] = {".bn.": 1.0}  # the backbone's batch norms train at the full rate
    cfg = dict(
        model=dfine_model(size, activation="silu"),
        criterion=dfine_criterion("mal"),
        data=deim_data(4, mosaic_until, strong_until, size_repeats=SIZE_REPEATS[size]),
        optimizer=optimizer,
        schedule=schedule | dict(end_factor=1.0) if size == "n" else schedule,  # N's rate stays
        evaluator=dict(type="CocoEvaluator", iou_types=["bbox"]),
        train=training(of_size["epochs"], strong_until, RESTART_EMA_DECAY[size], BATCH_SIZE[size]),
    )
    return with_masks(cfg) if masks else cfg
