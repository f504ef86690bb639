"""A mask for every object from a few hundred of your photos: a small Mask2Former (https://arxiv.org/abs/2112.01527).

Run:  vitkit start IMAGES ANNOTATIONS --task instance
Here: not measured on photos; `quickstart/mask2former_instance.py` is the same model on the synthetic world.
"""

from vitkit.configs.start.semantic import config as semantic


def config(size=320, pretrained=True, channels=None, flips=True):
    """Return the config; `size` is the side of jittered training images, and the short side in validation."""
    cfg = semantic(size, pretrained, channels, flips)
    cfg["model"].update(tasks=["instance"], num_queries=50)
    split = dict(type="CocoDetection", masks=True, bad_boxes="drop", images="data/own/images")
    cfg["data"].update(
        train=dict(
            **split, annotations="data/own/train.json",
            transforms=dict(
                type="LargeScaleJitter", size=size, scale_range=[0.5, 1.6], min_visible=0.2, min_box_side=2.0,
                flip_probability=0.5 if flips else 0.0,
            ),
        ),
        val=dict(
            **split, annotations="data/own/val.json",
            transforms=dict(type="EvalResize", short_side=size, max_size=round(1.67 * size)),
        ),
        images_per_gpu=2,
    )  # fmt: skip
    cfg["evaluator"] = dict(type="CocoEvaluator", iou_types=["segm"])
    cfg["train"].update(best_metric="segm/AP", reference_batch_size=2)
    return cfg
