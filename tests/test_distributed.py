"""The process group's functions, in one process and on two gloo ranks; and the training loop's shared state."""

import math
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.processes import on_ranks
from torch import nn

from vitkit.apps.training.process_group import close_distributed, init_distributed
from vitkit.distributed import (
    RatioMeter,
    all_reduce_mean,
    all_reduce_sum,
    barrier,
    broadcast_object,
    first_rank_first,
    gather_dicts,
    gather_objects,
    is_main,
    rank,
    world_size,
)
from vitkit.engine.run import TrainRun
from vitkit.engine.settings import TrainSettings
from vitkit.engine.trainer import fit
from vitkit.protocols.criterion import Criterion
from vitkit.structures import Batch
from vitkit.weights import read_checkpoint

RUNS = {"plain": {}, "ema": {"ema_decay": 0.5}}


class Normalized(nn.Module):
    """A model with batch norm, whose running statistics differ between ranks."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, images):
        return {"value": self.norm(images).sum(dim=1)}


class Size(Criterion):
    def forward(self, outputs, targets):
        return {"size": outputs["value"].square().mean()}


class RankBatches:
    """Three batches, different on each rank."""

    num_skipped = num_padded = 0

    def set_position(self, epoch, batch=0):
        pass

    def __len__(self):
        return 3

    def __iter__(self):
        for number in range(3):
            generator = torch.Generator().manual_seed(10 * rank() + number)
            yield Batch({"images": torch.randn(5, 4, generator=generator) + rank()}, [{}] * 5)


def evaluated_statistics(folder: Path, options: dict) -> torch.Tensor:
    """Return the running means of the model that `train` evaluates on this rank."""
    seen = []
    model = Normalized()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if is_main():
        folder.mkdir()
    barrier()
    state = TrainRun(
        model=model,
        criterion=Size(),
        loader=RankBatches(),
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.StepLR(optimizer, 9),
        settings=TrainSettings(epochs=1, **options),
        device=torch.device("cpu"),
        run_dir=folder,
    )
    fit(state, validate=lambda m: seen.append(m.norm.running_mean.clone()) or {"bbox/AP": 0.5})
    return seen[0]


def fetched_in_turn(folder: Path, number: int) -> bool:
    """Return whether this rank found the file that the first one writes in `first_rank_first`."""
    os.environ["LOCAL_RANK"] = str(number)
    with first_rank_first():
        found = (folder / "fetched").exists()
        if not found:
            time.sleep(0.3)
            (folder / "fetched").touch()
    return found


def exchange(folder: Path) -> dict:
    number = rank()
    value = torch.tensor([number + 1.0, 10.0])
    half, empty = RatioMeter(), RatioMeter()
    half.add(torch.tensor(number), torch.tensor(1 + 2 * number))
    if number == 1:
        empty.add(torch.tensor(1), torch.tensor(2))
    return {
        "place": (rank(), world_size(), is_main()),
        "sum": all_reduce_sum(value),
        "mean": all_reduce_mean(value),
        "unchanged": value,
        "gathered": gather_objects({"of": number}),
        "in rounds": gather_dicts({key: str(key) for key in range(3 * number, 5)}, at_once=2),
        "broadcast": broadcast_object(f"from {number}"),
        "found": fetched_in_turn(folder, number),
        "ratio": half.compute(),
        "ratio of one rank": empty.compute(),
        "runs": {name: evaluated_statistics(folder / name, options) for name, options in RUNS.items()},
    }


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> tuple[Path, list[dict]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return folder, on_ranks(2, folder, exchange)


def test_single_process_is_its_own_group(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert init_distributed("cpu") == torch.device("cpu") and not dist.is_initialized()
    assert (rank(), world_size(), is_main()) == (0, 1, True)
    value = torch.tensor([1.0, 2.0])
    assert all_reduce_sum(value).equal(value) and all_reduce_mean(value).equal(value)
    assert gather_dicts({1: "a", 2: "b"}, at_once=1) == {1: "a", 2: "b"} and gather_dicts({}) == {}
    assert gather_objects("item") == ["item"] and broadcast_object("item") == "item"
    barrier()
    close_distributed()


def test_reductions_cover_both_ranks_and_do_not_modify_their_input(two_ranks):
    for number, results in enumerate(two_ranks[1]):
        assert results["place"] == (number, 2, number == 0)
        assert results["sum"].tolist() == [3.0, 20.0] and results["mean"].tolist() == [1.5, 10.0]
        assert results["unchanged"].tolist() == [number + 1.0, 10.0]


def test_objects_are_gathered_to_and_broadcast_from_the_main_process(two_ranks):
    main, other = two_ranks[1]
    assert main["gathered"] == [{"of": 0}, {"of": 1}] and other["gathered"] == []
    assert main["in rounds"] == {key: str(key) for key in range(5)} and other["in rounds"] == {}
    assert main["broadcast"] == other["broadcast"] == "from 0"


def test_one_rank_downloads_files_for_the_others(two_ranks):
    assert [results["found"] for results in two_ranks[1]] == [False, True]


def test_ratios_cover_both_ranks_even_if_one_has_no_data(two_ranks):
    for results in two_ranks[1]:
        assert math.isclose(results["ratio"][0], 1 / 4) and results["ratio"][1] == 4
        assert results["ratio of one rank"] == (0.5, 2)


@pytest.mark.parametrize("name", RUNS)
def test_every_rank_evaluates_with_the_saved_running_statistics(two_ranks, name):
    folder, (main, other) = two_ranks
    assert main["runs"][name].equal(other["runs"][name])
    saved = read_checkpoint(folder / name / "last.pth")["ema" if name == "ema" else "model"]
    assert saved["norm.running_mean"].equal(main["runs"][name]) and not main["runs"][name].equal(torch.zeros(4))
