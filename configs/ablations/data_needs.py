"""ViT needs data: ViT, ResNet and Swin on a thirtieth, a tenth, a third and all of the synthetic world's 6400 images
(Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929, figure 4).

All runs of a model see the same number of images; those of a smaller part are repeated more often.

Run:  vitkit ablate data_needs
Here: see model_zoo/ablations/data_needs.md.
"""

from vitkit.configs.ablations.vit_parts import VIT
from vitkit.configs.parts.small_shapes import small_shapes_settings

SWIN = dict(
    type="Swin", embed_dim=48, depths=[2, 2, 2, 2], num_heads=[2, 4, 8, 16], window=2, drop_path=0.0, pretrained=False
)
MODELS = {
    "ResNet": dict(epochs=4, backbone=dict(type="ResNet", depth=18, norm="bn", pretrained=False)),
    "Swin": dict(epochs=6, backbone=SWIN),
    "ViT": dict(epochs=12, backbone=VIT),
}
IMAGES = 6400
PARTS = {"1/30": 30, "1/10": 10, "1/3": 3, "all": 1}


def ablation():
    return dict(
        base="quickstart/classifier",
        metrics=["top1"],
        settings=small_shapes_settings(),
        evaluations=2,
        arms={
            f"{name}, {text}": {
                "model.backbone": model["backbone"], "data.train.fraction": 1 / part,
                "train.epochs": model["epochs"] * part,
            }
            for name, model in MODELS.items()
            for text, part in PARTS.items()
        },
        curves={name: {IMAGES // part: f"{name}, {text}" for text, part in PARTS.items()} for name in MODELS},
        x_label="training images",
    )  # fmt: skip
