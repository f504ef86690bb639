"""Compare an exported file with its model: the largest difference of each output, for inputs of several sizes."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torchvision.transforms.v2.functional import resize

from vitkit.apps.export_reading.graphs import ExportGraph
from vitkit.apps.export_reading.loading import NEW
from vitkit.apps.export_reading.runtimes import ExportedFile
from vitkit.apps.inference.predictor import Predictor
from vitkit.data.transforms.classification import ClassificationEvalTransforms
from vitkit.errors import ConfigError
from vitkit.logging import print_line
from vitkit.protocols.backbone import Backbone, with_defaults
from vitkit.protocols.model import child
from vitkit.structures import BOS, EOS, PAD

Inputs = dict[str, Tensor]
NUM_RUNS = 3
"""The number of timed runs, of which the median is taken."""
NUM_TOKENS = 5
"""The number of tokens that are decoded to compare a step."""


@dataclass
class OutputDifference:
    """The difference between one output of a file and the model's."""

    output: str
    largest: float
    """For floats the largest difference, relative to the largest absolute value if that is above 1; for integers the
    fraction that differs."""
    tolerance: float

    @property
    def is_within(self) -> bool:
        """Whether the difference is within the tolerance; NaN is not."""
        return self.largest <= self.tolerance

    def __str__(self) -> str:
        return f"{self.output}: {self.largest:.1e} (tolerance {self.tolerance:.0e})"


