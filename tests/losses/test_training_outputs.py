"""Queries that exist in training only, in both set criteria."""

import pytest
import torch

from vitkit.registry import CRITERIA

NUM_CLASSES, NUM_LAYERS, SIZE = 3, 2, (24, 32)


def make_criterion(kind: str):
    if kind == "masks":
        matcher = dict(type="HungarianMaskMatcher", cost_labels=2.0, cost_mask=5.0, cost_dice=5.0, mask_cost="focal")
        weights = dict(labels=2.0, mask=5.0, dice=5.0)
        spec = dict(type="MaskCriterion", mask_loss="focal", no_object_weight=0.1)
    else:
        matcher = dict(type="HungarianMatcher", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0)
        weights = dict(labels=2.0, l1=5.0, giou=2.0)
        spec = dict(type="SetCriterion", no_object_weight=0.1)
        if kind == "sigmoid":
            matcher["activation"] = "sigmoid"
            spec = dict(type="SetCriterion", class_loss="focal")
    return CRITERIA.build(dict(spec, matcher=matcher, weights=weights))


def make_outputs(kind: str, num_queries: int, *, num_layers: int = NUM_LAYERS) -> dict:
    def layer():
        num_logits = NUM_CLASSES if kind == "sigmoid" else NUM_CLASSES + 1
        return dict(
            pred_logits=torch.randn(2, num_queries, num_logits).requires_grad_(),
            pred_boxes=torch.rand(2, num_queries, 4).requires_grad_(),
            pred_masks=torch.randn(2, num_queries, 6, 8).requires_grad_(),
        )

    return dict(layer(), aux_outputs=[layer() for _ in range(num_layers - 1)])


def make_targets(counts=(2, 1)) -> list[dict]:
    return [
        dict(
            labels=torch.randint(NUM_CLASSES, (n,)),
            boxes_cxcywh=0.1 + 0.4 * torch.rand(n, 4),
            masks=torch.rand(n, *SIZE) > 0.5,
        )
        for n in counts
    ]


def denoising_matches(counts, copies: int) -> list:
    """Return the matches of queries that are copies of the targets, in padded groups."""
    most = max(counts)
    rows = [[copy * most + j for copy in range(copies) for j in range(n)] for n in counts]
    return [(torch.tensor(row, dtype=torch.int64), torch.arange(n).repeat(copies)) for row, n in zip(rows, counts)]


def training_outputs(kind: str, counts, *, copies: int = 2) -> list[dict]:
    """Return sets of queries of every kind."""
    denoising = make_outputs(kind, copies * max(counts))
    encoder = make_outputs(kind, 7, num_layers=1)
    return [
        dict(make_outputs(kind, 5), name=""),
        dict(make_outputs(kind, 5), name=""),
        dict(encoder, name="enc", class_agnostic=True),
        dict(make_outputs(kind, 8), name="many", repeats=3),
        dict(denoising, name="dn", matches=denoising_matches(counts, copies), repeats=copies),
    ]


@pytest.fixture(params=["softmax", "sigmoid", "masks"])
def kind(request) -> str:
    torch.manual_seed(0)
    return request.param


def run(criterion, outputs: dict, targets: list[dict], sets: list[dict] | None = None) -> dict:
    return criterion({**outputs, "input_size": SIZE, **({} if sets is None else {"training_outputs": sets})}, targets)


def assert_equal(losses: dict, expected: dict, prefix: str = "") -> None:
    for name, value in expected.items():
        torch.testing.assert_close(losses[prefix + name], value)


def test_losses_of_an_empty_list_are_those_of_the_main_queries(kind):
    criterion, outputs, targets = make_criterion(kind), make_outputs(kind, 5), make_targets()
    plain, empty = run(criterion, outputs, targets), run(criterion, outputs, targets, [])
    assert list(plain) == list(empty) and all(torch.equal(plain[name], empty[name]) for name in plain)


