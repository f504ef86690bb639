"""Measure how a large annotation file is read: time and memory of its index, and what a node's processes hold of it.

A synthesized file in COCO's format is written for each number of boxes, with COCO's 7.3 boxes per image. Seconds are
processor time; memory is what is added to a process that has imported vitkit, each time in a process of its own.

Examples:
    python tools/benchmark/annotations.py --boxes 860000 2500000 8000000
    python tools/benchmark/annotations.py --boxes 25000000 --no-polygons --no-truth --folder /data/tmp
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitkit.data.datasets.coco import CocoDetection
from vitkit.tools.common import positive

MIB = 1 << 20
_FORK = multiprocessing.get_context("fork")
_BOXES_PER_IMAGE, _NUM_CLASSES, _SIDES = 7.27, 80, (640, 480)
_NUM_POINTS = 12
"""Number of points of a polygon."""
_WRITTEN = 10_000
"""Number of boxes that are written at once."""
_BATCH = 16


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "numbers of boxes, from three of which growth is fitted (default: 860000)"
    parser.add_argument("--boxes", type=positive, nargs="+", default=[860_000], metavar="N", help=text)
    parser.add_argument("--no-polygons", action="store_true", help="write only boxes")
    parser.add_argument("--masks", action="store_true", help="also index the polygons")
    parser.add_argument("--no-truth", action="store_true", help="do not measure ground_truth(), which makes objects")
    text = "number of ranks whose memory is added up (default: %(default)s)"
    parser.add_argument("--ranks", type=positive, default=4, metavar="N", help=text)
    text = "number of workers of each (default: %(default)s)"
    parser.add_argument("--workers", type=positive, default=2, metavar="N", help=text)
    parser.add_argument("--folder", type=Path, help="folder for the files, which are deleted (default: temporary)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    rows = []
    for num_boxes in args.boxes:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            os.environ["VITKIT_CACHE"] = f"{folder}/cache"
            file = write_annotations(Path(folder), num_boxes, polygons=not args.no_polygons)
            rows.append(measure(file, args))
        print(f"{num_boxes:,} boxes, {rows[-1]['file']:.0f} MiB")
        print("\n".join(f"    {name:40} {value:10.3f}" for name, value in rows[-1].items()), flush=True)
    if len(rows) >= 3:
        print("exponents of growth")
        for name in rows[0]:
            values = [row[name] for row in rows]
            if min(values) > 0:
                print(f"    {name:40} {np.polyfit(np.log(args.boxes), np.log(values), 1)[0]:10.3f}")


def write_annotations(folder: Path, num_boxes: int, *, polygons: bool) -> Path:
    """Write a file in COCO's format, and the images of one batch that is spread over it; return the file."""
    rng = np.random.default_rng(num_boxes)
    num_images = max(_BATCH, round(num_boxes / _BOXES_PER_IMAGE))
    width, height = _SIDES
    file = folder / "instances.json"
    with file.open("w") as out:
        out.write('{"info": {}, "licenses": [], "images": [')
        for number in range(1, num_images + 1):
            name = f"{number:012d}.jpg"
            out.write(", " * (number > 1) + json.dumps(dict(file_name=name, height=height, width=width, id=number)))
        out.write('], "annotations": [')
        for start in range(0, num_boxes, _WRITTEN):
            if start:
                out.write(", ")
            out.write(", ".join(_draw(rng, range(start, min(start + _WRITTEN, num_boxes)), num_images, polygons)))
        categories = [dict(id=k + 1, name=f"class {k}") for k in range(_NUM_CLASSES)]
        out.write('], "categories": ' + json.dumps(categories) + "}")
    for index in batch_indices(num_images):
        Image.new("RGB", _SIDES).save(folder / f"{index + 1:012d}.jpg")
    return file


def _draw(rng: np.random.Generator, numbers: Sequence[int], num_images: int, polygons: bool) -> Iterator[str]:
    """Draw objects of random images and classes, and yield each as JSON."""
    extents = rng.uniform(4, 200, (len(numbers), 2))
    corners = rng.uniform(0, 1, (len(numbers), 2)) * (_SIDES - extents)
    angles = np.sort(rng.uniform(0, 2 * np.pi, (len(numbers), _NUM_POINTS)))
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=2) / 2 + 0.5
    points = corners[:, None] + extents[:, None] * circle
    boxes, outlines = np.concatenate([corners, extents], axis=1).tolist(), points.reshape(len(numbers), -1).tolist()
    image_ids = rng.integers(1, num_images, len(numbers), endpoint=True).tolist()
    category_ids = rng.integers(1, _NUM_CLASSES, len(numbers), endpoint=True).tolist()
    listed = ", ".join(["%.2f"] * 2 * _NUM_POINTS)
    for number, box, outline, image_id, category_id in zip(numbers, boxes, outlines, image_ids, category_ids):
        x, y, width, height = box
        mask = f'"segmentation": [[{listed % tuple(outline)}]], ' if polygons else ""
        yield (
            f'{{{mask}"area": {width * height / 2:.4f}, "iscrowd": 0, "image_id": {image_id}, '
            f'"bbox": [{x:.2f}, {y:.2f}, {width:.2f}, {height:.2f}], "category_id": {category_id}, "id": {number + 1}}}'
        )


