import pytest
import torch

from vitkit.errors import ConfigError
from vitkit.nn.denoising import BoxDenoising, DenoisingSettings, Noise, noised_boxes
from vitkit.nn.training_queries import DenoisingQueries, QueryLayout, training_mask


def target(*boxes, labels=None):
    boxes = torch.tensor(boxes).reshape(-1, 4)
    labels = torch.arange(len(boxes)) if labels is None else torch.tensor(labels, dtype=torch.int64)
    return dict(labels=labels, boxes_cxcywh=boxes)


BOX, OTHER = (0.5, 0.5, 0.2, 0.4), (0.25, 0.75, 0.1, 0.1)


def make(num_classes=5, d_model=8, **settings):
    torch.manual_seed(0)
    return BoxDenoising(num_classes, d_model, DenoisingSettings(**{"denoising_queries": 4, **settings}))


def test_groups_attend_to_themselves_and_only_denoising_rows_to_the_matching_queries():
    #              denoising  group  usual
    expected = """ . x x     x x    . .
                   x . .     x x    . .
                   x . .     x x    . .
                   x x x     . .    x x
                   x x x     . .    x x
                   x x x     x x    . .
                   x x x     x x    . ."""
    rows = [[sign == "x" for sign in line.split()] for line in expected.splitlines()]
    assert training_mask(2, denoising_sizes=[1, 2], group_sizes=[2]).tolist() == rows


def test_matching_queries_alone_need_no_mask_and_give_plain_outputs():
    layers = [dict(pred_logits=torch.rand(1, 3, 2)) for _ in range(2)]
    layout = QueryLayout(3)
    assert layout.attention_bias(layers[0]["pred_logits"]) is None
    outputs = layout.outputs(layers)
    assert outputs.keys() == {"pred_logits", "aux_outputs"}
    assert outputs["pred_logits"] is layers[1]["pred_logits"] and outputs["aux_outputs"] == layers[:1]


def test_outputs_are_split_by_the_rows_of_each_part():
    noised = DenoisingQueries(torch.zeros(1, 2, 8), [], 2, torch.zeros(1, 2, 4))
    layers = [dict(x=10 * layer + torch.arange(9)[None]) for layer in range(2)]
    outputs = QueryLayout(3, noised, group_sizes=[3, 1]).outputs(layers)
    assert outputs["x"].tolist() == [[16, 17, 18]]
    assert outputs["aux_outputs"][0]["x"].tolist() == [[6, 7, 8]]
    assert outputs["denoising"]["x"].tolist() == [[10, 11]]
    assert outputs["denoising"]["aux_outputs"][0]["x"].tolist() == [[0, 1]]
    assert outputs["denoising"]["num_groups"] == 2
    assert [group["x"].tolist() for group in outputs["groups"]] == [[[12, 13, 14]], [[15]]]
    assert outputs["groups"][1]["aux_outputs"][0]["x"].tolist() == [[5]]


@pytest.mark.parametrize(
    ("counts", "groups", "rows"), [([2, 1], 50, 200), ([1, 0], 100, 200), ([7, 3], 14, 196), ([101, 2], 1, 202)]
)
def test_number_of_groups_shrinks_with_the_most_objects_of_an_image(counts, groups, rows):
    noised = make(denoising_queries=100)([target(*[BOX] * count, labels=[0] * count) for count in counts])
    assert noised.num_groups == groups
    assert noised.content.shape == (2, rows, 8) and noised.boxes_cxcywh.shape == (2, rows, 4)


def test_positive_rows_are_matched_with_their_targets():
    noised = make(denoising_queries=4)([target(BOX, OTHER), target(OTHER)])
    # Two groups of copies, each positive and negative, of two rows each.
    assert [[index.tolist() for index in match] for match in noised.matches] == [
        [[0, 1, 4, 5], [0, 1, 0, 1]],
        [[0, 4], [0, 0]],
    ]
    assert noised.group_sizes == [4, 4]
    plain = make(denoising_queries=4, contrastive=False)([target(BOX, OTHER), target(OTHER)])
    assert plain.matches[1][0].tolist() == [0, 2] and plain.content.shape[1] == 4


def test_rows_equal_the_targets_without_noise_and_empty_rows_have_no_content():
    denoising = make(denoising_queries=2, contrastive=False, label_noise=0.0, box_noise=0.0)
    noised = denoising([target(BOX, OTHER, labels=[3, 1]), target(OTHER, labels=[4])])
    weight = denoising.label_embed.weight
    assert torch.equal(noised.content[0], weight[[3, 1]])
    assert torch.equal(noised.content[1], torch.stack([weight[4], torch.zeros(8)]))
    torch.testing.assert_close(noised.boxes_cxcywh[0], torch.tensor([BOX, OTHER]))
    torch.testing.assert_close(noised.boxes_cxcywh[1], torch.tensor([OTHER, (0.5, 0.5, 0.5, 0.5)]))


def test_negative_copies_have_more_noise(monkeypatch):
    denoising = make(denoising_queries=1, box_noise=0.5)
    monkeypatch.setattr(
        denoising,
        "draw",
        lambda n, device: Noise(torch.ones(n), torch.zeros(n, dtype=int), torch.ones(n, 4), torch.full((n, 4), 0.4)),
    )
    boxes = denoising([target(BOX)]).boxes_cxcywh[0]
    # All corners move by 0.5 * 0.4 of half the width and height, those of the negative copy by 0.5 * 1.4 of it.
    torch.testing.assert_close(boxes, torch.tensor([[0.52, 0.54, 0.2, 0.4], [0.57, 0.64, 0.2, 0.4]]))


def test_boxes_stay_in_the_image_and_keep_a_size():
    moves = torch.tensor([[-9.0, -9, 9, 9], [2, 0, -2, 0]])
    boxes = noised_boxes(torch.tensor([BOX, BOX]), moves)
    assert boxes[0].tolist() == pytest.approx([0.5, 0.5, 0.999, 0.999], abs=1e-5)
    assert boxes[1].tolist() == pytest.approx([0.5, 0.5, 0.001, 0.4], abs=1e-5)


def test_label_noise_redraws_half_of_its_fraction_of_labels():
    denoising = make(num_classes=1000, denoising_queries=2000, contrastive=False, label_noise=0.5, box_noise=0.0)
    content = denoising([target(BOX, labels=[7])]).content[0]
    kept = (content == denoising.label_embed.weight[7]).all(-1).float().mean()
    assert 0.72 < kept < 0.78


def test_no_targets_give_no_rows_and_the_embedding_still_has_a_gradient():
    denoising = make()
    noised = denoising([target(), target()])
    assert noised.content.shape == (2, 0, 8) and noised.num_groups == 1
    assert [len(rows) for rows, _ in noised.matches] == [0, 0]
    noised.content.sum().backward()
    assert denoising.label_embed.weight.grad.abs().sum() == 0
    layout = QueryLayout(3, noised)
    assert layout.attention_bias(torch.zeros(1)) is None
    assert layout.outputs([dict(x=torch.zeros(2, 3))])["denoising"]["x"].shape == (2, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(denoising_queries=0), r"denoising_queries=0: expected at least 1, or None for no denoising\."),
        (dict(num_classes=0), r"denoising_queries=4: num_classes=0 leaves no labels to noise\."),
        (dict(label_noise=-0.1), r"label_noise=-0.1, box_noise=1.0: expected 0 to 2, and at least 0\."),
    ],
)
def test_invalid_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        make(**settings)
