"""Two gloo ranks against one process on the joined batch, for criteria of boxes."""

import itertools
from pathlib import Path

import pytest
import torch
from helpers.processes import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitkit.distributed import rank
from vitkit.ops.box_distances import distance_bins
from vitkit.registry import CRITERIA

NUM_CLASSES, NUM_QUERIES, NUM_LAYERS, REG_MAX = 3, 5, 2, 4
CASES = {
    "both_ranks": [3, 1, 0, 2],
    "one_rank_without_targets": [3, 1, 0, 0],
    "one_target_in_all": [0, 0, 1, 0],
    "no_targets": [0, 0, 0, 0],
}
"""Name of the case -> number of targets in each of four images, two for each rank."""
MATCHER = dict(type="HungarianMatcher", cost_labels=1.0, cost_l1=5.0, cost_giou=2.0)
CRITERIA_SPECS = {
    "SetCriterion": dict(no_object_weight=0.1, weights=dict(labels=1.0, l1=5.0, giou=2.0), matcher=MATCHER),
    "DFINECriterion": dict(
        weights=dict(labels=1.0, l1=5.0, giou=2.0, fgl=0.15, ddf=1.5), matcher=dict(MATCHER, activation="sigmoid")
    ),
}


class TinyDetector(nn.Module):
    """A stand-in for a model, from image features to the criterion's inputs."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Linear(8, NUM_LAYERS * NUM_QUERIES * (NUM_CLASSES + 1))
        self.boxes = nn.Linear(8, NUM_LAYERS * NUM_QUERIES * 4)
        self.corners = nn.Linear(8, NUM_LAYERS * NUM_QUERIES * 4 * (REG_MAX + 1))

    def forward(self, images: Tensor) -> dict:
        logits = self.logits(images).unflatten(1, (NUM_LAYERS, NUM_QUERIES, -1))
        boxes = self.boxes(images).sigmoid().unflatten(1, (NUM_LAYERS, NUM_QUERIES, 4))
        corners = self.corners(images).unflatten(1, (NUM_LAYERS, NUM_QUERIES, -1))
        *aux, last = [
            {"pred_logits": logits[:, i], "pred_boxes": boxes[:, i], "pred_corners": corners[:, i]}
            for i in range(NUM_LAYERS)
        ]
        fixed = dict(
            initial_boxes=torch.full_like(last["pred_boxes"], 0.4).detach(),
            distance_bins=distance_bins(REG_MAX, 4.0, 0.5),
            reg_scale=4.0,
        )
        return {**last, "aux_outputs": aux, **fixed}


def make_step(counts: list[int]):
    """The same model, images and targets in every process."""
    torch.manual_seed(0)
    model, images = TinyDetector(), torch.randn(len(counts), 8)
    targets = [{"labels": torch.randint(NUM_CLASSES, (n,)), "boxes_cxcywh": torch.rand(n, 4)} for n in counts]
    return model, images, targets


def make_criterion(kind: str) -> nn.Module:
    return CRITERIA.build(dict(CRITERIA_SPECS[kind], type=kind))


def gradients(model: nn.Module, losses: dict[str, Tensor]) -> list[Tensor]:
    sum(losses.values()).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def on_two_ranks(folder: Path) -> dict:
    results = {}
    for kind, name in itertools.product(CRITERIA_SPECS, CASES):
        model, images, targets = make_step(CASES[name])
        model, criterion = DistributedDataParallel(model, find_unused_parameters=True), make_criterion(kind)
        own = slice(2 * rank(), 2 * rank() + 2)
        grads = gradients(model, criterion(model(images[own]), targets[own]))
        results[kind, name] = grads, criterion.meters["matched_accuracy"].compute()
    return results


@pytest.fixture(scope="module")
def results_of_two_ranks(tmp_path_factory) -> dict:
    return on_ranks(2, tmp_path_factory.mktemp("ranks"), on_two_ranks)[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", CRITERIA_SPECS)
def test_gradients_and_accuracy_of_two_ranks_equal_one_process(kind, case, results_of_two_ranks):
    model, images, targets = make_step(CASES[case])
    criterion = make_criterion(kind)
    expected = gradients(model, criterion(model(images), targets))
    got, accuracy = results_of_two_ranks[kind, case]
    torch.testing.assert_close(got, expected)
    assert accuracy == pytest.approx(criterion.meters["matched_accuracy"].compute(), nan_ok=True)
