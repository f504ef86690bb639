"""What ViT's positions, class token, stem and head are worth, on the synthetic world (Dosovitskiy et al. 2020,
https://arxiv.org/abs/2010.11929).

Positions: none, 1-D, 2-D and relative (table 8); class token or mean (figure 9); the hybrid with a ResNet as stem
(section 3.1, figure 5); a hidden layer in the head (section 3.1). Models with relative positions have no class token,
like "mean". Images have 32 pixels and patches 4.

Run:  vitkit ablate vit_parts
Here: see model_zoo/ablations/vit_parts.md.
"""

from vitkit.configs.parts.small_shapes import small_shapes_settings

VIT = dict(type="ViT", patch_size=4, d_model=64, depth=4, num_heads=4, image_size=32, pretrained=False)
RELATIVE = dict(VIT, type="ViTDet", positions="none", window_size=None, relative_positions=8)
MEAN = {"model.backbone.classifier": dict(pooling="mean"), "model.backbone.class_token": False}


def ablation():
    return dict(
        base="quickstart/classifier",
        metrics=["top1"],
        settings=small_shapes_settings() | {"model.backbone": VIT, "train.epochs": 12},
        arms={
            "ViT (1-D)": {},
            "no positions": {"model.backbone.positions": "none"},
            "2-D positions": {"model.backbone.positions": "axes"},
            "mean": MEAN,
            "mean, relative positions": {"model.backbone": RELATIVE},
            "hybrid": {"model.backbone.stem": dict(type="ResNet", depth=18, out_features=["res2"], pretrained=False)},
            "hidden layer": {"model.backbone.classifier": dict(hidden_layer=True)},
        },
    )
