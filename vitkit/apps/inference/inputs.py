"""Read images from any source: arrays, files, URLs, folders, patterns, videos, streams, cameras."""

import glob
import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from os.path import exists, isdir, isfile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import cv2
import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from vitkit.apps.inference.live import Live, LiveFrames, live_source, stream_name
from vitkit.errors import ConfigError, DataError
from vitkit.io.channel_files import check_channels, decode_channels, read_channels
from vitkit.io.folders import data_files, find_paths_like, image_files
from vitkit.io.image_files import FORMATS, MAX_PIXELS, decode_image, pillow_to_array, quiet_opencv, read_image
from vitkit.io.video_files import VIDEO_EXTENSIONS, open_video
from vitkit.weights.download import cache_folder, fetch_file

ImageLike = str | Path | bytes | io.IOBase | np.ndarray | Image.Image | Tensor
"""A file or its URL (https://…), an encoded image or an open file of one, an array (H, W, 3) uint8 RGB, a Pillow
image, or a tensor (3, H, W), uint8 or float in 0..1. For a model of other channels, also a .npy file; arrays
(H, W, C) and tensors (C, H, W) are uint8 or uint16."""
NamedImage = tuple[str, ImageLike]


@dataclass
class Inputs:
    """The named images or videos of a source."""

    named: Iterable[NamedImage]
    kind: Literal["one", "many", "stream"]
    """Whether the source is one input, many, or a "stream", which is read only as it is iterated: a generator, a video
    or a camera."""
    leaves_out_broken: bool = False
    """Whether unreadable files are left out with a warning, as for a folder or a pattern."""


def find_images(source: Any, *, channels: int | None = None) -> Inputs:
    """Return the images of a source.

    Args:
        source: one image (see `ImageLike`); or several: a list of them, a batch (B, 3, H, W) or (B, H, W, 3), a folder
            (including its subfolders), a pattern such as "photos/*.jpg"; or a stream: a generator, a video file, a
            stream's address ("rtsp://…"), the number of a camera.
        channels: the number of channels of the model's images, among which are then a folder's .npy files; None: RGB
            of 8 bits.
    Raises:
        DataError: the file, folder or camera does not exist, or the source cannot be an image.
    """
    if isinstance(source, bool) or source is None:
        raise DataError(f"got {source!r}; {_EXPECTED}.")
    if isinstance(source, int):
        return Inputs(stream_frames(source), "stream")
    if isinstance(source, str | Path):
        return _images_named(str(source), channels)
    if isinstance(source, np.ndarray | Tensor):
        return Inputs(number_items(source), "many") if source.ndim == 4 else Inputs(number_items([source]), "one")
    if isinstance(source, bytes | io.IOBase | Image.Image):
        return Inputs(number_items([source]), "one")
    if isinstance(source, Sequence):
        return Inputs(number_items(source), "many")
    if isinstance(source, Iterable) and not isinstance(source, Mapping):
        return Inputs(number_items(source), "stream")
    raise DataError(f"got {type(source).__name__}; {_EXPECTED}.")


def find_videos(source: Any) -> Inputs:
    """Return the videos of a source, for models of clips.

    Args:
        source: one video: a file, its URL, a folder of frames, an array (T, H, W, 3), a tensor (T, 3, H, W) or a
            list of its frames; or several: a list of them, a folder of files (including its subfolders), a pattern or
            a generator.
    Raises:
        DataError: the file or folder does not exist, or the source cannot be a video.
    """
    if isinstance(source, str | Path):
        return _videos_named(str(source))
    if isinstance(source, np.ndarray | Tensor):
        return Inputs([("video_0", source)], "one")
    if isinstance(source, Sequence) and not isinstance(source, bytes):
        arrays = [item for item in source if isinstance(item, np.ndarray | Tensor)]
        if any(isinstance(item, Image.Image) for item in source) or any(array.ndim == 3 for array in arrays):
            return Inputs([("video_0", source)], "one")
        return Inputs(number_items(source, "video"), "many")
    if isinstance(source, Iterator):
        return Inputs(number_items(source, "video"), "stream")
    raise DataError(
        f"got {type(source).__name__}; the model classifies videos by the order of their frames: expected a video's "
        "file, its URL, a folder of frames, a pattern, an array (T, H, W, 3), or a list of frames or of these."
    )


