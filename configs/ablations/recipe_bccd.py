"""What each part of the recipe for blood cells from random weights is worth, one at a time, in six minutes.

The recipe is that of configs/bccd/dino_r18.py in 272 pixels, for eight epochs. Arms that cost more or less have fewer
or more epochs.
DEIM's parts are MAL, mosaics and the schedule (https://arxiv.org/abs/2412.04234), DINO's are denoising and two stages
(https://arxiv.org/abs/2203.03605), Group DETR's are the groups of queries (https://arxiv.org/abs/2207.13085).

Run:  vitkit ablate recipe_bccd data.root=DIR --seeds 42
Here: see model_zoo/ablations/recipe_bccd.md.
"""

from vitkit.configs.bccd.dino_r18 import config as dino_r18


def at_size(fraction, epochs):
    """Images of `share` of 272 pixels, the size of the recipe when its parts were compared."""
    transforms = dino_r18()["data"]["train"]["transforms"]
    transforms["transforms"][1]["transforms"][2].update(
        scales=_sides(fraction, 224, 256, 288),
        crop_scales=_sides(fraction, 320, 368, 416),
        crop_range=_sides(fraction, 208, 288),
    )
    return {
        "data.train.transforms": transforms,
        "data.val.transforms.short_side": _sides(fraction, 272)[0],
        "train.epochs": epochs,
    }


def _sides(fraction, *sides):
    return [round(fraction * side / 16) * 16 for side in sides]


def ablation():
    recipe = at_size(1.0, epochs=8)
    single = recipe["data.train.transforms"]["transforms"][1]
    focal = dict(labels=2.0, l1=5.0, giou=2.0)
    denoising = dino_r18()["model"]["training_queries"]
    return dict(
        base="bccd/dino_r18",
        metrics=["bbox/AP", "bbox/AP50"],
        evaluations=2,
        settings=recipe,
        arms={
            "the recipe": {},
            "no mosaics": {"data.train.transforms": single},
            "cosine from the start": {"schedule": dict(type="CosineLR", warmup_steps=200, end_factor=0.02)},
            "no average of the weights": {"train.ema_decay": None},
            "focal loss": {"criterion.class_loss": "focal", "criterion.weights": focal},
            "no denoising": {"model.training_queries": [], "train.epochs": 9},
            "groups of queries": {"model.training_queries": [*denoising, dict(type="QueryGroups", groups=3)]},
            "one stage": {"model.type": "DeformableDETR", "model.head": one_stage(), "model.training_queries": []},
            "batches of 4": {"data.images_per_gpu": 4, "train.reference_batch_size": 4, "train.epochs": 9},
            "no map at stride 8": {
                "model.backbone.out_features": ["res4"], "model.neck.num_levels": 2, "train.epochs": 11,
            },
            "0.8 of the size": at_size(0.8, epochs=11),
            "1.3 of the size": at_size(1.3, epochs=5),
        },
    )  # fmt: skip


def one_stage():
    head = dino_r18()["model"]["head"]
    del head["share_heads"], head["rounds_padding"]
    return head | dict(type="DeformableDETRHead", refine_boxes=True, two_stage=False)
