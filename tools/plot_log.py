"""Draw the curves of one or several runs: losses, smoothed, and validation metrics.

Examples:
    python tools/plot_log.py runs/detr
    python tools/plot_log.py runs/detr runs/detr-2 --names "lr 1e-4" "lr 3e-4" --out compared.png
    python tools/plot_log.py runs/detr* --metrics bbox/AP bbox/APs --losses loss labels l1 --smooth 0.1 --x step
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from vitkit.errors import DataError
from vitkit.tools.common import check_out, errors_in_one_line, new_file
from vitkit.words import counted


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or their log.jsonl files")
    parser.add_argument(
        "--names", nargs="+", help="names of the runs in the plot (default: the names of their folders)"
    )
    parser.add_argument(
        "--metrics", nargs="+", help="validation metrics to draw (default: AP, AP50 and AP75; if none exists, all)"
    )
    parser.add_argument(
        "--losses", nargs="+", help="losses of several runs: loss (the total) or terms such as l1 (default: loss)"
    )
    parser.add_argument(
        "--smooth", type=float, metavar="PART", help="average losses over this fraction of a curve (default: 0.025)"
    )
    parser.add_argument("--x", choices=("epoch", "step"), default="epoch", help="horizontal axis (default: epoch)")
    parser.add_argument("--out", type=Path, help="the PNG to write (default: curves.png)")
    args = parser.parse_intermixed_args(argv)
    if args.names and len(args.names) != len(args.runs):
        parser.error(f"--names: got {len(args.names)} for {counted(len(args.runs), 'runs')}")
    if args.smooth is not None and not 0 <= args.smooth <= 1:
        parser.error("--smooth is a part of the curve, 0 to 1")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with errors_in_one_line():
        check_out("--out", args.out)
        run(args)


def run(args: argparse.Namespace) -> None:
    """Draw the curves, and print the best metrics of several runs."""
    from vitkit.logging import LOG_NAME
    from vitkit.visualization.curves import plot_runs, plot_training

    logs = [path / LOG_NAME if path.is_dir() else path for path in args.runs]
    names = args.names or names_of(logs)
    if len(set(names)) < len(names):
        raise DataError(f"--names: {', '.join(names)} are not different.")
    args.out = args.out or new_file("curves.png")
    if len(logs) == 1 and args.losses is args.metrics is args.smooth is None and args.x == "epoch":
        plot_training(logs[0], args.out)
    else:
        best = plot_runs(
            dict(zip(names, logs)),
            args.out,
            metrics=args.metrics,
            losses=args.losses or ["loss"],
            smoothing=args.smooth,
            x=args.x,
        )
        width = max(map(len, best))
        for name, metrics in best.items():
            text = "  ".join(f"{metric} {value:.4g} at {args.x} {at:g}" for metric, (value, at) in metrics.items())
            print(f"{name:<{width}}  best {text}" if text else f"{name:<{width}}  no validation yet")
    print(f"wrote {args.out}")


def names_of(logs: Sequence[Path]) -> list[str]:
    """Return the shortest endings of the logs' folder paths that are all different."""
    folders = [path.resolve().parent.parts for path in logs]
    for depth in range(1, max(map(len, folders)) + 1):
        names = ["/".join(parts[-depth:]) for parts in folders]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in logs]


if __name__ == "__main__":
    main()
