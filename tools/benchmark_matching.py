"""Time of the Hungarian matching against the original DETR's cross-batch formulation."""

import statistics
import time
from collections.abc import Callable

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torchvision.ops import box_convert, generalized_box_iou

from vitkit.matchers import HungarianMatcher
from vitkit.structures import DetectionTarget


def measure(
    *,
    batch_size: int = 16,
    num_queries: int = 300,
    num_classes: int = 91,
    num_layers: int = 6,
    targets_per_image: int = 7,
    repeats: int = 9,
    device: torch.device | str = "cpu",
) -> list[dict[str, str | float]]:
    """Medians of interleaved runs on random predictions.

    Returns:
        one row: `what`, `seconds` and `baseline_seconds` of one step, `ratio`.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (num_layers, batch_size, num_queries)
    logits = torch.randn(*shape, num_classes + 1, generator=generator).to(device)
    boxes = torch.rand(*shape, 4, generator=generator).to(device)
    targets = [_random_target(targets_per_image, num_classes, generator, device) for _ in range(batch_size)]
    matcher = HungarianMatcher(cost_class=1.0, cost_l1=5.0, cost_giou=2.0)

    times: dict[Callable, list[float]] = {cross_batch_matching: [], matcher: []}
    for run in range(repeats + 1):
        for match, seconds in times.items():
            start = time.perf_counter()
            match(logits, boxes, targets)
            if run:  # the first run warms up
                seconds.append(time.perf_counter() - start)
    baseline, ours = (statistics.median(seconds) for seconds in times.values())
    what = f"matching, batch {batch_size}, {num_queries} queries, {num_layers} layers"
    return [{"what": what, "seconds": ours, "baseline_seconds": baseline, "ratio": ours / baseline}]


def cross_batch_matching(logits: Tensor, boxes: Tensor, targets: list[DetectionTarget]) -> list[list[tuple]]:
    """The original's formulation: per layer, the costs of all queries of the batch with all targets of the batch."""
    labels = torch.cat([target["labels"] for target in targets])
    target_boxes = torch.cat([target["boxes_cxcywh"] for target in targets])
    counts = [len(target["labels"]) for target in targets]
    matches = []
    for layer_logits, layer_boxes in zip(logits, boxes):
        batch_size, num_queries = layer_logits.shape[:2]
        queries = layer_boxes.flatten(0, 1)
        class_cost = -layer_logits.flatten(0, 1).softmax(-1)[:, labels]
        l1_cost = torch.cdist(queries, target_boxes, p=1)
        giou_cost = -generalized_box_iou(
            box_convert(queries, "cxcywh", "xyxy"), box_convert(target_boxes, "cxcywh", "xyxy")
        )
        cost = (5.0 * l1_cost + class_cost + 2.0 * giou_cost).view(batch_size, num_queries, -1).cpu()
        blocks = cost.split(counts, dim=-1)
        matches.append([linear_sum_assignment(block[i]) for i, block in enumerate(blocks)])
    return matches


def _random_target(
    num_targets: int, num_classes: int, generator: torch.Generator, device: torch.device | str
) -> DetectionTarget:
    return {
        "labels": torch.randint(num_classes, (num_targets,), generator=generator).to(device),
        "boxes_cxcywh": torch.rand(num_targets, 4, generator=generator).to(device),
    }
