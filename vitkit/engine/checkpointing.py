"""Saves a run's state to files, finds the newest file, and resumes a run from it."""

import json
import logging
import math
import random
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vitkit.devices import accelerator_rng_state, set_accelerator_rng_state
from vitkit.distributed import RatioMeter, broadcast_object, failing_together, gather_objects, is_main, rank, world_size
from vitkit.engine.parallel import is_sharded, load_state, local_state, state_of
from vitkit.errors import CheckpointError, ConfigError
from vitkit.io.atomic import TEMPORARY_SUFFIX
from vitkit.ops.images import pixel_statistics
from vitkit.protocols.model import Model
from vitkit.text_format import pluralize
from vitkit.weights import link_checkpoint, read_checkpoint, save_checkpoint
from vitkit.weights.contents import LORA, PIXELS, state_dict_of
from vitkit.weights.locate import BACKBONE_WEIGHTS, BEST_NAME, LAST_NAME
from vitkit.weights.reading import SHARDS_SUFFIX, find_shards_folder
from vitkit.weights.sharded import check_shards, read_local, write_shards

logger = logging.getLogger("vitkit")
STEP_NAME = "step_{:08d}.pth"
_STEP_PATTERN = "step_*.pth"
_WEIGHTS = {"model", "ema"}
"""The parts that are weights, or their average."""
_UNFIT_STATE_ERRORS = (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError)
"""The errors that objects raise when given the state of another kind of object."""


@dataclass
class Progress:
    """The progress of a run, as counted in checkpoints."""

    epoch: int = 0
    """Number of completed epochs, including their evaluation."""
    step: int = 0
    """Number of optimizer steps taken."""
    best: float = -math.inf
    """The best metric so far, negated if lower is better."""
    best_step: int = 0
    """Number of optimizer steps at the last evaluation with that value, whose weights are the best."""
    worse_in_a_row: int = 0
    """Number of evaluations since the best one."""
    best_metric: str = ""
    """Name of the metric that `best` is a value of; empty before the first evaluation."""
    val_data: str = ""
    """The data that `best` was measured on, see `TrainRun`."""
    batch: int = 0
    """Number of batches done in the next epoch; checkpoints are only made after complete steps."""
    num_batches: int = 0
    """Number of batches in that epoch."""
    num_steps: int = 0
    """Number of optimizer steps in that epoch."""
    bad_in_a_row: int = 0
    """Number of the latest consecutive steps that were skipped because something was not finite."""
    restart_step: int = 0
    """Number of optimizer steps that had been taken at the return to the best weights; 0 before it."""


