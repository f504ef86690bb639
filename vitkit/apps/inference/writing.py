"""Predict on files of images and videos: drawn files, and all predictions as JSON."""

import hashlib
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.apps.inference.inputs import (
    FrameStream,
    Named,
    find_files,
    group_frame_folders,
    is_camera,
    is_live,
    open_frames,
)
from vitkit.apps.inference.journal import RESULTS_NAME, Entries, Journal, Lines, Shard, states_of
from vitkit.apps.inference.labels import write_labels
from vitkit.apps.inference.prediction import Prediction, Threshold, make_threshold
from vitkit.apps.inference.predictor import OnFailure, Predictor, failure_line
from vitkit.apps.inference.prefetch import map_ahead
from vitkit.apps.inference.tiles import Tiling
from vitkit.apps.inference.video_writer import VideoWriter, num_written
from vitkit.apps.inference.videos import classify_video, draw_scores_over_time
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.maps import encode_ids, encode_labels
from vitkit.io.atomic import remove_left_over
from vitkit.io.folders import declare_output, is_output
from vitkit.io.output import check_links, unwritable, write_bytes, writing
from vitkit.io.video_files import open_video
from vitkit.logging import ProgressLines
from vitkit.text_format import pluralize
from vitkit.weights.locate import EXPORTED_SUFFIXES, Weights

MAX_LISTED = 5
"""The maximum number of names that are listed: of images without objects, and of a video's classes."""
FRAMES_SHOWN = 8
Write = Callable[[str, Mapping[str, Any]], None]
"""Takes the name of an input and its entry of the JSON."""


@dataclass(frozen=True)
class Output:
    """Options for writing predictions."""

    folder: Path | None = None
    """None: a new one, runs/predict, with a number if that exists."""
    threshold: Threshold | None = None
    """The minimum score of the drawn objects, of all or by class name; None: the model's thresholds."""
    json_threshold: Threshold | None = None
    """The minimum score of the objects in the JSON, likewise."""
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
    resume: bool = False
    """Whether the earlier prediction in the folder is continued, if there is one."""
    shard: Shard = field(default_factory=Shard)
    """The part of the inputs that this process predicts. The last one to finish merges the results of all."""
    workers: int = 2
    """Threads that read and prepare images while the model runs."""


