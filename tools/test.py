"""Evaluate a model on its config's validation data: print its metrics, and write metrics.json and results.json.

Detectors                      the COCO metrics; results.json is for pycocotools
Panoptic and semantic models   PQ or IoU; a folder of maps beside results.json
Classifiers                    also a figure of the confusion matrix

To score predictions that were written earlier, give --eval-only RESULTS, on the data of MODEL or on --annotations.

Examples:
    vitkit test configs/detr_r50.py detr-r50-e632da11.pth data.root=data/coco
    vitkit test runs/detr --per-class
    vitkit test runs/detr --split test    (data.test, which was not used for any choice)
    torchrun --nproc-per-node 8 -m vitkit.tools.test configs/detr_r50.py runs/detr_r50/best.pth
    vitkit test runs/detr --resume runs/detr/results.stored_predictions    (continue a killed evaluation)
    vitkit test configs/camvid/mask2former.py runs/mask2former/best.pth --tta    (several sizes, mirrored)
    vitkit test runs/roofs --tiles 800    (images much larger than those it was trained on)
    vitkit test configs/bccd/detr.py runs/detr/best.pth --per-class --per-size --thresholds --confusion 0.4
    vitkit test runs/detr --report report.html    (a page: numbers with intervals, curves, errors, images)
    vitkit test configs/detr_r50.py --eval-only results.json
    vitkit test --eval-only results.json --annotations instances_val2017.json --images val2017 --report report.html
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitkit.errors import ConfigError
from vitkit.text_format import pluralize
from vitkit.tools.common import (
    MODEL_HELP,
    a_path,
    add_device,
    add_iou,
    add_runtime,
    add_tiles,
    add_trust,
    check_out,
    errors_in_one_line,
    fraction,
    new_file,
    sort_model,
    tiling_of,
)

if TYPE_CHECKING:
    from vitkit.apps.training.testing import Evaluation
    from vitkit.structures import ScoreThresholds


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help=MODEL_HELP)
    parser.add_argument("weights", nargs="?", help="the weights of a config: a checkpoint, or a name of the model zoo")
    parser.add_argument(
        "overrides", nargs="*", default=[], help="key.sub=value for the config, such as data.root=data/coco"
    )
    text = "score predictions written earlier instead of running a model: the JSON, or a folder of semantic PNGs"
    parser.add_argument("--eval-only", type=a_path, metavar="RESULTS", help=text)
    text = "without MODEL, score boxes or masks on these annotations in COCO's format"
    parser.add_argument("--annotations", type=a_path, metavar="FILE", help=text)
    text = "folder of the images of --annotations, which a report then shows"
    parser.add_argument("--images", type=a_path, metavar="DIR", help=text)
    text = "average a semantic model's scores over image sizes, each also mirrored"
    parser.add_argument("--tta", action="store_true", help=text)
    text = "sizes for --tta, relative to the evaluated one (default: 0.5,0.75,1,1.25,1.5,1.75)"
    parser.add_argument("--tta-scales", type=scales, metavar="SCALES", help=text)
    text = "split to evaluate; training data are prepared like validation data (default: val)"
    parser.add_argument("--split", choices=("train", "val", "test"), default="val", help=text)
    add_tiles(parser)
    parser.add_argument("--per-class", action="store_true", help="also print the metrics of each class")
    parser.add_argument("--per-size", action="store_true", help="for detectors, also print the metrics by object size")
    text = "for detectors, also print precision, recall and F1 at these scores (without T: 0.1 to 0.9)"
    parser.add_argument("--thresholds", type=fraction, nargs="*", metavar="T", help=text)
    text = "for detectors, draw the confusion matrix of predictions with at least this score (without SCORE: 0.5)"
    parser.add_argument("--confusion", type=fraction, nargs="?", const=0.5, metavar="SCORE", help=text)
    add_iou(parser, "for --thresholds, --confusion and --report")
    text = "results file to write (default: results.json in the run's folder, or in this one)"
    parser.add_argument("--out", type=a_path, help=text)
    text = "resume the interrupted evaluation in this folder, named after its results: results.stored_predictions"
    parser.add_argument("--resume", type=a_path, metavar="FOLDER", help=text)
    parser.add_argument("--report", type=a_path, metavar="HTML", help="write a page with numbers, curves and images")
    add_runtime(parser)
    add_trust(parser)
    add_device(parser)
    parser.add_argument("--print-config", action="store_true", help="print every value and where it was set, and stop")
    args = parser.parse_intermixed_args(argv)
    if args.thresholds == []:
        args.thresholds = [tenths / 10 for tenths in range(1, 10)]
    sort_model(args)
    if args.model is None and not args.eval_only:
        parser.error("a model is needed, such as a run, or --eval-only RESULTS")
    if args.eval_only and args.weights:
        parser.error("give either weights or --eval-only RESULTS")
    if args.annotations and (args.model or not args.eval_only):
        parser.error("--annotations are for --eval-only RESULTS without MODEL, which has its own")
    if args.images and not args.annotations:
        parser.error("--images are those of --annotations")
    if args.tta and args.tiles:
        parser.error("--tta and --tiles each predict an image in their own way: give one of them")
    if args.tta_scales and not args.tta:
        parser.error("--tta-scales are those of --tta: give both")
    predicts = {"--resume": args.resume, "--tta": args.tta, "--tiles": args.tiles, "--tile-overlap": args.tile_overlap}
    if args.eval_only and (given := [option for option, value in predicts.items() if value]):
        parser.error(f"{given[0]} changes what a model predicts, and --eval-only has no model: give one of them")
    if args.eval_only and args.out and args.confusion is None:
        parser.error("--out names the results to write, and --eval-only only reads some: leave out --out")
    return args


def scales(text: str) -> tuple[float, ...]:
    """Parse scales: "0.5,1,1.5" -> (0.5, 1.0, 1.5)."""
    return tuple(float(number) for number in text.split(","))


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    from vitkit.apps.inference import find_model, find_trained
    from vitkit.apps.inference.card import METRICS, Measured, data_name, save_metrics
    from vitkit.apps.training.config_listing import format_config
    from vitkit.apps.training.process_group import close_distributed, init_distributed
    from vitkit.apps.training.results import score_file, score_results
    from vitkit.apps.training.stored_predictions import PredictionFiles
    from vitkit.apps.training.testing import evaluate_model
    from vitkit.apps.training.tta import SCALES
    from vitkit.distributed import broadcast_object, is_main
    from vitkit.logging import setup_logging

    out = args.out or (args.resume and args.resume.with_suffix(".json")) or new_file("results.json", args.model or "")
    figure = f"{out.stem}_confusion.png"
    figure = out.with_name(figure) if args.out else new_file(figure, args.model or "")
    metrics_file = out.with_name(f"{out.stem}_{METRICS}") if args.out else new_file(METRICS, args.model or "")
    details = EvaluationDetails(
        args.split,
        per_class=args.per_class,
        per_size=args.per_size,
        thresholds=args.thresholds or (),
        confusion=args.confusion,
        iou=args.iou,
        figure=figure,
    )
    try:
        with errors_in_one_line():
            check_out("--out", args.out if args.eval_only or args.print_config else out)
            check_out("--report", args.report)
            if args.model is None:
                setup_logging()
                evaluator = score_file(args.eval_only, annotations=args.annotations, images=args.images).evaluator
                show(evaluator, details)
                write_page(evaluator, args.report, {"results": str(args.eval_only)})
                return
            needs_weights = not (args.eval_only or args.print_config)
            find = find_trained if needs_weights else find_model
            config, weights = find(args.model, args.weights, overrides=args.overrides, trust=args.trust)
            if args.print_config:
                print(format_config(config))
                return
            device = init_distributed(args.device)
            setup_logging()
            facts = {"model": args.model, "results": str(args.eval_only or args.weights or "predicted now")}
            if args.eval_only:
                if is_main():
                    evaluator = score_results(args.eval_only, config, weights, split=args.split)
                    show(evaluator, details)
                    write_page(evaluator, args.report, facts)
                return
            # In one place, on all ranks: a result of the same name may appear between their looking for it.
            folder = broadcast_object(args.resume or out.with_suffix(".stored_predictions"))
            prediction_files = PredictionFiles(folder, resume=args.resume is not None)
            result = evaluate_model(
                config,
                weights,
                device,
                tta_scales=(args.tta_scales or SCALES) if args.tta else None,
                tiling=tiling_of(args.tiles, args.tile_overlap),
                split=args.split,
                prediction_files=prediction_files,
                runtime=args.runtime,
            )
            if is_main():
                show(result.evaluator, details, result.thresholds)
                write(result, out, requested=args.out is not None)
                prediction_files.remove()
                options = {"tta": args.tta, "tiles": args.tiles}
                options = {name: value for name, value in options.items() if value}
                measured = Measured(data_name(config), args.split, options, result.metrics)
                save_metrics(metrics_file, measured, weights)
                print(f"metrics are in {metrics_file}")
                write_page(result.evaluator, args.report, facts)
                print(f"{1e3 * result.seconds_per_sample:.1f} ms per {result.sample} on {device.type}")
    finally:
        close_distributed()


class EvaluationDetails(NamedTuple):
    """The parts of an evaluation that are printed besides its table."""

    split: str
    per_class: bool
    per_size: bool
    thresholds: Sequence[float]
    """Scores at which precision, recall and F1 are printed."""
    confusion: float | None
    """The minimum score of the predictions in the confusion matrix; None: it is not drawn."""
    iou: float | None
    """The minimum IoU of a correct detection; None: the evaluator's."""
    figure: Path
    """The file of the confusion matrix."""


