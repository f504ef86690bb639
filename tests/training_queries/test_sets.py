import pytest
import torch

from vitkit.errors import ConfigError
from vitkit.heads.detr import DETRHead
from vitkit.heads.dino import DINOHead
from vitkit.nn.queries import Queries, TrainingQueries, attention_mask, part_sizes
from vitkit.structures import FeatureInfo, QuerySet
from vitkit.training_queries.box_denoising import BoxDenoising, Noise, shift_corners


def target(*boxes, labels=None):
    boxes = torch.tensor(boxes).reshape(-1, 4)
    labels = torch.arange(len(boxes)) if labels is None else torch.tensor(labels, dtype=torch.int64)
    return dict(labels=labels, boxes_cxcywh=boxes)


BOX, OTHER = (0.5, 0.5, 0.2, 0.4), (0.25, 0.75, 0.1, 0.1)


def make_head(num_queries=3):
    torch.manual_seed(0)
    small = dict(d_model=8, num_heads=2, num_points=1, d_ffn=8, num_encoder_layers=1, num_decoder_layers=1)
    return DINOHead({"res5": FeatureInfo(8, 32)}, 5, num_queries=num_queries, **small)


def make(num_classes=5, **options):
    torch.manual_seed(0)
    return BoxDenoising(make_head(), num_classes, **{"num_queries": 4, **options})


def make_set(denoising, targets):
    (query_set,) = denoising(make_head(), targets, None)
    return query_set


def test_parts_attend_to_themselves_and_only_denoising_rows_to_the_matching_queries():
    #              denoising  group  own
    expected = """ . x x     x x    . .
                   x . .     x x    . .
                   x . .     x x    . .
                   x x x     . .    x x
                   x x x     . .    x x
                   x x x     x x    . .
                   x x x     x x    . ."""
    rows = [[sign == "x" for sign in line.split()] for line in expected.splitlines()]
    assert attention_mask([1, 2, 2], [True, True, False], 2).tolist() == rows


def joined(sets, num_own=3):
    """Return the queries of sets joined with a head's own, and the batch that separates them again."""
    batch = TrainingQueries([FixedSets(sets)], [])
    own = Queries(torch.full((1, num_own, 8), 9.0), references=torch.full((1, num_own, 4), 0.9))
    return batch.join(own, make_head()), batch


class FixedSets:
    num_selected = 0
    proposals = ()

    def __init__(self, sets):
        self.sets = sets

    def __call__(self, head, targets, selected):
        return self.sets


def rows(count, value=0.0, **options):
    return QuerySet(queries=Queries(torch.full((1, count, 8), value), references=torch.zeros(1, count, 4)), **options)


def test_sets_precede_the_own_queries_and_outputs_are_separated_by_them():
    queries, batch = joined(
        [rows(2, 1.0, name="dn", num_parts=2, repeats=2, matches=[]), rows(3, name=""), rows(1, name="many")]
    )
    assert queries.content[0, :, 0].tolist() == [1, 1, 0, 0, 0, 0, 9, 9, 9]
    assert queries.bias.shape == (9, 9) and queries.positions is None
    layers = [
        {name: 10 * layer + torch.arange(9)[None] for name in ("pred_logits", "pred_boxes")} for layer in range(2)
    ]
    outputs = batch.separate({**layers[1], "aux_outputs": layers[:1], "training_outputs": ["first stage"]}, make_head())
    assert outputs["pred_logits"].tolist() == [[16, 17, 18]]
    assert outputs["aux_outputs"][0]["pred_boxes"].tolist() == [[6, 7, 8]]
    first_stage, noised, group, many = outputs["training_outputs"]
    assert first_stage == "first stage"
    assert noised["pred_logits"].tolist() == [[10, 11]] and noised["repeats"] == 2 and noised["matches"] == []
    assert noised["aux_outputs"][0]["pred_logits"].tolist() == [[0, 1]]
    assert [group["pred_logits"].tolist(), many["pred_logits"].tolist()] == [[[12, 13, 14]], [[15]]]
    assert [entry["name"] for entry in outputs["training_outputs"][1:]] == ["dn", "", "many"]


def test_sets_without_queries_need_no_mask():
    queries, batch = joined([rows(0, name="dn", matches=[])])
    assert queries.bias is None and queries.content.shape == (1, 3, 8)
    layer = {"pred_logits": torch.zeros(1, 3, 2), "pred_boxes": torch.zeros(1, 3, 4)}
    (entry,) = batch.separate({**layer, "aux_outputs": []}, make_head())["training_outputs"]
    assert entry["pred_logits"].shape == (1, 0, 2)


def test_queries_with_masks_come_first():
    masked = QuerySet(
        name="dn", queries=Queries(torch.ones(1, 2, 8), references=torch.zeros(1, 2, 4), masks=lambda size: size)
    )
    queries, _ = joined([rows(3, name=""), masked])
    assert queries.content[0, :2].eq(1).all() and queries.masks((4, 4)) == (4, 4)


@pytest.mark.parametrize(
    ("counts", "groups", "rows"), [([2, 1], 50, 200), ([1, 0], 100, 200), ([7, 3], 14, 196), ([101, 2], 1, 200)]
)
def test_number_of_groups_shrinks_with_the_most_objects_of_an_image(counts, groups, rows):
    targets = [target(*[BOX] * count, labels=[0] * count) for count in counts]
    noised = make_set(make(num_queries=100), targets)
    assert noised["num_parts"] == groups
    assert noised["repeats"] == pytest.approx(groups * sum(min(count, 100) for count in counts) / sum(counts))
    assert noised["queries"].content.shape == (2, rows, 8) and noised["queries"].references.shape == (2, rows, 4)


