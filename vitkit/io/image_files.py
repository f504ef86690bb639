"""Opens image files safely: none can start a program, exhaust the memory or escape its folder."""

import io
import os
import re
import stat
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import cv2
import numpy as np
import torch
from PIL import Image, TiffImagePlugin, features
from torch import Tensor

from vitkit.errors import DataError, LossyImageError
from vitkit.io.local_cache import MOUNTED_PACK, PACK
from vitkit.text_format import is_url

if TYPE_CHECKING:
    from vitkit.io.packs import Pack


def _optional_formats() -> Iterator[str]:
    """Yield the formats that only some installations of Pillow read."""
    for name, feature in (("AVIF", "avif"), ("JPEG2000", "jpg_2000")):
        if feature in {*features.modules, *features.codecs} and features.check(feature):
            yield name
    if find_spec("pillow_heif"):  # an extension of Pillow that reads the photos of phones
        import_module("pillow_heif").register_heif_opener()
        yield "HEIF"


FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "WEBP", "TIFF", *_optional_formats())
"""Pillow's names of the formats that are read, regardless of file extensions. The formats left out include some that
run programs (EPS starts Ghostscript) and some that nobody maintains."""
MAX_PIXELS = 178_956_970
"""Default for the largest width x height of an image, which `data.max_image_pixels` overrides; Pillow's own limit."""
_BYTES_PER_PIXEL = 8
"""Size of an uncompressed pixel with four 16-bit channels; a file with more bytes per allowed pixel is not an image."""
OPENCV_CHANNELS = 128
"""The largest number of channels that all of OpenCV's functions take; above it, some leave their result empty."""
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
"""The first bytes of a TIFF, little and big endian, and of a BigTIFF."""
TIFF_WIDTH, TIFF_HEIGHT, TIFF_ORIENTATION = 256, 257, 274  # tags
_TIFF_XMP = 700
_MAX_PAGES = 1000
NPY_START = b"\x93NUMPY"
_EXIF_ORIENTATION = 0x0112
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes an image of each EXIF orientation upright."""
_QUARTER_TURNS = (5, 6, 7, 8)
"""EXIF orientations that swap width and height."""
_PNG_TAGS = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")
"""Names of the chunks and texts of a PNG that may hold an orientation."""
_PNM_HEADER_BYTES = 1 << 16
_TIFF_COMPRESSION, _LOSSY_COMPRESSIONS = 259, (6, 7, 34892)  # JPEG, in its old, its usual and its raw form
_LISTED = (
    "The annotation file, or list of images, has it: check that the images folder is the one that belongs to it, and "
    "complete."
)
ONE_CHANNEL_MODES = ("1", "L", "P", "I", "I;16", "I;16B")
"""Pillow's names of the color formats of label maps."""
_GRAY_IN_CHANNELS = {"LA": 1, "RGB": 3, "RGBA": 3}
"""Modes in which programs store gray images -> the number of their channels without alpha."""
_NUM_VALUES = 1 << 16
_MAX_FOLDERS = 1 << 16


class ImageHeader(NamedTuple):
    """The information in the first bytes of an image file."""

    height: int
    width: int
    mode: str
    """Pillow's name for the color format."""


