"""The synthetic world at 32 pixels with one large shape in each image, for short comparisons of classifiers.

A transformer of the size of quickstart/classifier's images learns the world of 64 pixels too slowly: after three epochs
ViT and Swin are at 0.2 and 0.3 of six classes, where no part can show its worth.
"""


def small_shapes_settings():
    """Return overrides of quickstart/classifier: images, and a schedule for transformers from random weights."""
    size = {"image_size": 32, "min_size": 0.5, "max_size": 0.9}
    return {f"data.{part}.{key}": value for part in ("train", "val") for key, value in size.items()} | {
        "schedule": dict(type="CosineLR", warmup_steps=100)
    }