def test_positive_rows_are_matched_with_their_targets():
    targets = [target(BOX, OTHER), target(OTHER)]
    noised = make_set(make(num_queries=4), targets)
    # Two groups of copies, each positive and negative, of two rows each.
    assert [[index.tolist() for index in match] for match in noised["matches"]] == [
        [[0, 1, 4, 5], [0, 1, 0, 1]],
        [[0, 4], [0, 0]],
    ]
    assert part_sizes(noised) == [4, 4]
    plain = make_set(make(num_queries=4, contrastive=False), targets)
    assert plain["matches"][1][0].tolist() == [0, 2] and plain["queries"].content.shape[1] == 4


def test_rows_equal_the_targets_without_noise_and_empty_rows_have_no_content():
    denoising = make(num_queries=2, contrastive=False, label_noise=0.0, box_noise=0.0)
    noised = make_set(denoising, [target(BOX, OTHER, labels=[3, 1]), target(OTHER, labels=[4])])["queries"]
    weight = denoising.label_embed.weight
    assert torch.equal(noised.content[0], weight[[3, 1]])
    assert torch.equal(noised.content[1], torch.stack([weight[4], torch.zeros(8)]))
    torch.testing.assert_close(noised.references[0], torch.tensor([BOX, OTHER]))
    torch.testing.assert_close(noised.references[1], torch.tensor([OTHER, (0.5, 0.5, 0.5, 0.5)]))


def test_negative_copies_have_more_noise(monkeypatch):
    denoising = make(num_queries=1, box_noise=0.5)
    monkeypatch.setattr(
        denoising,
        "draw",
        lambda n, device: Noise(torch.ones(n), torch.zeros(n, dtype=int), torch.ones(n, 4), torch.full((n, 4), 0.4)),
    )
    boxes = make_set(denoising, [target(BOX)])["queries"].references[0]
    # All corners move by 0.5 * 0.4 of half the width and height, those of the negative copy by 0.5 * 1.4 of it.
    torch.testing.assert_close(boxes, torch.tensor([[0.52, 0.54, 0.2, 0.4], [0.57, 0.64, 0.2, 0.4]]))


def test_boxes_stay_in_the_image_and_keep_a_size():
    moves = torch.tensor([[-9.0, -9, 9, 9], [2, 0, -2, 0]])
    boxes = shift_corners(torch.tensor([BOX, BOX]), moves, mirror=False, eps=1e-3)
    assert boxes[0].tolist() == pytest.approx([0.5, 0.5, 0.999, 0.999], abs=1e-5)
    assert boxes[1].tolist() == pytest.approx([0.5, 0.5, 0.001, 0.4], abs=1e-5)


def test_inverted_boxes_are_mirrored_where_that_is_the_rule():
    moves = torch.tensor([[3.0, 0, -2, 0]])
    mirrored = shift_corners(torch.tensor([BOX]), moves, mirror=True, eps=1e-5)
    # Corners at x = 0.7 and 0.4, which is a width of -0.3.
    assert mirrored[0].tolist() == pytest.approx([0.55, 0.5, 0.3, 0.4], abs=1e-5)
    reduced = shift_corners(torch.tensor([BOX]), moves, mirror=False, eps=1e-5)
    assert reduced[0].tolist() == pytest.approx([0.55, 0.5, 1e-5, 0.4], abs=1e-6)


def test_label_noise_redraws_half_of_its_fraction_of_labels():
    denoising = make(num_classes=1000, num_queries=2000, contrastive=False, label_noise=0.5, box_noise=0.0)
    content = make_set(denoising, [target(BOX, labels=[7])])["queries"].content[0]
    kept = (content == denoising.label_embed.weight[7]).all(-1).float().mean()
    assert 0.72 < kept < 0.78


def test_positions_made_from_boxes_have_the_precision_of_the_model():
    small = dict(num_queries=3, d_model=8, num_heads=2, d_ffn=8, num_encoder_layers=1, num_decoder_layers=1)
    head = DETRHead({"res5": FeatureInfo(8, 32)}, 5, **small)
    (denoising,) = BoxDenoising(head, 5, num_queries=4).double()(head, [target(BOX)], None)
    assert denoising["queries"].positions.dtype == denoising["queries"].content.dtype == torch.float64


def test_no_targets_give_no_rows_and_the_embedding_still_has_a_gradient():
    denoising = make()
    noised = make_set(denoising, [target(), target()])
    assert noised["queries"].content.shape == (2, 0, 8) and noised["repeats"] == 1
    assert [len(rows) for rows, _ in noised["matches"]] == [0, 0]
    noised["queries"].content.sum().backward()
    assert denoising.label_embed.weight.grad.abs().sum() == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(num_queries=0), r"num_queries=0: expected at least 1\."),
        (dict(num_classes=0), r"num_classes=0 leaves no labels to noise; expected at least 1\."),
        (dict(eps=0.0), r"eps=0.0, padding=0.5: expected more than 0 and below 0.5, and 0 to 1\."),
        (dict(label_noise=-0.1), r"label_noise=-0.1, box_noise=1.0: expected 0 to 2, and at least 0\."),
    ],
)
def test_invalid_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        make(**settings)
