"""Find what is in images or videos: drawn files, and everything found as JSON.

MODEL is a config file, whose weights follow it; or the folder of a run, or a name of the model zoo, which have theirs.
INPUT is a picture, a folder of pictures (also deeper), a pattern in quotes, or a video; several may be given.

OUT/NAME.png              each picture with what was found; of a video OUT/NAME.mp4
OUT/predictions.json      everything found; masks as COCO's run lengths
OUT/NAME_panoptic.png     of panoptic models: segment ids, R + 256 G + 65536 B
OUT/NAME_semantic.png     of semantic models: the class of each pixel, its position in "classes" of the JSON

Examples:
    python tools/predict.py runs/detr --input photos --out runs/predict
    python tools/predict.py configs/detr_r50.py weights.pth --input street.jpg "holiday/*.jpg" --threshold 0.7
    python tools/predict.py detr_r50 --input drive.mp4 --batch 8 --half --device cuda
"""

import argparse
import glob
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torchvision.datasets.folder import IMG_EXTENSIONS

from vitkit.errors import DataError, VitkitError, error_line
from vitkit.evaluation.maps import encode_ids, encode_labels
from vitkit.inference import FIELDS, Prediction, Predictor, load, to_array
from vitkit.logging import setup_logging

VIDEO_EXTENSIONS = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg")
PROGRESS_SECONDS = 5.0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a config file, the folder of a run, or a name of the model zoo")
    parser.add_argument("weights", nargs="?", help="a checkpoint; those of a run or the zoo are known")
    parser.add_argument("overrides", nargs="*", help="key.sub=value of the config")
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="INPUT", help="pictures, folders, patterns, videos"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/predict"), help="folder to write (runs/predict)")
    parser.add_argument("--threshold", type=float, default=0.5, help="least score of the objects drawn (0.5)")
    parser.add_argument("--json-threshold", type=float, default=0.05, help="least score of those in the JSON (0.05)")
    parser.add_argument("--task", choices=tuple(FIELDS), help="what to draw, of a model that does several")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="images at once (1, which pads none)")
    parser.add_argument("--half", action="store_true", help="half precision: bf16 where PyTorch holds it to be safe")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="of a video only each Nth frame (1)")
    parser.add_argument("--no-draw", action="store_true", help="JSON and maps only")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_intermixed_args(argv)
    if args.weights and "=" in args.weights and not Path(args.weights).exists():
        args.weights, args.overrides = None, [args.weights, *args.overrides]
    if args.batch < 1 or args.every < 1:
        parser.error("--batch and --every are at least 1")
    if not (0 <= args.threshold <= 1 and 0 <= args.json_threshold <= 1):
        parser.error("--threshold and --json-threshold are scores, 0 to 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        setup_logging()
        run(args)
    except VitkitError as error:
        sys.exit(error_line(error))


def run(args: argparse.Namespace) -> None:
    """Finds the inputs, loads the model, predicts, and writes."""
    pictures, videos = find_inputs(args.input)
    predictor = load(
        args.model, args.weights, overrides=args.overrides, device=args.device,
        precision="bf16" if args.half else "fp32",
    )  # fmt: skip
    print(predictor.report)
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"model": args.model, "classes": predictor.classes}
    if pictures:
        results["images"] = predict_pictures(predictor, pictures, args)
    if videos:
        results["videos"] = [predict_video(predictor, path, name, args) for path, name in videos]
    written = args.out / "predictions.json"
    written.write_text(json.dumps(results), encoding="utf-8")
    print(f"wrote {written}{'' if args.no_draw else f' and the drawn files in {args.out}'}")


Named = list[tuple[Path, str]]
"""Files, and the names below OUT, without endings, under which they are written."""


def find_inputs(inputs: Sequence[str]) -> tuple[Named, Named]:
    """The pictures and the videos that are meant.

    Raises:
        DataError: an input names nothing, or nothing known.
    """
    found: dict[Path, str] = {}
    for text in inputs:
        path = Path(text)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMG_EXTENSIONS + VIDEO_EXTENSIONS)
            if not inside:
                raise DataError(f"--input {text}: the folder holds no picture and no video.")
            found |= {p: str(p.relative_to(path).with_suffix("")) for p in inside}
        elif path.is_file():
            found[path] = path.stem
        else:
            inside = [Path(name) for name in sorted(glob.glob(text, recursive=True)) if Path(name).is_file()]
            if not inside:
                raise DataError(f"--input {text}: no such file or folder, and as a pattern it fits no file.")
            found |= {p: p.stem for p in inside}
    named = list(zip(found, unique_names(found.values())))
    videos = [(path, name) for path, name in named if path.suffix.lower() in VIDEO_EXTENSIONS]
    return [pair for pair in named if pair not in videos], videos


def unique_names(names: Iterable[str]) -> list[str]:
    """The names, where one comes again with a number behind it."""
    seen: set[str] = set()
    unique = []
    for name in names:
        number, candidate = 1, name
        while candidate in seen:
            number += 1
            candidate = f"{name}_{number}"
        seen.add(candidate)
        unique.append(candidate)
    return unique


