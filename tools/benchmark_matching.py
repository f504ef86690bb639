"""Time of the Hungarian matching against the original DETR's cross-batch formulation."""

import time
from collections.abc import Callable

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torchvision.ops import box_convert, generalized_box_iou

from vitkit.matchers import HungarianMatcher
from vitkit.structures import DetectionTarget
from vitkit.tools.benchmark_timing import Row, compare

NUM_CLASSES = 91
NUM_LAYERS = 6
TARGETS_PER_IMAGE = 7


def measure(
    batch_size: int = 16,
    num_queries: int = 300,
    *,
    repeats: int = 9,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Times both on random predictions of six decoder layers, the original's formulation first."""
    calls = {
        "all queries with all targets of the batch": matching(cross_batch_matching, batch_size, num_queries, device),
        "vitkit": matching(HungarianMatcher(1.0, 5.0, 2.0), batch_size, num_queries, device),
    }
    what = f"matching, batch {batch_size}, {num_queries} queries"
    return compare(what, calls, repeats=repeats, device=device, clock=clock)


def matching(match: Callable, batch_size: int, num_queries: int, device: str = "cpu") -> Callable[[], object]:
    """A call of `match` on random predictions."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_LAYERS, batch_size, num_queries)
    logits = torch.randn(*shape, NUM_CLASSES + 1, generator=generator).to(device)
    boxes = torch.rand(*shape, 4, generator=generator).to(device)
    targets = [_random_target(generator, device) for _ in range(batch_size)]
    return lambda: match(logits, boxes, targets)


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


def _random_target(generator: torch.Generator, device: str) -> DetectionTarget:
    return {
        "labels": torch.randint(NUM_CLASSES, (TARGETS_PER_IMAGE,), generator=generator).to(device),
        "boxes_cxcywh": torch.rand(TARGETS_PER_IMAGE, 4, generator=generator).to(device),
    }
