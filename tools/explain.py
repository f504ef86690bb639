"""Draw what a model looks at, as the papers' figures do: attention, sampling points, boxes of each query.

DETR, for one image: encoder self-attention at points of the image, decoder cross-attention of each detected box.
MaskFormer and Mask2Former, for one image: the same for each mask; the masks and how they merge; the loss's points.
Deformable DETR, for one image: reference point, sampling points and box of queries through the decoder's layers.
DETR and Deformable DETR, with --dataset: where each query's boxes lie over the config's validation data.
ViT, Swin, MViT, LR-Net, non-local ResNet, alone or below a head: the class token's maps for each head and layer,
attention rollout, what points attend to in each layer, local kernels; with --images, the attention distance of heads.
Text models, for one sentence, and captioners, for one image: attention of each head as matrices and arcs, position
encoding, next-token distributions, beams as a tree.
TimeSformer, for one video: attention over space and time of points in a frame, and of the class token.

Examples:
    python tools/explain.py detr_r50 --image street.jpg
    python tools/explain.py runs/vit --image cat.jpg --images pictures/ --compare runs/vit_pretrained
    python tools/explain.py detr_r50 --image street.jpg --points 200,340 410,80
    python tools/explain.py configs/deformable_detr_r50.py weights.pth --image street.jpg --queries 17 203
    python tools/explain.py runs/detr --image street.jpg --html
    python tools/explain.py runs/detr --dataset data.val.num_images=1000
    python tools/explain.py runs/translation --text "one hundred twenty-three" --beams 4
    python tools/explain.py runs/timesformer --video run.mp4 --frame 3 --points 100,60
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.ops import nms

from vitkit.config import Config
from vitkit.data.io.image_files import read_image
from vitkit.data.loading.loader import BatchLoader, DataSettings
from vitkit.engine.failures import evaluation_remedies, memory_explained
from vitkit.engine.settings import require
from vitkit.errors import ConfigError, DataError
from vitkit.explanations.backbones import (
    MAX_LAYERS,
    backbone_attention,
    draw_backbone,
    has_class_token,
    has_located_attention,
    left_out,
    mean_distances,
)
from vitkit.explanations.drawing import COCO_SIZES, coco_sizes, draw_query_slots, size_kinds
from vitkit.explanations.html_page import PageLayer, write_explain_page
from vitkit.explanations.images import (
    ImageAttention,
    Queries,
    decoder_layers,
    encoder_layers,
    image_attention,
    image_sampling,
    samples_points,
)
from vitkit.explanations.located import attention_names, spread
from vitkit.explanations.masks import draw_loss_points, draw_merging, draw_queries
from vitkit.explanations.pages import MAX_QUERIES, backbone_page, query_page, sampling_page
from vitkit.explanations.queries import draw_point_heads, draw_query_heads, draw_query_layers
from vitkit.inference import Predictor, find_trained, load, pictures_in
from vitkit.logging import ProgressLines, print_line, setup_logging
from vitkit.losses.class_weights import build_criterion
from vitkit.losses.mask_criterion import MaskCriterion
from vitkit.models.classifier import Classifier
from vitkit.models.mask_results import MaskResults
from vitkit.protocols import child
from vitkit.seq2seq.captioner import Captioner
from vitkit.structures import ScoreThresholds
from vitkit.tools.common import add_device, add_model, add_trust, errors_in_one_line, new_file, sort_model
from vitkit.tools.explain_clips import explain_clip
from vitkit.tools.explain_text import explain_caption, explain_text
from vitkit.tools.text_arguments import option_names
from vitkit.visualization.curves import plot_distances

MAX_BOXES = 7  # boxes that are drawn unless --queries is given; with the panel of all boxes, two rows of four
MAX_POINTS = 3
MAX_SAMPLED = 3  # queries of Deformable DETR, with a figure for each
MAX_MASKS = 12
MAX_SLOTS = 20


def query_number(text: str) -> int:
    """Parse one value of --queries."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no query's number (overrides go before --queries and --points)")
    return int(text)


