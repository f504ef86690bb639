"""Time loading a training image with DETR's recipe: vitkit's pipeline against Pillow and torchvision's functions."""

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np
import torch
import torchvision.transforms.functional as F
from PIL import Image
from torch import Tensor

from vitkit.data.transforms.annotated_image import AnnotatedImage
from vitkit.data.transforms.crops import compute_resized_size
from vitkit.data.transforms.pipelines import DETRTrainTransforms
from vitkit.errors import DataError
from vitkit.io.image_files import read_image, to_tensor
from vitkit.structures import Batch
from vitkit.tools.benchmark.timing import Measurement, Options

_SCALES = range(480, 801, 32)
_BATCH_SIZE, _ROUNDS = 2, 3


def measure(part: str, options: Options) -> list[Measurement]:
    """Time both pipelines on one core, three times over the images (at most 32), Pillow and torchvision first.

    Seconds are processor time per image, from decoding to the padded batch, as the median over all batches.

    Raises:
        DataError: there is no JPEG in the folder.
    """
    pipelines: dict[str, Callable[[list[Path]], object]] = {
        "Pillow + torchvision": _pillow_batch,
        "vitkit": _vitkit_batch,
    }
    threads = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    random.seed(0)
    times: dict[str, list[float]] = {name: [] for name in pipelines}
    try:
        with jpegs(options.images) as paths:
            batches = [paths[start : start + _BATCH_SIZE] for start in range(0, len(paths), _BATCH_SIZE)]
            for load in pipelines.values():
                load(batches[0])
            # Pipelines alternate after full passes, not batches, so that each finds memory as it left it, as in a long
            # run.
            for name, batch in ((name, batch) for _ in range(_ROUNDS) for name in pipelines for batch in batches):
                start = time.process_time()
                pipelines[name](batch)
                times[name].append((time.process_time() - start) / len(batch))
    finally:
        torch.set_num_threads(threads[0])
        cv2.setNumThreads(threads[1])
    medians = {name: statistics.median(values) for name, values in times.items()}
    first = next(iter(medians.values()))
    return [Measurement("loading an image, one core", name, median, median / first) for name, median in medians.items()]


@contextmanager
def jpegs(folder: Path | None) -> Iterator[list[Path]]:
    """Provide the paths of a folder's JPEGs, at most 32; None: of drawn ones.

    Raises:
        DataError: there is no JPEG in the folder.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as drawn:
            yield draw_photos(Path(drawn))
    elif paths := sorted(Path(folder).glob("*.jpg"))[:32]:
        yield paths
    else:
        raise DataError(f"--images: no *.jpg in '{folder}'. Name a folder of JPEGs, or leave it out to draw some.")


def draw_photos(folder: Path) -> list[Path]:
    """Write eight 640x480 JPEGs with about the detail of a photo (about 90 kB each)."""
    generator = np.random.default_rng(0)
    paths = [folder / f"{number}.jpg" for number in range(8)]
    for path in paths:
        coarse, fine = (generator.integers(0, 256, size, np.uint8) for size in ((12, 16, 3), (240, 320, 3)))
        image = cv2.addWeighted(cv2.resize(coarse, (640, 480)), 0.85, cv2.resize(fine, (640, 480)), 0.15, 0)
        cv2.imwrite(str(path), image, [cv2.IMWRITE_JPEG_QUALITY, 90])
    return paths


def boxes_of_image(height: int, width: int) -> np.ndarray:
    """Return seven boxes, the average number in a COCO image."""
    sides = np.array([width, height] * 2)
    return np.array([[0.1 * i, 0.05 * i, 0.1 * i + 0.3, 0.05 * i + 0.4] for i in range(7)], np.float32) * sides


_TRANSFORMS = DETRTrainTransforms()


def _vitkit_batch(paths: list[Path]) -> object:
    samples = []
    for path in paths:
        image = read_image(path)
        boxes_xyxy = boxes_of_image(*image.shape[:2]).astype(np.float32)
        result = _TRANSFORMS(AnnotatedImage(image, boxes_xyxy, np.zeros(len(boxes_xyxy), np.int64)))
        boxes = torch.from_numpy(result.boxes_xyxy)
        samples.append({"image": to_tensor(result.image), "target": {"boxes_xyxy": boxes}})
    return Batch.collate(samples)


def _pillow_batch(paths: list[Path]) -> object:
    """Apply the recipe step by step to Pillow images, normalize them to float on the CPU, and pad them."""
    loaded = [_pillow_sample(path) for path in paths]
    height, width = (max(image.shape[axis] for image, _ in loaded) for axis in (1, 2))
    images = torch.zeros(len(loaded), 3, height, width)
    padding_mask = torch.ones(len(loaded), height, width, dtype=torch.bool)
    for row, mask, (image, _) in zip(images, padding_mask, loaded):
        row[:, : image.shape[1], : image.shape[2]].copy_(image)
        mask[: image.shape[1], : image.shape[2]] = False
    return images, padding_mask, [boxes for _, boxes in loaded]


def _pillow_sample(path: Path) -> tuple[Tensor, Tensor]:
    image = Image.open(path).convert("RGB")
    boxes = torch.from_numpy(boxes_of_image(image.height, image.width)).float()
    if random.random() < 0.5:
        boxes = boxes[:, [2, 1, 0, 3]] * torch.tensor([-1, 1, -1, 1]) + torch.tensor([image.width, 0, image.width, 0])
        image = F.hflip(image)
    if random.random() < 0.5:
        image, boxes = _pillow_resize(image, boxes, random.choice([400, 500, 600]), None)
        width = random.randint(min(384, image.width), min(image.width, 600))
        height = random.randint(min(384, image.height), min(image.height, 600))
        top, left = random.randint(0, image.height - height), random.randint(0, image.width - width)
        image = F.crop(image, top, left, height, width)
        corners = (boxes - torch.tensor([left, top, left, top])).reshape(-1, 2, 2)
        corners = corners.clamp(min=0).minimum(torch.tensor([width, height]))
        boxes = corners[(corners[:, 1] > corners[:, 0]).all(dim=1)].reshape(-1, 4)
    image, boxes = _pillow_resize(image, boxes, random.choice(_SCALES), 1333)
    tensor = F.normalize(F.to_tensor(image), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    centers_and_sizes = torch.cat([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], dim=1)
    return tensor, centers_and_sizes / torch.tensor([image.width, image.height] * 2)


def _pillow_resize(
    image: Image.Image, boxes: Tensor, short_side: int, max_size: int | None
) -> tuple[Image.Image, Tensor]:
    height, width = compute_resized_size(image.height, image.width, short_side=short_side, max_size=max_size)
    scale = torch.tensor([width / image.width, height / image.height] * 2)
    return F.resize(image, [height, width]), boxes * scale
