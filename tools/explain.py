"""Draw what a detector looks at, as the papers' figures do: attention, sampling points, boxes of each query.

DETR, for one image: encoder self-attention at points of the image, decoder cross-attention of each detected box.
Deformable DETR, for one image: reference point, sampling points and box of queries through the decoder's layers.
Both, with --dataset: where each query's boxes lie over the config's validation data.

Examples:
    python tools/explain.py configs/detr_r50.py detr_r50 --image street.jpg
    python tools/explain.py configs/detr_r50.py detr_r50 --image street.jpg --points 200,340 410,80
    python tools/explain.py configs/deformable_detr_r50.py weights.pth --image street.jpg --queries 17 203
    python tools/explain.py configs/quickstart/detr.py runs/detr/best.pth --dataset data.val.num_images=1000
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.ops import nms

from vitkit import AttentionRecorder, build_dataset, load_config
from vitkit.config import Config
from vitkit.data.images import read_image
from vitkit.data.loader import DataSettings, Loader
from vitkit.engine.evaluate import evaluate
from vitkit.engine.settings import require
from vitkit.errors import ConfigError, DataError, VitkitError, error_line
from vitkit.inference import Predictor, load
from vitkit.logging import setup_logging
from vitkit.nn.attention import MultiHeadAttention
from vitkit.nn.deformable_attention import MultiScaleDeformableAttention, SamplingRecorder
from vitkit.ops.boxes import cxcywh_to_xyxy, scale_boxes
from vitkit.ops.images import resize_mask
from vitkit.visualization.attention import (
    QueryLayer,
    draw_decoder_attention,
    draw_encoder_attention,
    draw_query_slots,
    draw_sampling_points,
)

MAX_BOXES = 7  # drawn unless queries are named; with the panel of all boxes two rows of four
MAX_POINTS = 3
MAX_SAMPLED = 3  # queries of Deformable DETR, a picture each
MAX_SLOTS = 20


def query_number(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no query's number (overrides go before --queries and --points)")
    return int(text)


def point(text: str) -> tuple[float, float]:
    try:
        x, y = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no point x,y, such as 200,340 (overrides go before --queries and --points)"
        ) from None
    return x, y


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a config file")
    parser.add_argument("checkpoint", help="weights: a run's checkpoint, an official one, or a name of the model zoo")
    parser.add_argument("overrides", nargs="*", help="key.sub=value, such as data.root=data/coco")
    parser.add_argument("--image", type=Path, help="the picture to explain; resized as the validation data is")
    parser.add_argument(
        "--queries",
        type=query_number,
        nargs="+",
        metavar="N",
        help="to draw, from 0 (default: the best-scoring; with --dataset alone the first 20)",
    )
    parser.add_argument(
        "--points", type=point, nargs="+", metavar="X,Y", help="pixels of the image (default: the best boxes' centres)"
    )
    parser.add_argument("--encoder-layer", type=int, metavar="N", help="of DETR, from 0 (default: the last)")
    parser.add_argument("--decoder-layer", type=int, metavar="N", help="of DETR, from 0 (default: the last)")
    parser.add_argument("--threshold", type=float, default=0.5, help="least score of the boxes drawn by default (0.5)")
    parser.add_argument("--dataset", action="store_true", help="draw each query's boxes over the validation data")
    parser.add_argument("--out", type=Path, default=Path("runs/explain"), help="folder of the PNGs (runs/explain)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_intermixed_args(argv)
    if args.image is None and not args.dataset:
        parser.error("nothing to draw: give a picture by --image, or --dataset, or both")
    if args.points and args.image is None:
        parser.error("--points are places of a picture: give it by --image")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        setup_logging()
        run(load_config(args.config, args.overrides), args)
    except VitkitError as error:
        sys.exit(error_line(error))


def run(config: Config, args: argparse.Namespace) -> None:
    """Loads the model, looks at the image or the dataset with it, and writes the pictures."""
    require(config, "model", "data.val")
    data = DataSettings(**config["data"])
    image = None if args.image is None else read_picture(args.image, args.points)
    dataset = build_dataset(data.val, data.root, where="data.val") if args.dataset else None
    predictor = load(config, args.checkpoint, classes=None if dataset is None else dataset.classes, device=args.device)
    deformable = samples_points(predictor.model)
    if deformable and (args.points or args.encoder_layer is not None or args.decoder_layer is not None):
        raise ConfigError(
            f"--points, --encoder-layer, --decoder-layer: {type(predictor.model.head).__name__} attends to sampled "
            "points, and all its decoder layers are drawn. Leave them out; --queries chooses what to draw."
        )
    print(predictor.report)
    args.out.mkdir(parents=True, exist_ok=True)

    if image is not None:
        explain = explain_sampling if deformable else explain_attention
        explain(predictor, image, args)
    if dataset is not None:
        explain_slots(predictor.model, data.val_loader(dataset), args)


def read_picture(path: Path, points: Sequence[tuple[float, float]] | None) -> np.ndarray:
    """(H, W, 3) uint8 RGB, upright.

    Raises:
        DataError: no such file, no image, or a point is outside it.
    """
    if not path.is_file():
        raise DataError(f"--image: no file '{path}'. Give the path of a picture.")
    image = read_image(path)
    height, width = image.shape[:2]
    for x, y in points or ():
        if not (0 <= x < width and 0 <= y < height):
            raise DataError(
                f"--points: {x:g},{y:g} is outside '{path}', which is {width}x{height} pixels (width x height)."
            )
    return image


def samples_points(model: nn.Module) -> bool:
    """Whether the decoder attends to sampled points, as Deformable DETR's, and not to every place, as DETR's.

    Raises:
        ConfigError: it does neither.
    """
    layers = getattr(getattr(getattr(model, "head", None), "decoder", None), "layers", [])
    attention = getattr(layers[0], "cross_attn", None) if len(layers) else None
    if not isinstance(attention, MultiHeadAttention | MultiScaleDeformableAttention):
        head = type(getattr(model, "head", model)).__name__
        raise ConfigError(
            f"{head} has no decoder whose queries attend to the image: explain draws DETRHead and DeformableDETRHead."
        )
    return isinstance(attention, MultiScaleDeformableAttention)


@dataclass
class View:
    """What a model makes of one image."""

    outputs: dict[str, Any]
    records: dict[str, list]
    """What the recorder collected, by name."""
    feature_sizes: dict[str, tuple[int, int]]
    """(height, width) of the maps that the head got."""
    padding_mask: Tensor
    """(1, H, W) bool of the image as the backbone got it, which some models pad to whole strides."""


@torch.no_grad()
def look(predictor: Predictor, image: np.ndarray, recorder: AttentionRecorder | SamplingRecorder) -> View:
    """Runs the model on an image, prepared as the validation data is, under a recorder."""
    batch = predictor.prepare([image]).to(predictor.device)
    head_inputs = []
    hook = predictor.model.head.register_forward_pre_hook(lambda _, inputs: head_inputs.extend(inputs))
    with recorder as records, hook:
        outputs = predictor.model(**batch.inputs)
    features, padding_mask = head_inputs
    sizes = {name: tuple(feature.shape[-2:]) for name, feature in features.items()}
    return View(outputs, records, sizes, padding_mask.cpu())


def covered_by(padding_mask: Tensor) -> tuple[float, float]:
    """Height and width of an image with its padding (1, H, W), in those of the image: 1 without padding, else more."""
    free = ~padding_mask[0]
    return len(free) / int(free[:, 0].sum()), free.shape[1] / int(free[0].sum())


def class_scores(outputs: dict[str, Any], num_classes: int) -> Tensor:
    """(Q, num_classes) in 0..1 of the first image, whether the logits have a column for no object (a softmax) or not.

    The rows are the queries' own, where a model's `postprocess` may order or leave out some.
    """
    logits = outputs["pred_logits"][0].float().cpu()
    return logits.softmax(dim=-1)[:, :-1] if logits.shape[-1] > num_classes else logits.sigmoid()


def choose_queries(args: argparse.Namespace, scores: Tensor, limit: int) -> list[int]:
    """The queries asked for; or those above the threshold, best first, and where there is none the best one.

    Args:
        scores: (Q,).
        limit: of queries that were not asked for.
    """
    if args.queries:
        return check_queries(args.queries, len(scores))
    best = scores.argsort(descending=True)[:limit]
    kept = best[scores[best] >= args.threshold]
    if not len(kept):
        print(f"no box scores {args.threshold:g} (see --threshold); drawing the best, {scores[best[0]]:.2f}")
        kept = best[:1]
    return kept.tolist()


def check_queries(queries: Sequence[int], num_queries: int) -> list[int]:
    for query in queries:
        if query >= num_queries:
            raise ConfigError(f"--queries: got {query}; the model's queries are 0 to {num_queries - 1}.")
    return list(queries)


def explain_attention(predictor: Predictor, image: np.ndarray, args: argparse.Namespace) -> None:
    """DETR: two pictures."""
    model, classes = predictor.model, predictor.classes
    encoder_layer = layer_number(model.head.encoder, args.encoder_layer, "--encoder-layer")
    decoder_layer = layer_number(model.head.decoder, args.decoder_layer, "--decoder-layer")
    # Only these two: the maps of all layers would take gigabytes for a large image.
    watched = nn.ModuleDict(
        dict(
            encoder=model.head.encoder.layers[encoder_layer].self_attn,
            decoder=model.head.decoder.layers[decoder_layer].cross_attn,
        )
    )
    view = look(predictor, image, AttentionRecorder(watched))
    height, width = view.feature_sizes[model.head.feature_name]
    covered = covered_by(view.padding_mask)
    encoder_maps, decoder_maps = (
        view.records[name][0][0].mean(dim=0).cpu().unflatten(-1, (height, width)) for name in ("encoder", "decoder")
    )
    scores, labels = class_scores(view.outputs, len(classes)).max(dim=-1)
    queries = choose_queries(args, scores, MAX_BOXES)
    size = image.shape[:2]
    boxes_xyxy = scale_boxes(cxcywh_to_xyxy(view.outputs["pred_boxes"][:, queries].float().cpu()), [size])[0]

    # Several queries may have found one object, and one point in it is enough.
    distinct = nms(boxes_xyxy, scores[queries], iou_threshold=0.5)[:MAX_POINTS]
    points = args.points or centres(boxes_xyxy[distinct], size)
    cells = [place_of(point, size, (height, width), covered) for point in points]
    draw_encoder_attention(
        image, points, encoder_maps[cells], args.out / f"{args.image.stem}_encoder.png", covered=covered,
        title=f"Encoder self-attention, layer {encoder_layer}, mean of the heads (full colour: the largest weight)",
    )  # fmt: skip
    draw_decoder_attention(
        image, boxes_xyxy, [classes[label] for label in labels[queries]], decoder_maps[queries],
        args.out / f"{args.image.stem}_decoder.png", scores=scores[queries], queries=queries, covered=covered,
        title=f"Decoder cross-attention, layer {decoder_layer}, mean of the heads (full colour: the largest weight)",
    )  # fmt: skip
    for name in ("encoder", "decoder"):
        print(f"wrote {args.out / f'{args.image.stem}_{name}.png'}")


def layer_number(stack: nn.Module, number: int | None, option: str) -> int:
    last = len(stack.layers) - 1
    number = last if number is None else number
    if not 0 <= number <= last:
        what = f"the model's layers are 0 to {last}" if last >= 0 else "the model has no such layer"
        raise ConfigError(f"{option}: got {number}; {what}.")
    return number


def centres(boxes_xyxy: Tensor, size: tuple[int, int]) -> list[tuple[float, float]]:
    """(x, y) of the boxes' centres, pixels inside the image of that (height, width)."""
    height, width = size
    middle = (boxes_xyxy[:, :2] + boxes_xyxy[:, 2:]) / 2
    return [(min(max(x, 0), width - 1), min(max(y, 0), height - 1)) for x, y in middle.tolist()]


