"""Writes drawn frames as a video."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitkit.errors import DataError
from vitkit.io.video_files import import_av

if TYPE_CHECKING:
    import av


class VideoWriter:
    """Writes drawn frames as an MP4. Legends differ in height, so frames are cropped or padded to the first one's size.

    Until it is complete, the file is called NAME.part.mp4. It is written in fragments, so that also the part that a
    killed process has written is a video.

    Args:
        path: the file to write; it appears when it is complete.
        first_frame: a drawn frame, whose size is that of the video.
        rate: frames per second; `MAX_RATE` is written instead of a higher one, which no codec supports.
    Raises:
        DataError: the file cannot be written.
    """

    MAX_RATE = 240.0
    _BITS_PER_PIXEL = 8
    """The maximum, which only noise needs."""

    def __init__(self, path: Path, first_frame: np.ndarray, rate: float):
        av = import_av()
        self.path, self._part = path, path.with_suffix(".part.mp4")
        rate = min(rate, self.MAX_RATE)
        # MPEG-4 divides a second into at most 65535 parts: 240 frames a second, by 250.
        exact = Fraction(rate).limit_denominator(1001 if rate < 60 else 250)
        flags = {"movflags": "frag_keyframe+empty_moov", "flush_packets": "1"}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._part.unlink(missing_ok=True)  # a link would be followed
            self._container = av.open(str(self._part), "w", container_options=flags)
            self._stream = self._container.add_stream("mpeg4", rate=exact)
            # Codecs require even sizes.
            self.height, self.width = (side + side % 2 for side in first_frame.shape[:2])
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

    def close(self) -> None:
        """Finish the file; raises like the constructor."""
        self._write(None)
        try:
            self._container.close()
            os.replace(self._part, self.path)
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
