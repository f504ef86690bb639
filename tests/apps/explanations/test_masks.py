from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image

from vitkit import Model
from vitkit.apps.explanations import masks as mask_figures
from vitkit.apps.explanations import queries
from vitkit.apps.explanations.drawing import overlay_attention
from vitkit.apps.explanations.images import LayerAttention, View
from vitkit.apps.explanations.masks import draw_loss_points, draw_merging, draw_queries, merging_rules
from vitkit.apps.explanations.queries import draw_query_layers
from vitkit.losses.mask_criterion import MaskCriterion
from vitkit.ops.mask_postprocess import Geometry, PanopticRules, panoptic

GEOMETRY = Geometry((2, 4), (2, 4), (2, 4))


def case() -> tuple[torch.Tensor, torch.Tensor]:
    """Return four queries: a confident one, one that loses most pixels to it, an unsure one, and one of no object."""
    probabilities = torch.tensor([[0.95, 0.05, 0.0], [0.1, 0.9, 0.0], [0.6, 0.1, 0.3], [0.0, 0.0, 1.0]])
    signs = torch.tensor(
        [
            [[1, 1, 0, 0], [1, 0, 0, 0]],
            [[1, 1, 1, 0], [0, 0, 0, 0]],
            [[0, 0, 0, 1], [1, 0, 0, 0]],
            [[1, 1, 1, 1], [1, 1, 1, 0]],
        ]
    )
    # Outside all masks, the first query has the highest mask probability.
    inside, outside = torch.tensor([8.0, 4.0, 8.0, 8.0]), torch.tensor([-8.0, -12.0, -12.0, -12.0])
    return probabilities, torch.where(signs > 0, inside[:, None, None], outside[:, None, None])


def test_each_dropped_pixel_is_assigned_to_the_rule_that_dropped_it():
    probabilities, masks = case()
    settings = PanopticRules(object_threshold=0.8, overlap_threshold=0.8)
    rules = merging_rules(probabilities, masks, GEOMETRY, settings)
    # The second query's mask has three pixels: two go to the first query, and the third is dropped with its segment.
    # Next to it, only the unsure query covers a pixel. Below, the first query has one, and only the query without an
    # object covers two; the last pixel is in no mask.
    assert rules.tolist() == [[5, 5, 4, 2], [6, 1, 1, 0]]
    merged = panoptic(probabilities, masks, GEOMETRY, things=[True, True], rules=settings)
    assert torch.equal(merged.segment_ids > 0, rules >= 5)


def test_everything_is_void_without_a_confident_query():
    probabilities, masks = case()
    rules = merging_rules(probabilities[2:], masks[2:], GEOMETRY, PanopticRules())
    assert rules.tolist() == [[1, 1, 1, 2], [2, 1, 1, 0]]


def test_a_pixel_may_be_assigned_to_a_query_whose_mask_does_not_cover_it():
    probabilities = torch.tensor([[0.95, 0.05, 0.0], [0.15, 0.85, 0.0]])
    masks = torch.full((2, 2, 4), 8.0)
    masks[:, 0, 0] = torch.tensor([0.49, 0.51]).logit()  # 0.95 * 0.49 > 0.85 * 0.51
    rules = merging_rules(probabilities, masks, GEOMETRY, PanopticRules())
    assert rules.tolist() == [[3, 5, 5, 5], [5, 5, 5, 5]]


def test_maskformer_gives_a_segment_the_pixels_outside_its_mask_too():
    probabilities, masks = case()
    settings = PanopticRules(overlap_threshold=0.0, cut_masks=False)
    merged = panoptic(probabilities, masks, GEOMETRY, things=[True, True], rules=settings)
    rules = merging_rules(probabilities, masks, GEOMETRY, settings)
    assert torch.equal(merged.segment_ids > 0, rules >= 5) and (rules >= 5).all()


def test_gates_are_drawn_with_sharp_borders(monkeypatch, tmp_path):
    gate = torch.tensor([[[True, False], [False, False]]])
    layer = LayerAttention(0, torch.full((1, 1, 2, 2), 0.25), (1.0, 1.0), gate)
    attention = SimpleNamespace(
        image=np.zeros((64, 64, 3), np.uint8),
        decoder_layers=[layer],
        predictions=lambda query: [],
        query_ratios=lambda queries: torch.full((1, 1, 1), 1.5),
        queries=SimpleNamespace(masks=None),
    )
    drawn = []
    monkeypatch.setattr(queries, "draw_rows", lambda image, rows, *_, **__: drawn.extend(rows))
    draw_query_layers(attention, 0, tmp_path / "a.png")
    name, (panel,) = drawn[0]
    overlay = overlay_attention(np.full((64, 64, 3), 255, np.uint8), panel.weights, color=(255, 0, 0), largest=1.0)
    blue = overlay[..., 2]
    assert panel.title == "layer 0" and drawn[1][1][0].title == "1.5 x"
    assert name == "may attend to"
    assert len(np.unique(blue[:30, :30])) == len(np.unique(blue[34:])) == 1 and blue[0, 0] < blue[-1, -1]


def test_masks_loss_points_and_merging_are_drawn(monkeypatch, tmp_path):
    probabilities, masks = case()
    image = np.full((2, 4, 3), 90, np.uint8)
    outputs = dict(
        pred_logits=probabilities.clamp(min=1e-6).log()[None], pred_masks=masks[None], input_size=(2, 4),
        image_sizes=torch.tensor([[2, 4]]),
    )  # fmt: skip
    view = View(Model(), ["a", "b"], image, outputs, {}, {}, (2, 4), (2, 4))
    criterion = MaskCriterion(dict(type="HungarianMaskMatcher", cost_labels=1, cost_mask=1, cost_dice=1),
                              dict(labels=1, mask=1, dice=1), no_object_weight=0.1, num_points=20)  # fmt: skip

    class Panoptic:
        panoptic_rules, things = PanopticRules(), [True, True]

    paths = [
        draw_queries(view, ["a", "b"], [0, 1, 2], tmp_path / "masks.png"),
        draw_loss_points(view, criterion, [0, 1], tmp_path / "points.png"),
        tmp_path / "panoptic.png",
    ]
    notes = draw_merging(view, Panoptic(), ["a", "b"], paths[-1])
    pixels = [np.asarray(Image.open(path).convert("RGB")) for path in paths]
    assert all(image.std() > 20 for image in pixels)
    count = [int((image == (214, 39, 40)).all(-1).sum()) for image in pixels]
    assert count[2] > 500 > count[1]  # one of eight pixels of the map of rules, and the legend

    drawn = []
    monkeypatch.setattr(mask_figures, "draw_rows", lambda image, rows, *_, **__: drawn.extend(rows))
    draw_merging(view, Panoptic(), ["a", "b"], tmp_path / "panoptic.png")
    for _, (_, assigned, _) in drawn[1:]:
        assert assigned.title.startswith(f"gets {int(assigned.weights.sum())} pixels")
    dropped = [(name, parts[0]) for name, parts in drawn[1:] if "dropped (below 80%)" in parts[1].title]
    dashed = drawn[0][1][1].dashed
    assert len(notes) == len(dropped) == len(dashed) == 1
    assert np.array_equal(dashed[0], dropped[0][1].weights.numpy() >= 0.5)
    rule = "the overlap threshold of 80% drops it, as it gets 1 pixel, 33% of its mask's 3"
    assert notes == [f"{dropped[0][0]}: {rule}"]
