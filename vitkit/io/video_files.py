"""Video files and folders of frames, read by frame number with only the requested frames in memory."""

import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from vitkit.errors import ConfigError, DataError
from vitkit.io.folders import IMAGE_SUFFIXES, is_hidden, is_output
from vitkit.io.image_files import FORMATS as IMAGE_FORMATS
from vitkit.io.image_files import MAX_PIXELS, open_regular, read_image, upright_size

if TYPE_CHECKING:
    import av

VIDEO_EXTENSIONS = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".ts", ".flv", ".wmv", ".3gp")
FORMATS = ("mov", "mp4", "matroska", "webm", "avi", "mpeg", "mpegts", "mpegvideo", "flv", "asf", "h264", "hevc", "ogg")
"""FFmpeg's names of the formats that are read, regardless of file extensions. The formats left out include playlists,
which make FFmpeg open other files, or the network."""
ASSUMED_FRAME_RATE = 30
"""Frames per second of folders of frames, and of files that state neither when a frame is shown nor a rate."""
_NEAR = 50
"""Distance in packets up to which packets are skipped by reading rather than by seeking."""


class VideoInfo(NamedTuple):
    """Properties of a video as a whole."""

    num_frames: int
    seconds: float
    """Duration from the start of the first frame to the end of the last, in seconds."""
    height: int
    width: int
    """Width of the upright frames, in pixels; height likewise."""

    @property
    def frame_rate(self) -> float:
        """Average number of frames per second."""
        return self.num_frames / self.seconds


