"""Start-up time and memory of a large annotation file in a loader: 120 000 images, 860 000 boxes."""

import gc
import json
import multiprocessing
import re
import tempfile
import time
from pathlib import Path

import numpy as np

from vitkit.data.coco import CocoDetection
from vitkit.data.loader import build_loader
from vitkit.tools.benchmark_timing import Row

NUM_IMAGES, NUM_BOXES = 120_000, 860_000
_CLASSES, _SAMPLES = 80, 2000
CASES = ((0, "fork"), (2, "fork"), (8, "fork"), (2, "spawn"), (8, "spawn"))


class UndrawnCoco(CocoDetection):
    """Reads its annotations and no pictures."""

    def load_image(self, index: int) -> np.ndarray:
        return np.zeros((*self._sizes[index].tolist(), 3), np.uint8)


def measure(cases: tuple[tuple[int, str], ...] = CASES, *, num_images: int = NUM_IMAGES, num_boxes: int = NUM_BOXES):
    """Each case in a new process: the time until the first batch, and the memory of the annotations after some.

    Memory is proportional set size (shared pages are divided among those who share them), over all processes of the
    loader, beyond that of the same loader with a file of one image.

    Args:
        cases: numbers of workers, and how they start.
        num_images, num_boxes: of the synthetic file.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder, "large.json"), Path(folder, "small.json")
        Path(folder, f"{1:012d}.jpg").touch()
        write_annotations(large, num_images, num_boxes)
        write_annotations(small, 1, 1)
        for num_workers, start in cases:
            seconds, memory = _in_new_process(large, num_workers, start)
            _, without = _in_new_process(small, num_workers, start)
            name = f"{num_workers} workers" + (f", {start}" if num_workers else "")
            rows.append((name, seconds, (memory - without) / 2**20))
    what = f"annotations of {num_images} images, {num_boxes} boxes"
    _, seconds, memory = rows[0]
    return [Row(what, name, own, own / seconds, mib, mib / memory) for name, own, mib in rows]


def write_annotations(path: Path, num_images: int, num_boxes: int) -> None:
    """A COCO file of images without pictures, with boxes anywhere in them."""
    random = np.random.default_rng(0)
    images = [{"id": i, "file_name": f"{i:012d}.jpg", "height": 64, "width": 64} for i in range(1, num_images + 1)]
    owners = random.integers(1, num_images + 1, num_boxes).tolist()
    labels = random.integers(1, _CLASSES + 1, num_boxes).tolist()
    boxes = random.uniform(1, 30, (num_boxes, 4)).round(2).tolist()
    annotations = [
        {"id": i, "image_id": owner, "category_id": label, "bbox": box, "area": box[2] * box[3], "iscrowd": 0}
        for i, (owner, label, box) in enumerate(zip(owners, labels, boxes), start=1)
    ]
    categories = [{"id": i, "name": f"class {i}"} for i in range(1, _CLASSES + 1)]
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))


def _in_new_process(path: Path, num_workers: int, start: str) -> tuple[float, int]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_load, args=(sender, path, num_workers, start))
    process.start()
    result = receiver.recv()
    process.join()
    return result


def _load(sender, path: Path, num_workers: int, start: str) -> None:
    begun = time.perf_counter()
    dataset = UndrawnCoco(str(path.parent), str(path))
    loader = build_loader(dataset, batch_size=8, training=True, num_workers=num_workers, start_workers=start)
    batches, needed = 0, _SAMPLES // 8
    seconds = None
    while batches < needed:  # a small file has short epochs
        for _ in loader:
            seconds = seconds or time.perf_counter() - begun
            batches += 1
            if batches >= needed:
                break
    gc.collect()
    workers = multiprocessing.active_children()
    sender.send((seconds, sum(map(_proportional_bytes, ["self", *(worker.pid for worker in workers)]))))


def _proportional_bytes(process: int | str) -> int:
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    return 1024 * int(re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)[1])


if __name__ == "__main__":
    for row in measure():
        print(row)
