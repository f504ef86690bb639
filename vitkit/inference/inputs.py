"""Read pictures from any source: arrays, files, web addresses, folders, patterns, videos, cameras."""

import glob
import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from os.path import exists, isdir, isfile
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from vitkit.checkpoint.download import cache_folder, cached_file
from vitkit.data.io.channel_files import check_channels, decode_channels, read_channels
from vitkit.data.io.image_files import MAX_PIXELS, decode_image, read_image
from vitkit.data.io.video_files import VIDEO_EXTENSIONS
from vitkit.errors import ConfigError, DataError
from vitkit.words import unique_names

Picture = str | Path | bytes | io.IOBase | np.ndarray | Image.Image | Tensor
"""A file or its address (https://…), an encoded image or an open file of one, an array (H, W, 3) uint8 RGB, a Pillow
image, or a tensor (3, H, W), uint8 or float in 0..1. For a model of other channels, also a .npy file; arrays
(H, W, C) and tensors (C, H, W) are uint8 or uint16."""
NamedPicture = tuple[str, Picture]


@dataclass
class Pictures:
    """The named pictures of a source."""

    named: Iterable[NamedPicture]
    kind: Literal["one", "many", "stream"]
    """Whether the source is one picture, several, or a "stream", read only as it is iterated: a generator, a video or
    a camera."""
    leaves_out_broken: bool = False
    """Whether unreadable files are left out with a warning, as for a folder or a pattern."""


def find_pictures(source: Any) -> Pictures:
    """Return the pictures of a source.

    Args:
        source: one picture (see `Picture`); or several: a list of them, a batch (B, 3, H, W) or (B, H, W, 3), a folder
            (including its subfolders), a pattern such as "photos/*.jpg"; or a stream: a generator, a video file, the
            number of a camera.
    Raises:
        DataError: there is no such file, folder or camera, or nothing that could be a picture.
    """
    if isinstance(source, bool) or source is None:
        raise DataError(f"got {source!r}; {_EXPECTED}.")
    if isinstance(source, int):
        return Pictures(video_frames(source), "stream")
    if isinstance(source, str | Path):
        return _pictures_named(str(source))
    if isinstance(source, np.ndarray | Tensor):
        return Pictures(numbered(source), "many") if source.ndim == 4 else Pictures(numbered([source]), "one")
    if isinstance(source, bytes | io.IOBase | Image.Image):
        return Pictures(numbered([source]), "one")
    if isinstance(source, Sequence):
        return Pictures(numbered(source), "many")
    if isinstance(source, Iterable) and not isinstance(source, Mapping):
        return Pictures(numbered(source), "stream")
    raise DataError(f"got {type(source).__name__}; {_EXPECTED}.")


def find_videos(source: Any) -> Pictures:
    """Return the videos of a source, for models of clips.

    Args:
        source: one video: a file, its address, a folder of frames, an array (T, H, W, 3), a tensor (T, 3, H, W) or a
            list of its frames; or several: a list of them, a folder of files (including its subfolders), a pattern or
            a generator.
    Raises:
        DataError: there is no such file or folder, or nothing that could be a video.
    """
    if isinstance(source, str | Path):
        return _videos_named(str(source))
    if isinstance(source, np.ndarray | Tensor):
        return Pictures([("video_0", source)], "one")
    if isinstance(source, Sequence) and not isinstance(source, bytes):
        arrays = [item for item in source if isinstance(item, np.ndarray | Tensor)]
        if any(isinstance(item, Image.Image) for item in source) or any(array.ndim == 3 for array in arrays):
            return Pictures([("video_0", source)], "one")
        return Pictures(numbered(source, "video"), "many")
    if isinstance(source, Iterator):
        return Pictures(numbered(source, "video"), "stream")
    raise DataError(
        f"got {type(source).__name__}; the model classifies videos by the order of their frames: expected a video's "
        "file, its address, a folder of frames, a pattern, an array (T, H, W, 3), or a list of frames or of these."
    )


def _videos_named(source: str) -> Pictures:
    path = Path(source)
    if is_address(source):
        return Pictures([(source, download(source))], "one")
    if isdir(path) or not glob.has_magic(source) or exists(path):
        files = sorted(path.rglob("*")) if isdir(path) else []
        inside = [(str(file), file) for file in files if file.suffix.lower() in VIDEO_EXTENSIONS]
        return Pictures(inside, "many", leaves_out_broken=True) if inside else Pictures([(source, path)], "one")
    # A folder of frames is a video, so that folders count.
    return Pictures([(str(path), path) for path in paths_like(source)], "many", leaves_out_broken=True)


