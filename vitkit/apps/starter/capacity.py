"""How many objects a detector has room for: its queries and detections, chosen by the image with the most objects."""

import functools
import json
import math
from collections.abc import Sequence

from vitkit.apps.datasets.object_counts import with_margin
from vitkit.apps.starter.own_data import OwnData
from vitkit.config import load_config
from vitkit.engine.build import build_model
from vitkit.errors import VitkitError
from vitkit.ops.keypoints import KEYPOINT_MAP
from vitkit.protocols.model import child
from vitkit.text_format import pluralize

QUERIES_PER_OBJECT = 2.5
"""Queries per object of the image with the most objects; COCO's has 63, for the 100 queries of DETR and 900 of DINO."""
MIN_QUERIES = 50
SELECTS_BOXES = ("detection", "keypoints")
"""The tasks whose detectors choose their queries from the locations of the image."""
COUNTED = 100
"""The number of detections of an image that the configs of configs/start return and evaluate."""


def capacity_lines(task: str, data: OwnData, options: str, overrides: Sequence[str]) -> list[str]:
    """Return the lines of a config that set how many objects can be found in an image.

    Args:
        task: one of SELECTS_BOXES, or "instance"; others need none.
        options, overrides: the arguments of the config's function, and the user's overrides.
    """
    if task not in (*SELECTS_BOXES, "instance"):
        return []
    most = data.most_objects
    queries = max(MIN_QUERIES, 10 * round(QUERIES_PER_OBJECT * most / 10))
    about = f"# the image with the most objects has {pluralize(most, 'objects')}"
    if task in SELECTS_BOXES and (limit := num_locations(task, data, options, overrides)) < queries:
        queries, about = limit, f"{about}, and the smallest one in training {limit} locations to choose queries from"
    lines = [about, f'cfg["model"]["num_queries"] = {queries}']
    if (detections := with_margin(most)) > COUNTED:
        name = "num_detections" if task in SELECTS_BOXES else "num_instances"
        lines += [f'cfg["model"]["{name}"] = {detections}', f'cfg["evaluator"]["max_dets"] = {detections}']
    return lines


def num_locations(task: str, data: OwnData, options: str, overrides: Sequence[str]) -> int:
    """Return the least number of locations that the maps of a training image have, in a task of SELECTS_BOXES.

    The smallest image is a square crop or, as their long sides are limited, the most elongated photo.
    """
    short, longest, strides = _sizes(task, options, tuple(overrides))
    elongated = min(short, longest / data.elongation)
    shapes = [(short, short), (elongated, elongated * data.elongation)]
    counts = [sum(math.ceil(a / stride) * math.ceil(b / stride) for stride in strides) for a, b in shapes]
    return 10 * (min(counts) // 10)


@functools.cache
def _sizes(task: str, options: str, overrides: Sequence[str]) -> tuple[int, int, list[int]]:
    """Return the least short side and the largest long side of a training image of the task's config, and the strides
    of the maps that boxes are selected from; the default ones if the overrides are invalid."""
    name = f"start/{task}:{options.replace(' ', '')}"
    stages = load_config(name, check=False)["data"]["train"]["transforms"]["transforms"]
    parts = [stage["transforms"] for stage in stages]
    crops = [(part["transforms"] if isinstance(part, dict) else part)[1] for part in parts]  # also of those in mosaics
    crop = min(crops, key=lambda crop: min(crop["scales"]))
    try:
        strides = _strides(json.dumps(load_config(name, overrides, check=False)["model"]))
    except VitkitError:
        strides = [8, 16, 32]  # the config's check says what is wrong
    return min(crop["scales"]), crop["max_size"], strides


@functools.cache  # all sizes of image have the same model
def _strides(model: str) -> list[int]:
    """Return the strides of the maps that boxes are selected from in a model, given as JSON."""
    neck = child(build_model(json.loads(model), classes=["object"]), "neck")
    return [info.stride for name, info in neck.feature_info.items() if name != KEYPOINT_MAP]
