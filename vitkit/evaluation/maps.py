"""Predicted maps as PNG: kept compressed in memory, written to a folder, read back."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from vitkit.errors import ConfigError, DataError


def encode_labels(labels: np.ndarray) -> bytes:
    """(H, W) uint8 or uint16 -> a grey PNG."""
    return _encode(labels)


def encode_ids(ids: np.ndarray) -> bytes:
    """(H, W) segment ids below 2^24 -> a PNG whose colours are the ids: R + 256 G + 65536 B."""
    return _encode(np.stack([ids >> 16 & 255, ids >> 8 & 255, ids & 255], axis=2).astype(np.uint8))


def _encode(picture: np.ndarray) -> bytes:
    # Level 1 of 9 is several times faster than the default; a map of 640x480 takes 5 to 20 kB either way.
    _, data = cv2.imencode(".png", picture, [cv2.IMWRITE_PNG_COMPRESSION, 1])
    return data.tobytes()


def read_labels(path: Path) -> np.ndarray:
    """The (H, W) values of a grey PNG.

    Raises:
        DataError: the file is missing, damaged or coloured.
    """
    picture = _decode(path, cv2.IMREAD_UNCHANGED)
    if picture.ndim != 2:
        raise DataError(f"results '{path}': a picture of {picture.shape[2]} channels; expected one, of class values.")
    return picture


def read_ids(path: Path) -> np.ndarray:
    """The (H, W) int32 segment ids of a PNG of three channels.

    Raises:
        DataError: the file is missing or damaged.
    """
    blue, green, red = cv2.split(_decode(path, cv2.IMREAD_COLOR).astype(np.int32))
    return red | green << 8 | blue << 16


def _decode(path: Path, mode: int) -> np.ndarray:
    try:
        data = np.frombuffer(path.read_bytes(), np.uint8)
    except OSError as error:
        raise DataError(f"results: cannot read '{path}' ({error.strerror}).") from error
    picture = cv2.imdecode(data, mode) if data.size else None
    if picture is None:
        raise DataError(f"results: '{path}' is no picture, or damaged ({data.size} bytes).")
    return picture


def map_name(image_id: Any) -> str:
    """The file name of an image's map: COCO's twelve digits for a number, else the id itself (it may hold folders)."""
    return f"{image_id:012d}.png" if isinstance(image_id, int | np.integer) else f"{image_id}.png"


def map_folder(path: Path) -> Path:
    """The folder of the maps that belong to the results file `path`: of NAME.json NAME."""
    return path.with_suffix("") if path.suffix else path.with_name(f"{path.name}_maps")


def write_map(folder: Path, name: str, data: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def require_method(dataset: Any, method: str, evaluator: str) -> None:
    """
    Raises:
        ConfigError: the dataset has no such truth.
    """
    if not hasattr(dataset, method):
        raise ConfigError(
            f"evaluator {evaluator}: dataset {type(dataset).__name__} has no such annotations (it lacks {method}()). "
            "Choose the evaluator of the dataset's task."
        )


def predicted_field(prediction: Mapping[str, Any], field: str, evaluator: str) -> Any:
    """
    Raises:
        ConfigError: the model predicts no such thing.
    """
    if field not in prediction:
        raise ConfigError(
            f"evaluator {evaluator} needs {field!r}, but the model predicts {', '.join(prediction)}. Set model.tasks, "
            "or choose another evaluator."
        )
    return prediction[field]


def check_size(predicted: np.ndarray, truth: np.ndarray, image_id: Any) -> None:
    """
    Raises:
        DataError: a predicted map has another size than the true one.
    """
    if predicted.shape != truth.shape:
        raise DataError(
            f"image {image_id}: the predicted map is {predicted.shape[1]}x{predicted.shape[0]} pixels (width x height) "
            f"and the true one {truth.shape[1]}x{truth.shape[0]}. Predictions are of the original image's size."
        )


def positions_of(image_ids: Sequence[Any]) -> dict[Any, int]:
    """Image id -> position in the dataset, ids as plain Python values."""
    return {_plain(image_id): position for position, image_id in enumerate(image_ids)}


def _plain(image_id: Any) -> Any:
    return image_id.item() if isinstance(image_id, np.generic) else image_id
