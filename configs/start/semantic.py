"""A class for every pixel from a few hundred of your photos: a small Mask2Former (https://arxiv.org/abs/2112.01527).

Run:  vitkit start IMAGES LABELS --task semantic
Here: on CamVid's 367 frames from ResNet-50's ImageNet weights, --hours 1: 240 pixels, 1840 steps, 53 min of one core of
      an AMD EPYC without AVX-512 (float32), torch 2.14.1, seed 42: mIoU 0.677.
"""

from vitkit.configs.camvid.mask2former import config as camvid_mask2former
from vitkit.configs.parts.resnet import resnet50_for_transfer


def config(size=360, pretrained=True, channels=None, flips=True):
    """Return the config; `size` is the short side in validation, in pixels; crops in training have 0.7 of it.

    With `channels` the images have as many, of 8 or 16 bits, and their colors are not distorted. Without
    `flips` images are not mirrored.
    """
    cfg = camvid_mask2former()
    if pretrained:
        cfg["model"]["backbone"] = resnet50_for_transfer()
        cfg["optimizer"].update(lr=3e-4, backbone_lr=1e-4)
    crop = round(0.7 * size / 32) * 32
    cfg["data"] = dict(
        train=dict(
            type="SemanticFolder", images="data/own/images", labels="data/own/labels", classes=["background", "object"],
            transforms=dict(
                type="SemanticTrainTransforms", crop_size=[crop, crop],
                short_sides=[round(size * tenths / 10) for tenths in range(6, 15)],
                color_probability=1.0 if channels is None else 0.0, flip_probability=0.5 if flips else 0.0,
            ),
        ),
        val=dict(
            type="SemanticFolder", images="data/own/images", labels="data/own/labels", classes=["background", "object"],
            transforms=dict(type="EvalResize", short_side=size, max_size=round(1.67 * size)),
        ),
        images_per_gpu=4, num_workers=1, aspect_ratio_grouping=False, channels=channels,
    )  # fmt: skip
    cfg["schedule"] = dict(type="CosineLR", warmup_share=0.16)  # 300 of the 1840 steps above
    cfg["train"]["precision"] = "auto"
    return cfg
