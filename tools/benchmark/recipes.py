"""Time loading training images by published recipes on one core: the augmentation of D-FINE and DEIM, and whole batches
of each recipe."""

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2

from vitkit.config.load import load_config
from vitkit.configs.parts.realtime import deim_data, dfine_data
from vitkit.data.loading.batch_augmentation import squash
from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import build_dataset
from vitkit.tools.benchmark.loader import boxes_of_image, jpegs
from vitkit.tools.benchmark.timing import Measurement, Options, ratios_to

_SIZE = 640
_RECIPES = (
    "detr_r50",
    "deformable_detr_r50",
    "dino_r50_4scale",
    "rtdetr_r50",
    "dfine_s_coco",
    "deim_dfine_s_coco",
    "rf_detr_n_coco",
    "mask2former_r50_coco_instance",
    "grounding_dino_swin_tiny",
    "show_attend_tell",
)
_EPOCH = 4
"""Of all epochs of DEIM's recipe, one with mosaics; that of the others does not matter while augmentation is strong."""


def measure(part: str, options: Options) -> list[Measurement]:
    """Time a part over the images (at most 32), in turn, in processor time of one core; see `loader.measure`."""
    threads = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    try:
        with jpegs(options.images) as paths, tempfile.TemporaryDirectory() as folder:
            annotations = _annotate(paths, Path(folder))
            if part == "recipes":
                batches = {name: partial(_load_epoch, _train_loader(name, paths, annotations)) for name in _RECIPES}
                return _time("loading an image of a batch, one core", batches, len(paths), options)
            parts = [
                ("loading an image, D-FINE's augmentation, one core", dfine_data(4), 0, _Torchvision(paths)),
                ("… with DEIM's mosaics", deim_data(1, 4, 8), 1, None),
            ]
            rows = []
            for what, data, stage, peer in parts:
                spec = _with_images(data["train"], paths, annotations)
                dataset = build_dataset(spec | {"transforms": data["train"]["transforms"]["transforms"][stage]})
                calls = {} if peer is None else {"torchvision, step by step": peer}
                calls |= {
                    "vitkit, step by step": partial(_load, dataset, None),
                    "vitkit, in one warp": partial(_load, dataset, _SIZE),
                }
                rows += _time(what, calls, len(paths), options)
            return rows
    finally:
        torch.set_num_threads(threads[0])
        cv2.setNumThreads(threads[1])


def _time(
    what: str, calls: Mapping[str, Callable[[int], None]], num_images: int, options: Options
) -> list[Measurement]:
    """Time each call, which loads all images by a seed, in turn; the first round is a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for seed in range(options.repeats + 1):
        for name, call in calls.items():
            start = time.process_time()
            call(seed)
            times[name].append((time.process_time() - start) / num_images)
    times = {name: values[1:] for name, values in times.items()}
    first = next(iter(times.values()))
    rows = [Measurement(what, name, statistics.median(values), None) for name, values in times.items()]
    return [row._replace(**ratios_to(first, times[row.name])) for row in rows]


def _load(dataset: Any, square: int | None, seed: int) -> None:
    dataset.square = square
    for index in range(len(dataset)):
        squash(dataset[index, 1000 * seed + index], _SIZE)


def _load_epoch(loader: Any, seed: int) -> None:
    loader.set_position(_EPOCH + seed)
    for _ in loader:
        pass


def _train_loader(name: str, paths: list[Path], annotations: Path) -> Any:
    """Return a recipe's loader of training batches, with the images in place of the recipe's."""
    data = load_config(name)["data"]
    data |= {"train": _with_images(data["train"], paths, annotations), "num_workers": 0, "pin_memory": False}
    settings = DataSettings(**{key: value for key, value in data.items() if key not in ("val", "test", "root")})
    return settings.train_loader(settings.dataset("train"), seed=0)


def _with_images(train: Mapping[str, Any], paths: list[Path], annotations: Path) -> dict[str, Any]:
    return {**train, "images": str(paths[0].parent), "annotations": str(annotations)}


def _annotate(paths: list[Path], folder: Path) -> Path:
    """Write a file in COCO's format with seven objects and captions an image, objects being as many as COCO's have."""
    images, objects = [], []
    for number, path in enumerate(paths, start=1):
        with Image.open(path) as image:
            width, height = image.size
        images.append({"id": number, "file_name": path.name, "width": width, "height": height})
        for x0, y0, x1, y1 in boxes_of_image(height, width).tolist():
            center, radii = ((x0 + x1) / 2, (y0 + y1) / 2), ((x1 - x0) / 2, (y1 - y0) / 2)
            angles = [2 * math.pi * k / 24 for k in range(24)]
            ellipse = [
                center[axis] + radii[axis] * wave(angle)
                for angle in angles
                for axis, wave in enumerate((math.cos, math.sin))
            ]
            objects.append({
                "id": len(objects) + 1, "image_id": number, "category_id": 1, "bbox": [x0, y0, x1 - x0, y1 - y0],
                "area": (x1 - x0) * (y1 - y0), "iscrowd": 0, "segmentation": [ellipse], "caption": "an object",
            })  # fmt: skip
    content = {"images": images, "annotations": objects, "categories": [{"id": 1, "name": "object"}]}
    path = folder / "annotations.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


class _Torchvision:
    """Load all images by D-FINE's pipeline of torchvision's transforms, as its config names them."""

    def __init__(self, paths: list[Path]):
        self.paths = paths
        self.transforms = v2.Compose([
            v2.RandomPhotometricDistort(p=0.5),
            v2.RandomZoomOut(fill=0),
            v2.RandomApply([v2.RandomIoUCrop()], p=0.8),
            v2.SanitizeBoundingBoxes(min_size=1),
            v2.RandomHorizontalFlip(),
            v2.Resize([_SIZE, _SIZE]),
            v2.SanitizeBoundingBoxes(min_size=1),
            v2.PILToTensor(),
        ])  # fmt: skip

    def __call__(self, seed: int) -> None:
        torch.manual_seed(seed)
        for path in self.paths:
            image = Image.open(path).convert("RGB")
            boxes = torch.from_numpy(boxes_of_image(image.height, image.width))
            size = image.height, image.width
            boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size)
            self.transforms({"image": image, "boxes": boxes, "labels": torch.zeros(len(boxes), dtype=torch.long)})