def batch_indices(num_images: int) -> list[int]:
    """Return the images of a batch that is spread over the file; the first one is in it."""
    return [position * num_images // _BATCH for position in range(_BATCH)]


def measure(file: Path, args: argparse.Namespace) -> dict[str, float]:
    """Return the measurements of one file by name; seconds, or MiB where the name says so."""
    size = file.stat().st_size / MIB
    seconds, memory = _in_process(_open, file, args.masks)
    row = {"file": size, "index built, s": seconds, "index built, peak MiB": memory}
    row["peak / file"] = memory / size
    row["index found, s"], row["index found, MiB"] = _in_process(_open, file, args.masks)
    row["on the disk, MiB"] = _disk_use(file.parent / "cache")
    build = partial(_build, file, args.masks)
    row["first batch of a worker, s"], with_index = _in_process(_node, build, args.ranks, args.workers)
    row["index in all processes, MiB"] = with_index - _in_process(_node, None, args.ranks, args.workers)[1]
    if not args.no_truth:
        row["ground truth built, s"], row["ground truth built, peak MiB"] = _in_process(_truth, file, args.masks)
        row["ground truth found, s"], row["ground truth found, peak MiB"] = _in_process(_truth, file, args.masks)
        row["with it on the disk, MiB"] = _disk_use(file.parent / "cache")
    return row


def _in_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns in a process of its own."""
    with ProcessPoolExecutor(1, _FORK) as pool:
        return pool.submit(function, *args).result()


def _build(file: Path, masks: bool) -> CocoDetection:
    return CocoDetection(file.parent, file, masks=masks)


def _added(call: Callable[[], Any]) -> tuple[float, float]:
    """Return the processor seconds of a call, and the MiB that it added at its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, start = _memory("status", "VmRSS"), time.process_time()
    result = call()
    seconds = time.process_time() - start
    del result
    return seconds, _memory("status", "VmHWM") - before


def _open(file: Path, masks: bool) -> tuple[float, float]:
    return _added(lambda: _build(file, masks))


def _truth(file: Path, masks: bool) -> tuple[float, float]:
    return _added(_build(file, masks).ground_truth)


def _node(build: Callable[[], CocoDetection] | None, num_ranks: int, num_workers: int) -> tuple[float, float]:
    """Run ranks with workers, each of which reads a batch and then touches all that there is of the index.

    Args:
        build: returns the dataset in each rank; None: nothing is read.
    Returns:
        the seconds that a rank and its slowest worker take to the first batch, and the MiB of all processes.
    """
    num_processes = num_ranks * (1 + num_workers)
    ready, leave = _FORK.Barrier(num_processes + 1), _FORK.Event()
    reports = _FORK.SimpleQueue()

    def wait(seconds: float = 0.0) -> None:
        reports.put((os.getpid(), seconds))
        ready.wait()
        leave.wait()

    def work(dataset: CocoDetection | None, seconds: float) -> None:
        for index in [] if dataset is None else batch_indices(len(dataset)):
            dataset[index]
        seconds += time.process_time()
        for value in [] if dataset is None else vars(dataset.table).values():
            if isinstance(value, np.ndarray) and value.size:
                value[:].reshape(-1).view(np.uint8).max()
        wait(seconds)

    def rank() -> None:
        dataset = build() if build else None
        workers = [_FORK.Process(target=work, args=(dataset, time.process_time())) for _ in range(num_workers)]
        for worker in workers:
            worker.start()
        wait()
        for worker in workers:
            worker.join()

    ranks = [_FORK.Process(target=rank) for _ in range(num_ranks)]
    for process in ranks:
        process.start()
    pids, seconds = zip(*(reports.get() for _ in range(num_processes)))
    ready.wait()
    total = sum(_memory("smaps_rollup", "Pss", pid) for pid in pids)
    leave.set()
    for process in ranks:
        process.join()
    return max(seconds), total


def _memory(file: str, field: str, pid: int | str = "self") -> float:
    """Return a field of a process in MiB, as Linux states it."""
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) / 1024


def _disk_use(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / MIB


if __name__ == "__main__":
    main()