def point(text: str) -> tuple[float, float]:
    """Parse one value of --points."""
    try:
        x, y = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no point x,y, such as 200,340 (overrides go before --queries and --points)"
        ) from None
    return x, y


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--image", type=Path, help="the picture to explain; resized like the validation data")
    parser.add_argument("--text", metavar="SENTENCE", help="the sentence that a text model reads")
    parser.add_argument(
        "--beams", type=int, default=4, metavar="N", help="beams in the tree of a model that writes text (default: 4)"
    )
    parser.add_argument("--video", type=Path, help="the video to explain; its middle clip is taken")
    parser.add_argument(
        "--frame", type=int, metavar="N", help="frame of the clip that --points are in, from 0 (default: the middle)"
    )
    parser.add_argument(
        "--queries",
        type=query_number,
        nargs="+",
        metavar="N",
        help="queries to draw, from 0 (default: the best-scoring ones; with --dataset alone, the first 20)",
    )
    parser.add_argument(
        "--points",
        type=point,
        nargs="+",
        metavar="X,Y",
        help="pixels of the image (default: the best boxes' centres) "
        "or of the video's crop (default: where the class token looks)",
    )
    text = "encoder layer of DETR, EoMT, a text model or TimeSformer, from 0 (default: last)"
    parser.add_argument("--encoder-layer", type=int, metavar="N", help=text)
    text = "decoder layer of DETR, a mask model, a text model or a captioner, from 0 (default: last)"
    parser.add_argument("--decoder-layer", type=int, metavar="N", help=text)
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="pictures to average attention distances over")
    text = "another model, or a config and its weights; its attention distances are drawn alongside"
    parser.add_argument("--compare", nargs="+", metavar="MODEL", help=text)
    parser.add_argument(
        "--threshold", type=float, help="minimum score of the drawn boxes (default: the model's own, or 0.5)"
    )
    parser.add_argument("--dataset", action="store_true", help="draw each query's boxes over the validation data")
    text = "also write an HTML page that shows what attends to what under the mouse pointer"
    parser.add_argument("--html", action="store_true", help=text)
    parser.add_argument(
        "--out", type=Path, help="folder of the PNGs (default: runs/explain, or runs/explain-2 if it exists)"
    )
    add_trust(parser)
    add_device(parser)
    args = parser.parse_intermixed_args(argv)
    sort_model(args)
    if args.video is not None and (args.image is not None or args.dataset):
        parser.error("--video is for models of clips, --image and --dataset for detectors")
    if args.text is not None and (args.image or args.images or args.video or args.dataset):
        parser.error("--text is for models of text, --image, --images, --dataset and --video for others")
    if args.beams < 2:
        parser.error(f"--beams {args.beams}: expected at least 2")
    if not (args.image or args.images or args.video or args.dataset or args.text is not None):
        parser.error("nothing to draw: give a picture by --image, or --dataset, or both; --images, --text or a --video")
    if args.compare and (args.images is None or len(args.compare) > 2):
        parser.error("--compare: expected --images, and a model, or a config and its weights")
    check_options(parser, args)
    return args


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a usage error if an option applies to nothing that is drawn."""
    for option, sources in (
        ("points", ["image", "video"]),
        ("frame", ["video"]),
        ("queries", ["image", "dataset"]),
        ("threshold", ["image"]),
        ("encoder_layer", ["image", "text", "video"]),
        ("decoder_layer", ["image", "text"]),
        ("html", ["image", "text", "video"]),
    ):
        if is_set(args, option) and not any(is_set(args, source) for source in sources):
            parser.error(f"{option_names([option])}: only with {' or '.join(f'--{source}' for source in sources)}")


def is_set(args: argparse.Namespace, option: str) -> bool:
    """Whether an option is on the command line."""
    return not any(vars(args)[option] is unset for unset in (None, False))  # zero is set


def refuse(args: argparse.Namespace, options: Sequence[str], reason: str) -> None:
    """Raise a ConfigError with the reason if any of the options, which do not apply to the model, is set."""
    if names := option_names(option for option in options if is_set(args, option)):
        raise ConfigError(f"{names}: {reason} Leave this out.")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    args.out = args.out or new_file("runs/explain")
    with errors_in_one_line():
        setup_logging()
        run(*find_trained(args.model, args.weights, overrides=args.overrides, trust=args.trust), args)


def run(config: Config, weights: str | Path, args: argparse.Namespace) -> None:
    """Load the model, run it on the image or the dataset, and write the figures."""
    if args.text is not None:
        require(config, "model")
        for path in explain_text(config, weights, args):
            print(f"wrote {path}")
        return
    require(config, "model", "data.val")
    if args.video is not None:
        explain_clip(load_predictor(config, weights, device=args.device), args)
        return
    data = DataSettings(**config["data"])
    if data.channels is not None:
        raise ConfigError(
            f"explain draws on RGB pictures, and data.channels={data.channels}. Use predict and browse, which draw the "
            "first three channels."
        )
    image = None if args.image is None else read_picture(args.image, args.points, data.max_image_pixels)
    dataset = data.dataset("val") if args.dataset else None
    classes = None if dataset is None else dataset.classes
    predictor = load_predictor(config, weights, classes=classes, device=args.device)
    print(predictor.report)
    args.out.mkdir(parents=True, exist_ok=True)
    if image is not None:
        has_masks = isinstance(predictor.model, MaskResults) and "criterion" in config
        args.criterion = build_criterion(config["criterion"], predictor.classes) if has_masks else None
        explain_image(predictor, image, args)
    if args.images is not None:
        explain_distances(predictor, args)
    if dataset is not None:
        explain_slots(predictor.model, data.val_loader(dataset), args)


def load_predictor(*model: Any, **options: Any) -> Predictor:
    """Load a model of images or clips; arguments are those of `load`.

    Raises:
        ConfigError: the model reads text.
    """
    predictor = load(*model, **options)
    if not isinstance(predictor, Predictor):
        raise ConfigError(f"{type(predictor.model).__name__} reads text, not pictures. Give a --text.")
    return predictor


def explain_image(predictor: Predictor, image: np.ndarray, args: argparse.Namespace) -> None:
    """Draw everything that applies to the model: what its queries and its locations attend to."""
    model = predictor.model
    if predictor.sampling is not None:
        raise ConfigError("--image: the model classifies clips, so a picture has no meaning for it. Give a --video.")
    if isinstance(model, Captioner):
        refuse(args, ["points", "queries", "threshold", "encoder_layer"], "a captioner's words are drawn.")
        for path in explain_caption(predictor, image, args):
            print(f"wrote {path}")
        return
    on_backbone = has_located_attention(model)
    in_head = decoder_layers(model) or encoder_layers(model)
    if not on_backbone or (in_head and not isinstance(model, Classifier)):
        deformable = samples_points(model)
        if deformable:
            options = ["encoder_layer", "decoder_layer", *([] if on_backbone else ["points"])]
            reason = f"{type(model.head).__name__} attends to sampled points, and all its decoder layers are drawn."
            refuse(args, options, f"{reason} --queries chooses what to draw.")
        explain = explain_sampling if deformable else explain_attention
        explain(predictor, image, args)
    else:
        reason = f"{type(model).__name__} has no queries, and all layers of its backbone are drawn."
        refuse(args, ["queries", "threshold", "encoder_layer", "decoder_layer"], reason)
    if not on_backbone:
        return
    for path in draw_backbone(predictor, image, args.points or (), args.out, args.image.stem):
        print(f"wrote {path}")
    if args.html:
        layers, num_layers = spread(backbone_attention(predictor, image), MAX_LAYERS), len(attention_names(model))
        page = backbone_page(layers, class_token=has_class_token(model))
        title = f"What {type(model.backbone).__name__} attends to{left_out((len(layers), num_layers, 'layers'))}"
        path = args.out / f"{args.image.stem}_backbone.html"
        print(write_page(page, path, title=title, image=predictor.as_evaluated(image)))


def write_page(layers: Sequence[PageLayer], path: Path, *, title: str, image: np.ndarray | None = None) -> str:
    """Write the page of --html, and return the line that reports it."""
    size = write_explain_page(layers, path, title=title, image=image)
    return f"wrote {path} ({size / 1e6:.1f} MB)"


def explain_distances(predictor: Predictor, args: argparse.Namespace) -> None:
    """Draw the attention distances of each layer's heads, for one model or for two side by side."""
    paths = pictures_in(args.images)
    # Named by their weights, as two checkpoints may share a config.
    models = {str(args.weights or args.model): predictor}
    if args.compare:
        models[args.compare[-1]] = load_predictor(*args.compare, device=args.device, trust=args.trust)
    distances = {
        name: {layer: heads.numpy() for layer, heads in mean_distances(model, map(model.to_array, paths)).items()}
        for name, model in models.items()
    }
    path = args.out / "attention_distance.png"
    plot_distances(distances, path, num_images=len(paths))
    print(f"wrote {path}")