def _videos_named(source: str) -> Inputs:
    path = Path(source)
    if is_url(source):
        return Inputs([(source, download(source))], "one")
    if isdir(path) or not glob.has_magic(source) or exists(path):
        files = data_files(path) if isdir(path) else []
        inside = [(str(file), file) for file in files if file.suffix.lower() in VIDEO_EXTENSIONS]
        return Inputs(inside, "many", leaves_out_broken=True) if inside else Inputs([(source, path)], "one")
    # A folder of frames is a video, so folders may match.
    return Inputs([(str(path), path) for path in find_paths_like(source)], "many", leaves_out_broken=True)


_EXPECTED = (
    "expected a file, its URL, a folder, a pattern, a Pillow image, an array, a tensor, the bytes of a file, a "
    "list or a generator of these, a video, a stream, or the number of a camera"
)


def _images_named(source: str, channels: int | None) -> Inputs:
    path = Path(source)
    if live := find_stream(source):
        return Inputs(stream_frames(live), "stream")
    if is_url(source):
        if source.lower().endswith(VIDEO_EXTENSIONS):
            return Inputs(stream_frames(download(source)), "stream")
        return Inputs([(source, source)], "one")
    if isdir(path):
        return Inputs(
            [(str(file), file) for file in images_in(path, channels=channels)], "many", leaves_out_broken=True
        )
    if path.suffix.lower() in VIDEO_EXTENSIONS and isfile(path):
        return Inputs(stream_frames(path), "stream")
    if exists(path) or not glob.has_magic(source):
        return Inputs([(source, path)], "one")
    files = find_paths_like(source, folders=False)
    return Inputs([(str(path), path) for path in files], "many", leaves_out_broken=True)


Named = list[tuple[Path, str]]
"""Files, each with the name of its results: relative to a folder, without extension."""


def find_files(sources: Sequence[str], *, channels: int | None = None) -> tuple[Named, Named]:
    """Return the image files and the video files of sources.

    Args:
        sources: files, folders (including their subfolders), patterns, URLs, streams and camera numbers, which count as
            videos.
        channels: see `find_images`.
    Raises:
        DataError: a source has no such file.
    """
    paths: dict[Path, str] = {}
    for text in sources:
        path = Path(text)
        if path.is_dir():
            files = images_in(path, channels=channels, others=VIDEO_EXTENSIONS)
            paths |= {file: str(file.relative_to(path).with_suffix("")) for file in files}
        elif exists(path):
            paths[path] = path.stem
        elif live := find_stream(text):
            paths[live] = stream_name(live)
        elif is_url(text):
            paths[download(text)] = Path(text).stem
        elif text.isdecimal():
            paths[path] = f"camera_{text}"
        else:
            paths |= {file: file.stem for file in find_paths_like(text, folders=False)}
    named = list(zip(paths, unique_names(paths.values())))
    videos = [pair for pair in named if pair[0].suffix.lower() in VIDEO_EXTENSIONS or is_live(pair[0])]
    paths_of_videos = {path for path, _ in videos}
    return [pair for pair in named if pair[0] not in paths_of_videos], videos


def check_sources(sources: Iterable[str]) -> None:
    """Raise the DataError of `find_files` for a source without a file, before anything is read."""
    for text in sources:
        if not (exists(Path(text)) or find_stream(text) or is_url(text) or text.isdecimal()):
            find_paths_like(text, folders=False)


def is_camera(path: Path) -> bool:
    """Whether a source is the number of a camera."""
    return path.name.isdecimal() and not isinstance(path, Live) and not path.exists()


def is_live(path: Path) -> bool:
    """Whether a source is a stream or the number of a camera, which do not end."""
    return isinstance(path, Live) or is_camera(path)


def find_stream(text: str) -> Live | None:
    """Return the stream at an address, see `live_source`; None for names of files, also of those on the web."""
    is_file = text.lower().endswith((*FORMATS, *VIDEO_EXTENSIONS)) or (is_url(text) and _downloaded(text).exists())
    return live_source(text) if "://" in text and not is_file else None


