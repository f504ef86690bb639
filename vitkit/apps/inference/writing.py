"""Predict on files of images and videos: drawn files, and all predictions as JSON."""

import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from vitkit.apps.inference.inputs import Named, find_files, frame_folders, is_camera, open_frames
from vitkit.apps.inference.labels import write_labels
from vitkit.apps.inference.prediction import Prediction
from vitkit.apps.inference.predictor import Predictor
from vitkit.apps.inference.prefetch import map_ahead
from vitkit.apps.inference.tiles import Tiling
from vitkit.apps.inference.videos import classify_video
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.maps import encode_ids, encode_labels
from vitkit.io.output import write_text
from vitkit.io.video_files import open_video
from vitkit.logging import ProgressLines
from vitkit.text_format import pluralize
from vitkit.visualization.clips import draw_scores_over_time
from vitkit.visualization.videos import VideoWriter

MAX_LISTED = 5
"""The maximum number of names that are listed: of images without objects, and of a video's classes."""
FRAMES_SHOWN = 8


@dataclass(frozen=True)
class Output:
    """What is written of predictions, and where."""

    folder: Path
    threshold: float | None = None
    """The minimum score of the drawn objects; None: the model's thresholds."""
    json_threshold: float | None = None
    """The minimum score of the objects in the JSON; None: the model's thresholds."""
    task: str | None = None
    """The task whose predictions are drawn, one of `FIELDS`; None: the first that the model has."""
    batch_size: int = 1
    """Images or tiles in a batch; with 1 there is no padding."""
    every: int = 1
    """Use only every Nth frame of a video."""
    image_format: Literal["jpg", "png"] = "jpg"
    draw: bool = True
    labels: str | None = None
    """The format of annotations, one of WRITERS, in which the objects are also written; None: they are not."""


def predict_files(
    predictor: Predictor, inputs: Sequence[str], output: Output, *, name: str = "model", tiling: Tiling | None = None
) -> Path:
    """Predict on files, write OUT/predictions.json and the drawn files, and return the path of the JSON.

    Args:
        inputs: files, folders, patterns, URLs, or numbers of cameras, see `find_files`.
        name: the model's name in the JSON.
        tiling: how images are cut into tiles; None: they are not.
    Raises:
        DataError: there is no such file, none can be read, or a file to write would overwrite one.
        ConfigError: a model that classifies videos is to predict tiles, or on every Nth frame.
    """
    images, videos = find_files(inputs, channels=predictor.channels)
    if predictor.sampling is not None:
        if tiling is not None:
            raise ConfigError("--tiles: the model classifies videos, which have no tiles.")
        if output.every != 1:
            raise ConfigError("--every: the model classifies clips, whose frames its config chooses. Leave it out.")
        images, videos = frame_folders(inputs, images, videos)
        if images:
            raise DataError(
                f"'{images[0][0]}' is a single image, but the model classifies videos. Give a video's file, or the "
                "folder of its frames."
            )
    check_inputs_stay(predictor, images, videos, output)
    if output.labels is not None:
        check_labels(predictor, images, videos)
    output.folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"model": name, "classes": predictor.classes}
    if predictor.finds_objects:
        results["thresholds"] = predictor.thresholds.to_json(predictor.classes)
        if output.threshold is None:
            print(f"objects from {predictor.thresholds}")
    if images:
        results["images"] = predict_images(predictor, images, output, tiling)
    if videos:
        predict = partial(predict_frames, tiling=tiling) if predictor.sampling is None else predict_clips
        results["videos"] = predict_videos(predict, predictor, videos, output)
    path = output.folder / "predictions.json"
    write_text(path, json.dumps(results))
    if output.labels is not None:
        print("wrote", *write_labels(results, output.labels, output.folder))
    return path


def check_labels(predictor: Predictor, images: Named, videos: Named) -> None:
    """Raise a ConfigError if there will be no objects of images to write as annotations."""
    if not predictor.finds_objects:
        raise ConfigError("--format: writes objects as annotations, and the model finds none. Leave it out.")
    if videos or not images:
        raise ConfigError(
            f"--format: writes annotations of images, and '{videos[0][0] if videos else 'the input'}' is a video. "
            "Extract its frames first: ffmpeg -i VIDEO frames/%06d.png"
        )


