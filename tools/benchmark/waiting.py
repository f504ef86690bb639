"""Time a training step beside loading its images: how many cores a GPU needs in order not to wait for data.

Images are synthetic JPEGs of 640x480, with the augmentation of the published recipe; the step's are random.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import cv2
import torch

from vitkit.configs import detr_r50, dfine
from vitkit.registry import DATASETS
from vitkit.tools.benchmark.loader import boxes_of_image, draw_photos
from vitkit.tools.benchmark.models import Case, Family, step, vitkit_model
from vitkit.tools.benchmark.timing import Measurement, Options, compare

NUM_CLASSES = 80
RECIPES: dict[str, tuple[Callable[[], dict], Case]] = {
    "detr_r50": (detr_r50.config, Case(800, 1066, batch_size=4, training=True)),
    "dfine_s_coco": (partial(dfine.config, "s"), Case(640, 640, batch_size=16, training=True)),
}
"""Name -> config, and the images of a GPU in a step; on a CPU there is one."""


def measure(part: str, options: Options) -> list[Measurement]:
    """Time each recipe; the ratio of the second row is the number of cores that load as fast as the device trains."""
    rows = []
    for name, (make_config, case) in RECIPES.items():
        if options.device == "cpu":
            case = case._replace(batch_size=1)
        model = partial(vitkit_model, make_config, is_padded=name == "detr_r50")
        family = Family({"vitkit": model}, NUM_CLASSES, clip_grad_norm=0.1)
        call = partial(step, family, "vitkit", case, options)
        (trained,) = compare("", {"vitkit": call}, options, memory=False)
        seconds, loading = trained.seconds / case.batch_size, loading_seconds(make_config)
        rows.append(Measurement(f"{name}, {case}", f"training, an image on {options.device}", seconds, 1.0))
        rows.append(Measurement(f"{name}, {case}", "loading an image on one core", loading, loading / seconds))
    return rows


def loading_seconds(make_config: Callable[[], dict], rounds: int = 5) -> float:
    """Return the median processor time of reading and augmenting an image, as a worker with one thread does."""
    threads = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    times = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            spec = make_config()["data"]["train"]
            dataset = DATASETS.build(spec | {"images": folder, "annotations": str(write_coco(Path(folder)))})
            for index in [0, *range(len(dataset))] * rounds:
                start = time.process_time()
                dataset.load_sample(index, 0)
                times.append(time.process_time() - start)
    finally:
        torch.set_num_threads(threads[0])
        cv2.setNumThreads(threads[1])
    return statistics.median(times[1:])  # the first call prepares


def write_coco(folder: Path) -> Path:
    """Write images with as many boxes as COCO's have, and return their annotations' file."""
    images, annotations = [], []
    for number, path in enumerate(draw_photos(folder)):
        images.append(dict(id=number, file_name=path.name, width=640, height=480))
        for x0, y0, x1, y1 in boxes_of_image(480, 640).tolist():
            box = [x0, y0, x1 - x0, y1 - y0]
            known = dict(id=len(annotations) + 1, image_id=number, category_id=1, iscrowd=0)
            annotations.append(known | dict(bbox=box, area=box[2] * box[3]))
    categories = [dict(id=k + 1, name=f"class {k}") for k in range(NUM_CLASSES)]
    path = folder / "instances.json"
    path.write_text(json.dumps(dict(images=images, annotations=annotations, categories=categories)))
    return path
