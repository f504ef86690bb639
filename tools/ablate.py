"""Train a set of configs, several seeds each, and write their table and their plot.

A set is a file with a function `ablation()`, see configs/ablations. Each arm is trained with each seed in a separate
folder. A run that is in the results is not repeated, an interrupted one is resumed; ctrl-C and SIGTERM stop it after a
step.

Examples:
    vitkit ablate --list
    vitkit ablate detr_parts --seeds 0 1
    vitkit ablate detection_bccd data.root=data/bccd --arms DINO "DN-DETR" --budget 60
    vitkit ablate detection_bccd --plot-only
    vitkit ablate detection_bccd --shard $SLURM_ARRAY_TASK_ID/8     # sbatch --array=1-8; then --plot-only merges them
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from vitkit.tools.common import a_path, add_trust, errors_in_one_line, is_override


def shard(text: str) -> tuple[int, int]:
    """Parse "I/N", a part of N, counted from 1."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected I/N with I from 1 to N, such as 1/8")
    return int(number), int(count)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", nargs="?", help="name of a set (--list prints them), or a file")
    parser.add_argument("overrides", nargs="*", help="key.sub=value for all arms, such as data.root=data/bccd")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="train only these arms (default: all)")
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0, 1],
        metavar="S",
        help="random seeds of the runs of each arm (default: 0 1)",
    )
    parser.add_argument("--budget", type=float, metavar="MINUTES", help="start no run after this many minutes")
    parser.add_argument(
        "--out", type=a_path, default=Path("model_zoo/ablations"), help="results folder (default: model_zoo/ablations)"
    )
    text = "folder of the runs (default: runs/ablations)"
    parser.add_argument("--run-dir", type=a_path, default=Path("runs/ablations"), help=text)
    parser.add_argument(
        "--list", action="store_true", help="print the sets, or the commands of the set's arms, and stop"
    )
    parser.add_argument(
        "--plot-only",
        action="store_true",
        help="train nothing; merge the results of shards, and write the table and the plot",
    )
    text = "run every N-th of the runs from the I-th on, counted from 1: the same command on N machines, for I = 1..N"
    parser.add_argument("--shard", type=shard, metavar="I/N", help=text)
    text = "the runs' device: cpu, cuda, mps, ... (default: auto, the accelerator that PyTorch finds, else cpu)"
    parser.add_argument("--device", default="auto", help=text)
    add_trust(parser)
    words = list(sys.argv[1:] if argv is None else argv)
    # Overrides are taken out first: after --seeds or --arms they would be parsed as values of these options.
    overrides = [word for word in words if is_override(word) and not word.startswith("-")]
    args = parser.parse_args([word for word in words if word not in overrides])
    args.overrides = overrides
    if not args.set and not args.list:
        parser.error("name a set; --list prints them")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    from vitkit.apps.starter.ablations.sets import (
        check_arms,
        check_names,
        find_set,
        read_set,
        set_files,
        summary_of,
        train_command,
    )

    with errors_in_one_line():
        if not args.set:
            print("\n".join(f"{path.stem:<24} {summary_of(path)}" for path in set_files()))
            return 0
        path = find_set(args.set)
        ablation = read_set(path)
        arms = args.arms or list(ablation.arms)
        check_names(ablation, arms, path.name)
        if args.list:
            print("\n".join(shlex.join(train_command(ablation, arm, args.overrides)) for arm in arms))
            return 0
        from vitkit.apps.starter.ablations.page import write_page
        from vitkit.apps.starter.ablations.runs import merge, run_all

        failures = 0
        if not args.plot_only:
            check_arms(ablation, arms, args.overrides)
            failures = run_all(
                ablation,
                path,
                arms=arms,
                seeds=args.seeds,
                overrides=args.overrides,
                out=args.out,
                run_dir=args.run_dir,
                budget=args.budget,
                device=args.device,
                shard=args.shard,
                trust=args.trust,
            )
        if args.shard is not None and not args.plot_only:
            print(f"shard {args.shard[0]} of {args.shard[1]} is done; --plot-only merges the shards that are")
        elif rows := merge(args.out, path.stem):
            write_page(ablation, path, rows, args.out)
            print(f"wrote {args.out / path.stem}.{'md' if args.plot_only else 'json, .md'} and .png")
        else:
            print("no run is complete: nothing written")
        return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
