"""LoRA runs: their checkpoints are complete, load wherever a run does, and continue to the last bit."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.real_runs import finish, losses_of, start

import vitkit
from vitkit.apps.training.averaging import average
from vitkit.apps.visualization.curves import read_log
from vitkit.config import load_config
from vitkit.engine.hooks import EndAfter
from vitkit.engine.lora import LoRARun
from vitkit.engine.settings import TrainSettings
from vitkit.errors import CheckpointError, ConfigError
from vitkit.models.pretraining import PretrainingModel
from vitkit.registry import MODELS
from vitkit.weights import load_weights, read_checkpoint, save_checkpoint

pytest.importorskip("vitkit.tools.train", reason="vitkit is not installed (pip install -e .)")
CONFIG = """
from vitkit.configs.quickstart.vit import config as quickstart


def config():
    cfg = quickstart()
    world = dict(type="ShapesClassification", image_size=32)
    cfg["model"]["backbone"] = dict(
        type="ViT", image_size=32, patch_size=8, d_model=32, depth=2, num_heads=2, pretrained=False
    )
    cfg["data"] = dict(
        train=dict(**world, num_images=16), val=dict(**world, num_images=4, split="val"), images_per_gpu=4,
        num_workers=0,
    )
    cfg["optimizer"]["lr"] = 0.05
    cfg["schedule"] = dict(type="CosineLR", warmup_steps=2)
    cfg["train"] = dict(
        epochs=2, log_every=1, ema_decay=0.5, best_metric="top1",
        lora=dict(layers="backbone.*attn.qkv|proj", rank=2, dropout=0.2, parts="qv"),
    )
    return cfg
