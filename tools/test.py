"""Evaluate a checkpoint on a config's validation data: its metrics, and results.json.

Of detectors the COCO numbers, and results for pycocotools; of panoptic and semantic models PQ or IoU, and a folder of
maps beside results.json; of classifiers also a picture of the confusion matrix.

Examples:
    python tools/test.py configs/detr_r50.py detr-r50-e632da11.pth data.root=data/coco
    python tools/test.py configs/quickstart/detr.py runs/detr/best.pth --per-class
    torchrun --nproc-per-node 8 tools/test.py configs/detr_r50.py runs/detr_r50/best.pth
    python tools/test.py configs/detr_r50.py --eval-only results.json    (scores what was predicted before)
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from vitkit import build_dataset, build_model, load_config, load_weights
from vitkit.config import Config, format_config
from vitkit.data.loader import DataSettings
from vitkit.distributed import close_distributed, first_rank_first, init_distributed, is_main
from vitkit.engine.evaluate import evaluate
from vitkit.engine.settings import TrainSettings, require
from vitkit.errors import ConfigError, VitkitError, error_line
from vitkit.logging import setup_logging
from vitkit.registry import EVALUATORS


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a config file")
    parser.add_argument("checkpoint", nargs="?", help="weights: a run's checkpoint or an official one")
    parser.add_argument("overrides", nargs="*", help="key.sub=value, such as data.root=data/coco")
    parser.add_argument(
        "--eval-only", type=Path, metavar="RESULTS",
        help="score predictions that were written before, without a checkpoint: the JSON, or a folder of semantic PNG",
    )  # fmt: skip
    parser.add_argument("--per-class", action="store_true", help="also print each class's AP or accuracy")
    parser.add_argument("--out", type=Path, help="where to write the results (default: results.json in this folder)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--print-config", action="store_true", help="print every value and where it is from, and stop")
    args = parser.parse_intermixed_args(argv)
    if (args.eval_only or args.print_config) and "=" in (args.checkpoint or ""):
        args.checkpoint, args.overrides = None, [args.checkpoint, *args.overrides]
    if bool(args.eval_only) == bool(args.checkpoint) and not args.print_config:
        parser.error("give either a checkpoint or --eval-only RESULTS")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: PyTorch finds no GPU here")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        config = load_config(args.config, args.overrides)
        if args.print_config:
            print(format_config(config))
            return
        device = init_distributed(args.device)
        setup_logging()
        if args.eval_only:
            score(config, args)
        else:
            run(config, args, device)
    except VitkitError as error:
        sys.exit(error_line(error))
    finally:
        close_distributed()


def run(config: Config, args: argparse.Namespace, device: torch.device) -> None:
    """Builds data and model, predicts every image once, and prints and writes what came out."""
    require(config, "model", "data.val", "evaluator", "train.epochs")
    settings = TrainSettings(**config["train"])
    data = DataSettings(**config["data"])
    dataset = build_dataset(data.val, data.root, where="data.val")
    loader = data.val_loader(dataset)
    model = build_model(config["model"], classes=dataset.classes, things=getattr(dataset, "things", None))
    with first_rank_first():
        report = load_weights(model, args.checkpoint, classes=dataset.classes)
    evaluator = EVALUATORS.build(config["evaluator"], dataset=dataset)
    out = args.out or Path("results.json")
    if is_main():
        out.parent.mkdir(parents=True, exist_ok=True)
        print(report)
    evaluate(
        model.to(device), loader, evaluator, device=device, precision=settings.precision,
        progress=(lambda line: print(line, flush=True)) if is_main() else None,
    )  # fmt: skip
    if is_main():
        show(evaluator, args.per_class)
        written = evaluator.write_results(out) or [out]
        print(f"results are in {', '.join(map(str, written))}")


def score(config: Config, args: argparse.Namespace) -> None:
    """Prints the metrics of predictions that were written before."""
    require(config, "data.val", "evaluator")
    data = DataSettings(**config["data"])
    dataset = build_dataset(data.val, data.root, where="data.val")
    evaluator = EVALUATORS.build(config["evaluator"], dataset=dataset)
    if not hasattr(evaluator, "load_results"):
        raise ConfigError(f"--eval-only: {type(evaluator).__name__} reads no results. Evaluate the checkpoint again.")
    if is_main():
        evaluator.load_results(args.eval_only)
        evaluator.compute()
        show(evaluator, args.per_class)


def show(evaluator: Any, per_class: bool) -> None:
    print(evaluator.table())
    if per_class:
        for name, value in evaluator.per_class().items():
            print(f"  {name:<20} {getattr(evaluator, 'per_class_metric', 'AP')} {value:.3f}")


if __name__ == "__main__":
    main()
