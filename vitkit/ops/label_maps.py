"""Counts and replaces values of label maps and panoptic maps, and converts segment ids to and from colors.

Adjacent pixels are mostly equal, so counting and replacing work on runs of equal values, which is several times faster
than sorting pixels.
"""

from collections.abc import Mapping

import numpy as np


def ids_to_colors(ids: np.ndarray) -> np.ndarray:
    """Encode (H, W) segment ids as the (H, W, 3) uint8 RGB of a panoptic PNG: id = R + 256 G + 65536 B."""
    return np.stack([ids & 255, ids >> 8 & 255, ids >> 16 & 255], axis=2).astype(np.uint8)


def colors_to_ids(colors: np.ndarray) -> np.ndarray:
    """Decode the (H, W, 3) uint8 RGB of a panoptic PNG to (H, W) int32 segment ids."""
    red, green, blue = (colors[:, :, channel].astype(np.int32) for channel in range(3))
    return red | green << 8 | blue << 16


def value_runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split integers into runs of equal values.

    Args:
        values: integers of any shape, read row by row.
    Returns:
        the value and the length of each run, (R,) each.
    """
    flat = values.reshape(-1)
    if not flat.size:
        return flat, np.zeros(0, np.int64)
    starts = np.concatenate([[0], np.flatnonzero(flat[1:] != flat[:-1]) + 1])
    return flat[starts], np.diff(starts, append=flat.size)


def count_values(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count how often each value occurs.

    Args:
        values: integers of any shape.
    Returns:
        the values that occur, ascending, and their counts as int64, (K,) each.
    """
    run_values, lengths = value_runs(values)
    unique, inverse = np.unique(run_values, return_inverse=True)
    counts = np.zeros(len(unique), np.int64)
    np.add.at(counts, inverse, lengths)
    return unique, counts


def replace_values(values: np.ndarray, new: Mapping[int, int], *, dtype: np.dtype, default: int = 0) -> np.ndarray:
    """Replace values by those of a mapping.

    Args:
        values: integers of any shape.
        new: value -> new value.
        default: new value for values that are not in `new`.
    Returns:
        an array of the same shape and of `dtype`.
    """
    run_values, lengths = value_runs(values)
    unique, inverse = np.unique(run_values, return_inverse=True)
    table = np.array([new.get(value, default) for value in unique.tolist()], dtype)
    return np.repeat(table[inverse.reshape(-1)], lengths).reshape(values.shape)
