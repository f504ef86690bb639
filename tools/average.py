"""Average the weights of several checkpoints of one model, such as a run's last five.

The mean of weights from the end of a run often scores better than each of them (Izmailov et al. 2018,
https://arxiv.org/abs/1803.05407). The result loads as any checkpoint does. Of checkpoints with a moving average that
one is taken, as in evaluation. Where batch norms are not frozen, their statistics are averaged like weights.

Examples:
    python tools/average.py runs/detr/step_00009000.pth runs/detr/step_00009500.pth --out averaged.pth
    python tools/average.py "runs/detr/step_*.pth" --last 5 --out averaged.pth
    python tools/average.py seed_1/best.pth seed_2/best.pth --weights 0.7 0.3 --out averaged.pth
"""

import argparse
import glob
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.checkpoint import read_checkpoint, save_checkpoint, state_dict_of
from vitkit.errors import CheckpointError, VitkitError, error_line

KEPT = ("config", "classes", "category_ids", "things", "vocabularies")
"""What the result takes over from the last checkpoint, besides the weights."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", help="files, or patterns in quotes")
    parser.add_argument("--last", type=int, metavar="N", help="of the files of each pattern only the last N, by number")
    parser.add_argument("--weights", type=float, nargs="+", metavar="W", help="one for each file (all the same)")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
    args = parser.parse_intermixed_args(argv)
    if args.last is not None and args.last < 1:
        parser.error("--last is at least 1")
    if args.weights and (min(args.weights) < 0 or sum(args.weights) <= 0):
        parser.error("--weights are at least 0, and not all 0")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        run(args)
    except VitkitError as error:
        sys.exit(error_line(error))


def run(args: argparse.Namespace) -> None:
    paths = find_checkpoints(args.checkpoints, args.last)
    if len(paths) < 2:
        raise CheckpointError(f"only {paths[0]}: an average needs two checkpoints at least.")
    if args.weights and len(args.weights) != len(paths):
        raise CheckpointError(
            f"--weights: got {len(args.weights)} for {len(paths)} checkpoints ({', '.join(map(str, paths))})."
        )
    if args.out.exists() and not args.overwrite:
        raise CheckpointError(f"--out {args.out}: is there already. Choose another name, or add --overwrite.")
    weights = args.weights or [1.0] * len(paths)
    save_checkpoint(args.out, average(paths, [weight / sum(weights) for weight in weights]))
    for path, weight in zip(paths, weights):
        print(f"{weight / sum(weights):.3f} x {path}")
    print(f"wrote {args.out}")


def find_checkpoints(names: Sequence[str], last: int | None) -> list[Path]:
    """The files that are meant; those of a pattern by the numbers in their names.

    Raises:
        CheckpointError: a pattern fits none, or a file is named twice.
    """
    paths: list[Path] = []
    for name in names:
        found = [Path(name)]
        if not found[0].exists() and glob.has_magic(name):
            found = sorted(map(Path, glob.glob(name)), key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])
            if not found:
                raise CheckpointError(f"{name}: no file is like that.")
            found = found[-last:] if last else found
        paths += found
    twice = [path for path in paths if paths.count(path) > 1]
    if twice:
        raise CheckpointError(f"{twice[0]} is named twice.")
    return paths


def average(paths: Sequence[Path], weights: Sequence[float]) -> dict[str, Any]:
    """What the averaged checkpoint holds.

    Args:
        weights: one for each, with the sum 1.
    Raises:
        CheckpointError: a file cannot be read, or is of another model, other classes or other vocabularies than the
            first.
    """
    sums: dict[str, Tensor] = {}
    first: dict[str, Tensor] = {}
    classes = vocabularies = None
    for path, weight in zip(paths, weights):
        checkpoint = read_checkpoint(path)
        state = state_dict_of(checkpoint, str(path))
        if not first:
            first, classes, vocabularies = state, checkpoint.get("classes"), checkpoint.get("vocabularies")
        check_alike(first, state, paths[0], path)
        if checkpoint.get("classes") != classes:
            raise CheckpointError(
                f"{path}: was trained on other classes than {paths[0]} ({some(checkpoint.get('classes'))}; "
                f"{some(classes)}). Only checkpoints of the same classes can be averaged."
            )
        if checkpoint.get("vocabularies") != vocabularies:
            raise CheckpointError(
                f"{path}: was trained with other vocabularies than {paths[0]}, so their numbers of tokens mean other "
                "words. Only checkpoints of the same vocabularies can be averaged, such as those of one run."
            )
        for name, value in state.items():
            if value.is_floating_point():
                # In float64, so that many small parts are summed without loss.
                sums[name] = sums.get(name, 0) + weight * value.double()
    # What is no float counts something, and is the last one's.
    model = {name: sums[name].to(value.dtype) if name in sums else value for name, value in state.items()}
    bad = [name for name, value in model.items() if value.is_floating_point() and not torch.isfinite(value).all()]
    if bad:
        raise CheckpointError(f"the average of {bad[0]} is not finite: one of the checkpoints is of a run that failed.")
    kept = {key: checkpoint[key] for key in KEPT if key in checkpoint}
    return {"model": model, **kept, "averaged": [str(path) for path in paths]}


def check_alike(first: Mapping[str, Tensor], other: Mapping[str, Tensor], first_path: Path, path: Path) -> None:
    """
    Raises:
        CheckpointError: they have other entries, or entries of other shapes.
    """
    only = sorted(first.keys() ^ other.keys())
    if only:
        where = first_path if only[0] in first else path
        raise CheckpointError(
            f"{path}: is of another model than {first_path}: {len(only)} entries are in one of them only, such as "
            f"{only[0]} (in {where})."
        )
    for name, value in other.items():
        if value.shape != first[name].shape:
            raise CheckpointError(
                f"{path}: {name} is {tuple(value.shape)}, but {tuple(first[name].shape)} in {first_path}. Only "
                "checkpoints of one model can be averaged."
            )


def some(classes: Sequence[str] | None) -> str:
    return "none stated" if classes is None else f"{len(classes)}: {', '.join(map(str, classes[:5]))}"


if __name__ == "__main__":
    main()
