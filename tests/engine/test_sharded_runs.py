"""Runs whose ranks write their own shards: complete at any moment, and resumed by any number of ranks."""

import errno
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.processes import on_ranks
from helpers.sharded_training import CPU, Blocks, Warnings, needs_newer_torch, run
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.tensor import DTensor

import vitkit
from vitkit.apps.analysis.memory import training_memory
from vitkit.apps.training.process_group import close_distributed
from vitkit.engine import checkpointing
from vitkit.engine.checkpointing import RunCheckpoints, find_newest_checkpoint, remove_stale
from vitkit.engine.parallel import shard, state_of
from vitkit.engine.settings import TrainSettings
from vitkit.errors import CheckpointError, ConfigError
from vitkit.tools import average, export
from vitkit.weights import load_weights, read_checkpoint
from vitkit.weights.locate import BEST_NAME, LAST_NAME, find_run_weights

SHARDED = {"sharded_checkpoints": True}


def two_ranks_train(folder: Path) -> dict:
    results = {"full": run(folder / "full", "fsdp"), "sharded": run(folder / "sharded", "fsdp", **SHARDED)}
    results["parts"] = run(folder / "parts", "fsdp", epochs=1, **SHARDED)
    if dist.get_rank() == 0:
        shutil.copytree(folder / "parts", folder / "first")
    results["parts"] += run(folder / "parts", "fsdp", **SHARDED)
    run(folder / "kept", "fsdp", epochs=2, keep_checkpoints=2, **SHARDED)
    results["no_space"] = failing_writes(folder / "no_space", {2}, epochs=2, save_every_steps=1)
    results["no_last"] = failing_writes(folder / "no_last", {4}, epochs=1)
    results["no_best"] = no_best(folder / "no_best")
    return results


def failing_writes(folder: Path, at: set[int], **settings) -> list[str]:
    """Train on two ranks of which the second cannot write some of its checkpoint files; return the messages."""
    said, original, calls = Warnings(), FileSystemWriter.write_data, []
    logging.getLogger("vitkit").addHandler(said)

    def full_at_times(writer, *args):
        calls.append(args)
        if dist.get_rank() == 1 and len(calls) in at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(writer, *args)

    FileSystemWriter.write_data = full_at_times
    try:
        run(folder, "fsdp", **settings, **SHARDED)
    except CheckpointError as error:
        said.messages.append(str(error))
    finally:
        FileSystemWriter.write_data = original
        logging.getLogger("vitkit").removeHandler(said)
    return said.messages


def no_best(folder: Path) -> list[float]:
    """Train so that the main rank, the only one to write full weights, cannot write its first best.pth."""
    save, calls = checkpointing.save_checkpoint, []

    def full_at_first(path, state):
        if path.name == BEST_NAME:
            calls.append(path)
        if path.name == BEST_NAME and len(calls) == 1:
            raise CheckpointError(f"{path}: not saved (No space left on device).")
        save(path, state)

    checkpointing.save_checkpoint = full_at_first
    try:
        return run(folder, "fsdp")
    finally:
        checkpointing.save_checkpoint = save


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, list[dict]]:
    folder: Path = tmp_path_factory.mktemp("shards")
    return folder, on_ranks(2, folder, two_ranks_train)


@pytest.fixture
def first(trained, tmp_path) -> Path:
    """Return a copy of a run's folder that a test may damage."""
    return Path(shutil.copytree(trained[0] / "first", tmp_path / "first"))


def folders(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("*.shards"))


