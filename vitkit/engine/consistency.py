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
from typing import Any, NamedTuple

import numpy as np
import torch

from vitkit import __version__
from vitkit.config.load import cfg_diff
from vitkit.distributed import barrier, broadcast_object, gather_objects, world_size
from vitkit.errors import ConfigError, DataError
from vitkit.protocols.dataset import Dataset
from vitkit.weights.sharded import file_checksum

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
    per_rank = gather_objects((socket.gethostname(), changed, versions, time.time()))
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
                f"rank {number} ({host}): its clock is {ahead} {side} rank 0's; only times in messages depend on it."
            )
    if failure := broadcast_object(failure):
        raise ConfigError(failure)


def check_same_data(datasets: Mapping[str, Dataset]) -> None:
    """Check that all ranks see the same data: number of samples, and checksum of what lists them.

    All ranks must call it. Images are not read for it.

    Args:
        datasets: by config key.
    Raises:
        DataError: a rank's data are others than the main rank's.
    """
    if world_size() == 1:
        return
    per_rank = gather_objects((socket.gethostname(), {key: fingerprint(data) for key, data in datasets.items()}))
    failure = _first_difference(per_rank)
    if failure := broadcast_object(failure):
        raise DataError(failure)


class Fingerprint(NamedTuple):
    num_samples: int
    checksum: int
    source: str
    """The file that lists the samples; without one, the dataset's class."""

    def __str__(self) -> str:
        return f"{self.num_samples} samples ({self.source}, checksum {self.checksum})"


def fingerprint(dataset: Dataset) -> Fingerprint:
    """Return the number of samples and a checksum of what lists them, but not of images."""
    path = dataset.annotation_file
    value = 0 if path is None or not Path(path).is_file() else file_checksum(Path(path))
    for part in dataset.index_parts():
        is_array = isinstance(part, np.ndarray)
        value = zlib.crc32(np.ascontiguousarray(part) if is_array else f"{part}\n".encode(errors="replace"), value)
    return Fingerprint(len(dataset), value, str(path or type(dataset).__name__))


def _first_difference(per_rank: Sequence[tuple[str, Mapping[str, Fingerprint]]]) -> str | None:
    """Return a description of the first data that differ from the main rank's, None if there are none."""
    for number, (host, fingerprints) in enumerate(per_rank):
        main_host, main = per_rank[0]
        for key, fingerprint in fingerprints.items():
            if fingerprint[:2] != main[key][:2]:
                return (
                    f"{key}: rank {number} ({host}) has {fingerprint}, rank 0 ({main_host}) has {main[key]}. "
                    "Copy the same files to all machines, or share their folder."
                )
    return None
