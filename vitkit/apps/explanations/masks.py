"""Figures of mask classification: each query's mask, the points of the loss, how masks merge into a panoptic map."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitkit.apps.explanations.images import View
from vitkit.apps.explanations.panels import Panel, draw_rows
from vitkit.apps.visualization.masks import draw_panoptic
from vitkit.losses.mask_criterion import MaskCriterion
from vitkit.models.mask_results import MaskResults
from vitkit.ops.mask_postprocess import Geometry, PanopticRules, assign_pixels, geometry_of, panoptic, query_chunks
from vitkit.text_format import pluralize

RULES = (
    ("void: in no query's mask", (90, 90, 90)),
    ("void: only in the masks of queries that predict no object", (170, 170, 170)),
    ("void: covered only by queries below the object threshold", (255, 127, 14)),
    ("void: assigned to a query whose mask does not cover it", (148, 103, 189)),
    ("void: its segment kept too little of its mask", (214, 39, 40)),
    ("kept, although another confident query's mask also covers it", (31, 119, 180)),
    ("kept", (44, 160, 44)),
)
PER_ROW = 6


def draw_queries(view: View, classes: Sequence[str], queries: Sequence[int], path: Path) -> Path:
    """Save a PNG with the class and mask of each query: the mask's probability, and where it is above one half."""
    scores, labels = view.class_scores().max(dim=-1)
    probabilities = view.crop(view.outputs["pred_masks"][0]).sigmoid()
    panels = [
        Panel(
            f"query {k}: {classes[labels[k]]} {scores[k]:.2f}",
            probabilities[k],
            largest=1.0,
            outline=(probabilities[k] > 0.5).numpy(),
        )
        for k in queries
    ]
    rows = [("", panels[i : i + PER_ROW]) for i in range(0, len(panels), PER_ROW)]
    draw_rows(view.image, rows, path, title="Mask and class of each query; green: where the mask is above 0.5")
    return path


def draw_loss_points(view: View, criterion: MaskCriterion, queries: Sequence[int], path: Path) -> Path:
    """Save a PNG of the points at which the loss would compare the masks of queries with their targets."""
    logits = view.outputs["pred_masks"][0].float().cpu()[list(queries)]
    points = criterion.choose_points(0, logits)  # in 0..1 of the padded input
    height, width = view.image.shape[:2]
    points = points * torch.tensor([width * view.covered[1], height * view.covered[0]])
    colors = ["#ff2fd0"] * criterion.num_uncertain + ["#00c8ff"] * (criterion.num_points - criterion.num_uncertain)
    panels = []
    for query, dots, mask in zip(queries, points, view.crop(logits) > 0):
        inside = (dots[:, 0] < width) & (dots[:, 1] < height)
        shown = [color for color, is_inside in zip(colors, inside.tolist()) if is_inside]
        panels.append(Panel(f"query {query}", outline=mask.numpy(), dots=dots[inside], dot_colors=shown))
    rows = [("", panels[i : i + 3]) for i in range(0, len(panels), 3)]
    uncertain, candidates = criterion.num_uncertain, int(criterion.oversample * criterion.num_points)
    others = criterion.num_points - uncertain
    title = f"Points of the loss: the {uncertain} most uncertain of {candidates} (pink) and {others} uniform (blue)"
    draw_rows(view.image, rows, path, title=title, panel=2.4)
    return path


def merging_rules(probabilities: Tensor, masks: Tensor, geometry: Geometry, rules: PanopticRules) -> Tensor:
    """Return (H, W) int64, an index into `RULES` for each pixel of the original image; arguments are `panoptic`'s."""
    assigned = assign_pixels(probabilities, masks, geometry, rules=rules)
    covering = torch.zeros(geometry.original, dtype=torch.int64)
    covered, unsure = torch.zeros(2, *geometry.original, dtype=torch.bool)
    is_confident = torch.zeros(len(masks), dtype=torch.bool).index_fill_(0, assigned.queries, True)
    is_object = probabilities.argmax(-1) != probabilities.shape[1] - 1
    for chosen, logits in query_chunks(masks, geometry):
        inside = logits.sigmoid() >= 0.5
        covered |= inside.any(0)
        covering += inside[is_confident[chosen]].sum(0)
        unsure |= inside[(is_object & ~is_confident)[chosen]].any(0)
    kept = torch.tensor(assigned.is_kept(rules), dtype=torch.bool)
    stays = kept[assigned.owner] if len(kept) else torch.zeros_like(unsure)
    # Without `cut_masks`, a pixel outside its owner's mask also belongs to the owner.
    mine = assigned.inside if rules.cut_masks else torch.full_like(unsure, len(kept) > 0)
    uncovered = torch.where(unsure, 2, torch.where(covered, 1, 0))
    void = torch.where(mine, 4, torch.where(covering > 0, 3, uncovered))
    return torch.where(stays & mine, torch.where(covering > 1, 5, 6), void)