def write(result: Evaluation, out: Path, *, requested: bool) -> None:
    """Write the predictions, if the evaluator can or it was requested; print what was measured other than the table."""
    from vitkit.evaluation.text import perplexity
    from vitkit.protocols.evaluator import Evaluator

    metrics = result.metrics
    if "nll" in metrics:
        print(f"token accuracy {metrics['token_accuracy']:.4f}   perplexity {perplexity(metrics['nll']):.3f}")
    if not requested and type(result.evaluator).write_results is Evaluator.write_results:
        print(f"no results file: {type(result.evaluator).__name__} does not write its predictions")
        return
    print(f"results are in {', '.join(map(str, result.write(out)))}")


def write_page(evaluator: Any, path: Path | None, facts: Mapping[str, str]) -> None:
    """Write the report if it was requested."""
    if path is None:
        return
    from vitkit.apps.report import write_report

    written = write_report(evaluator, path, title=path.stem, facts=facts)
    print(f"the report is {written} ({written.stat().st_size / 1e6:.1f} MB)")


def show(evaluator: Any, details: EvaluationDetails, stored: ScoreThresholds | None = None) -> None:
    """Print the evaluator's table, score thresholds, also those stored with the weights, and the requested details."""
    detections = [part for part in evaluator.parts if part.iou_types]
    for part in detections if details.iou is not None else ():
        part.match_at(details.iou)
    table = evaluator.table()
    print(table)
    thresholds = evaluator.score_thresholds()
    if stored is not None:
        print(f"the model shows objects from {stored}")
    if thresholds is not None:
        # Chosen on test data, a threshold would be part of what is tested.
        use = "best in this evaluation:" if details.split == "val" else f"best on data.{details.split}, and not stored:"
        print(f"{use} {thresholds}")
    detection = detections[0] if detections else None
    if details.per_class and detection is evaluator:
        print_numbers(evaluator.details()[0])
    elif details.per_class:
        named = {line.partition("  ")[0].strip() for line in table.splitlines()}
        for name, value in evaluator.per_class().items():
            if name in named:  # the table has it already
                continue
            print(f"  {name:<20} {evaluator.per_class_metric} {f'{value:.3f}' if value >= 0 else '–'}")
    if not (details.per_size or details.thresholds or details.confusion is not None):
        return
    if detection is None:
        raise ConfigError(
            f"--per-size, --thresholds, --confusion: only detections have these, which {type(evaluator).__name__} does "
            "not evaluate."
        )
    if details.per_size:
        print_numbers(detection.details()[1])
    iou_type = detection.iou_types[-1]
    if details.thresholds:
        print_thresholds(detection, details.thresholds, iou_type)
    if details.confusion is not None:
        print_confusion(detection, details.confusion, iou_type, details.figure)