def check_inputs_stay(predictor: Predictor, images: Named, videos: Named, output: Output) -> None:
    """Check that no file to write is one of the inputs.

    Raises:
        DataError: a drawing or a map would overwrite an input.
    """
    inputs = {os.path.realpath(path): path for path, _ in (*images, *videos)}  # Path.resolve fails at circular links
    video_format = "mp4" if predictor.sampling is None else "png"
    drawn = [f"{name}.{output.image_format}" for _, name in images] + [f"{name}.{video_format}" for _, name in videos]
    maps = [f"{name}_{task}.png" for _, name in images for task in ("panoptic", "semantic") if task in predictor.tasks]
    for verb, files in (("drawing", drawn if output.draw else ()), ("a map", maps)):
        overwritten = next(
            (path for file in files if (path := inputs.get(os.path.realpath(output.folder / file)))), None
        )
        if overwritten is not None:
            raise DataError(
                f"--out {output.folder}: {verb} would overwrite the input '{overwritten}'. Choose another folder."
            )


def predict_images(predictor: Predictor, images: Named, output: Output, tiling: Tiling | None) -> list[dict[str, Any]]:
    """Predict and draw each image that can be read; return their entries of the JSON.

    Raises:
        DataError: no image can be read.
    """
    broken: list[str] = []
    names = dict(images)
    results = []
    empty: list[str] = []
    progress = ProgressLines(len(images), "images")
    predictions = predictor.stream(readable(predictor, names, broken), batch_size=output.batch_size, tiles=tiling)
    predictions = noting_empty(predictions, output.threshold, empty)
    for result in map_ahead(partial(write_image, names=names, output=output), predictions):
        results.append(result)
        progress.step()
    report_unreadable(broken, len(images))
    progress.finish()
    if empty:
        print(
            f"nothing was found in {pluralize(len(empty), 'images', of=len(results))}:", *empty[:MAX_LISTED], sep="\n  "
        )
    return results


def noting_empty(predictions: Iterable[Prediction], threshold: float | None, empty: list[str]) -> Iterator[Prediction]:
    """Yield the predictions; add a line to `empty` for each in which no object reaches the threshold, and print the
    first images' classes or captions."""
    for number, prediction in enumerate(predictions):
        if prediction.fields.keys() & {"class_scores", "text"} and number < MAX_LISTED:
            print(f"  {prediction.summary()}")
        shown = prediction if threshold is None else prediction.filter(score=threshold)
        if "scores" in prediction.fields and not len(shown):
            empty.append(shown.summary())
        yield prediction


def write_image(prediction: Prediction, names: Mapping[Path, str], output: Output) -> dict[str, Any]:
    """Write the files of an image's prediction; return its entry of the JSON."""
    name = names[Path(prediction.name)]
    result = prediction.to_json(score_threshold=output.json_threshold) | write_maps(prediction, output.folder, name)
    if not output.draw:
        return result
    file = f"{name}.{output.image_format}"
    prediction.save(output.folder / file, task=output.task, score_threshold=output.threshold)
    return result | {"drawn": Path(file).as_posix()}


def write_maps(prediction: Prediction, folder: Path, name: str) -> dict[str, str]:
    """Write the panoptic and semantic maps; return key of the JSON -> file."""
    encoded = {}
    if "panoptic" in prediction.fields:
        encoded["panoptic_map"] = (f"{name}_panoptic.png", encode_ids(prediction.fields["panoptic"].numpy()))
    if "semantic" in prediction.fields:
        labels = prediction.fields["semantic"].numpy()
        labels = labels.astype(np.uint8 if len(prediction.classes) <= 256 else np.uint16)
        encoded["semantic_map"] = (f"{name}_semantic.png", encode_labels(labels))
    for file, data in encoded.values():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(data)
    return {key: Path(file).as_posix() for key, (file, _) in encoded.items()}


def predict_videos(
    predict: Callable[..., dict[str, Any]], predictor: Predictor, videos: Named, output: Output
) -> list[dict[str, Any]]:
    """Predict and draw each video that can be read; return their entries of the JSON.

    Raises:
        DataError: no video can be read.
    """
    results, broken = [], []
    for path, name in videos:
        try:
            results.append(predict(predictor, path, name, output))
        except DataError as error:
            if len(videos) > 1:
                print(f"left out: {error}", file=sys.stderr)
            broken.append(str(error))
    report_unreadable(broken, len(videos), "videos")
    return results