def read_picture(path: Path, points: Sequence[tuple[float, float]] | None, max_pixels: int) -> np.ndarray:
    """Read a picture as (H, W, 3) uint8 RGB, upright.

    Raises:
        DataError: there is no such file, it is not an image, or a point is outside the image.
    """
    image = read_image(path, "--image", max_pixels=max_pixels)
    height, width = image.shape[:2]
    for x, y in points or ():
        if not (0 <= x < width and 0 <= y < height):
            raise DataError(
                f"--points: {x:g},{y:g} is outside '{path}', which is {width}x{height} pixels (width x height)."
            )
    return image


def choose_queries(args: argparse.Namespace, predictor: Predictor, queries: Queries, limit: int) -> list[int]:
    """Return the queries of --queries; otherwise those that reach the threshold, best first, or at least the best one.

    Args:
        limit: the maximum number of queries if --queries is not given.
    """
    scores = queries.scores
    if args.queries:
        return check_queries(args.queries, len(scores))
    thresholds = predictor.thresholds
    if args.threshold is not None:
        thresholds = ScoreThresholds(args.threshold, origin="as asked for")
    best = scores.argsort(descending=True)
    confident = best[scores[best] >= thresholds.of(queries.labels[best])][:limit]
    if not len(confident):
        print(f"no query from {thresholds} (see --threshold); drawing the best, {scores[best[0]]:.2f}")
        confident = best[:1]
    return confident.tolist()


