"""A trained model evaluated on the validation data of a config."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitkit.checkpoint import LoadReport, load_weights, read_checkpoint
from vitkit.data.loading.loader import DataSettings
from vitkit.distributed import first_rank_first
from vitkit.engine.evaluate import evaluate
from vitkit.engine.settings import TrainSettings, require
from vitkit.errors import CheckpointError
from vitkit.logging import say
from vitkit.models import build_model
from vitkit.models.tta import MultiScaleFlip
from vitkit.protocols import Evaluator, HasClasses, HasThings, HasVocabularies
from vitkit.registry import CRITERIA, EVALUATORS
from vitkit.seq2seq import Captioner
from vitkit.vocabulary import Vocabulary, set_vocabularies, vocabularies_from_json


@dataclass(repr=False)
class Evaluated:
    """What an evaluation has given; complete on the main process alone."""

    metrics: dict[str, float]
    """By name, such as "bbox/AP"."""
    evaluator: Evaluator
    """With all predictions; see its `per_class`, `details` and `score_thresholds`."""
    report: LoadReport
    """What loading the weights did."""
    seconds_per_sample: float
    """The median over batches but the first, without loading and scoring."""
    sample: str
    """What was counted: "image" or "sentence"."""

    def __repr__(self) -> str:
        return self.evaluator.table()

    def write(self, path: str | Path) -> list[Path]:
        """Write the predictions in the format of the task; return the files."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return self.evaluator.write_results(path) or [path]


def evaluate_config(
    config: Mapping[str, Any], weights: str | Path, device: torch.device, *, tta_scales: Sequence[float] | None = None
) -> Evaluated:
    """Build data and model, and predict every sample once. All ranks call it, in their process group.

    Args:
        config: checked.
        weights: a checkpoint, or a name of the model zoo.
        device: of this rank.
        tta_scales: relative sizes of a semantic model's images, each also mirrored, over which scores are averaged.
    Raises:
        VitkitError: see vitkit/errors.py; whatever a user can cause.
    """
    require(config, "model", "data.val", "evaluator", "train.epochs")
    settings, data = TrainSettings(**config["train"]), DataSettings(**config["data"])
    dataset = data.dataset("val")
    vocabularies = use_saved_vocabularies(dataset, weights)
    loader = data.val_loader(dataset)
    classes = dataset.classes if isinstance(dataset, HasClasses) else None
    things = dataset.things if isinstance(dataset, HasThings) else None
    model = build_model(config["model"], classes=classes, things=things, vocabularies=vocabularies)
    with first_rank_first():
        report = load_weights(model, weights, classes=classes)
    say(str(report))
    is_text = bool(vocabularies) and not isinstance(model, Captioner)
    if tta_scales is not None:
        model = MultiScaleFlip(model, scales=tta_scales)
    evaluator = EVALUATORS.build(config["evaluator"], dataset=dataset)
    # For text the criterion also measures how probable the references are.
    criterion = CRITERIA.build(config["criterion"]).to(device) if vocabularies and "criterion" in config else None
    seconds: list[float] = []
    metrics = evaluate(
        model.to(device),
        loader,
        evaluator,
        device=device,
        precision=settings.precision,
        criterion=criterion,
        seconds=seconds,
    )
    # The first batch also pays for what is made once.
    median = statistics.median(seconds[1:] or seconds or [math.nan])
    return Evaluated(metrics, evaluator, report, median, "sentence" if is_text else "image")


def use_saved_vocabularies(dataset: Any, checkpoint: str | Path) -> dict[str, Vocabulary]:
    """Let a dataset of text encode with the vocabularies that the model was trained with; others have none.

    Raises:
        CheckpointError: the checkpoint holds none.
    """
    if not isinstance(dataset, HasVocabularies):
        return {}
    vocabularies = vocabularies_from_json(read_checkpoint(checkpoint).get("vocabularies"))
    if not vocabularies:
        raise CheckpointError(f"{checkpoint}: holds no vocabularies; expected a checkpoint that was trained on text.")
    set_vocabularies(dataset, vocabularies)
    return vocabularies
