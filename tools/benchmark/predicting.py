"""Compare vitkit predict with a bare loop over the same images: what the journal, thresholds and the JSON cost.

The loop has a DataLoader with two processes, the model and its postprocessing, and writes nothing. Both have loaded the
model, and begin with the list of files; images are tiny, so that all but the model shows.
"""

import io
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import cv2
import torch
from torch.utils.data import DataLoader, Dataset

from vitkit.apps.inference import Predictor, load
from vitkit.apps.inference.writing import Output, predict_files
from vitkit.data.synthetic.shapes import ShapesDetection
from vitkit.io.image_files import read_image, to_tensor
from vitkit.structures import Batch
from vitkit.tools.benchmark.timing import Call, Measurement, Options, compare

MODEL, BATCH_SIZE, WORKERS, SIDE = "shapes_dino", 16, 2, 48
NUM_IMAGES = 600
GOAL = 0.9
"""The least share of the loop's images per second."""


class Photos(Dataset):
    """The loop's data."""

    def __init__(self, predictor: Predictor, paths: Sequence[Path]):
        self.predictor, self.paths = predictor, paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = read_image(self.paths[index])
        return {"image": to_tensor(self.predictor.as_evaluated(image)), "target": {"size": image.shape[:2]}}


def bare_loop(paths: Sequence[Path]) -> Call:
    """Return a call that predicts what vitkit predict does, and writes nothing."""
    predictor = load(MODEL, device="cpu")

    @torch.inference_mode()
    def run() -> None:
        for batch in DataLoader(Photos(predictor, paths), BATCH_SIZE, num_workers=WORKERS, collate_fn=Batch.collate):
            outputs = predictor.model(**batch.inputs)
            predictor.model.postprocess(outputs, [target["size"] for target in batch.targets])

    return run


def vitkit_predict(paths: Sequence[Path]) -> Call:
    """Return a call that predicts as vitkit predict --no-draw does, each time into a new folder."""
    predictor = load(MODEL, device="cpu")

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
            output = Output(folder=Path(folder, "out"), batch_size=BATCH_SIZE, draw=False, workers=WORKERS)
            predict_files(predictor, [str(path) for path in paths], output)

    return run


BUILDERS: dict[str, Callable[[Sequence[Path]], Call]] = {"bare loop": bare_loop, "vitkit predict": vitkit_predict}


def write_photos(folder: Path, count: int) -> list[Path]:
    """Write drawn shapes as JPEGs; return their paths in order."""
    shapes, paths = ShapesDetection(num_images=count, image_size=SIDE), [folder / f"{n:06}.jpg" for n in range(count)]
    folder.mkdir(exist_ok=True)
    for number, path in enumerate(paths):
        cv2.imwrite(str(path), cv2.cvtColor(shapes.load_image(number), cv2.COLOR_RGB2BGR))
    return paths


def measure(part: str, options: Options) -> list[Measurement]:
    """Time both in turn; the ratio of times is the inverse of that of images per second."""
    with tempfile.TemporaryDirectory() as folder:
        paths = write_photos(Path(folder), NUM_IMAGES)
        calls = {name: build(paths) for name, build in BUILDERS.items()}
        what = f"{NUM_IMAGES} images of {SIDE}x{SIDE}, {MODEL}, batches of {BATCH_SIZE}"
        return compare(what, {name: lambda call=call: call for name, call in calls.items()}, options, memory=False)
