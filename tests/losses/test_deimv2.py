"""DEIMv2's loss: every term and gradient of the original before and after its matcher changes, with and without the
union of matches."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from golden.weights import load_case, normal_for
from helpers.dfine_losses import PREFIXES, TERMS, golden_outputs, golden_targets

from vitkit.engine.step import set_epoch
from vitkit.errors import ConfigError
from vitkit.matchers.hungarian import HungarianMatcher
from vitkit.registry import CRITERIA

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "deimv2_criterion.json").read_text())
COSTS = dict(cost_labels=2.0, cost_l1=5.0, cost_giou=2.0, activation="sigmoid")
WEIGHTS = dict(labels=1.0, l1=5.0, giou=2.0, fgl=0.15, ddf=1.5)


def make_criterion(**changes):
    matcher = dict(type="HungarianMatcher", late=dict(epoch=8, power=4.0), **COSTS)
    spec = dict(type="DFINECriterion", class_loss="mal", matcher=matcher, weights=WEIGHTS)
    return CRITERIA.build(spec | changes)


@pytest.fixture(scope="module")
def case():
    return load_case("dfine_criterion")


@pytest.mark.parametrize("variant", GOLDEN["variants"])
def test_terms_and_gradients_equal_the_original(case, variant):
    targets = "one_empty" if variant.startswith("one_empty") else "objects"
    is_lite = "lite" in variant
    criterion = make_criterion(**dict(union=False, weights=WEIGHTS | dict(fgl=0.0, ddf=0.0)) if is_lite else {})
    set_epoch(criterion, 8 if variant.endswith("late") else 7)
    outputs, leaves = golden_outputs(case, targets)
    losses = criterion(outputs, golden_targets(case, targets))
    expected = dict(GOLDEN["variants"][variant]["terms"])
    assert expected.pop("loss_ddf_dn_3", 0) == 0  # the last layer of denoising is compared with itself there
    names = {prefix + ours: TERMS[ours].format("mal") + suffix for prefix, suffix in PREFIXES.items() for ours in TERMS}
    assert {names[name] for name in losses} == expected.keys()
    for name, value in losses.items():
        assert value.item() == pytest.approx(expected[names[name]], rel=1e-5, abs=1e-6), name
    sum(losses.values()).backward()
    for name, projection in GOLDEN["variants"][variant]["grads"].items():
        grad = torch.zeros_like(leaves[name]) if leaves[name].grad is None else leaves[name].grad
        onto = normal_for(f"onto {name}", grad.shape).astype(np.float64)
        tolerance = 1e-4 * float(grad.norm()) + 1e-6
        assert (grad.double().numpy() * onto).sum() == pytest.approx(projection, abs=tolerance), name


def test_phases_match_differently():
    logits = torch.tensor([[[4.0], [-1.0], [0.0]]])
    boxes = torch.tensor([[[0.6, 0.5, 0.2, 0.2], [0.5, 0.5, 0.22, 0.22], [0.9, 0.9, 0.1, 0.1]]])
    targets = [dict(labels=torch.tensor([0]), boxes_cxcywh=torch.tensor([[0.5, 0.5, 0.2, 0.2]]))]
    matcher = HungarianMatcher(**COSTS, late=dict(epoch=5))
    layers = [([dict(pred_logits=logits, pred_boxes=boxes)], targets)]
    assert matcher.late == dict(epoch=5, power=4.0)
    queries = []
    for matcher.epoch in (0, 4, 5, 9):
        ((((query, _),),),) = matcher(layers)
        queries.append(query.tolist())
    # The IoU of the confident first query is 1/3, that of the second 0.83: 0.98 / 81 against 0.27 * 0.47.
    assert queries == [[0], [0], [1], [1]]


@pytest.mark.parametrize(("make", "message"), [
    (lambda: HungarianMatcher(**COSTS, late=dict(power=4.0)), "late.epoch=None: expected a number of epochs from 0"),
    (lambda: HungarianMatcher(**COSTS, late=dict(epoch=True)), "late.epoch=True: expected a number of epochs from 0"),
    (lambda: HungarianMatcher(**COSTS, late=dict(epoch=3, power=0)), "late.power=0: expected a number above 0"),
    (lambda: HungarianMatcher(**COSTS, late=dict(epoch=3, power="4")), "late.power='4': expected a number above 0"),
    (lambda: HungarianMatcher(**COSTS, late=dict(epoch=3, power=float("nan"))), "late.power=nan: expected a number"),
    (lambda: HungarianMatcher(**COSTS, late=dict(epoch=3, power=float("inf"))), "late.power=inf: expected a number"),
    (lambda: HungarianMatcher(**COSTS, late=3), r"late=3: expected a dict, such as dict\(epoch=400, power=4\)"),
    (lambda: HungarianMatcher(**COSTS, late=dict(epochs=3)), "late.epochs: unknown key. Did you mean"),
    (lambda: make_criterion(union=False), "union=False: the losses of distributions need the union of matches, but w"),
])  # fmt: skip
def test_wrong_settings_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
