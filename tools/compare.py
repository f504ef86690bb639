"""Compare models on the same data: differences with intervals, classes and images that improved or got worse, curves.

Each model is a run, whose best checkpoint is scored (RUN/results_val.json is used if it came from it, otherwise
written); or a checkpoint, an exported file or a name of the model zoo, scored on the data of its config; or a results
file (.json) that vitkit test wrote. Results files need their data: --data CONFIG or RUN, or --annotations; if another
kind of model is among them, they are scored on its data.

Runs whose configs differ only in their seeds are one recipe: recipes are also compared by their means over seeds, with
the interval of the difference; there is a warning where a recipe has one seed.

With --curves, only the training curves of runs are drawn, of one or several, also while they train.

Examples:
    vitkit compare runs/detr runs/dino
    vitkit compare runs/detr-0 runs/detr-1 runs/dino-0 runs/dino-1    (two seeds of each)
    vitkit compare runs/detr/best.pth runs/detr/last.pth data.root=data/coco    (overrides change every model's config)
    vitkit compare a.json b.json c.json --data configs/bccd/dino_r18.py
    vitkit compare a.json b.json --annotations instances_val.json --images val --out compared.html
    vitkit compare rnn.json rnnsearch.json transformer.json --by-length lengths.png
    vitkit compare runs/detr runs/detr-2 --curves curves.png --names "lr 1e-4" "lr 3e-4" --losses loss labels l1
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from vitkit.text_format import pluralize
from vitkit.tools.common import (
    a_path,
    add_device,
    add_trust,
    check_out,
    errors_in_one_line,
    fraction,
    is_override,
    new_file,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from vitkit.apps.report.comparison import Comparison
    from vitkit.apps.report.intervals import Difference
    from vitkit.evaluation.text import LengthGroup


LOG_SUFFIXES = (".txt", ".log", ".jsonl")
"""Endings of logs; the last one is that of a run, which has its curves."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "runs, checkpoints, other models or results files, at least two; and key.sub=value for the config of each"
    parser.add_argument("models", nargs="+", help=text)
    parser.add_argument("--data", metavar="MODEL", help="score results files on the data of this config or run")
    text = "score results files on these annotations in COCO's format"
    parser.add_argument("--annotations", type=a_path, metavar="FILE", help=text)
    parser.add_argument("--images", type=a_path, metavar="DIR", help="folder of the images of --annotations")
    text = "names of the models (default: the names of their folders and files)"
    parser.add_argument("--names", nargs="+", metavar="NAME", help=text)
    text = "the page to write (default: comparison.html, or comparison-2.html if that exists)"
    parser.add_argument("--out", type=a_path, help=text)
    text = "also draw the metric of models that translate by the length of the source"
    parser.add_argument("--by-length", type=a_path, metavar="PNG", help=text)
    add_trust(parser)
    add_device(parser)
    curves = parser.add_argument_group("training curves")
    text = "only draw the training curves of runs, or of their log.jsonl files, into this file"
    curves.add_argument("--curves", type=a_path, metavar="PNG", help=text)
    text = "validation metrics to draw (default: AP, AP50 and AP75; if there are none, all)"
    curves.add_argument("--metrics", nargs="+", metavar="METRIC", help=text)
    text = "losses to draw: loss, the total, or terms such as l1 (default: loss; for a single run, all)"
    curves.add_argument("--losses", nargs="+", metavar="LOSS", help=text)
    text = "average losses over this fraction of a curve (default: 0.025)"
    curves.add_argument("--smooth", type=fraction, metavar="SHARE", help=text)
    curves.add_argument("--x", choices=("epoch", "step"), default="epoch", help="horizontal axis (default: epoch)")
    args = parser.parse_intermixed_args(argv)
    args.overrides = [word for word in args.models if is_override(word)]
    args.models = [word for word in args.models if not is_override(word)]
    # `runs/*` also names what runs have printed.
    args.logs = [word for word in args.models if word.endswith(LOG_SUFFIXES[: 2 if args.curves else 3])]
    args.models = [word for word in args.models if word not in args.logs]
    if len(args.models) < 2 and not args.curves:
        parser.error("give at least two models or results files")
    if args.names and len(args.names) != len(args.models):
        parser.error(f"--names: got {len(args.names)} for {pluralize(len(args.models), 'models')}")
    if args.data and args.annotations:
        parser.error("--data and --annotations both name the data: give one of them")
    if args.images and not args.annotations:
        parser.error("--images are those of --annotations")
    if args.curves and args.overrides:
        parser.error(f"{args.overrides[0]}: --curves reads only logs, which no config changes")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    from vitkit.apps.training import comparing
    from vitkit.logging import setup_logging

    with errors_in_one_line():
        setup_logging()
        if args.logs:
            print(f"passed over, as they are logs: {', '.join(args.logs)}")
        for option, path in (("--out", args.out), ("--by-length", args.by_length), ("--curves", args.curves)):
            check_out(option, path)
        if args.curves:
            best = comparing.draw_curves(
                args.models,
                args.curves,
                names=args.names,
                metrics=args.metrics,
                losses=args.losses,
                smoothing=args.smooth,
                x=args.x,
            )
            print_best(best, args.x)
            print(f"wrote {args.curves}")
            return
        out = args.out or new_file("comparison.html")
        scored = comparing.score_models(
            args.models,
            data=args.data,
            annotations=args.annotations,
            images=args.images,
            overrides=args.overrides,
            device=args.device,
            trust=args.trust,
        )
        if differences := comparing.config_differences(scored):
            print("configs differ:")
            for key, values in differences:
                print(f"  {key}: {'  ->  '.join(values)}")
        if args.by_length:
            print_lengths(comparing.draw_lengths(scored, args.by_length, names=args.names))
            print(f"wrote {args.by_length}")
        print_comparison(comparing.compare_scored(scored, names=args.names, out=out))
        print(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")


def print_best(best: Mapping[str, Mapping[str, tuple[float, float]]], x: str) -> None:
    """Print the highest value of each run's metrics."""
    width = max(map(len, best), default=0)
    for name, metrics in best.items():
        text = "  ".join(f"{metric} {value:.4g} at {x} {at:g}" for metric, (value, at) in metrics.items())
        print(f"{name:<{width}}  best {text}" if text else f"{name:<{width}}  no validation yet")


def print_lengths(groups: Mapping[str, Sequence[LengthGroup]]) -> None:
    """Print each model's metric by source length, with the numbers of sentences."""
    for name, of_model in groups.items():
        print(f"{name:<20} " + "   ".join(f"{g.min_words}-{g.max_words}: {g.score:.4g} ({g.count})" for g in of_model))


def print_comparison(comparison: Comparison) -> None:
    """Print the metrics of recipes with several seeds and their differences, then those of each model from the first
    one."""
    if any(len(members) > 1 for members in comparison.recipes):
        for k, differences in enumerate(comparison.over_seeds, start=1):
            print(f"{comparison.recipe_name(k)} against {comparison.recipe_name(0)}, means over seeds:")
            print_differences(differences, comparison.lower_is_better)
    for name, differences in zip(comparison.names[1:], comparison.differences):
        print(f"{name} against {comparison.names[0]}, on {pluralize(len(comparison.sample_ids), 'samples')}:")
        print_differences(differences, comparison.lower_is_better)
    if warning := comparison.seed_warning():
        print(f"warning: {warning}")


def print_differences(differences: Mapping[str, Difference], lower_is_better: Collection[str]) -> None:
    """Print both values of each metric, their difference with its interval, and whether it is significant."""
    from vitkit.apps.report.comparison import is_better

    width = max(map(len, differences))
    for metric, each in differences.items():
        value, low, high = each.difference
        if value != value:
            continue
        text = f"  {metric:<{width}}  {each.first:.3f} -> {each.second:.3f}  {value:+.3f}"
        if low != low:
            print(f"{text} (no interval)")
            continue
        better = is_better(metric, each, lower_is_better)
        verdict = {True: "better", False: "worse", None: "not significant"}[better]
        print(f"{text} ({low:+.3f} to {high:+.3f})  {verdict}")


if __name__ == "__main__":
    main()
