"""COCO 2017 keypoints of persons (Lin et al. 2014, https://arxiv.org/abs/1405.0312) in the official folder layout."""

from vitkit.configs.parts.coco import coco_detection


def coco_keypoints(images_per_gpu=2, root="data/coco"):
    """Train on all images with persons, those without labeled keypoints included."""
    data = coco_detection(images_per_gpu, root)
    for split in ("train", "val"):
        annotations = f"{{root}}/annotations/person_keypoints_{split}2017.json"
        data[split] |= dict(annotations=annotations, keypoints=True)
    return data
