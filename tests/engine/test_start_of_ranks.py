"""How ranks start: with the same weights, with random numbers of their own, and never alone beside each other."""

from pathlib import Path

import pytest
import torch
from helpers.sharded_training import CPU, needs_newer_torch, on_ranks

from vitkit import distributed
from vitkit.config import load_config
from vitkit.distributed import idle_devices, init_distributed
from vitkit.engine.parallel import state_of
from vitkit.engine.run_folder import RunFolder
from vitkit.engine.trainer import build_run
from vitkit.errors import ConfigError


def weights_and_random_numbers(folder: Path) -> dict:
    results = {}
    for strategy in ("ddp", "fsdp"):
        config = load_config("quickstart/detr")
        config["data"]["train"]["num_images"] = config["data"]["val"]["num_images"] = 4
        config["data"]["num_workers"] = 0
        config["train"] |= dict(strategy=strategy, channels_last=False)
        run, _ = build_run(config, RunFolder(folder / strategy, checkpoint=None, lock=None), CPU, init=None)
        drawn = torch.rand(3)
        # Without DDP around it, each rank's own weights; of shards the main rank has all.
        results[strategy] = (dict(state_of(run.model, run.model)), drawn)
    return results


@needs_newer_torch
def test_ranks_draw_the_same_weights_sharded_or_not(tmp_path):
    main, other = on_ranks(2, tmp_path, weights_and_random_numbers)
    for name, value in main["ddp"][0].items():
        torch.testing.assert_close(other["ddp"][0][name], value, rtol=0, atol=0)
        torch.testing.assert_close(main["fsdp"][0][name], value, rtol=0, atol=0)
    for strategy in ("ddp", "fsdp"):
        assert not main[strategy][1].equal(other[strategy][1])


@pytest.mark.parametrize("variable", ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"])
def test_tasks_of_slurm_do_not_train_alone_beside_each_other(variable, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(variable, "8")
    with pytest.raises(ConfigError, match=f"{variable}=8: .*srun --ntasks-per-node=1 torchrun --nnodes=") as error:
        init_distributed("cpu")
    assert f"{variable}=1 in front of the command" in str(error.value)
    monkeypatch.setenv(variable, "1")
    assert init_distributed("cpu") == CPU


def test_a_step_of_one_task_in_a_larger_job_is_a_single_process(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert init_distributed("cpu") == CPU


def test_idle_devices_are_those_of_a_single_process(monkeypatch):
    class FourDevices:
        device_count = staticmethod(lambda: 4)

    monkeypatch.setattr(torch, "get_device_module", lambda device: FourDevices)
    assert idle_devices(torch.device("cuda", 0)) == 3 and idle_devices(CPU) == 0
    monkeypatch.setattr(distributed, "world_size", lambda: 4)
    assert idle_devices(torch.device("cuda", 0)) == 0
