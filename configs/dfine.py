"""D-FINE on COCO 2017 (Peng et al. 2024, https://arxiv.org/abs/2410.13842).

Run:       torchrun --nproc-per-node 8 tools/train.py dfine_s_coco
Reference: the original README; parameters are with 80 classes. Here: not yet run.
"""

from typing import Literal

from vitkit.configs.parts.realtime import dfine_data, training

VARIANTS = {
    "dfine_n_coco": (dict(size="n"), "42.8 box AP, 160 epochs; 3,782,691 parameters"),
    "dfine_s_coco": (dict(size="s"), "48.5 box AP, 132 epochs; 10,321,875 parameters"),
    "dfine_m_coco": (dict(size="m"), "52.3 box AP, 132 epochs; 19,590,062 parameters"),
    "dfine_l_coco": (dict(size="l"), "54.0 box AP, 80 epochs; 31,244,150 parameters"),
    "dfine_x_coco": (dict(size="x"), "55.8 box AP, 80 epochs; 62,621,558 parameters"),
}
"""Name -> arguments of `config`, and what is published."""

SIZES = {
    "n": dict(backbone="b0", channels=128, d_ffn=512, num_blocks=2, expansion=0.34, layers=3, points=[6, 6]),
    "s": dict(backbone="b0", channels=256, d_ffn=1024, num_blocks=1, expansion=0.5, layers=3, points=[3, 6, 3]),
    "m": dict(backbone="b2", channels=256, d_ffn=1024, num_blocks=2, expansion=1.0, layers=4, points=[3, 6, 3]),
    "l": dict(backbone="b4", channels=256, d_ffn=1024, num_blocks=3, expansion=1.0, layers=6, points=[3, 6, 3]),
    "x": dict(backbone="b5", channels=384, d_ffn=2048, num_blocks=3, expansion=1.0, layers=6, points=[3, 6, 3]),
}
"""Size -> the backbone, channels and layers of the encoder, layers of the decoder and its points per level."""

TRAINING = {
    "n": dict(lr=8e-4, backbone_lr=4e-4, weight_decay=1e-4, epochs=160, strong_until=148, size_repeats=None),
    "s": dict(lr=2e-4, backbone_lr=1e-4, weight_decay=1e-4, epochs=132, strong_until=120, size_repeats=20),
    "m": dict(lr=2e-4, backbone_lr=2e-5, weight_decay=1e-4, epochs=132, strong_until=120, size_repeats=6),
    "l": dict(lr=2.5e-4, backbone_lr=1.25e-5, weight_decay=1.25e-4, epochs=80, strong_until=72, size_repeats=4),
    "x": dict(lr=2.5e-4, backbone_lr=2.5e-6, weight_decay=1.25e-4, epochs=80, strong_until=72, size_repeats=3),
}
"""Size -> the optimizer's settings and those of the data, see `dfine_data`."""

BATCH_SIZE = dict(n=128, s=32, m=32, l=32, x=32)
# The originals' patterns match no norm of the backbone, so that all of it decays.
NORMS, NORMS_AND_BIASES = ["neck.norms", "head.norms"], ["neck.vectors", "head.vectors"]
RESTART_EMA_DECAY = dict(n=0.9999, s=0.9999, m=0.9999, l=0.9999, x=0.9998)


def config(size: Literal["n", "s", "m", "l", "x"] = "s"):
    of_size = TRAINING[size]
    return dict(
        model=dfine_model(size, freezes=size in ("l", "x")),
        criterion=dfine_criterion("varifocal"),
        data=dfine_data(of_size["strong_until"], size_repeats=of_size["size_repeats"]),
        optimizer=adamw(of_size, no_weight_decay=NORMS if size in ("l", "x") else NORMS_AND_BIASES),
        schedule=dict(type="ConstantLR", warmup_steps=500),
        evaluator=dict(type="CocoEvaluator", iou_types=["bbox"]),
        train=training(of_size["epochs"], of_size["strong_until"], RESTART_EMA_DECAY[size], BATCH_SIZE[size]),
    )


def dfine_model(size, activation="relu", freezes=False):
    """The network of both; DEIM's activation is "silu", and only D-FINE freezes stem and batch norms, in L and X."""
    sizes = SIZES[size]
    weights = "https://github.com/Peterande/storage/releases/download/dfinev1.0/PPHGNetV2_{}_stage1.pth"
    frozen = dict(norm="frozen_bn", frozen_stem=True) if freezes else {}
    small = dict(d_model=128, d_ffn=512) if size == "n" else dict(d_model=256, d_ffn=1024)
    return dict(
        type="DFINE", num_queries=300,
        backbone=dict(
            type="TimmBackbone", name=f"hgnetv2_{sizes['backbone']}",
            pretrained=weights.format(sizes["backbone"].upper()),
            out_features=["res4", "res5"] if size == "n" else ["res3", "res4", "res5"],
            pixel_mean=[0.0, 0.0, 0.0], pixel_std=[1.0, 1.0, 1.0], **frozen,
        ),
        neck=dict(
            type="DFINEEncoder", out_channels=sizes["channels"], num_heads=8, d_ffn=sizes["d_ffn"], dropout=0.0,
            num_blocks=sizes["num_blocks"], expansion=sizes["expansion"],
        ),
        head=dict(
            type="DFINEHead", num_heads=8, num_points=sizes["points"], dropout=0.0, activation=activation,
            num_decoder_layers=sizes["layers"], reg_max=32, reg_scale=8.0 if size == "x" else 4.0, up=0.5, **small,
        ),
        training_queries=[
            dict(
                type="BoxDenoising", num_queries=100, contrastive=True, label_noise=0.5, box_noise=1.0, mirror=True,
                eps=1e-5, padding=0.0,
            ),
        ],
    )  # fmt: skip


def dfine_criterion(class_loss):
    return dict(
        type="DFINECriterion", class_loss=class_loss,
        weights=dict(labels=1.0, l1=5.0, giou=2.0, fgl=0.15, ddf=1.5),
        matcher=dict(type="HungarianMatcher", activation="sigmoid", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0),
    )  # fmt: skip


def adamw(of_size, no_weight_decay):
    return dict(
        type="AdamW", lr=of_size["lr"], backbone_lr=of_size["backbone_lr"], weight_decay=of_size["weight_decay"],
        no_weight_decay=no_weight_decay,
    )  # fmt: skip
