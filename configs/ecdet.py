"""ECDet on COCO 2017 (EdgeCrafter, https://arxiv.org/abs/2603.18739): ECViT, a small transformer with convolutional
patches, DEIMv2's encoder, and its decoder with D-FINE's layers.

Run:       torchrun --nproc-per-node 8 tools/train.py ecdet_s_coco
Reference: the original README; parameters are with 80 classes, counted by the original's configs, which give M and L
           more than the README's 18 and 31 million. Here: not yet run.
License:   code and weights of the release edgecrafterv1 (March 2026) are under Apache-2.0. The project's later files
           are under another license, for non-commercial use: none of them is named here.
Backbones: files of that release, plain transformers without the projections.
"""

from typing import Literal

from vitkit.configs.dfine import adamw, dfine_criterion
from vitkit.configs.parts.realtime import deim_data, flat_cosine, training

VARIANTS = {
    "ecdet_s_coco": (dict(size="s"), "51.7 box AP, 74 epochs; 9,884,100 parameters"),
    "ecdet_m_coco": (dict(size="m"), "54.3 box AP, 62 epochs; 19,431,500 parameters"),
    "ecdet_l_coco": (dict(size="l"), "57.0 box AP, 50 epochs; 32,966,108 parameters"),
    "ecdet_x_coco": (dict(size="x"), "57.9 box AP, 50 epochs; 49,941,980 parameters"),
}
"""Name -> arguments of `config`, and what is published. The original counts two settings as parameters, `up` and
`reg_scale`."""

BACKBONES = {
    "s": dict(d_model=192, num_heads=3, mlp_ratio=4.0, out_channels=None, pretrained="ecvitt"),
    "m": dict(d_model=256, num_heads=4, mlp_ratio=4.0, out_channels=None, pretrained="ecvittplus"),
    "l": dict(d_model=384, num_heads=6, mlp_ratio=4.0, out_channels=256, pretrained="ecvits"),
    "x": dict(d_model=384, num_heads=6, mlp_ratio=6.0, out_channels=256, pretrained="ecvitsplus"),
}
"""Size -> the transformer, and the name of its file; None: only the coarsest map has a projection."""

ENCODERS = {
    "s": dict(out_channels=192, d_ffn=512, num_blocks=2, expansion=0.34),
    "m": dict(out_channels=256, d_ffn=512, num_blocks=2, expansion=0.75),
    "l": dict(out_channels=256, d_ffn=1024, num_blocks=3, expansion=0.75),
    "x": dict(out_channels=256, d_ffn=2048, num_blocks=3, expansion=1.5),
}
"""Size -> the encoder; the decoder has its width."""

DECODER_FFN = dict(s=512, m=1024, l=1024, x=2048)

TRAINING = {
    "s": dict(lr=5e-4, backbone_lr=2.5e-5, weight_decay=1e-4, epochs=74, mosaic_until=36, strong_until=72),
    "m": dict(lr=5e-4, backbone_lr=2.5e-5, weight_decay=1e-4, epochs=62, mosaic_until=30, strong_until=60),
    "l": dict(lr=5e-4, backbone_lr=5e-6, weight_decay=1.25e-4, epochs=50, mosaic_until=24, strong_until=48),
    "x": dict(lr=5e-4, backbone_lr=2.5e-6, weight_decay=1.25e-4, epochs=50, mosaic_until=24, strong_until=48),
}
"""Size -> the optimizer's settings, and the epochs of `deim_data`."""

MOSAIC = dict(s=0.75, m=0.75, l=1.0, x=1.0)
"""Size -> the probability of mosaics, and that of mixup."""

RELEASE = "https://github.com/capsule2077/edgecrafter/releases/download/edgecrafterv1"


def config(size: Literal["s", "m", "l", "x"] = "s"):
    return trained_detector(size, TRAINING[size])


def trained_detector(size, of_size):
    """The config of a size, with the settings of its training: ECSeg's differ."""
    mosaic_until, strong_until = of_size["mosaic_until"], of_size["strong_until"]
    return dict(
        model=ecdet_model(size),
        criterion=dfine_criterion("mal"),
        data=deim_data(0, mosaic_until, strong_until, mosaic=MOSAIC[size], mixup=MOSAIC[size]),
        # Only the transformer has the backbone's rate.
        optimizer=adamw(of_size, ["vectors"]) | dict(lr_multipliers={"backbone.projections.": 1.0}),
        schedule=flat_cosine(mosaic_until, strong_until),
        evaluator=dict(type="CocoEvaluator", iou_types=["bbox"]),
        train=training(of_size["epochs"], strong_until),
    )


def ecdet_model(size):
    backbone = BACKBONES[size]
    return dict(
        type="ECDet", num_queries=300,
        backbone=dict(backbone, type="ECViT", pretrained=f"{RELEASE}/{backbone['pretrained']}.pth"),
        neck=dict(type="DEIMv2Encoder", num_heads=8, block="deim", activation="silu", **ENCODERS[size]),
        head=dict(
            type="DEIMv2Head", d_model=ENCODERS[size]["out_channels"], num_heads=8, num_points=[3, 6, 3],
            layer="dfine", d_ffn=DECODER_FFN[size], dropout=0.0, activation="silu", num_decoder_layers=4, reg_max=32,
            reg_scale=4.0, up=0.5,
        ),
        training_queries=[
            dict(
                type="BoxDenoising", num_queries=100, contrastive=True, label_noise=0.5, box_noise=1.0, mirror=True,
                eps=1e-5, padding=0.0,
            ),
        ],
    )  # fmt: skip
