"""Evaluate every decoder layer of a trained detector, with and without non-maximum suppression.

A single layer predicts an object with several queries, so suppression helps; later layers suppress duplicates
themselves (Carion et al. 2020, figure 4, https://arxiv.org/abs/2005.12872).

Example:
    vitkit compare_layers runs/detr --out layers.png
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torchvision.ops import batched_nms

from vitkit.checkpoint import load_weights
from vitkit.data.loading.loader import DataSettings
from vitkit.engine.build import build_model_for
from vitkit.errors import ConfigError
from vitkit.inference import find_trained
from vitkit.models.detr import DETR
from vitkit.registry import EVALUATORS
from vitkit.structures import Detections
from vitkit.tools.common import add_device, add_model, add_trust, errors_in_one_line, new_file, sort_model
from vitkit.visualization.canvas import save_figure

METRICS = ("bbox/AP", "bbox/AP50")
Rows = dict[bool, list[dict[str, float]]]
"""Whether boxes are suppressed -> the metrics of each decoder layer, in order."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument(
        "--iou", type=float, default=0.5, help="suppress boxes of one class with a higher IoU than this (default: 0.5)"
    )
    parser.add_argument("--out", type=Path, metavar="PNG", help="the plot to write (default: layers.png)")
    add_trust(parser)
    add_device(parser)
    args = parser.parse_intermixed_args(argv)
    sort_model(args)
    if not 0 <= args.iou <= 1:
        parser.error(f"--iou {args.iou}: expected 0 to 1")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with errors_in_one_line():
        config, weights = find_trained(args.model, args.weights, overrides=args.overrides, trust=args.trust)
        rows = evaluate_layers(config, weights, torch.device(args.device), iou=args.iou)
        args.out = args.out or new_file("layers.png")
        plot(rows, args.out)
    print("layer  " + "  ".join(f"{name:>9}  with NMS" for name in METRICS))
    for i, (plain, suppressed) in enumerate(zip(rows[False], rows[True]), start=1):
        print(f"{i:<5}  " + "  ".join(f"{plain[name]:9.3f}  {suppressed[name]:8.3f}" for name in METRICS))
    print(f"drew {args.out}")


@torch.no_grad()
def evaluate_layers(config: Mapping[str, Any], weights: Path, device: torch.device, *, iou: float) -> Rows:
    """Predict the validation images once, and score each layer's boxes.

    Raises:
        ConfigError: the model is not a detector with decoder layers.
    """
    data = DataSettings(**config["data"])
    dataset = data.dataset("val")
    model = build_model_for(config, dataset, {})
    if not isinstance(model, DETR):
        raise ConfigError(f"{type(model).__name__} has no decoder layers that predict boxes; expected a DETR.")
    load_weights(model, weights, classes=dataset.classes)
    model.to(device).eval()
    evaluators: dict[bool, list[Any]] = {False: [], True: []}
    for batch in data.val_loader(dataset):
        batch = batch.to(device)
        outputs = model(**batch.inputs)
        sizes = [target["original_size"] for target in batch.targets]
        for i, layer in enumerate([*outputs["aux_outputs"], outputs]):
            predictions = model.postprocess(layer, sizes)
            for suppresses, of_layers in evaluators.items():
                if i == len(of_layers):
                    of_layers.append(EVALUATORS.build("CocoEvaluator", dataset=dataset))
                kept = [suppress(prediction, iou) for prediction in predictions] if suppresses else predictions
                of_layers[i].update(kept, batch.targets)
    return {suppresses: [of_layer.compute() for of_layer in layers] for suppresses, layers in evaluators.items()}


def suppress(detections: Detections, iou: float) -> Detections:
    """Keep the boxes whose IoU with every better box of their class is at most `iou`."""
    boxes, scores, labels = detections["boxes_xyxy"], detections["scores"], detections["labels"]
    kept = batched_nms(boxes, scores, labels, iou)
    return Detections(scores=scores[kept], labels=labels[kept], boxes_xyxy=boxes[kept])


def plot(rows: Rows, path: Path) -> None:
    """Draw the metrics over the layers."""
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for number, metric in enumerate(METRICS):
        for suppresses, style in ((False, "-"), (True, "--")):
            values = [layer[metric] for layer in rows[suppresses]]
            label = f"{metric}, with NMS" if suppresses else metric
            axes.plot(range(1, len(values) + 1), values, style, marker="o", color=f"C{number}", label=label)
    axes.set(xlabel="decoder layer", xticks=range(1, len(rows[False]) + 1))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path, dpi=110)


if __name__ == "__main__":
    main()
