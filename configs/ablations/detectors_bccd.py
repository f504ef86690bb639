"""The small detectors as published, and vitkit's own, on blood cells from random weights at equal processor time.

RT-DETR-R18 (https://arxiv.org/abs/2304.08069), D-FINE-N and -S (https://arxiv.org/abs/2410.13842) and RF-DETR-N
(https://arxiv.org/abs/2511.09554) with their own networks and losses, and DINO on the ResNet-18 of
configs/bccd/dino_r18.py, under one recipe: images of 192 to 256 pixels, AdamW with a cosine, an average of the weights,
no mosaics. RF-DETR-N has its own rate of 1e-4: at the others' 5e-4 its ViT from random weights learns nothing (AP 0.007
after 48 min of the recipe of detectors_bccd_long.py). The published networks also in the sizes that they were made for:
the photos' own 640x480, and 384x288 for RF-DETR-N. tools/benchmark/faster_rcnn.py trains torchvision's detector for as
long.

Run:  vitkit ablate detectors_bccd data.root=DIR --seeds 42
Here: see model_zoo/ablations/detectors_bccd.md.
"""

from vitkit.configs.bccd.dino_r18 import config as dino_r18
from vitkit.configs.dfine import config as dfine
from vitkit.configs.rf_detr import config as rf_detr
from vitkit.configs.rtdetr import config as rtdetr


def small(model):
    """A published network from random weights, with as many queries as DINO has here."""
    model["backbone"]["pretrained"] = False
    denoising = [
        queries | dict(num_queries=40) for queries in model["training_queries"] if queries["type"] == "BoxDenoising"
    ]
    return model | dict(num_queries=80, num_detections=100, training_queries=denoising or model["training_queries"])


def at_size(side):
    """Photos whose shorter side is about `side` in training and `side` in evaluation, without mosaics."""
    single = dino_r18()["data"]["train"]["transforms"]["transforms"][1]
    single["transforms"][2].update(
        scales=_sides(side, 192, 224, 256),
        max_size=round(1.5 * side),
        crop_scales=_sides(side, 272, 320, 368),
        crop_range=_sides(side, 176, 256),
    )
    val = {"data.val.transforms.short_side": side, "data.val.transforms.max_size": round(5 / 3 * side)}
    return {"data.train.transforms": single} | val


def _sides(side, *sides_at_240):
    return [round(side * length / 240 / 16) * 16 for length in sides_at_240]


def networks():
    rf_detr_n = rf_detr("n")
    d_fine = {"criterion": dfine("n")["criterion"]}
    return {
        "DINO, ResNet-18": {},
        "RT-DETR-R18": {"model": small(rtdetr(18)["model"]), "criterion": rtdetr(18)["criterion"]},
        "D-FINE-N": {"model": small(dfine("n")["model"])} | d_fine,
        "D-FINE-S": {"model": small(dfine("s")["model"])} | d_fine,
        "RF-DETR-N": {"model": small(rf_detr_n["model"]), "criterion": rf_detr_n["criterion"], "optimizer.lr": 1e-4},
    }


def ablation():
    natural = {"RT-DETR-R18": 480, "D-FINE-N": 480, "D-FINE-S": 480, "RF-DETR-N": 288}
    return dict(
        base="bccd/dino_r18",
        metrics=["bbox/AP", "bbox/AP50"],
        minutes=15.0,
        evaluations=3,
        settings=at_size(240) | {"schedule": dict(type="CosineLR", warmup_steps=200)},
        arms={
            **networks(),
            **{f"{name}, {4 * side // 3} pixels": networks()[name] | at_size(side) for name, side in natural.items()},
        },
    )
