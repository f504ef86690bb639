"""Classify a video by clips that are spread over it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from vitkit.apps.inference.inputs import Inputs, find_videos
from vitkit.apps.inference.prediction import Prediction, Threshold
from vitkit.apps.inference.predictor import OnFailure, Predictor
from vitkit.apps.inference.tiling import Tiling
from vitkit.apps.visualization.canvas import class_color, save_figure
from vitkit.apps.visualization.clips import draw_strip
from vitkit.data.datasets.clip_sampling import ClipSampling
from vitkit.data.datasets.video import read_clips
from vitkit.devices import Precision
from vitkit.errors import ConfigError, DataError
from vitkit.io.image_files import MAX_PIXELS
from vitkit.io.video_files import FrameList, Video, open_video
from vitkit.protocols.model import Model
from vitkit.structures import Batch
from vitkit.text.prompts import Prompt
from vitkit.weights import LoadReport

_FRAMES_DRAWN = 8
_MAX_CLASSES = 5
"""Number of classes whose scores over time are drawn."""


@dataclass
class VideoScores:
    """The class scores of a video and of each of its clips."""

    numbers: np.ndarray
    """(clips, T) frame numbers."""
    times: np.ndarray
    """(clips, 2) times of each clip's first and last frame, in seconds."""
    scores: Tensor
    """(clips, classes) scores in 0..1; their mean is the score of the video."""