_EXPECTED = (
    "expected a file, its address, a folder, a pattern, a Pillow image, an array, a tensor, the bytes of a file, a "
    "list or a generator of these, a video, or the number of a camera"
)


def _pictures_named(source: str) -> Pictures:
    path = Path(source)
    if is_address(source):
        if source.lower().endswith(VIDEO_EXTENSIONS):
            return Pictures(video_frames(download(source)), "stream")
        return Pictures([(source, source)], "one")
    if isdir(path):
        return Pictures([(str(file), file) for file in pictures_in(path)], "many", leaves_out_broken=True)
    if path.suffix.lower() in VIDEO_EXTENSIONS and isfile(path):
        return Pictures(video_frames(path), "stream")
    if exists(path) or not glob.has_magic(source):
        return Pictures([(source, path)], "one")
    files = paths_like(source, folders=False)
    return Pictures([(str(path), path) for path in files], "many", leaves_out_broken=True)


def paths_like(pattern: str, *, folders: bool = True) -> list[Path]:
    """Return the files that match a pattern, and the folders if these are wanted, sorted.

    Raises:
        DataError: there are none.
    """
    paths = [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if folders or isfile(name)]
    if not paths:
        raise DataError(f"'{pattern}': no such file or folder, and no file matches it as a pattern.")
    return paths


Named = list[tuple[Path, str]]
"""Files, and the names of what is written about them, relative to a folder and without extensions."""


def find_files(sources: Sequence[str]) -> tuple[Named, Named]:
    """Sort what sources name into images and videos.

    Args:
        sources: files, folders (including their subfolders), patterns, URLs, or numbers of cameras, which are videos.
    Raises:
        DataError: a source names no file.
    """
    paths: dict[Path, str] = {}
    for text in sources:
        path = Path(text)
        if path.is_dir():
            files = pictures_in(path, extensions=IMG_EXTENSIONS + VIDEO_EXTENSIONS)
            paths |= {file: str(file.relative_to(path).with_suffix("")) for file in files}
        elif path.is_file():
            paths[path] = path.stem
        elif is_address(text):
            paths[download(text)] = Path(text).stem
        elif text.isdecimal():
            paths[path] = f"camera_{text}"
        else:
            paths |= {file: file.stem for file in paths_like(text, folders=False)}
    named = list(zip(paths, unique_names(paths.values())))
    videos = [pair for pair in named if pair[0].suffix.lower() in VIDEO_EXTENSIONS or is_camera(pair[0])]
    return [pair for pair in named if pair not in videos], videos


def is_camera(path: Path) -> bool:
    """Whether a source is the number of a camera."""
    return path.name.isdecimal() and not path.exists()


def frame_folders(sources: Sequence[str], images: Named, videos: Named) -> tuple[Named, Named]:
    """Turn the folders of images among the sources, including subfolders, into videos in place of their images."""
    given = [Path(text) for text in sources if isdir(text)]
    inside = {path for path, _ in images if any(path.is_relative_to(folder) for folder in given)}
    folders = sorted({path.parent for path in inside})
    paths = [path for path, _ in videos] + folders
    names = [name for _, name in videos] + [folder.resolve().name for folder in folders]
    return [pair for pair in images if pair[0] not in inside], list(zip(paths, unique_names(names)))


def numbered(pictures: Iterable[Picture | NamedPicture], what: str = "image") -> Iterator[NamedPicture]:
    """Yield pictures with names; those without a name are named by their path or their number."""
    for number, picture in enumerate(pictures):
        if isinstance(picture, tuple):
            yield picture
        else:
            yield (str(picture) if isinstance(picture, str | Path) else f"{what}_{number}"), picture


def pictures_in(folder: Path, *, extensions: Sequence[str] = IMG_EXTENSIONS) -> list[Path]:
    """Return the picture files in a folder and its subfolders, sorted.

    Raises:
        DataError: there is no such folder, or it holds no picture.
    """
    if not folder.is_dir():
        raise DataError(f"no folder '{folder}'. Name a folder of pictures.")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in extensions)
    if not paths:
        raise DataError(f"folder '{folder}' holds no picture ({', '.join(extensions)}).")
    return paths


def is_address(text: str) -> bool:
    """Whether a name is a web address."""
    return text.lower().startswith(("http://", "https://"))


def download(address: str) -> Path:
    """Download a picture or a video once and return the path of the local copy; see `cached_file`.

    Raises:
        CheckpointError: the address cannot be reached.
    """
    # Many pictures are called image.jpg, so each address gets its own folder.
    return cached_file(
        address, folder=cache_folder().parent / "pictures" / hashlib.sha256(os.fsencode(address)).hexdigest()
    )