class ImageStore:
    """The images of a folder: on the disk, and in the pack that the folder stands for or is in, if any.

    Functions that take paths, such as `read_image`, find images of either.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""
        path = self.folder / name
        return os.path.isfile(path) or _find_packed(path) is not None

    def is_folder(self) -> bool:
        """Whether the folder exists; folders that have only images of a pack do not exist on the disk."""
        return self.folder.is_dir() or any(self.list_packed_files())

    def list_packed_files(self) -> list[Path]:
        """Return the images of the folder and its subfolders that are in a pack."""
        if (found := _find_pack(os.path.abspath(self.folder))) is None:
            return []
        pack, inside = found
        return [Path(self.folder, name.removeprefix(inside)) for name in pack.below(inside.rstrip("/"))]

    def blocks(self, names: Iterable[str]) -> np.ndarray | None:
        """Return the number of the block of a pack that each image begins in, (N,) int64: a block is read as a whole.

        Args:
            names: the N images' paths in the folder; they are only asked for if it is in a pack.
        Returns:
            None if it is not, or one of the images is not.
        """
        if (found := _find_pack(os.path.abspath(self.folder))) is None:
            return None
        pack, inside = found
        return pack.blocks_of(inside + name for name in names)


def find_root(root: str) -> str:
    """Return the folder of a root of data: itself, or the one that stands for a pack; raises like `mount` of packs."""
    if not is_url(root) and not os.path.isfile(os.path.join(root, PACK)):
        return root
    from vitkit.io.packs import mount

    return mount(root)


@lru_cache(maxsize=_MAX_FOLDERS)
def _find_pack(folder: str) -> tuple["Pack", str] | None:
    """Return the pack that a folder is in, and the beginning of its images' names in it, "" or "FOLDER/"; None for
    other folders."""
    root = folder
    while not os.path.isfile(os.path.join(root, MOUNTED_PACK)):
        if (parent := os.path.dirname(root)) == root:
            return None
        root = parent
    from vitkit.io.packs import open_pack  # only where there is a pack, which may be on a server

    inside = os.path.relpath(folder, root).replace(os.sep, "/")
    return open_pack(root), "" if inside == "." else f"{inside}/"


def _find_packed(path: str | Path) -> tuple["Pack", int] | None:
    """Return the pack that has an image, and the image's number in it; None if there is none."""
    folder, name = os.path.split(os.path.abspath(path))
    if (found := _find_pack(folder)) is None:
        return None
    pack, inside = found
    number = pack.number_of(inside + name)
    return None if number is None else (pack, number)