@pytest.mark.parametrize("counts", [(2, 1), (0, 2), (0, 0), (9, 1)])
def test_keys_are_constant_and_gradients_reach_every_set(kind, counts):
    criterion, outputs = make_criterion(kind), make_outputs(kind, 5)
    sets = training_outputs(kind, counts, copies=2 if max(counts) else 1)
    losses = run(criterion, outputs, make_targets(counts), sets)
    terms = ("labels", "mask", "dice") if kind == "masks" else ("labels", "l1", "giou")
    layers = ("", "aux0_", "enc_", "many_", "many_aux0_", "dn_", "dn_aux0_")
    assert list(losses) == [f"{layer}{term}" for layer in layers for term in terms]
    sum(losses.values()).backward()
    predicted = ("pred_logits", "pred_masks" if kind == "masks" else "pred_boxes")
    for predictions in (outputs, *sets):
        for layer in (predictions, *predictions["aux_outputs"]):
            assert all(layer[name].grad.isfinite().all() for name in predicted)
    if not sum(counts):
        assert all(value == 0 for name, value in losses.items() if name.startswith("dn_"))


def test_losses_of_sets_with_the_same_name_are_the_mean_of_each(kind):
    criterion, targets = make_criterion(kind), make_targets()
    main, *groups = (make_outputs(kind, 5) for _ in range(3))
    losses = run(criterion, main, targets, [dict(group, name="", matches=None) for group in groups])
    each = [run(criterion, outputs, targets) for outputs in (main, *groups)]
    assert losses.keys() == each[0].keys()
    assert_equal(losses, {name: sum(other[name] for other in each) / 3 for name in losses})


def test_repeats_match_each_target_several_times(kind):
    criterion, targets, outputs = make_criterion(kind), make_targets(), make_outputs(kind, 9)
    repeated = [{name: torch.cat([value] * 3) for name, value in target.items()} for target in targets]
    many = dict(outputs, name="many", repeats=3)
    losses = run(criterion, make_outputs(kind, 5), targets, [many])
    # As the main outputs, they are matched one-to-one.
    assert_equal(losses, run(criterion, many, repeated), "many_")


def test_matches_of_repeated_targets_are_used_as_they_are(kind):
    """With the matches that the matcher would find, the losses are those of matching."""
    criterion, targets, outputs = make_criterion(kind), make_targets(), make_outputs(kind, 9, num_layers=1)
    repeated = [{name: torch.cat([value] * 3) for name, value in target.items()} for target in targets]
    arguments = dict(input_size=SIZE) if kind == "masks" else {}
    ((matches,),) = criterion.matcher([([outputs], repeated)], **arguments)
    matches = [(query, index % len(target["labels"])) for (query, index), target in zip(matches, targets)]
    denoising = dict(outputs, name="dn", matches=matches, repeats=3)
    losses = run(criterion, make_outputs(kind, 5), targets, [denoising])
    assert_equal(losses, run(criterion, outputs, repeated), "dn_")


def test_class_agnostic_sets_have_targets_of_class_0(kind):
    criterion, targets, outputs = make_criterion(kind), make_targets(), make_outputs(kind, 9, num_layers=1)
    objects = [{**target, "labels": torch.zeros_like(target["labels"])} for target in targets]
    by_class = run(criterion, make_outputs(kind, 5), targets, [dict(outputs, name="enc")])
    agnostic = run(criterion, make_outputs(kind, 5), targets, [dict(outputs, name="enc", class_agnostic=True)])
    assert_equal(by_class, run(criterion, outputs, targets), "enc_")
    assert_equal(agnostic, run(criterion, outputs, objects), "enc_")
    assert agnostic["enc_labels"] != by_class["enc_labels"]


def test_accuracy_counts_the_main_queries_only(kind):
    criterion = make_criterion(kind)
    run(criterion, make_outputs(kind, 5), make_targets((2, 1)), training_outputs(kind, (2, 1)))
    assert criterion.meters["matched_accuracy"].compute()[1] == 3


def test_all_sets_are_matched_with_one_transfer_from_the_device(kind, monkeypatch):
    criterion, calls = make_criterion(kind), []
    transfer = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: calls.append(tensor.shape) or transfer(tensor))
    run(criterion, make_outputs(kind, 5), make_targets(), training_outputs(kind, (2, 1)))
    assert len(calls) == 1


@pytest.mark.parametrize("changes", [dict(repeats=2), dict(class_agnostic=True), dict(num_queries=6)])
def test_sets_with_the_same_name_must_be_alike(kind, changes):
    changes = dict(changes)
    other = make_outputs(kind, changes.pop("num_queries", 5))
    with pytest.raises(ValueError, match="sets of queries with the name '' have .*give one of them another name"):
        run(make_criterion(kind), make_outputs(kind, 5), make_targets(), [dict(other, name="", **changes)])