def group_frame_folders(sources: Sequence[str], images: Named, videos: Named) -> tuple[Named, Named]:
    """Make each folder of images among the sources, including subfolders, one video in place of its images."""
    given = [Path(text) for text in sources if isdir(text)]
    inside = {path for path, _ in images if any(path.is_relative_to(folder) for folder in given)}
    folders = sorted({path.parent for path in inside})
    paths = [path for path, _ in videos] + folders
    names = [name for _, name in videos] + [folder.resolve().name for folder in folders]
    return [pair for pair in images if pair[0] not in inside], list(zip(paths, unique_names(names)))


def number_items(images: Iterable[ImageLike | NamedImage], what: str = "image") -> Iterator[NamedImage]:
    """Yield images with names; those without a name are named by their path or their number."""
    for number, image in enumerate(images):
        if isinstance(image, tuple) and len(image) == 2 and isinstance(image[0], str):
            yield image
        else:
            yield (str(image) if isinstance(image, str | Path) else f"{what}_{number}"), image


def images_in(folder: Path, *, channels: int | None = None, others: Sequence[str] = ()) -> list[Path]:
    """Return the image files in a folder and its subfolders, sorted.

    Args:
        channels: see `find_images`.
        others: further file extensions to include, such as those of videos.
    Raises:
        DataError: the folder does not exist, or has no image.
    """
    if not folder.is_dir():
        raise DataError(f"no folder '{folder}'. Expected a folder of images.")
    more = (*[".npy"] * (channels is not None), *others)
    paths = image_files(folder, also=more)
    if not paths:
        raise DataError(f"folder '{folder}' has no image ({', '.join((*FORMATS, *more))}).")
    return paths


def is_url(text: str) -> bool:
    """Whether a name is a URL."""
    return text.lower().startswith(("http://", "https://"))


def download(url: str) -> Path:
    """Download an image or a video once and return the path of the local copy; see `fetch_file`.

    Raises:
        CheckpointError: the URL cannot be reached.
    """
    return fetch_file(url, folder=_downloaded(url))


def _downloaded(url: str) -> Path:
    """Return the folder of the local copy of a URL: many images are called image.jpg, so each gets its own."""
    return cache_folder().parent / "images" / hashlib.sha256(os.fsencode(url)).hexdigest()


class FrameStream(NamedTuple):
    """Frames of a video file or a camera, read one after another."""

    frames: Iterator[tuple[str, np.ndarray]]
    """The number and the array (H, W, 3) uint8 RGB of each frame."""
    rate: float
    """Frames per second of the source."""
    num_frames: int | None
    """Number of frames that will be yielded; None for a camera or a stream."""
    times: np.ndarray | None = None
    """When each frame of a file is shown, in seconds: rates may vary. None for a camera or a stream."""


@contextmanager
def open_frames(
    source: int | str | Path, *, every: int = 1, start: int = 0, what: str = "input"
) -> Iterator[FrameStream]:
    """Open a video file, a stream, or a camera by its number, to read every `every`-th frame.

    Args:
        start: how many of these frames of a file are left out.
        what: beginning of the error messages.
    Raises:
        DataError: the file cannot be decoded, see `open_video`, the stream cannot be opened, or the camera gives no
            frame.
    """
    if isinstance(source, Live):
        live = LiveFrames(source, what)
        try:
            yield FrameStream(live.frames(every), live.rate, None)
        finally:
            live.close()
        return
    if not isinstance(source, int):
        with open_video(source, what) as video:
            numbers = range(0, len(video.times), every)[start:]
            frames = zip(map(str, numbers), video.frames(numbers))
            yield FrameStream(frames, video.info.frame_rate, len(numbers), video.times)
        return
    with quiet_opencv():
        camera = cv2.VideoCapture(source)
    try:
        yield FrameStream(_camera_frames(camera, source, every, what), camera.get(cv2.CAP_PROP_FPS) or 25.0, None)
    finally:
        camera.release()


