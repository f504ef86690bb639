"""The synthetic world at 32 pixels with one large shape in each image, for short comparisons of classifiers.

Transformers learn quickstart/classifier's images of 64 pixels too slowly for that. Batches of 32 instead of 64 give
twice the steps.
"""


def small_shapes_settings():
    """Return overrides of quickstart/classifier: images, batch size, and a schedule for transformers."""
    size = {"image_size": 32, "min_size": 0.5, "max_size": 0.9}
    return {f"data.{part}.{key}": value for part in ("train", "val") for key, value in size.items()} | {
        "data.images_per_gpu": 32,
        "schedule": dict(type="CosineLR", warmup_steps=100),
    }