def place_of(
    point: tuple[float, float], size: tuple[int, int], map_size: tuple[int, int], covered: tuple[float, float]
) -> int:
    """The place of a map, row by row, that a point (x, y) of the image lies on.

    Args:
        size: (height, width) of the image in pixels.
        map_size: of the map.
        covered: see `covered_by`.
    """
    (x, y), (height, width) = point, size
    row = math.floor(y / (height * covered[0]) * map_size[0])
    column = math.floor(x / (width * covered[1]) * map_size[1])
    return row * map_size[1] + column


def explain_sampling(predictor: Predictor, image: np.ndarray, args: argparse.Namespace) -> None:
    """Deformable DETR: a picture per query."""
    model, classes = predictor.model, predictor.classes
    view = look(predictor, image, SamplingRecorder(model.head.decoder))
    outputs = [*view.outputs["aux_outputs"], view.outputs]
    scores = [class_scores(output, len(classes)).max(dim=-1) for output in outputs]
    strides = [info.stride for info in model.neck.feature_info.values()]
    # The model takes whole places of a level for padding, so that each level has its own share of it.
    masks = [resize_mask(view.padding_mask, size) for size in view.feature_sizes.values()]
    covered = torch.tensor([covered_by(mask)[::-1] for mask in masks])  # (levels, 2) of x, y
    for query in choose_queries(args, scores[-1].values, MAX_SAMPLED):
        layers = []
        for i, (output, score) in enumerate(zip(outputs, scores)):
            locations, weights = (
                record[0, query].float().cpu() for record in view.records[f"layers.{i}.cross_attn"][0]
            )
            layers.append(
                QueryLayer(
                    locations=locations * covered[:, None],
                    weights=weights,
                    reference=output["reference_points"][0, query].float().cpu(),
                    box_cxcywh=output["pred_boxes"][0, query].float().cpu(),
                    name=classes[score.indices[query]],
                    score=float(score.values[query]),
                )
            )
        path = args.out / f"{args.image.stem}_query{query}.png"
        title = f"Query {query}: reference, sampling points of all heads, and box, by decoder layer"
        draw_sampling_points(image, layers, path, strides=strides, title=title)
        print(f"wrote {path}")


