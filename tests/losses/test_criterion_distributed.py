"""Two gloo ranks against one process on the joined batch."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitkit.distributed import close_distributed
from vitkit.registry import CRITERIA

NUM_CLASSES, NUM_QUERIES, NUM_LAYERS = 3, 5, 2
CASES = {
    "both_ranks": [3, 1, 0, 2],
    "one_rank_without_targets": [3, 1, 0, 0],
    "one_target_in_all": [0, 0, 1, 0],
    "no_targets": [0, 0, 0, 0],
}
"""Name of the case -> number of targets in each of four images, two for each rank."""


class TinyDetector(nn.Module):
    """A stand-in for a model, from image features to the criterion's inputs."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Linear(8, NUM_LAYERS * NUM_QUERIES * (NUM_CLASSES + 1))
        self.boxes = nn.Linear(8, NUM_LAYERS * NUM_QUERIES * 4)

    def forward(self, images: Tensor) -> dict:
        logits = self.logits(images).unflatten(1, (NUM_LAYERS, NUM_QUERIES, -1))
        boxes = self.boxes(images).sigmoid().unflatten(1, (NUM_LAYERS, NUM_QUERIES, 4))
        *aux, last = [{"pred_logits": logits[:, i], "pred_boxes": boxes[:, i]} for i in range(NUM_LAYERS)]
        return {**last, "aux_outputs": aux}


def make_step(counts: list[int]):
    """The same model, images and targets in every process."""
    torch.manual_seed(0)
    model, images = TinyDetector(), torch.randn(len(counts), 8)
    targets = [{"labels": torch.randint(NUM_CLASSES, (n,)), "boxes_cxcywh": torch.rand(n, 4)} for n in counts]
    return model, images, targets


def make_criterion() -> nn.Module:
    return CRITERIA.build(
        dict(
            type="SetCriterion",
            no_object_weight=0.1,
            weights=dict(labels=1.0, l1=5.0, giou=2.0),
            matcher=dict(type="HungarianMatcher", cost_labels=1.0, cost_l1=5.0, cost_giou=2.0),
        )
    )


def gradients(model: nn.Module, losses: dict[str, Tensor]) -> list[Tensor]:
    sum(losses.values()).backward()
    return [parameter.grad for parameter in model.parameters()]


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    results = {}
    for name, counts in CASES.items():
        model, images, targets = make_step(counts)
        model, criterion = DistributedDataParallel(model), make_criterion()
        own = slice(2 * rank, 2 * rank + 2)
        grads = gradients(model, criterion(model(images[own]), targets[own]))
        results[name] = grads, criterion.meters["matched_accuracy"].compute()
    torch.save(results, f"{folder}/rank{rank}.pth")
    close_distributed()


@pytest.fixture(scope="module")
def results_of_two_ranks(tmp_path_factory) -> dict:
    folder: Path = tmp_path_factory.mktemp("ranks")
    context = torch.multiprocessing.spawn(run_rank, args=(str(folder),), nprocs=2, join=False)
    deadline = time.monotonic() + 120
    while not context.join(timeout=1):  # True once both have ended
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail("the two ranks wait for each other")
    return torch.load(folder / "rank0.pth")


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_accuracy_of_two_ranks_equal_one_process(case, results_of_two_ranks):
    model, images, targets = make_step(CASES[case])
    criterion = make_criterion()
    expected = gradients(model, criterion(model(images), targets))
    got, accuracy = results_of_two_ranks[case]
    torch.testing.assert_close(got, expected)
    assert accuracy == pytest.approx(criterion.meters["matched_accuracy"].compute(), nan_ok=True)