def _camera_frames(camera: cv2.VideoCapture, source: int, every: int, what: str) -> Iterator[tuple[str, np.ndarray]]:
    number = 0
    while camera.grab():
        if number % every == 0:
            decoded, frame = camera.retrieve()
            if decoded:
                yield str(number), cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
        number += 1
    if number == 0:
        raise DataError(f"{what}: no frame of camera {source} can be read. Is it connected, and not in use?")


def stream_frames(source: int | str | Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the number and the array (H, W, 3) uint8 RGB of each frame; errors are those of `open_frames`."""
    with open_frames(source) as stream:
        yield from stream.frames


def to_array(
    image: ImageLike, name: str = "image", *, max_pixels: int = MAX_PIXELS, channels: int | None = None
) -> np.ndarray:
    """Read or convert an image to an array (H, W, 3) uint8 RGB, or with `channels` to (H, W, channels) uint16.

    Raises:
        DataError: a file is missing, or a file or an array is not an image.
        CheckpointError: a URL cannot be reached.
    """
    if isinstance(image, str) and is_url(image):
        image = download(image)
    if channels is not None:
        return _to_channels(image, name, channels, max_pixels)
    if isinstance(image, str | Path):
        return read_image(image, "input", max_pixels=max_pixels)
    if isinstance(image, io.IOBase):
        image = image.read()
    if isinstance(image, bytes):
        return decode_image(image, name, max_pixels=max_pixels)
    if isinstance(image, Image.Image):
        try:
            return pillow_to_array(image)
        except ValueError as error:
            raise DataError(f"{name}: {error}.") from error
    if isinstance(image, Tensor):
        image = _tensor_to_array(image)
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.shape[2:] != (3,):
        is_array = isinstance(image, np.ndarray | Tensor)
        got = f"{image.dtype} {tuple(image.shape)}" if is_array else type(image).__name__
        raise DataError(
            f"{name}: got {got}; expected a file, a Pillow image, an array (H, W, 3) of uint8 RGB, or a tensor "
            "(3, H, W), uint8 or float in 0..1."
        )
    if not image.size:
        raise DataError(f"{name}: an array of shape {image.shape} has no pixels.")
    return image


def _to_channels(image: ImageLike, name: str, channels: int, max_pixels: int) -> np.ndarray:
    if isinstance(image, str | Path):
        return read_channels(image, channels, "input", max_pixels=max_pixels)
    if isinstance(image, io.IOBase):
        image = image.read()
    if isinstance(image, bytes):
        return decode_channels(image, name, channels, max_pixels=max_pixels)
    if isinstance(image, Image.Image):
        image = np.asarray(ImageOps.exif_transpose(image))
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        image = (image.permute(1, 2, 0) if image.ndim == 3 else image).numpy()
    if not isinstance(image, np.ndarray):
        raise DataError(f"{name}: got {type(image).__name__}; expected a file, an array or a tensor (C, H, W).")
    return check_channels(image, channels, name)


def _tensor_to_array(image: Tensor) -> np.ndarray | Tensor:
    """Convert a tensor (3, H, W), uint8 or float in 0..1, to an array (H, W, 3) uint8; return other tensors as is."""
    if image.ndim != 3 or len(image) != 3:
        return image
    image = image.detach().cpu()
    if image.is_floating_point() and image.numel() and image.min() >= 0 and image.max() <= 1:
        image = (image * 255).round().to(torch.uint8)
    return image.permute(1, 2, 0).contiguous().numpy() if image.dtype == torch.uint8 else image


def make_batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of `size` items; the last may be shorter.

    Raises:
        ConfigError: the size is below 1.
    """
    if size < 1:
        raise ConfigError(f"batch_size={size}: expected at least 1.")
    items = iter(items)
    while chunk := list(islice(items, size)):
        yield chunk


def unique_names(names: Iterable[str]) -> list[str]:
    """Return the names, with a number appended to each repeated one."""
    taken: set[str] = set()
    unique = []
    for name in names:
        number, candidate = 1, name
        while candidate in taken:
            number += 1
            candidate = f"{name}_{number}"
        taken.add(candidate)
        unique.append(candidate)
    return unique
