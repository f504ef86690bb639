"""Random data of which each image is annotated for some classes only, as LVIS is."""

import numpy as np
from pycocotools import mask as coco_mask

WIDTH, HEIGHT = 320, 240


def federated_truth(num_images=30, num_classes=12, seed=0):
    """Return the content of an LVIS file, whose boxes have all sizes."""
    rng = np.random.default_rng(seed)
    category_ids = [3 * k + 2 for k in range(num_classes)]
    content = dict(images=[], annotations=[], categories=[])
    for k, category_id in enumerate(category_ids):
        content["categories"].append(dict(id=category_id, name=f"class {k}", frequency="rcf"[k % 3], image_count=k + 1))
    for image_id in range(5, 5 + num_images):
        positive, negative, _ = np.split(rng.permutation(category_ids), [3, 6])
        for category_id in positive.tolist():
            for _ in range(rng.integers(1, 4)):
                box = random_box(rng)
                content["annotations"].append(
                    dict(
                        id=len(content["annotations"]) + 1, image_id=image_id, category_id=category_id, bbox=box,
                        area=box[2] * box[3], segmentation=[outline(box)],
                    )
                )  # fmt: skip
        content["images"].append(
            dict(
                id=image_id, width=WIDTH, height=HEIGHT,
                coco_url=f"http://images.cocodataset.org/train2017/{image_id:012}.jpg",
                neg_category_ids=negative.tolist(), not_exhaustive_category_ids=positive[:1].tolist(),
            )
        )  # fmt: skip
    return content


def federated_results(truth, *, per_image=40, seed=0):
    """Return predictions with boxes and masks: of some objects, near some, and of any class anywhere."""
    rng = np.random.default_rng([seed, 1])
    category_ids = [category["id"] for category in truth["categories"]]
    results = []
    for image in truth["images"]:
        objects = [a for a in truth["annotations"] if a["image_id"] == image["id"]]
        for _ in range(per_image):
            category_id, box, score = int(rng.choice(category_ids)), random_box(rng), rng.random() * 0.7
            if rng.random() < 0.5:
                chosen = objects[rng.integers(len(objects))]
                category_id = chosen["category_id"]
                box = [max(0.0, float(v + d)) for v, d in zip(chosen["bbox"], rng.normal(0, 3, 4))]
                box[2:] = [max(1.0, v) for v in box[2:]]
                score += 0.3 * rng.random()
            rle = coco_mask.frPyObjects([outline(box)], HEIGHT, WIDTH)[0]
            segmentation = {"size": rle["size"], "counts": rle["counts"].decode()}
            # Rounded, so that there are equal scores.
            result = dict(image_id=image["id"], category_id=category_id, bbox=box, score=round(float(score), 2))
            results.append(result | {"segmentation": segmentation})
    return results


def random_box(rng):
    """Return a small, medium or large box, xywh."""
    width, height = rng.uniform(8, [30, 90, 180][rng.integers(3)], 2)
    return [float(v) for v in (rng.uniform(0, WIDTH - width), rng.uniform(0, HEIGHT - height), width, height)]


def outline(box):
    """Return a box as a flat polygon."""
    x, y, w, h = box
    return [x, y, x + w, y, x + w, y + h, x, y + h]
