"""Average the weights of several checkpoints of one model, such as a run's last five; or keep only the weights of one.

The mean of weights from the end of a run often scores better than each of them (Izmailov et al. 2018,
https://arxiv.org/abs/1803.05407). The result loads like any checkpoint. If checkpoints have a moving average, that is
used, as in evaluation. The statistics of batch norms that are not frozen are averaged like weights.

A single checkpoint is slimmed: OUT has its weights, config and classes, but nothing that is only needed for resuming,
such as the optimiser's state.

Examples:
    python tools/average.py runs/detr/step_00009000.pth runs/detr/step_00009500.pth --out averaged.pth
    python tools/average.py "runs/detr/step_*.pth" --last 5 --out averaged.pth
    python tools/average.py seed_1/best.pth seed_2/best.pth --weights 0.7 0.3 --out averaged.pth
    python tools/average.py runs/detr/last.pth --out weights.pth
"""

import argparse
import glob
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.checkpoint import read_checkpoint, save_checkpoint, state_dict_of
from vitkit.checkpoint.files import MODEL_ENTRIES
from vitkit.errors import CheckpointError
from vitkit.tools.common import errors_in_one_line
from vitkit.words import counted


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", help="checkpoint files, or patterns in quotes")
    parser.add_argument(
        "--last", type=int, metavar="N", help="take only the last N files of each pattern, by the number in their names"
    )
    parser.add_argument(
        "--weights", type=float, nargs="+", metavar="W", help="weight of each file in the mean (default: equal weights)"
    )
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    args = parser.parse_intermixed_args(argv)
    if args.last is not None and args.last < 1:
        parser.error("--last is at least 1")
    if args.weights and not (min(args.weights) >= 0 and 0 < sum(args.weights) < math.inf):
        parser.error("--weights are finite and at least 0, and not all 0")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with errors_in_one_line():
        run(args)


def run(args: argparse.Namespace) -> None:
    """Average the checkpoints and write the result."""
    paths = find_checkpoints(args.checkpoints, args.last)
    if args.weights and len(args.weights) != len(paths):
        raise CheckpointError(
            f"--weights: got {len(args.weights)} for {counted(len(paths), 'checkpoints')} "
            f"({', '.join(map(str, paths))})."
        )
    if args.out.exists() and not args.overwrite:
        raise CheckpointError(f"--out {args.out}: exists already. Choose another name, or add --overwrite.")
    weights = args.weights or [1.0] * len(paths)
    save_checkpoint(args.out, average(paths, [weight / sum(weights) for weight in weights]))
    for path, weight in zip(paths, weights):
        print(f"{weight / sum(weights):.3f} x {path}")
    print(f"wrote {args.out}")


def find_checkpoints(names: Sequence[str], last: int | None) -> list[Path]:
    """Return the files that the names and patterns stand for; those of a pattern sorted by the numbers in their names.

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
                raise CheckpointError(f"{name}: no file is like that.")
            matches = matches[-last:] if last else matches
        paths += matches
    repeated = [path for path in paths if paths.count(path) > 1]
    if repeated:
        raise CheckpointError(f"{repeated[0]} is named twice.")
    return paths


def average(paths: Sequence[Path], weights: Sequence[float]) -> dict[str, Any]:
    """Return the contents of the averaged checkpoint.

    Args:
        paths: the checkpoints.
        weights: one for each checkpoint, with the sum 1.
    Raises:
        CheckpointError: a file cannot be read, or its model, classes or vocabularies differ from those of the first.
    """
    sums: dict[str, Tensor] = {}
    reference: dict[str, Any] = {}
    for path, weight in zip(paths, weights):
        checkpoint = read_checkpoint(path)
        checkpoint["model"] = state = state_dict_of(checkpoint, str(path))
        reference = reference or checkpoint
        check_alike(reference, checkpoint, paths[0], path)
        for name, value in state.items():
            if value.is_floating_point():
                # Sums are in float64, so that many small terms are added without loss.
                sums[name] = sums.get(name, 0) + weight * value.double()
    # Integers are counters, which are taken from the last checkpoint.
    model = {name: sums[name].to(value.dtype) if name in sums else value for name, value in state.items()}
    bad = [name for name, value in model.items() if value.is_floating_point() and not torch.isfinite(value).all()]
    if bad:
        raise CheckpointError(f"the average of {bad[0]} is not finite: one of the checkpoints is of a run that failed.")
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
            f"{path}: is of another model than {reference_path}: {counted(len(unmatched), 'entries', 'are')} "
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


if __name__ == "__main__":
    main()
