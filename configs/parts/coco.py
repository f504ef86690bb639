"""COCO 2017 detection (Lin et al. 2014, https://arxiv.org/abs/1405.0312) in the official folder layout."""


def coco_detection(images_per_gpu=2, root="data/coco"):
    return dict(
        root=root,
        images_per_gpu=images_per_gpu,
        train=dict(
            type="CocoDetection",
            images="{root}/train2017",
            annotations="{root}/annotations/instances_train2017.json",
            # A few boxes of train2017 have no height.
            bad_boxes="drop",
            transforms=dict(type="DETRTrainTransforms"),
        ),
        val=dict(
            type="CocoDetection",
            images="{root}/val2017",
            annotations="{root}/annotations/instances_val2017.json",
            transforms=dict(type="EvalResize", short_side=800, max_size=1333),
        ),
    )
