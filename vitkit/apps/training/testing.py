"""Evaluates a trained model on the validation data of a config."""

import logging
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitkit.apps.export_reading.loading import check_runtime
from vitkit.apps.export_reading.settings import Runtime
from vitkit.apps.inference import Predictor, Tiling, load
from vitkit.apps.inference.fused import fused_copy
from vitkit.apps.inference.load import find_usable, open_weights
from vitkit.apps.inference.writing import weights_checksum
from vitkit.apps.training.stored_predictions import PredictionFiles
from vitkit.apps.training.subset import choose_samples
from vitkit.apps.training.tta import MultiScaleFlip
from vitkit.apps.visualization.metrics import draw_metrics
from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import Split
from vitkit.devices import Precision, resolve_precision
from vitkit.distributed import first_rank_first, rank, world_size
from vitkit.engine.build import build_model_for, use_tokenizer
from vitkit.engine.evaluate import SizeCounter, evaluate
from vitkit.engine.settings import TrainSettings, require, slow_precision
from vitkit.errors import CheckpointError, ConfigError
from vitkit.logging import ProgressLines, print_line
from vitkit.protocols.criterion import Criterion
from vitkit.protocols.dataset import Dataset, Loader
from vitkit.protocols.evaluator import Evaluator
from vitkit.registry import CRITERIA, EVALUATORS, Spec
from vitkit.structures import Batch, ScoreThresholds
from vitkit.text.vocabulary import Vocabulary, set_vocabularies, vocabularies_from_json, vocabularies_of
from vitkit.text_format import pluralize
from vitkit.weights import LoadReport
from vitkit.weights.locate import Located, Weights

logger = logging.getLogger("vitkit")
_LOADING = ("num_workers", "pin_memory", "start_workers")
"""The settings of data that decide how samples are loaded, not which."""


