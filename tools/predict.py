"""Predict on images or videos: drawn files, and all predictions as JSON.

MODEL is a name of the model zoo, the folder or a checkpoint of a run, or a config, whose weights follow it.
INPUT is a picture, a folder of pictures (including its subfolders), a pattern in quotes, or a video; several may be
given. For a clip model, the pictures of each folder are the frames of a video.

OUT/NAME.jpg              each picture with its predictions drawn; OUT/NAME.mp4 for a video
OUT/NAME.png              from clip models: frames of a video, and its best classes over time
OUT/predictions.json      all predictions; masks as COCO's run lengths
OUT/NAME_panoptic.png     from panoptic models: segment ids, R + 256 G + 65536 B
OUT/NAME_semantic.png     from semantic models: the class of each pixel, its position in "classes" of the JSON

Examples:
    python tools/predict.py runs/detr --input photos --out runs/predict
    python tools/predict.py runs/detr/last.pth --input street.jpg
    python tools/predict.py configs/detr_r50.py weights.pth --input street.jpg "holiday/*.jpg" --threshold 0.7
    python tools/predict.py detr_r50 --input drive.mp4 --batch 8 --half --device cuda
    python tools/predict.py runs/roofs --input aerial.tif --tiles 800 --tile-overlap 200
"""

import argparse
import glob
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from vitkit.data.io.output import write_text
from vitkit.data.io.video_files import VIDEO_EXTENSIONS, open_video
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.maps import encode_ids, encode_labels
from vitkit.inference import (
    FIELDS,
    Prediction,
    Predictor,
    Tiling,
    download,
    is_address,
    load,
    open_capture,
    pictures_in,
    read_frames,
)
from vitkit.inference.prefetch import map_ahead
from vitkit.inference.videos import classify_video
from vitkit.logging import ProgressLines, setup_logging
from vitkit.tools.common import (
    add_device,
    add_model,
    add_tiles,
    add_trust,
    errors_in_one_line,
    is_override,
    readable,
    report_unreadable,
    require_pictures,
    sort_model,
    tiling_of,
    unique_names,
)
from vitkit.visualization.clips import draw_scores_over_time
from vitkit.words import counted

MAX_LISTED = 5
"""The maximum number of names that are listed: of images without objects, and of a video's classes."""
FRAMES_SHOWN = 8


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    text = "pictures, folders, patterns, videos, URLs, or a camera's number"
    parser.add_argument("--input", nargs="+", required=True, metavar="INPUT", help=text)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/predict"), help="folder to write (default: runs/predict)"
    )
    parser.add_argument(
        "--threshold", type=float, help="minimum score of the drawn objects (default: the model's own, or 0.5)"
    )
    parser.add_argument(
        "--json-threshold", type=float, help="minimum score of the objects in the JSON (default: as drawn)"
    )
    parser.add_argument(
        "--task", choices=tuple(FIELDS), help="which predictions to draw, for a model with several tasks"
    )
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N", help="images or tiles in a batch (default: 1, without padding)"
    )
    parser.add_argument("--half", action="store_true", help="half precision: bf16 where PyTorch considers it safe")
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="use only every Nth frame of a video (default: 1)"
    )
    parser.add_argument(
        "--format", choices=("jpg", "png"), default="jpg", help="format of the drawn pictures (default: jpg)"
    )
    parser.add_argument("--no-draw", action="store_true", help="write only the JSON and the maps")
    add_tiles(parser)
    add_trust(parser)
    add_device(parser)
    args = parser.parse_intermixed_args(argv)
    sort_model(args)
    # Words after --input are inputs, also those that are meant for the config.
    args.overrides += [word for word in args.input if is_override(word)]
    args.input = [word for word in args.input if not is_override(word)]
    if not args.input:
        parser.error("--input: expected pictures or videos")
    if args.batch < 1 or args.every < 1:
        parser.error("--batch and --every are at least 1")
    args.json_threshold = args.threshold if args.json_threshold is None else args.json_threshold
    if not all(0 <= threshold <= 1 for threshold in (args.threshold or 0, args.json_threshold or 0)):
        parser.error("--threshold and --json-threshold are scores, 0 to 1")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with errors_in_one_line():
        setup_logging()
        run(args)


