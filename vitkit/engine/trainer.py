"""Trains a config: builds its parts, then runs epochs of steps, each followed by an evaluation and a checkpoint."""

import json
import logging
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitkit.config.load import Config, load_config, save_config
from vitkit.config.paths import make_data_paths_absolute
from vitkit.data.loading.settings import DataSettings
from vitkit.devices import default_device, resolve_precision
from vitkit.distributed import (
    broadcast,
    broadcast_object,
    failing_together,
    gather_objects,
    idle_devices,
    is_main,
    rank,
    world_size,
)
from vitkit.engine import build, validation
from vitkit.engine.checkpointing import Progress
from vitkit.engine.consistency import check_same_data, check_same_start, fingerprint
from vitkit.engine.contracts import check_sample
from vitkit.engine.hooks import Hook, Interrupted, default_hooks
from vitkit.engine.lora import LoRARun
from vitkit.engine.preparation import Preparation, Start, StoredFeatures
from vitkit.engine.restart import restart_from_best, restore_average
from vitkit.engine.run import TrainRun
from vitkit.engine.run_folder import (
    Launch,
    RunFolder,
    current_launch,
    mark_launch,
    record_start,
    report_changes,
    resume_command,
    run_folder,
    writing_into,
)
from vitkit.engine.settings import TrainSettings, require, slow_precision
from vitkit.engine.step import Decision, Step, seed_everything, set_epoch, train_step
from vitkit.engine.teaching import Teaching
from vitkit.io.folders import declare_output
from vitkit.logging import CONSOLE_NAME, LOG_NAME, ConsoleCopy, print_line
from vitkit.protocols.dataset import Dataset
from vitkit.protocols.model import Model
from vitkit.registry import OPTIMIZERS, SCHEDULES
from vitkit.structures import Batch
from vitkit.text.vocabulary import Vocabulary
from vitkit.text_format import pluralize
from vitkit.weights.loading import InitialWeights
from vitkit.weights.locate import BEST_NAME, RUN_CONFIG, find_weights

logger = logging.getLogger("vitkit")
Validate = Callable[[nn.Module], dict[str, float]]
PREPARATIONS: tuple[type[Preparation], ...] = (LoRARun, StoredFeatures, Teaching)
"""What a run may prepare in its model, in this order."""
REQUIRED = ("model", "criterion", "data.train", "data.val", "optimizer", "schedule", "evaluator", "train.epochs")
"""The sections and keys that a config has to have to be trained."""


def run_training(
    config: Config,
    device: torch.device,
    *,
    default: Path,
    plot_training: Callable[[Path, Path], None],
    draw_predictions: Callable[..., Any],
    run_dir: Path | None = None,
    resume: Path | None = None,
    init: InitialWeights | None = None,
    trust: bool = False,
    hooks: Sequence[Hook] = (),
) -> Path:
    """Choose the run's folder, build the run, and train. All ranks must call it, within their process group.

    Args:
        config: the checked config.
        device: this rank's device.
        default: the folder of a new run, numbered if it exists.
        plot_training: plots the curves of a run that is done; takes the path of its log and that of the figure.
        draw_predictions: draws predictions of an evaluation; takes the prediction and the target of each image, the
            dataset, the figure's path, and the score `thresholds` of the objects to draw.
        run_dir: the folder to use instead of `default`.
        resume: the folder of a run to resume.
        init: weights to start from.
        trust: see `load_config`.
        hooks: hooks in addition to those of the config.
    Returns:
        the run's folder.
    Raises:
        VitkitError: an error that a user can cause, see vitkit/errors.py.
        Interrupted: a signal requested the end, and the state is saved.
    """
    require(config, *REQUIRED)
    check_same_start(config)
    make_data_paths_absolute(config)
    launches = gather_objects(current_launch())
    with run_folder(launches, resume=resume, run_dir=run_dir, default=default) as folder, ConsoleCopy() as console:
        saved = load_config(folder.path / RUN_CONFIG, trust=trust) if folder.checkpoint else None
        choose_precision(config, saved, device)
        if saved is not None:
            make_data_paths_absolute(saved)
            report_changes(folder.path, saved, config)
        run, validate = build_run(config, folder, device, init=init)
        # Only now: a config that does not fit the checkpoint would otherwise overwrite the one that does.
        on_start = partial(prepare_run_dir, folder.path, config, device, launches=launches, console=console)
        try:
            validate = partial(validate, draw=draw_predictions)
            fit(run, validate=validate, resume=folder.checkpoint, on_start=on_start, hooks=hooks)
        except Interrupted as interrupted:
            device_type = [] if device.type == default_device() != "cpu" else ["--device", device.type]
            command = interrupted.command or resume_command(folder.path, *device_type)
            print_line(f"{interrupted.signal.name}: saved. Resume with:\n    {command}")
            raise
        if is_main():
            figure = folder.path / "curves.png"
            with validation.report_failed_drawing(figure):
                plot_training(folder.path / LOG_NAME, figure)
            written = sorted(path.name for path in folder.path.glob("[!.]*") if path.is_file())
            print_line(f"done: {', '.join(written)} are in {folder.path}")
    return folder.path


