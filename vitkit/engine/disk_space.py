"""Checks that a run's checkpoints fit on the disk; the first one is smaller, as the optimiser has no state yet."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from vitkit.distributed import is_main
from vitkit.engine.run import TrainRun
from vitkit.errors import ConfigError


def check_disk_space(run: TrainRun) -> None:
    """Check, before a run, that the disk has room for its checkpoints; only the main process does.

    A checkpoint is written before the one that it replaces is removed, so for a moment there is one more of them.

    Raises:
        ConfigError: there is less room than they need.
    """
    if not is_main():
        return
    folder = next(path for path in (run.run_dir.absolute(), *run.run_dir.absolute().parents) if path.exists())
    try:
        disk = shutil.disk_usage(folder)
        present = _size_of_checkpoints(run.run_dir)
    except OSError:
        return
    weights = _num_bytes([*run.model.parameters(), *run.model.buffers()])
    state = optimizer_state_bytes(run.optimizer)
    full = weights + state + (weights if run.ema is not None else 0)
    number = max(1, run.settings.keep_checkpoints) + 1
    needed = number * full + weights
    if disk.total and disk.free + present < needed:  # some network disks report a total size of 0 bytes
        average = " and their average" if run.ema is not None else ""
        raise ConfigError(
            f"{run.run_dir}: its disk has {_format(disk.free + present)} for checkpoints, and they will take "
            f"{_format(needed)}: {number} of {_format(full)} (weights{average}, and {_format(state)} of the "
            f"optimiser's state), one being written, and the best weights. Make room, choose another folder with "
            f"--run-dir, or keep fewer (train.keep_checkpoints={run.settings.keep_checkpoints})."
        )


def optimizer_state_bytes(optimizer: Optimizer) -> int:
    """Return the size of an optimiser's state in bytes, or an estimate of it before the first step.

    Optimisers other than SGD and Adam, such as a user's own, are counted as Adam.
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
    files = [path.stat() for pattern in ("*.pth*", "*.shards*/*") for path in folder.glob(pattern) if path.is_file()]
    return sum({(file.st_dev, file.st_ino): file.st_size for file in files}.values())


def _format(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.2f} MiB"
