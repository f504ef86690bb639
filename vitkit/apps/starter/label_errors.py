"""Finds labels that a detector contradicts, and writes a page to review them."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from vitkit.apps.inference import find_model, find_trained
from vitkit.apps.report.label_errors import LabelError
from vitkit.apps.report.label_review import weakness, write_label_errors
from vitkit.apps.training.testing import evaluate_model
from vitkit.config import Config
from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import Split
from vitkit.devices import default_device
from vitkit.distributed import is_main
from vitkit.engine.settings import require
from vitkit.errors import ConfigError
from vitkit.evaluation.coco import CocoEvaluator


class CheckedLabels(NamedTuple):
    """The results of `check_labels`."""

    errors: list[LabelError]
    """Suspicious labels, the most likely errors first."""
    corrections: Path
    """The JSON file of their corrections, which `vitkit data convert --fix` applies."""
    notes: list[str]
    """Why the suspicions may be wrong."""


def check_labels(
    model: str | Path,
    weights: str | Path | None,
    out: Path,
    *,
    split: Split = "val",
    results: str | Path | None = None,
    max_labels: int = 200,
    overrides: Sequence[str] = (),
    device: str | torch.device | None = None,
    trust: bool = False,
) -> CheckedLabels | None:
    """Find the labels of a split that a detector contradicts.

    Args:
        model, weights, overrides, trust: see `find_model`.
        out: the page to write, NAME.html; NAME.json beside it has the corrections.
        split: "val", "test" or "train"; a model has learned some of the errors of labels that it was trained on.
        results: predictions that vitkit test has written; None: the model runs.
        max_labels: the maximum number of labels to list.
        device: such as "cuda" or "cpu"; None: the accelerator that PyTorch finds, otherwise the CPU.
    Returns:
        what was found; None in the other processes of a distributed run.
    Raises:
        ConfigError: there is no such model, or its data have no boxes.
        DataError: a file is missing or invalid.
    """
    config, weights = (find_model if results else find_trained)(model, weights, overrides=overrides, trust=trust)
    config = Config({**config, "evaluator": {"type": "CocoEvaluator"}}, path=config.path)
    require(config, "data")
    dataset = DataSettings(**config["data"]).evaluation_dataset(split)
    if "objects" not in dataset.annotations:
        raise ConfigError(f"data.{split}: {type(dataset).__name__} has no boxes, whose labels this command judges.")
    if results:
        evaluator = CocoEvaluator(dataset)
        evaluator.load_results(results)
    else:
        evaluator = evaluate_model(config, weights, torch.device(device or default_device()), split=split).evaluator
    if not is_main():
        return None
    trained_on = split == "train" and not results
    errors, corrections = write_label_errors(
        evaluator,
        out,
        title="Suspicious labels",
        most=max_labels,
        facts={"model": str(model), "labels of": split},
        trained_on=trained_on,
    )
    notes = ["the model was trained on these labels, and may have learned their errors"] if trained_on else []
    return CheckedLabels(errors, corrections, notes + ([weak] if (weak := weakness(evaluator)) else []))