def choose_precision(config: Config, saved: Mapping[str, Any] | None, device: torch.device) -> None:
    """Replace `train.precision="auto"` in a config: by the precision of the run that is resumed, or the device's."""
    # The result is saved with the run, so that a resumption on another device does not change it.
    train = config["train"]
    if train.get("precision") == "auto":
        train["precision"] = broadcast_object(resolve_precision("auto", device))  # ranks may have different devices
        recorded = saved["train"].get("precision", "fp32") if saved is not None else train["precision"]
        if recorded != train["precision"]:
            logger.warning(
                f"train.precision=auto: this run was started with {recorded} and continues with it, although a new run "
                f"on this device would use {train['precision']}."
            )
            train["precision"] = recorded
    if message := slow_precision(train.get("precision", "fp32"), device):
        logger.warning("%s", message)


def build_run(
    config: Config, folder: RunFolder, device: torch.device, *, init: InitialWeights | None
) -> tuple[TrainRun, Callable[..., dict[str, float]]]:
    """Build all parts that a config names; return the run, and the function that evaluates its model.

    That function also takes `draw`, which draws predictions, see `validation.validate`.
    """
    data = DataSettings(**config["data"])
    settings = TrainSettings(**config["train"]).for_processes(data, world_size())
    seed_everything(settings.seed)

    resumed = find_weights(folder.checkpoint) if folder.checkpoint else None
    with failing_together():
        train_set, val_set = build.build_datasets(data, resumed, init.weights if init else None)
    check_same_data({"data.train": train_set, "data.val": val_set})
    vocabularies = build.share_vocabularies(
        train_set, val_set, resumed or (init.weights if init else None), config["model"], resumed=bool(resumed)
    )
    per_step = 1 if settings.images_per_step is None else settings.accumulate
    loader = data.train_loader(train_set, settings.seed, batches_per_step=per_step, device=device)
    train_set.set_num_epochs(settings.epochs)
    metadata = build.collect_dataset_metadata(train_set, vocabularies)
    start = Start(
        config=config,
        data=data,
        settings=settings,
        datasets={"train": train_set, "val": val_set},
        loader=loader,
        device=device,
        checkpoint=folder.checkpoint,
    )
    built = build.build_model_for(config, train_set, vocabularies)
    model, model_to_average, about = prepare_model(built, start, init=init)
    metadata |= about
    criterion = build.build_criterion_for(config, model, train_set).to(device)
    if rank() > 0:  # all ranks have drawn the same weights; dropout and denoising differ
        seed_everything(settings.seed + rank())
    optimizer = OPTIMIZERS.build(config["optimizer"], model=model)
    steps_per_epoch = settings.steps_per_epoch(len(loader))
    schedule = SCHEDULES.build(
        config["schedule"], optimizer=optimizer, steps_per_epoch=steps_per_epoch, epochs=settings.epochs
    )
    settings.check_batch_size(data.batch_size_per_gpu * settings.accumulate * world_size())
    run = TrainRun(
        model=model,
        criterion=criterion,
        loader=loader,
        optimizer=optimizer,
        schedule=schedule,
        settings=settings,
        device=device,
        run_dir=folder.path,
        saved_with={"config": json.dumps(config), **metadata},
        val_data=" ".join(map(str, fingerprint(val_set)[:2])),
        owns_folder=folder.is_mine,
        model_to_average=model_to_average,
    )
    print_line(describe(run, train_set, val_set, vocabularies))
    warn_of_idle_devices(device)
    if not folder.checkpoint:
        if data.on_error == "raise":
            check_sample(train_set, "data.train", needs_targets=criterion.needs_targets)
        validation.check_validation(run, data.val_loader(val_set), config["evaluator"])
    validate = partial(
        validation.validate, run=run, loader=data.val_loader(val_set), evaluator_spec=config["evaluator"]
    )
    return run, validate


