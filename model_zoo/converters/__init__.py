"""Convert weights between vitkit's names and those of other projects; a file per model, its names as two-way tables."""

from vitkit.model_zoo.converters.reading import convert_official, describe, ranks_by_first_row
from vitkit.model_zoo.converters.writing import Written, write_names

__all__ = ["Written", "convert_official", "describe", "ranks_by_first_row", "write_names"]