def draw_merging(view: View, model: MaskResults, classes: Sequence[str], path: Path) -> list[str]:
    """Save a PNG of how masks merge into the panoptic map, and which rule decided each pixel.

    It has a row for each query above the object threshold: its mask, the pixels that it was assigned, and those of its
    mask that went to another query. Segments that the overlap threshold drops are dashed.

    Returns:
        for each of these what it kept.
    """
    outputs = view.outputs
    geometry = geometry_of(outputs, 0, view.image.shape[:2])
    probabilities = outputs["pred_logits"][0].float().softmax(-1).cpu()
    masks, rules = outputs["pred_masks"][0].float().cpu(), model.panoptic_rules
    assigned = assign_pixels(probabilities, masks, geometry, rules=rules)
    merged = panoptic(probabilities, masks, geometry, things=model.things, rules=rules)
    decided = merging_rules(probabilities, masks, geometry, rules)
    drawn = draw_panoptic(view.image, merged.segment_ids, merged.segments, classes)
    drawn = drawn[: round(drawn.shape[1] * view.image.shape[0] / view.image.shape[1])]  # without the legend
    colors = np.array([color for _, color in RULES], np.uint8)[decided.numpy()]
    fractions = [f"{name} {float((decided == k).float().mean()):.1%}" for k, (name, _) in enumerate(RULES)]
    rows: list[tuple[str, list[Panel]]] = []
    dropped: list[np.ndarray] = []
    notes: list[str] = []
    is_kept = assigned.is_kept(rules)
    stuff: dict[int, int] = {}  # class -> the first query whose mask is kept, which the others join
    for i, query in enumerate(assigned.queries.tolist()):
        mask = next(logits for _, logits in query_chunks(masks[[query]], geometry))[0].sigmoid()
        inside, mine = mask >= 0.5, assigned.owner == i
        drawn_as = mine & inside if rules.cut_masks else mine
        label, verdict = int(assigned.labels[i]), f"dropped (below {rules.overlap_threshold:.0%})"
        name = f"query {query}: {classes[label]} {assigned.scores[i]:.2f}"
        if not is_kept[i]:
            dropped.append(inside.numpy())
            owned, area = int(assigned.owned[i]), int(assigned.areas[i])
            share = f"gets {pluralize(owned, 'pixels')}, {owned / max(area, 1):.0%} of its mask's {area}"
            notes.append(f"{name}: the overlap threshold of {rules.overlap_threshold:.0%} drops it, as it {share}")
        else:
            first = query if model.things[label] else stuff.setdefault(label, query)
            verdict = "kept" if first == query else f"kept, joins query {first}"
        lost = inside & ~mine
        panels = [
            Panel(f"its mask, {assigned.areas[i]} pixels", mask, largest=1.0),
            Panel(f"gets {drawn_as.sum()} pixels: {verdict}", drawn_as.float(), largest=1.0),
            Panel(f"lost to others: {lost.sum()}", lost.float(), largest=1.0),
        ]
        rows.append((name, panels))
    maps = Panel("panoptic map", image=drawn, dashed=dropped), Panel("what became of each pixel", image=colors)
    title = "How masks merge into the panoptic map"
    if dropped:
        title += f"; dashed: {len(dropped)} that kept less than {rules.overlap_threshold:.0%} of their mask are dropped"
    draw_rows(
        view.image, [("", [Panel("image"), *maps]), *rows], path, panel=2.4, title=title,
        legend=[(text, color) for text, (_, color) in zip(fractions, RULES)],
    )  # fmt: skip
    return notes
