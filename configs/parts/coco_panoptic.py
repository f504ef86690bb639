"""COCO 2017 panoptic segmentation (Kirillov et al. 2019, https://arxiv.org/abs/1801.00868), official folder layout."""

PANOPTIC = dict(num_classes=133, things=[True] * 80 + [False] * 53)
"""Model arguments for contiguous classes, see `with_panoptic`."""

RAW_IDS = dict(num_classes=250, things=[id_ < 92 for id_ in range(250)])
"""Model arguments of DETR, whose official classes are the raw ids; those of stuff begin at 92."""


def _coco_panoptic(train_transforms, images_per_gpu, aspect_ratio_grouping, root):
    def split(name):
        return dict(
            type="CocoPanoptic",
            images=f"{{root}}/{name}",
            maps=f"{{root}}/annotations/panoptic_{name}",
            annotations=f"{{root}}/annotations/panoptic_{name}.json",
        )

    return dict(
        root=root,
        images_per_gpu=images_per_gpu,
        aspect_ratio_grouping=aspect_ratio_grouping,
        train=dict(**split("train2017"), transforms=train_transforms),
        val=dict(**split("val2017"), transforms=dict(type="EvalResize", short_side=800, max_size=1333)),
    )


def coco_panoptic(images_per_gpu=2, size=1024, root="data/coco"):
    """Train with large-scale jitter to `size`, as Mask2Former does."""
    return _coco_panoptic(dict(type="LargeScaleJitter", size=size), images_per_gpu, False, root)


def coco_panoptic_multi_scale(images_per_gpu=2, root="data/coco"):
    """Train on images that are resized and cropped as DETR's, as MaskFormer and DETR's mask head do."""
    return _coco_panoptic(dict(type="DETRTrainTransforms"), images_per_gpu, True, root)
