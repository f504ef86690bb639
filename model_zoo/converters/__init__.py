"""Convert weights between vitkit's names and those of other projects; a file per model, its names as two-way tables."""

from vitkit.model_zoo.converters.reading import (
    TOOLBOX_MODELS,
    convert_official,
    describe,
    describe_other,
    ranks_by_first_row,
)
from vitkit.model_zoo.converters.writing import Target, Written, write_names

__all__ = [
    "TOOLBOX_MODELS",
    "Target",
    "Written",
    "convert_official",
    "describe",
    "describe_other",
    "ranks_by_first_row",
    "write_names",
]