class SlotCollector:
    """Stands where an evaluator does, and keeps every query's box, where predictions may reorder or leave out some."""

    def __init__(self) -> None:
        self.boxes_cxcywh: list[Tensor] = []
        self.aspect_ratios: list[float] = []

    def see(self, model: nn.Module, inputs: tuple, outputs: dict[str, Any]) -> None:
        """A forward hook."""
        self.boxes_cxcywh.append(outputs["pred_boxes"].float().cpu())

    def update(self, predictions: list, targets: list[dict[str, Any]]) -> None:
        for target in targets:
            height, width = target["original_size"]
            self.aspect_ratios.append(width / height)

    def gather(self) -> None:
        pass

    def compute(self) -> dict[str, float]:
        return {}

    def table(self) -> str:
        return ""


def explain_slots(model: nn.Module, loader: Loader, args: argparse.Namespace) -> None:
    """The boxes of each query over the dataset: one picture."""
    if hasattr(model.head, "proposals"):
        raise ConfigError(
            "--dataset: the queries of a two-stage model are each image's own proposals, so they have no places over a "
            "dataset. Leave --dataset out, or take a model without model.head.two_stage."
        )
    collector = SlotCollector()
    with model.register_forward_hook(collector.see):
        evaluate(
            model, loader, collector, device=torch.device(args.device), progress=lambda line: print(line, flush=True)
        )
    boxes_cxcywh = torch.cat(collector.boxes_cxcywh)
    num_images, num_queries = boxes_cxcywh.shape[:2]
    queries = check_queries(args.queries or range(min(MAX_SLOTS, num_queries)), num_queries)
    path = args.out / "query_slots.png"
    draw_query_slots(
        boxes_cxcywh, torch.tensor(collector.aspect_ratios), path, queries=queries,
        title=f"Box centres of each query over {num_images} images",
    )  # fmt: skip
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
