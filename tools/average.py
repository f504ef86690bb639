"""Average the weights of several checkpoints of one model, such as a run's last five; or keep only the weights of one.

The mean of weights from the end of a run often scores better than each of them (Izmailov et al. 2018,
https://arxiv.org/abs/1803.05407). The result loads like any checkpoint. If checkpoints have a moving average, that is
used, as in evaluation. The statistics of batch norms that are not frozen are averaged like weights.

A single checkpoint is slimmed: OUT has its weights, config and classes, but nothing that is only needed for resuming,
such as the optimizer's state.

Examples:
    vitkit average runs/detr/step_00009000.pth runs/detr/step_00009500.pth --out averaged.pth
    vitkit average "runs/detr/step_*.pth" --last 5 --out averaged.pth
    vitkit average seed_1/best.pth seed_2/best.pth --factors 0.7 0.3 --out averaged.pth
    vitkit average runs/detr/last.pth --out weights.pth
"""

import argparse

from vitkit.errors import CheckpointError
from vitkit.tools.common import a_path, add_overwrite, errors_in_one_line, positive


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", help="checkpoint files, or patterns in quotes")
    text = "take only the last N files of each pattern, by the number in their names"
    parser.add_argument("--last", type=positive, metavar="N", help=text)
    text = "weight of each file in the mean (default: equal weights)"
    parser.add_argument("--factors", type=float, nargs="+", metavar="F", help=text)
    parser.add_argument("--out", type=a_path, required=True, help="the file to write")
    add_overwrite(parser)
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    from vitkit.apps.training.averaging import average, find_checkpoints
    from vitkit.weights import save_checkpoint

    with errors_in_one_line():
        if args.out.exists() and not args.overwrite:
            raise CheckpointError(f"--out {args.out}: exists already. Choose another name, or add --overwrite.")
        paths = find_checkpoints(args.checkpoints, args.last)
        save_checkpoint(args.out, average(paths, args.factors))
        factors = args.factors or [1.0] * len(paths)
        for path, factor in zip(paths, factors):
            print(f"{factor / sum(factors):.3f} x {path}")
        print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