def print_numbers(rows: Mapping[str, Mapping[str, float]]) -> None:
    """Print for each row its name, and the names and values of its numbers."""
    width = max(map(len, rows), default=0)
    for name, numbers in rows.items():
        scores = [(key, f"{value:.3f}" if value >= 0 else "–") for key, value in numbers.items() if key != "objects"]
        texts = "  ".join(f"{key} {text:<5}" for key, text in scores)
        print(f"  {name:<{width}}  {texts}  {pluralize(numbers['objects'], 'objects')}")


def print_thresholds(evaluator: Any, thresholds: Sequence[float], iou_type: str) -> None:
    """Print precision, recall and F1 at each threshold, and at the threshold with the highest F1."""
    from vitkit.evaluation.score_thresholds import compute_threshold_rows, find_best_row

    rankings = evaluator.named_statistics()[iou_type].rankings()
    rows, best = compute_threshold_rows(rankings, thresholds), find_best_row(rankings)
    print(f"{iou_type}, IoU of at least {evaluator.iou:g}")
    print("  score  precision  recall     F1  true pos.  false pos.   missed")
    for row in [*rows, best]:
        last = "  highest F1" if row is best else ""
        print(
            f"  {row.threshold:5.3f}  {row.precision:9.3f}  {row.recall:6.3f}  {row.f1:5.3f}  {row.true_positives:9}"
            f"  {row.false_positives:10}  {row.false_negatives:7}{last}"
        )


