"""Cityscapes (Cordts et al. 2016, https://arxiv.org/abs/1604.01685), official folder layout.

The published label images contain 34 ids, of which 19 are classes; they need not be converted to "train ids", nor to
panoptic images.
"""

CLASS_OF_ID = {
    7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole", 19: "traffic light",
    20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky", 24: "person", 25: "rider", 26: "car", 27: "truck",
    28: "bus", 31: "train", 32: "motorcycle", 33: "bicycle",
}  # fmt: skip
THINGS = ["person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle"]
IGNORE_INDEX = [value for value in range(34) if value not in CLASS_OF_ID] + [255]


SEMANTIC = dict(num_classes=len(CLASS_OF_ID))
PANOPTIC = dict(num_classes=len(CLASS_OF_ID), things=[name in THINGS for name in CLASS_OF_ID.values()])
INSTANCE = dict(num_classes=len(THINGS))
"""Model arguments for instance segmentation, see `with_panoptic`."""


def cityscapes_semantic(images_per_gpu=2, crop_size=(512, 1024), root="data/cityscapes"):
    def split(name):
        return dict(
            type="SemanticFolder",
            images=f"{{root}}/leftImg8bit/{name}",
            labels=f"{{root}}/gtFine/{name}",
            image_suffix="_leftImg8bit.png",
            label_suffix="_gtFine_labelIds.png",
            classes=list(CLASS_OF_ID.values()),
            values=list(CLASS_OF_ID),
            ignore=IGNORE_INDEX,
        )

    return _with_crops(split("train"), split("val"), images_per_gpu, crop_size, root)


def cityscapes_panoptic(images_per_gpu=2, crop_size=(512, 1024), root="data/cityscapes", task="panoptic"):
    def split(name):
        return dict(
            type="CityscapesPanoptic",
            images=f"{{root}}/leftImg8bit/{name}",
            labels=f"{{root}}/gtFine/{name}",
            classes=list(CLASS_OF_ID.values()),
            values=list(CLASS_OF_ID),
            things=THINGS,
            task=task,
        )

    return _with_crops(split("train"), split("val"), images_per_gpu, crop_size, root, max_class_area=1.0)


def cityscapes_instance(images_per_gpu=2, crop_size=(512, 1024), root="data/cityscapes"):
    return cityscapes_panoptic(images_per_gpu, crop_size, root, task="instance")


def _with_crops(train, val, images_per_gpu, crop_size, root, **options):
    crop = dict(type="SemanticTrainTransforms", crop_size=list(crop_size), **options)
    return dict(
        root=root,
        images_per_gpu=images_per_gpu,
        aspect_ratio_grouping=False,
        train=dict(**train, transforms=crop),
        val=dict(**val, transforms=dict(type="EvalResize", short_side=1024, max_size=2048)),
    )
