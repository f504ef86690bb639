"""Numbers of a detection dataset's images and objects."""

from vitkit.data.formats.annotated import AnnotatedImages
from vitkit.text_format import pluralize


def summarize(data: AnnotatedImages) -> str:
    """Summarize the numbers: "292 images (205 train, 87 val), 3943 objects of 3 classes"."""
    parts = ", ".join(f"{len(ids)} {name}" for name, ids in data.splits.items())
    text = f"{pluralize(len(data.images), 'images')}{f' ({parts})' if parts else ''}, "
    text += f"{pluralize(len(data.annotations), 'objects')} of {pluralize(len(data.categories), 'classes')}"
    num_masks = sum(bool(a.get("segmentation")) for a in data.annotations)
    return text + (f", {num_masks} with masks" if num_masks else "")


def count_classes(data: AnnotatedImages) -> dict[str, int]:
    """Return the number of objects of each class."""
    names = {category["id"]: category["name"] for category in data.categories}
    counts = dict.fromkeys(names.values(), 0)
    for annotation in data.annotations:
        counts[names[annotation["category_id"]]] += 1
    return counts
