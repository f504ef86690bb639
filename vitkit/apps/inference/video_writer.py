"""Writes drawn frames as a video."""

from __future__ import annotations

import os
import re
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitkit.errors import DataError
from vitkit.io.video_files import import_av

if TYPE_CHECKING:
    import av


class VideoWriter:
    """Writes drawn frames as an MP4. Legends differ in height, so frames are cropped or padded to the first one's size.

    Until it is complete, the file is called NAME.part-0.mp4, where 0 is the number of its first frame. It is written in
    fragments, so that also the part that a killed process has written is a video. Another process may continue it in a
    further part, with `start`; in the end the parts are joined without encoding them again.

    Args:
        path: the file to write; it appears when it is complete.
        first_frame: a drawn frame, whose size is that of the video if there are no parts before.
        rate: frames per second; `MAX_RATE` is written instead of a higher one, which no codec supports.
        start: the number of the first frame; those before are in the parts that are there, see `num_written`.
    Raises:
        DataError: the file cannot be written.
    """

    MAX_RATE = 240.0
    _BITS_PER_PIXEL = 8
    """The maximum, which only noise needs."""

    def __init__(self, path: Path, first_frame: np.ndarray, rate: float, *, start: int = 0):
        av = import_av()
        self.path = path
        rate = min(rate, self.MAX_RATE)
        # MPEG-4 divides a second into at most 65535 parts: 240 frames a second, by 250.
        exact = Fraction(rate).limit_denominator(1001 if rate < 60 else 250)
        flags = {"movflags": "frag_keyframe+empty_moov", "flush_packets": "1"}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            parts = _parts(path)
            for first, part in {start: _part(path, start), **parts}.items():
                if first >= start:
                    part.unlink(missing_ok=True)  # a link would be followed
            self._container = av.open(str(_part(path, start)), "w", container_options=flags)
            self._stream = self._container.add_stream("mpeg4", rate=exact)
            # Codecs require even sizes.
            self.height, self.width = (side + side % 2 for side in first_frame.shape[:2])
            if start:
                with av.open(str(parts[0])) as before:
                    self.height, self.width = before.streams.video[0].height, before.streams.video[0].width
            self._stream.height, self._stream.width, self._stream.pix_fmt = self.height, self.width, "yuv420p"
            self._stream.bit_rate = min(int(self.height * self.width * exact * self._BITS_PER_PIXEL), 2**30)
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from error

    def add(self, drawn: np.ndarray) -> None:
        """Write one drawn frame, cropped or padded with white to the video's size; raises like the constructor."""
        frame = np.full((self.height, self.width, 3), 255, np.uint8)
        drawn = drawn[: self.height, : self.width]
        frame[: drawn.shape[0], : drawn.shape[1]] = drawn
        self._write(import_av().VideoFrame.from_ndarray(frame, format="rgb24"))

    def close(self, *, is_complete: bool = True) -> None:
        """Finish the file, or only this part of it; raises like the constructor."""
        self._write(None)
        try:
            self._container.close()
            if is_complete:
                _join(self.path)
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from error

    def _write(self, frame: av.VideoFrame | None) -> None:
        """Encode a frame, or what is left of those before it."""
        try:
            self._container.mux(self._stream.encode(frame))
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: Exception) -> DataError:
        return DataError(
            f"'{self.path}' cannot be written ({getattr(error, 'strerror', None) or error}). Free some space, or use "
            "--no-draw for only the JSON."
        )


def num_written(path: Path) -> int:
    """Return how many frames from the first one on are in the parts of a video that is not complete."""
    written = 0
    for start, part in _parts(path).items():
        if start > written:
            break
        written = start + _num_packets(part)
    return written


def _part(path: Path, start: int) -> Path:
    return path.with_suffix(f".part-{start}.mp4")


def _parts(path: Path) -> dict[int, Path]:
    """Return the number of the first frame of each part -> its file, in order."""
    name = re.compile(rf"{re.escape(path.stem)}\.part-(\d+)\.mp4")
    files = path.parent.iterdir() if path.parent.is_dir() else ()
    return dict(sorted((int(match[1]), file) for file in files if (match := name.fullmatch(file.name))))


def _num_packets(part: Path) -> int:
    """Return the number of frames in a part; 0 if it was not begun, or is damaged."""
    av = import_av()
    try:
        with av.open(str(part)) as container:
            return sum(packet.size > 0 for packet in container.demux(container.streams.video[0]))
    except (OSError, ValueError, IndexError):
        return 0


def _join(path: Path) -> None:
    """Join the parts of a video, each up to the first frame of the next, and remove them."""
    parts = _parts(path)
    if [*parts] == [0]:
        os.replace(parts[0], path)
        return
    av, joined = import_av(), path.with_suffix(".joined.mp4")
    joined.unlink(missing_ok=True)
    with av.open(str(joined), "w") as output:
        stream = None
        for (start, part), end in zip(parts.items(), [*list(parts)[1:], None]):
            with av.open(str(part)) as container:
                before = container.streams.video[0]
                stream = stream or output.add_stream_from_template(before)
                ticks = start / (before.average_rate * before.time_base)
                packets = (packet for packet in container.demux(before) if packet.size)
                for packet in islice(packets, None if end is None else end - start):
                    packet.pts, packet.dts = packet.pts + round(ticks), packet.dts + round(ticks)
                    packet.stream = stream
                    output.mux(packet)
    os.replace(joined, path)
    for part in parts.values():
        part.unlink()
