"""What Swin's shifts and positions are worth, on the synthetic world (Liu et al. 2021,
https://arxiv.org/abs/2103.14030, table 4).

The model is a Swin with 48 channels, patches of 4 pixels and windows of 2 x 2 patches; images have 32 pixels, so the
first stage has 4 x 4 windows.

Run:  vitkit ablate swin_parts
Here: see model_zoo/ablations/swin_parts.md.
"""

from vitkit.configs.parts.small_shapes import small_shapes_settings

SWIN = dict(
    type="Swin", embed_dim=48, depths=[2, 2, 2, 2], num_heads=[2, 4, 8, 16], window=2, drop_path=0.0, pretrained=False
)


def ablation():
    return dict(
        base="quickstart/classifier",
        metrics=["top1"],
        settings=small_shapes_settings() | {"model.backbone": SWIN, "train.epochs": 8},
        arms={
            "Swin": {},
            "no shift": {"model.backbone.shifted": False},
            "no positions": {"model.backbone.positions": "none"},
            "absolute positions": {"model.backbone.positions": "absolute"},
        },
    )
