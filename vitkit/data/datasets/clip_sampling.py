"""Chooses which frames of a video make up a clip."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from vitkit.errors import ConfigError, DataError

OnShort = Literal["pad", "raise"]


@dataclass(frozen=True)
class ClipSampling:
    """Settings for sampling clips from a video.

    With `sampling_rate`, a clip spans `num_frames * sampling_rate` frames of a video at `frame_rate`, and as many
    seconds of any other video, so that motion has the same speed in all videos. A clip begins at a random time, or the
    clips of a video are spread over it: a single one in the middle, several from its start to its end. As in the code
    of SlowFast and of TimeSformer, the first and the last frame of that span are in the clip.

    Without `sampling_rate`, the video is cut into `num_frames` segments of equal length, each of which gives one frame:
    a random one, or the middle one (Wang et al. 2016, https://arxiv.org/abs/1608.00859; for Something-Something).
    """

    num_frames: int = 8
    sampling_rate: int | None = 32
    """Distance in frames between neighboring frames of a clip; None: one frame from each segment of the video."""
    frame_rate: float = 30.0
    """Frames per second of the videos that `sampling_rate` refers to."""
    temporal_jitter: bool = False
    """Whether clips (or frames of segments) are taken at random times, for training."""
    num_clips: int = 1
    """Number of clips per video, whose scores are averaged."""
    on_short: OnShort = "pad"
    """What to do with a video that is shorter than a clip: repeat its last frame, or raise an error, in which case
    data.on_error may skip the video."""

    def __post_init__(self) -> None:
        for name in ("num_frames", "sampling_rate", "num_clips"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name}: got {getattr(self, name)}; expected at least 1.")
        if not self.frame_rate > 0:
            raise ConfigError(f"frame_rate: got {self.frame_rate}; expected above 0.")
        if self.on_short not in ("pad", "raise"):
            raise ConfigError(f"on_short: got {self.on_short!r}; expected 'pad' or 'raise'.")
        if self.sampling_rate is None and self.num_clips > 1:
            raise ConfigError(
                f"num_clips: got {self.num_clips}; without a sampling_rate, one clip covers the whole video."
            )

    def is_short(self, times: np.ndarray) -> bool:
        """Return whether a video with frames at these times, in seconds, is shorter than a clip."""
        if self.sampling_rate is None:
            return len(times) < self.num_frames
        return bool(times[-1] + 0.5 / self.frame_rate < self._span)  # files round their times

    @property
    def _span(self) -> float:
        """Duration in seconds from a clip's first frame to its last."""
        return (self.num_frames * self.sampling_rate - 1) / self.frame_rate

    def numbers(self, times: np.ndarray, random: np.random.Generator, name: str) -> np.ndarray:
        """Choose the frames of a video's clips.

        Args:
            times: (N,) seconds of each frame after the first, ascending.
            random: the generator for everything random.
            name: name of the video, for the error message.
        Returns:
            (num_clips, num_frames) int64, ascending in each clip.
        Raises:
            DataError: the video is too short, and `on_short` is "raise".
        """
        if self.on_short == "raise" and self.is_short(times):
            clip = f"{self.num_frames} frames" if self.sampling_rate is None else f"{self._span:.2f} s"
            raise DataError(
                f"video '{name}' is too short: it has {len(times)} frames in {times[-1]:.2f} s, a clip needs {clip}. "
                "Set on_short=pad for this dataset to repeat its last frame, or data.on_error=skip to leave it out."
            )
        if self.sampling_rate is None:
            return self._segments(len(times), random)
        latest = max(times[-1] - self._span, 0.0)
        if self.temporal_jitter:
            starts = random.uniform(0.0, latest, self.num_clips)
        else:
            starts = np.linspace(0.0, latest, self.num_clips) if self.num_clips > 1 else np.array([latest / 2])
        moments = starts[:, None] + np.linspace(0.0, self._span, self.num_frames)
        # The frame that is shown at that moment; files round their times, so a frame may begin slightly late.
        shown = np.searchsorted(times, moments + 1e-3 / self.frame_rate, side="right") - 1
        return np.maximum(shown, 0)

    def _segments(self, num_frames: int, random: np.random.Generator) -> np.ndarray:
        bounds = np.rint(np.linspace(0, num_frames - 1, self.num_frames + 1)).astype(np.int64)
        if self.temporal_jitter:
            return random.integers(bounds[:-1], bounds[1:], endpoint=True)[None]
        return ((bounds[:-1] + bounds[1:]) // 2)[None]
