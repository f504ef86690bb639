"""Figures of models with queries or an encoder: what queries and points attend to, masks, boxes over a dataset."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.ops import nms

from vitkit.apps.explanations.backbones import has_located_attention
from vitkit.apps.explanations.drawing import COCO_SIZES, coco_sizes, draw_query_slots, size_kinds
from vitkit.apps.explanations.explain_options import ExplainRequest, Explanation, check_layer, check_queries
from vitkit.apps.explanations.images import (
    ImageAttention,
    Point,
    QueryPredictions,
    decoder_layers,
    encoder_layers,
    image_attention,
    image_sampling,
)
from vitkit.apps.explanations.masks import draw_loss_points, draw_merging, draw_queries
from vitkit.apps.explanations.pages import MAX_QUERIES, query_page, sampling_page
from vitkit.apps.explanations.queries import draw_point_heads, draw_query_heads, draw_query_layers
from vitkit.apps.inference.predictor import Predictor
from vitkit.data.loading.loader import BatchLoader
from vitkit.errors import ConfigError
from vitkit.logging import ProgressLines
from vitkit.losses.mask_criterion import MaskCriterion
from vitkit.protocols.model import child
from vitkit.structures import ScoreThresholds

MAX_BOXES = 7  # boxes that are drawn unless queries are asked for; with the panel of all boxes, two rows of four
MAX_POINTS = 3
MAX_SAMPLED = 3  # queries of Deformable DETR, with a figure for each
MAX_MASKS = 12
MAX_SLOTS = 20


def explain_attention(predictor: Predictor, image: np.ndarray, request: ExplainRequest, result: Explanation) -> None:
    """Draw attention to every location: figures of the encoder and of the decoder, if the model has them."""
    model = predictor.model
    encoder, decoder = encoder_layers(model), decoder_layers(model)
    for option, values, has_source in (
        ("points", request.points, encoder or has_located_attention(model)),
        ("queries", request.queries, decoder),
    ):
        if values and not has_source:
            raise ConfigError(f"{option}: {type(model).__name__} has no attention from these. Leave this out.")
    attention = image_attention(
        predictor,
        image,
        encoder_layer=check_layer("encoder_layer", request.encoder_layer, len(encoder)),
        decoder_layer=check_layer("decoder_layer", request.decoder_layer, len(decoder)),
    )
    queries = attention.queries
    chosen = [] if queries is None else choose_queries(predictor, queries, request, result, MAX_BOXES)
    if attention.encoder is not None:
        points, boxes = (request.points, ()) if request.points else points_of(queries, chosen, image.shape[:2])
        attention.draw_points(points, result.file("encoder.png"), boxes_xyxy=boxes)
        draw_point_heads(attention, points, result.file("encoder_heads.png"))
    if chosen:
        attention.draw_queries(chosen, result.file("decoder.png"))
        draw_query_heads(attention, chosen, result.file("decoder_heads.png"))
        for query in chosen[: len(request.queries) or 1]:
            draw_query_layers(attention, query, result.file(f"query{query}.png"))
        for query in chosen:
            region = "box" if queries.masks is None else "mask"
            name = f"query {query} ({attention.classes[queries.labels[query]]}): attention in its {region}, relative to"
            result.numbers[f"{name} uniform attention"] = float(
                attention.decoder.ratios(query, queries.region(query)).mean()
            )
        if model.classifies_masks:
            explain_masks(predictor, attention, request, result)
    if not model.classifies_masks and "pred_masks" in attention.view.outputs:
        result.notes.append(f"no figures of masks: {type(model).__name__} is not a model of mask classification")
    if request.html:
        shown = [] if queries is None else page_queries(request, queries.scores)
        title = f"What locations and queries of {type(model).__name__} attend to"
        result.page(query_page(attention, shown), "queries.html", title=title, image=attention.image)


def choose_queries(
    predictor: Predictor, queries: QueryPredictions, request: ExplainRequest, result: Explanation, limit: int
) -> list[int]:
    """Return the requested queries; otherwise those that reach the threshold, best first, or at least the best one.

    Args:
        limit: the maximum number of queries that were not requested.
    """
    scores = queries.scores
    if request.queries:
        return check_queries(request.queries, len(scores))
    thresholds = predictor.thresholds
    if request.threshold is not None:
        thresholds = ScoreThresholds(request.threshold, origin="as asked for")
    best = scores.argsort(descending=True)
    confident = best[scores[best] >= thresholds.of(queries.labels[best])][:limit]
    if not len(confident):
        result.notes.append(
            f"no query reaches {thresholds}; the best one, {scores[best[0]]:.2f}, is drawn (see threshold)"
        )
        confident = best[:1]
    return confident.tolist()


def page_queries(request: ExplainRequest, scores: Tensor) -> list[int]:
    """Return the queries of a page: the requested ones, then the best ones."""
    best = scores.argsort(descending=True).tolist()
    return list(dict.fromkeys([*request.queries, *best]))[:MAX_QUERIES]


def points_of(
    queries: QueryPredictions | None, chosen: Sequence[int], size: tuple[int, int]
) -> tuple[list[Point], list[list[float]]]:
    """Return the centers of queries' boxes and these boxes, xyxy in pixels; without any, the center of the image of
    size (height, width) and no box.
    """
    height, width = size
    boxes_xyxy, scores = torch.empty(0, 4), torch.empty(0)
    if queries is not None:
        # Several queries may have detected one object, for which one point is enough.
        boxes_xyxy, scores = queries.boxes_xyxy[chosen], queries.scores[chosen]
        has_area = (boxes_xyxy[:, 2:] > boxes_xyxy[:, :2]).all(1)  # an empty mask has no box
        boxes_xyxy, scores = boxes_xyxy[has_area], scores[has_area]
        boxes_xyxy = boxes_xyxy[nms(boxes_xyxy, scores, iou_threshold=0.5)[:MAX_POINTS]]
    centers = ((boxes_xyxy[:, :2] + boxes_xyxy[:, 2:]) / 2).tolist()
    points = [(min(max(x, 0), width - 1), min(max(y, 0), height - 1)) for x, y in centers]
    return points or [(width / 2, height / 2)], boxes_xyxy.tolist()


def explain_masks(
    predictor: Predictor, attention: ImageAttention, request: ExplainRequest, result: Explanation
) -> None:
    """Draw queries' masks, the points of their loss, and how they merge into the panoptic map."""
    view, model, criterion = attention.view, predictor.model, request.criterion
    queries = request.queries or attention.queries.scores.argsort(descending=True)[:MAX_MASKS].tolist()
    draw_queries(view, predictor.classes, queries, result.file("masks.png"))
    if isinstance(criterion, MaskCriterion) and criterion.mask_loss == "points":
        draw_loss_points(view, criterion, queries[: MAX_BOXES - 1], result.file("loss_points.png"))
    else:
        result.notes.append("no figure of the loss's points: the config has no criterion that compares masks at points")
    if "panoptic" in model.tasks:
        result.notes += draw_merging(view, model, predictor.classes, result.file("panoptic.png"))
    else:
        result.notes.append(f"no figure of a panoptic map: the model's tasks are {', '.join(model.tasks)}")