class VideoPredictor(Predictor):
    """A model of clips with the preparation of its videos; made by `load`.

    It is used like other predictors: a source is one video or several (see `find_videos`), and a list of frames is one
    video. There is one `Prediction` for each video.

    Args:
        sampling: which frames make a clip. The other arguments are those of `Predictor`.
    """

    def __init__(
        self,
        model: Model,
        classes: Sequence[str],
        *,
        sampling: ClipSampling,
        transforms: Any = None,
        precision: Precision = "fp32",
        max_image_pixels: int = MAX_PIXELS,
        report: LoadReport | None = None,
    ):
        super().__init__(
            model, classes, transforms=transforms, precision=precision, max_image_pixels=max_image_pixels, report=report
        )
        self.sampling = sampling

    def stream(
        self,
        source: Any,
        *,
        text: Prompt | None = None,
        text_threshold: float | None = None,
        threshold: Threshold | None = None,
        batch_size: int = 1,
        tiles: int | Tiling | None = None,
        on_failure: OnFailure | None = None,
        workers: int = 0,
    ) -> Iterator[Prediction]:
        """Predict on videos, one at a time; see `Predictor.stream`. Classes have no threshold, videos no tiles, and
        `workers` have nothing to do."""
        if text is not None:
            predictor = self.with_text(text, text_threshold=text_threshold)
            yield from predictor.stream(source, threshold=threshold, tiles=tiles, on_failure=on_failure)
            return
        self.thresholds_for(threshold)
        videos = self._find(source)
        if tiles is not None:
            raise ConfigError("tiles: the model classifies videos, which have no tiles.")
        yield from self._each(videos, lambda named: predict_video(self, *named), on_failure)

    def _find(self, source: Any) -> Inputs:
        return find_videos(source)

    def run(self, images: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """Refuse images, as clips are classified by the order of their frames.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("the model classifies videos by the order of their frames, not images: give a video.")

    def run_tiles(self, image: np.ndarray, tiling: Tiling, *, batch_size: int = 1) -> dict[str, Any]:
        """Refuse images, see `run`."""
        raise ConfigError("tiles: the model classifies videos, which have no tiles.")


def open_source(predictor: Predictor, source: Any, name: str = "video") -> Video:
    """Open a video: a file, a folder of frames, or a sequence of frames that `Predictor.to_array` takes.

    Raises:
        DataError: the video cannot be read, or has no frame.
    """
    if isinstance(source, str | Path):
        return open_video(source, "input", max_pixels=predictor.max_image_pixels)
    frames = [predictor.to_array(frame, f"{name}, frame {number}") for number, frame in enumerate(source)]
    if not frames or len({frame.shape for frame in frames}) > 1:
        raise DataError(f"{name}: {len(frames)} frames; expected one at least, and all of one size.")
    return FrameList(frames)


def classify_video(predictor: Predictor, source: Any, num_clips: int | None = None) -> VideoScores:
    """Predict the classes of a video's clips, averaging the crops of a clip. Only one clip at a time is in memory.

    Args:
        predictor: that of a model of clips.
        source: see `open_source`.
        num_clips: number of clips, spread over the video; None: as many consecutive clips as the video is long.
    Raises:
        ConfigError: the model is an image model.
        DataError: the video cannot be read.
    """
    with open_source(predictor, source) as video:
        return _classify(predictor, video, num_clips)


def _classify(predictor: Predictor, video: Video, num_clips: int | None) -> VideoScores:
    numbers = _clips_of(_sampling_of(predictor), video.times, num_clips)
    clips = []
    for clip in numbers:
        views, size = read_clips(video, clip[None], predictor.transforms, seed=0)
        results = predictor.run_batch(Batch({"images": views}, [{}] * len(views)), [size] * len(views))
        clips.append(torch.stack([result["class_scores"] for result in results]).mean(dim=0))
    return VideoScores(numbers, video.times[numbers[:, [0, -1]]], torch.stack(clips))


def predict_video(predictor: Predictor, name: str, source: Any) -> Prediction:
    """Predict on a video: class scores are averaged over its clips, and its image is a strip of frames.

    Args:
        predictor: that of a model of clips.
        name: the video's name, for its prediction and for errors.
        source: see `open_source`.
    Raises:
        DataError: the video cannot be read.
    """
    with open_source(predictor, source, name) as video:
        result = _classify(predictor, video, None)
        numbers = np.unique(result.numbers)
        shown = numbers[np.linspace(0, len(numbers) - 1, min(_FRAMES_DRAWN, len(numbers))).astype(int)]
        strip = draw_strip(list(video.frames(shown.tolist())), per_line=_FRAMES_DRAWN // 2)
    return Prediction(name, strip, {"class_scores": result.scores.mean(dim=0)}, predictor.classes)


def clip_of(predictor: Predictor, path: str | Path) -> Tensor:
    """Read the clip in the middle of a video, (crops, 3, T, H, W) uint8; errors are those of `classify_video`."""
    sampling = _sampling_of(predictor)
    with open_video(path, "input", max_pixels=predictor.max_image_pixels) as video:
        return read_clips(video, _clips_of(sampling, video.times, 1), predictor.transforms, seed=0)[0]


def _sampling_of(predictor: Predictor) -> ClipSampling:
    if predictor.sampling is None:
        raise ConfigError("the model predicts on images, not on clips: give it frames of the video as images.")
    return predictor.sampling


def _clips_of(sampling: ClipSampling, times: np.ndarray, num_clips: int | None) -> np.ndarray:
    """Return the frame numbers of the clips, (clips, T)."""
    if sampling.sampling_rate is None:
        num_clips = 1  # segments of all of the video
    elif num_clips is None:
        seconds = sampling.num_frames * sampling.sampling_rate / sampling.frame_rate
        num_clips = max(1, math.ceil(float(times[-1]) / seconds))
    return replace(sampling, num_clips=num_clips).numbers(times, np.random.default_rng(0), "input")


def draw_scores_over_time(
    frames: Sequence[np.ndarray], times: np.ndarray, scores: Tensor, class_names: Sequence[str], path: str | Path
) -> None:
    """Save a PNG: a strip of a video's frames, and below it the scores of its five best classes over time.

    Args:
        frames: (H, W, 3) uint8 RGB, spread over the video.
        times: (clips, 2) seconds at which each clip begins and ends.
        scores: (clips, C) in 0..1.
        class_names: C names.
        path: the PNG's path; its folder is made.
    """
    strip = draw_strip(frames, per_line=len(frames))
    figure = Figure(figsize=(10, 10 * strip.shape[0] / strip.shape[1] + 3), layout="constrained")
    top, below = figure.subplots(2, height_ratios=[strip.shape[0] / strip.shape[1] * 10, 3])
    top.imshow(strip)
    top.set_axis_off()
    mean, labels = scores.mean(dim=0).topk(min(_MAX_CLASSES, len(class_names)))
    for rank, (label, score) in enumerate(zip(labels.tolist(), mean.tolist())):
        color = np.array(class_color(rank)) / 255
        # Each clip is a horizontal line from its first frame to its last, with a point in the middle.
        below.hlines(scores[:, label], *times.T, color=color, alpha=0.4, linewidth=2)
        middle = times.mean(axis=1)
        below.plot(middle, scores[:, label], "o-", color=color, label=f"{class_names[label]}  {score:.2f}")
    below.set(ylim=(-0.03, 1.03), xlabel="seconds", ylabel="score of each clip")
    below.legend(title="mean of the clips", fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    save_figure(figure, path, dpi=110)
