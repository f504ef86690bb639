"""Writes drawn frames as a video."""

from pathlib import Path

import cv2
import numpy as np

from vitkit.errors import DataError


class VideoWriter:
    """Writes drawn frames as an MP4. Legends differ in height, so frames are cropped or padded to the first one's size.

    Args:
        path: the file to write.
        first_frame: a drawn frame, whose size is that of the video.
        rate: frames per second; `MAX_RATE` is written instead of a higher one, which no codec supports.
    """

    MAX_RATE = 240.0

    def __init__(self, path: Path, first_frame: np.ndarray, rate: float):
        # Codecs require even sizes.
        self.height, self.width = (side + side % 2 for side in first_frame.shape[:2])
        path.parent.mkdir(parents=True, exist_ok=True)
        # With three decimals, OpenCV would divide a second into more parts than the 65535 that MPEG-4 has.
        rate = rate if rate < 60 else min(round(rate, 2), self.MAX_RATE)
        self.file = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), rate, (self.width, self.height))
        if not self.file.isOpened():
            raise DataError(f"--out: OpenCV cannot write '{path}' (mp4v). Use --no-draw for only the JSON.")

    def add(self, drawn: np.ndarray) -> None:
        """Write one drawn frame, cropped or padded with white to the video's size."""
        frame = np.full((self.height, self.width, 3), 255, np.uint8)
        drawn = drawn[: self.height, : self.width]
        frame[: drawn.shape[0], : drawn.shape[1]] = drawn
        self.file.write(cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))

    def close(self) -> None:
        """Finish the file."""
        self.file.release()
