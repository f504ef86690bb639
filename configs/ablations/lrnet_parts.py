"""What LR-Net's similarity, geometry prior and windows are worth, on the synthetic world (Hu et al. 2019,
https://arxiv.org/abs/1904.11491, tables 2 to 4).

Four epochs of 1600 images of 32 pixels. The largest map is 8 x 8, so the paper's 9 x 9 windows are left out.

Run:  vitkit ablate lrnet_parts
Here: see model_zoo/ablations/lrnet_parts.md.
"""

from vitkit.configs.parts.small_shapes import small_shapes_settings

LRNET = dict(type="LRNet", depth=26, pretrained=False)


def ablation():
    return dict(
        base="quickstart/classifier",
        metrics=["top1"],
        settings=small_shapes_settings() | {"model.backbone": LRNET, "data.train.num_images": 1600, "train.epochs": 4},
        arms={
            "LR-Net (product, 7 x 7)": {},
            "difference": {"model.backbone.similarity": "difference"},
            "geometry alone": {"model.backbone.similarity": "none"},
            "no geometry prior": {"model.backbone.geometry_prior": False},
            "3 x 3": {"model.backbone.kernel_size": 3},
            "5 x 5": {"model.backbone.kernel_size": 5},
        },
    )