@needs_newer_torch
def test_each_rank_writes_its_shards_which_load_as_one_checkpoint(trained):
    folder, _ = trained
    full, sharded = (read_checkpoint(folder / name / LAST_NAME) for name in ("full", "sharded"))
    assert full.keys() == sharded.keys() and full["progress"] == sharded["progress"]
    assert full["model"].keys() == sharded["model"].keys()
    assert all(value.equal(sharded["model"][name]) for name, value in full["model"].items())
    for name, state in full["optimizer"]["state"].items():
        assert all(value.equal(sharded["optimizer"]["state"][name][key]) for key, value in state.items())
    assert full["optimizer"]["param_groups"] == sharded["optimizer"]["param_groups"]
    own = sum(value.numel() for value in full["model"].values())
    for file in folders(folder / "sharded")[-1].glob("*.distcp"):
        assert file.stat().st_size > 0
    assert len(list(folders(folder / "sharded")[-1].glob("*.distcp"))) == 2
    index = read_checkpoint(folder / "sharded" / LAST_NAME, with_shards=False)
    assert sum(value.numel() for value in index["model"].values()) < 0.1 * own  # batch norm's statistics
    Blocks().load_state_dict(sharded["model"])


@needs_newer_torch
def test_resumed_run_equals_an_uninterrupted_one(trained):
    folder, results = trained
    full, parts = (read_checkpoint(folder / name / LAST_NAME) for name in ("sharded", "parts"))
    assert full["progress"] == parts["progress"]
    assert all(value.equal(parts["model"][name]) for name, value in full["model"].items())
    for of_rank in results:
        assert of_rank["full"] == of_rank["sharded"] == of_rank["parts"]


@needs_newer_torch
def test_only_shards_named_by_a_checkpoint_are_kept(trained):
    folder, _ = trained
    named = {shards_named(folder / "sharded" / name) for name in (LAST_NAME, BEST_NAME)}
    assert {path.name for path in folders(folder / "sharded")} == named
    steps = sorted((folder / "kept").glob("step_*.pth"))
    named = {shards_named(path) for path in [*steps, folder / "kept" / LAST_NAME, folder / "kept" / BEST_NAME]}
    assert len(steps) == 2 and {path.name for path in folders(folder / "kept")} == named
    assert not list(folder.rglob("*.tmp"))


@needs_newer_torch
def test_best_checkpoint_has_shards_of_only_the_weights(trained):
    folder, _ = trained
    best = read_checkpoint(folder / "sharded" / BEST_NAME)
    assert best.keys() == {"model", "progress"} and best["progress"]["best"] == 0.5
    Blocks().load_state_dict(best["model"])
    sizes = [sum(file.stat().st_size for file in path.glob("*.distcp")) for path in folders(folder / "sharded")]
    assert len(sizes) == 2 and sizes[0] < 0.5 * sizes[1]  # the best one's, and the last one's with AdamW's state


def shards_named(path: Path) -> str:
    return read_checkpoint(path, with_shards=False)["shards"]["folder"]


@needs_newer_torch
def test_disk_full_for_one_rank_keeps_the_previous_checkpoint(trained):
    folder, (main, other) = trained
    assert len(main["no_space"]) == 1 and not other["no_space"]
    assert "not saved (No space left on device). Previous checkpoints are intact" in main["no_space"][0]
    assert read_checkpoint(folder / "no_space" / LAST_NAME)["progress"]["epoch"] == 2


@needs_newer_torch
def test_last_state_that_one_rank_cannot_write_is_an_error_on_both(trained):
    _, results = trained
    main, other = (result["no_last"] for result in results)
    assert "not saved (No space left on device). Previous checkpoints are intact. Free some space" in main[0]
    assert len(main) == len(other) == 1


@needs_newer_torch
def test_best_checkpoint_that_the_main_rank_cannot_write_blocks_no_other_rank(trained):
    folder, results = trained
    for of_rank in results:
        assert of_rank["no_best"] == of_rank["full"]
    assert read_checkpoint(folder / "no_best" / BEST_NAME)["progress"]["epoch"] == 3  # of equal values the later
    assert read_checkpoint(folder / "no_best" / LAST_NAME)["progress"]["epoch"] == 3


