"""How many objects images have, compared with how many a model can find."""

import math
from typing import Any

import numpy as np

from vitkit.registry import MODELS, Spec, parameters_of
from vitkit.text_format import pluralize


def model_argument(spec: Spec, name: str) -> Any:
    """Return an argument of a config's model, or its default; None if the model has no such argument."""
    constructor, arguments = MODELS.resolve(spec)
    parameter = parameters_of(constructor).get(name)
    return arguments.get(name, None if parameter is None else parameter.default)


def describe_few_queries(counts: np.ndarray | None, num_queries: int | None, noun: str = "objects") -> str:
    """Return a warning if images have more objects, (images,) `counts`, than the model has queries; else ""."""
    if counts is None or num_queries is None or not counts.size or (most := int(counts.max())) <= num_queries:
        return ""
    return (
        f"at most {most} {noun} in an image, {pluralize(num_queries, 'queries')}: in "
        f"{pluralize((counts > num_queries).sum(), 'images')} some can never be found; set "
        f"model.num_queries={with_margin(most)}"
    )


def with_margin(most: int) -> int:
    """Return the number of queries or detections for images with up to this number of objects."""
    return math.ceil(1.3 * most / 10) * 10