def print_confusion(evaluator: Any, threshold: float, iou_type: str, path: Path) -> None:
    """Print the most frequent confusions, and draw all of them."""
    import numpy as np

    from vitkit.apps.report.matching import confusion_matrix
    from vitkit.apps.visualization.metrics import draw_confusion_matrix

    matrix = confusion_matrix(
        evaluator.dataset.ground_truth(),
        evaluator.results(),
        evaluator.dataset.category_ids,
        threshold=threshold,
        iou_type=iou_type,
        iou=evaluator.iou,
        sigmas=evaluator.dataset.keypoints.sigmas if iou_type == "keypoints" else (),
    )
    names = [*evaluator.dataset.classes, "(nothing)"]
    wrong = matrix * (1 - np.eye(len(names), dtype=np.int64))
    limits = f"score of at least {threshold:g}, IoU of at least {evaluator.iou:g}"
    print(f"predictions with a {limits}: {matrix.trace()} correct")
    for cell in np.argsort(-wrong, axis=None, kind="stable")[:8]:
        row, column = np.unravel_index(cell, wrong.shape)
        if wrong[row, column]:
            confusion = f"{names[row]} taken for {names[column]}"
            if names[column] is names[-1]:
                confusion = f"{names[row]} missed"
            elif names[row] is names[-1]:
                confusion = f"{names[column]}, no object"
            print(f"  {wrong[row, column]:6} {confusion}")
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_confusion_matrix(matrix, names, path, what="objects and predictions")
    print(f"  all of them are in {path}")


if __name__ == "__main__":
    main()
