"""Reads images of any number of channels, of 8 or 16 bits: PNG, TIFF (of one or several pages), NumPy's .npy.

They are read upright, but otherwise as stored: no channel is dropped, converted or interpreted as a color.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image, TiffImagePlugin

from vitkit.errors import DataError
from vitkit.io.image_files import (
    FORMATS,
    MAX_PIXELS,
    NPY_START,
    TIFF_HEIGHT,
    TIFF_ORIENTATION,
    TIFF_STARTS,
    TIFF_WIDTH,
    ImageHeader,
    allow_pixels,
    check_size,
    decoding,
    open_regular,
    pnm_maximum,
    quiet_opencv,
    read_npy_shape,
    read_open_header,
    read_orientation,
    read_tiff_pages,
    size_of,
    tiff_orientation,
)

_BITS, _PHOTOMETRIC, _SAMPLES, _PLANAR, _FORMAT = 258, 262, 277, 284, 339  # tags of a TIFF
_EXTRA_SAMPLES = TiffImagePlugin.EXTRASAMPLES
_GRAY, _RGB = (0, 1), 2
_UNASSOCIATED_ALPHA = (2,)
"""The value of `_EXTRA_SAMPLES` for an alpha by which the colors were not multiplied."""
_SEPARATE = 2
"""The value of `_PLANAR` if each channel is stored as a whole."""
_PNG_START, _COLOR_PNM = b"\x89PNG", b"P6"
_MAX_VALUE = 65535
_HEADER_BYTES = 1 << 20
"""What a file may have in addition to its uncompressed pixels."""
_FROM_8_BITS = 257
"""255 times this is 65535."""
_STRETCHED = (1.0, 99.0)
"""The percentiles of a channel that are drawn as dark and bright."""


def read_channels(path: str | Path, channels: int, what: str = "images", *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Read an image of any number of channels.

    A TIFF has them in the pixels or as pages. A .npy file is (H, W, C), or (H, W) for one channel. PNG and TIFF of RGB
    are in that order, with alpha as the last one.

    Args:
        channels: the number of channels that it must have.
        what: beginning of the error messages.
        max_pixels: largest width x height.
    Returns:
        (H, W, channels) uint16; values of 8 bits are multiplied by 257, so that 65535 is the largest of either.
    Raises:
        DataError: the file is missing, not a regular file, damaged, too large, of another number of channels, or not of
            8 or 16 bits.
    """
    with open_regular(path, what) as file:
        num_bytes = size_of(file)
        if num_bytes > 2 * channels * max_pixels + _HEADER_BYTES:
            raise DataError(f"{what}: '{path}' is larger than {max_pixels} pixels of {channels} channels can be.")
        data = file.read(num_bytes)
    return decode_channels(data, path, channels, what, max_pixels=max_pixels)


def decode_channels(
    data: bytes, path: str | Path, channels: int, what: str = "input", *, max_pixels: int = MAX_PIXELS
) -> np.ndarray:
    """Decode the bytes of a file as `read_channels` does; `path` is its name for errors."""
    with decoding(path, what, len(data)):
        if data.startswith(NPY_START):
            image = _decode_npy(data, max_pixels)
        elif data.startswith(TIFF_STARTS):
            image = _decode_tiff(data, channels, max_pixels)
        else:
            header = read_open_header(io.BytesIO(data), len(data), path, what, max_pixels)
            image = _upright(_decode_other(data, header), read_orientation(io.BytesIO(data)))
    return check_channels(image, channels, f"{what} '{path}'")


def check_channels(image: np.ndarray, channels: int, name: str) -> np.ndarray:
    """Return an array (H, W, channels) of 8 or 16 bits as uint16; (H, W) is an image of one channel.

    Raises:
        DataError: it has another shape or type.
    """
    image = image[:, :, None] if image.ndim == 2 else image
    if image.dtype not in (np.uint8, np.uint16) or image.ndim != 3:
        raise DataError(
            f"{name}: got {image.dtype} of shape {tuple(image.shape)}; expected uint8 or uint16 of shape (H, W, "
            f"{channels}). Scale other values to 0 to 65535."
        )
    if image.shape[2] != channels:
        swapped = " It seems to be (C, H, W): store it as (H, W, C)." if image.shape[0] == channels else ""
        raise DataError(
            f"{name}: has {image.shape[2]} channels (height {image.shape[0]}, width {image.shape[1]}); expected "
            f"{channels}, by data.channels and model.backbone.in_channels.{swapped}"
        )
    if not image.size:
        raise DataError(f"{name}: an array of shape {image.shape} has no pixels.")
    return np.ascontiguousarray(image if image.dtype == np.uint16 else image.astype(np.uint16) * _FROM_8_BITS)


def narrow(image: np.ndarray) -> np.ndarray:
    """Return the values of 8 bits that an image of uint16 was read from, or the image if it had 16."""
    values, rest = np.divmod(image, _FROM_8_BITS)
    return image if rest.any() else values.astype(np.uint8)


