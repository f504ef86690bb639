"""COCO 2017 instance segmentation (Lin et al. 2014, https://arxiv.org/abs/1405.0312) in the official folder layout."""


def coco_instance(images_per_gpu=2, size=1024, root="data/coco"):
    """Train with large-scale jitter to `size`, as Mask2Former does."""
    return dict(
        root=root,
        images_per_gpu=images_per_gpu,
        # The jittered images all have the same size.
        aspect_ratio_grouping=False,
        train=dict(
            type="CocoDetection",
            masks=True,
            images="{root}/train2017",
            annotations="{root}/annotations/instances_train2017.json",
            # A few boxes of train2017 have no height.
            bad_boxes="drop",
            transforms=dict(type="LargeScaleJitter", size=size),
        ),
        val=dict(
            type="CocoDetection",
            masks=True,
            images="{root}/val2017",
            annotations="{root}/annotations/instances_val2017.json",
            transforms=dict(type="EvalResize", short_side=800, max_size=1333),
        ),
    )