def prepare_model(
    model: Model, start: Start, *, init: InitialWeights | None
) -> tuple[Any, nn.Module | None, dict[str, Any]]:
    """Load the weights that a new run starts from, and prepare the model for training.

    Returns:
        the model; its copy for a moving average, see `build.place_model`; and what checkpoints say about it.
    """
    preparations = [prepare(model, start) for prepare in PREPARATIONS if prepare.is_needed(model, start)]
    if not start.checkpoint:
        classes = start.datasets["train"].classes
        build.load_initial_weights(model, start.config["model"], init, classes)
        model.to(start.device)
        for preparation in preparations:
            preparation.begin(model)
    prepared, to_average = build.place_model(model, start.settings, start.device, preparations)
    return prepared, to_average, {name: value for part in preparations for name, value in part.about.items()}


def describe(run: TrainRun, train_set: Dataset, val_set: Dataset, vocabularies: Mapping[str, Vocabulary]) -> str:
    """Return the first line of a run's output: its folder, data, parameters, devices and threads."""
    if train_set.classes is not None:
        sizes = [pluralize(len(train_set.classes), "classes")]
    else:
        sizes = [f"{pluralize(len(vocabulary), f'{side} tokens')}" for side, vocabulary in vocabularies.items()]
    num_trained, num_training = len(train_set.training_indices()), len(train_set)
    of_training = str(num_training) if num_trained == num_training else f"{num_trained} of {num_training}"
    threads = f" of {pluralize(torch.get_num_threads(), 'threads')}" * (run.device.type == "cpu")
    data = f"{of_training} training and {len(val_set)} validation {train_set.noun}"
    return (
        f"run {run.run_dir}  {', '.join([data, *sizes])}  "
        f"{sum(p.numel() for p in run.parameters if p.requires_grad) / 1e6:.1f} M trainable parameters  "
        f"{world_size()} x {run.device.type}{threads}, {run.settings.precision}"
    )


def warn_of_idle_devices(device: torch.device) -> None:
    """Warn if other GPUs of this machine have nothing to do."""
    if idle := idle_devices(device):
        logger.warning(
            f"{pluralize(idle, 'GPUs', 'are')} idle: this run uses one of {idle + 1}. Train on all of them by torchrun "
            f"--nproc-per-node {idle + 1} -m vitkit.tools.train …, or hide the others (CUDA_VISIBLE_DEVICES=0)."
        )


def prepare_run_dir(
    run_dir: Path, config: Config, device: torch.device, *, launches: Sequence[Launch], console: ConsoleCopy
) -> None:
    """Write the config, the launch command and the console output into the run's folder, from the main process."""
    if not is_main():
        return
    declare_output(run_dir)
    with writing_into(run_dir):
        mark_launch(run_dir, launches)
        save_config(config, run_dir / RUN_CONFIG)
        record_start(run_dir, device)
        console.begin(run_dir / CONSOLE_NAME)


