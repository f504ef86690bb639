"""Evaluate a checkpoint on a config's validation data: its metrics, and results.json.

Of detectors the COCO numbers, and results for pycocotools; of panoptic and semantic models PQ or IoU, and a folder of
maps beside results.json; of classifiers also a picture of the confusion matrix.

Examples:
    python tools/test.py configs/detr_r50.py detr-r50-e632da11.pth data.root=data/coco
    python tools/test.py configs/quickstart/detr.py runs/detr/best.pth --per-class
    torchrun --nproc-per-node 8 tools/test.py configs/detr_r50.py runs/detr_r50/best.pth
    python tools/test.py configs/detr_r50.py --eval-only results.json    (scores what was predicted before)
    python tools/test.py configs/camvid/mask2former.py runs/mask2former/best.pth --tta    (several sizes, mirrored)
    python tools/test.py configs/bccd/detr.py runs/detr/best.pth --per-class --per-size --thresholds --confusion 0.4
"""

import argparse
import math
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitkit import build_dataset, build_model, load_config, load_weights
from vitkit.checkpoint import read_checkpoint
from vitkit.config import Config, format_config
from vitkit.data.loader import DataSettings
from vitkit.distributed import close_distributed, first_rank_first, init_distributed, is_main
from vitkit.engine.evaluate import evaluate
from vitkit.engine.settings import TrainSettings, require
from vitkit.errors import CheckpointError, ConfigError, VitkitError, error_line
from vitkit.evaluation.classification import draw_confusion_matrix
from vitkit.evaluation.detection_report import MATCHED, best_threshold, confusion_matrix, threshold_rows
from vitkit.evaluation.text import perplexity
from vitkit.logging import setup_logging
from vitkit.models.tta import SCALES, MultiScaleFlip
from vitkit.registry import CRITERIA, EVALUATORS
from vitkit.vocabulary import Vocabulary, set_vocabularies, vocabularies_from_json


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a config file")
    parser.add_argument("checkpoint", nargs="?", help="weights: a run's checkpoint or an official one")
    parser.add_argument("overrides", nargs="*", help="key.sub=value, such as data.root=data/coco")
    parser.add_argument(
        "--eval-only", type=Path, metavar="RESULTS",
        help="score predictions that were written before, without a checkpoint: the JSON, or a folder of semantic PNG",
    )  # fmt: skip
    parser.add_argument(
        "--tta", action="store_true", help="average a semantic model's scores over sizes of the image, each mirrored"
    )
    parser.add_argument(
        "--tta-scales", type=scales, metavar="SCALES", default=SCALES,
        help=f"those sizes, relative to the evaluated one (default: {','.join(map(str, SCALES))})",
    )  # fmt: skip
    parser.add_argument("--per-class", action="store_true", help="also print each class's numbers")
    parser.add_argument("--per-size", action="store_true", help="of detectors also those of small to large objects")
    parser.add_argument(
        "--thresholds", type=float, nargs="*", metavar="T",
        help="of detectors also print precision, recall and F1 at these scores (0.1 to 0.9)",
    )  # fmt: skip
    parser.add_argument(
        "--confusion", type=float, nargs="?", const=0.5, metavar="SCORE",
        help="of detectors draw which classes are taken for which, by predictions from this score on (0.5)",
    )  # fmt: skip
    parser.add_argument("--iou", type=float, default=MATCHED, help="that matches, of these two (0.5)")
    parser.add_argument("--out", type=Path, help="where to write the results (default: results.json in this folder)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--print-config", action="store_true", help="print every value and where it is from, and stop")
    args = parser.parse_intermixed_args(argv)
    if args.thresholds == []:
        args.thresholds = [tenths / 10 for tenths in range(1, 10)]
    if not all(0 <= value <= 1 for value in [*(args.thresholds or ()), args.confusion or 0, args.iou]):
        parser.error("--thresholds, --confusion and --iou are 0 to 1")
    if (args.eval_only or args.print_config) and "=" in (args.checkpoint or ""):
        args.checkpoint, args.overrides = None, [args.checkpoint, *args.overrides]
    if bool(args.eval_only) == bool(args.checkpoint) and not args.print_config:
        parser.error("give either a checkpoint or --eval-only RESULTS")
    if args.tta and args.eval_only:
        parser.error("--tta changes what a model predicts, and --eval-only has no model: give one of them")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: PyTorch finds no GPU here")
    return args


def scales(text: str) -> tuple[float, ...]:
    """ "0.5,1,1.5" -> (0.5, 1.0, 1.5)."""
    return tuple(float(number) for number in text.split(","))


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
    vocabularies = use_saved_vocabularies(dataset, args.checkpoint)
    loader = data.val_loader(dataset)
    classes = getattr(dataset, "classes", None)
    model = build_model(
        config["model"], classes=classes, things=getattr(dataset, "things", None), vocabularies=vocabularies
    )
    with first_rank_first():
        report = load_weights(model, args.checkpoint, classes=classes)
    if args.tta:
        model = MultiScaleFlip(model, scales=args.tta_scales)
    evaluator = EVALUATORS.build(config["evaluator"], dataset=dataset)
    out = args.out or Path("results.json")
    if is_main():
        out.parent.mkdir(parents=True, exist_ok=True)
        print(report)
    # Of text the criterion measures, too: how probable the references are.
    criterion = CRITERIA.build(config["criterion"]).to(device) if vocabularies and "criterion" in config else None
    seconds: list[float] = []
    metrics = evaluate(
        model.to(device), loader, evaluator, device=device, precision=settings.precision, criterion=criterion,
        progress=(lambda line: print(line, flush=True)) if is_main() else None, seconds=seconds,
    )  # fmt: skip
    if is_main():
        show(evaluator, args)
        if "nll" in metrics:
            print(f"token accuracy {metrics['token_accuracy']:.4f}   perplexity {perplexity(metrics['nll']):.3f}")
        written = evaluator.write_results(out) or [out]
        print(f"results are in {', '.join(map(str, written))}")
        what = "sentence" if vocabularies and not hasattr(model, "backbone") else "image"
        # The first batch pays for what is made once.
        print(f"{1e3 * statistics.median(seconds[1:] or seconds or [math.nan]):.1f} ms per {what} on {device.type}")