def predict_files(
    predictor: Predictor,
    inputs: Sequence[str],
    output: Output,
    *,
    name: str = "model",
    overrides: Sequence[str] = (),
    tiling: Tiling | None = None,
) -> Path | None:
    """Predict on files, write OUT/predictions.json and the drawn files, and return the path of the JSON.

    What is predicted in an input is written to the folder's journal at once, and the JSON is made from it at the end.
    An input that cannot be read or predicted is named and counted, and the others are predicted.

    Args:
        inputs: files, folders, patterns, URLs, streams or numbers of cameras, see `find_files`.
        name, overrides: the model's name in the JSON, and the changes to its config.
        tiling: how images are cut into tiles; None: they are not.
    Returns:
        None if other processes have not finished their shards.
    Raises:
        DataError: there is no such file, a file to write would overwrite one, or no input can be predicted; or, after
            everything else is written, some inputs could not.
        ConfigError: a model that classifies videos is to predict tiles, or on every Nth frame; processes that share the
            inputs have no common folder; or the predictions to be resumed were made in another way.
    """
    thresholds = predictor.thresholds_for(output.threshold)
    predictor.thresholds_for(output.json_threshold)
    images, videos = find_inputs(predictor, inputs, output, tiling)
    if output.shard.of > 1 and output.overwrite:
        raise ConfigError("--overwrite: would remove what the other processes write. Choose a new folder by --out.")
    if output.folder is None:
        if output.shard.of > 1:
            raise ConfigError("--out: not given. Name the folder that the processes share.")
        output = replace(output, folder=make_new_folder(Path("runs/predict")))
    if output.labels is not None:
        check_labels(predictor, images, videos)
    check_inputs_stay(predictor, images, videos, output)
    named = [*images, *videos]
    states = states_of(path for path, _ in named)
    settings = describe_settings(predictor, name, overrides, inputs, named, output, tiling)
    with Journal(output.folder, output.shard, settings, resume=output.resume, overwrite=output.overwrite) as journal:
        lines = Lines(output.folder, len(named) if output.resume else 0, states)
        done = lines.done if output.resume else np.zeros(len(named), bool)
        indices = find_share(len(images), len(videos), output, done)
        num_images = sum(index < len(images) for index in indices)
        my_images, my_videos = ([named[k] for k in part] for part in (indices[:num_images], indices[num_images:]))
        written = check_earlier_stay(predictor, my_images, my_videos, output)
        if predictor.finds_objects and not isinstance(output.threshold, int | float):
            print(f"objects from {thresholds}")
        if done.any():
            print(f"resuming {output.folder}: {int(done.sum())} of {pluralize(len(named), 'inputs')} are done")
        if lines.num_changed:
            print(f"{pluralize(lines.num_changed, 'inputs')} changed since: predicted again")
        if output.resume:  # other shards may be merging the results
            remove_left_over(written if output.shard.of == 1 else written[1:])
        index_of = {str(named[k][0]): k for k in indices}

        def write(path: str, entry: Mapping[str, Any]) -> None:
            journal.add(index_of[path], {**entry, "state": f"{states[index_of[path]]:x}"})

        def leave_out(path: str, error: Exception) -> None:
            line = failure_line(path, error)
            write(path, {"failed": path, "error": line})
            if len(named) > 1:
                print(f"left out: {line}", file=sys.stderr)

        def is_new(prediction: Prediction) -> bool:
            return not done[index_of[prediction.name]]

        def predict_part(predictor: Predictor, path: Path, name: str, output: Output) -> dict[str, Any]:
            if predictor.sampling is not None:
                return predict_clips(predictor, path, name, output)
            is_same = output.resume and bool(lines.started[index_of[str(path)]])
            write(str(path), {"started": str(path)})
            return predict_frames(predictor, path, name, replace(output, resume=is_same), tiling=tiling)

        if my_images:
            predict_images(predictor, my_images, output, tiling, write, leave_out, is_new)
        predict_videos(predict_part, predictor, my_videos, output, write, leave_out)
        return collect(predictor, name, images, videos, output, journal, states)


def collect(
    predictor: Predictor, name: str, images: Named, videos: Named, output: Output, journal: Journal, states: np.ndarray
) -> Path | None:
    """Merge the results of all processes; return the path of the JSON, or None if others have not finished.

    Raises:
        ConfigError: another process has predicted into the folder in another way.
        DataError: no input could be predicted; or, after everything is written, some could not.
    """
    num_inputs = len(images) + len(videos)
    journal.check_settings()
    lines = Lines(output.folder, num_inputs, states)
    if lines.num_missing or lines.num_changed:
        print(f"shard {output.shard} is done; {lines.num_missing} of {num_inputs} inputs are left to the others")
        if lines.num_changed:
            print(f"{lines.num_changed} were changed since they were predicted: go on with --resume {output.folder}")
        return None
    if len(lines.failures) == num_inputs:
        error = next(iter(lines.failures))["error"]
        if output.shard.of == 1:
            journal.remove()
        raise DataError(error)
    head: dict[str, Any] = {"model": name, "classes": predictor.classes}
    if predictor.category_ids is not None and predictor.finds_objects:
        head["category_ids"] = list(predictor.category_ids)
    if predictor.keypoint_info is not None:
        head["keypoints"] = predictor.keypoint_info.to_json()
    if predictor.finds_objects:
        head["thresholds"] = predictor.thresholds.to_json(predictor.classes)
    head |= {"images": lines.images} if images else {}
    return merge(lines, head | ({"videos": lines.videos} if videos else {}), output)


def find_inputs(
    predictor: Predictor, inputs: Sequence[str], output: Output, tiling: Tiling | None
) -> tuple[Named, Named]:
    """Return the images and the videos to predict on; arguments and errors are those of `predict_files`."""
    images, videos = find_files(inputs, channels=predictor.channels)
    if predictor.sampling is None:
        return images, videos
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
    return images, videos


