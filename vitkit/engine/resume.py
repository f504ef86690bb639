"""Determines what may change in a resumed run, finds the run of a repeated launch, and formats the resume command."""

import logging
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitkit.config import cfg_diff, value_at
from vitkit.config.schema import MISSING
from vitkit.distributed import world_size
from vitkit.engine.checkpoints import LAST_NAME
from vitkit.errors import ConfigError

logger = logging.getLogger("vitkit")
_LAUNCH_NAME = ".launch"
_AGENT = "torchrun "

# Their saved states contain these values: a change would have no effect, or would not fit.
_FIXED = ("optimizer", "schedule", "train.strategy")
_WITHOUT_EFFECT_ON_STEPS = (
    "data.val",
    "data.test",
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
    """Warn about changed keys in a run's config, and explain the effects.

    Raises:
        ConfigError: one of the changed keys must not change.
    """
    changed = {key: f"{key}: {_text_at(saved, key)} -> {_text_at(config, key)}" for key in cfg_diff(saved, config)}
    fixed = {key: text for key, text in changed.items() if _is_in(key, _FIXED)}
    for key, text in changed.items():
        if _is_in(key, _WITHOUT_EFFECT_ON_STEPS):
            logger.warning("resuming with a changed %s (allowed; each step trains as before)", text)
        elif key not in fixed:
            logger.warning("resuming with a changed %s (allowed; from here on it is another run than before)", text)
    if fixed:
        raise ConfigError(
            f"--resume {run_dir}: {', '.join(fixed)} cannot change when a run is resumed "
            f"({'; '.join(fixed.values())}). To train on with other values start a new run from its weights: "
            f"--init {run_dir / LAST_NAME}."
        )


def _is_in(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)


def _text_at(config: Mapping[str, Any], key: str) -> str:
    value = value_at(config, key, MISSING)
    return "not set" if value is MISSING else repr(value)


class Launch(NamedTuple):
    """How this process was launched."""

    names: frozenset[str]
    """Names that stay the same when the launch is repeated, but differ between launches."""
    is_repeated: bool
    """Whether torchrun (--max-restarts) or Slurm (--requeue) reports that the same command is running again."""


def current_launch() -> Launch:
    """Return how this process was launched."""
    names = set()
    if "SLURM_JOB_ID" in os.environ:
        names.add(f"slurm {os.environ['SLURM_JOB_ID']} {os.environ.get('SLURM_STEP_ID', '')}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        names.add(f"{_AGENT}{os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {os.getppid()}")
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return Launch(frozenset(names), any(int(os.environ.get(name) or 0) > 0 for name in counts))


def mark_launch(run_dir: Path, launches: Sequence[Launch]) -> None:
    """Record in the run's folder which launches started it, so that a repeated launch finds it again."""
    names = sorted(frozenset().union(*(launch.names for launch in launches)))
    if names:
        (run_dir / _LAUNCH_NAME).write_text("\n".join(names), encoding="utf-8")


def repeated_run(launches: Sequence[Launch], *, run_dir: Path | None, default: Path) -> Path | None:
    """Return the folder of the run that these launches started earlier, or None for a new run."""
    names = frozenset().union(*(launch.names for launch in launches))
    is_repeated = any(launch.is_repeated for launch in launches)
    marks = default.parent.glob(f"{default.name}*/{_LAUNCH_NAME}")
    for folder in [run_dir] if run_dir else sorted(mark.parent for mark in marks):
        mark = folder / _LAUNCH_NAME
        common = names & set(mark.read_text(encoding="utf-8").splitlines()) if mark.is_file() else frozenset()
        # If a process of another machine failed or rejoined, torchrun's agent restarts its own processes without
        # counting a restart; but it is the same agent that started them before.
        if (is_repeated and (run_dir or common)) or any(name.startswith(_AGENT) for name in common):
            return folder
    return None


def resume_command(run_dir: Path, *arguments: str) -> str:
    """Return the command that resumes the run in `run_dir`, when typed in the folder where this process was started."""
    tool = [sys.argv[0]] if Path(sys.argv[0]).name == "train.py" else ["-m", "vitkit.tools.train"]
    command, note = ["python", *tool], ""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local, nodes = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("GROUP_WORLD_SIZE", 1))
        across = ["--nnodes", str(nodes)] if nodes > 1 else []
        command = ["torchrun", *across, "--nproc-per-node", str(local), *tool]
        note = "    (with the --rdzv options as before)" if nodes > 1 else ""
    else:
        if sys.argv[0] == "vitkit train" and shutil.which("vitkit"):
            command = ["vitkit", "train"]
        if world_size() > 1:
            command = ["srun", *command]
    return shlex.join([*command, "--resume", str(run_dir), *arguments]) + note
