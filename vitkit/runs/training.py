"""Trains a config in its run folder: everything that the config names is built here."""

import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitkit.checkpoint import load_weights, read_checkpoint
from vitkit.config import Config, load_config, make_data_paths_absolute, save_config
from vitkit.data.loading.loader import BatchLoader, DataSettings, check_same_classes
from vitkit.data.loading.transformed import TransformedLoader
from vitkit.devices import default_device, emulates_bfloat16
from vitkit.distributed import broadcast_object, first_rank_first, gather_objects, is_main, rank, world_size
from vitkit.engine.checkpoints import CONFIG_NAME, rng_state, set_rng_state
from vitkit.engine.evaluate import evaluate
from vitkit.engine.hooks import Interrupted
from vitkit.engine.loop import train
from vitkit.engine.parallel import shard
from vitkit.engine.resume import Launch, current_launch, mark_launch, report_changes, resume_command
from vitkit.engine.run import TrainRun
from vitkit.engine.run_folder import RunFolder, run_folder, writing_into
from vitkit.engine.run_record import record_start
from vitkit.engine.settings import TrainSettings, require
from vitkit.errors import DataError
from vitkit.inference import find_weights
from vitkit.logging import CONSOLE_NAME, LOG_NAME, ConsoleCopy, say
from vitkit.nn.layers import enable_activation_checkpointing
from vitkit.protocols import Dataset, HasPretrained
from vitkit.registry import EVALUATORS, OPTIMIZERS, SCHEDULES, Spec
from vitkit.runs.models import build_criterion_for, build_model_for
from vitkit.seq2seq.vocabulary import Vocabulary, set_vocabularies, vocabularies_from_json, vocabularies_of
from vitkit.structures import Batch, ImageSizes
from vitkit.visualization.curves import plot_training
from vitkit.visualization.predictions import draw_predictions

NUM_DRAWN = 8
"""Number of validation images whose predictions are drawn."""
logger = logging.getLogger("vitkit")


def train_config(
    config: Config,
    device: torch.device,
    *,
    default: Path,
    run_dir: Path | None = None,
    resume: Path | None = None,
    init: str | None = None,
    trust: bool = False,
) -> Path:
    """Choose the run's folder, and train in it. All ranks must call it, within their process group.

    Args:
        config: the checked config.
        device: this rank's device.
        default: the folder of a new run, numbered if it exists.
        run_dir: the folder to use instead of `default`.
        resume: the folder of a run to resume.
        init: weights to start from, see `find_weights`.
        trust: see `load_config`.
    Returns:
        the run's folder.
    Raises:
        VitkitError: an error that a user can cause, see vitkit/errors.py.
        Interrupted: a signal requested the end, and the state is saved.
    """
    require(
        config, "model", "criterion", "data.train", "data.val", "optimizer", "schedule", "evaluator", "train.epochs"
    )
    make_data_paths_absolute(config)
    with first_rank_first():
        init = None if init is None else find_weights(init, trust=trust)
    launches = gather_objects(current_launch())
    with run_folder(launches, resume=resume, run_dir=run_dir, default=default) as folder, ConsoleCopy() as console:
        if folder.checkpoint:
            saved = load_config(folder.path / CONFIG_NAME, trust=trust)
            make_data_paths_absolute(saved)
            report_changes(folder.path, saved, config)
        train_in(folder, config, device, init=init, launches=launches, console=console)
        return folder.path


