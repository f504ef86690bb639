"""A run's state in files: what is saved, which file is the newest, and how a run goes on from one."""

import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from vitkit.checkpoint import (
    TEMPORARY_SUFFIX,
    link_checkpoint,
    read_checkpoint,
    rng_state,
    save_checkpoint,
    set_rng_state,
    shards_of,
)
from vitkit.distributed import broadcast_object, gather_objects, is_main, rank, world_size
from vitkit.engine.parallel import divided_state, is_sharded, load_state, state_of
from vitkit.errors import CheckpointError
from vitkit.logging import RatioMeter
from vitkit.shard_files import read_shards, write_shards
from vitkit.shards import SHARDS_SUFFIX, check_shards, join, split

logger = logging.getLogger("vitkit")
LAST_NAME, BEST_NAME = "last.pth", "best.pth"
STEP_NAME = "step_{:08d}.pth"
_STEP_PATTERN = "step_*.pth"
_OF_OTHER_STATES = (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError)
"""What objects raise that are given the state of another kind of object."""


@dataclass
class Progress:
    """How far a run is: what a checkpoint counts."""

    epoch: int = 0
    """Epochs that are complete, with their evaluation."""
    step: int = 0
    """Optimiser steps that are done."""
    best: float = -math.inf
    """The best metric so far."""
    worse_in_a_row: int = 0
    """Evaluations since then."""
    batch: int = 0
    """Batches of the next epoch that are done; a checkpoint is made after whole steps only."""
    num_batches: int = 0
    """Batches of that epoch."""
    bad_in_a_row: int = 0
    """Steps up to now that were skipped because something was not finite."""