def explain_sampling(predictor: Predictor, image: np.ndarray, request: ExplainRequest, result: Explanation) -> None:
    """Draw Deformable DETR's sampling: a figure per query."""
    sampling = image_sampling(predictor, image)
    for query in choose_queries(predictor, sampling.queries, request, result, MAX_SAMPLED):
        sampling.draw_query(query, result.file(f"query{query}.png"))
        if sampling.point_names and sampling.keypoints(query):
            sampling.draw_keypoints(query, result.file(f"query{query}_points.png"))
    if request.html:
        shown = page_queries(request, sampling.queries.scores)
        title = f"Where queries of {type(predictor.model).__name__} sample the image"
        result.page(sampling_page(sampling, shown), "queries.html", title=title, image=sampling.image)


@torch.no_grad()
def explain_slots(
    model: nn.Module, loader: BatchLoader, device: str | torch.device, request: ExplainRequest, result: Explanation
) -> None:
    """Draw where the boxes of each query lie over a dataset."""
    head = child(model, "head")
    if head is not None and child(head, "proposals") is not None:
        raise ConfigError(
            "dataset: the queries of a two-stage model are each image's own proposals, so they have no position over a "
            "dataset. Leave dataset out, or use a model without model.head.two_stage."
        )
    # All queries' boxes, in order: a model's `postprocess` may sort them or leave some out.
    boxes, sizes = [], []
    progress = ProgressLines(len(loader), "batches")
    for batch in loader:
        batch = batch.to(device)
        outputs = model(**batch.inputs)
        if "pred_boxes" not in outputs:
            raise ConfigError(f"dataset: {type(model).__name__} has no queries that predict boxes. Leave this out.")
        check_queries(request.queries, outputs["pred_boxes"].shape[1])
        boxes.append(outputs["pred_boxes"].float().cpu())
        sizes += [tuple(target["original_size"]) for target in batch.targets]
        progress.step()
    boxes_cxcywh = torch.cat(boxes)
    num_queries = boxes_cxcywh.shape[1]
    queries = request.queries or range(min(MAX_SLOTS, num_queries))
    heights, widths = torch.tensor(sizes, dtype=torch.float32).T
    kinds = size_kinds(boxes_cxcywh, (widths / heights)[:, None])
    draw_query_slots(boxes_cxcywh, kinds, result.file("query_slots.png"), queries=queries)
    kinds = coco_sizes(boxes_cxcywh, (widths * heights)[:, None])
    draw_query_slots(boxes_cxcywh, kinds, result.file("query_slots_sizes.png"), queries=queries, names=COCO_SIZES)
