"""Frames of streams on a network, the newest first; a stream that breaks off is opened again."""

import logging
import re
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import cv2
import numpy as np

from vitkit.errors import DataError
from vitkit.io.image_files import quiet_opencv

logger = logging.getLogger("vitkit")

_SCHEMES = ("rtsp://", "rtsps://", "rtmp://", "srt://", "udp://", "rtp://")
_PLAYLISTS = ("application/vnd.apple.mpegurl", "application/x-mpegurl", "audio/mpegurl", "audio/x-mpegurl")
_TIMEOUT = 10.0
"""Seconds without an answer after which a stream counts as broken off."""
_LONGEST_WAIT = 30.0
"""Seconds between two attempts to open a stream again, at most; the first follows after one second."""
_MAX_ATTEMPTS = 20
"""Number of attempts after which a stream is given up, in about 10 minutes."""


class Live(type(Path())):  # type: ignore[misc]  # the class that Path has on this system
    """A stream among the paths of inputs; as a text, its address without a password."""

    address = ""

    def __str__(self) -> str:
        return re.sub(r"//[^/@]*@", "//", self.address) or super().__str__()


def live_source(text: str) -> Live | None:
    """Return the stream at an address: of a scheme such as rtsp, or one that a web server announces as such by its
    type (motion JPEG, HLS); None for all else."""
    if not text.lower().startswith(_SCHEMES) and not _is_announced(text):
        return None
    live = Live(text)
    live.address = text
    return live


def stream_name(live: Live) -> str:
    """Return a name for the results of a stream: its host and path."""
    parts = urlsplit(live.address)
    return re.sub(r"\W+", "_", f"{parts.hostname or ''}{parts.path}").strip("_") or "stream"


def _is_announced(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as response:
            kind = response.headers.get_content_type()
    except (OSError, ValueError):  # whoever downloads the file says what is wrong
        return False
    return kind.startswith("multipart/") or kind in _PLAYLISTS


class LiveFrames:
    """The frames of a stream; those that come while the last one is still used are passed over.

    Args:
        what: beginning of the error messages.
    Raises:
        DataError: the stream cannot be opened.
    """

    def __init__(self, live: Live, what: str = "input"):
        self.live, self.what = live, what
        self._capture = self._open()
        if not self._capture.isOpened():
            raise DataError(f"{what}: the stream {live} cannot be opened. Is the address right, and can it be reached?")
        self.rate = self._capture.get(cv2.CAP_PROP_FPS) or 25.0
        self._newest: tuple[int, np.ndarray] | None = None
        self._error: Exception | None = None
        self._changed, self._is_closed = threading.Condition(), threading.Event()
        self._thread = threading.Thread(target=self._read, name=f"frames of {live}", daemon=True)
        self._thread.start()

    def frames(self, every: int = 1) -> Iterator[tuple[str, np.ndarray]]:
        """Yield number and array (H, W, 3) uint8 RGB of the newest frame, at least `every` frames after the last one.

        Raises:
            DataError: the stream has broken off, and could not be opened again.
        """
        following = 0
        while True:
            with self._changed:
                while self._error is None and (self._newest is None or self._newest[0] < following):
                    self._changed.wait()
                if self._newest is None or self._newest[0] < following:
                    assert self._error is not None
                    raise self._error
                number, frame = self._newest
            following = number + every
            yield str(number), cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join(_TIMEOUT)

    def _open(self) -> cv2.VideoCapture:
        limits = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, int(_TIMEOUT * 1e3), cv2.CAP_PROP_READ_TIMEOUT_MSEC]
        with quiet_opencv():
            return cv2.VideoCapture(self.live.address, cv2.CAP_FFMPEG, [*limits, int(_TIMEOUT * 1e3)])

    def _read(self) -> None:
        """Keep the newest frame, until the stream is closed or given up."""
        number = failures = 0
        try:
            while not self._is_closed.is_set():
                is_read, frame = self._capture.read()
                if is_read:
                    failures = 0
                    self._set(newest=(number, frame))
                    number += 1
                    continue
                failures += 1
                if failures > _MAX_ATTEMPTS:
                    raise DataError(f"{self.what}: the stream {self.live} broke off, and cannot be opened again.")
                wait = min(2.0 ** (failures - 1), _LONGEST_WAIT)
                logger.warning("%s: no frame after number %d; opened again in %g s", self.live, number - 1, wait)
                self._is_closed.wait(wait)
                self._capture.release()
                self._capture = self._open()
        except Exception as error:
            self._set(error=error)
        finally:
            self._capture.release()

    def _set(self, *, newest: tuple[int, np.ndarray] | None = None, error: Exception | None = None) -> None:
        with self._changed:
            self._newest, self._error = newest or self._newest, error
            self._changed.notify_all()