def fit(
    run: TrainRun,
    *,
    validate: Validate | None = None,
    resume: Path | None = None,
    on_start: Callable[[], None] | None = None,
    hooks: Sequence[Hook] = (),
) -> Progress:
    """Train until `settings.epochs`, with evaluations and checkpoints in between.

    A run that is interrupted or killed at any moment and then resumed ends with the same weights as an uninterrupted
    one: a checkpoint holds the state between two optimizer steps, including the position in the epoch.

    Args:
        validate: takes the model to evaluate, returns metrics (an empty dict on ranks other than the main one).
        resume: a checkpoint of this run to resume from.
        on_start: called after that checkpoint was found to fit.
        hooks: hooks in addition to those of the settings.
    Raises:
        ConfigError: the disk has no room for the run's checkpoints.
        TrainingError: several steps in a row had a loss or gradient that is not finite, memory ran out, or the loader
            ended early.
        CheckpointError: `resume` does not fit this run, or the last state cannot be written.
        Interrupted: a signal requested the end, and the state is saved.
    """
    settings = run.settings
    run.hooks = default_hooks(settings, hooks)
    if resume:
        restore(run, resume)
    progress = run.progress
    warn_of_later_changes(run)
    run.checkpoints.check_disk_space()
    if on_start:
        on_start()
    if not resume:
        # So a run can be resumed from its very beginning, and a full disk is noticed before hours of training.
        run.checkpoints.save(progress, raise_on_error=True)

    with ExitStack() as contexts:
        for hook in run.hooks:
            contexts.enter_context(hook.during_training(run))
        if progress.epoch >= settings.epochs:
            print_line(f"nothing is left to train: epoch {settings.epochs} of {settings.epochs} is done")
        elif settings.compile:
            print_line("train.compile: the first step, and the first with images of another size, can take minutes")
        for epoch in range(progress.epoch, settings.epochs):
            if _should_end(run):
                break
            if epoch == settings.restart_epoch and not progress.restart_step:
                restart_from_best(run)
            train_epoch(run, epoch)
            best_before = progress.best
            is_due = (epoch + 1) % settings.eval_every == 0 or epoch + 1 == settings.epochs
            if validate and (is_due or _ends_epoch(run)):
                evaluate_epoch(run, validate)
            progress.epoch, progress.batch = epoch + 1, 0
            save_epoch(run, best_before)
    return progress


def restore(run: TrainRun, checkpoint: Path) -> None:
    """Restore the state of a run from one of its checkpoints."""
    run.progress = run.checkpoints.resume(
        checkpoint,
        steps_per_epoch=run.settings.steps_per_epoch(len(run.loader)),
        same_for_any_ranks=run.settings.images_per_step is not None,
    )
    _adjust_position(run)
    done = f"{run.progress.epoch} of {run.settings.epochs} epochs and {run.progress.batch} batches of the next are done"
    print_line(f"resumed from {checkpoint} after step {run.progress.step}: {done}")
    if run.ema is not None:
        restore_average(run)


def warn_of_later_changes(run: TrainRun) -> None:
    """Warn of changes, by the settings or in the criterion, at epochs that the run does not reach."""
    settings = run.settings
    if settings.restart_epoch is not None and settings.restart_epoch >= settings.epochs:
        logger.warning(
            f"train.restart_epoch={settings.restart_epoch}: the run ends before, with train.epochs={settings.epochs}, "
            "so it never returns to its best weights."
        )
    for name, module, changes_at in run.criterion.late_changes():
        if changes_at >= settings.epochs:
            logger.warning(
                f"criterion.{name} ({type(module).__name__}): it changes at epoch {changes_at}, and the run ends "
                f"before, with train.epochs={settings.epochs}. Lower that epoch in its settings, or train longer."
            )


