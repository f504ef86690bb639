"""Image files to upright RGB arrays."""

import io
from pathlib import Path

import cv2
import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from vitkit.errors import DataError

_JPEG_START, _JPEG_END = b"\xff\xd8", b"\xff\xd9"


def read_image(path: str | Path) -> np.ndarray:
    """Reads any picture (grey, palette, CMYK, with alpha, 16 bit, rotated by EXIF) as upright RGB.

    Returns:
        (H, W, 3) uint8.
    Raises:
        DataError: the file is missing, truncated, or no image.
    """
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # a name with a zero or half a character is a ValueError
        why = getattr(error, "strerror", error)
        raise DataError(
            f"images: cannot read '{path}' ({why}). The annotation file lists it: check that the images folder is the "
            "one that belongs to the annotations, and complete."
        ) from error
    # Older OpenCV fills the missing part of a truncated JPEG with grey and says nothing; Pillow refuses it.
    suspect = data.startswith(_JPEG_START) and not data.rstrip(b"\0").endswith(_JPEG_END)
    image = None if suspect or not data else _decode_opencv(data)
    return _decode_pillow(data, path) if image is None else image


def _decode_opencv(data: bytes) -> np.ndarray | None:
    encoded = np.frombuffer(data, np.uint8)
    if hasattr(cv2, "IMREAD_COLOR_RGB"):  # since OpenCV 4.10
        return cv2.imdecode(encoded, cv2.IMREAD_COLOR_RGB)
    image = cv2.imdecode(encoded, cv2.IMREAD_COLOR)
    return None if image is None else cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


def _decode_pillow(data: bytes, path: str | Path) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(data)) as image:
            return np.array(ImageOps.exif_transpose(image).convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        # Pillow's words for what is no image name its in-memory buffer, which says nothing to a user.
        why = "not an image of a known format" if isinstance(error, Image.UnidentifiedImageError) else str(error)
        raise DataError(
            f"images: cannot decode '{path}' ({len(data)} bytes): {why}. Download or export the file again."
        ) from error


def to_tensor(image: np.ndarray) -> Tensor:
    """(H, W, 3) uint8 to a contiguous (3, H, W) uint8 tensor."""
    planes = np.empty((3, *image.shape[:2]), np.uint8)
    # Ten times faster than NumPy's or PyTorch's transposed copy; OpenCV writes into the arrays of the list.
    cv2.split(image, list(planes))
    return torch.from_numpy(planes)
