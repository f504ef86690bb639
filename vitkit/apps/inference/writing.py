"""Predict on files of images and videos: drawn files, and all predictions as JSON."""

import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from vitkit.apps.inference.inputs import Named, find_files, group_frame_folders, is_camera, open_frames
from vitkit.apps.inference.labels import write_labels
from vitkit.apps.inference.prediction import Prediction
from vitkit.apps.inference.predictor import Predictor, failure_line
from vitkit.apps.inference.prefetch import map_ahead
from vitkit.apps.inference.tiles import Tiling
from vitkit.apps.inference.videos import classify_video
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.maps import encode_ids, encode_labels
from vitkit.io.output import check_links, make_new_folder, write_bytes, write_text
from vitkit.io.video_files import open_video
from vitkit.logging import ProgressLines
from vitkit.text_format import pluralize
from vitkit.visualization.clips import draw_scores_over_time
from vitkit.visualization.videos import VideoWriter

MAX_LISTED = 5
"""The maximum number of names that are listed: of images without objects, and of a video's classes."""
FRAMES_SHOWN = 8
RESULTS_NAME = "predictions.json"


@dataclass(frozen=True)
class Output:
    """What is written of predictions, and where."""

    folder: Path | None = None
    """None: a new one, runs/predict, with a number if that exists."""
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
    overwrite: bool = False
    """Whether the files of an earlier prediction may be replaced."""


@dataclass
class Failures:
    """The inputs that could not be read or predicted, which do not end the prediction of the others."""

    count: int
    """Number of inputs."""
    errors: dict[str, Exception] = field(default_factory=dict)
    """Name of an input -> its error."""

    def leave_out(self, name: str, error: Exception) -> None:
        """Add an input and, if there are others, print its error."""
        self.errors[name] = error
        if self.count > 1:
            print(f"left out: {failure_line(name, error)}", file=sys.stderr)

    def to_json(self) -> list[dict[str, str]]:
        return [{"input": name, "error": failure_line(name, error)} for name, error in self.errors.items()]


def predict_files(
    predictor: Predictor, inputs: Sequence[str], output: Output, *, name: str = "model", tiling: Tiling | None = None
) -> Path:
    """Predict on files, write OUT/predictions.json and the drawn files, and return the path of the JSON.

    An input that cannot be read or predicted is named and counted, and the others are predicted.

    Args:
        inputs: files, folders, patterns, URLs, or numbers of cameras, see `find_files`.
        name: the model's name in the JSON.
        tiling: how images are cut into tiles; None: they are not.
    Raises:
        DataError: there is no such file, a file to write would overwrite one, or no input can be predicted; or, after
            everything else is written, some inputs could not.
        ConfigError: a model that classifies videos is to predict tiles, or on every Nth frame.
    """
    images, videos = find_files(inputs, channels=predictor.channels)
    if predictor.sampling is not None:
        if tiling is not None:
            raise ConfigError("--tiles: the model classifies videos, which have no tiles.")
        if output.every != 1:
            raise ConfigError("--every: the model classifies clips, whose frames its config chooses. Leave it out.")
        images, videos = group_frame_folders(inputs, images, videos)
        if images:
            raise DataError(
                f"'{images[0][0]}' is a single image, but the model classifies videos. Give a video's file, or the "
                "folder of its frames."
            )
    if output.folder is None:
        output = replace(output, folder=make_new_folder(Path("runs/predict")))
    check_files_stay(predictor, images, videos, output)
    if output.labels is not None:
        check_labels(predictor, images, videos)
    output.folder.mkdir(parents=True, exist_ok=True)
    failures = Failures(len(images) + len(videos))
    results: dict[str, Any] = {"model": name, "classes": predictor.classes}
    if predictor.finds_objects:
        results["thresholds"] = predictor.thresholds.to_json(predictor.classes)
        if output.threshold is None:
            print(f"objects from {predictor.thresholds}")
    if images:
        results["images"] = predict_images(predictor, images, output, tiling, failures)
    if videos:
        predict = partial(predict_frames, tiling=tiling) if predictor.sampling is None else predict_clips
        results["videos"] = predict_videos(predict, predictor, videos, output, failures)
    if not predictor.classes:  # the names that a caption gives to objects
        results["classes"] = _names_of_objects(results)
    num_failed = len(failures.errors)
    if num_failed == failures.count:
        raise next(iter(failures.errors.values()))
    if num_failed:
        results["failed"] = failures.to_json()
    path = output.folder / RESULTS_NAME
    write_text(path, json.dumps(results), below=output.folder)
    if output.labels is not None:
        print("wrote", *write_labels(results, output.labels, output.folder))
    if num_failed:
        raise DataError(
            f"{num_failed} of {pluralize(failures.count, 'inputs')} could not be predicted, and are listed above and "
            f"under 'failed' in {path}, which has the others. Repair them, or leave them out."
        )
    return path


