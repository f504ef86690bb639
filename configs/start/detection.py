"""Boxes from a few hundred of your photos: a small DINO (Zhang et al. 2022, https://arxiv.org/abs/2203.03605).

The network and the training of configs/bccd/dino_r18.py without its vertical flips, on a ResNet-18 from random weights
or a ResNet-50 from ImageNet's, which ends at res3, as in configs/bccd/dino_imagenet.py, on a processor with many
objects and time for fewer than 6000 such steps.

Run:  vitkit start IMAGES ANNOTATIONS
Here: with vertical flips, as in the table of configs/bccd/measurements.md; `vitkit start` prints the row its choice
      comes next to. On 50 photos of COCO with 49 classes, from Keras's ImageNet weights, frozen up to res3, 36 epochs:
      after 936 steps, 5 to 7 min of one core, AP50 0.008 to 0.045 on 24 other photos (240 pixels: 0.045 and 0.009, two
      runs; 224: 0.008 and 0.015, seeds 42 and 43) and on the 50 themselves 0.16 to 0.27 (0.273 and 0.156; 0.167 and
      0.256). So it learns them, but they are too few for others. In 320 pixels after 520 steps: 0.019 and 0.127.
      tools/benchmark/faster_rcnn.py from the same weights finds nothing in either after 8 min, some 65 steps.
"""

from vitkit.configs.bccd.dino_imagenet import config as bccd_dino_imagenet
from vitkit.configs.bccd.dino_r18 import config as bccd_dino_r18
from vitkit.configs.parts.resnet import resnet50_for_transfer


def config(
    size=224, pretrained=True, ends_at_res3=False, frozen_stages=1, small_first=False, channels=None, flips=True
):
    """Return the config; `size` is the short side of an image in validation, in pixels.

    With `small_first` a run is as in configs/bccd/small_first.py: images have 4/7 of the size in its first six tenths.

    A pretrained backbone that `ends_at_res3` learns more in up to half an hour of a core where each class has many
    objects, and finds nothing after 50 photos of COCO. One up to res4 has its first `frozen_stages` and all its batch
    norms frozen: after 515 steps of two images of BCCD that gave AP 0.321, trained batch norms 0.300 in 1.1 times the
    processor time. With `channels` the images have as many, of 8 or 16 bits, and their colors are not jittered. Without
    `flips` images are not mirrored, as classes that say left or right require.
    """
    jitter = dict(type="ColorJitter", brightness=0.2, contrast=0.2, saturation=0.2, hue=0.03, p=0.8)
    cfg = bccd_dino_imagenet() if ends_at_res3 else bccd_dino_r18()
    if pretrained and not ends_at_res3:
        cfg["model"]["backbone"] = resnet50_for_transfer(
            norm="frozen_bn", out_features=["res3", "res4"], frozen_stages=frozen_stages
        )
        cfg["optimizer"]["backbone_lr"] = 1e-4
    # A share, as the number of epochs follows the time that there is; 200 steps of the 4000 of a longer run.
    cfg["schedule"] = dict(type="FlatCosineLR", warmup_share=0.05, flat_until_share=0.6, end_factor=0.02)

    def transforms(size):
        return dict(
            type="ComposedTransforms", min_visible=0.2, min_box_side=2.0,
            transforms=[
                dict(type="HorizontalFlip", p=0.5 if flips else 0.0),
                dict(
                    type="MultiScaleCrop", scales=[round(size * fraction / 32) * 32 for fraction in (0.82, 0.94, 1.06)],
                    max_size=round(1.67 * size), crop_probability=0.5,
                    crop_scales=[round(size * fraction) for fraction in (1.18, 1.35, 1.53)],
                    crop_range=[round(0.76 * size), round(1.06 * size)],
                ),
                *[jitter] * (channels is None),
            ],
        )  # fmt: skip

    single = transforms(size)
    first = dict(
        type="MultiImageTransforms", mosaic=0.3, transforms=transforms(size * 4 / 7 if small_first else size)
    )  # fmt: skip
    split = dict(type="CocoDetection", bad_boxes="drop", images="data/own/images")
    cfg["data"] = dict(
        train=dict(
            **split, annotations="data/own/train.json",
            transforms=dict(type="TransformsByEpoch", until_shares=[0.6], transforms=[first, single]),
        ),
        val=dict(
            **split, annotations="data/own/val.json",
            transforms=dict(type="EvalResize", short_side=size, max_size=round(1.67 * size)),
        ),
        images_per_gpu=2, num_workers=1, channels=channels,
    )  # fmt: skip
    return cfg
