"""What pretraining on unlabeled photos is worth with few labels: a detector of blood cells on 10 to 205 labeled photos,
from random weights, from ImageNet's, and from backbones pretrained on the 205 photos without their labels.

The labeled photos of a seed are nested and have the classes in proportion (`data.train.fraction_seed`). All runs take
1025 to 1050 steps of two photos in 128 pixels, whatever the number of photos, and are evaluated once, at their end. The
detector is that of configs/bccd/dino_r18.py with two feature maps and two decoder layers, without denoising, mosaics
and an average of the weights, which do not pay in so few steps (recipe_bccd). The rate of the backbone is the
detector's from random weights, and lower from others, not tuned: ResNet-50's as in configs/start/detection.py,
ResNet-18's as in configs/bccd/dino_imagenet.py. The ResNet-50 is another network, whose steps take longer. The ViT has
patches of 8 pixels, and so a map at stride 8. With 20 photos there is also a run from random weights whose training
takes about an hour longer: what the minutes of pretraining are worth if they are spent on training instead.

The starts are runs/pretrained/resnet50.pth and the folders that configs/bccd/pretraining.py writes beside it, below the
folder where the command is started. An arm without its weights fails and is written as "not run"; the same command runs
it once they are there.

Run:  vitkit ablate few_labels data.root=DIR --seeds 0 1 2
Here: see model_zoo/ablations/few_labels.md.
"""

from vitkit.configs.bccd.dino_r18 import config as dino_r18
from vitkit.configs.bccd.pretraining import RESNET18, RESNET50, VIT, WEIGHTS

PHOTOS = 205
# Labeled photos -> epochs of as many steps.
EPOCHS = {10: 206, 20: 103, 50: 41, 100: 21, PHOTOS: 10}


def start(backbone, weights=None, **optimizer):
    backbone = backbone if weights is None else backbone | dict(pretrained=f"{WEIGHTS}/{weights}")
    return {"model.backbone": backbone} | {f"optimizer.{key}": value for key, value in optimizer.items()}


STARTS = {
    "random ResNet-18": start(RESNET18),
    "ImageNet ResNet-50": start(RESNET50 | dict(out_features=["res3", "res4"], frozen_stages=1), backbone_lr=1e-4),
    "distilled ResNet-18": start(RESNET18, "distilled", backbone_lr=2e-4),
    "self-distilled ResNet-18": start(RESNET18, "self_distilled", backbone_lr=2e-4),
    "random ViT": start(VIT),
    "MAE's ViT": start(VIT, "mae", backbone_lr=2e-4),
}
LONGER = "random ResNet-18, an hour longer"
# What MAE's ViT is compared with, beside the goal.
ONLY = {"random ViT": (20, 100)}


def arm(start, count, epochs):
    return STARTS[start] | {"data.train.fraction": round(count / PHOTOS, 4), "train.epochs": epochs}


def transforms():
    single = dino_r18()["data"]["train"]["transforms"]["transforms"][1]
    single["transforms"][2].update(
        scales=[112, 128, 144], max_size=216, crop_scales=[160, 176], crop_range=[96, 144]
    )  # fmt: skip
    return single


def ablation():
    curves = {name: {count: f"{name}, {count}" for count in ONLY.get(name, EPOCHS)} for name in STARTS}
    arms = {label: arm(name, count, EPOCHS[count]) for name in STARTS for count, label in curves[name].items()}
    longer = f"{LONGER}, 20"
    return dict(
        base="bccd/dino_r18",
        metrics=["bbox/AP", "bbox/AP50"],
        evaluations=1,
        settings={
            "model.neck.num_levels": 2, "model.head.num_decoder_layers": 2, "model.training_queries": [],
            "data.train.transforms": transforms(), "data.val.transforms.short_side": 128,
            "data.val.transforms.max_size": 216, "schedule": dict(type="CosineLR", warmup_steps=100),
            "train.ema_decay": None,
        },
        seeded=["data.train.fraction_seed"],
        arms=arms | {longer: arm("random ResNet-18", 20, 20 * EPOCHS[20])},
        curves=curves | {LONGER: {20: longer}},
        x_label="labeled photos",
        goal=("random ResNet-18", 100),
    )  # fmt: skip
