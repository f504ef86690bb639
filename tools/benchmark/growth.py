"""Measure how time and memory grow with the number of images, over three sizes of each part.

Each size runs in a new process. Time is processor time. Memory is the peak of the process, and what it grew by during
the part. An exponent of 1 is time or memory in proportion to the number of images; it is the slope of a line through
the logarithms.

Examples:
    python tools/benchmark/growth.py                     # all parts, with 1,000, 3,000 and 10,000 images
    python tools/benchmark/growth.py cvat --sizes 1000 10000 100000
"""

import argparse
import io
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from vitkit.apps.datasets.writing import WRITERS
from vitkit.apps.inference import load
from vitkit.apps.inference.journal import Journal, Lines, Shard
from vitkit.apps.inference.labels import write_labels
from vitkit.apps.inference.writing import Output, predict_files, write_results
from vitkit.apps.training.stored_predictions import PredictionFiles
from vitkit.data.synthetic.shapes import ShapesDetection
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.protocols.dataset import Dataset

MODEL = "shapes_detr"
SIDE = 32
OBJECTS = 20
"""The number of objects of an image in a journal."""
DETECTIONS = 100
"""The number of detections of an image in an evaluation."""
CLASSES = [f"class {number}" for number in range(80)]
SIZES = (1_000, 3_000, 10_000)
MIB = 2**20


class Growth(NamedTuple):
    """Time and memory of a part at one size."""

    seconds: float
    """Processor time."""
    peak: int
    """The process's peak memory, bytes."""
    grown: int
    """The peak less the memory before, bytes."""


def predict(folder: Path, count: int) -> Callable[[], object]:
    """Predict images with a small model, as vitkit predict does: the journal, and the JSON made of it."""
    photos = write_photos(folder, count, different=64)
    predictor = load(MODEL, device="cpu")
    output = Output(folder=folder / "out", draw=False, batch_size=16, json_threshold=0.0)
    return lambda: predict_files(predictor, [str(photos)], output)


def resume(folder: Path, count: int) -> Callable[[], object]:
    """Read the journal of a prediction that was killed at its end, and write the JSON."""
    write_journal(folder, count)
    return lambda: write_results({"images": Lines(folder, count).images}, folder / "predictions.json")


def annotate(folder: Path, count: int, *, format: str) -> Callable[[], object]:
    """Write the annotations of vitkit predict --format from a journal."""
    write_journal(folder, count)
    lines = Lines(folder, count)
    return lambda: write_labels({"classes": CLASSES, "images": lines.images}, format, folder)


def evaluate(folder: Path, count: int) -> Callable[[], object]:
    """Match detections with objects, and compute COCO's metrics."""
    evaluator = CocoEvaluator(Annotated(count))

    def run() -> None:
        for predictions, targets in detections(count):
            evaluator.update(predictions, targets)
        evaluator.gather()
        assert evaluator.compute()["bbox/AP"] > 0.9

    return run


def resume_test(folder: Path, count: int) -> Callable[[], object]:
    """Read the predictions that a killed evaluation has left, as vitkit test --resume does."""
    evaluator = CocoEvaluator(Annotated(count))
    written = PredictionFiles(folder / "stored_predictions", resume=False)
    written.begin(evaluator, {})
    for predictions, targets in detections(count):
        evaluator.update(predictions, targets)
        written.add()

    def run() -> None:
        done = PredictionFiles(folder / "stored_predictions", resume=True).begin(CocoEvaluator(Annotated(count)), {})
        assert len(done) == count

    return run


PARTS: dict[str, Callable[[Path, int], Callable[[], object]]] = {
    "predict": predict,
    "resume": resume,
    **{format: partial(annotate, format=format) for format in WRITERS},
    "evaluate": evaluate,
    "resume_test": resume_test,
}
"""Name -> takes a new folder and the number of images, prepares, and returns what is measured."""


def write_photos(folder: Path, count: int, *, different: int) -> Path:
    """Write tiny JPEGs of drawn shapes, as links to `different` files."""
    photos, shapes = folder / "photos", ShapesDetection(num_images=different, image_size=SIDE)
    photos.mkdir()
    for number in range(count):
        path = photos / f"{number:07d}.jpg"
        if number < different:
            image = shapes.load_sample(number, 0)["image"]
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
        else:
            path.hardlink_to(photos / f"{number % different:07d}.jpg")
    return photos


def write_journal(folder: Path, count: int) -> None:
    """Write the lines of predicted images, each with `OBJECTS` boxes."""
    photos, rng = write_photos(folder, count, different=1), np.random.default_rng(0)
    with Journal(folder, Shard(), {}) as journal:
        for number in range(count):
            x, y = rng.uniform(0, SIDE - 9, (2, OBJECTS))
            objects = [
                {"class": CLASSES[k % 80], "score": 0.5, "box_xyxy": [x[k], y[k], x[k] + 8, y[k] + 8]}
                for k in range(OBJECTS)
            ]
            entry = {"image": f"{photos}/{number:07d}.jpg", "width": SIDE, "height": SIDE}
            journal.add(number, entry | {"uncertainty": 0.5, "objects": objects})


