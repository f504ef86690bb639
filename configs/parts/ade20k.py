"""ADE20K, the 150 classes of the scene parsing benchmark (Zhou et al. 2017, https://arxiv.org/abs/1608.05442).

Semantic labels as published in ADEChallengeData2016 (images/ and annotations/); panoptic and instance annotations in
COCO's format, as Mask2Former's scripts prepare them, beside those folders.
"""

CLASSES = [
    "wall", "building", "sky", "floor", "tree", "ceiling", "road", "bed", "windowpane", "grass", "cabinet", "sidewalk",
    "person", "earth", "door", "table", "mountain", "plant", "curtain", "chair", "car", "water", "painting", "sofa",
    "shelf", "house", "sea", "mirror", "rug", "field", "armchair", "seat", "fence", "desk", "rock", "wardrobe", "lamp",
    "bathtub", "railing", "cushion", "base", "box", "column", "signboard", "chest of drawers", "counter", "sand",
    "sink", "skyscraper", "fireplace", "refrigerator", "grandstand", "path", "stairs", "runway", "case", "pool table",
    "pillow", "screen door", "stairway", "river", "bridge", "bookcase", "blind", "coffee table", "toilet", "flower",
    "book", "hill", "bench", "countertop", "stove", "palm", "kitchen island", "computer", "swivel chair", "boat", "bar",
    "arcade machine", "hovel", "bus", "towel", "light", "truck", "tower", "chandelier", "awning", "streetlight",
    "booth", "television", "airplane", "dirt track", "apparel", "pole", "land", "bannister", "escalator", "ottoman",
    "bottle", "buffet", "poster", "stage", "van", "ship", "fountain", "conveyer belt", "canopy", "washer", "plaything",
    "swimming pool", "stool", "barrel", "basket", "waterfall", "tent", "bag", "minibike", "cradle", "oven", "ball",
    "food", "step", "tank", "trade name", "microwave", "pot", "animal", "bicycle", "lake", "dishwasher", "screen",
    "blanket", "sculpture", "hood", "sconce", "vase", "traffic light", "tray", "ashcan", "fan", "pier", "crt screen",
    "plate", "monitor", "bulletin board", "shower", "radiator", "glass", "clock", "flag",
]  # fmt: skip


STUFF = {
    "wall", "building", "sky", "floor", "tree", "ceiling", "road", "grass", "sidewalk", "earth", "mountain", "plant",
    "water", "house", "sea", "rug", "field", "rock", "base", "sand", "skyscraper", "grandstand", "path", "runway",
    "stairway", "river", "bridge", "blind", "hill", "bar", "hovel", "tower", "dirt track", "land", "escalator",
    "buffet", "poster", "stage", "conveyer belt", "canopy", "swimming pool", "waterfall", "tent", "cradle", "tank",
    "lake", "blanket", "pier", "crt screen", "shower",
}  # fmt: skip
"""The 50 classes without instances in ADE20K's panoptic segmentation."""

SEMANTIC = dict(num_classes=len(CLASSES))
PANOPTIC = dict(num_classes=len(CLASSES), things=[name not in STUFF for name in CLASSES])
INSTANCE = dict(num_classes=len(CLASSES) - len(STUFF))
"""Model arguments for instance segmentation, see `with_panoptic`."""


def ade20k_semantic(images_per_gpu=2, size=512, root="data/ADEChallengeData2016"):
    """Train on crops of `size`; evaluate with the short side at `size`, and the long side at most 4 times as long."""

    def split(name):
        return dict(
            type="SemanticFolder",
            images=f"{{root}}/images/{name}",
            labels=f"{{root}}/annotations/{name}",
            classes=CLASSES,
            zero_is_ignored=True,
        )

    return _with_crops(split("training"), split("validation"), images_per_gpu, size, root)


def ade20k_panoptic(images_per_gpu=2, size=640, root="data/ADEChallengeData2016"):
    def split(name, short):
        return dict(
            type="CocoPanoptic",
            images=f"{{root}}/images/{name}",
            maps=f"{{root}}/ade20k_panoptic_{short}",
            annotations=f"{{root}}/ade20k_panoptic_{short}.json",
        )

    return _with_crops(split("training", "train"), split("validation", "val"), images_per_gpu, size, root)


def ade20k_instance(images_per_gpu=2, size=640, root="data/ADEChallengeData2016"):
    def split(name, short):
        return dict(
            type="CocoDetection",
            masks=True,
            bad_boxes="drop",
            images=f"{{root}}/images/{name}",
            annotations=f"{{root}}/ade20k_instance_{short}.json",
        )

    return _with_crops(split("training", "train"), split("validation", "val"), images_per_gpu, size, root)


def _with_crops(train, val, images_per_gpu, size, root):
    crop = dict(type="SemanticTrainTransforms", crop_size=[size, size])
    if train["type"] != "SemanticFolder":
        crop["max_class_area"] = 1.0
    return dict(
        root=root,
        images_per_gpu=images_per_gpu,
        aspect_ratio_grouping=False,
        train=dict(**train, transforms=crop),
        val=dict(**val, transforms=dict(type="EvalResize", short_side=size, max_size=4 * size)),
    )