def image_size(predictor: Predictor, size: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the height and width that all images must have: `size`, or the model's only size; None: any.

    Raises:
        ConfigError: the model takes images of a single size, which differs from `size` or is unknown.
    """
    model = predictor.model
    if model.image_size is not None:
        if size not in (None, tuple(model.image_size)):
            raise ConfigError(
                f"export: got size {size[0]}x{size[1]}, but {type(model).__name__} pads images to "
                f"{model.image_size[0]}x{model.image_size[1]} (model.backbone.image_size). Leave size out."
            )
        return tuple(model.image_size)
    backbone = child(model, "backbone")
    if size is None and backbone is not None and with_defaults(backbone, Backbone).window_depends_on_size:
        size = crop_of(predictor)
        if size is None:
            raise ConfigError(
                f"export: a classifier on {type(backbone).__name__} has windows that depend on the size of its images, "
                "which are of any size (data.val.transforms). Set "
                "data.val.transforms=\"dict(type='ClassificationEvalTransforms', size=…)\"."
            )
    if size is not None and "class_scores" in model.returns:
        check_crop(predictor, size)
    return size


def image_inputs(predictor: Predictor, images: Sequence[np.ndarray], size: tuple[int, int] | None) -> list[Inputs]:
    """Return batches of images after the model's transforms: a single one, a pair, and a crop of the first.

    Args:
        images: as from `Predictor.to_array`, at least one.
        size: height and width that all images must have; None: any.
    """
    one, two = images[:1], (list(images) * 2)[:2]
    single, pair = (
        {name: value for name, value in predictor.prepare(shown).inputs.items() if isinstance(value, Tensor)}
        for shown in (one, two)
    )
    height, width = single["images"].shape[-2:]
    part = {name: value[..., : height * 3 // 4, : width * 2 // 3] for name, value in single.items()}
    batches = [(one, single), (two, pair), (one, part)]
    if size is not None:
        batches = [(shown, fit_size(batch, size)) for shown, batch in batches[:2]]
    return [batch | {"image_sizes": torch.tensor([image.shape[:2] for image in shown])} for shown, batch in batches]


def crop_of(predictor: Predictor) -> tuple[int, int] | None:
    """Return the height and width that a classifier's images are cropped to; None if they have no fixed size."""
    transforms = predictor.transforms
    return (transforms.size, transforms.size) if isinstance(transforms, ClassificationEvalTransforms) else None


def check_crop(predictor: Predictor, size: tuple[int, int]) -> None:
    """Check that a classifier's transforms make images of one size, as it would treat padding as part of the image.

    Raises:
        ConfigError: the images have any size, or a single size other than `size`.
    """
    crop = crop_of(predictor)
    if size == crop:
        return
    got = "are of any size" if crop is None else f"are cropped to {crop[0]}x{crop[1]}"
    raise ConfigError(
        f"export: got size {size[0]}x{size[1]}, but the classifier's images {got} (data.val.transforms), and padded "
        "ones would change its scores. Leave size out, or set data.val.transforms="
        "\"dict(type='ClassificationEvalTransforms', size=…)\" to the size that it was trained at."
    )


def fit_size(batch: Inputs, size: tuple[int, int]) -> Inputs:
    """Fit images and their padding mask to a file of a fixed size: shrink them if too large, then pad them."""
    height, width = batch["images"].shape[-2:]
    scale = min(1, size[0] / height, size[1] / width)
    height, width = max(1, int(height * scale)), max(1, int(width * scale))
    images, padding_mask = (resize(batch[name], [height, width]) for name in ("images", "padding_mask"))
    margins = (0, size[1] - width, 0, size[0] - height)
    return {"images": F.pad(images, margins), "padding_mask": F.pad(padding_mask, margins, value=True)}


def text_inputs(vocabulary_size: int) -> list[Inputs]:
    """Return batches of random token sequences of several lengths, padded."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for lengths in ([6], [4, 9, 7]):
        source = torch.randint(EOS + 1, vocabulary_size, (len(lengths), max(lengths)), generator=generator)
        padding = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
        source[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = EOS
        batches.append({"source": source.masked_fill(padding, PAD), "source_padding": padding})
    return batches


def differences(
    graph: ExportGraph, file: ExportedFile, batches: Sequence[Inputs], tolerance: float
) -> list[OutputDifference]:
    """Return the largest difference of each output over all batches.

    Results that are derived from other outputs are compared with results derived from the file's outputs: where two
    scores are equal but for rounding, a top-k selection may differ. So may the order of such detections, which are then
    compared only by their scores, and that of queries, each of which is compared with the one that it is closest to.
    """
    largest: dict[str, float] = {}
    for number, inputs in enumerate(batches, start=1):
        started = time.perf_counter()
        expected = run_graph(graph, inputs)
        halfway = time.perf_counter()
        actual = file.run(inputs)
        ended, shape = time.perf_counter(), tuple(next(iter(inputs.values())).shape)
        times = f"{halfway - started:.1f} s by PyTorch, {ended - halfway:.1f} s by the file"
        print_line(f"compared  {number} of {len(batches)}, {shape}: {times}")
        queries = _queries_in_order(actual, expected, tolerance)
        expected |= graph.finish(actual, inputs)
        ordered = _order(expected["scores"]) if "scores" in expected else None
        for name, value in expected.items():
            if ordered is not None and name in _DETECTIONS and actual[name].shape == value.shape:
                difference = _difference(actual[name][ordered], value[ordered])
            else:
                difference = _difference(queries.get(name, actual[name]), value)
            largest[name] = float(np.maximum(largest.get(name, 0.0), difference))  # NaN stays
    return [OutputDifference(name, value, tolerance) for name, value in largest.items()]


_DETECTIONS = ("labels", "boxes_xyxy", "queries", "keypoints")
_BOUND = 1e4
"""Logits beyond this count as equal to it where queries are assigned."""
_ROUNDING = 1e-6
"""Scores, which are at most 1, that differ by less may be in either order."""


def _queries_in_order(actual: Inputs, expected: Inputs, tolerance: float) -> Inputs:
    """Return a file's outputs for each query in the order of the model's queries; nothing if they already are.

    Two-stage detectors select queries by score, and which of two with nearly equal scores comes first depends on
    rounding.
    """
    names = [name for name in ("pred_boxes", "pred_logits") if name in expected]
    if len(names) < 2 or any(actual[name].shape != expected[name].shape for name in names):
        return {}
    if all(_difference(actual[name], expected[name]) <= tolerance for name in names):
        return {}
    # Logits of forbidden words are minus infinity.
    ours, theirs = (
        torch.cat([outputs[name].float() for name in names], dim=-1).nan_to_num().clamp(-_BOUND, _BOUND)
        for outputs in (expected, actual)
    )
    distances = torch.cdist(ours, theirs, p=float("inf"))
    order = torch.stack([torch.from_numpy(linear_sum_assignment(distance)[1]) for distance in distances])
    moved = int((order != torch.arange(order.shape[1])).sum())
    if not moved:
        return {}
    print_line(f"  {moved} of {order.numel()} queries are elsewhere in the file's order; each is compared with its own")
    rows = torch.arange(len(order))[:, None]
    return {name: actual[name][rows, order] for name in actual if actual[name].shape[:2] == order.shape}


def _order(scores: Tensor) -> Tensor:
    """Return (B, N) bool: the detections whose scores (B, N) differ from those before and after them."""
    differs = (scores[:, 1:] - scores[:, :-1]).abs() > _ROUNDING
    # The last one may be equal to the first that was not selected.
    return F.pad(differs, (1, 0), value=True) & F.pad(differs, (0, 1), value=False)


def yield_decoded_inputs(encoder: ExportGraph, step: ExportGraph, batches: Sequence[Inputs]) -> Iterator[Inputs]:
    """Yield the inputs of the step for each token while the model decodes greedily."""
    for batch in batches:
        state = run_graph(encoder, batch)
        tokens = torch.full((len(next(iter(batch.values()))),), BOS)
        for _ in range(NUM_TOKENS):
            inputs = {"tokens": tokens, **state}
            yield inputs
            outputs = run_graph(step, inputs)
            tokens = outputs.pop("logits").argmax(-1)
            state |= {name.removeprefix(NEW): value for name, value in outputs.items()}


@torch.no_grad()
def run_graph(graph: ExportGraph, inputs: Mapping[str, Tensor]) -> Inputs:
    """Run the graph on those of the inputs that it takes."""
    return dict(graph(**{name: inputs[name] for name in graph.axes}))


def seconds_in_turn(functions: Sequence[Callable[[], object]]) -> list[float]:
    """Return each function's median time over `NUM_RUNS` rounds of all of them, after a warm-up round."""
    rounds = []
    for _ in range(NUM_RUNS + 1):
        times = []
        for function in functions:
            started = time.perf_counter()
            function()
            times.append(time.perf_counter() - started)
        rounds.append(times)
    return [median(times) for times in zip(*rounds[1:])]


@contextmanager
def announce(what: str) -> Iterator[None]:
    """Print the beginning of a task and, at its end, the time that it took."""
    print_line(what)
    started = time.perf_counter()
    yield
    print_line(f"{what}: {time.perf_counter() - started:.1f} s")


def _difference(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return float("nan")
    if not actual.is_floating_point():
        return (actual != expected).float().mean().item() if actual.numel() else 0.0
    hidden = torch.isneginf(expected) & torch.isneginf(actual.float())  # logits of forbidden words
    actual, expected = (x.float().masked_fill(hidden, 0) for x in (actual, expected))
    if not actual.numel():
        return 0.0
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1)).item()
