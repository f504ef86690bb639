"""Compare models on the same data: differences with intervals, classes and images that improved or got worse, curves.

Each model is a run, whose best checkpoint is scored (RUN/results_val.json is used if newer, else written); or a
checkpoint, an exported file or a name of the model zoo, which are scored on the data of their config; or a results file
(.json) that tools/test.py wrote. Results files need their data: --data CONFIG or RUN, or --annotations; if another kind
of model is among them, they are scored on its data.

Examples:
    python tools/compare.py runs/detr runs/dino
    python tools/compare.py runs/detr/best.pth runs/detr/last.pth
    python tools/compare.py a.json b.json c.json --data configs/bccd/dino.py
    python tools/compare.py a.json b.json --annotations instances_val.json --images val --out compared.html
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitkit.config import cfg_diff, value_at
from vitkit.engine.api import test
from vitkit.engine.checkpointing import CONFIG_NAME
from vitkit.engine.results import ScoredResults, score_file, score_run, score_with_config
from vitkit.errors import ConfigError
from vitkit.evaluation.report.comparison import Compared, Comparison, is_better, write_comparison
from vitkit.inference import find_trained
from vitkit.logging import LOG_NAME, setup_logging
from vitkit.tools.common import add_device, add_trust, check_out, errors_in_one_line, new_file, unique_names
from vitkit.visualization.curves import plot_runs
from vitkit.words import counted


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="runs, checkpoints, other models or results files, at least two")
    parser.add_argument("--data", metavar="MODEL", help="score results files on the data of this config or run")
    parser.add_argument(
        "--annotations", type=Path, metavar="FILE", help="score results files on these annotations in COCO's format"
    )
    parser.add_argument("--images", type=Path, metavar="DIR", help="folder of the pictures of --annotations")
    parser.add_argument(
        "--names", nargs="+", help="names of the models on the page (default: the names of their folders and files)"
    )
    parser.add_argument(
        "--out", type=Path, help="the page to write (default: comparison.html, or comparison-2.html if there is one)"
    )
    add_trust(parser)
    add_device(parser)
    args = parser.parse_intermixed_args(argv)
    if len(args.models) < 2:
        parser.error("give at least two models or results files")
    if args.names and len(args.names) != len(args.models):
        parser.error(f"--names: got {len(args.names)} for {counted(len(args.models), 'models')}")
    if args.data and args.annotations:
        parser.error("--data and --annotations both name the data: give one of them")
    if args.images and not args.annotations:
        parser.error("--images are those of --annotations")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    args.out = args.out or new_file("comparison.html")
    with errors_in_one_line():
        setup_logging()
        check_out("--out", args.out)
        run(args)


def run(args: argparse.Namespace) -> None:
    """Score the models, write the page, and print the differences."""
    scored = [score_model(path, args) for path in args.models]
    names = unique_names(args.names or (each.name for each in scored))
    logs = {
        name: each.folder / LOG_NAME
        for name, each in zip(names, scored)
        if each.folder is not None and (each.folder / LOG_NAME).is_file()
    }
    models = [Compared(name, each.evaluator, each.config) for name, each in zip(names, scored)]
    differences = config_differences([model.config for model in models])
    if differences:
        print("configs differ:")
        for key, values in differences:
            print(f"  {key}: {'  ->  '.join(values)}")
    comparison = write_comparison(models, args.out, config_differences=differences, curves=curves_of(logs))
    print_comparison(comparison)
    print(f"wrote {args.out} ({args.out.stat().st_size / 1e6:.1f} MB)")


def score_model(name: str, args: argparse.Namespace) -> ScoredResults:
    """Score a model on the data of its config, or a results file on the data that belongs to it.

    Raises:
        ConfigError: the data of a results file is unknown, or --data is given with a model.
    """
    path = Path(name)
    if not is_results(name):
        option = "--data" if args.data else "--annotations" if args.annotations else None
        if option is not None:
            raise ConfigError(
                f"{option}: {name!r} is not a results file, and models are scored on the data of their own config. "
                "Give its results file instead (vitkit test MODEL --out FILE)."
            )
        if (path / CONFIG_NAME).is_file():
            return score_run(path, device=args.device, trust=args.trust)
        config, weights = find_trained(name, trust=args.trust)
        evaluated = test(config, weights, device=args.device, trust=args.trust)
        return ScoredResults(path.stem, evaluated.evaluator, config, None)
    model = args.data or next((other for other in args.models if not is_results(other)), None)
    if model is not None and not args.annotations:
        return score_with_config(path, model, trust=args.trust)
    return score_file(path, annotations=args.annotations, images=args.images)


def is_results(name: str) -> bool:
    """Whether a model is named by its results file."""
    return Path(name).suffix == ".json"


def config_differences(configs: Sequence[Any]) -> list[tuple[str, list[str]]]:
    """Return the keys whose values differ between the first config and another one, with the value in each config."""
    if any(config is None for config in configs):
        return []
    keys = dict.fromkeys(key for other in configs[1:] for key in cfg_diff(configs[0], other))
    return [(key, [str(value_at(config, key, "–")) for config in configs]) for key in keys]


def curves_of(logs: dict[str, Path]) -> np.ndarray | None:
    """Return the training curves of runs in one figure, (H, W, 3) uint8 RGB; None for fewer than two runs."""
    if len(logs) < 2:
        return None
    with tempfile.TemporaryDirectory() as folder:
        sheet = Path(folder) / "curves.png"
        plot_runs(logs, sheet)
        return np.asarray(Image.open(sheet).convert("RGB"))


def print_comparison(comparison: Comparison) -> None:
    """Print each model's metrics and their differences from those of the first model."""
    width = max(map(len, comparison.differences[0]))
    for name, differences in zip(comparison.names[1:], comparison.differences):
        print(f"{name} against {comparison.names[0]}, on {counted(len(comparison.sample_ids), 'samples')}:")
        for metric, each in differences.items():
            value, low, high = each.difference
            if value != value:
                continue
            verdict = {True: "better", False: "worse", None: "not significant"}[
                is_better(metric, each, comparison.lower_is_better)
            ]
            interval = f"{low:+.3f} to {high:+.3f}"
            print(f"  {metric:<{width}}  {each.first:.3f} -> {each.second:.3f}  {value:+.3f} ({interval})  {verdict}")


if __name__ == "__main__":
    main()
