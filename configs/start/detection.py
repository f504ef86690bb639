"""Boxes from a few hundred own photos: a small DINO (Zhang et al. 2022, https://arxiv.org/abs/2203.03605).

A two-stage Deformable DETR with one encoder and three decoder layers, contrastive denoising, mixed query selection and
look forward twice, on a ResNet-50 from ImageNet weights or a ResNet-18 from random ones.

Run:  vitkit start IMAGES ANNOTATIONS
Here: on BCCD's 205 photos from ResNet-50's ImageNet weights, one core of an AMD EPYC without AVX-512 (float32), the
      other core busy, torch 2.14.1, seed 42:
      --hours 0.25: 256 pixels, frozen up to res3, 927 steps, 16 min of training: AP 0.349, AP50 0.607.
      --hours 0.6: the same, 2060 of 2369 steps, then stopped, 30 min: AP 0.486, AP50 0.768.
      --hours 1: 256 pixels, frozen up to res2, 2060 steps, 65 min: AP 0.525, AP50 0.796.
      The last two still trained the batch norms: frozen, AP after 515 steps is 0.321 instead of 0.300, in 0.91 of the
      time. On 50 photos of COCO, --hours 0.2: 256 pixels, 390 steps, 10 min: AP50 0.006.
      From random weights, 256 pixels, 11 epochs: AP 0.480, AP50 0.726 in 9.5 min with AVX-512.
"""

from vitkit.configs.bccd.dino import config as bccd_dino
from vitkit.configs.parts.resnet import resnet50_for_transfer


def config(size=320, pretrained=True, frozen_stages=1):
    """Return the config; `size` is the short side of an image in validation, in pixels.

    The first `frozen_stages` of a pretrained backbone are frozen, and all its batch norms: after 515 steps of two
    images of BCCD that gives AP 0.321, trained batch norms 0.300 in 1.1 times the processor time.
    """
    cfg = bccd_dino()
    features = ["res3", "res4"]
    cfg["model"]["nms_iou"] = 0.8  # after few steps queries still find objects twice, see configs/bccd/dino_r18.py
    cfg["model"]["backbone"] = resnet50_for_transfer(
        norm="frozen_bn", out_features=features, frozen_stages=frozen_stages
    )
    if not pretrained:
        cfg["model"]["backbone"] = dict(type="ResNet", depth=18, norm="bn", out_features=features, pretrained=False)
        # as in configs/bccd/dino_r18.py; without its mosaics AP 0.480 after 1133 steps, 9.5 min of one core
        cfg["optimizer"].update(lr=5e-4, backbone_lr=5e-4)
        cfg["criterion"].update(class_loss="mal", weights=dict(labels=1.0, l1=5.0, giou=2.0))
        cfg["train"].update(ema_decay=0.999, ema_ramp_steps=500)
    split = dict(type="CocoDetection", bad_boxes="drop")
    scales = [round(size * share / 32) * 32 for share in (0.8, 0.9, 1.0, 1.1)]
    cfg["data"] = dict(
        train=dict(
            **split, images="data/own/images", annotations="data/own/train.json",
            transforms=dict(
                type="ComposedTransforms", min_visible=0.2, min_box_side=2.0,
                transforms=[
                    dict(type="HorizontalFlip"),
                    dict(
                        type="MultiScaleCrop", scales=scales, max_size=round(1.67 * size), crop_probability=0.5,
                        crop_scales=[round(1.1 * size), round(1.3 * size), round(1.5 * size)],
                        crop_range=[round(0.75 * size), round(1.06 * size)],
                    ),
                    dict(type="ColorJitter", brightness=0.2, contrast=0.2, saturation=0.2, hue=0.03, p=0.8),
                ],
            ),
        ),
        val=dict(
            **split, images="data/own/images", annotations="data/own/val.json",
            transforms=dict(type="EvalResize", short_side=size, max_size=round(1.67 * size)),
        ),
        images_per_gpu=2, num_workers=1,
    )  # fmt: skip
    return cfg