def merge(lines: Lines, results: dict[str, Any], output: Output) -> Path:
    """Write OUT/predictions.json, and the annotations if these are wanted, from the journals; return the JSON's path.

    Args:
        results: the content of the JSON but for `failed`, with the images and the videos that did not fail.
    Raises:
        DataError: after everything is written, if some inputs failed.
    """
    path = output.folder / RESULTS_NAME
    if not results["classes"]:  # the names that a caption gives to objects
        results = results | {"classes": _names_of_objects(lines, output.folder)}
    failed = [{"input": entry["failed"], "error": entry["error"]} for entry in lines.failures]
    write_results(results | ({"failed": failed} if failed else {}), path)
    if output.labels is not None:
        print("wrote", *write_labels(results, output.labels, output.folder))
    if failed:
        raise DataError(
            f"{len(failed)} of {pluralize(len(lines), 'inputs')} could not be predicted, and are listed under 'failed' "
            f"in {path}, which has the others. Leave them out, or repair them, and predict only them by "
            f"--resume {output.folder}."
        )
    return path


def find_share(num_images: int, num_videos: int, output: Output, done: np.ndarray) -> list[int]:
    """Return the numbers of the inputs that are left for this process, videos after images.

    Batches are those of all images in their order, whichever process predicts them, and after however many
    interruptions, as an image's result may depend on the padding in its batch.
    """
    num_batches = -(-num_images // output.batch_size)
    batches = np.append(np.arange(num_images) // output.batch_size, num_batches + np.arange(num_videos))
    is_mine = batches % output.shard.of == output.shard.number
    return np.flatnonzero(is_mine & np.isin(batches, batches[~done])).tolist()


def describe_settings(
    predictor: Predictor,
    name: str,
    overrides: Sequence[str],
    inputs: Sequence[str],
    named: Named,
    output: Output,
    tiling: Tiling | None,
) -> dict[str, Any]:
    """Return the settings that the predictions depend on, as plain values."""
    digest = hashlib.sha256()
    for path, result in named:
        digest.update(os.fsencode(f"{path}\0{result}\0"))
    return {
        "model": name,
        "overrides": list(overrides),
        "weights": weights_checksum(predictor.model, predictor.report.source),
        "precision": predictor.precision,
        "text": None if predictor.text is None else repr(predictor.text),
        "score thresholds": predictor.thresholds.to_json(predictor.classes),
        "inputs": list(inputs),
        "number of inputs": len(named),
        "checksum of the inputs' names": digest.hexdigest(),
        "threshold": output.threshold,
        "json_threshold": output.json_threshold,
        "task": output.task,
        "batch_size": output.batch_size,
        "every": output.every,
        "image_format": output.image_format,
        "draw": output.draw,
        "tiles": None if tiling is None else repr(tiling),
    }


def weights_checksum(model: nn.Module, source: Weights) -> str:
    """Return a checksum of a model's weights; `source` is their file, which matters if it is an exported one."""
    digest = hashlib.sha256()
    for key, value in model.state_dict().items():
        if isinstance(value, Tensor):
            digest.update(key.encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    if Path(source).suffix in EXPORTED_SUFFIXES:
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()


def write_results(results: Mapping[str, Any], path: Path) -> None:
    """Write the JSON; entries that are read from the journal are written one by one, with the frames of videos.

    Raises:
        DataError: it cannot be written.
    """
    check_links(path, path.parent)
    with writing(path) as temporary, temporary.open("x", encoding="utf-8") as file:
        for number, (key, value) in enumerate(results.items()):
            file.write(f"{', ' if number else '{'}{json.dumps(key)}: ")
            if not isinstance(value, Entries):
                file.write(json.dumps(value))
                continue
            for position, entry in enumerate(value):
                frames_file = entry.pop("frames", None)
                text = json.dumps(entry)
                file.write(f"{', ' if position else '['}{text if frames_file is None else text[:-1]}")
                if frames_file is None:
                    continue
                file.write(', "frames": ')
                for frame, line in enumerate(_frame_lines(path.parent / frames_file)):
                    file.write(f"{', ' if frame else '['}{line}")
                file.write("]}")
            file.write("]" if len(value) else "[]")
        file.write("}")


def _frame_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield line.rstrip("\n")


def _names_of_objects(lines: Lines, folder: Path) -> list[str]:
    """Return the classes of the objects in the JSON's images and frames, in order of appearance."""
    files = (folder / video["frames"] for video in lines.videos if "frames" in video)
    frames = (json.loads(line) for file in files for line in _frame_lines(file))
    entries = (entry for part in (lines.images, frames) for entry in part)
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


def files_to_write(predictor: Predictor, images: Named, videos: Named, output: Output) -> dict[str, list[str]]:
    """Return the drawings and the maps of images and videos, relative to the folder."""
    video_format = "mp4" if predictor.sampling is None else "png"
    drawn = [f"{name}.{output.image_format}" for _, name in images] + [f"{name}.{video_format}" for _, name in videos]
    maps = [f"{name}_{task}.png" for _, name in images for task in ("panoptic", "semantic") if task in predictor.tasks]
    return {"drawing": drawn if output.draw else [], "a map": maps}


def check_inputs_stay(predictor: Predictor, images: Named, videos: Named, output: Output) -> None:
    """Raise a DataError if an input would be overwritten by a drawing or a map, or removed as an earlier one."""
    below = os.path.join(os.path.realpath(output.folder), "")
    for path, _ in (*images, *videos) if output.overwrite else ():
        if os.path.realpath(path).startswith(below) and is_output(Path(path)):
            raise DataError(
                f"--out {output.folder}: --overwrite would remove the input '{path}', which vitkit has drawn there. "
                "Choose another folder."
            )
    files = files_to_write(predictor, images, videos, output)
    if not any(files.values()):
        return
    inputs = {os.path.realpath(path): path for path, _ in (*images, *videos)}  # Path.resolve fails at circular links
    for verb, names in files.items():
        overwritten = next(
            (path for name in names if (path := inputs.get(os.path.realpath(output.folder / name)))), None
        )
        if overwritten is not None:
            raise DataError(
                f"--out {output.folder}: {verb} would overwrite the input '{overwritten}'. Choose another folder."
            )


def check_earlier_stay(predictor: Predictor, images: Named, videos: Named, output: Output) -> list[Path]:
    """Check the files that this process is to write, of its images and videos; return them.

    Raises:
        DataError: an earlier prediction would be replaced, or a file be written elsewhere, through a link.
    """
    files = files_to_write(predictor, images, videos, output)
    written = [output.folder / file for file in (RESULTS_NAME, *files["drawing"], *files["a map"])]
    if repeated := [file for file, count in Counter(written).items() if count > 1]:
        raise DataError(
            f"--out {output.folder}: '{repeated[0]}' would be the drawing of one image and the map of another. Rename "
            "one of them, or draw in another format (--image-format)."
        )
    existing = next((file for file in written if os.path.lexists(file)), None)
    if existing is not None and not (output.overwrite or output.resume):
        raise DataError(
            f"--out {output.folder}: '{existing}' exists already. Choose another folder, continue it by --resume "
            f"{output.folder}, or add --overwrite."
        )
    for folder in {file.parent for file in written}:
        check_links(folder / RESULTS_NAME, output.folder)
    return written


def predict_images(
    predictor: Predictor,
    images: Named,
    output: Output,
    tiling: Tiling | None,
    write: Write,
    leave_out: OnFailure,
    is_new: Callable[[Prediction], bool],
) -> None:
    """Predict and draw each image, and write its entry of the JSON if it does not fail.

    Args:
        is_new: whether a prediction has to be written; the others only fill their batch.
    """
    names = {str(path): name for path, name in images}
    endings = [f".{output.image_format}"] * output.draw
    if not is_output(output.folder):  # of a folder of their own, maps can be read as labels
        endings += ["_panoptic.png", "_semantic.png"]
    declare_output(*(output.folder / f"{name}{ending}" for name in names.values() for ending in endings))
    empty: list[str] = []
    progress = ProgressLines(len(images), _noun("images", output.shard), every=5.0 * output.shard.of)
    predictions = predictor.stream(
        [path for path, _ in images],
        batch_size=output.batch_size,
        tiles=tiling,
        on_failure=leave_out,
        workers=output.workers,
    )
    predictions = note_empty(filter(is_new, predictions), output.threshold, empty)
    # Without a file to encode, writing is Python that holds the GIL: in threads it would only delay the model.
    run = map_ahead if output.draw or {"panoptic", "semantic"} & {*predictor.tasks} else map
    for name, result in run(partial(write_image, names=names, output=output), predictions):
        if isinstance(result, Exception):
            leave_out(name, result)
        else:
            write(name, result)
        progress.step()
    progress.finish()
    if empty:
        print(
            f"nothing was found in {pluralize(len(empty), 'images', of=progress.done)}"
            f"{', where the best box is drawn dashed' if output.draw else ''}:",
            *empty[:MAX_LISTED],
            sep="\n  ",
        )


def _noun(items: str, shard: Shard) -> str:
    return items if shard.of == 1 else f"{items} of shard {shard}"


def note_empty(
    predictions: Iterable[Prediction], threshold: Threshold | None, empty: list[str]
) -> Iterator[Prediction]:
    """Yield the predictions; add a line to `empty` for each in which no object reaches the threshold, which is empty
    beyond the first, and print the first images' classes or captions."""
    for number, prediction in enumerate(predictions):
        if prediction.fields.keys() & {"class_scores", "text"} and number < MAX_LISTED:
            print(f"  {prediction.summary()}")
        shown = prediction if threshold is None else prediction.filter(score=threshold)
        if "scores" in prediction.fields and not len(shown):
            empty.append(shown.summary() if len(empty) < MAX_LISTED else "")
        yield prediction


def entry_of(prediction: Prediction, output: Output) -> dict[str, Any]:
    """Return an entry of the JSON; its uncertainty is that at the threshold of what is drawn."""
    entry = prediction.to_json(score_threshold=output.json_threshold)
    if "uncertainty" in entry and output.threshold is not None:
        thresholds = make_threshold(output.threshold, prediction.classes, prediction.thresholds)
        entry["uncertainty"] = replace(prediction, thresholds=thresholds).uncertainty
    return entry


def write_image(
    prediction: Prediction, names: Mapping[str, str], output: Output
) -> tuple[str, dict[str, Any] | Exception]:
    """Write the files of an image's prediction; return its name and its entry of the JSON, or why it has none."""
    name = names[prediction.name]
    file = f"{name}.{output.image_format}"
    try:
        result = entry_of(prediction, output)
        if output.draw:
            form = "JPEG" if output.image_format == "jpg" else "PNG"
            drawn = prediction.encode(form, task=output.task, score_threshold=output.threshold)
    except ConfigError:
        raise
    except Exception as error:  # such as a caption below an image of a width of two pixels
        return prediction.name, error
    if output.json_threshold is not None and "panoptic" in prediction.fields:  # its map has the segments of the JSON
        prediction = prediction.filter(score=output.json_threshold)
    result |= write_maps(prediction, output.folder, name)
    if output.draw:
        write_bytes(output.folder / file, drawn, below=output.folder)
        result["drawn"] = Path(file).as_posix()
    return prediction.name, result


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
    predict: Callable[..., dict[str, Any]],
    predictor: Predictor,
    videos: Named,
    output: Output,
    write: Write,
    leave_out: OnFailure,
) -> None:
    """Predict and draw each video, and write its entry of the JSON if it does not fail."""
    if output.draw:
        declare_output(*(output.folder / f"{name}.{ending}" for _, name in videos for ending in ("mp4", "png")))
    for path, name in videos:
        try:
            entry = predict(predictor, path, name, output)
        except ConfigError:
            raise
        except Exception as error:  # a damaged video can make a decoder or the model raise anything
            leave_out(str(path), error)
        else:
            write(str(path), entry)


def predict_frames(
    predictor: Predictor, path: Path, name: str, output: Output, *, tiling: Tiling | None = None
) -> dict[str, Any]:
    """Predict and draw a video's frames, or a camera's or a stream's until ctrl-C; return its entry of the JSON.

    The frames' entries are lines of NAME_frames.jsonl, each written at once.

    Raises:
        DataError: the video, stream or camera cannot be read.
    """
    writer, frames_file, drawn_file = None, f"{name}_frames.jsonl", f"{name}.mp4"
    is_endless, is_complete = is_live(path), False
    source = int(path.name) if is_camera(path) else path
    start = 0 if is_endless else find_start(name, output)
    with open_frames(source, every=output.every, start=start, what="--input") as stream:
        if start:
            print(f"{path}: continues at frame {start} of {start + stream.num_frames}")
        progress = ProgressLines(stream.num_frames or 0, f"frames of {path.name}")
        predictions = predictor.stream(
            stream.frames, batch_size=output.batch_size, tiles=tiling, workers=0 if is_endless else output.workers
        )
        frames = _open_lines(output.folder / frames_file, output.folder, start)
        try:
            for frame, drawn in map_ahead(partial(draw_frame, stream=stream, output=output), predictions):
                if drawn is not None:
                    writer = writer or VideoWriter(
                        output.folder / drawn_file, drawn, stream.rate / output.every, start=start
                    )
                    writer.add(drawn)
                frames.write(json.dumps(frame) + "\n")
                progress.step()
            is_complete = True
        except KeyboardInterrupt:
            if not is_endless:
                raise
            is_complete = True
        finally:
            frames.close()
            if writer:
                writer.close(is_complete=is_complete)
    progress.finish()
    result = {"video": str(path), "frames_per_second": stream.rate, "frames": frames_file}
    return result | {"drawn": Path(drawn_file).as_posix()} if output.draw else result


def find_start(name: str, output: Output) -> int:
    """Return how many frames of a video an earlier prediction has written, in whole batches; the last one is predicted
    again, in case its line is damaged."""
    if not output.resume:
        return 0
    try:
        with (output.folder / f"{name}_frames.jsonl").open("rb") as file:
            # After a loss of power, there may be zeros in between.
            sound = takewhile(lambda line: line.startswith(b"{") and line.endswith(b"}\n"), file)
            count = sum(1 for _ in sound)
    except FileNotFoundError:
        return 0
    if output.draw:
        count = min(count, num_written(output.folder / f"{name}.mp4"))
    return max(count - 1, 0) // output.batch_size * output.batch_size


def _open_lines(path: Path, folder: Path, start: int) -> Any:
    """Open a file of which each line is written at once, and keep its first `start` lines."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_links(path, folder)
        if not start:
            path.unlink(missing_ok=True)
            return path.open("x", encoding="utf-8", buffering=1)
        with path.open("rb+") as file:
            file.truncate(sum(map(len, islice(file, start))))
        return path.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise unwritable(path, error) from error


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


def draw_frame(prediction: Prediction, stream: FrameStream, output: Output) -> tuple[dict[str, Any], np.ndarray | None]:
    """Return a frame's entry of the JSON, and the frame with its predictions drawn; None if nothing is drawn."""
    entry = entry_of(prediction, output)
    del entry["image"]
    number = int(prediction.name)
    drawn = None
    if output.draw:  # best boxes of frames that show nothing would flicker
        drawn = prediction.draw(task=output.task, score_threshold=output.threshold, best=False)
    seconds = number / stream.rate if stream.times is None else float(stream.times[number])
    return {"frame": number, "seconds": seconds, **entry}, drawn


def make_new_folder(path: Path) -> Path:
    """Make a folder that did not exist, with a number after its name if another one has it; return it.

    Raises:
        DataError: it cannot be made.
    """
    for number in itertools.count(1):
        folder = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            folder.mkdir(parents=True)
            declare_output(folder)
            return folder
        except FileExistsError:  # by whoever was first, also at the same time
            continue
        except OSError as error:
            raise unwritable(folder, error) from error
