"""How ranks start: alike, with random numbers of their own, and never alone beside each other."""

import logging
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.plain_dataset import PlainDataset
from helpers.processes import on_ranks
from helpers.sharded_training import CPU, Warnings, needs_newer_torch, run
from PIL import Image

from vitkit import distributed
from vitkit.apps.training.process_group import init_distributed
from vitkit.config import load_config
from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.datasets.image_folder import ImageFolder
from vitkit.data.datasets.mixed import MixedDataset
from vitkit.distributed import idle_devices, rank
from vitkit.engine import checkpointing, consistency
from vitkit.engine.consistency import check_same_data, check_same_start
from vitkit.engine.parallel import state_of
from vitkit.engine.run_folder import RunFolder
from vitkit.engine.trainer import build_run
from vitkit.errors import CheckpointError, ConfigError, VitkitError
from vitkit.protocols.dataset import Dataset


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


def message_of(function, *arguments) -> str:
    try:
        function(*arguments)
    except VitkitError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Listed(PlainDataset):
    def __len__(self):
        return 3


def folders(root: Path, moved: str) -> Path:
    """Write three images in folders of two classes; return their folder."""
    for name in ("cat/1.png", "cat/2.png", moved):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(root / name)
    return root


def yolo(root: Path, width: float) -> Path:
    for name, text in {"data.yaml": "train: images\nnames: [cat]\n", "labels/1.txt": f"0 .5 .5 {width} .5\n"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "images").mkdir()
    Image.new("RGB", (8, 8)).save(root / "images/1.png")
    return root


def data_without_one_file(folder: Path, other: int) -> dict[str, Dataset]:
    """Return datasets of equal size, of which `other` is another one."""
    written = folder / f"{other}"
    mixed = dict(type="CocoDetection", images=None, annotations=str(yolo(written / "mixed", 0.5 + 0.1 * other)))
    return {
        "folders": ImageFolder(folders(written / "folders", "dog/1.png" if other else "dog/3.png")),
        "labels": ImageFolder(folders(written / "labels", "dog/9.png" if other else "cat/9.png")),
        "yolo": CocoDetection(None, yolo(written / "yolo", 0.5 + 0.25 * other)),
        "mixed": MixedDataset(datasets=[dict(type="ShapesDetection", num_images=2, image_size=32), mixed]),
        "text": Listed(sides=[["a", "b"], ["c", "e" if other else "d"]]),
        "same": ImageFolder(folders(written / "same", "dog/1.png")),
    }


def ranks_that_differ(folder: Path) -> dict:
    said = Warnings()
    logging.getLogger("vitkit").addHandler(said)
    is_other = rank() == 1
    os.environ["LOCAL_RANK"] = str(rank())  # on one machine, too, ranks may be started with other files
    (folder / f"list{rank()}.json").write_text('{"images": [1, 2]}' if is_other else '{"images": [1, 3]}')
    (folder / "list.json").write_text("{}")
    config = {"train": {"seed": 1 + is_other, "epochs": 2}}
    own, same = (Listed(annotation_file=folder / name) for name in (f"list{rank()}.json", "list.json"))
    results = {
        "config": message_of(check_same_start, config),
        "data": message_of(check_same_data, {"data.train": same, "data.val": own}),
        "same data": message_of(check_same_data, {"data.train": same}),
        "without a file": {
            name: message_of(check_same_data, {name: data})
            for name, data in data_without_one_file(folder, is_other).items()
        },
    }
    own_time = consistency.time
    consistency.time = SimpleNamespace(time=lambda: 1e9 + 3600 * is_other)
    consistency.__version__ = "0.0.1" if is_other else "0.2.0"
    results["same config"] = message_of(check_same_start, {"train": {}})
    consistency.time = own_time
    run(folder / "shards", "fsdp", epochs=1, sharded_checkpoints=True)
    if is_other:

        def unreadable(path, *_):
            raise CheckpointError(f"{path}: its shards cannot be read (Input/output error).")

        checkpointing.read_local = unreadable
    try:
        run(folder / "shards", "fsdp", sharded_checkpoints=True)
    except CheckpointError as error:
        results["shards"] = str(error)
    return {**results, "said": said.messages}


@needs_newer_torch
def test_ranks_that_would_not_train_the_same_end_together_with_the_reason(tmp_path):
    main, other = on_ranks(2, tmp_path, ranks_that_differ)
    for name in ("config", "data", "same data", "same config"):
        assert main[name] == other[name]
    host = socket.gethostname()
    assert main["config"].startswith(f"ConfigError: rank 1 ({host}) has another config than rank 0: train.seed differ")
    assert f"DataError: data.val: rank 1 ({host}) has 3 samples ({tmp_path}/list1.json, checksum " in main["data"]
    listed = {"folders": "ImageFolder", "labels": "ImageFolder", "yolo": tmp_path / "True" / "yolo"}
    listed |= {"mixed": "MixedDataset", "text": "Listed"}
    for name, source in listed.items():
        assert f"{name}: rank 1 ({host}) has " in (message := main["without a file"][name])
        assert re.search(rf"has (\d) samples \({re.escape(str(source))}, checksum \d+\), .*has \1 samples", message)
    assert main["without a file"]["same"] == ""
    assert main["same data"] == main["same config"] == "" and not other["said"]
    clock = [text for text in main["said"] if "clock" in text]
    assert clock == [f"rank 1 ({host}): its clock is 1:00:00 ahead of rank 0's; only times in messages depend on it."]
    assert any("has vitkit 0.0.1 in place of" in text for text in main["said"])
    assert main["shards"] == f"rank 1: {other['shards']}" and "Input/output error" in other["shards"]


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
