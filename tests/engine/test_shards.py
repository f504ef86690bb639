"""Checkpoints of which each rank writes its own part: whole at any moment, and read by any number of ranks."""

import errno
import logging
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_parallel import CPU, Blocks, Warnings, needs_newer_torch, run
from torch.distributed.tensor import DTensor

from vitkit import shard_files
from vitkit.analysis import training_memory
from vitkit.checkpoint import load_weights, read_checkpoint, save_checkpoint
from vitkit.distributed import close_distributed
from vitkit.engine.checkpoints import BEST_NAME, LAST_NAME, RunCheckpoints, newest_checkpoint, remove_stale
from vitkit.engine.parallel import shard, state_of
from vitkit.engine.settings import TrainSettings
from vitkit.errors import CheckpointError, ConfigError

SHARDED = {"sharded_checkpoints": True}
multiprocessing.get_context("forkserver").set_forkserver_preload(["vitkit.engine.train"])


def start_rank(number: int, folder: str, ranks: int, job) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init{ranks}{job.__name__}", rank=number, world_size=ranks
    )
    result = job(Path(folder))
    torch.save(result, f"{folder}/{job.__name__}{number}.pth")
    close_distributed()


def on_ranks(ranks: int, folder: Path, job) -> list:
    """What a function returns on each of some gloo ranks."""
    context = torch.multiprocessing.start_processes(
        start_rank, args=(str(folder), ranks, job), nprocs=ranks, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + 300
    while not context.join(timeout=1):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail("the ranks wait for each other")
    return [torch.load(folder / f"{job.__name__}{number}.pth") for number in range(ranks)]


def two_ranks_train(folder: Path) -> dict:
    results = {"whole": run(folder / "whole", "fsdp"), "sharded": run(folder / "sharded", "fsdp", **SHARDED)}
    results["parts"] = run(folder / "parts", "fsdp", epochs=1, **SHARDED)
    if dist.get_rank() == 0:
        shutil.copytree(folder / "parts", folder / "first")
    results["parts"] += run(folder / "parts", "fsdp", **SHARDED)
    run(folder / "kept", "fsdp", epochs=2, keep_checkpoints=2, **SHARDED)
    results["full"] = failing_writes(folder / "full")
    return results


def failing_writes(folder: Path) -> list[str]:
    """Of two ranks the second cannot write its second checkpoint's files."""
    said, original, calls = Warnings(), shard_files.FileSystemWriter.write_data, []
    logging.getLogger("vitkit").addHandler(said)

    def full_at_times(writer, *args):
        calls.append(args)
        if dist.get_rank() == 1 and len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(writer, *args)

    shard_files.FileSystemWriter.write_data = full_at_times
    try:
        run(folder, "fsdp", epochs=2, save_every_steps=1, **SHARDED)
    finally:
        shard_files.FileSystemWriter.write_data = original
        logging.getLogger("vitkit").removeHandler(said)
    return said.messages


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, list[dict]]:
    folder: Path = tmp_path_factory.mktemp("shards")
    return folder, on_ranks(2, folder, two_ranks_train)


@pytest.fixture
def first(trained, tmp_path) -> Path:
    """A copy of a run's folder, to be spoilt."""
    return Path(shutil.copytree(trained[0] / "first", tmp_path / "first"))


def folders(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("*.shards"))


@needs_newer_torch
def test_each_rank_writes_its_part_and_all_are_read_as_one(trained):
    folder, _ = trained
    whole, sharded = (read_checkpoint(folder / name / LAST_NAME) for name in ("whole", "sharded"))
    assert whole.keys() == sharded.keys() and whole["progress"] == sharded["progress"]
    assert whole["model"].keys() == sharded["model"].keys()
    assert all(value.equal(sharded["model"][name]) for name, value in whole["model"].items())
    for name, state in whole["optimizer"]["state"].items():
        assert all(value.equal(sharded["optimizer"]["state"][name][key]) for key, value in state.items())
    assert whole["optimizer"]["param_groups"] == sharded["optimizer"]["param_groups"]
    own = sum(value.numel() for value in whole["model"].values())
    for file in folders(folder / "sharded")[-1].glob("*.distcp"):
        assert file.stat().st_size > 0
    assert len(list(folders(folder / "sharded")[-1].glob("*.distcp"))) == 2
    index = read_checkpoint(folder / "sharded" / LAST_NAME, whole=False)
    assert sum(value.numel() for value in index["model"].values()) < 0.1 * own  # batch norm's statistics
    Blocks().load_state_dict(sharded["model"])


@needs_newer_torch
def test_a_resumed_run_equals_one_never_stopped(trained):
    folder, results = trained
    whole, parts = (read_checkpoint(folder / name / LAST_NAME) for name in ("sharded", "parts"))
    assert whole["progress"] == parts["progress"]
    assert all(value.equal(parts["model"][name]) for name, value in whole["model"].items())
    for of_rank in results:
        assert of_rank["whole"] == of_rank["sharded"] == of_rank["parts"]


@needs_newer_torch
def test_only_what_a_checkpoint_names_is_kept(trained):
    folder, _ = trained
    named = {shards_named(folder / "sharded" / name) for name in (LAST_NAME, BEST_NAME)}
    assert {path.name for path in folders(folder / "sharded")} == named
    steps = sorted((folder / "kept").glob("step_*.pth"))
    named = {shards_named(path) for path in [*steps, folder / "kept" / LAST_NAME, folder / "kept" / BEST_NAME]}
    assert len(steps) == 2 and {path.name for path in folders(folder / "kept")} == named
    assert not list(folder.rglob("*.tmp"))