def as_rgb(image: np.ndarray) -> np.ndarray:
    """Return an image for drawing, (H, W, 3) uint8.

    Args:
        image: (H, W, 3) uint8 RGB, which is returned as it is; or (H, W, C) uint16: its first three channels, or the
            first one of fewer as gray, each stretched between its 1 % darkest and 1 % brightest pixels.
    """
    if image.dtype == np.uint8:
        return image
    shown = image[:, :, :3] if image.shape[2] >= 3 else image[:, :, :1]
    low, high = np.percentile(shown, _STRETCHED, axis=(0, 1)).astype(np.float32)
    scaled = (shown - low) / np.maximum(high - low, 1) * 255
    return np.ascontiguousarray(np.broadcast_to(scaled.clip(0, 255).astype(np.uint8), (*image.shape[:2], 3)))


def _decode_npy(data: bytes, max_pixels: int) -> np.ndarray:
    file = io.BytesIO(data)
    shape = read_npy_shape(file)
    check_size(shape[1], shape[0], max_pixels)
    file.seek(0)
    image = np.load(file, allow_pickle=False)
    return image.astype(image.dtype.newbyteorder("="), copy=False)


def _decode_other(data: bytes, header: ImageHeader) -> np.ndarray:
    """Decode an image that is neither an array nor a TIFF, as it is stored."""
    if not data.startswith(_PNG_START) and not (data.startswith(_COLOR_PNM) and pnm_maximum(data) == _MAX_VALUE):
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.format == "PPM" and image.mode.startswith("I"):
                return np.array(image).astype(np.uint16)
            if image.mode in ("L", "LA", "RGB", "RGBA"):
                return np.array(image)
            return np.array(image.convert("L" if image.mode == "1" else "RGB"))
    # Pillow would reduce 16 bits of colors to 8.
    image = _from_opencv(_decode(cv2.imdecode, data))
    if image.shape[:2] != (header.height, header.width):
        raise ValueError(f"its header gives {header.width}x{header.height} pixels, its content another size")
    return image[:, :, [0, 3]] if header.mode == "LA" else image  # OpenCV repeats gray with alpha as colors


def _decode_tiff(data: bytes, channels: int, max_pixels: int) -> np.ndarray:
    pages = list(read_tiff_pages(io.BytesIO(data)))
    first = pages[0]
    samples, photometric = first.get(_SAMPLES, 1), first.get(_PHOTOMETRIC)
    bits, formats = set(_values(first.get(_BITS, 1))), set(_values(first.get(_FORMAT, 1)))
    check_size(first[TIFF_WIDTH], first[TIFF_HEIGHT], max_pixels)
    if not bits <= {8, 16} or formats != {1}:
        raise ValueError(f"it has {bits} bits in TIFF's sample format {formats}; expected 8 or 16 bits, unsigned")
    for page in pages[1:]:
        if any(page.get(tag, 1) != first.get(tag, 1) for tag in (TIFF_WIDTH, TIFF_HEIGHT, _SAMPLES)):
            raise ValueError("its pages differ in size or channels; expected pages that are the channels of one image")
    if samples * len(pages) != channels:
        # Not decoded: a file of many pages may be larger than memory.
        return np.empty((first[TIFF_HEIGHT], first[TIFF_WIDTH], samples * len(pages)), np.uint8)
    # OpenCV and Pillow turn a TIFF by its tag, but OpenCV not by its XMP.
    orientation = tiff_orientation(first)
    left = 1 if TIFF_ORIENTATION in first else orientation
    if samples == 1 and photometric in _GRAY:
        decoded = _decode(cv2.imdecodemulti, data)[1]
        return _upright(np.dstack(decoded), left)
    is_rgb = photometric == _RGB and samples in (3, 4) and len(pages) == 1
    if is_rgb and bits == {8} and _values(first.get(_EXTRA_SAMPLES, ())) == _UNASSOCIATED_ALPHA:
        # OpenCV would multiply the colors by the alpha, which may be any other channel, such as near infrared.
        allow_pixels(max_pixels)
        return np.array(Image.open(io.BytesIO(data), formats=("TIFF",)))
    if is_rgb and not (16 in bits and first.get(_PLANAR) == _SEPARATE):
        return _upright(_from_opencv(_decode(cv2.imdecode, data)), left)
    # OpenCV reads only one of several samples that are not colors, and wrong pixels of 16 bits in separate channels.
    try:
        import tifffile
    except ImportError as error:
        kind = "of 16 bits in separate channels" if is_rgb else "that are not RGB"
        raise ValueError(
            f"its pixels have {samples} samples {kind}, which needs the package tifffile (pip install "
            "'vitkit[tiff]'); or store the channels as pages, or as a .npy file"
        ) from error
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        arrays = [page.asarray() for page in file.pages]
        is_planar = file.pages[0].axes.startswith("S")
    image = np.dstack([np.moveaxis(array, 0, -1) if is_planar else array for array in arrays])
    return _upright(image, orientation)


def _values(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)


def _upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """Turn and mirror an image by its EXIF orientation."""
    image = image.swapaxes(0, 1) if orientation in (5, 6, 7, 8) else image
    image = image[::-1] if orientation in (3, 4, 7, 8) else image
    return image[:, ::-1] if orientation in (2, 3, 6, 7) else image


def _from_opencv(image: np.ndarray | None) -> np.ndarray:
    """Return an image with its channels in the order in which they are stored."""
    if image is None:
        raise ValueError("OpenCV cannot read it")
    return image if image.ndim == 2 else image[:, :, [2, 1, 0, *range(3, image.shape[2])]]


def _decode(decode: Callable[..., Any], data: bytes) -> Any:
    """Decode bytes by a function of OpenCV."""
    with quiet_opencv():
        return decode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