@dataclass
class RunCheckpoints:
    """Saves a run's state in its folder, and restores it.

    last.pth is the newest state; best.pth has only the weights with the best metric, those of the moving average if
    there is one. A model that learns a backbone for others has `trained_backbone`, whose newest weights are in
    backbone.pth. A run may be killed at any moment: each file is written under another name and then renamed, and older
    ones are only removed afterwards.
    """

    run_dir: Path
    parts: Mapping[str, Any]
    """The objects of the run that have a state, by name; None for those that this run does not use."""
    _: KW_ONLY
    meters: Mapping[str, RatioMeter]
    """The criterion's meters; every rank has its own sums."""
    saved_with: Mapping[str, Any]
    """Plain values to store in every checkpoint."""
    measured: dict[str, Any] = field(default_factory=dict)
    """Plain values that evaluations change; resuming restores them."""
    keep: int
    """Number of the newest checkpoints that are also kept as step_00001234.pth."""
    device: torch.device
    """The device that the meters are on."""
    sharded: bool = False
    """Whether each rank writes its shards of a sharded model, into a folder that the checkpoint names."""
    owns_folder: Callable[[], bool] = lambda: True
    """Whether the folder still belongs to this run, and was not removed or replaced."""

    def __post_init__(self) -> None:
        self.parts = {name: part for name, part in self.parts.items() if part is not None}
        self.sharded = self.sharded and is_sharded(self.parts["model"])
        self.saved_at = time.monotonic()
        """Time of the last save, or of the beginning, by `time.monotonic`."""

    def check_disk_space(self) -> None:
        """Check, before a run, that the disk has room for its checkpoints; only the main process does.

        Raises:
            ConfigError: there is less room than they need.
        """
        if not is_main():
            return
        folder = next(path for path in (self.run_dir.absolute(), *self.run_dir.absolute().parents) if path.exists())
        try:
            disk = shutil.disk_usage(folder)
            room = disk.free + _size_of_checkpoints(self.run_dir)
        except OSError:
            return
        model = self.parts["model"]
        weights = _num_bytes([*model.parameters(), *model.buffers()])
        # The first checkpoint is smaller than the later ones, as the optimizer has no state yet.
        state = optimizer_state_bytes(self.parts["optimizer"])
        full = weights + state + (weights if "ema" in self.parts else 0)
        # A checkpoint is written before the one that it replaces is removed, so for a moment there is one more.
        number = max(1, self.keep) + 1
        needed = number * full + weights
        if disk.total and room < needed:  # some network disks report a total size of 0 bytes
            average = " and their average" if "ema" in self.parts else ""
            raise ConfigError(
                f"{self.run_dir}: its disk has {_format(room)} for checkpoints, and they will take {_format(needed)}: "
                f"{number} of {_format(full)} (weights{average}, and {_format(state)} of the optimizer's state), one "
                f"being written, and the best weights. Free some space, choose another folder with --run-dir, or keep "
                f"fewer (train.keep_checkpoints={self.keep})."
            )

    def per_rank_state(self) -> list[dict[str, Any]]:
        """Return the state that differs between ranks, on the main process; an empty list elsewhere.

        All ranks must call it.
        """
        sums = {name: meter.state_dict()["sums"] for name, meter in self.meters.items()}
        on_cpu = {name: None if value is None else value.cpu() for name, value in sums.items()}
        return gather_objects({"rng": rng_state(), "meters": on_cpu})

    def save(
        self,
        progress: Progress,
        *,
        is_best: bool = False,
        raise_on_error: bool = False,
        per_rank: Sequence[Mapping[str, Any]] | None = None,
    ) -> set[str]:
        """Write last.pth. All ranks must call it, or only the main one if it has `per_rank` and all ranks have full
        weights.

        Args:
            is_best: also write best.pth, and do so first: a run that is killed between the two then evaluates again.
            raise_on_error: raise if the state cannot be written. Otherwise the error is logged and training continues:
                the previous checkpoint is intact, and there may be room for the next one.
            per_rank: an earlier result of `per_rank_state`; None: the current state.
        Returns:
            the names out of best.pth, backbone.pth and last.pth that were written, on the main process.
        Raises:
            CheckpointError: see `raise_on_error`, or the folder no longer belongs to this run.
        """
        if per_rank is None:
            per_rank = self.per_rank_state()
        measured = {"measured": dict(self.measured)} if self.measured else {}
        values = {"progress": asdict(progress), **measured, **self.saved_with}
        per_rank_lists = {name: [state[name] for state in per_rank] for name in ("rng", "meters")}
        files = {LAST_NAME: (self.parts, values | per_rank_lists)}
        averaged = self.parts["ema"].module if "ema" in self.parts else self.parts["model"]
        if isinstance(averaged, Model) and (trained := averaged.trained_backbone) is not None:
            statistics = {name: list(of_channels) for name, of_channels in pixel_statistics(trained).items()}
            files = {BACKBONE_WEIGHTS: ({"model": trained}, values | {PIXELS: statistics}), **files}
        if is_best:
            files = {BEST_NAME: ({"model": self.parts.get("ema", self.parts["model"])}, values), **files}
        written: set[str] = set()
        failure = None
        if is_main() and not self.owns_folder():
            failure = f"{self.run_dir}: was removed, or replaced by another run's, while this run was training."
        failure = self._agree(failure)
        is_lost = failure is not None
        for name, (parts, other_values) in files.items():
            if failure is None:
                failure = self._agree(self._write(name, parts, other_values))
                written |= set() if failure else {name}
        if is_main() and not is_lost:
            # These are shards of a checkpoint that was replaced, or that could not be completed.
            remove_unused_shards(self.run_dir)
        if failure is not None and (raise_on_error or is_lost):
            raise CheckpointError(failure)
        if failure is not None and is_main():
            logger.error("%s Training continues, and the next save tries again.", failure)
        self.saved_at = time.monotonic()
        return written

    def _agree(self, failure: str | None) -> str | None:
        """Broadcast the main process's failure if all ranks save together."""
        # All ranks must react in the same way.
        return broadcast_object(failure) if is_sharded(self.parts["model"]) else failure

    def _write(self, name: str, parts: Mapping[str, Any], values: Mapping[str, Any]) -> str | None:
        """Write the parts' states and other values; return the issue, if any. All ranks must call it."""
        step = values["progress"]["step"]
        try:
            state = self._gather(parts, step, full=name == BACKBONE_WEIGHTS or not self.sharded) | values
            if is_main() and name == LAST_NAME and self.keep:
                self._write_kept(state, step)
            elif is_main():
                save_checkpoint(self.run_dir / name, state)
        except CheckpointError as error:
            return str(error)
        return None

    def _gather(self, parts: Mapping[str, Any], step: int, *, full: bool) -> dict[str, Any]:
        """Return the parts' states for a file; unless they are to be full, shards are written to a folder beside it.
        All ranks must call it."""
        model = self.parts["model"]
        state = {name: state_of(part, model, full=full) for name, part in parts.items()}
        if full:
            return state
        return write_shards(broadcast_object(_free_folder(self.run_dir, step) if is_main() else None), state)

    def _write_kept(self, state: Mapping[str, Any], step: int) -> None:
        newest = self.run_dir / STEP_NAME.format(step)
        save_checkpoint(newest, state)
        link_checkpoint(newest, self.run_dir / LAST_NAME)
        for old in _step_checkpoints(self.run_dir)[self.keep :]:
            with suppress(OSError):
                old.unlink()

    def resume(self, path: Path, *, steps_per_epoch: int, same_for_any_ranks: bool = False) -> Progress:
        """Restore what `save` wrote. All ranks must call it, and must see the same file.

        If the run now has another number of epochs, its schedule continues at the same step; if epochs have another
        number of steps, as with another number of processes, after the same fraction of an epoch.

        Args:
            same_for_any_ranks: whether steps do not depend on the number of ranks (`train.images_per_step`).
        Raises:
            CheckpointError: the file does not fit this run, or ranks have read different files.
        """
        with failing_together():
            state, progress = self._restore_parts(path, steps_per_epoch)
        _check_same(path, progress)
        measured = state.get("measured")
        self.measured.update(measured if isinstance(measured, Mapping) else {})
        try:
            self._load_per_rank(path, state, same_for_any_ranks)
        except _UNFIT_STATE_ERRORS as error:
            raise CheckpointError(f"{path}: damaged: its random numbers or meters cannot be restored.") from error
        if is_main():
            remove_stale(self.run_dir)
        return progress

    def _restore_parts(self, path: Path, steps_per_epoch: int) -> tuple[dict[str, Any], Progress]:
        """Restore what is the same on all ranks; return the checkpoint's content and progress."""
        state = read_checkpoint(path, with_shards=not is_sharded(self.parts["model"]))
        lacking = [name for name in (*self.parts, "progress", "rng") if name not in state]
        if lacking:
            raise CheckpointError(
                f"{path}: cannot be resumed, it lacks {', '.join(lacking)}. Resume from a run's {LAST_NAME} with "
                "the same train.ema_decay; to start a new run from its weights, use --init."
            )
        if LORA in state:
            state_dict_of(state, str(path))  # raises if it lacks the weights beside the pairs, as old files do
        progress = _progress(path, state["progress"])
        has_other_length = _lengths(state["schedule"]) != _lengths(self.parts["schedule"].state_dict())
        rates = [group["lr"] for group in self.parts["optimizer"].param_groups]
        for name, part in self.parts.items():
            try:
                if name == "schedule" and has_other_length:
                    _advance(part, rates, _equivalent_steps(path, state[name], progress, steps_per_epoch))
                else:
                    self._load(name, part, path, state)
            except _UNFIT_STATE_ERRORS as error:
                reason = " ".join(str(error).split())
                raise CheckpointError(
                    f"{path}: its {name} does not fit this config's ({reason}). Resume with the run's own config; to "
                    "start a new run from its weights use --init."
                ) from error
        return state, progress

    def _load(self, name: str, part: Any, path: Path, state: Mapping[str, Any]) -> None:
        model, stored = self.parts["model"], state[name]
        # A sharded model's optimizer has no state before its first step.
        in_shards = "shards" in state and (name in _WEIGHTS or (name == "optimizer" and "state" in stored))
        if in_shards:
            stored = read_local(path, state, name, local_state(part, model))
        load_state(part, stored, model, full=not in_shards)

    def _load_per_rank(self, path: Path, state: Mapping[str, Any], same_for_any_ranks: bool) -> None:
        if not state["rng"] or not isinstance(state["rng"], list):
            raise ValueError("it has no per-rank state")
        saved_by = len(state["rng"])
        meters = state.get("meters", [{}] * saved_by)
        if len(meters) != saved_by:
            raise ValueError("its meters are not those of its ranks")
        if saved_by == world_size():
            set_rng_state(state["rng"][rank()])
            meters = meters[rank() : rank() + 1]
        else:
            meters = meters if is_main() else []
            effect = (
                "steps, data and random numbers stay the same (train.images_per_step)."
                if same_for_any_ranks
                else "it continues, but results will differ from an uninterrupted run. A run that is started with "
                "train.images_per_step has the same steps on any number of them."
            )
            saved_by_ranks = pluralize(saved_by, "ranks")
            logger.warning("%s was saved by %s, this run has %d: %s", path, saved_by_ranks, world_size(), effect)
        for name, meter in self.meters.items():
            sums = [of_rank[name].to(self.device) for of_rank in meters if of_rank.get(name) is not None]
            meter.load_state_dict({"sums": sum(sums[1:], start=sums[0]) if sums else None})


