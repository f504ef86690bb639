"""What sizes of D-FINE share on COCO 2017 (Peng et al. 2024, https://arxiv.org/abs/2410.13842), trained as published or
as by DEIM (Huang et al. 2024, https://arxiv.org/abs/2412.04234)."""

from vitkit.configs.parts.realtime import deim_data, dfine_data, flat_cosine, training

_WEIGHTS = "https://github.com/Peterande/storage/releases/download/dfinev1.0/PPHGNetV2_{}_stage1.pth"

SIZES = {
    "n": dict(backbone="b0", channels=128, d_ffn=512, num_blocks=2, expansion=0.34, layers=3, points=[6, 6]),
    "s": dict(backbone="b0", channels=256, d_ffn=1024, num_blocks=1, expansion=0.5, layers=3, points=[3, 6, 3]),
    "m": dict(backbone="b2", channels=256, d_ffn=1024, num_blocks=2, expansion=1.0, layers=4, points=[3, 6, 3]),
    "l": dict(backbone="b4", channels=256, d_ffn=1024, num_blocks=3, expansion=1.0, layers=6, points=[3, 6, 3]),
    "x": dict(backbone="b5", channels=384, d_ffn=2048, num_blocks=3, expansion=1.0, layers=6, points=[3, 6, 3]),
}
"""Size -> the backbone, channels and layers of the encoder, layers of the decoder and its points per level."""


def dfine_model(size, activation="relu"):
    """D-FINE of size n, s, m, l or x; "silu" is DEIM's activation. The two largest freeze batch norms and stem."""
    sizes = SIZES[size]
    frozen = dict(norm="frozen_bn", frozen_stem=True) if size in ("l", "x") else {}
    small = dict(d_model=128, d_ffn=512) if size == "n" else dict(d_model=256, d_ffn=1024)
    return dict(
        type="DFINE", num_queries=300,
        backbone=dict(
            type="TimmBackbone", name=f"hgnetv2_{sizes['backbone']}",
            pretrained=_WEIGHTS.format(sizes["backbone"].upper()),
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
            dict(type="BoxDenoising", num_queries=100, contrastive=True, label_noise=0.5, box_noise=1.0),
        ],
    )  # fmt: skip


def dfine(
    size, lr, backbone_lr, *, epochs, strong_until, size_repeats=None, weight_decay=1e-4, batch_size=32,
    restart_ema_decay=0.9999,
):  # fmt: skip
    """D-FINE's run of a size; for the data's arguments see `dfine_data`."""
    return dict(
        model=dfine_model(size),
        criterion=_criterion("varifocal"),
        data=dfine_data(strong_until, size_repeats=size_repeats),
        optimizer=_optimizer(lr, backbone_lr, weight_decay, decays_biases=size in ("l", "x")),
        schedule=dict(type="ConstantLR", warmup_steps=500),
        evaluator=dict(type="CocoEvaluator", iou_types=["bbox"]),
        train=training(epochs, strong_until, restart_ema_decay, batch_size),
    )


def deim(
    size, lr, backbone_lr, *, epochs, mosaic_until, strong_until, size_repeats=None, weight_decay=1e-4, batch_size=32,
    restart_ema_decay=0.9999, schedule=None,
):  # fmt: skip
    """DEIM's run of a size; for the data's arguments see `deim_data`. `schedule` None: flat, then a cosine."""
    return dict(
        model=dfine_model(size, activation="silu"),
        criterion=_criterion("mal"),
        data=deim_data(4, mosaic_until, strong_until, size_repeats=size_repeats),
        optimizer=_optimizer(lr, backbone_lr, weight_decay, decays_biases=size != "n"),
        schedule=schedule or flat_cosine(mosaic_until, strong_until),
        evaluator=dict(type="CocoEvaluator", iou_types=["bbox"]),
        train=training(epochs, strong_until, restart_ema_decay, batch_size),
    )


def _criterion(class_loss):
    return dict(
        type="DFINECriterion", class_loss=class_loss,
        weights=dict(labels=1.0, l1=5.0, giou=2.0, fgl=0.15, ddf=1.5),
        matcher=dict(type="HungarianMatcher", activation="sigmoid", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0),
    )  # fmt: skip


def _optimizer(lr, backbone_lr, weight_decay, *, decays_biases):
    """AdamW without decay of norms. The originals mean this too, but D-FINE's pattern for the backbone's norms matches
    none, so that those of N, S and M decay there."""
    undecayed = ["norms"] if decays_biases else ["norms", "neck.vectors", "head.vectors"]
    return dict(type="AdamW", lr=lr, backbone_lr=backbone_lr, weight_decay=weight_decay, no_weight_decay=undecayed)