def video_frames(source: int | str | Path, *, every: int = 1) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the number and the array (H, W, 3) uint8 RGB of frames of a video file or a camera.

    Args:
        source: a file, or the number of a camera.
        every: yield only every n-th frame.
    Raises:
        DataError: the source cannot be opened, or has no frame.
    """
    what = f"camera {source}" if isinstance(source, int) else f"video '{source}'"
    remedy = "Is it connected, and not in use?" if isinstance(source, int) else "Is it in a format OpenCV knows?"
    video = open_capture(source)
    try:
        frames = read_frames(video, every)
        first = next(frames, None)
        if first is None:
            raise DataError(f"{what}: no frame can be read. {remedy}")
        yield first
        yield from frames
    finally:
        video.release()


def open_capture(source: int | str | Path) -> cv2.VideoCapture:
    """Open a video file, or a camera by its number, without OpenCV's log messages if that fails."""
    level = cv2.utils.logging.getLogLevel()
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    try:
        return cv2.VideoCapture(source if isinstance(source, int) else str(source))
    finally:
        cv2.utils.logging.setLogLevel(level)


def read_frames(video: cv2.VideoCapture, every: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the number and the RGB array of every `every`-th frame."""
    number = 0
    while video.grab():
        if number % every == 0:
            decoded, frame = video.retrieve()
            if decoded:
                yield str(number), cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
        number += 1


def to_array(
    picture: Picture, name: str = "image", *, max_pixels: int = MAX_PIXELS, channels: int | None = None
) -> np.ndarray:
    """Read or convert a picture to an array (H, W, 3) uint8 RGB, or with `channels` to (H, W, channels) uint16.

    Raises:
        DataError: a file is missing, or a file or an array is not an image.
        CheckpointError: an address cannot be reached.
    """
    if isinstance(picture, str) and is_address(picture):
        picture = download(picture)
    if channels is not None:
        return _to_channels(picture, name, channels, max_pixels)
    if isinstance(picture, str | Path):
        return read_image(picture, "input", max_pixels=max_pixels)
    if isinstance(picture, io.IOBase):
        picture = picture.read()
    if isinstance(picture, bytes):
        return decode_image(picture, name, max_pixels=max_pixels)
    if isinstance(picture, Image.Image):
        return np.asarray(picture.convert("RGB"))
    if isinstance(picture, Tensor):
        picture = _tensor_to_array(picture)
    if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.shape[2:] != (3,):
        is_array = isinstance(picture, np.ndarray | Tensor)
        got = f"{picture.dtype} {tuple(picture.shape)}" if is_array else type(picture).__name__
        raise DataError(
            f"{name}: got {got}; expected a file, a Pillow image, an array (H, W, 3) of uint8 RGB, or a tensor "
            "(3, H, W), uint8 or float in 0..1."
        )
    if not picture.size:
        raise DataError(f"{name}: an array of shape {picture.shape} has no pixels.")
    return picture


def _to_channels(picture: Picture, name: str, channels: int, max_pixels: int) -> np.ndarray:
    if isinstance(picture, str | Path):
        return read_channels(picture, channels, "input", max_pixels=max_pixels)
    if isinstance(picture, io.IOBase):
        picture = picture.read()
    if isinstance(picture, bytes):
        return decode_channels(picture, name, channels, max_pixels=max_pixels)
    if isinstance(picture, Image.Image):
        picture = np.asarray(picture)
    if isinstance(picture, Tensor):
        picture = picture.detach().cpu()
        picture = (picture.permute(1, 2, 0) if picture.ndim == 3 else picture).numpy()
    if not isinstance(picture, np.ndarray):
        raise DataError(f"{name}: got {type(picture).__name__}; expected a file, an array or a tensor (C, H, W).")
    return check_channels(picture, channels, name)


def _tensor_to_array(picture: Tensor) -> np.ndarray | Tensor:
    """Convert a tensor (3, H, W), uint8 or float in 0..1, to an array (H, W, 3) uint8; return other tensors as is."""
    if picture.ndim != 3 or len(picture) != 3:
        return picture
    picture = picture.detach().cpu()
    if picture.is_floating_point() and picture.numel() and picture.min() >= 0 and picture.max() <= 1:
        picture = (picture * 255).round().to(torch.uint8)
    return picture.permute(1, 2, 0).contiguous().numpy() if picture.dtype == torch.uint8 else picture


def in_batches(pictures: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of `size` items; the last may be shorter.

    Raises:
        ConfigError: the size is below 1.
    """
    if size < 1:
        raise ConfigError(f"batch_size={size}: expected at least 1.")
    pictures = iter(pictures)
    while chunk := list(islice(pictures, size)):
        yield chunk
