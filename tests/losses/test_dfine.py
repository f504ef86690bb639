"""D-FINE's loss: every term, layer and gradient of the original from the golden file, and what it does beside."""

import math

import pytest
import torch
import torch.nn.functional as F
from golden.weights import Case, grad_projection, load_case
from helpers.dfine_losses import LAYER_FIELDS, PREFIXES, TERMS, golden_outputs, golden_targets

from vitkit.errors import ConfigError, DataError
from vitkit.losses.dfine import DFINECriterion, union_of_matches
from vitkit.ops.box_distances import boxes_at_distances, distance_bins
from vitkit.registry import CRITERIA

VARIANTS = [f"{targets}_{loss}" for targets in ("objects", "one_empty", "none") for loss in ("vfl", "mal")]
MATCHER = dict(type="HungarianMatcher", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0, activation="sigmoid")
WEIGHTS = dict(labels=1.0, l1=5.0, giou=2.0, fgl=0.15, ddf=1.5)


def make_criterion(**changes):
    return CRITERIA.build({**dict(type="DFINECriterion", matcher=MATCHER, weights=WEIGHTS), **changes})


@pytest.fixture(scope="module")
def case() -> Case:
    return load_case("dfine_criterion")


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_term_of_every_layer_equals_the_original(case, variant):
    targets, loss = variant.rsplit("_", 1)
    criterion = make_criterion(class_loss={"vfl": "varifocal", "mal": "mal"}[loss])
    losses = criterion(golden_outputs(case, targets)[0], golden_targets(case, targets))
    expected = dict(case.losses[variant]["terms"])
    # The last layer of denoising is compared with itself there.
    assert expected.pop("loss_ddf_dn_3") == 0
    names = {prefix + ours: TERMS[ours].format(loss) + suffix for prefix, suffix in PREFIXES.items() for ours in TERMS}
    assert {names[name] for name in losses} == expected.keys()
    for name, value in losses.items():
        assert value.item() == pytest.approx(expected[names[name]], rel=1e-5, abs=1e-6), name
    assert sum(losses.values()).item() == pytest.approx(case.losses[variant]["total"], rel=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_all_inputs_equal_the_original(case, variant):
    targets, loss = variant.rsplit("_", 1)
    criterion = make_criterion(class_loss={"vfl": "varifocal", "mal": "mal"}[loss])
    outputs, leaves = golden_outputs(case, targets)
    sum(criterion(outputs, golden_targets(case, targets)).values()).backward()
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert grads.keys() == case.grads[variant].keys()
    for name, grad in grads.items():
        norm, projection = case.grads[variant][name]
        got_norm, got_projection = grad_projection(name, grad.numpy())
        assert got_norm == pytest.approx(norm, rel=1e-5, abs=1e-6), name
        assert got_projection == pytest.approx(projection, abs=1e-4 * norm + 1e-6), name


def make_outputs(counts: list[int], *, num_queries: int = 8, reg_max: int = 6, dtype=torch.float32) -> dict:
    """Return random outputs of two decoder layers, the plain prediction, the encoder, and denoising if counts are."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    def boxes(num: int) -> torch.Tensor:
        return (0.2 + 0.3 * torch.rand(len(counts), num, 4, generator=generator)).to(dtype).requires_grad_()

    def layers(num: int) -> dict:
        plain = dict(pred_logits=leaf(len(counts), num, 3), pred_boxes=boxes(num))
        refined = [
            dict(
                pred_logits=leaf(len(counts), num, 3),
                pred_boxes=boxes(num),
                pred_corners=leaf(len(counts), num, 4 * (reg_max + 1)),
            )
            for _ in range(2)
        ]
        return {**refined[1], "initial_boxes": plain["pred_boxes"].detach(), "aux_outputs": [plain, refined[0]]}

    most = max(counts)
    matches = [(torch.arange(n), torch.arange(n)) for n in counts]
    return {
        **layers(num_queries),
        "distance_bins": distance_bins(reg_max, 4.0, 0.5),
        "reg_scale": 4.0,
        "training_outputs": [
            dict(name="enc", pred_logits=leaf(len(counts), num_queries, 3), pred_boxes=boxes(num_queries)),
            dict(layers(2 * most), name="dn", matches=matches, repeats=1),
        ],
    }


def make_targets(counts: list[int]) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    return [
        dict(
            labels=torch.randint(3, (n,), generator=generator),
            boxes_cxcywh=0.2 + 0.3 * torch.rand(n, 4, generator=generator),
        )
        for n in counts
    ]


def tensors_of(outputs: dict) -> list[torch.Tensor]:
    """Return all predictions in the outputs."""
    sets = [outputs, *outputs["training_outputs"]]
    layers = [layer for queries in sets for layer in (queries, *queries.get("aux_outputs", []))]
    return [layer[field] for layer in layers for field in LAYER_FIELDS if field in layer]


@pytest.mark.parametrize("counts", [[3, 2], [0, 2], [0, 0], [12, 1]])
def test_keys_are_constant_and_gradients_reach_every_prediction(counts):
    outputs = make_outputs(counts)
    losses = make_criterion()(outputs, make_targets(counts))
    terms = ["labels", "l1", "giou", "fgl", "ddf"]
    without = {"": 4, "aux0_": 3, "aux1_": 5}
    keys = {f"{queries}{layer}{term}" for queries in ("", "dn_") for layer, n in without.items() for term in terms[:n]}
    assert losses.keys() == keys | {"enc_labels", "enc_l1", "enc_giou"}
    sum(losses.values()).backward()
    assert all(loss.isfinite() for loss in losses.values())
    assert all(tensor.grad.isfinite().all() for tensor in tensors_of(outputs))


def test_without_targets_the_terms_of_pairs_are_zero():
    losses = make_criterion()(make_outputs([0, 0]), make_targets([0, 0]))
    zero = {name for name, value in losses.items() if value == 0}
    assert {"l1", "giou", "fgl", "aux1_fgl", "enc_l1", "dn_labels", "dn_aux1_ddf"} <= zero
    assert losses["labels"] > 0 and losses["aux1_ddf"] > 0


def test_the_union_takes_the_target_of_most_layers():
    def matches(*pairs: tuple[int, int]):
        query, target = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
        return query, target

    layers = [
        [matches((0, 1), (4, 0)), matches()],
        [matches((0, 1), (2, 0)), matches()],
        [matches((0, 0), (2, 1)), matches()],
    ]
    (query, target), (no_query, no_target) = union_of_matches(layers, 6, [2, 0])
    # Query 0 has target 1 twice and 0 once; query 2 each once, so it takes the first.
    assert query.tolist() == [0, 2, 4] and target.tolist() == [1, 0, 0]
    assert no_query.tolist() == no_target.tolist() == []
    assert union_of_matches(layers[::-1], 6, [2, 0])[0][1].tolist() == [1, 0, 0]


def single_query(distances_of_layers: list[float], **changes) -> tuple[dict, list[dict]]:
    """Return outputs of one query, whose box is the target, with the same corners for all edges."""
    box = torch.tensor([[[0.5, 0.5, 0.4, 0.4]]])
    layers = [
        dict(pred_logits=torch.zeros(1, 1, 1), pred_boxes=box, pred_corners=torch.tensor(corners).repeat(1, 1, 4))
        for corners in distances_of_layers
    ]
    outputs = {
        **layers[-1],
        "initial_boxes": torch.tensor([[[0.5, 0.5, 0.2, 0.2]]]),
        "distance_bins": distance_bins(4, 4.0, 0.5),  # -4, -2, 0, 2, 4
        "reg_scale": 4.0,
        "aux_outputs": layers[:-1],
        **changes,
    }
    return outputs, [dict(labels=torch.zeros(1, dtype=torch.int64), boxes_cxcywh=box[0])]


def test_fgl_by_hand():
    """Edges are half a width outside of those of the initial box, 2 units: exactly the last bin but one."""
    outputs, targets = single_query([[0.0, 0.0, 0.0, math.log(4), 0.0]])
    losses = make_criterion(weights=dict(WEIGHTS, fgl=1.0))(outputs, targets)
    assert losses["fgl"].item() == pytest.approx(4 * math.log(2), rel=1e-4)
    # A quarter of the width is 1 unit, in the middle of bins 2 and 3.
    targets[0]["boxes_cxcywh"] = torch.tensor([[0.5, 0.5, 0.3, 0.3]])
    losses = make_criterion(weights=dict(WEIGHTS, fgl=1.0))(outputs, targets)
    iou = 0.3**2 / 0.4**2
    assert losses["fgl"].item() == pytest.approx(iou * 4 * (math.log(2) + math.log(8)) / 2, rel=1e-4)


def test_ddf_by_hand():
    student, teacher = [0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0, 0.0]
    outputs, targets = single_query([student, teacher])
    losses = make_criterion(weights=dict(WEIGHTS, ddf=1.0), temperature=2.0)(outputs, targets)
    p = torch.tensor(teacher).div(2).softmax(0)
    # The only query is matched, with IoU 1.
    assert losses["aux0_ddf"].item() == pytest.approx(4 * (p * (p * 5).log()).sum().item(), rel=1e-4)
    # Without targets, its weight is the teacher's probability, which is a half.
    nothing = [dict(labels=torch.zeros(0, dtype=torch.int64), boxes_cxcywh=torch.zeros(0, 4))]
    unmatched = make_criterion(weights=dict(WEIGHTS, ddf=1.0), temperature=2.0)(outputs, nothing)
    assert unmatched["aux0_ddf"].item() == pytest.approx(losses["aux0_ddf"].item() / 2, rel=1e-5)
    assert "ddf" not in losses


def test_the_last_layer_is_not_taught_by_the_others():
    outputs, targets = make_outputs([2, 1]), make_targets([2, 1])
    losses = make_criterion()(outputs, targets)
    (losses["aux1_ddf"] + losses["dn_aux1_ddf"]).backward()
    for queries in (outputs, outputs["training_outputs"][1]):
        assert queries["pred_corners"].grad is None and queries["pred_logits"].grad is None
        assert queries["aux_outputs"][1]["pred_corners"].grad.abs().sum() > 0


def test_denoising_and_the_encoder_may_be_left_out():
    outputs, targets = make_outputs([2, 1]), make_targets([2, 1])
    losses = make_criterion()(outputs, targets)
    encoder, _ = outputs["training_outputs"]
    without_denoising = make_criterion()({**outputs, "training_outputs": [encoder]}, targets)
    for name, value in without_denoising.items():
        assert value == losses[name], name  # its matches do not vote
    del outputs["training_outputs"]
    assert "enc_labels" not in make_criterion()(outputs, targets)


def test_loss_is_float32_under_autocast():
    outputs, targets = make_outputs([2, 3], dtype=torch.bfloat16), make_targets([2, 3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = make_criterion()(outputs, targets)
    assert {loss.dtype for loss in losses.values()} == {torch.float32}
    sum(losses.values()).backward()
    assert all(tensor.grad.isfinite().all() for tensor in tensors_of(outputs))

    def as_float(value):
        if isinstance(value, dict):
            return {name: as_float(item) for name, item in value.items()}
        if isinstance(value, list):
            return [as_float(item) for item in value]
        return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    for name, expected in make_criterion()(as_float(outputs), targets).items():
        torch.testing.assert_close(losses[name], expected)


def test_all_layers_are_matched_with_one_transfer_from_the_device(monkeypatch):
    calls, transfer = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: calls.append(tensor.shape) or transfer(tensor))
    make_criterion()(make_outputs([2, 1]), make_targets([2, 1]))
    assert len(calls) == 1


def test_a_box_whose_edges_have_crossed_has_no_overlap_and_counts_as_a_line():
    outputs, targets = single_query([[0.0] * 5])
    crossed = torch.tensor([[[0.2, 0.5, -0.1, 0.4]]], requires_grad=True)
    losses = make_criterion(weights=dict(WEIGHTS, l1=1.0, giou=1.0))({**outputs, "pred_boxes": crossed}, targets)
    # The hull is from x = 0.2 to 0.7.
    assert losses["giou"].item() == pytest.approx(1 + (0.5 - 0.4) / 0.5, rel=1e-5)
    assert losses["l1"].item() == pytest.approx(0.3 + 0.5, rel=1e-5) and losses["fgl"] == 0
    losses["giou"].backward()
    assert crossed.grad[..., 2] == 0 and crossed.grad[..., 0] < 0


def test_gradient_steps_on_the_corners_find_the_target():
    """The targets of fgl are those of the layer that computes boxes from corners."""
    bins = distance_bins(16, 4.0, 0.5)
    initial = torch.tensor([[[0.5, 0.5, 0.2, 0.3]]])
    target = torch.tensor([[0.55, 0.46, 0.31, 0.24]])
    corners = torch.zeros(1, 1, 4 * 17, requires_grad=True)
    optimizer = torch.optim.Adam([corners], lr=0.1)
    criterion = make_criterion(weights=dict(labels=0.0, l1=0.0, giou=0.0, fgl=1.0, ddf=0.0))
    for _ in range(300):
        boxes = boxes_at_distances(initial, corners.unflatten(-1, (4, -1)).softmax(-1) @ bins, 4.0)
        outputs = dict(pred_logits=torch.zeros(1, 1, 1), pred_boxes=boxes, pred_corners=corners, initial_boxes=initial)
        outputs |= dict(distance_bins=bins, reg_scale=4.0)
        loss = criterion(outputs, [dict(labels=torch.zeros(1, dtype=torch.int64), boxes_cxcywh=target)])["fgl"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(boxes[0], target, atol=2e-3, rtol=0)


def test_class_losses_other_than_published_are_those_of_their_name():
    outputs, targets = single_query([[0.0] * 5])
    losses = make_criterion(class_loss="focal", focal_alpha=0.25)(outputs, targets)
    assert losses["labels"].item() == pytest.approx(0.25 * 0.25 * math.log(2), rel=1e-5)
    bce = F.binary_cross_entropy_with_logits(torch.zeros(()), torch.ones(()))
    assert make_criterion(class_loss="mal")(outputs, targets)["labels"].item() == pytest.approx(bce.item(), rel=1e-5)


def test_class_weights_multiply_the_class_loss_of_matched_queries():
    outputs, targets = single_query([[0.0] * 5, [0.0] * 5])
    losses = make_criterion()(outputs, targets)
    weighted = make_criterion(class_weights=[3.0])(outputs, targets)
    for name, value in losses.items():
        factor = 3 if name.endswith("labels") else 1
        torch.testing.assert_close(weighted[name], factor * value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(class_loss="cross_entropy"), r"class_loss='cross_entropy': expected 'varifocal', 'mal' or 'focal'"),
        (dict(class_loss="vfl"), r"class_loss='vfl': unknown loss\. Did you mean"),
        (dict(class_loss="mal", focal_alpha=0.2), r"focal_alpha=0\.2: class_loss='mal' has no alpha"),
        (dict(temperature=0.0), r"temperature=0\.0: expected a positive number"),
        (dict(weights=dict(labels=1.0, l1=5.0, giou=2.0)), r"weights: no weight for fgl, ddf\. Set it to 0"),
        (dict(weights=dict(WEIGHTS, mask=1.0)), r"weights: unknown term 'mask'"),
        (dict(matcher=dict(MATCHER, activation="softmax")), r"matcher\.activation='softmax' is for other logits"),
    ],
)
def test_wrong_settings_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_criterion(**changes)


def test_outputs_of_another_head_are_an_error():
    outputs = make_outputs([1])
    for name in ("pred_corners", "initial_boxes"):
        del outputs[name]
    message = (
        r"^DFINECriterion: the model's outputs have no pred_corners, initial_boxes, which D-FINE's head returns\. "
    )
    with pytest.raises(ConfigError, match=message + "Set criterion.type=SetCriterion"):
        make_criterion()(outputs, make_targets([1]))


def test_distributions_with_another_number_of_bins_are_an_error():
    outputs = make_outputs([1]) | dict(distance_bins=distance_bins(8, 4.0, 0.5))
    message = r"^DFINECriterion: pred_corners has 28 channels, but there are 9 distance_bins: expected 36\. Make both"
    with pytest.raises(ConfigError, match=message):
        make_criterion()(outputs, make_targets([1]))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (dict(name="many", repeats=3), "many"),
        (dict(name=""), ""),
        (dict(name="enc", pred_logits=torch.zeros(1, 5, 3), pred_boxes=torch.rand(1, 5, 4)), "enc"),
    ],
)
def test_queries_without_known_matches_are_an_error(changes, name):
    outputs = make_outputs([1])
    other = {name: outputs[name] for name in (*LAYER_FIELDS, "initial_boxes", "aux_outputs")}
    if name == "enc":
        other = {}
    outputs["training_outputs"] = [{**other, **changes}]
    with pytest.raises(ConfigError, match=f"^DFINECriterion: it has no loss for the queries '{name}' of training_out"):
        make_criterion()(outputs, make_targets([1]))


def test_denoising_queries_without_initial_boxes_are_an_error():
    outputs = make_outputs([1])
    del outputs["training_outputs"][1]["initial_boxes"]
    message = r"the queries 'dn' of training_outputs have no initial_boxes\. Name it in the head's query_outputs"
    with pytest.raises(ConfigError, match=message):
        make_criterion()(outputs, make_targets([1]))


def test_label_out_of_range_is_an_error():
    targets = make_targets([2])
    targets[0]["labels"][1] = 3
    with pytest.raises(DataError, match=r"label 3; expected 0\.\.2"):
        make_criterion()(make_outputs([2]), targets)


def test_matched_accuracy_is_that_of_the_last_layer():
    criterion = make_criterion()
    criterion(make_outputs([2, 1]), make_targets([2, 1]))
    assert criterion.meters["matched_accuracy"].compute()[1] == 3
    assert isinstance(criterion, DFINECriterion)


def test_class_weights_act_on_the_class_losses_only():
    outputs, targets = make_outputs([2, 1]), make_targets([2, 1])
    num_classes = outputs["pred_logits"].shape[-1]
    plain, twice, thrice = (
        make_criterion(class_weights=weight and [weight] * num_classes)(outputs, targets) for weight in (None, 2.0, 3.0)
    )
    for name, value in plain.items():
        if name.endswith("labels"):
            assert twice[name] > value
            torch.testing.assert_close(thrice[name] - value, 2 * (twice[name] - value), rtol=1e-4, atol=1e-6)
        else:
            torch.testing.assert_close(twice[name], value)