def train_epoch(run: TrainRun, epoch: int) -> None:
    """Train on one epoch's batches, or on the rest of them after resuming, until a hook ends the epoch."""
    progress = run.progress
    run.loader.set_position(epoch, progress.batch)
    progress.num_batches = len(run.loader)
    progress.num_steps = run.settings.steps_per_epoch(progress.num_batches)
    if progress.batch == 0:
        for meter in run.meters.values():
            meter.reset()
    run.model.train()
    run.criterion.train()
    set_epoch(run.criterion, epoch)
    run.guard.watch()
    for hook in run.hooks:
        hook.before_epoch(run)
    batches = iter(run.loader)
    while progress.batch < progress.num_batches:
        step = next_step(run, batches)
        for hook in run.hooks:
            hook.after_step(run, step)
        save_step(run, step.decision)
        if _ends_epoch(run):
            break
    for hook in run.hooks:
        hook.after_epoch(run)


def next_step(run: TrainRun, batches: Iterator[Batch]) -> Step:
    """Take the run's next step, on the batches that follow in its epoch."""
    return train_step(
        run.model,
        run.criterion,
        batches,
        min(run.settings.accumulate, run.progress.num_batches - run.progress.batch),
        wrapped_model=run.wrapped_model,
        parameters=run.parameters,
        autocast=run.autocast,
        optimizer=run.optimizer,
        schedule=run.schedule,
        scaler=run.scaler,
        ema=run.ema,
        guard=run.guard,
        progress=run.progress,
        settings=run.settings,
        device=run.device,
    )


def save_step(run: TrainRun, decision: Decision) -> None:
    """Save the state after a step if a save is due, or the run ends here.

    Raises:
        Interrupted: a signal requested the end, and the state is saved.
    """
    every = run.settings.save_every_steps
    is_due = decision.take and every is not None and run.progress.step % every == 0
    if decision.save or decision.stop or is_due:
        run.checkpoints.save(run.progress, raise_on_error=decision.stop)
    if decision.stop:
        raise Interrupted(run.guard.stop_signal or signal.SIGTERM)  # another rank may have received the signal


def evaluate_epoch(run: TrainRun, validate: Validate) -> None:
    """Evaluate the weights, or their moving average."""
    model = run.model if run.ema is None else run.ema.module
    # Running statistics differ between ranks; they must be the same in the evaluation and in the checkpoint.
    for buffer in model.buffers():
        broadcast(buffer)
    train_metrics = {f"train_{name}": meter.compute(run.device)[0] for name, meter in run.meters.items()}
    with ExitStack() as contexts:
        for hook in run.hooks:
            contexts.enter_context(hook.during_evaluation(run))
        metrics = validate(model)
    metrics = broadcast_object(metrics) | train_metrics
    for hook in run.hooks:
        hook.after_evaluation(run, metrics)


def save_epoch(run: TrainRun, best_before: float) -> None:
    """Save the state after an epoch, also as best.pth if its evaluation has reached the best metric."""
    progress = run.progress
    is_best = progress.best > -math.inf and progress.best_step == progress.step
    is_last = progress.epoch == run.settings.epochs or _should_end(run)
    written = run.checkpoints.save(progress, is_best=is_best, raise_on_error=is_last)
    if is_best and not broadcast_object(BEST_NAME in written):
        # These weights will have changed by the next save. Later evaluations are compared with the one in best.pth.
        progress.best = best_before


def _ends_epoch(run: TrainRun) -> bool:
    return any(hook.ends_epoch(run) for hook in run.hooks)


def _should_end(run: TrainRun) -> bool:
    return any(hook.should_end(run) for hook in run.hooks)


def _adjust_position(run: TrainRun) -> None:
    """Continue at the same fraction of the epoch if it has a different number of batches than in the saved run."""
    progress, settings = run.progress, run.settings
    if progress.batch == 0:
        return
    run.loader.set_position(progress.epoch, 0)
    now, before = len(run.loader), progress.num_batches
    if now != before:
        batch = progress.batch * now // before
        progress.batch = now if progress.batch == before else batch - batch % settings.accumulate
        if settings.images_per_step is not None and settings.steps_per_epoch(now) == progress.num_steps:
            return  # the same images of the same steps, on another number of ranks
        logger.warning(
            f"the epoch had {before} batches and has {now} now: it continues at batch {progress.batch}, and results "
            "will differ from an uninterrupted run."
        )