class Video(Protocol):
    """Frames by their number; opened by `open_video` and used in a `with` statement."""

    times: np.ndarray
    """(N,) float64, ascending: time of each frame after the first one, in seconds."""
    info: VideoInfo

    def frames(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield frames, (H, W, 3) uint8 RGB, upright; only one at a time is in memory.

        Args:
            numbers: ascending, in 0..N-1; a number may be repeated.
        Raises:
            DataError: a frame cannot be decoded.
        """

    def __enter__(self) -> "Video": ...

    def __exit__(self, *exception: object) -> None: ...


def open_video(path: str | Path, what: str = "videos", *, max_pixels: int = MAX_PIXELS) -> Video:
    """Open a video file, or a folder whose images are the frames.

    Args:
        what: beginning of the error messages.
        max_pixels: largest width x height of a frame.
    Raises:
        DataError: there is no such file, or it is damaged, an image, not a video of `FORMATS`, too large, or without
            frames.
        ConfigError: PyAV, which reads video files, is not installed.
    """
    path = Path(path)
    if path.suffix.lower() in IMAGE_SUFFIXES and os.path.isfile(path):
        raise DataError(f"{what}: '{path}' is a single image. Give a video's file, or the folder of its frames.")
    video_type = FrameFolder if os.path.isdir(path) else VideoFile
    return video_type(path, what, max_pixels=max_pixels)


class FrameFolder(nullcontext):
    """A video as a folder of images, one for each frame, in the order of the numbers in their names."""

    def __init__(self, path: str | Path, what: str = "videos", *, max_pixels: int = MAX_PIXELS):
        super().__init__(self)
        self.what, self.max_pixels = what, max_pixels
        images = (file for file in Path(path).iterdir() if file.suffix.lower() in IMAGE_SUFFIXES)
        files = [file for file in images if not is_hidden(file.name) and not is_output(file)]
        if not files:
            raise DataError(f"{what}: folder '{path}' contains no frames ({', '.join(IMAGE_FORMATS)}).")
        self._files = sorted(files, key=lambda file: _natural_order(file.name))
        self.times = np.arange(len(files)) / ASSUMED_FRAME_RATE

    @property
    def info(self) -> VideoInfo:
        """The number of frames and the duration; the size is the first frame's."""
        width, height = upright_size(self._files[0], self.what, max_pixels=self.max_pixels)
        return VideoInfo(len(self._files), len(self._files) / ASSUMED_FRAME_RATE, height, width)

    def frames(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        shape = None
        for number in numbers:
            frame = read_image(self._files[number], self.what, max_pixels=self.max_pixels)
            shape = shape or frame.shape
            if frame.shape != shape:
                raise DataError(
                    f"{self.what}: frame '{self._files[number]}' has shape {frame.shape}, others have {shape}. All "
                    "frames of a video must have the same size."
                )
            yield frame


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts frame_2.jpg before frame_10.jpg."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


class FrameList(nullcontext):
    """A video whose frames, (H, W, 3) uint8 RGB, are in memory; see `Video`."""

    def __init__(self, frames: Sequence[np.ndarray]):
        super().__init__(self)
        self._frames = frames
        self.times = np.arange(len(frames)) / ASSUMED_FRAME_RATE
        self.info = VideoInfo(len(frames), len(frames) / ASSUMED_FRAME_RATE, *frames[0].shape[:2])

    def frames(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """Return frames; see `Video`."""
        return (self._frames[number] for number in numbers)


class VideoFile:
    """A video file, decoded through PyAV.

    Frames are numbered in the order of the times stated in the file's packets, which are read first, so a number is
    exact for any distance of key frames, with B-frames and with varying frame rates. A frame is decoded from the
    preceding key frame on; frames in between are skipped if no requested frame depends on them. OpenCV seeks wrongly in
    such files.
    """

    def __init__(self, path: str | Path, what: str = "videos", *, max_pixels: int = MAX_PIXELS):
        self.path, self.what, self.max_pixels = Path(path), what, max_pixels
        self._form: tuple[int, int, int] | None = None
        self._file = open_regular(path, what)
        try:
            with self._decoding():
                self._open()
                self._list_packets()
        except BaseException:  # no file may stay open, even after ctrl-C; the exception is raised again
            self.__exit__()
            raise

    def __enter__(self) -> "VideoFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._container = None
        self._file.close()

    @cached_property
    def info(self) -> VideoInfo:
        """The number of frames, the duration and the size, for which the first frame is decoded."""
        height, width = next(self.frames([0])).shape[:2]
        intervals = np.diff(self.times)
        last = float(np.median(intervals)) if len(intervals) else float(self._interval)
        return VideoInfo(len(self.times), float(self.times[-1]) + last, height, width)

    def frames(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        unique, counts = np.unique(np.asarray(numbers, np.int64), return_counts=True)
        frames = self._decode(self._shown[unique])
        for count in counts.tolist():
            with self._decoding():
                frame = next(frames)
            for _ in range(count):
                yield frame

    def _open(self) -> None:
        """Open the file at its start."""
        av = import_av()
        self._file.seek(0)
        try:
            self._container = av.open(self._file, options={"format_whitelist": ",".join(FORMATS)})
        except av.error.ArgumentError as error:
            raise ValueError(
                f"its content is of none of the formats {', '.join(FORMATS)}; playlists are not read"
            ) from error
        if not self._container.streams.video:
            raise ValueError("it contains no images")
        self._stream = self._container.streams.video[0]
        self._decoder = decoder = self._stream.codec_context
        if decoder is None:
            raise ValueError("there is no decoder for its images")
        if decoder.width * decoder.height > self.max_pixels:
            raise ValueError(
                f"its frames of {decoder.width}x{decoder.height} pixels are too large. If that is intended, set "
                f"data.max_image_pixels (default: {MAX_PIXELS})"
            )
        decoder.options = {"max_pixels": str(self.max_pixels)}  # also applies to later frames
        decoder.thread_count = torch.get_num_threads()  # 1 in loading processes
        decoder.open(strict=False)
        self._demuxed, self._next_packet = self._demux(), 0

    def _list_packets(self) -> None:
        """Read which frames there are, in display order, and what decoding each of them needs."""
        packets = [(p.pts, p.is_keyframe, p.is_discard or p.is_corrupt) for p in self._demuxed]
        self._pts = [pts for pts, _, _ in packets]
        # AVI numbers frames in decoding order.
        is_avi_of_b_frames = self._container.format.name == "avi" and self._decoder.has_b_frames
        self._has_times = None not in self._pts and len({*self._pts}) == len(packets) and not is_avi_of_b_frames
        if not self._has_times:
            self._pts = list(range(len(packets)))
        self._packet_of = {pts: number for number, pts in enumerate(self._pts)}
        # "Discard" marks frames before the start that an edit list sets; other frames may depend on them.
        shown = [pts for pts, (_, _, is_hidden) in zip(self._pts, packets) if not is_hidden]
        if not shown:
            raise ValueError("it contains no frames")
        self._shown = np.sort(np.array(shown, np.int64))
        keys = [pts for pts, is_key, _ in packets if is_key] if self._has_times else []
        self._keys = np.sort(np.array(keys or self._pts[:1], np.int64))
        self._interval = 1 / (self._stream.average_rate or Fraction(ASSUMED_FRAME_RATE))
        unit = self._stream.time_base if self._has_times else self._interval
        self.times = (self._shown - self._shown[0]) * float(unit)
        self._next_packet = len(packets)

    def _decode(self, wanted: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the frame of each presentation timestamp in `wanted`, ascending; if the decoder drops one as damaged,
        the next frame or, at the end, the previous one."""
        image, waiting = None, deque(wanted.tolist())
        for pts, frame in self._decode_packets(wanted):
            if waiting and waiting[0] <= pts:
                image = self._to_rgb(frame)
            while waiting and waiting[0] <= pts:
                waiting.popleft()
                yield image
            if not waiting:
                return
        if image is None:
            raise ValueError("no frame can be decoded")
        for _ in waiting:
            yield image

    def _decode_packets(self, wanted: np.ndarray) -> Iterator[tuple[int, "av.VideoFrame"]]:
        """Decode from a key frame to the last wanted frame before another one; yield frames with their pts."""
        if not self._has_times:
            packets = chain(self._packets(0, len(self._pts)), [None])
            yield from enumerate(frame for packet in packets for frame in self._decoder.decode(packet))
            return
        needed = set(wanted.tolist())
        for start, stop in self._packet_ranges(wanted):
            for packet in chain(self._packets(start, stop), [None]):  # None makes the decoder output delayed frames
                if packet is not None:
                    self._decoder.skip_frame = "DEFAULT" if packet.pts in needed else "NONREF"
                for frame in self._decoder.decode(packet):
                    if frame.pts is not None:
                        yield frame.pts, frame

    def _packet_ranges(self, wanted: np.ndarray) -> list[tuple[int, int]]:
        """Return the ranges of packets, without overlaps, that decoding these frames needs."""
        keys = self._keys[np.maximum(np.searchsorted(self._keys, wanted, side="right") - 1, 0)]
        ranges: list[tuple[int, int]] = []
        for key, pts in zip(keys.tolist(), wanted.tolist()):
            start, stop = self._packet_of[key], self._packet_of[pts] + 1
            if ranges and start <= ranges[-1][1]:
                ranges[-1] = ranges[-1][0], max(stop, ranges[-1][1])
            else:
                ranges.append((start, stop))
        return ranges

    def _packets(self, start: int, stop: int) -> Iterator["av.Packet"]:
        """Yield the packets with these numbers, for a decoder without state."""
        if not self._next_packet <= start <= self._next_packet + _NEAR:
            self._seek(start)
        self._decoder.flush_buffers()
        while self._next_packet < stop:
            packet = next(self._demuxed, None)
            if packet is None:
                return
            self._next_packet += 1
            if self._next_packet > start:
                yield packet

    def _seek(self, number: int) -> None:
        """Seek to a packet or to one before it; if the format seeks too far, as MPEG-TS may, go to the first one."""
        if self._has_times:
            self._container.seek(self._pts[number], stream=self._stream)
            packets = self._demux()
            first = next(packets, None)
            position = None if first is None else self._packet_of.get(first.pts)
            if position is not None and position <= number:
                self._demuxed, self._next_packet = chain([first], packets), position
                return
        self._open()

    def _demux(self) -> Iterator["av.Packet"]:
        return (packet for packet in self._container.demux(self._stream) if packet.size)

    def _to_rgb(self, frame: "av.VideoFrame") -> np.ndarray:
        """Convert a frame to (H, W, 3), upright, in the first frame's size, as sizes may change in damaged files."""
        if self._form is None:
            self._form = self._decoder.width, self._decoder.height, round(frame.rotation / 90)
        width, height, quarter_turns = self._form
        image = frame.to_ndarray(format="rgb24", width=width, height=height)
        return np.ascontiguousarray(np.rot90(image, quarter_turns))

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """Convert errors that FFmpeg raises for a damaged file to a DataError that names the file."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # a damaged file can make a decoder raise anything
            reason = str(getattr(error, "strerror", None) or error) or type(error).__name__
            num_bytes = os.fstat(self._file.fileno()).st_size
            raise DataError(
                f"{self.what}: cannot decode '{self.path}' ({num_bytes} bytes): {reason}. Download or export the file "
                "again."
            ) from error


def import_av() -> ModuleType:
    """Import PyAV, with FFmpeg's messages off.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise ConfigError(
            f"video files are read through PyAV, which cannot be imported ({error}). Install it: pip install av."
        ) from error
    av.logging.set_level(av.logging.PANIC)  # errors are raised; FFmpeg's other messages do not name a file
    return av
