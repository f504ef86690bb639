"""How a run comes to go on: the folder it is found in, what may have changed, and the command that does it."""

import logging
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitkit.config import cfg_diff
from vitkit.distributed import world_size
from vitkit.engine.checkpoints import LAST_NAME
from vitkit.errors import ConfigError

logger = logging.getLogger("vitkit")
_LAUNCH_NAME = ".launch"
_AGENT = "torchrun "
_UNSET = "not set"

# Their saved states hold these values, so that a change would be without effect, or would not fit.
_FIXED = ("optimizer", "schedule", "train.strategy")
_BESIDE_TRAINING = (
    "data.val",
    "data.root",
    "data.num_workers",
    "data.pin_memory",
    "data.val_images_per_gpu",
    "evaluator",
    "train.epochs",
    "train.log_every",
    "train.eval_every",
    "train.best_metric",
    "train.patience",
    "train.save_every_minutes",
    "train.save_every_steps",
    "train.keep_checkpoints",
    "train.sharded_checkpoints",
    "train.activation_checkpointing",
)


def report_changes(run_dir: Path, saved: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Says which keys of a run's config have changed, and what that means.

    Raises:
        ConfigError: one of them cannot change.
    """
    changed = {key: f"{key}: {_at(saved, key)} -> {_at(config, key)}" for key in cfg_diff(saved, config)}
    fixed = [text for key, text in changed.items() if _is_in(key, _FIXED)]
    for key, text in changed.items():
        if _is_in(key, _BESIDE_TRAINING):
            logger.warning("resuming with a changed %s (allowed; each step trains as before)", text)
        elif not _is_in(key, _FIXED):
            logger.warning("resuming with a changed %s (allowed; from here on it is another run than before)", text)
    if fixed:
        names = ", ".join(key for key in changed if _is_in(key, _FIXED))
        raise ConfigError(
            f"--resume {run_dir}: {names} cannot change while a run goes on ({'; '.join(fixed)}). To train on with "
            f"other values start a new run from its weights: --init {run_dir / LAST_NAME}."
        )


def _is_in(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)


def _at(config: Any, key: str) -> str:
    for part in key.split("."):
        try:
            config = config[int(part)] if isinstance(config, list | tuple) else config[part]
        except (KeyError, IndexError, TypeError, ValueError):
            return _UNSET
    return repr(config)


class Launch(NamedTuple):
    """How a process was started."""

    names: frozenset[str]
    """Each stays the same when the launch is repeated, and is another for each launch."""
    repeated: bool
    """Whether torchrun (--max-restarts) or Slurm (--requeue) says that the same command runs again."""


def launch_of_process() -> Launch:
    names = set()
    if "SLURM_JOB_ID" in os.environ:
        names.add(f"slurm {os.environ['SLURM_JOB_ID']} {os.environ.get('SLURM_STEP_ID', '')}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        names.add(f"{_AGENT}{os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {os.getppid()}")
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return Launch(frozenset(names), any(int(os.environ.get(name) or 0) > 0 for name in counts))


def mark_launch(run_dir: Path, launches: Sequence[Launch]) -> None:
    """Notes who has started a run, by which `restarted_run` knows it again."""
    names = sorted(frozenset().union(*(launch.names for launch in launches)))
    if names:
        (run_dir / _LAUNCH_NAME).write_text("\n".join(names), encoding="utf-8")


def restarted_run(launches: Sequence[Launch], *, run_dir: Path | None, base: Path) -> Path | None:
    """The folder of the run that is started again; None: it is a new one.

    Args:
        launches: of all ranks.
        run_dir: where the run shall be; None: in `base`, or a numbered folder beside it.
    """
    names = frozenset().union(*(launch.names for launch in launches))
    repeated = any(launch.repeated for launch in launches)
    for folder in [run_dir] if run_dir else sorted(m.parent for m in base.parent.glob(f"{base.name}*/{_LAUNCH_NAME}")):
        mark = folder / _LAUNCH_NAME
        ours = names & set(mark.read_text(encoding="utf-8").splitlines()) if mark.is_file() else frozenset()
        # Where a process of another machine failed, or joined anew, torchrun's agent starts its own again and counts
        # no restart; but it is the agent that started them before.
        if (repeated and (run_dir or ours)) or any(name.startswith(_AGENT) for name in ours):
            return folder
    return None


def resume_command(run_dir: Path, *arguments: str) -> str:
    """What to type so that the run in `run_dir` goes on."""
    program = sys.argv[0] if sys.argv[0].endswith(".py") else "tools/train.py"
    launcher = "python"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local, nodes = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("GROUP_WORLD_SIZE", 1))
        launcher = f"torchrun --nproc-per-node {local}"
        if nodes > 1:
            launcher = f"torchrun --nnodes {nodes} --nproc-per-node {local} (and the --rdzv options as before)"
    elif world_size() > 1:
        launcher = "srun python"
    return " ".join([launcher, *map(shlex.quote, [program, "--resume", str(run_dir), *arguments])])