@dataclass(repr=False)
class Evaluation:
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
    thresholds: ScoreThresholds | None = None
    """The score thresholds of the weights, which validation chose in training; None if the weights have none. Those of
    `evaluator` are chosen on the data that is evaluated now."""

    def __repr__(self) -> str:
        return self.evaluator.table()

    def write(self, path: str | Path) -> list[Path]:
        """Write the predictions in the format of the task, and figures of metrics; return the paths of the files."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        files = self.evaluator.write_results(path) or [path]
        return [*files, *draw_metrics(self.evaluator, path)]


def evaluate_model(
    config: Mapping[str, Any],
    weights: Weights,
    device: torch.device,
    *,
    tta_scales: Sequence[float] | None = None,
    tiling: Tiling | None = None,
    split: Split = "val",
    prediction_files: PredictionFiles | None = None,
    runtime: Runtime = "onnxruntime",
    num_samples: int | None = None,
) -> Evaluation:
    """Build a config's data and model, and predict every sample once. All ranks must call it, in their process group.

    Args:
        config: the checked config.
        weights: see `find_usable`.
        device: this rank's device.
        tta_scales: for semantic models: relative image sizes, each also mirrored, over which scores are averaged.
        tiling: predict the stored images in tiles, each of which goes through the validation transforms.
        split: the split to evaluate; training data gets the transforms of validation, and so does test data without
            transforms of its own.
        prediction_files: where predictions are written as they are made, and those of a killed evaluation are read;
            None: no files.
        runtime: what runs an ONNX file; OpenVINO only on the CPU.
        num_samples: evaluate only so many samples, see `choose_samples`; not in tiles. None: all.
    Raises:
        VitkitError: an error that a user can cause, see vitkit/errors.py.
    """
    located = find_usable(weights)
    check_runtime(runtime, located, device)
    require(config, "model", "data.val" if split == "val" else "data", "evaluator", "train.epochs")
    if tiling is not None:
        return _evaluate_tiles(config, located, device, tiling, split, prediction_files, runtime)
    data, precision = DataSettings(**config["data"]), evaluation_precision(config, device)
    dataset = data.evaluation_dataset(split, located.metadata)
    vocabularies = use_saved_vocabularies(dataset, located.metadata, str(located), config["model"])
    dataset = dataset if num_samples is None else choose_samples(dataset, num_samples)
    built = build_model_for(config, dataset, vocabularies)
    with first_rank_first():
        model, report = open_weights(built, located, classes=dataset.classes, spec=config["model"], runtime=runtime)
    print_line(str(report))
    if tta_scales is not None:
        model = MultiScaleFlip(model, scales=tta_scales)
    evaluator = EVALUATORS.build(config["evaluator"], dataset=dataset)
    is_written = bool(vocabularies) and dataset.prompts is None and located.kind != "exported"
    criterion = _reference_criterion(config, device, prediction_files) if is_written and "criterion" in config else None
    done = set()
    if prediction_files is not None and criterion is None:
        facts = {"scales": tta_scales, "precision": precision, "samples": num_samples}
        done = _begin_stored_predictions(prediction_files, evaluator, model, located, config, split, facts)
    metrics, seconds = _predict_all(
        model, data.val_loader(dataset, done=done), evaluator, device, precision, criterion, prediction_files
    )
    sample = "sentence" if "images" not in built.takes else "clip" if dataset.is_video else "image"
    return Evaluation(metrics, evaluator, report, seconds, sample, _stored_thresholds(located, dataset.classes))


def _predict_all(
    model: nn.Module,
    loader: Loader,
    evaluator: Evaluator,
    device: torch.device,
    precision: Precision,
    criterion: Criterion | None,
    prediction_files: PredictionFiles | None,
) -> tuple[dict[str, float], float]:
    """Predict the samples of a loader; return the metrics, and the median time per sample."""
    seconds: list[float] = []
    sizes = SizeCounter()

    def on_batch(predictions: Sequence[Any], batch: Batch) -> None:
        sizes.add(predictions, batch)
        if prediction_files is not None:
            prediction_files.add()

    metrics = evaluate(
        fused_copy(model.to(device).eval()),
        loader,
        evaluator,
        device=device,
        precision=precision,
        criterion=criterion,
        on_batch=on_batch,
        seconds=seconds,
    )
    if line := sizes.line(evaluator.dataset.noun):
        print_line(line)
    return metrics, _median(seconds)


def _reference_criterion(
    config: Mapping[str, Any], device: torch.device, prediction_files: PredictionFiles | None
) -> Criterion:
    """Return the criterion of a text model, which measures the likelihood of the references. An exported model has
    none, as it can only generate.

    Raises:
        ConfigError: the evaluation of a killed run is to be resumed.
    """
    if prediction_files is not None and prediction_files.resume and not prediction_files.begins_anew:
        raise ConfigError(
            "--resume: the likelihood of the references is a sum over all sentences, of which only the texts are kept. "
            "Leave it out to begin anew."
        )
    return CRITERIA.build(config["criterion"]).to(device)


def _median(seconds: Sequence[float]) -> float:
    """Return the median without the first batch, which includes one-time costs."""
    return statistics.median(seconds[1:] or seconds or [math.nan])


def _evaluate_tiles(
    config: Mapping[str, Any],
    weights: Located,
    device: torch.device,
    tiling: Tiling,
    split: Split,
    prediction_files: PredictionFiles | None,
    runtime: Runtime,
) -> Evaluation:
    """Predict every stored image in tiles, divided among the ranks.

    Raises:
        ConfigError: the dataset has no images, or the model's predictions cannot be merged.
    """
    dataset = DataSettings(**config["data"]).evaluation_dataset(split, weights.metadata)
    if not dataset.has_images:
        raise ConfigError(f"tiles: expected a dataset of images; data.{split} is a {type(dataset).__name__}.")
    precision = evaluation_precision(config, device)
    names = dict(classes=dataset.classes, things=dataset.things)
    with first_rank_first():
        predictor = load(config, weights, **names, device=device, precision=precision, runtime=runtime)
    if not isinstance(predictor, Predictor):
        raise ConfigError("tiles: expected a model of images; this one reads text.")
    print_line(str(predictor.report))
    print_line(f"images are predicted in tiles of {tiling.size} pixels, each resized like a validation image")
    evaluator = EVALUATORS.build(config["evaluator"], dataset=dataset)
    done = set()
    if prediction_files is not None:
        facts = {"tiles": repr(tiling), "precision": precision}
        done = _begin_stored_predictions(prediction_files, evaluator, predictor.model, weights, config, split, facts)
    mine = [index for index in range(rank(), len(dataset), world_size()) if index not in done]
    progress, seconds = ProgressLines(len(mine), "images evaluated in tiles", every=20.0), []
    for index in mine:
        image = dataset.load_image(index)
        started = time.perf_counter()
        predicted = predictor.run_tiles(image, tiling)
        seconds.append(time.perf_counter() - started)
        evaluator.update([predicted], [{"image_id": dataset.image_ids[index]}])
        if prediction_files is not None:
            prediction_files.add()
        progress.step()
    evaluator.gather()
    metrics = evaluator.compute()
    thresholds = _stored_thresholds(weights, dataset.classes)
    return Evaluation(metrics, evaluator, predictor.report, _median(seconds), "image", thresholds)


def _begin_stored_predictions(
    prediction_files: PredictionFiles,
    evaluator: Evaluator,
    model: nn.Module,
    weights: Located,
    config: Mapping[str, Any],
    split: Split,
    facts: Mapping[str, Any],
) -> set[int]:
    """Read the predictions of a killed evaluation; return the indices of the samples that have one.

    Args:
        facts: what the predictions depend on besides the weights and the config.
    """
    data = {key: value for key, value in config["data"].items() if key not in _LOADING}
    settings = {
        "weights": weights_checksum(model, weights),
        "model": repr(config["model"]),
        "data": repr(data),
        "evaluator": repr(config["evaluator"]),
        "split": split,
        **facts,
    }
    predicted = prediction_files.begin(evaluator, settings)
    sample_ids = evaluator.dataset.sample_ids()
    done = {index for index, sample_id in enumerate(sample_ids) if sample_id in predicted} if predicted else set()
    if done:
        print_line(f"resuming: {len(done)} of {pluralize(len(sample_ids), evaluator.dataset.noun)} are done")
    return done


def _stored_thresholds(weights: Located, classes: Sequence[str] | None) -> ScoreThresholds | None:
    """Return the score thresholds that a run has stored with its weights."""
    stored = (weights.metadata.get("measured") or {}).get("score_thresholds")
    try:
        return None if stored is None else ScoreThresholds.from_json(stored, classes or ())
    except ValueError as error:
        raise CheckpointError(f"{weights}: damaged: {error}.") from error


def evaluation_precision(config: Mapping[str, Any], device: torch.device) -> Precision:
    """Return the precision of a config on a device; warn if it is slow there."""
    precision = resolve_precision(TrainSettings(**config["train"]).precision, device)
    if message := slow_precision(precision, device):
        logger.warning("%s", message)
    return precision


def use_saved_vocabularies(
    dataset: Dataset, checkpoint: Mapping[str, Any], name: str, spec: Spec
) -> dict[str, Vocabulary]:
    """Make a text dataset encode with the vocabularies that the model was trained with; {} for other datasets.

    Args:
        checkpoint: what the checkpoint holds besides its weights.
        name: its name, for errors.
        spec: the config's `model` section, which may name the tokenizer of published weights.
    Raises:
        CheckpointError: the checkpoint contains no vocabularies.
    """
    if not dataset.has_vocabularies:
        return {}
    vocabularies = vocabularies_from_json(checkpoint.get("vocabularies"), name)
    if not vocabularies and use_tokenizer(dataset, spec):
        return vocabularies_of(dataset)
    if not vocabularies:
        raise CheckpointError(f"{name}: contains no vocabularies; expected a checkpoint of a model of text.")
    set_vocabularies(dataset, vocabularies)
    return vocabularies
