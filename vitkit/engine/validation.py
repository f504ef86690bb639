"""Evaluates a run on the validation data, and has predictions for some of its images drawn."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitkit.data.loading.loader import BatchLoader
from vitkit.distributed import is_main
from vitkit.engine.checkpointing import rng_state, set_rng_state
from vitkit.engine.contracts import check_sample, missing_part_error
from vitkit.engine.evaluate import SizeCounter, evaluate
from vitkit.engine.run import TrainRun
from vitkit.errors import ConfigError, DataError
from vitkit.logging import print_line
from vitkit.protocols.evaluator import LOWER_IS_BETTER, Evaluator
from vitkit.registry import EVALUATORS, Spec, nearest
from vitkit.structures import Batch, ImageSizes, ScoreThresholds

logger = logging.getLogger("vitkit")
NUM_DRAWN = 8
"""Number of validation images whose predictions are drawn."""
_READ_OF_TARGETS = ("image_id", "original_size")
"""What an evaluation reads of each image's target."""


def check_validation(run: TrainRun, loader: BatchLoader, evaluator_spec: Spec) -> None:
    """Validate one batch, before training; the random state stays as it was."""
    # What does not fit is an error now and not after the first epoch, and the run does not depend on this check.
    state = rng_state()
    evaluator = EVALUATORS.build(evaluator_spec, dataset=loader.dataset)
    evaluator.check_dataset()
    run.lower_is_better = {*LOWER_IS_BETTER, *(name for part in evaluator.parts for name in part.lower_is_better)}
    metric = run.settings.best_metric
    if metric is not None and not evaluator.measures(metric) and is_main():
        unending = "" if run.settings.patience is None else "; train.patience never ends the run"
        logger.warning(
            f"data.val: has no object that train.best_metric={metric} measures, so there will be no best.pth, and "
            f"last.pth is used instead{unending}. Add annotated images to the validation data, or choose another "
            "metric."
        )
    predicted = () if evaluator.takes_outputs else _READ_OF_TARGETS
    check_sample(loader.dataset, "data.val", needs_targets=(*run.criterion.needs_targets, *predicted))
    sizes = SizeCounter()
    # A user's own is tried to its end; COCO's metrics would take seconds for a large dataset.
    is_own = not type(evaluator).__module__.startswith("vitkit.")
    try:
        metrics = _evaluate(run, run.model, list(islice(loader, 1)), evaluator, on_batch=sizes.add, compute=is_own)
        table = evaluator.table() if is_own else ""
    except (KeyError, AttributeError) as error:
        raise missing_part_error(error) from error
    if not isinstance(table, str):
        raise ConfigError(f"evaluator {type(evaluator).__name__}.table: returns {table!r:.100}; expected a text.")
    if is_own and is_main() and metric is not None and metric not in metrics and not metric.startswith("train_"):
        logger.warning(
            f"train.best_metric={metric}: not among the metrics of the first batch; if it stays so, there will be no "
            f"best.pth. {nearest(metric, metrics)}"
        )
    if line := sizes.line(f"validation {loader.dataset.noun} (first batch)"):
        print_line(line)
    set_rng_state(state)


def validate(
    model: nn.Module, *, run: TrainRun, loader: BatchLoader, evaluator_spec: Spec, draw: Callable[..., Any]
) -> dict[str, float]:
    """Return the metrics of a model, the run's or its average, and draw its predictions.

    Args:
        draw: draws them on the main process, see `run_training`.
    """
    evaluator = EVALUATORS.build(evaluator_spec, dataset=loader.dataset)
    samples: list[tuple[dict, dict]] = []
    sizes = SizeCounter()

    drawn = choose_batches_to_draw(len(loader))
    per_batch = -(-NUM_DRAWN // max(1, len(drawn)))
    batch_numbers = count()

    def collect(predictions: list, batch: Batch) -> None:
        sizes.add(predictions, batch)
        if next(batch_numbers) in drawn:
            samples.extend(merge_views(predictions, batch.targets)[:per_batch])

    metrics = _evaluate(run, model, loader, evaluator, on_batch=collect)
    if is_main():
        print_line(evaluator.table())
        thresholds = evaluator.score_thresholds()
        if thresholds is not None:
            thresholds = replace(thresholds, origin="highest F1 in validation")
            run.measured["score_thresholds"] = thresholds.to_json(loader.dataset.classes)
        if sizes.resized:
            run.measured["image_sizes"] = ImageSizes.of(sizes.resized).to_json()
        path = run.run_dir / "predictions.png"
        with report_failed_drawing(path):
            # Without a correct prediction there is no threshold: the best of each image show what the model does.
            shown = thresholds or ScoreThresholds(0.0)
            draw(samples[:NUM_DRAWN], loader.dataset, path, thresholds=shown)
    return metrics


def _evaluate(run: TrainRun, model: nn.Module, loader: Any, evaluator: Evaluator, **options: Any) -> dict[str, float]:
    """Evaluate on a run's device, in its precision and with its criterion; `options` are others of `evaluate`."""
    settings = dict(device=run.device, precision=run.settings.precision, criterion=run.criterion)
    return evaluate(model, loader, evaluator, **settings, **options)


def choose_batches_to_draw(num_batches: int) -> list[int]:
    """Return the numbers of batches with images to draw, spread over all of them."""
    # The first images of a dataset often show a single scene.
    return np.unique(np.linspace(0, num_batches - 1, min(NUM_DRAWN, num_batches)).round().astype(int)).tolist()


def merge_views(predictions: Sequence[dict], targets: Sequence[dict]) -> list[tuple[dict, dict]]:
    """Return predictions with their targets; those of a video's consecutive views are averaged."""
    samples: list[tuple[dict, dict]] = []
    for _, views in groupby(zip(predictions, targets), key=lambda pair: pair[1].get("image_id", id(pair[1]))):
        view_predictions, view_targets = zip(*views)
        mean = {}
        if "class_scores" in view_predictions[0]:
            mean["class_scores"] = torch.stack([view["class_scores"] for view in view_predictions]).mean(dim=0)
        samples.append((view_predictions[0] | mean, view_targets[0]))
    return samples


@contextmanager
def report_failed_drawing(path: Path) -> Iterator[None]:
    """Report a figure that cannot be drawn, e.g. because the disk is full or the log was not written, and continue."""
    try:
        yield
    except (OSError, DataError) as error:
        print_line(f"{path}: not drawn ({(error.strerror if isinstance(error, OSError) else None) or error})")
