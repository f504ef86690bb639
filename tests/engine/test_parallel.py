"""A model whose weights are sharded among two gloo ranks trains as one that is full on both."""

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.processes import on_ranks
from helpers.sharded_training import CPU, Blocks, Warnings, needs_newer_torch, run
from timm.layers import BatchNormAct2d
from torch import nn

from vitkit.engine import build
from vitkit.engine.build import place_model
from vitkit.engine.parallel import is_sharded, load_state, shard, state_of
from vitkit.engine.settings import TrainSettings
from vitkit.errors import ConfigError
from vitkit.registry import OPTIMIZERS
from vitkit.weights import read_checkpoint
from vitkit.weights.locate import LAST_NAME


def train_each_way(folder: Path) -> dict:
    results = {strategy: run(folder / strategy, strategy) for strategy in ("ddp", "fsdp")}
    warnings = Warnings()
    logging.getLogger("vitkit").addHandler(warnings)
    for strategy in ("ddp", "fsdp"):
        results[f"poisoned {strategy}"] = run(folder / f"poisoned_{strategy}", strategy, poisoned=2, epochs=1)
    results["warnings"] = warnings.messages
    results["one image"] = run(folder / "one_image", "fsdp", epochs=1, to_evaluate=(1, 0))
    results["parts"] = run(folder / "parts", "fsdp", epochs=1) + run(folder / "parts", "fsdp")
    return results


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> tuple[Path, list[dict]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return folder, on_ranks(2, folder, train_each_way)


@needs_newer_torch
def test_sharded_training_has_the_losses_of_full_weights(two_ranks):
    for results in two_ranks[1]:
        assert len(results["ddp"]) in (3, 6) and results["ddp"][0] != results["ddp"][-1]
        assert results["fsdp"] == pytest.approx(results["ddp"], rel=1e-4)


@needs_newer_torch
def test_rank_without_data_to_evaluate_does_not_block_the_other(two_ranks):
    main, other = two_ranks[1]
    assert len(main["one image"]) == 1 and other["one image"] == []


@needs_newer_torch
def test_sharded_run_saves_a_full_checkpoint_equal_to_that_of_full_weights(two_ranks):
    ddp, fsdp = (read_checkpoint(two_ranks[0] / name / LAST_NAME) for name in ("ddp", "fsdp"))
    assert fsdp["model"].keys() == ddp["model"].keys() and fsdp["progress"] == ddp["progress"]
    for name, value in ddp["model"].items():
        torch.testing.assert_close(fsdp["model"][name], value, rtol=1e-4, atol=1e-5)
    Blocks().load_state_dict(fsdp["model"])


@needs_newer_torch
def test_resumed_sharded_run_equals_an_uninterrupted_one(two_ranks):
    full, parts = (read_checkpoint(two_ranks[0] / name / LAST_NAME) for name in ("fsdp", "parts"))
    assert full["progress"] == parts["progress"]
    assert all(value.equal(parts["model"][name]) for name, value in full["model"].items())
    for results in two_ranks[1]:
        assert results["parts"] == results["fsdp"]


@needs_newer_torch
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_bad_batch_of_one_rank_is_skipped_by_both_ranks(two_ranks, strategy):
    folder, (main, _) = two_ranks
    saved = read_checkpoint(folder / f"poisoned_{strategy}" / LAST_NAME)
    assert saved["progress"]["step"] == 1 and saved["progress"]["epoch"] == 1
    assert all(value.isfinite().all() for value in saved["model"].values())
    assert len(main["warnings"]) == 2  # a run each
    assert "rank 1: loss squared is nan; image 20, 20, 20, 20, 20. After 5" in main["warnings"][0]
    assert "rank 0" not in main["warnings"][0]


def test_optimizer_state_follows_the_memory_format_of_its_parameters():
    gradients = torch.randn(4, 6, 3, 2, 2)

    def steps(formats):
        """Return the weights after four steps; the run is resumed after two, with the second memory format."""
        state, weight = None, torch.ones(6, 3, 2, 2)
        for half, memory_format in zip(gradients.split(2), formats):
            model = nn.Conv2d(3, 6, 2, bias=False).to(memory_format=memory_format)
            model.weight.data.copy_(weight)
            optimizer = OPTIMIZERS.build({"type": "AdamW", "lr": 0.1}, model=model)
            if state:
                load_state(optimizer, state, model)
            for gradient in half:
                (model.weight * gradient).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            state, weight = state_of(optimizer, model), model.weight.detach()
        return weight

    same = steps([torch.contiguous_format, torch.contiguous_format])
    torch.testing.assert_close(steps([torch.channels_last, torch.contiguous_format]), same)
    torch.testing.assert_close(steps([torch.contiguous_format, torch.channels_last]), same)


def test_run_saved_without_fused_optimizers_resumes_with_them():
    model = nn.Linear(3, 2)
    optimizer = OPTIMIZERS.build({"type": "AdamW", "lr": 0.1}, model=model)
    old = torch.optim.AdamW(model.parameters(), lr=0.1)
    for made in (old, optimizer):
        model(torch.ones(1, 3)).sum().backward()
        made.step()
    load_state(optimizer, old.state_dict(), model)
    assert [group["fused"] for group in optimizer.param_groups] == [True]
    optimizer.step()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        load_state(optimizer, {"state": {}, "param_groups": []}, model)


def test_sharding_needs_several_processes():
    with pytest.raises(ConfigError, match="train.strategy=fsdp: a model is sharded over several processes"):
        shard(Blocks(), CPU)


@needs_newer_torch
def test_weights_that_are_sharded_keep_their_layout():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        settings = TrainSettings(epochs=1, strategy="fsdp", channels_last=True)
        model, average = place_model(nn.Conv2d(2, 2, 3), settings, CPU)
        assert is_sharded(model) and average is None
        image = torch.randn(1, 2, 9, 9).to(memory_format=torch.channels_last)
        assert model(image).is_contiguous(memory_format=torch.channels_last)
    finally:
        dist.destroy_process_group()


def test_batch_norms_of_cpu_processes_are_not_synchronized(monkeypatch, caplog):
    monkeypatch.setattr(build, "world_size", lambda: 2)
    settings = TrainSettings(epochs=1, sync_batch_norm=True)
    model, _ = place_model(nn.Sequential(nn.BatchNorm2d(2)), settings, CPU)
    assert type(model[0]) is nn.BatchNorm2d and "on GPUs only; here each process" in caplog.text
    # A device without memory takes what a GPU would.
    model, _ = place_model(nn.Sequential(nn.BatchNorm2d(2), BatchNormAct2d(2)), settings, torch.device("meta"))
    assert all(isinstance(norm, nn.SyncBatchNorm) for norm in model) and model[1].act is not None


def test_settings_incompatible_with_sharded_weights_are_errors():
    with pytest.raises(ConfigError, match=r"train\.precision=fp16: .* different loss scales. Use .*bf16"):
        TrainSettings(epochs=1, strategy="fsdp", precision="fp16")