def use_saved_vocabularies(dataset: Any, checkpoint: str) -> dict[str, Vocabulary]:
    """Lets a dataset of text encode with the vocabularies that the model was trained with; others have none.

    Raises:
        CheckpointError: the checkpoint holds none.
    """
    if not hasattr(type(dataset), "target_vocabulary"):
        return {}
    vocabularies = vocabularies_from_json(read_checkpoint(checkpoint).get("vocabularies") or {})
    if not vocabularies:
        raise CheckpointError(f"{checkpoint}: holds no vocabularies; expected a checkpoint that was trained on text.")
    set_vocabularies(dataset, vocabularies)
    return vocabularies


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
        show(evaluator, args)


def show(evaluator: Any, args: argparse.Namespace) -> None:
    """Prints what the evaluator found, as far as it was asked for."""
    print(evaluator.table())
    of_detector = next((e for e in getattr(evaluator, "evaluators", [evaluator]) if hasattr(e, "details")), None)
    if args.per_class and of_detector is evaluator:
        print_numbers(evaluator.details()[0])
    elif args.per_class:
        for name, value in evaluator.per_class().items():
            print(f"  {name:<20} {getattr(evaluator, 'per_class_metric', 'AP')} {value:.3f}")
    if not (args.per_size or args.thresholds or args.confusion is not None):
        return
    if of_detector is None:
        raise ConfigError(
            f"--per-size, --thresholds, --confusion: are for detectors, and {type(evaluator).__name__} scores none."
        )
    if args.per_size:
        print_numbers(of_detector.details()[1])
    iou_type = of_detector.iou_types[-1]
    if args.thresholds:
        print_thresholds(of_detector, args.thresholds, iou_type, args.iou)
    if args.confusion is not None:
        print_confusion(of_detector, args, iou_type)


def print_numbers(rows: Mapping[str, Mapping[str, float]]) -> None:
    """Each row's name, then names and values of its numbers."""
    width = max(map(len, rows), default=0)
    for name, numbers in rows.items():
        scores = [(key, f"{value:.3f}" if value >= 0 else "-") for key, value in numbers.items() if key != "objects"]
        texts = "  ".join(f"{key} {text:<5}" for key, text in scores)
        print(f"  {name:<{width}}  {texts}  {numbers['objects']} objects")


def print_thresholds(evaluator: Any, thresholds: list[float], iou_type: str, iou: float) -> None:
    truth, results = evaluator.dataset.ground_truth(), evaluator.results()
    rows = threshold_rows(truth, results, thresholds, iou_type=iou_type, iou=iou)
    best = best_threshold(truth, results, iou_type=iou_type, iou=iou)
    print(f"{iou_type}, IoU from {iou:g}\n  score  precision  recall     F1    right    wrong   missed")
    for row in [*rows, best]:
        last = "  highest F1" if row is best else ""
        print(
            f"  {row.threshold:5.3f}  {row.precision:9.3f}  {row.recall:6.3f}  {row.f1:5.3f}  {row.right:7}"
            f"  {row.wrong:7}  {row.missed:7}{last}"
        )


def print_confusion(evaluator: Any, args: argparse.Namespace, iou_type: str) -> None:
    """The most frequent confusions, and a picture of all."""
    matrix = confusion_matrix(
        evaluator.dataset.ground_truth(), evaluator.results(), evaluator.dataset.category_ids,
        threshold=args.confusion, iou_type=iou_type, iou=args.iou,
    )  # fmt: skip
    names = [*evaluator.dataset.classes, "(nothing)"]
    wrong = matrix * (1 - np.eye(len(names), dtype=np.int64))
    print(f"predictions from score {args.confusion:g} on, IoU from {args.iou:g}: {matrix.trace()} right")
    for place in np.argsort(-wrong, axis=None, kind="stable")[:8]:
        row, column = np.unravel_index(place, wrong.shape)
        if wrong[row, column]:
            what = f"{names[row]} taken for {names[column]}"
            if names[column] is names[-1]:
                what = f"{names[row]} missed"
            elif names[row] is names[-1]:
                what = f"{names[column]} where nothing is"
            print(f"  {wrong[row, column]:6} {what}")
    out = args.out or Path("results.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    picture = out.with_name(f"{out.stem}_confusion.png")
    draw_confusion_matrix(matrix, names, picture, what="objects and predictions")
    print(f"  all of them are in {picture}")


if __name__ == "__main__":
    main()