def page_queries(args: argparse.Namespace, scores: Tensor) -> list[int]:
    """Return the queries of a page: those of --queries, then the best ones."""
    best = scores.argsort(descending=True).tolist()
    return list(dict.fromkeys([*(args.queries or ()), *best]))[:MAX_QUERIES]


def check_queries(queries: Sequence[int], num_queries: int) -> list[int]:
    """Return the queries; raise a ConfigError if the model does not have one of them."""
    for query in queries:
        if query >= num_queries:
            raise ConfigError(f"--queries: got {query}; the model's queries are 0 to {num_queries - 1}.")
    return list(queries)


def explain_attention(predictor: Predictor, image: np.ndarray, args: argparse.Namespace) -> None:
    """Draw attention to every location: one figure for the encoder and one for the decoder, if the model has them."""
    model = predictor.model
    for option, value, layers in (
        ("--points", args.points, encoder_layers(model)),
        ("--queries", args.queries, decoder_layers(model)),
    ):
        if value and not layers and not (option == "--points" and has_located_attention(model)):
            raise ConfigError(f"{option}: {type(model).__name__} has no attention from these. Leave it out.")
    attention = image_attention(
        predictor,
        image,
        encoder_layer=layer_number(encoder_layers(model), args.encoder_layer, "--encoder-layer"),
        decoder_layer=layer_number(decoder_layers(model), args.decoder_layer, "--decoder-layer"),
    )
    queries, size = attention.queries, image.shape[:2]
    best = [] if queries is None else choose_queries(args, predictor, queries, MAX_BOXES)
    if attention.encoder is not None:
        points = args.points or [(size[1] / 2, size[0] / 2)]
        if best and not args.points:
            # Several queries may have detected one object, for which one point is enough.
            boxes_xyxy, scores = queries.boxes_xyxy[best], queries.scores[best]
            has_area = (boxes_xyxy[:, 2:] > boxes_xyxy[:, :2]).all(1)  # an empty mask has no box
            boxes_xyxy, scores = boxes_xyxy[has_area], scores[has_area]
            distinct = nms(boxes_xyxy, scores, iou_threshold=0.5)[:MAX_POINTS]
            points = centres(boxes_xyxy[distinct], size) or points
        path = args.out / f"{args.image.stem}_encoder.png"
        attention.draw_points(points, path)
        print(f"wrote {path}")
        print(f"wrote {draw_point_heads(attention, points, path.with_stem(f'{path.stem}_heads'))}")
    if best:
        path = args.out / f"{args.image.stem}_decoder.png"
        attention.draw_queries(best, path)
        print(f"wrote {path}")
        print(f"wrote {draw_query_heads(attention, best, path.with_stem(f'{path.stem}_heads'))}")
        for query in best[: len(args.queries or ()) or 1]:
            layers = draw_query_layers(attention, query, args.out / f"{args.image.stem}_query{query}.png")
            print(f"wrote {layers}")
        if isinstance(model, MaskResults):
            explain_masks(predictor, attention, args)
    if not isinstance(model, MaskResults) and "pred_masks" in attention.view.outputs:
        print_line(f"no pictures of masks: they are drawn for mask classification, which {type(model).__name__} is not")
    if args.html:
        shown = [] if queries is None else page_queries(args, queries.scores)
        path = args.out / f"{args.image.stem}_queries.html"
        title = f"What locations and queries of {type(model).__name__} attend to"
        print(write_page(query_page(attention, shown), path, title=title, image=image))