@needs_newer_torch
def test_tools_read_sharded_checkpoints_by_name(first):
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
    state = read_checkpoint(folder / "first" / LAST_NAME, with_shards=False)
    for name in ("model", "optimizer"):
        own._load(name, parts[name], folder / "first" / LAST_NAME, state)
    local = {name: value.to_local() for name, value in model.state_dict().items() if isinstance(value, DTensor)}
    full = {name: state_of(parts[name], model) for name in ("model", "optimizer")}  # on the main rank
    return {**full, "local": sum(value.numel() for value in local.values())}


@needs_newer_torch
def test_another_number_of_ranks_reads_the_shards(trained):
    folder, _ = trained
    saved = read_checkpoint(folder / "first" / LAST_NAME)
    results = on_ranks(3, folder, three_ranks_resume)
    model, optimizer = results[0]["model"], results[0]["optimizer"]["state"]
    assert all(value.equal(model[name]) for name, value in saved["model"].items())
    for name, state in saved["optimizer"]["state"].items():
        assert all(value.equal(optimizer[name][key]) for key, value in state.items())
    full = sum(value.numel() for value in Blocks().parameters())
    assert sum(result["local"] for result in results) == full and max(r["local"] for r in results) < 0.5 * full
    estimated = training_memory(Blocks(), states=2, gpus=3, sharded=True)
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
    assert find_newest_checkpoint(first) is None  # best.pth names the same files
    file.unlink()
    for with_shards in (True, False):
        with pytest.raises(CheckpointError, match=r"1 of the 2 shard files in .* are missing \(__1_0\.distcp\)"):
            read_checkpoint(last, with_shards=with_shards)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=r"most of it is in the folder '.*\.shards', which is not beside it"):
        read_checkpoint(last)


@needs_newer_torch
def test_only_partial_files_of_a_killed_run_are_removed(first):
    before = {path.name for path in first.iterdir()}
    (first / "step_00000009.shards.tmp").mkdir()
    (first / "step_00000009.shards.tmp" / "__0_0.distcp").touch()
    (first / "step_00000009.shards").mkdir()
    remove_stale(first)
    assert {path.name for path in first.iterdir()} == before


@pytest.mark.slow
@needs_newer_torch
def test_shards_are_averaged_and_exported(tmp_path, monkeypatch):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    world = dict(num_images=8, image_size=32)
    try:
        vitkit.train(
            "quickstart/detr",
            run_dir="run",
            device="cpu",
            model=dict(num_queries=5),
            data=dict(train=world, val=world, images_per_gpu=4, num_workers=0),
            train=dict(epochs=2, strategy="fsdp", save_every_steps=1, keep_checkpoints=2, **SHARDED),
        )
    finally:
        close_distributed()
    first, second = sorted(Path("run").glob("step_*.pth"))
    average.main(["run/step_*.pth", "--last", "2", "--out", "averaged.pth"])
    states = [read_checkpoint(path)["model"] for path in (first, second, Path("averaged.pth"))]
    for name, value in states[2].items():
        if value.is_floating_point():
            torch.testing.assert_close(value, (states[0][name].double() + states[1][name]).div(2).float())
    image = np.random.default_rng(0).integers(256, size=(32, 32, 3), dtype=np.uint8)
    export.main(["run", "--out", "run.onnx"])
    expected, exported = (vitkit.load(name)(image, threshold=0) for name in ("run", "run.onnx"))
    assert len(expected) == 5
    torch.testing.assert_close(exported.scores, expected.scores, rtol=0, atol=1e-4)
    assert len(vitkit.load("averaged.pth")(image, threshold=0)) == 5


@needs_newer_torch
def test_folder_of_shards_in_place_of_their_checkpoint_is_named(first):
    folder = first / shards_named(first / BEST_NAME)
    for call in (read_checkpoint, find_run_weights):
        with pytest.raises(CheckpointError, match=r"contains the shards of a checkpoint, .* Give that: .*best\.pth"):
            call(folder)


def test_sharded_checkpoints_need_sharded_weights():
    with pytest.raises(ConfigError, match=r"train\.sharded_checkpoints: only train\.strategy=fsdp"):
        TrainSettings(epochs=1, **SHARDED)
