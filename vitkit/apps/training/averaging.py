"""Averages the weights of checkpoints (Izmailov et al. 2018, https://arxiv.org/abs/1803.05407)."""

import glob
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.text_format import pluralize
from vitkit.weights.contents import state_dict_of
from vitkit.weights.reading import read_checkpoint
from vitkit.weights.transformers_folder import MODEL_ENTRIES


def find_checkpoints(names: Sequence[str], last: int | None) -> list[Path]:
    """Return the files of names and patterns; those of a pattern are sorted by the numbers in their names.

    Raises:
        CheckpointError: a pattern matches no file, or a file is named twice.
    """
    paths: list[Path] = []
    for name in names:
        matches = [Path(name)]
        if not matches[0].exists() and glob.has_magic(name):
            matches = sorted(
                map(Path, glob.glob(name)), key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)]
            )
            if not matches:
                raise CheckpointError(f"{name}: no file matches this pattern.")
            matches = matches[-last:] if last else matches
        paths += matches
    repeated = [path for path in paths if paths.count(path) > 1]
    if repeated:
        raise CheckpointError(f"{repeated[0]} is named twice.")
    return paths


def average(paths: Sequence[Path], factors: Sequence[float] | None = None) -> dict[str, Any]:
    """Return the contents of the averaged checkpoint.

    Args:
        paths: the checkpoints.
        factors: the fraction of each checkpoint in the mean, whose sum need not be 1; None: equal fractions.
    Raises:
        CheckpointError: a file cannot be read, or its model, classes or vocabularies differ from those of the first.
    """
    factors = [1.0] * len(paths) if factors is None else list(factors)
    if len(factors) != len(paths):
        raise CheckpointError(
            f"--factors: got {len(factors)} for {pluralize(len(paths), 'checkpoints')} ({', '.join(map(str, paths))})."
        )
    if not (min(factors) >= 0 and 0 < sum(factors) < math.inf):
        raise CheckpointError(f"--factors: got {factors}; expected finite numbers of at least 0, not all of them 0.")
    sums: dict[str, Tensor] = {}
    reference: dict[str, Any] = {}
    for path, factor in zip(paths, factors):
        checkpoint = read_checkpoint(path)
        checkpoint["model"] = state = state_dict_of(checkpoint, str(path))
        reference = reference or checkpoint
        check_alike(reference, checkpoint, paths[0], path)
        for name, value in state.items():
            if value.is_floating_point():
                # Sums are in float64, so that many small terms are added without loss.
                sums[name] = sums.get(name, 0) + factor / sum(factors) * value.double()
    # Integers are counters, which are taken from the last checkpoint.
    model = {name: sums[name].to(value.dtype) if name in sums else value for name, value in state.items()}
    bad = [name for name, value in model.items() if value.is_floating_point() and not torch.isfinite(value).all()]
    if bad:
        raise CheckpointError(f"the average of {bad[0]} is not finite: one checkpoint is from a run that failed.")
    taken_over = {key: checkpoint[key] for key in MODEL_ENTRIES if key in checkpoint}
    return {"model": model, **taken_over, "averaged": [str(path) for path in paths]}


def check_alike(reference: Mapping[str, Any], other: Mapping[str, Any], reference_path: Path, path: Path) -> None:
    """Check that two checkpoints can be averaged.

    Raises:
        CheckpointError: their entries, the shapes of these, their classes or their vocabularies differ.
    """
    expected, state = reference["model"], other["model"]
    unmatched = sorted(expected.keys() ^ state.keys())
    if unmatched:
        raise CheckpointError(
            f"{path}: is from another model than {reference_path}: {pluralize(len(unmatched), 'entries', 'are')} "
            f"in one of them only, "
            f"such as {unmatched[0]} (in {reference_path if unmatched[0] in expected else path})."
        )
    for name, value in state.items():
        if value.shape != expected[name].shape:
            raise CheckpointError(
                f"{path}: {name} is {tuple(value.shape)}, but {tuple(expected[name].shape)} in {reference_path}. Only "
                "checkpoints of one model can be averaged."
            )
    classes, expected_classes = other.get("classes"), reference.get("classes")
    if classes != expected_classes:
        raise CheckpointError(
            f"{path}: was trained on other classes than {reference_path} ({shorten(classes)}; "
            f"{shorten(expected_classes)}). Only checkpoints of the same classes can be averaged."
        )
    if other.get("vocabularies") != reference.get("vocabularies"):
        raise CheckpointError(
            f"{path}: was trained with other vocabularies than {reference_path}, so their numbers of tokens mean other "
            "words. Only checkpoints of the same vocabularies can be averaged, such as those of one run."
        )


def shorten(classes: Sequence[str] | None) -> str:
    """Describe a checkpoint's classes by their number and the first five."""
    return "none stated" if classes is None else f"{len(classes)}: {', '.join(map(str, classes[:5]))}"
