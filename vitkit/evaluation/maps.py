"""Predicted maps as PNG files, compressed in memory or in a folder; and the pixels near edges."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from vitkit.errors import DataError
from vitkit.io.folders import declare_output
from vitkit.io.image_files import MAX_PIXELS, read_label_colors
from vitkit.ops.label_maps import colors_to_ids, ids_to_colors
from vitkit.structures import IGNORE_INDEX

BOUNDARY_WIDTH = 0.02
"""Width of a boundary, as a fraction of the image's diagonal."""


def encode_labels(labels: np.ndarray) -> bytes:
    """Encode an (H, W) uint8 or uint16 map as a gray PNG, or (H, W, 3) uint8 BGR as one of colors."""
    # Level 1 of 9 is several times faster than the default; a 640x480 map takes 5 to 20 kB either way.
    _, data = cv2.imencode(".png", labels, [cv2.IMWRITE_PNG_COMPRESSION, 1])
    return data.tobytes()


def encode_ids(ids: np.ndarray) -> bytes:
    """Encode an (H, W) map of segment ids below 2^24 as a PNG whose colors are the ids: R + 256 G + 65536 B."""
    return encode_labels(cv2.cvtColor(ids_to_colors(ids), cv2.COLOR_RGB2BGR))


def decode_labels(data: bytes) -> np.ndarray:
    """Decode the output of `encode_labels`."""
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)


def decode_ids(data: bytes) -> np.ndarray:
    """Decode the output of `encode_ids` to (H, W) int32."""
    return colors_to_ids(cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB))


def read_ids(path: Path, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Return the (H, W) int32 segment ids of a PNG with three channels.

    Raises:
        DataError: the file is missing or damaged.
    """
    return colors_to_ids(read_label_colors(path, "results", max_pixels=max_pixels))


def map_name(image_id: Any) -> str:
    """Return the file name of an image's map: twelve digits, as in COCO, for a number, else the id (perhaps a path)."""
    return f"{image_id:012d}.png" if isinstance(image_id, int | np.integer) else f"{image_id}.png"


def make_map_folder(path: Path) -> Path:
    """Make the folder of the maps that belong to the results file `path`, which are not data, and return it."""
    folder = map_folder(path)
    with suppress(OSError):  # writing into it says what is wrong
        folder.mkdir(parents=True, exist_ok=True)
        declare_output(folder)
    return folder


def map_folder(path: Path) -> Path:
    """Return the folder of the maps that belong to the results file `path`: NAME for NAME.json."""
    return path.with_suffix("") if path.suffix else path.with_name(f"{path.name}_maps")


def check_size(predicted: np.ndarray, truth: np.ndarray, image_id: Any) -> None:
    """Check that a predicted map covers the image.

    Raises:
        DataError: the predicted map differs in size from the true one.
    """
    if predicted.shape != truth.shape:
        raise DataError(
            f"image {image_id}: the predicted map is {predicted.shape[1]}x{predicted.shape[0]} pixels (width x height) "
            f"and the true one {truth.shape[1]}x{truth.shape[0]}. Predictions must have the original image's size."
        )


def positions_of(image_ids: Sequence[Any]) -> dict[Any, int]:
    """Return image id -> index in the dataset, with ids as plain Python values."""
    plain = (image_id.item() if isinstance(image_id, np.generic) else image_id for image_id in image_ids)
    return {image_id: position for position, image_id in enumerate(plain)}


def boundary_counts(truth: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    """Count the pixels of each class near the edge of its region.

    Args:
        truth, predicted: (H, W) uint8 label maps, 255 = none; pixels without a true label are not counted.
    Returns:
        (3, num_classes) int32 numbers of pixels: in both maps, in `truth`, in `predicted`.
    """
    height, width = truth.shape
    distance = max(1, round(BOUNDARY_WIDTH * float(np.hypot(height, width))))
    near_true = near_edge(truth, distance) & (truth != IGNORE_INDEX)
    near_predicted = near_edge(predicted, distance) & (truth != IGNORE_INDEX)
    both = near_true & near_predicted & (truth == predicted)
    pixels = (truth[both], truth[near_true], predicted[near_predicted])
    return np.stack([np.bincount(labels, minlength=256)[:num_classes] for labels in pixels]).astype(np.int32)


def near_edge(labels: np.ndarray, distance: int) -> np.ndarray:
    """Find the pixels with a different label, or the outside of the image, within `distance` rows and columns.

    For every class at once, these are the pixels that its mask loses in `distance` erosions with a 3x3 square.

    Args:
        labels: (H, W) uint8.
    Returns:
        (H, W) bool, True near an edge.
    """
    # A label that occurs nowhere else stands for the outside: uint16 has room for it besides all uint8 labels.
    padded = cv2.copyMakeBorder(labels.astype(np.uint16), 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=256)
    square = cv2.getStructuringElement(cv2.MORPH_RECT, (2 * distance + 1,) * 2)
    largest, least = cv2.dilate(padded, square), cv2.erode(padded, square)
    return (largest != least)[1:-1, 1:-1]
