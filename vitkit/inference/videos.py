"""The classes of a video: clips that are spread over it, one after the other."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitkit.data.datasets.clip_sampling import ClipSampling
from vitkit.data.datasets.video import read_clips
from vitkit.errors import ConfigError
from vitkit.inference.prediction import Prediction
from vitkit.ops.video_files import open_video
from vitkit.structures import Batch, ScoreThresholds
from vitkit.visualization.clips import draw_strip

if TYPE_CHECKING:
    from vitkit.inference.predictor import Predictor

_FRAMES_DRAWN = 8


@dataclass
class VideoScores:
    """What a model of clips predicted in a video."""

    numbers: np.ndarray
    """(clips, T) numbers of the frames."""
    times: np.ndarray
    """(clips, 2) seconds of each clip's first and last frame."""
    scores: Tensor
    """(clips, classes) in 0..1; their mean is the video's."""


def classify_video(predictor: "Predictor", path: str | Path, num_clips: int | None = None) -> VideoScores:
    """Predict the classes of a video's clips; a clip's crops are averaged. One clip at a time is in memory.

    Args:
        predictor: of a model of clips.
        path: of a video file or a folder of frames.
        num_clips: spread over the video; None: as many as follow each other in it.
    Raises:
        ConfigError: the model is one of images.
        DataError: the video cannot be read.
    """
    sampling = _sampling_of(predictor)
    with open_video(path, "input", max_pixels=predictor.max_image_pixels) as video:
        numbers = _clips_of(sampling, video.times, num_clips)
        clips = []
        for clip in numbers:
            views, size = read_clips(video, clip[None], predictor.transforms, seed=0)
            results = predictor.run_batch(Batch({"images": views}, [{}] * len(views)), [size] * len(views))
            clips.append(torch.stack([result["class_scores"] for result in results]).mean(dim=0))
        return VideoScores(numbers, video.times[numbers[:, [0, -1]]], torch.stack(clips))


def predict_videos(predictor: "Predictor", source: Any, thresholds: ScoreThresholds) -> Iterator[Prediction]:
    """Predict on videos, one after the other: the scores of classes are the mean of the clips', the picture a strip.

    Args:
        predictor: of a model of clips.
        source: a video file or a folder of frames, or several of them.
        thresholds: of the predictions.
    Raises:
        ConfigError: the source is no path.
        DataError: a video cannot be read.
    """
    for path in [source] if isinstance(source, str | Path) else source:
        if not isinstance(path, str | Path):
            raise ConfigError(
                f"the model classifies videos by the order of their frames, not pictures: got {type(path).__name__}; "
                "give a video file or a folder of frames."
            )
        result = classify_video(predictor, path)
        numbers = np.unique(result.numbers)
        shown = numbers[np.linspace(0, len(numbers) - 1, min(_FRAMES_DRAWN, len(numbers))).astype(int)]
        with open_video(path, "input", max_pixels=predictor.max_image_pixels) as video:
            strip = draw_strip(list(video.frames(shown.tolist())), per_line=_FRAMES_DRAWN // 2)
        fields = {"class_scores": result.scores.mean(dim=0)}
        yield Prediction(str(path), strip, fields, predictor.classes, thresholds, predictor.category_ids)


def clip_of(predictor: "Predictor", path: str | Path) -> Tensor:
    """Read the clip in the middle of a video, (crops, 3, T, H, W) uint8; arguments and errors of `classify_video`."""
    sampling = _sampling_of(predictor)
    with open_video(path, "input", max_pixels=predictor.max_image_pixels) as video:
        return read_clips(video, _clips_of(sampling, video.times, 1), predictor.transforms, seed=0)[0]


def _sampling_of(predictor: "Predictor") -> ClipSampling:
    if predictor.sampling is None:
        raise ConfigError("the model predicts on pictures: give it the frames of the video.")
    return predictor.sampling


def _clips_of(sampling: ClipSampling, times: np.ndarray, num_clips: int | None) -> np.ndarray:
    """Return the (clips, T) numbers of the frames."""
    if sampling.sampling_rate is None:
        num_clips = 1  # segments of all of the video
    elif num_clips is None:
        seconds = sampling.num_frames * sampling.sampling_rate / sampling.frame_rate
        num_clips = max(1, math.ceil(float(times[-1]) / seconds))
    return replace(sampling, num_clips=num_clips).numbers(times, np.random.default_rng(0), "input")