def _names_of_objects(results: Mapping[str, Any]) -> list[str]:
    """Return the classes of the objects in the JSON's images and frames, in order of appearance."""
    frames = (frame for video in results.get("videos", ()) for frame in video.get("frames", ()))
    entries = [*results.get("images", ()), *frames]
    return list(dict.fromkeys(found["class"] for entry in entries for found in entry.get("objects", ())))


def check_labels(predictor: Predictor, images: Named, videos: Named) -> None:
    """Raise a ConfigError if there will be no objects of images to write as annotations."""
    if not predictor.finds_objects:
        raise ConfigError("--format: writes objects as annotations, and the model finds none. Leave it out.")
    if videos or not images:
        raise ConfigError(
            f"--format: writes annotations of images, and '{videos[0][0] if videos else 'the input'}' is a video. "
            "Extract its frames first: ffmpeg -i VIDEO frames/%06d.png"
        )


def check_files_stay(predictor: Predictor, images: Named, videos: Named, output: Output) -> None:
    """Check that no file to write is one of the inputs, or there already.

    Raises:
        DataError: a drawing or a map would overwrite an input or be written elsewhere, through a link, or an earlier
            prediction would be replaced.
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
    written = [RESULTS_NAME, *(drawn if output.draw else ()), *maps]
    existing = next((output.folder / file for file in written if os.path.lexists(output.folder / file)), None)
    if existing is not None and not output.overwrite:
        raise DataError(
            f"--out {output.folder}: '{existing}' exists already. Choose another folder, or add --overwrite."
        )
    for file in written:
        check_links(output.folder / file, output.folder)


def predict_images(
    predictor: Predictor, images: Named, output: Output, tiling: Tiling | None, failures: Failures
) -> list[dict[str, Any]]:
    """Predict and draw each image; return the entries of the JSON of those that do not fail."""
    names = dict(images)
    results = []
    empty: list[str] = []
    progress = ProgressLines(len(images), "images")
    predictions = predictor.stream(
        readable(predictor, names, failures), batch_size=output.batch_size, tiles=tiling, on_failure=failures.leave_out
    )
    predictions = noting_empty(predictions, output.threshold, empty)
    for result in map_ahead(partial(write_image, names=names, output=output, failures=failures), predictions):
        if result is not None:
            results.append(result)
        progress.step()
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


def write_image(
    prediction: Prediction, names: Mapping[Path, str], output: Output, failures: Failures
) -> dict[str, Any] | None:
    """Write the files of an image's prediction; return its entry of the JSON, or None if it cannot be drawn."""
    name = names[Path(prediction.name)]
    file = f"{name}.{output.image_format}"
    try:
        result = prediction.to_json(score_threshold=output.json_threshold)
        if output.draw:
            form = "JPEG" if output.image_format == "jpg" else "PNG"
            drawn = prediction.encode(form, task=output.task, score_threshold=output.threshold)
    except ConfigError:
        raise
    except Exception as error:  # such as a caption below an image of a width of two pixels
        failures.leave_out(prediction.name, error)
        return None
    result |= write_maps(prediction, output.folder, name)
    if not output.draw:
        return result
    write_bytes(output.folder / file, drawn, below=output.folder)
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
        write_bytes(folder / file, data, below=folder)
    return {key: Path(file).as_posix() for key, (file, _) in encoded.items()}


def predict_videos(
    predict: Callable[..., dict[str, Any]], predictor: Predictor, videos: Named, output: Output, failures: Failures
) -> list[dict[str, Any]]:
    """Predict and draw each video; return the entries of the JSON of those that do not fail."""
    results = []
    for path, name in videos:
        try:
            results.append(predict(predictor, path, name, output))
        except ConfigError:
            raise
        except Exception as error:  # a damaged video can make a decoder or the model raise anything
            failures.leave_out(str(path), error)
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


def readable(predictor: Predictor, paths: Collection[Path], failures: Failures) -> Iterator[tuple[str, np.ndarray]]:
    """Yield images with their names; unreadable ones are left out."""

    def read(path: Path) -> tuple[str, np.ndarray | Exception]:
        try:
            return str(path), predictor.to_array(path)
        except Exception as error:
            return str(path), error

    for name, image in map_ahead(read, paths, workers=1, ahead=2):
        if isinstance(image, Exception):
            failures.leave_out(name, image)
        else:
            yield name, image