class Annotated(Dataset):
    """A dataset of images with seven objects each, as many as COCO's have on average."""

    annotations, classes = ("objects",), CLASSES
    category_ids = range(len(CLASSES))

    def __init__(self, count: int):
        self.image_ids = range(count)

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError("only its ground truth is read")

    def ground_truth(self) -> dict[str, list[dict[str, Any]]]:
        boxes = [[10.0 + 80 * k, 10.0, 20.0 + k, 30.0] for k in range(7)]
        annotations = [
            dict(id=7 * i + k, image_id=i, category_id=(i + k) % 80, bbox=box, area=box[2] * box[3], iscrowd=0)
            for i in self.image_ids
            for k, box in enumerate(boxes)
        ]
        images = [dict(id=i, width=640, height=480) for i in self.image_ids]
        return dict(
            images=images, annotations=annotations, categories=[dict(id=k, name=name) for k, name in enumerate(CLASSES)]
        )


def detections(count: int) -> Iterator[tuple[list[dict[str, torch.Tensor]], list[dict[str, Any]]]]:
    """Yield the predictions and the target of each image; predictions are its objects and boxes without an object."""
    generator = torch.Generator().manual_seed(0)
    for image_id in range(count):
        corners = torch.rand(DETECTIONS, 2, generator=generator) * 500
        corners[:7] = torch.tensor([[10.0 + 80 * k, 10.0] for k in range(7)])
        sizes = torch.tensor([[20.0 + k % 7, 30.0] for k in range(DETECTIONS)])
        labels = (image_id + torch.arange(DETECTIONS)) % 80
        scores = torch.rand(DETECTIONS, generator=generator) / 2
        scores[:7] += 0.5
        boxes_xyxy = torch.cat([corners, corners + sizes], dim=1)
        yield [dict(labels=labels, scores=scores, boxes_xyxy=boxes_xyxy)], [dict(image_id=image_id)]


def measure(part: str, count: int) -> Growth:
    """Run a part in this process, which should be a new one, with one thread."""
    import resource  # only available on Unix

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        run = PARTS[part](Path(folder), count)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before, began = read_status("VmRSS"), resource.getrusage(resource.RUSAGE_SELF)
        run()
        ended, peak = resource.getrusage(resource.RUSAGE_SELF), read_status("VmHWM")
    seconds = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
    return Growth(seconds, peak, max(peak - before, 0))  # Linux counts pages only roughly


def read_status(name: str) -> int:
    """Return a value of this process's memory, bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return the exponent of growth: the slope of a line through the logarithms."""
    return round(float(np.polyfit(np.log(sizes), np.log(values), 1)[0]), 4) + 0.0  # not -0


def row(part: str, sizes: Sequence[int], results: Sequence[Growth]) -> str:
    """Return a part's row of the table."""
    cells = [
        part,
        " / ".join(f"{result.seconds:.2f}" for result in results),
        f"{exponent(sizes, [result.seconds for result in results]):.2f}",
        " / ".join(f"{result.peak / MIB:.0f}" for result in results),
        f"{exponent(sizes, [result.peak for result in results]):.2f}",
        " / ".join(f"{result.grown / MIB:.1f}" for result in results),
        f"{(results[-1].grown - results[0].grown) / (sizes[-1] - sizes[0]):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)} (default: all)")
    text = "numbers of images, ascending (default: 1000 3000 10000)"
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="N", help=text)
    args = parser.parse_args(argv)
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"no part {part!r}: expected any of {', '.join(PARTS)}")
    if len(args.sizes) < 2 or sorted(set(args.sizes)) != [*args.sizes] or args.sizes[0] < 1:
        parser.error(f"--sizes: got {args.sizes}; expected two numbers or more, ascending")
    if not Path("/proc/self/clear_refs").exists():
        parser.error("the peak of a process's memory can be measured on Linux only")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    began = time.monotonic()
    print(f"| images: {' / '.join(f'{size:,}' for size in args.sizes)} | s | exponent | peak MiB | exponent |", end="")
    print(" growth MiB | bytes an image |\n|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for part in args.parts or PARTS:
        results = []
        for size in args.sizes:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                results.append(pool.apply(measure, (part, size)))
        print(row(part, args.sizes, results), flush=True)
    print(f"\n{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    # The parts' processes unpickle functions by the name of their module, which must not be "__main__".
    from vitkit.tools.benchmark.growth import main

    main()
