"""Writes drawn frames as a video."""

from contextlib import ExitStack
from pathlib import Path

import cv2
import numpy as np

from vitkit.errors import DataError
from vitkit.io.atomic import renaming
from vitkit.io.image_files import quiet_opencv


class VideoWriter:
    """Writes drawn frames as an MP4. Legends differ in height, so frames are cropped or padded to the first one's size.

    Args:
        path: the file to write; it appears when it is complete.
        first_frame: a drawn frame, whose size is that of the video.
        rate: frames per second; `MAX_RATE` is written instead of a higher one, which no codec supports.
    """

    MAX_RATE = 240.0

    def __init__(self, path: Path, first_frame: np.ndarray, rate: float):
        # Codecs require even sizes.
        self.height, self.width = (side + side % 2 for side in first_frame.shape[:2])
        # With three decimals, OpenCV would divide a second into more parts than the 65535 that MPEG-4 has.
        rate = rate if rate < 60 else min(round(rate, 2), self.MAX_RATE)
        self.path, self._num_frames = path, 0
        with ExitStack() as stack:
            self._temporary = stack.enter_context(renaming(path, sync=False, ending=".mp4"))
            self.file = cv2.VideoWriter(
                str(self._temporary), cv2.VideoWriter_fourcc(*"mp4v"), rate, (self.width, self.height)
            )
            if not self.file.isOpened():
                raise DataError(f"--out: OpenCV cannot write '{path}' (mp4v). Use --no-draw for only the JSON.")
            self._renaming = stack.pop_all()

    def add(self, drawn: np.ndarray) -> None:
        """Write one drawn frame, cropped or padded with white to the video's size."""
        frame = np.full((self.height, self.width, 3), 255, np.uint8)
        drawn = drawn[: self.height, : self.width]
        frame[: drawn.shape[0], : drawn.shape[1]] = drawn
        self.file.write(cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
        self._num_frames += 1

    def close(self) -> None:
        """Finish the file.

        Raises:
            DataError: not all frames are in it, because the disk is full.
        """
        with self._renaming:
            self.file.release()
            # OpenCV reports no failed write.
            with quiet_opencv():
                written = int(cv2.VideoCapture(str(self._temporary)).get(cv2.CAP_PROP_FRAME_COUNT))
            if written != self._num_frames:
                raise DataError(
                    f"'{self.path}' cannot be written ({written} of {self._num_frames} frames are in it). Free some "
                    "space, or use --no-draw for only the JSON."
                )