def run(args: argparse.Namespace) -> None:
    """Find the inputs, load the model, predict, and write."""
    tiling = tiling_of(args)
    pictures, videos = find_inputs(args.input)
    predictor = load(
        args.model,
        args.weights,
        overrides=args.overrides,
        trust=args.trust,
        device=args.device,
        precision="bf16" if args.half else "fp32",
    )
    require_pictures(predictor, args.model)
    if predictor.sampling is not None:
        if tiling is not None:
            raise ConfigError("--tiles: the model classifies videos, which have no tiles.")
        pictures, videos = frame_folders(args.input, pictures, videos)
    print(predictor.report)
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"model": args.model, "classes": predictor.classes}
    if predictor.finds_objects:
        results["thresholds"] = predictor.thresholds.as_json(predictor.classes)
        if args.threshold is None:
            print(f"objects from {predictor.thresholds}")
    if pictures:
        results["images"] = predict_pictures(predictor, pictures, args, tiling)
    if videos:
        predict = partial(predict_frames, tiling=tiling) if predictor.sampling is None else predict_clips
        results["videos"] = predict_videos(predict, predictor, videos, args)
    written = args.out / "predictions.json"
    write_text(written, json.dumps(results))
    print(f"wrote {written}{'' if args.no_draw else f' and the drawn files in {args.out}'}")


Named = list[tuple[Path, str]]
"""Input files, and the names of their outputs, relative to OUT and without extensions."""


def find_inputs(inputs: Sequence[str]) -> tuple[Named, Named]:
    """Sort the inputs into pictures and videos.

    Raises:
        DataError: an input names no file.
    """
    paths: dict[Path, str] = {}
    for text in inputs:
        path = Path(text)
        if path.is_dir():
            files = pictures_in(path, extensions=IMG_EXTENSIONS + VIDEO_EXTENSIONS)
            paths |= {file: str(file.relative_to(path).with_suffix("")) for file in files}
        elif path.is_file():
            paths[path] = path.stem
        elif is_address(text):
            paths[download(text)] = Path(text).stem
        elif text.isdecimal():
            paths[path] = f"camera_{text}"
        else:
            files = [Path(name) for name in sorted(glob.glob(text, recursive=True)) if Path(name).is_file()]
            if not files:
                raise DataError(f"--input {text}: no such file or folder, and no file matches it as a pattern.")
            paths |= {file: file.stem for file in files}
    named = list(zip(paths, unique_names(paths.values())))
    videos = [pair for pair in named if pair[0].suffix.lower() in VIDEO_EXTENSIONS or is_camera(pair[0])]
    return [pair for pair in named if pair not in videos], videos


def is_camera(path: Path) -> bool:
    """Whether an input is the number of a camera."""
    return path.name.isdecimal() and not path.exists()


def frame_folders(inputs: Sequence[str], pictures: Named, videos: Named) -> tuple[Named, Named]:
    """Turn the folders of pictures in the inputs, including subfolders, into videos in place of their pictures."""
    given = [Path(text) for text in inputs if Path(text).is_dir()]
    inside = {path for path, _ in pictures if any(path.is_relative_to(folder) for folder in given)}
    folders = sorted({path.parent for path in inside})
    paths = [path for path, _ in videos] + folders
    names = [name for _, name in videos] + [folder.resolve().name for folder in folders]
    return [pair for pair in pictures if pair[0] not in inside], list(zip(paths, unique_names(names)))


def predict_pictures(
    predictor: Predictor, pictures: Named, args: argparse.Namespace, tiling: Tiling | None
) -> list[dict[str, Any]]:
    """Predict and draw each picture that can be read; return their entries of the JSON.

    Raises:
        DataError: no picture can be read, or a drawing would overwrite one.
    """
    broken: list[str] = []
    names = dict(pictures)
    inputs = {os.path.realpath(path) for path in names}  # Path.resolve fails at circular links
    overwritten = [path for path, name in pictures if os.path.realpath(args.out / f"{name}.{args.format}") in inputs]
    if overwritten and not args.no_draw:
        raise DataError(
            f"--out {args.out}: drawing would overwrite the input '{overwritten[0]}'. Choose another folder."
        )
    results = []
    empty: list[str] = []
    progress = ProgressLines(len(pictures), "images")
    predictions = predictor.stream(readable(predictor, names, broken), batch_size=args.batch, tiles=tiling)
    predictions = noting_empty(predictions, args.threshold, empty)
    for result in map_ahead(partial(write_picture, names=names, args=args), predictions):
        results.append(result)
        progress.step()
    report_unreadable(broken, len(pictures))
    progress.finish()
    if empty:
        print(
            f"nothing was found in {counted(len(empty), 'images', of=len(results))}:", *empty[:MAX_LISTED], sep="\n  "
        )
    return results


def noting_empty(predictions: Iterable[Prediction], threshold: float | None, empty: list[str]) -> Iterator[Prediction]:
    """Yield the predictions; add a line to `empty` for each in which no object reaches the threshold, and print the
    classes of the first images of a classifier."""
    for number, prediction in enumerate(predictions):
        if "class_scores" in prediction.fields and number < MAX_LISTED:
            print(f"  {prediction.summary()}")
        shown = prediction if threshold is None else prediction.filter(score=threshold)
        if "scores" in prediction.fields and not len(shown):
            empty.append(shown.summary())
        yield prediction