def predict_frames(
    predictor: Predictor, path: Path, name: str, output: Output, *, tiling: Tiling | None = None
) -> dict[str, Any]:
    """Predict and draw a video's frames, or a camera's until ctrl-C; return its entry of the JSON.

    Raises:
        DataError: the video or camera cannot be read.
    """
    frames, writer = [], None
    with open_frames(int(path.name) if is_camera(path) else path, every=output.every, what="--input") as stream:
        progress = ProgressLines(stream.num_frames or 0, f"frames of {path.name}")
        predictions = predictor.stream(stream.frames, batch_size=output.batch_size, tiles=tiling)
        try:
            for frame, drawn in map_ahead(partial(draw_frame, rate=stream.rate, output=output), predictions):
                frames.append(frame)
                if drawn is not None:
                    writer = writer or VideoWriter(output.folder / f"{name}.mp4", drawn, stream.rate / output.every)
                    writer.add(drawn)
                progress.step()
        except KeyboardInterrupt:
            if not is_camera(path):
                raise
        finally:
            if writer:
                writer.close()
    progress.finish()
    result = {"video": str(path), "frames_per_second": stream.rate, "frames": frames}
    return result | {"drawn": f"{Path(name).as_posix()}.mp4"} if output.draw else result


def predict_clips(predictor: Predictor, path: Path, name: str, output: Output) -> dict[str, Any]:
    """Predict and draw the classes of a video's clips; return its entry of the JSON.

    Raises:
        DataError: the video cannot be read.
    """
    result = classify_video(predictor, path)

    def best(scores: Tensor) -> list[dict[str, Any]]:
        values, labels = scores.topk(min(MAX_LISTED, len(predictor.classes)))
        return [{"class": predictor.classes[k], "score": v} for k, v in zip(labels.tolist(), values.tolist())]

    mean = best(result.scores.mean(dim=0))
    print(f"{path}:", *(f"{entry['class']} {entry['score']:.2f}" for entry in mean))
    clips = [{"seconds": t, "classes": best(scores)} for t, scores in zip(result.times.tolist(), result.scores)]
    entry = {"video": str(path), "classes": mean, "clips": clips}
    if not output.draw:
        return entry
    shown = np.unique(result.numbers)
    shown = shown[np.linspace(0, len(shown) - 1, min(FRAMES_SHOWN, len(shown))).astype(int)]
    with open_video(path, "--input") as video:
        frames = list(video.frames(shown.tolist()))
    draw_scores_over_time(frames, result.times, result.scores, predictor.classes, output.folder / f"{name}.png")
    return entry | {"drawn": f"{Path(name).as_posix()}.png"}


def draw_frame(prediction: Prediction, rate: float, output: Output) -> tuple[dict[str, Any], np.ndarray | None]:
    """Return a frame's entry of the JSON, and the frame with its predictions drawn; None if nothing is drawn."""
    entry = prediction.to_json(score_threshold=output.json_threshold)
    del entry["image"]
    number = int(prediction.name)
    drawn = prediction.draw(task=output.task, score_threshold=output.threshold) if output.draw else None
    return {"frame": number, "seconds": number / rate, **entry}, drawn


def readable(predictor: Predictor, paths: Collection[Path], broken: list[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield images with their names; unreadable ones are reported and added to `broken`, without stopping."""

    def read(path: Path) -> tuple[str, np.ndarray] | DataError:
        try:
            return str(path), predictor.to_array(path)
        except DataError as error:
            return error

    for image in map_ahead(read, paths, workers=1, ahead=2):
        if isinstance(image, DataError):
            if len(paths) > 1:
                print(f"left out: {image}", file=sys.stderr)
            broken.append(str(image))
        else:
            yield image


def report_unreadable(broken: Sequence[str], count: int, noun: str = "images") -> None:
    """Print how many of `count` images, or other items named by `noun`, were left out as unreadable.

    Raises:
        DataError: all of them; the message is that of the first.
    """
    if len(broken) == count:
        raise DataError(broken[0])
    if broken:
        print(f"{len(broken)} of {count} {noun} could not be read and were left out", file=sys.stderr)