def predict_pictures(predictor: Predictor, pictures: Named, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Entries of the JSON, one for each picture that can be read.

    Raises:
        DataError: none can.
    """
    broken: list[str] = []
    names = dict(pictures)
    results = []
    progress = Progress(len(pictures), "images")
    for prediction in predictor.stream(readable(names, broken), batch_size=args.batch):
        name = names[Path(prediction.name)]
        results.append(prediction.as_json(score_threshold=args.json_threshold) | write_maps(prediction, args.out, name))
        if not args.no_draw:
            path = args.out / f"{name}.png"
            prediction.save(path, task=args.task, score_threshold=args.threshold)
            results[-1]["drawn"] = path.relative_to(args.out).as_posix()
        progress.step()
    if not results:
        raise DataError(broken[0])
    progress.finish()
    if broken:
        print(f"{len(broken)} of {len(pictures)} pictures could not be read and were left out", file=sys.stderr)
    return results


def readable(paths: Iterable[Path], broken: list[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Pictures by name; what is wrong with others is said and noted, so that one file does not stop a thousand."""
    for path in paths:
        try:
            picture = to_array(path)
        except DataError as error:
            print(f"left out: {error}", file=sys.stderr)
            broken.append(str(error))
            continue
        yield str(path), picture


def write_maps(prediction: Prediction, folder: Path, name: str) -> dict[str, str]:
    """Writes panoptic and semantic maps; which file holds which is for the JSON."""
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


def predict_video(predictor: Predictor, path: Path, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The video's entry of the JSON; writes the drawn one.

    Raises:
        DataError: it cannot be read.
    """
    video = cv2.VideoCapture(str(path))
    try:
        rate = video.get(cv2.CAP_PROP_FPS) or 25.0
        count = max(0, int(video.get(cv2.CAP_PROP_FRAME_COUNT)))
        frames, writer = [], None
        progress = Progress(-(-count // args.every), f"frames of {path.name}")
        for prediction in predictor.stream(read_frames(video, args.every), batch_size=args.batch):
            number = int(prediction.name)
            frame = prediction.as_json(score_threshold=args.json_threshold)
            del frame["image"]
            frames.append({"frame": number, "seconds": number / rate, **frame})
            if not args.no_draw:
                drawn = prediction.draw(task=args.task, score_threshold=args.threshold)
                writer = writer or VideoFile(args.out / f"{name}.mp4", drawn, rate / args.every)
                writer.add(drawn)
            progress.step()
        if writer:
            writer.close()
    finally:
        video.release()
    if not frames:
        raise DataError(f"--input {path}: no frame of the video can be read. Is it a video, in a format OpenCV knows?")
    progress.finish()
    result = {"video": str(path), "frames_per_second": rate, "frames": frames}
    return result if args.no_draw else result | {"drawn": f"{Path(name).as_posix()}.mp4"}


def read_frames(video: cv2.VideoCapture, every: int) -> Iterator[tuple[str, np.ndarray]]:
    """Each `every`th frame, RGB, under its number."""
    number = 0
    while video.grab():
        if number % every == 0:
            decoded, frame = video.retrieve()
            if decoded:
                yield str(number), cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
        number += 1


class VideoFile:
    """Drawn frames as an MP4. Legends differ in height from frame to frame: what is beyond the first frame's is cut.

    Args:
        first: a drawn frame, whose size all others get.
        rate: frames per second.
    """

    def __init__(self, path: Path, first: np.ndarray, rate: float):
        # Codecs want even sizes.
        self.height, self.width = (side + side % 2 for side in first.shape[:2])
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), rate, (self.width, self.height))
        if not self.file.isOpened():
            raise DataError(f"--out: OpenCV cannot write '{path}' (mp4v). Use --no-draw for the JSON alone.")

    def add(self, drawn: np.ndarray) -> None:
        frame = np.full((self.height, self.width, 3), 255, np.uint8)
        drawn = drawn[: self.height, : self.width]
        frame[: drawn.shape[0], : drawn.shape[1]] = drawn
        self.file.write(cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))

    def close(self) -> None:
        self.file.release()


class Progress:
    """Lines of how far it is and how long it takes, every few seconds and at the end.

    Args:
        total: of what is counted; 0 if that is not known.
        what: is counted.
    """

    def __init__(self, total: int, what: str):
        self.total, self.what = total, what
        self.done = 0
        self.start = self.last = time.monotonic()

    def step(self) -> None:
        self.done += 1
        if time.monotonic() - self.last > PROGRESS_SECONDS:
            self.last = time.monotonic()
            eta = f"  ETA {(self.total - self.done) / self.rate():.0f} s" if self.total >= self.done else ""
            print(f"{self.done}/{self.total or '?'} {self.what}  {self.rate():.2f} it/s{eta}", flush=True)

    def finish(self) -> None:
        print(f"{self.done} {self.what}, {self.rate():.2f} it/s", flush=True)

    def rate(self) -> float:
        return self.done / max(time.monotonic() - self.start, 1e-9)


if __name__ == "__main__":
    main()