def shards_named(path: Path) -> str:
    return read_checkpoint(path, whole=False)["shards"]["folder"]


@needs_newer_torch
def test_a_disk_that_is_full_for_one_rank_leaves_the_checkpoint_from_before(trained):
    folder, (main, other) = trained
    assert len(main["full"]) == 1 and not other["full"]
    assert "not saved (No space left on device). Checkpoints from before are intact" in main["full"][0]
    assert read_checkpoint(folder / "full" / LAST_NAME)["progress"]["epoch"] == 2


@needs_newer_torch
def test_tools_read_it_by_its_name(first):
    model = Blocks()
    report = load_weights(model, first / LAST_NAME)
    assert not report.missing and not report.unexpected
    saved = read_checkpoint(first / LAST_NAME)["model"]
    assert all(value.equal(saved[name]) for name, value in model.state_dict().items())


def three_ranks_resume(folder: Path) -> dict:
    torch.manual_seed(1)
    model = shard(Blocks(), CPU)
    optimizer = torch.optim.AdamW(
        [{"params": list(model.blocks.parameters())}, {"params": [*model.norm.parameters(), *model.last.parameters()]}]
    )
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    parts = {"model": model, "ema": None, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    own = RunCheckpoints(folder / "three", parts, meters={}, saved_with={}, keep=0, device=CPU, sharded=True)
    state = read_checkpoint(folder / "first" / LAST_NAME, whole=False)
    for name in ("model", "optimizer"):
        own._load(name, parts[name], folder / "first" / LAST_NAME, state)
    local = {name: value.to_local() for name, value in model.state_dict().items() if isinstance(value, DTensor)}
    whole = {name: state_of(parts[name], model) for name in ("model", "optimizer")}  # on the main rank
    return {**whole, "local": sum(value.numel() for value in local.values())}


@needs_newer_torch
def test_another_number_of_ranks_reads_its_own_parts_of_it(trained):
    folder, _ = trained
    saved = read_checkpoint(folder / "first" / LAST_NAME)
    results = on_ranks(3, folder, three_ranks_resume)
    model, optimizer = results[0]["model"], results[0]["optimizer"]["state"]
    assert all(value.equal(model[name]) for name, value in saved["model"].items())
    for name, state in saved["optimizer"]["state"].items():
        assert all(value.equal(optimizer[name][key]) for key, value in state.items())
    whole = sum(value.numel() for value in Blocks().parameters())
    assert sum(result["local"] for result in results) == whole and max(r["local"] for r in results) < 0.5 * whole
    estimated = training_memory(Blocks(), states=2, gpus=3, divided=True)
    assert estimated.weights == 4 * results[0]["local"]


@needs_newer_torch
def test_files_that_are_missing_or_damaged_are_named(first):
    last = first / LAST_NAME
    (folder,) = {first / shards_named(last)}
    file = folder / "__1_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:-10])
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp: truncated or damaged \(it has \d+ bytes of \d+\)"):
        read_checkpoint(last)
    file.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    with pytest.raises(CheckpointError, match="its checksum is wrong"):
        read_checkpoint(last)
    assert newest_checkpoint(first) is None  # best.pth names the same files
    file.unlink()
    for whole in (True, False):
        with pytest.raises(CheckpointError, match=r"1 of the 2 shard files in .* are missing \(__1_0\.distcp\)"):
            read_checkpoint(last, whole=whole)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=r"most of it is in the folder '.*\.shards', which is not beside it"):
        read_checkpoint(last)


@needs_newer_torch
def test_what_a_killed_run_was_writing_is_removed_and_the_rest_is_not(first):
    before = {path.name for path in first.iterdir()}
    (first / "step_00000009.shards.tmp").mkdir()
    (first / "step_00000009.shards.tmp" / "__0_0.distcp").touch()
    (first / "step_00000009.shards").mkdir()
    remove_stale(first)
    assert {path.name for path in first.iterdir()} == before


@pytest.mark.parametrize(
    "shards_entry",
    [
        {}, {"folder": 3}, {"folder": "a.shards", "files": []}, {"folder": "a.shards", "files": {"x": None}},
        {"folder": "a.shards", "files": {}}, {"folder": "a.shards", "files": {}, "tensors": {"model/a": {}}},
        {"folder": "a.shards", "files": {},
         "tensors": {"model/a": {"dtype": "float32", "size": [4], "chunks": [[[0], [2], "x", 0, 1]]}}},
        {"folder": "a.shards", "files": {},
         "tensors": {"model/a": {"dtype": "nn", "size": [4], "chunks": [[[0], [4], "x", 0, 1]]}}},
        {"folder": "a.shards", "files": {},
         "tensors": {"model/a": {"dtype": "float32", "size": [4], "chunks": [[[0], [4], "../x", 0, 1]]}}},
    ],
)  # fmt: skip
def test_a_checkpoint_that_says_nonsense_of_its_shards_is_damaged(tmp_path, shards_entry):
    (tmp_path / "a.shards").mkdir()
    save_checkpoint(tmp_path / LAST_NAME, {"model": {}, "shards": shards_entry})
    with pytest.raises(CheckpointError, match=r"last\.pth: "):
        read_checkpoint(tmp_path / LAST_NAME)


def test_whole_weights_have_no_parts_to_write():
    with pytest.raises(ConfigError, match=r"train\.sharded_checkpoints: only train\.strategy=fsdp"):
        TrainSettings(epochs=1, **SHARDED)