class RunCheckpoints:
    """Saves a run's state in its folder, and puts it back.

    last.pth is the newest state and best.pth the best one. Each is written under another name and renamed, so that a
    run may be killed at any moment; older ones are removed only then.

    Args:
        parts: the objects of the run that have a state, by name; None for one that this run does not use.
        meters: of the criterion; every rank has its own sums.
        saved_with: plain values that every checkpoint shall hold.
        keep: how many of the newest are also kept as step_00001234.pth.
        device: where the meters count.
        sharded: of a divided model each rank writes its own parts, into a folder that the checkpoint names.
    """

    def __init__(
        self,
        run_dir: Path,
        parts: Mapping[str, Any],
        *,
        meters: Mapping[str, RatioMeter],
        saved_with: Mapping[str, Any],
        keep: int,
        device: torch.device,
        sharded: bool = False,
    ):
        self.run_dir = run_dir
        self.parts = {name: part for name, part in parts.items() if part is not None}
        self.meters = meters
        self.saved_with = saved_with
        self.keep = keep
        self.device = device
        self.sharded = sharded and is_sharded(parts["model"])

    def of_ranks(self) -> list[dict[str, Any]]:
        """What each rank has of its own, on the main process; an empty list elsewhere. All ranks call it."""
        sums = {name: meter.state_dict()["sums"] for name, meter in self.meters.items()}
        on_cpu = {name: None if value is None else value.cpu() for name, value in sums.items()}
        return gather_objects({"rng": rng_state(), "meters": on_cpu})

    def save(
        self,
        progress: Progress,
        *,
        is_best: bool = False,
        must: bool = False,
        of_ranks: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """All ranks call it; with `of_ranks`, and whole weights on every rank, the main process may do so alone.

        Args:
            is_best: make it best.pth, too.
            must: raise when it cannot be written. Otherwise that is said and training goes on: the checkpoint before
                is intact, and there may be room again for the next.
            of_ranks: the result of `of_ranks` from earlier; None for now.
        Raises:
            CheckpointError: see `must`.
        """
        if of_ranks is None:
            of_ranks = self.of_ranks()
        model = self.parts["model"]
        state = {name: state_of(part, model, whole=not self.sharded) for name, part in self.parts.items()}
        try:
            if self.sharded:
                state = self._write_shards(state, progress.step)
            if not is_main():
                return
            state |= {
                "progress": asdict(progress),
                "rng": [own["rng"] for own in of_ranks],
                "meters": [own["meters"] for own in of_ranks],
                **self.saved_with,
            }
            self._write(state, progress.step, is_best=is_best)
        except CheckpointError as error:
            if must:
                raise
            if is_main():
                logger.error("%s Training goes on; the next checkpoint is tried in its turn.", error)
        finally:
            # Of a checkpoint that was replaced, or could not be completed.
            if is_main():
                remove_unused_shards(self.run_dir)

    def _write_shards(self, state: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Writes the divided tensors; the rest of the state, with what reading them takes."""
        rest, divided = split({name: state[name] for name in ("model", "optimizer")})
        folder = broadcast_object(_free_folder(self.run_dir, step) if is_main() else None)
        temporary = folder.with_name(folder.name + TEMPORARY_SUFFIX)
        return {**state, **rest, "shards": write_shards(folder, divided, temporary=temporary)}

    def _write(self, state: Mapping[str, Any], step: int, *, is_best: bool) -> None:
        last = self.run_dir / LAST_NAME
        if self.keep:
            newest = self.run_dir / STEP_NAME.format(step)
            save_checkpoint(newest, state)
            link_checkpoint(newest, last)
        else:
            save_checkpoint(last, state)
        if is_best:
            link_checkpoint(last, self.run_dir / BEST_NAME)
        for old in _step_checkpoints(self.run_dir)[self.keep :] if self.keep else ():
            old.unlink(missing_ok=True)

    def resume(self, path: Path) -> Progress:
        """Puts back what `save` wrote. All ranks call it, and must see the same file.

        Raises:
            CheckpointError: the file does not fit this run, or ranks read different ones.
        """
        state = read_checkpoint(path, whole=not is_sharded(self.parts["model"]))
        lacking = [name for name in (*self.parts, "progress", "rng") if name not in state]
        if lacking:
            raise CheckpointError(
                f"{path}: cannot be resumed, it lacks {', '.join(lacking)}. Resume from a run's {LAST_NAME}, made with "
                "the same train.ema_decay; to start a new run from its weights use --init."
            )
        progress = _progress(path, state["progress"])
        if _lengths(state["schedule"]) != _lengths(self.parts["schedule"].state_dict()):
            raise CheckpointError(
                f"{path}: its learning rates were planned over another number of steps. Resume with the run's own "
                "train.epochs, batch size and number of images; to train longer start a new run from its weights by "
                "--init."
            )
        for name, part in self.parts.items():
            try:
                self._load(name, part, path, state)
            except _OF_OTHER_STATES as error:
                reason = " ".join(str(error).split())
                raise CheckpointError(
                    f"{path}: its {name} does not fit this config's ({reason}). Resume with the run's own config; to "
                    "start a new run from its weights use --init."
                ) from error
        _check_same(path, progress)
        if isinstance(self.parts.get("ema"), AveragedModel):
            self.parts["ema"].n_averaged.fill_(progress.step)
        try:
            self._resume_rank(path, state)
        except _OF_OTHER_STATES as error:
            raise CheckpointError(f"{path}: damaged: its random numbers or meters cannot be put back.") from error
        if is_main():
            remove_stale(self.run_dir)
        return progress

    def _load(self, name: str, part: Any, path: Path, state: Mapping[str, Any]) -> None:
        model, stored = self.parts["model"], state[name]
        if "shards" not in state or name not in ("model", "optimizer") or stored.get("divided"):
            load_state(part, stored, model)
            return
        divided = split({name: divided_state(part, model)})[1]
        read_shards(path, state["shards"], divided, below=f"{name}/")
        load_state(part, join({name: stored}, divided)[name], model, whole=False)

    def _resume_rank(self, path: Path, state: Mapping[str, Any]) -> None:
        if not state["rng"] or not isinstance(state["rng"], list):
            raise ValueError("of no rank")
        if len(state["rng"]) != world_size():
            logger.warning(
                "%s was saved by %d ranks, this run has %d: it goes on, but not as the same run would have.",
                path, len(state["rng"]), world_size(),
            )  # fmt: skip
            return
        set_rng_state(state["rng"][rank()])
        own = state.get("meters", [{}] * world_size())[rank()]
        for name, meter in self.meters.items():
            sums = own.get(name)
            meter.load_state_dict({"sums": None if sums is None else sums.to(self.device)})


def newest_checkpoint(folder: Path) -> Path | None:
    """The furthest checkpoint of a run that can be read; None if there is none.

    One that is damaged is said and passed over.
    """
    last, steps = folder / LAST_NAME, _step_checkpoints(folder)
    if last.is_file():
        reached = _reached(last)
        # A run that was killed right after it wrote a checkpoint had no time to give it its second name.
        if reached is not None and not any(_step_of(path) > reached for path in steps):
            return last
        steps = [path for path in steps if reached is None or _step_of(path) > reached]
    else:
        reached = None
    for path in steps:
        if _reached(path) is not None:
            return path
    if reached is not None:
        return last
    best = folder / BEST_NAME
    return best if best.is_file() and _reached(best) is not None else None


def remove_stale(folder: Path) -> None:
    """Removes what a killed run was writing."""
    for path in folder.glob(f"*.pth{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)
    for path in folder.glob(f"*{SHARDS_SUFFIX}{TEMPORARY_SUFFIX}"):
        shutil.rmtree(path, ignore_errors=True)
    remove_unused_shards(folder)


def remove_unused_shards(folder: Path) -> None:
    """Removes the folders of shards that no checkpoint names any more."""
    there = list(folder.glob(f"*{SHARDS_SUFFIX}"))
    if not there:
        return
    try:
        used = {shards_of(path) for path in folder.glob("*.pth")}
    except CheckpointError:
        return  # the damaged one may name any
    for path in there:
        if path.name not in used:
            shutil.rmtree(path, ignore_errors=True)


def _free_folder(run_dir: Path, step: int) -> Path:
    """For shards. A step may be saved twice, before and after its evaluation, and the first is in use then."""
    number, folder = 1, run_dir / f"step_{step:08d}{SHARDS_SUFFIX}"
    while folder.exists():
        number += 1
        folder = folder.with_name(f"step_{step:08d}-{number}{SHARDS_SUFFIX}")
    return folder


def _reached(path: Path) -> int | None:
    """The number of steps of a checkpoint; None if it cannot be read."""
    try:
        state = read_checkpoint(path, whole=False)
        if "shards" in state:
            check_shards(path, state["shards"], checksums=True)
        return int(state["progress"]["step"])
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        logger.warning("%s: passed over (%s)", path, error)
        return None


def _step_checkpoints(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob(_STEP_PATTERN), key=_step_of, reverse=True)


def _step_of(path: Path) -> int:
    number = path.stem.rpartition("_")[2]
    return int(number) if number.isdecimal() else -1


def _progress(path: Path, saved: Any) -> Progress:
    try:
        progress = Progress(**saved) if {"epoch", "step", "batch"} <= saved.keys() else None
    except (TypeError, AttributeError):
        progress = None
    if progress is None or not all(type(value) in (int, float) for value in asdict(progress).values()):
        raise CheckpointError(f"{path}: damaged: its progress is {str(saved)[:100]}. Resume from another checkpoint.")
    return progress


def _check_same(path: Path, progress: Progress) -> None:
    """That all ranks have read the same state: each opens the path by itself."""
    found = gather_objects((os.fspath(path), progress.step, progress.epoch, progress.batch))
    different = [(number, own) for number, own in enumerate(found) if own[1:] != found[0][1:]]
    if different:
        number, own = different[0]
        raise CheckpointError(
            f"{path}: rank 0 reads one of {found[0][1]} steps there, rank {number} one of {own[1]}. The run's folder "
            "must be the same on all machines."
        )


def _lengths(schedule_state: Mapping[str, Any]) -> list:
    """The numbers of steps that a schedule of torch, or a sequence of them, was built with."""
    if not isinstance(schedule_state, Mapping):
        return [schedule_state]
    own = [schedule_state[name] for name in ("T_max", "total_iters", "milestones") if name in schedule_state]
    inner = schedule_state.get("_schedulers")
    return own + [_lengths(state) for state in inner] if isinstance(inner, list) else own