def read_image(path: str | Path, what: str = "images", *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Read any image (gray, palette, CMYK, with alpha, 16 bit, rotated by EXIF) as upright RGB.

    Args:
        what: beginning of the error messages.
        max_pixels: largest width x height.
    Returns:
        (H, W, 3) uint8.
    Raises:
        DataError: the file is missing, not a regular file, truncated, not an image of `FORMATS`, or too large.
    """
    return _decode(read_file(path, what, max_pixels=max_pixels), path, what)


def decode_image(data: bytes, name: str, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Decode the bytes of an image file as `read_image` does.

    Args:
        name: name of the image, for errors.
        max_pixels: largest width x height.
    """
    read_open_header(io.BytesIO(data), len(data), name, "input", max_pixels)
    return _decode(data, name, "input")


def _decode(data: bytes, path: str | Path, what: str) -> np.ndarray:
    # One decoder for sizes, orientations and pixels: OpenCV reads other orientations, compositions of transparent
    # pixels and maxima than Pillow, which reads the header.
    with decoding(path, what, len(data)), _open_whole(data) as image:
        return pillow_to_array(image)


def pillow_to_array(image: Image.Image) -> np.ndarray:
    """Return a Pillow image as `read_image` reads its file, (H, W, 3) uint8: upright RGB, of 16 bits the upper 8.

    Raises:
        ValueError: its values are other than unsigned integers of 8 or 16 bits, or it is a TIFF that Pillow misreads.
    """
    # Pillow opens PPM of 16 bits, and older versions PNG, as of 32 bits.
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise ValueError(
            "its values have a sign, 32 bits or a fraction; expected unsigned integers of 8 or 16 bits. Convert them"
        )
    if isinstance(image, TiffImagePlugin.TiffImageFile) and _has_raw_planes(image.tag_v2):
        raise ValueError(
            "it has 16 bits in separate uncompressed channels, which Pillow misreads. Store the channels of a pixel "
            "together"
        )
    image.load()  # a PNG may have its orientation after the pixels
    if (orientation := _orientation_of(image)) != 1:
        image = image.transpose(_TRANSPOSITIONS[orientation])
    if image.mode.startswith("I"):  # Pillow would turn values above 255 into 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        image = image.convert("RGBA")  # otherwise Pillow warns that the transparency is lost
    return np.array(image.convert("RGB"))


def _has_raw_planes(tags: TiffImagePlugin.ImageFileDirectory_v2) -> bool:
    """Whether a TIFF has several channels of 16 bits, each stored as a whole and uncompressed."""
    planar, compression = tags.get(TiffImagePlugin.PLANAR_CONFIGURATION), tags.get(TiffImagePlugin.COMPRESSION, 1)
    bits = tags.get(TiffImagePlugin.BITSPERSAMPLE, ())
    return planar == 2 and compression == 1 and len(bits) > 1 and 16 in bits


def _open_whole(data: bytes) -> Image.Image:
    """Open an image file with Pillow, after checking the checksums of a PNG."""
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    if image.format != "PNG":
        return image
    # Pillow does not check those of the pixels when it decodes them, so damage would change a map unnoticed.
    with image:
        image.verify()
    return Image.open(io.BytesIO(data), formats=FORMATS)


def read_label_map(path: str | Path, what: str = "labels", *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Read a single-channel image: gray values of 1, 8 or 16 bits, or the indices of a palette.

    Of several channels that are equal, as drawing programs store gray, one is read.

    Args:
        what, max_pixels: see `read_image`.
    Returns:
        (H, W) uint8 or uint16.
    Raises:
        DataError: see `read_image`; or it has several channels.
        LossyImageError: see `read_label_colors`.
    """
    data = _read_lossless(path, what, max_pixels)
    with decoding(path, what, len(data)), _open_whole(data) as label_map:
        mode, values = label_map.mode, np.asarray(label_map)
    maximum = pnm_maximum(data)
    if maximum not in (None, 1, 255, 65535):
        raise DataError(
            f"{what} '{path}': a PGM whose largest value is {maximum}, by which its values are scaled; expected 255 or "
            "65535, where they are classes as they are. Save it as PNG."
        )
    if mode in _GRAY_IN_CHANNELS:
        values, mode = _single_channel(values, mode, f"{what} '{path}'")
    if values.ndim != 2 or mode not in ONE_CHANNEL_MODES:
        raise DataError(
            f"{what} '{path}': the image has mode {mode} and shape {values.shape}; expected one channel whose "
            "values are classes. Convert colors to class numbers first."
        )
    if values.dtype not in (np.uint8, np.uint16):
        if values.min() < 0 or values.max() >= _NUM_VALUES:
            raise DataError(f"{what} '{path}': values reach {values.min()} to {values.max()}; expected 0 to 65535.")
        values = values.astype(np.uint16)
    return values


def _single_channel(values: np.ndarray, mode: str, context: str) -> tuple[np.ndarray, str]:
    """Return one of the channels of an image and its mode if they are equal; otherwise the image as it is. Raise a
    DataError if they are, but what is transparent differs from the rest."""
    colors, alpha = values[..., : _GRAY_IN_CHANNELS[mode]], values[..., _GRAY_IN_CHANNELS[mode] :]
    if (colors != colors[..., :1]).any():
        return values, mode
    # Where nothing was drawn, it may be black and transparent.
    is_plain = colors.min() == colors.max() or (colors[..., :1][alpha < 255] != 0).any() if alpha.size else False
    if is_plain and alpha.min() != alpha.max():
        raise DataError(
            f"{context}: a gray image of mode {mode} that is transparent in parts: its classes may be its gray values "
            "or its transparency. Save it without transparency, with one channel."
        )
    return colors[..., 0], "L"


def read_label_colors(path: str | Path, what: str = "labels", *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Read a label image whose colors are classes or segments, (H, W, 3) uint8; arguments are those of `read_image`.

    Raises:
        DataError: see `read_image`.
        LossyImageError: it is stored in a form that changes its values, such as JPEG.
    """
    return _decode(_read_lossless(path, what, max_pixels), path, what)


def _read_lossless(path: str | Path, what: str, max_pixels: int) -> bytes:
    data = read_file(path, what, max_pixels=max_pixels)
    with decoding(path, what, len(data)), Image.open(io.BytesIO(data), formats=FORMATS) as image:
        form = image.format
        is_lossy = (
            form in ("JPEG", "MPO")
            or (form == "WEBP" and b"VP8L" not in data)
            or (form == "TIFF" and image.tag_v2.get(_TIFF_COMPRESSION) in _LOSSY_COMPRESSIONS)
        )
    if is_lossy:
        raise LossyImageError(
            f"{what} '{path}': a label image stored as {'JPEG' if form != 'WEBP' else 'lossy WebP'}, whose compression "
            "changes the values of pixels, so they are no longer classes. Export the label images again, as PNG."
        )
    return data


def read_header(path: str | Path, what: str = "images", *, max_pixels: int = MAX_PIXELS) -> ImageHeader:
    """Read only the size and the color format of an image file.

    Args:
        what, max_pixels: see `read_image`.
    Raises:
        DataError: see `read_image`.
    """
    with open_regular(path, what) as file:
        return read_open_header(file, size_of(file), path, what, max_pixels)


def read_palette(path: str | Path) -> bytes | None:
    """Return the palette of a label image, three bytes for each number; None without one; raises like `read_header`."""
    data = read_file(path, "labels", max_pixels=MAX_PIXELS)
    with decoding(path, "labels", len(data)), Image.open(io.BytesIO(data), formats=FORMATS) as image:
        return bytes(image.getpalette("RGB")) if image.mode == "P" else None


def upright_size(path: str | Path, what: str = "images", *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Read (width, height) of an image or of an array in a .npy file, upright; raises like `read_header`.

    The pixels are not decoded.
    """
    (width, height), orientation = _read_size_and_orientation(path, what, max_pixels)
    return (height, width) if orientation in _QUARTER_TURNS else (width, height)


def is_rotated(path: str | Path, *, max_pixels: int = MAX_PIXELS) -> bool:
    """Whether an image file has an EXIF or XMP tag that rotates or mirrors it; raises like `read_header`."""
    return _read_size_and_orientation(path, "images", max_pixels)[1] != 1


def _read_size_and_orientation(path: str | Path, what: str, max_pixels: int) -> tuple[tuple[int, int], int]:
    """Read (width, height) before rotation, and the orientation, 1 (upright) to 8."""
    with open_regular(path, what) as file:
        num_bytes = size_of(file)
        if is_array(file):
            with decoding(path, what, num_bytes):
                height, width, *_ = read_npy_shape(file)
                check_size(width, height, max_pixels)
                return (width, height), 1
        if file.read(4) in TIFF_STARTS:
            # Pillow opens few TIFFs whose samples are not colors, and gives the size of a turned one before or after
            # its rotation, depending on the version.
            with decoding(path, what, num_bytes):
                tags = next(read_tiff_pages(file))
                width, height = tags[TIFF_WIDTH], tags[TIFF_HEIGHT]
                if type(width) is not int or type(height) is not int or min(width, height) < 1:
                    raise ValueError(f"its header gives {width}x{height} pixels")
                check_size(width, height, max_pixels)
                return (width, height), tiff_orientation(tags)
        header = read_open_header(file, num_bytes, path, what, max_pixels)
        with decoding(path, what, num_bytes):
            return (header.width, header.height), read_orientation(file)


def tiff_orientation(tags: Mapping[int, Any]) -> int:
    """Return the orientation, 1 (upright) to 8, of a TIFF's page: that of its tag, else that of its XMP."""
    if TIFF_ORIENTATION in tags:
        return _valid_orientation(tags[TIFF_ORIENTATION])
    xmp = tags.get(_TIFF_XMP)
    match = _XMP_ORIENTATION.search(xmp) if isinstance(xmp, bytes) else None
    return _valid_orientation(int(match[1])) if match else 1


def read_tiff_pages(file: BinaryIO) -> Iterator[dict[int, Any]]:
    """Yield the tags of each page of a TIFF; raise a ValueError if it is damaged."""
    file.seek(0)
    start = file.read(16)
    directory = TiffImagePlugin.ImageFileDirectory_v2(start if b"+" in start[:4] else start[:8])
    offsets = set()
    for _ in range(_MAX_PAGES):
        if directory.next in offsets:
            raise ValueError("it is truncated or damaged: a page leads back to an earlier one")
        offsets.add(directory.next)
        file.seek(directory.next)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of a truncated directory
            directory.load(file)
        if not {TIFF_WIDTH, TIFF_HEIGHT} <= directory.keys():
            raise ValueError("it is truncated")
        yield dict(directory)
        if not directory.next:
            return
    raise ValueError(f"it has more than {_MAX_PAGES} pages")


def is_array(file: BinaryIO) -> bool:
    """Return whether an open file is a .npy file."""
    file.seek(0)
    start = file.read(len(NPY_START))
    file.seek(0)
    return start == NPY_START


def read_npy_shape(file: BinaryIO) -> tuple[int, ...]:
    """Read the shape of the array in a .npy file, (H, W) or (H, W, C)."""
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    if dtype.hasobject or len(shape) not in (2, 3):
        raise ValueError(f"it has an array of {dtype} of shape {shape}; expected uint8 or uint16 of shape (H, W, C)")
    return shape


def read_orientation(file: BinaryIO) -> int:
    """Return the EXIF or XMP orientation of an open image file, 1 (upright) to 8, by which `read_image` turns it."""
    file.seek(0)
    with Image.open(file, formats=FORMATS) as image:
        if image.format == "PNG":
            # In a PNG, the tags may follow the pixels, which must be decoded to reach them.
            file.seek(0)
            data = file.read()
            if not any(name in data for name in _PNG_TAGS):
                return 1
            image.load()
        return _orientation_of(image)


def _orientation_of(image: Image.Image) -> int:
    try:
        return _valid_orientation(image.getexif().get(_EXIF_ORIENTATION, 1))
    except Exception:  # damaged tags can make Pillow raise anything; as viewers do, the image is taken as it is stored
        return 1


def _valid_orientation(value: Any) -> int:
    return next((orientation for orientation in _TRANSPOSITIONS if orientation == value), 1)


def pnm_maximum(data: bytes) -> int | None:
    """Return the value of white in the bytes of a PBM, PGM or PPM, by which its values are scaled; None for others."""
    if data[:2] in (b"P1", b"P4"):
        return 1
    if data[:2] not in (b"P2", b"P3", b"P5", b"P6"):
        return None
    _, _, _, maximum, *_ = re.sub(rb"#[^\r\n]*", b" ", data[:_PNM_HEADER_BYTES]).split(maxsplit=4)
    return int(maximum)


def read_file(path: str | Path, what: str, *, max_pixels: int = MAX_PIXELS) -> bytes:
    """Read an image file without decoding it, after checking by its header that it is an image and not too large.

    Args:
        what, max_pixels: see `read_image`.
    Raises:
        DataError: see `read_image`.
    """
    with open_regular(path, what) as file:
        num_bytes = size_of(file)
        read_open_header(file, num_bytes, path, what, max_pixels)
        with decoding(path, what, num_bytes):
            file.seek(0)
            return file.read()


def open_regular(path: str | Path, what: str) -> BinaryIO:
    """Open a file on the disk or in a mounted pack; raise an error for a device or a pipe, which may never end."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            return open(path, "rb")
        reason = "it is a folder" if stat.S_ISDIR(mode) else "it is a device or a pipe"
        remedy = "Give a file."
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte or half a character
        if isinstance(error, FileNotFoundError) and (found := _find_packed(path)):
            pack, number = found
            return io.BytesIO(pack.read(number))
        reason = error.strerror if isinstance(error, OSError) else str(error)
        remedy = _LISTED if what == "images" else "Give the path of an image."
    raise DataError(f"{what}: cannot read '{path}' ({reason}). {remedy}")


def size_of(file: BinaryIO) -> int:
    """Return the number of bytes of a file that `open_regular` has opened, and go to its start."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    return size


def read_open_header(file: BinaryIO, num_bytes: int, path: str | Path, what: str, max_pixels: int) -> ImageHeader:
    """Read the header of an open image file; arguments and errors are those of `read_image`."""
    allow_pixels(max_pixels)
    if is_array(file):
        raise DataError(f"{what}: '{path}' is a NumPy array; only images of data.channels=N may be one.")
    with decoding(path, what, num_bytes), Image.open(file, formats=FORMATS) as image:
        header = ImageHeader(image.height, image.width, image.mode)
        check_size(header.width, header.height, max_pixels)
        if num_bytes > _BYTES_PER_PIXEL * max_pixels:
            raise Image.DecompressionBombError(f"it has more than {_BYTES_PER_PIXEL} bytes for each pixel allowed")
    return header


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Raise an error if an image has too many pixels."""
    if width * height > max_pixels:
        raise Image.DecompressionBombError(f"its header gives {width}x{height} pixels")


def allow_pixels(max_pixels: int) -> None:
    """Raise Pillow's limit on width x height, if it is lower."""
    if Image.MAX_IMAGE_PIXELS is not None and max_pixels > 2 * Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = max_pixels  # Pillow rejects more than twice this, process-wide


@contextmanager
def decoding(path: str | Path, what: str, num_bytes: int) -> Iterator[None]:
    """Convert any error that a decoder raises to a DataError that names the file."""
    try:
        yield
    except DataError:  # which names the file
        raise
    except Exception as error:  # a damaged file can make a decoder raise anything
        # Pillow's own message names an in-memory buffer, which tells a user nothing.
        reason = str(error) or type(error).__name__
        if isinstance(error, Image.UnidentifiedImageError):
            reason = f"not an image of a known format ({', '.join(FORMATS)}), or damaged"
        elif isinstance(error, MemoryError):
            reason = "there is not enough memory for it"
        elif isinstance(error, Image.DecompressionBombError):
            hint = f"If that is intended, set data.max_image_pixels (default: {MAX_PIXELS})"
            reason = f"too large: {reason.rstrip('.')}. {hint}"
        raise DataError(
            f"{what}: cannot decode '{path}' ({num_bytes} bytes): {reason}. Download or export the file again."
        ) from error


@contextmanager
def quiet_opencv() -> Iterator[None]:
    """Suppress OpenCV's log messages, which name no file."""
    log = getattr(cv2.utils, "logging", cv2)  # some builds of OpenCV 4 have these functions in cv2 itself
    level = log.getLogLevel()
    log.setLogLevel(0)  # LOG_LEVEL_SILENT, which those do not name
    try:
        yield
    finally:
        log.setLogLevel(level)


def check_inside(folder: str | Path, names: Iterable[str], context: str, *, allow_outside: bool = False) -> None:
    """Check that file names refer to files below a folder, judging only by the names (links may lead anywhere).

    Args:
        context: beginning of the error message.
        allow_outside: check nothing.
    Raises:
        DataError: a name is absolute, or leads upwards out of the folder.
    """
    if allow_outside:
        return
    for name in names:
        # Nearly all names pass this test, which is the faster one.
        if ".." in name or "\0" in name or ":" in name or os.path.isabs(name):
            path_inside(folder, name, context, "set allow_outside=true if you trust the file")


def path_inside(folder: str | Path, name: str, context: str, alternative: str = "correct the name") -> Path:
    """Return the path of a file below a folder; arguments as in `check_inside`.

    Args:
        alternative: what else the user can do, for the error message.
    Raises:
        DataError: the name is absolute and elsewhere, leads upwards out of the folder, or is not a file name.
    """
    root = os.path.normpath(os.path.abspath(folder))
    path = Path(os.path.normpath(os.path.join(root, name)))
    if "\0" in name or not path.is_relative_to(root):
        raise DataError(
            f"{context}: file_name {name!r:.300} lies outside the folder '{folder}', and only files in it are read. "
            f"Give the folder that holds them all, or {alternative}."
        )
    return path


def to_tensor(image: np.ndarray) -> Tensor:
    """Convert (H, W, C) uint8 or uint16 to a contiguous (C, H, W) tensor."""
    if image.shape[2] > OPENCV_CHANNELS:
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(image, 2, 0)))
    planes = np.empty((image.shape[2], *image.shape[:2]), image.dtype)
    # Ten times faster than NumPy's or PyTorch's transposed copy; OpenCV writes into the arrays of the list.
    cv2.split(image, list(planes))
    return torch.from_numpy(planes)