def write_picture(prediction: Prediction, names: Mapping[Path, str], args: argparse.Namespace) -> dict[str, Any]:
    """Write the files of a picture's prediction; return its entry of the JSON."""
    name = names[Path(prediction.name)]
    result = prediction.as_json(score_threshold=args.json_threshold) | write_maps(prediction, args.out, name)
    if args.no_draw:
        return result
    file = f"{name}.{args.format}"
    prediction.save(args.out / file, task=args.task, score_threshold=args.threshold)
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
    predict: Callable[..., dict[str, Any]], predictor: Predictor, videos: Named, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Predict and draw each video that can be read; return their entries of the JSON.

    Raises:
        DataError: no video can be read.
    """
    results, broken = [], []
    for path, name in videos:
        try:
            results.append(predict(predictor, path, name, args))
        except DataError as error:
            if len(videos) > 1:
                print(f"left out: {error}", file=sys.stderr)
            broken.append(str(error))
    report_unreadable(broken, len(videos), "videos")
    return results


def predict_frames(
    predictor: Predictor, path: Path, name: str, args: argparse.Namespace, *, tiling: Tiling | None = None
) -> dict[str, Any]:
    """Predict and draw a video's frames, or a camera's until ctrl-C; return its entry of the JSON.

    Raises:
        DataError: the video or camera cannot be read.
    """
    video = open_capture(int(path.name) if is_camera(path) else path)
    frames, writer = [], None
    try:
        rate = video.get(cv2.CAP_PROP_FPS) or 25.0
        count = max(0, int(video.get(cv2.CAP_PROP_FRAME_COUNT)))
        progress = ProgressLines(-(-count // args.every), f"frames of {path.name}")
        predictions = predictor.stream(read_frames(video, args.every), batch_size=args.batch, tiles=tiling)
        for frame, drawn in map_ahead(partial(draw_frame, rate=rate, args=args), predictions):
            frames.append(frame)
            if drawn is not None:
                writer = writer or VideoFile(args.out / f"{name}.mp4", drawn, rate / args.every)
                writer.add(drawn)
            progress.step()
    except KeyboardInterrupt:
        if not is_camera(path):
            raise
    finally:
        if writer:
            writer.close()
        video.release()
    if not frames and is_camera(path):
        raise DataError(f"--input {path}: no frame of camera {path} can be read. Is it connected, and not in use?")
    if not frames:
        raise DataError(f"--input {path}: no frame of the video can be read. Is it a video, in a format OpenCV knows?")
    progress.finish()
    result = {"video": str(path), "frames_per_second": rate, "frames": frames}
    return result if args.no_draw else result | {"drawn": f"{Path(name).as_posix()}.mp4"}


def predict_clips(predictor: Predictor, path: Path, name: str, args: argparse.Namespace) -> dict[str, Any]:
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
    if args.no_draw:
        return entry
    shown = np.unique(result.numbers)
    shown = shown[np.linspace(0, len(shown) - 1, min(FRAMES_SHOWN, len(shown))).astype(int)]
    with open_video(path, "--input") as video:
        frames = list(video.frames(shown.tolist()))
    draw_scores_over_time(frames, result.times, result.scores, predictor.classes, args.out / f"{name}.png")
    return entry | {"drawn": f"{Path(name).as_posix()}.png"}


def draw_frame(
    prediction: Prediction, rate: float, args: argparse.Namespace
) -> tuple[dict[str, Any], np.ndarray | None]:
    """Return a frame's entry of the JSON, and the frame with its predictions drawn; None with --no-draw."""
    entry = prediction.as_json(score_threshold=args.json_threshold)
    del entry["image"]
    number = int(prediction.name)
    drawn = None if args.no_draw else prediction.draw(task=args.task, score_threshold=args.threshold)
    return {"frame": number, "seconds": number / rate, **entry}, drawn


class VideoFile:
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
        rate = min(rate, self.MAX_RATE)
        self.file = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), rate, (self.width, self.height))
        if not self.file.isOpened():
            raise DataError(f"--out: OpenCV cannot write '{path}' (mp4v). Use --no-draw for the JSON alone.")

    def add(self, drawn: np.ndarray) -> None:
        """Write one drawn frame, cropped or padded with white to the video's size."""
        frame = np.full((self.height, self.width, 3), 255, np.uint8)
        drawn = drawn[: self.height, : self.width]
        frame[: drawn.shape[0], : drawn.shape[1]] = drawn
        self.file.write(cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))

    def close(self) -> None:
        """Finish the file."""
        self.file.release()


if __name__ == "__main__":
    main()
