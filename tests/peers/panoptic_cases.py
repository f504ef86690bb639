"""Random panoptic maps, predictions that differ from them, and their files as panopticapi reads them."""

import numpy as np
import torch
from helpers.plain_dataset import PlainDataset
from PIL import Image

from vitkit.evaluation.panoptic import PanopticEvaluator
from vitkit.ops.label_maps import ids_to_colors
from vitkit.structures import PanopticMap

CATEGORY_IDS, THINGS = [17, 1, 90, 187, 200], [True, True, True, False, False]
NUM_LABELS = len(CATEGORY_IDS)
SIZE = (40, 56)


def dataset_of(truths, *, category_ids=CATEGORY_IDS, things=THINGS):
    """Return a dataset from image id -> PanopticMap."""
    maps = list(truths.values())
    return PlainDataset(
        annotations=["panoptic"],
        classes=[f"class {i}" for i in category_ids],
        category_ids=category_ids,
        things=things,
        image_ids=list(truths),
        load_panoptic=maps.__getitem__,
    )


def evaluate(dataset, predictions):
    evaluator = PanopticEvaluator(dataset)
    for image_id, (ids, segments) in predictions.items():
        evaluator.update([dict(panoptic=torch.from_numpy(ids), segments_info=segments)], [dict(image_id=image_id)])
    evaluator.gather()
    return evaluator.compute(), evaluator.per_class()


def random_truth(rng, *, crowds=0.15, void=0.15):
    """Return a map of overlapping rectangles on stripes of stuff."""
    ids = np.zeros(SIZE, np.int32)
    numbers = rng.choice(np.arange(1, 1 << 24), 12, replace=False)
    labels = {}
    for k, number in enumerate(numbers):
        if k < 3:
            ids[k * 14 : (k + 1) * 14] = number
        else:
            y, x = rng.integers(0, SIZE[0] - 4), rng.integers(0, SIZE[1] - 4)
            height, width = rng.integers(3, 20, 2)
            ids[y : y + height, x : x + width] = number
        labels[number] = int(rng.integers(3, 5)) if k < 3 else int(rng.integers(3))
    present = np.unique(ids)
    ids[np.isin(ids, present[rng.random(len(present)) < void])] = 0
    segments = [
        dict(id=int(i), label=labels[i], iscrowd=bool(THINGS[labels[i]] and rng.random() < crowds))
        for i in np.unique(ids)
        if i
    ]
    return PanopticMap(ids, segments)


def perturbed(rng, truth):
    """Return the truth moved, with segments merged, divided, left out, and of other classes, under new ids."""
    ids = np.roll(truth.panoptic, rng.integers(-3, 4, 2), (0, 1))
    labels = {segment["id"]: segment["label"] for segment in truth.segments_info}
    for segment_id in list(labels):
        change = rng.random()
        if change < 0.1:
            ids[ids == segment_id] = 0
        elif change < 0.2:
            ids[ids == segment_id] = rng.choice(list(labels))
        elif change < 0.3:
            labels[segment_id] = int(rng.integers(len(CATEGORY_IDS)))
        elif change < 0.4:
            new = int(rng.integers(1, 1 << 24))
            labels[new] = labels[segment_id]
            part = np.zeros(SIZE, bool)
            part[:, : rng.integers(SIZE[1])] = True
            ids[(ids == segment_id) & part] = new
    renumbered, segments = np.zeros(SIZE, np.int32), []
    for segment_id in np.unique(ids[ids > 0]):
        number = int(rng.integers(1, 1 << 24))
        renumbered[ids == segment_id] = number
        segments.append(dict(id=number, label=labels[segment_id]))
    return renumbered, segments


def write_panoptic(folder, maps):
    """Write maps for panopticapi; returns its annotations."""
    folder.mkdir()
    annotations = []
    for image_id, (ids, segments) in maps.items():
        Image.fromarray(ids_to_colors(ids)).save(folder / f"{image_id}.png")
        infos = [
            dict(
                id=segment["id"],
                category_id=CATEGORY_IDS[segment["label"]],
                iscrowd=int(segment.get("iscrowd", 0)),
                area=int((ids == segment["id"]).sum()),
            )
            for segment in segments
        ]
        annotations.append(dict(image_id=image_id, file_name=f"{image_id}.png", segments_info=infos))
    return annotations