def explain_masks(predictor: Predictor, attention: ImageAttention, args: argparse.Namespace) -> None:
    """Draw queries' masks, the points of their loss, and how they merge into the panoptic map."""
    view, stem = attention.view, args.out / args.image.stem
    queries = args.queries or attention.queries.scores.argsort(descending=True)[:MAX_MASKS].tolist()
    print(f"wrote {draw_queries(view, predictor.classes, queries, Path(f'{stem}_masks.png'))}")
    if isinstance(args.criterion, MaskCriterion) and args.criterion.mask_loss == "points":
        path = Path(f"{stem}_loss_points.png")
        print(f"wrote {draw_loss_points(view, args.criterion, queries[: MAX_BOXES - 1], path)}")
    else:
        print_line("no picture of the loss's points: the config has no criterion that compares masks at points")
    if "panoptic" in predictor.model.tasks:
        print(f"wrote {draw_merging(view, predictor.model, predictor.classes, Path(f'{stem}_panoptic.png'))}")
    else:
        print_line(f"no picture of a panoptic map: the model's tasks are {', '.join(predictor.model.tasks)}")


def layer_number(layers: Sequence[nn.Module], number: int | None, option: str) -> int:
    """Return the requested layer, the last by default; raise a ConfigError if the model does not have it."""
    last = len(layers) - 1
    if number is not None and not 0 <= number <= last:
        what = f"the model's layers are 0 to {last}" if last >= 0 else "the model has no such layer"
        raise ConfigError(f"{option}: got {number}; {what}.")
    return last if number is None else number


def centres(boxes_xyxy: Tensor, size: tuple[int, int]) -> list[tuple[float, float]]:
    """Return (x, y) of the boxes' centres, clamped to the pixels of an image of size (height, width)."""
    height, width = size
    middle = (boxes_xyxy[:, :2] + boxes_xyxy[:, 2:]) / 2
    return [(min(max(x, 0), width - 1), min(max(y, 0), height - 1)) for x, y in middle.tolist()]


def explain_sampling(predictor: Predictor, image: np.ndarray, args: argparse.Namespace) -> None:
    """Draw Deformable DETR's sampling: a figure per query."""
    sampling = image_sampling(predictor, image)
    for query in choose_queries(args, predictor, sampling.queries, MAX_SAMPLED):
        path = args.out / f"{args.image.stem}_query{query}.png"
        sampling.draw_query(query, path)
        print(f"wrote {path}")
    if args.html:
        shown = page_queries(args, sampling.queries.scores)
        title = f"Where queries of {type(predictor.model).__name__} sample the picture"
        path = args.out / f"{args.image.stem}_queries.html"
        print(write_page(sampling_page(sampling, shown), path, title=title, image=image))


@torch.no_grad()
def explain_slots(model: nn.Module, loader: BatchLoader, args: argparse.Namespace) -> None:
    """Draw the boxes of each query over the dataset in one figure."""
    head = child(model, "head")
    if head is not None and child(head, "proposals") is not None:
        raise ConfigError(
            "--dataset: the queries of a two-stage model are each image's own proposals, so they have no position over "
            "a dataset. Leave --dataset out, or take a model without model.head.two_stage."
        )
    # All queries' boxes, in order: a model's `postprocess` may sort them or leave some out.
    boxes, sizes = [], []
    progress = ProgressLines(len(loader), "batches")
    for batch in loader:
        batch = batch.to(args.device)
        with memory_explained(batch, partial(evaluation_remedies, precision="fp32")):
            outputs = model(**batch.inputs)
        if "pred_boxes" not in outputs:
            raise ConfigError(f"--dataset: {type(model).__name__} has no queries that predict boxes. Leave it out.")
        boxes.append(outputs["pred_boxes"].float().cpu())
        sizes += [tuple(target["original_size"]) for target in batch.targets]
        progress.step()
    boxes_cxcywh = torch.cat(boxes)
    num_queries = boxes_cxcywh.shape[1]
    queries = check_queries(args.queries or range(min(MAX_SLOTS, num_queries)), num_queries)
    heights, widths = torch.tensor(sizes, dtype=torch.float32).T
    path = args.out / "query_slots.png"
    draw_query_slots(boxes_cxcywh, size_kinds(boxes_cxcywh, (widths / heights)[:, None]), path, queries=queries)
    print(f"wrote {path}")
    path = args.out / "query_slots_sizes.png"
    kinds = coco_sizes(boxes_cxcywh, (widths * heights)[:, None])
    draw_query_slots(boxes_cxcywh, kinds, path, queries=queries, names=COCO_SIZES)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