def find_newest_checkpoint(folder: Path) -> Path | None:
    """Return the most advanced checkpoint of a run that can be read and resumed from; None if there is none.

    Damaged checkpoints are logged and skipped. best.pth is not considered.
    """
    last, steps = folder / LAST_NAME, _step_checkpoints(folder)
    reached = _count_steps(last) if last.is_file() else None
    # A run that was killed right after writing a checkpoint may not have given it its second name.
    for path in steps:
        if (reached is None or _step_of(path) > reached) and _count_steps(path) is not None:
            return path
    return None if reached is None else last


def remove_stale(folder: Path) -> None:
    """Remove the incomplete files that a killed run left."""
    for path in folder.glob(f"*.pth*{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)
    for path in folder.glob(f"*{SHARDS_SUFFIX}{TEMPORARY_SUFFIX}"):
        shutil.rmtree(path, ignore_errors=True)
    remove_unused_shards(folder)


def remove_unused_shards(folder: Path) -> None:
    """Remove the folders of shards that no checkpoint refers to any more."""
    shard_folders = list(folder.glob(f"*{SHARDS_SUFFIX}"))
    if not shard_folders:
        return
    try:
        # last.pth is another name of the newest step's file.
        files = {_identity(path): path for path in sorted(folder.glob("*.pth"))}
        used = {_shards_folder_of(path, identity) for identity, path in files.items()}
    except CheckpointError:
        return  # the damaged checkpoint may refer to any of them
    for path in shard_folders:
        if path.name not in used:
            shutil.rmtree(path, ignore_errors=True)


@lru_cache(maxsize=64)
def _shards_folder_of(path: Path, identity: tuple[int, ...]) -> str | None:
    """Return `find_shards_folder(path)`, for which a file is read only once: it takes a tenth of a second or more."""
    return find_shards_folder(path)


def _identity(path: Path) -> tuple[int, ...]:
    """Return numbers that change when a file is written."""
    file = path.stat()
    return file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns


def optimizer_state_bytes(optimizer: Optimizer) -> int:
    """Return the size of an optimizer's state in bytes, or an estimate of it before the first step.

    Optimizers other than SGD and Adam, such as a user's own, are counted as Adam.
    """
    state = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    if state:
        return _num_bytes(state)
    return sum(_num_states(group) * _num_bytes(group["params"]) for group in optimizer.param_groups)


def _num_states(group: Mapping[str, Any]) -> int:
    """Return the number of tensors of each parameter's size that the state of a group will have."""
    if "momentum" in group and "betas" not in group:
        return int(group["momentum"] > 0)
    return 2 + bool(group.get("amsgrad"))


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _size_of_checkpoints(folder: Path) -> int:
    """Return the bytes of a resumed run's checkpoints, which new ones will replace; hard links count once."""
    paths = [path for pattern in ("*.pth*", "*.shards*/*") for path in folder.glob(pattern)]
    files = [path.stat() for path in paths if path.is_file()]
    return sum({(file.st_dev, file.st_ino): file.st_size for file in files}.values())


def _format(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.2f} MiB"


def _free_folder(run_dir: Path, step: int) -> Path:
    """Return an unused name for shards. A step may be saved several times, while the first folder is still in use."""
    number, folder = 1, run_dir / f"step_{step:08d}{SHARDS_SUFFIX}"
    while folder.exists():
        number += 1
        folder = folder.with_name(f"step_{step:08d}-{number}{SHARDS_SUFFIX}")
    return folder


def _count_steps(path: Path) -> int | None:
    """Return the number of steps of a checkpoint, or None if it cannot be read."""
    try:
        state = read_checkpoint(path, with_shards=False)
        if "shards" in state:
            check_shards(path, state["shards"], checksums=True)
        return int(state["progress"]["step"])
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        logger.warning("%s: skipped (%s)", path, error)
        return None


def _step_checkpoints(folder: Path) -> list[Path]:
    """Return the step_*.pth checkpoints, newest first."""
    return sorted(folder.glob(_STEP_PATTERN), key=_step_of, reverse=True)


def _step_of(path: Path) -> int:
    number = path.stem.rpartition("_")[2]
    return int(number) if number.isdecimal() else -1


def _progress(path: Path, saved: Any) -> Progress:
    try:
        progress = Progress(**saved) if {"epoch", "step", "batch"} <= saved.keys() else None
    except (TypeError, AttributeError):
        progress = None
    defaults = asdict(Progress())
    if progress is None or not all(_is_like(value, defaults[name]) for name, value in asdict(progress).items()):
        raise CheckpointError(f"{path}: damaged: its progress is {str(saved)[:100]}. Resume from another checkpoint.")
    return progress


def _is_like(value: Any, default: int | float | str) -> bool:
    return isinstance(value, str) if isinstance(default, str) else type(value) in (int, float)


def _check_same(path: Path, progress: Progress) -> None:
    """Check that all ranks have read the same state."""
    # Each rank opens the path by itself, which may be another folder on another machine.
    per_rank = gather_objects((progress.step, progress.epoch, progress.batch))
    different = [(number, position) for number, position in enumerate(per_rank) if position != per_rank[0]]
    if different:
        number, position = different[0]
        raise CheckpointError(
            f"{path}: rank 0 has read a checkpoint of step {per_rank[0][0]}, rank {number} one of step {position[0]}. "
            "The run's folder must be the same on all machines."
        )


def _lengths(schedule_state: Mapping[str, Any]) -> list:
    """Return the numbers of steps that a torch schedule, or a sequence of schedules, was built with."""
    if not isinstance(schedule_state, Mapping):
        return [schedule_state]
    names = ("T_max", "T_0", "total_iters", "total_steps", "step_size", "milestones", "warmup_steps")
    lengths = [schedule_state[name] for name in names if name in schedule_state]
    inner = schedule_state.get("_schedulers")
    return lengths + [_lengths(state) for state in inner] if isinstance(inner, list) else lengths


def _equivalent_steps(path: Path, schedule: Mapping[str, Any], progress: Progress, steps_per_epoch: int) -> int:
    """Return the steps of the new length that a saved schedule has taken; say so if epochs have another length."""
    steps = schedule["last_epoch"]
    if progress.num_steps in (0, steps_per_epoch):
        return steps
    now = round(steps * steps_per_epoch / progress.num_steps)
    logger.warning(
        f"{path}: an epoch had {pluralize(progress.num_steps, 'steps')} and has {steps_per_epoch} now: the "
        f"learning-rate schedule continues at step {now} in place of {steps}, after the same fraction of the run."
    )
    return now


def _advance(schedule: LRScheduler, rates: Sequence[float], steps: int) -> None:
    """Bring a new schedule, which began with the given rates, to its state after a number of steps."""
    # Some schedules multiply the current rates, so every step is taken.
    for group, rate in zip(schedule.optimizer.param_groups, rates):
        group["lr"] = rate
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch expects a step of the optimizer before each
        for _ in range(steps):
            schedule.step()


def rng_state() -> dict[str, Any]:
    """Return the state of every global random number generator of this process, as tensors and plain values."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": accelerator_rng_state(),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "python": json.dumps(random.getstate()),
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the state that `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    set_accelerator_rng_state(state["cuda"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = json.loads(state["python"])
    random.setstate((version, tuple(internal), gauss))
