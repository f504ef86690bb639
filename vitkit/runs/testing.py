"""Evaluates a trained model on the validation data of a config."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitkit.checkpoint import LoadReport, load_weights, read_checkpoint
from vitkit.data.loading.loader import DataSettings, Split
from vitkit.distributed import first_rank_first, rank, world_size
from vitkit.engine.evaluate import evaluate
from vitkit.engine.settings import TrainSettings, require
from vitkit.errors import CheckpointError, ConfigError
from vitkit.inference import Predictor, Tiling, load
from vitkit.inference.exported import checkpoint_of, exported_model, is_exported
from vitkit.logging import ProgressLines, say
from vitkit.models.tta import MultiScaleFlip
from vitkit.protocols import Dataset, Evaluator
from vitkit.registry import CRITERIA, EVALUATORS
from vitkit.runs.models import build_model_for
from vitkit.seq2seq.captioner import Captioner
from vitkit.seq2seq.vocabulary import Vocabulary, set_vocabularies, vocabularies_from_json


@dataclass(repr=False)
class Evaluated:
    """The results of an evaluation; complete on the main process only."""

    metrics: dict[str, float]
    """Metrics by name, such as "bbox/AP"."""
    evaluator: Evaluator
    """The evaluator with all predictions; see its `per_class`, `details` and `score_thresholds`."""
    report: LoadReport
    """What was loaded from the weights; see `LoadReport`."""
    seconds_per_sample: float
    """Median time per sample over all batches but the first, excluding loading and scoring."""
    sample: str
    """The kind of samples: "image", "clip" or "sentence"."""

    def __repr__(self) -> str:
        return self.evaluator.table()

    def write(self, path: str | Path) -> list[Path]:
        """Write the predictions in the format of the task; return the paths of the files."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return self.evaluator.write_results(path) or [path]


def evaluate_config(
    config: Mapping[str, Any],
    weights: str | Path,
    device: torch.device,
    *,
    tta_scales: Sequence[float] | None = None,
    tiling: Tiling | None = None,
    split: Split = "val",
) -> Evaluated:
    """Build data and model, and predict every sample once. All ranks must call it, within their process group.

    Args:
        config: the checked config.
        weights: a checkpoint, a name in the model zoo, or an exported file.
        device: this rank's device.
        tta_scales: for semantic models: relative image sizes, each also mirrored, over which scores are averaged.
        tiling: predict the stored images in tiles, each of which goes through the validation transforms.
        split: the split to evaluate; training data gets the transforms of validation.
    Raises:
        VitkitError: an error that a user can cause, see vitkit/errors.py.
    """
    require(config, "model", "data.val" if split == "val" else "data", "evaluator", "train.epochs")
    if tiling is not None:
        return _evaluate_tiles(config, weights, device, tiling, split)
    settings, data = TrainSettings(**config["train"]), DataSettings(**config["data"])
    dataset = data.evaluated(split)
    vocabularies = use_saved_vocabularies(dataset, weights)
    loader = data.val_loader(dataset)
    model = build_model_for(config, dataset, vocabularies)
    is_text = bool(vocabularies) and not isinstance(model, Captioner)
    if is_exported(weights):
        model, report = exported_model(weights, model), LoadReport(str(weights))
    else:
        with first_rank_first():
            report = load_weights(model, weights, classes=dataset.classes)
    say(str(report))
    if tta_scales is not None:
        model = MultiScaleFlip(model, scales=tta_scales)
    evaluator = EVALUATORS.build(config["evaluator"], dataset=dataset)
    # For text, the criterion also measures the likelihood of the references; an exported model can only generate.
    measures_references = vocabularies and "criterion" in config and not is_exported(weights)
    criterion = CRITERIA.build(config["criterion"]).to(device) if measures_references else None
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
    # The first batch includes one-time costs.
    median = statistics.median(seconds[1:] or seconds or [math.nan])
    sample = "sentence" if is_text else "clip" if dataset.is_video else "image"
    return Evaluated(metrics, evaluator, report, median, sample)


def _evaluate_tiles(
    config: Mapping[str, Any], weights: str | Path, device: torch.device, tiling: Tiling, split: Split
) -> Evaluated:
    """Predict every stored image in tiles, divided among the ranks.

    Raises:
        ConfigError: the dataset has no images, or the model's predictions cannot be merged.
    """
    dataset = DataSettings(**config["data"]).evaluated(split)
    if not dataset.has_images:
        raise ConfigError(f"tiles: only images are predicted in tiles, and data.{split} is a {type(dataset).__name__}.")
    settings = TrainSettings(**config["train"])
    classes, things = dataset.classes, dataset.things
    with first_rank_first():
        predictor = load(config, weights, classes=classes, things=things, device=device, precision=settings.precision)
    if not isinstance(predictor, Predictor):
        raise ConfigError("tiles: only images are predicted in tiles, and this model reads text.")
    say(str(predictor.report))
    evaluator = EVALUATORS.build(config["evaluator"], dataset=dataset)
    mine = range(rank(), len(dataset), world_size())
    progress, seconds = ProgressLines(len(mine), "images evaluated in tiles", every=20.0), []
    for index in mine:
        image = dataset.load_image(index)
        started = time.perf_counter()
        predicted = predictor.run_tiles(image, tiling)
        seconds.append(time.perf_counter() - started)
        evaluator.update([predicted], [{"image_id": dataset.image_ids[index]}])
        progress.step()
    evaluator.gather()
    metrics = evaluator.compute()
    median = statistics.median(seconds[1:] or seconds or [math.nan])
    return Evaluated(metrics, evaluator, predictor.report, median, "image")


def use_saved_vocabularies(dataset: Dataset, checkpoint: str | Path) -> dict[str, Vocabulary]:
    """Make a text dataset encode with the vocabularies that the model was trained with; {} for other datasets.

    Raises:
        CheckpointError: the checkpoint contains no vocabularies.
    """
    if not dataset.has_vocabularies:
        return {}
    saved = checkpoint_of(checkpoint) if is_exported(checkpoint) else read_checkpoint(checkpoint)
    vocabularies = vocabularies_from_json(saved.get("vocabularies"))
    if not vocabularies:
        raise CheckpointError(f"{checkpoint}: has no vocabularies; expected a checkpoint that was trained on text.")
    set_vocabularies(dataset, vocabularies)
    return vocabularies
