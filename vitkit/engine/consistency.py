"""Checks, before training, that all ranks have the same config, versions and data."""

import datetime
import json
import logging
import platform
import socket
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vitkit import __version__
from vitkit.config.load import cfg_diff
from vitkit.distributed import barrier, broadcast_object, gather_objects, world_size
from vitkit.errors import ConfigError, DataError
from vitkit.protocols.dataset import Dataset

logger = logging.getLogger("vitkit")
_MAX_CLOCK_SECONDS = 10.0


def check_same_start(config: Mapping[str, Any]) -> None:
    """Check that all ranks have the same config, and warn of different versions or clocks. All ranks must call it.

    Raises:
        ConfigError: the config of a rank is another one than the main rank's.
    """
    if world_size() == 1:
        return
    config = json.loads(json.dumps(config))
    changed = cfg_diff(broadcast_object(config), config)
    versions = {"vitkit": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    barrier()  # so that the clocks are read at one time
    per_rank = gather_objects((_host(), changed, versions, time.time()))
    failure = None
    for number, (host, keys, others, clock) in enumerate(per_rank):
        main_versions, main_clock = per_rank[0][2:]
        different = [name for name, value in main_versions.items() if others[name] != value]
        if keys and failure is None:
            failure = f"rank {number} ({host}) has another config than rank 0: {', '.join(keys[:5])} differ. "
            failure += "Start all machines with the same config and overrides."
        if different:
            names = ", ".join(f"{name} {others[name]} in place of {main_versions[name]}" for name in different)
            logger.warning("rank %d (%s) has %s: results may differ.", number, host, names)
        if abs(clock - main_clock) > _MAX_CLOCK_SECONDS:
            ahead = datetime.timedelta(seconds=round(abs(clock - main_clock)))
            side = "ahead of" if clock > main_clock else "behind"
            logger.warning(
                "rank %d (%s): its clock is %s %s rank 0's; only times in messages depend on it.",
                number,
                host,
                ahead,
                side,
            )
    if failure := broadcast_object(failure):
        raise ConfigError(failure)


def check_same_data(datasets: Mapping[str, Dataset]) -> None:
    """Check that all ranks see the same data: number of samples, and checksum of the file that lists them.

    All ranks must call it. Images are not read for it.

    Args:
        datasets: by config key.
    Raises:
        DataError: a rank's data are others than the main rank's.
    """
    if world_size() == 1:
        return
    per_rank = gather_objects((_host(), {key: _fingerprint(data) for key, data in datasets.items()}))
    failure = _first_difference(per_rank)
    if failure := broadcast_object(failure):
        raise DataError(failure)


def _fingerprint(dataset: Dataset) -> tuple[int, str, int | None]:
    """Return the number of samples, and name and checksum of the file that lists them."""
    path = dataset.annotation_file
    if path is None or not Path(path).is_file():
        return len(dataset), "", None
    value = 0
    with open(path, "rb") as file:
        while block := file.read(2**22):
            value = zlib.crc32(block, value)
    return len(dataset), str(path), value


def _first_difference(per_rank: Sequence[tuple[str, Mapping[str, tuple[int, str, int | None]]]]) -> str | None:
    """Return a description of the first data that differ from the main rank's, None if there are none."""
    for number, (host, fingerprints) in enumerate(per_rank):
        for key, (samples, path, checksum) in fingerprints.items():
            main_host, main_fingerprints = per_rank[0]
            main_samples, main_path, main_checksum = main_fingerprints[key]
            if (samples, checksum) != (main_samples, main_checksum):
                return (
                    f"{key}: rank {number} ({host}) has {samples} samples ({path or 'no file'}, checksum {checksum}), "
                    f"rank 0 ({main_host}) has {main_samples} ({main_path or 'no file'}, checksum {main_checksum}). "
                    "Copy the same files to all machines, or share their folder."
                )
    return None


def _host() -> str:
    return socket.gethostname()