def train_in(
    folder: RunFolder,
    config: Config,
    device: torch.device,
    *,
    init: str | Path | None,
    launches: Sequence[Launch],
    console: ConsoleCopy,
) -> None:
    """Build everything that the config names, train, and draw the curves."""
    settings, data = TrainSettings(**config["train"]), DataSettings(**config["data"])
    if settings.precision == "bf16" and emulates_bfloat16(device):
        logger.warning(
            "train.precision=bf16: this processor has no instructions for bfloat16 and is up to ten times slower with "
            "it; use train.precision=fp32."
        )
    seed_everything(settings.seed + rank())
    run_dir, checkpoint = folder.path, folder.checkpoint

    train_set, val_set = build_datasets(data)
    vocabularies = share_vocabularies(train_set, val_set, checkpoint or init)
    loader = build_train_loader(data, train_set, settings.seed, device)
    metadata = dataset_metadata(train_set, vocabularies)
    model = build_model_for(config, train_set, vocabularies)
    if not checkpoint:
        load_initial_weights(model, init, metadata.get("classes"))
    model = prepare_model(model, settings, device)
    criterion = build_criterion_for(config, model).to(device)
    optimizer = OPTIMIZERS.build(config["optimizer"]).build(model)
    steps_per_epoch = -(-len(loader) // settings.accumulate)
    schedule = SCHEDULES.build(
        config["schedule"], optimizer=optimizer, steps_per_epoch=steps_per_epoch, epochs=settings.epochs
    )
    settings.check_batch_size(data.batch_size_per_gpu * settings.accumulate * world_size())
    train_run = TrainRun(
        model=model,
        criterion=criterion,
        loader=loader,
        optimizer=optimizer,
        schedule=schedule,
        settings=settings,
        device=device,
        run_dir=run_dir,
        saved_with={"config": json.dumps(config), **metadata},
        owns_folder=folder.is_mine,
    )
    say(describe(train_run, train_set, val_set, vocabularies))

    if not checkpoint:
        check_validation(train_run, data.val_loader(val_set), config["evaluator"])
    # Only now: a config that does not fit the checkpoint would otherwise overwrite the one that does.
    on_start = partial(prepare_run_dir, run_dir, config, device, launches=launches, console=console)
    validation = partial(
        validate, train_run=train_run, loader=data.val_loader(val_set), evaluator_spec=config["evaluator"]
    )
    try:
        train(train_run, validate=validation, resume=checkpoint, on_start=on_start)
    except Interrupted as interrupted:
        device_type = [] if device.type == default_device() != "cpu" else ["--device", device.type]
        say(f"{interrupted.signal.name}: saved. Resume with:\n    {resume_command(run_dir, *device_type)}")
        raise
    if is_main():
        with going_on_without(run_dir / "curves.png"):
            plot_training(run_dir / LOG_NAME, run_dir / "curves.png")
        written = sorted(path.name for path in run_dir.glob("[!.]*") if path.is_file())
        say(f"done: {', '.join(written)} are in {run_dir}")


def describe(train_run: TrainRun, train_set: Dataset, val_set: Dataset, vocabularies: Mapping[str, Vocabulary]) -> str:
    """Return the first line of a run's output: its folder, data, parameters and devices."""
    if train_set.classes is not None:
        sizes = [f"{len(train_set.classes)} classes"]
    else:
        sizes = [f"{len(vocabulary)} {side} tokens" for side, vocabulary in vocabularies.items()]
    num_trained, num_training = len(train_set.training_indices()), len(train_set)
    of_training = str(num_training) if num_trained == num_training else f"{num_trained} of {num_training}"
    return (
        f"run {train_run.run_dir}  {of_training} training and {len(val_set)} validation "
        f"{train_set.noun}, {', '.join(sizes)}  "
        f"{sum(p.numel() for p in train_run.parameters if p.requires_grad) / 1e6:.1f} M trainable parameters  "
        f"{world_size()} x {train_run.device.type}, {train_run.settings.precision}"
    )


def prepare_run_dir(
    run_dir: Path, config: Config, device: torch.device, *, launches: Sequence[Launch], console: ConsoleCopy
) -> None:
    """Write the config, the launch command and the console output into the run's folder, from the main process."""
    if not is_main():
        return
    with writing_into(run_dir):
        mark_launch(run_dir, launches)
        save_config(config, run_dir / f"{CONFIG_NAME}.tmp")
        (run_dir / f"{CONFIG_NAME}.tmp").replace(run_dir / CONFIG_NAME)
        record_start(run_dir, device)
        console.begin(run_dir / CONSOLE_NAME)


def seed_everything(seed: int) -> None:
    """Seed the random number generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def build_datasets(data: DataSettings) -> tuple[Dataset, Dataset]:
    """Build the training and the validation dataset, which must have the same classes."""
    train_set = data.dataset("train")
    val_set = data.dataset("val")
    if train_set.classes is not None and val_set.classes is not None:
        check_same_classes(train_set, val_set)
    if train_set.num_objects == 0:
        raise DataError("data.train: none of its images has a usable object, so there is nothing to learn.")
    return train_set, val_set


def build_train_loader(data: DataSettings, train_set: Dataset, seed: int, device: torch.device) -> Any:
    """Return the loader of training batches, which are transformed on the device if the dataset asks for it."""
    loader = data.train_loader(train_set, seed)
    transforms = train_set.batch_transforms
    return loader if transforms is None else TransformedLoader(loader, transforms, device)


def share_vocabularies(train_set: Dataset, val_set: Dataset, checkpoint: str | Path | None) -> dict[str, Vocabulary]:
    """Set one vocabulary per side for text datasets, and return the vocabularies; {} for other datasets.

    They come from the checkpoint that provides the weights, or else are built from the training text by the first rank.
    """
    if not train_set.has_vocabularies:
        return {}
    saved = None
    if is_main():
        if checkpoint and Path(checkpoint).is_file():
            saved = read_checkpoint(checkpoint).get("vocabularies")
        saved = saved or {side: vocabulary.to_json() for side, vocabulary in vocabularies_of(train_set).items()}
    vocabularies = vocabularies_from_json(broadcast_object(saved))
    for dataset in (train_set, val_set):
        set_vocabularies(dataset, vocabularies)
    return vocabularies


def dataset_metadata(dataset: Dataset, vocabularies: Mapping[str, Vocabulary]) -> dict[str, Any]:
    """Return the classes and vocabularies that a checkpoint needs for the model to be used without the dataset."""
    about = {"classes": dataset.classes, "category_ids": dataset.category_ids, "things": dataset.things}
    metadata: dict[str, Any] = {name: value for name, value in about.items() if value is not None}
    if vocabularies:
        metadata["vocabularies"] = {side: vocabulary.to_json() for side, vocabulary in vocabularies.items()}
    return metadata


def load_initial_weights(model: nn.Module, init: str | Path | None, classes: Sequence[str] | None) -> None:
    """Load the initial weights of a new run: those of `--init`, or of a pretrained backbone."""
    with first_rank_first():
        if init:
            logger.info(load_weights(model, init, classes=classes, new_class_head=True))
        elif isinstance(model, HasPretrained):
            source = model.load_pretrained()
            logger.info("pretrained: %s", f"weights from {source}" if source else "none, all weights are random")


def prepare_model(model: nn.Module, settings: TrainSettings, device: torch.device) -> nn.Module:
    """Move the model to the device, with the memory format and sharding that the settings specify."""
    if settings.activation_checkpointing:
        enable_activation_checkpointing(model)
    if settings.channels_last:
        model = model.to(memory_format=torch.channels_last)
    model = model.to(device)
    return shard(model, device) if settings.strategy == "fsdp" else model


def check_validation(train_run: TrainRun, loader: BatchLoader, evaluator_spec: Spec) -> None:
    """Validate one batch before training, so that what does not fit is an error now and not after the first epoch.

    The random state is restored: a run does not depend on this check.
    """
    state = rng_state()
    evaluate(
        train_run.model,
        list(islice(loader, 1)),
        EVALUATORS.build(evaluator_spec, dataset=loader.dataset),
        device=train_run.device,
        precision=train_run.settings.precision,
        criterion=train_run.criterion,
        compute=False,
    )
    set_rng_state(state)


def validate(model: nn.Module, *, train_run: TrainRun, loader: BatchLoader, evaluator_spec: Spec) -> dict[str, float]:
    """Return the metrics of a model, and draw its predictions for images spread over the data."""
    evaluator = EVALUATORS.build(evaluator_spec, dataset=loader.dataset)
    samples: list[tuple[dict, dict]] = []
    sizes: list[tuple[int, int]] = []

    drawn = drawn_batches(len(loader))
    per_batch = -(-NUM_DRAWN // max(1, len(drawn)))
    batches = count()

    def keep_some(predictions: list, batch: Batch) -> None:
        sizes.extend(target["image_size"] for target in batch.targets if "image_size" in target)
        if next(batches) in drawn:
            samples.extend(one_of_each_video(predictions, batch.targets)[:per_batch])

    metrics = evaluate(
        model,
        loader,
        evaluator,
        device=train_run.device,
        precision=train_run.settings.precision,
        criterion=train_run.criterion,
        on_batch=keep_some,
    )
    if is_main():
        say(evaluator.table())
        thresholds = evaluator.score_thresholds()
        if thresholds is not None:
            train_run.measured["score_thresholds"] = thresholds.as_json(loader.dataset.classes)
        if sizes:
            train_run.measured["image_sizes"] = ImageSizes.of(sizes).as_json()
        with going_on_without(train_run.run_dir / "predictions.png"):
            picture = train_run.run_dir / "predictions.png"
            draw_predictions(samples[:NUM_DRAWN], loader.dataset, picture, thresholds=thresholds)
    return metrics


def drawn_batches(num_batches: int) -> list[int]:
    """Return the batches with images to draw, spread over all: the first images alone are often of one scene."""
    return np.unique(np.linspace(0, num_batches - 1, min(NUM_DRAWN, num_batches)).round().astype(int)).tolist()


def one_of_each_video(predictions: Sequence[dict], targets: Sequence[dict]) -> list[tuple[dict, dict]]:
    """Return predictions with their targets; those of a video's consecutive views are averaged."""
    samples: list[tuple[dict, dict]] = []
    for _, views in groupby(zip(predictions, targets), key=lambda pair: pair[1].get("image_id", id(pair[1]))):
        of_views, of_targets = zip(*views)
        mean = {}
        if "class_scores" in of_views[0]:
            mean["class_scores"] = torch.stack([view["class_scores"] for view in of_views]).mean(dim=0)
        samples.append((of_views[0] | mean, of_targets[0]))
    return samples


@contextmanager
def going_on_without(picture: Path) -> Iterator[None]:
    """Report that a picture cannot be drawn, e.g. because the disk is full or the log was not written, and continue."""
    try:
        yield
    except (OSError, DataError) as error:
        say(f"{picture}: not drawn ({getattr(error, 'strerror', None) or error})")