"""
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with a config, a base and a run."""
    folder: Path = tmp_path_factory.mktemp("runs")
    (folder / "lora.py").write_text(CONFIG)
    torch.manual_seed(7)
    model = MODELS.build(load_config(folder / "lora.py")["model"], num_classes=3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    save_checkpoint(folder / "base.pth", {"model": model.state_dict(), "classes": ["a", "b", "c"]})
    vitkit.train(folder / "lora.py", run_dir=folder / "run", init=folder / "base.pth", device="cpu")
    return folder


@torch.no_grad()
def logits(loaded) -> torch.Tensor:
    return loaded.model.eval()(IMAGES)["logits"]


def test_checkpoints_have_the_pairs_and_all_weights(runs):
    last, best = (read_checkpoint(runs / "run" / name) for name in ("last.pth", "best.pth"))
    base = read_checkpoint(runs / "base.pth")["model"]
    pairs = {
        f"backbone.blocks.{i}.attn.{layer}.lora.{part}.{matrix}"
        for i in range(2)
        for layer, parts in {"qkv": "qv", "proj": ["whole"]}.items()
        for part in parts
        for matrix in "ab"
    }
    head = {"backbone.head.weight", "backbone.head.bias"}
    for weights in (last["model"], last["ema"], best["model"]):
        assert weights.keys() == pairs | base.keys()
        assert all(weights[name].equal(value) for name, value in base.items() if name not in head)
    assert len(last["optimizer"]["state"]) == len(pairs) + 2
    assert last["lora"] == best["lora"] == {"rank": 2, "alpha": 2.0}
    console = (runs / "run" / "console.txt").read_text()
    assert "LoRA: 768 trainable parameters of rank 2 in 4 layers, 198 trained in full, 32,224 frozen" in console


def test_loaded_run_has_the_merged_weights_everywhere(runs, tmp_path):
    loaded = vitkit.load(runs / "run")
    assert not any(".lora." in name for name in loaded.model.state_dict())
    base, best = (read_checkpoint(path) for path in (runs / "base.pth", runs / "run" / "best.pth"))
    changed = (
        loaded.model.state_dict()["backbone.blocks.1.attn.qkv.weight"]
        - base["model"]["backbone.blocks.1.attn.qkv.weight"]
    )
    pair = [best["model"][f"backbone.blocks.1.attn.qkv.lora.v.{matrix}"] for matrix in "ab"]
    torch.testing.assert_close(changed[64:], pair[1] @ pair[0], rtol=1e-4, atol=1e-6)
    assert changed[:32].any() and not changed[32:64].any()
    shutil.copytree(runs / "run", tmp_path / "tested")
    _, evaluations = read_log(runs / "run" / "log.jsonl")
    best_top1 = max(evaluation["metrics"]["top1"] for evaluation in evaluations)
    assert vitkit.test(tmp_path / "tested", device="cpu").metrics["top1"] == best_top1
    vitkit.convert(runs / "run", tmp_path / "merged.pth")
    assert logits(vitkit.load(tmp_path / "merged.pth")).equal(logits(loaded))
    assert average([runs / "run" / "best.pth"])["model"].keys() == base["model"].keys()
    assert average([tmp_path / "merged.pth"])["model"].keys() == base["model"].keys()


def test_file_without_the_weights_of_an_updated_layer_is_an_error(runs, tmp_path):
    checkpoint = read_checkpoint(runs / "run" / "best.pth")
    del checkpoint["model"]["backbone.blocks.1.attn.qkv.weight"]
    save_checkpoint(tmp_path / "best.pth", checkpoint)
    model = MODELS.build(load_config(runs / "lora.py")["model"], num_classes=6)
    with pytest.raises(
        CheckpointError, match=r"best\.pth: has an update \(96, 32\) of backbone\.blocks\.1\.attn\.qkv and"
    ):
        load_weights(model, tmp_path / "best.pth")


def test_other_model_than_the_trained_one_is_an_error(runs):
    spec = load_config(runs / "lora.py")["model"]
    spec["backbone"]["depth"] = 1
    with pytest.raises(CheckpointError, match=r"best\.pth does not fit[\s\S]*unexpected.*backbone\.blocks\.1"):
        load_weights(MODELS.build(spec, num_classes=6), runs / "run" / "best.pth")


def test_model_with_layers_that_the_file_lacks_is_an_error(runs):
    spec = load_config(runs / "lora.py")["model"]
    spec["backbone"]["depth"] = 3
    with pytest.raises(CheckpointError, match=r"best\.pth does not fit.*[\s\S]*missing.*backbone\.blocks\.2"):
        load_weights(MODELS.build(spec, num_classes=6), runs / "run" / "best.pth")


def test_resumed_run_is_equal_to_the_last_bit_and_a_run_starts_from_another(runs):
    parts = runs / "parts"
    vitkit.train(runs / "lora.py", run_dir=parts, init=runs / "base.pth", device="cpu", hooks=[EndAfter(minutes=1e-6)])
    assert read_checkpoint(parts / "last.pth")["progress"]["epoch"] == 1
    vitkit.train(resume=parts, device="cpu")
    resumed, whole = (read_checkpoint(folder / "last.pth") for folder in (parts, runs / "run"))
    assert resumed["progress"] == whole["progress"]
    for part in ("model", "ema"):
        assert all(value.equal(resumed[part][name]) for name, value in whole[part].items())
    for number, state in whole["optimizer"]["state"].items():
        assert all(value.equal(resumed["optimizer"]["state"][number][name]) for name, value in state.items())
    with pytest.raises(ConfigError, match=r"train\.lora\.rank cannot change when a run is resumed"):
        vitkit.train(resume=parts, device="cpu", train=dict(lora=dict(rank=3)))
    chain = vitkit.train(
        runs / "lora.py",
        run_dir=runs / "chain",
        init=parts,
        device="cpu",
        train=dict(epochs=1),
        optimizer=dict(lr=1e-9),
    )
    torch.testing.assert_close(logits(chain.load()), logits(vitkit.load(parts)), rtol=1e-4, atol=1e-5)
    vitkit.train(resume=runs / "chain", device="cpu")


def test_a_run_whose_file_has_pairs_only_is_not_resumed(runs):
    saved = read_checkpoint(runs / "run" / "last.pth")
    for part in ("model", "ema"):
        saved[part] = {name: value for name, value in saved[part].items() if ".lora." in name}
    save_checkpoint(runs / "small" / "last.pth", saved)
    (runs / "small" / "config.json").write_text((runs / "run" / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"last\.pth: has an update .* and no weights for it") as error:
        vitkit.train(resume=runs / "small", device="cpu", train=dict(epochs=3))
    assert len(str(error.value)) < 400


def test_pretrained_backbone_is_the_base_of_a_run_without_other_weights(runs):
    model = MODELS.build(load_config(runs / "lora.py")["model"], num_classes=6)
    state = {name: value for name, value in model.backbone.state_dict().items() if not name.startswith("head")}
    save_checkpoint(runs / "backbone.pth", state)
    model = dict(backbone=dict(pretrained=str(runs / "backbone.pth")))
    run = vitkit.train(runs / "lora.py", run_dir=runs / "pretrained", device="cpu", model=model, train=dict(epochs=1))
    saved = read_checkpoint(run.path / "last.pth")
    assert saved["model"]["backbone.pos_embed"].equal(state["pos_embed"])
    assert run.load().model.backbone.blocks[0].mlp.fc1.weight.equal(state["blocks.0.mlp.fc1.weight"])


def test_random_base_and_shards_are_errors(runs):
    with pytest.raises(ConfigError, match=r"train\.lora: the frozen weights would be random\. Start from weights"):
        vitkit.train(runs / "lora.py", run_dir=runs / "random", device="cpu")
    with pytest.raises(
        ConfigError, match=r"train\.lora: the layers of a sharded model cannot be updated.*train\.strategy=ddp"
    ):
        TrainSettings(epochs=1, strategy="fsdp", lora=dict(layers="*"))


def start_with(**options):
    """Return what a preparation for LoRA reads of a run's start."""
    return SimpleNamespace(settings=SimpleNamespace(lora=options))


def test_frozen_part_that_stays_random_is_warned_of(runs, caplog):
    model = MODELS.build(load_config(runs / "lora.py")["model"], num_classes=3)
    run = LoRARun(model, start_with(layers="backbone.*qkv", train="backbone.norm"))
    torch.nn.init.normal_(model.backbone.pos_embed)
    run.begin(model)
    assert "frozen but not in the weights that the run starts from" in caplog.text and "train.lora.train" in caplog.text


def test_return_to_the_best_weights_keeps_the_base(runs):
    settings = dict(epochs=2, restart_epoch=1)
    run = vitkit.train(runs / "lora.py", run_dir=runs / "restart", init=runs / "base.pth", device="cpu", train=settings)
    assert logits(run.load()).isfinite().all()


def test_two_processes_train_as_one(runs, monkeypatch):
    monkeypatch.chdir(runs)
    settings = ["train.images_per_step=4", "data.images_per_gpu=2", "train.epochs=1"]
    assert finish(start("lora.py", "--init", "base.pth", *settings, "--run-dir", "two", ranks=2)) == [0, 0]
    train = dict(images_per_step=4, epochs=1)
    vitkit.train("lora.py", init="base.pth", run_dir="one", device="cpu", train=train, data=dict(images_per_gpu=2))
    assert losses_of("two") == pytest.approx(losses_of("one"), rel=1e-4)
    one, two = (read_checkpoint(f"{name}/last.pth")["model"] for name in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4)


def test_pretraining_has_no_lora():
    backbone = dict(type="ViT", image_size=32, patch_size=8, d_model=32, depth=1, num_heads=2)
    model = PretrainingModel(backbone)
    with pytest.raises(ConfigError, match=r"train\.lora: PretrainingModel trains a backbone for other models"):
        LoRARun(model, start_with(layers="*qkv"))
