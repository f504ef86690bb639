"""What ViT's positions, class token, stem and head are worth, on the synthetic world (Dosovitskiy et al. 2020,
https://arxiv.org/abs/2010.11929).

Positions: none, 1-D, 2-D and relative (table 8); class token or mean (figure 9); the hybrid with a ResNet as stem
(section 3.1, figure 5); a hidden layer in the head (section 3.1). Models with relative positions have no class token,
like "mean".

Run:  vitkit ablate vit_parts
Here: see model_zoo/ablations/vit_parts.md.
"""

VIT = dict(type="ViT", patch_size=8, d_model=128, depth=6, num_heads=4, image_size=64, pretrained=False)
MEAN = {"model.backbone.pooling": "mean", "model.backbone.class_token": False}


def ablation():
    return dict(
        base="quickstart/classifier",
        metrics=["top1"],
        settings={"model.backbone": VIT, "train.epochs": 3},
        arms={
            "ViT (1-D)": {},
            "no positions": {"model.backbone.positions": "none"},
            "2-D positions": {"model.backbone.positions": "axes"},
            "mean": MEAN,
            "mean, relative positions": MEAN
            | {"model.backbone.positions": "none", "model.backbone.relative_positions": 8},
            "hybrid": {"model.backbone.stem": dict(type="ResNet", depth=18, out_features=["res3"], pretrained=False)},
            "hidden layer": {"model.backbone.hidden_layer": True},
        },
    )
