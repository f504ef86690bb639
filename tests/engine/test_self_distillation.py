"""Runs of self-distillation: schedules, interruption, two processes, and collapse."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from helpers.processes import on_ranks

import vitkit
from vitkit import ConfigError
from vitkit.apps.explanations.backbones import backbone_attention, draw_class_token
from vitkit.apps.explanations.regions import attention_ratio
from vitkit.engine.hooks import Hook
from vitkit.engine.optimizers import layer_factors, parameter_groups
from vitkit.models.self_distillation import SelfDistillationLoss, SelfDistillationSchedules
from vitkit.registry import DATASETS, MODELS
from vitkit.weights import read_checkpoint

WORLD = dict(type="ShapesClassification", image_size=16)
HOOK = dict(
    type="SelfDistillationSchedules", momentum=0.9, teacher_temperature=0.07, warmup_epochs=3, clip_parameter_norm=0.3
)


def make_config(hook=HOOK, *, epochs=3, images_per_step=4, images_per_gpu=2, lr=1e-3, **criterion):
    """Three epochs of two steps."""
    backbone = dict(type="ViT", patch_size=8, d_model=16, depth=2, num_heads=2, image_size=16, drop_path=0.2)
    head = dict(num_prototypes=12, hidden_channels=16, bottleneck_channels=8, norm_last_layer=False)
    crops = dict(type="MultiCrop", size=16, small_size=8, num_small=2)
    return dict(
        model=dict(type="SelfDistillation", backbone=backbone, **head),
        criterion=dict(type="SelfDistillationLoss", **criterion),
        data=dict(
            train=dict(type="UnlabeledImages", source=dict(**WORLD, num_images=8), transforms=crops),
            val=dict(type="UnlabeledImages", source=dict(**WORLD, num_images=2, split="val")),
            images_per_gpu=images_per_gpu,
            num_workers=0,
        ),
        optimizer=dict(type="AdamW", lr=lr, weight_decay=0.04, no_weight_decay=["vectors"]),
        schedule=dict(type="CosineLR", warmup_epochs=1),
        evaluator=dict(type="FeatureStatistics"),
        train=dict(
            epochs=epochs,
            images_per_step=images_per_step,
            log_every=1,
            save_every_steps=1,
            eval_every=epochs,
            best_metric="rank",
            hooks=[hook] if hook else [],
        ),
    )


def train(folder: Path, config: dict | None = None, **options):
    return vitkit.train(config or make_config(), run_dir=folder, device="cpu", **options)


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def losses_of(folder: Path) -> list[float]:
    return [record["loss"] for record in log_of(folder) if record["kind"] == "train"]


class Killed(Exception):
    pass


class KilledAt(Hook):
    """Ends a run after a step, before that step is saved."""

    def __init__(self, step: int):
        self.step = step

    def after_step(self, run, step):
        if run.progress.step == self.step:
            raise Killed


class Recorder(Hook):
    """Records what the schedules set for each step."""

    def __init__(self):
        self.decays, self.temperatures, self.frozen = [], [], []

    def after_step(self, run, step):
        self.temperatures.append(run.criterion.teacher_temperature)

    def before_epoch(self, run):
        last_layer = run.model.last_layer()[1]
        self.frozen.append((run.progress.epoch, last_layer.detach().clone()))
        if run.progress.epoch == 0:
            run.optimizer.register_step_pre_hook(
                lambda *_: self.decays.append([group["weight_decay"] for group in run.optimizer.param_groups])
            )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run, and what was recorded in it."""
    folder, recorder = tmp_path_factory.mktemp("whole") / "run", Recorder()
    train(folder, hooks=[recorder])
    return folder, recorder


def test_a_run_follows_its_schedules(whole):
    folder, recorder = whole
    assert recorder.temperatures == pytest.approx([0.04, 0.04, 0.055, 0.055, 0.07, 0.07])
    decays = [0.4 + (0.04 - 0.4) * (1 + math.cos(math.pi * step / 6)) / 2 for step in range(6)]
    assert sorted(recorder.decays[0]) == pytest.approx([0, 0.04])
    assert [max(values) for values in recorder.decays] == pytest.approx(decays)
    assert all(min(values) == 0 for values in recorder.decays)
    (_, first), (_, second), (_, third) = recorder.frozen
    assert torch.equal(first, second) and not torch.equal(second, third)  # frozen in the first epoch only
    state = read_checkpoint(folder / "last.pth")["model"]
    assert state["center"].abs().max() > 1e-4
    teacher = {name: value for name, value in state.items() if not name.startswith(("student.", "center"))}
    assert any(not torch.equal(value, state[f"student.{name}"]) for name, value in teacher.items())
    backbone = read_checkpoint(folder / "backbone.pth")["model"]
    assert all(torch.equal(value, state[f"backbone.{name}"]) for name, value in backbone.items())


def test_meters_are_in_the_log(whole):
    (metrics,) = (record["metrics"] for record in log_of(whole[0]) if record["kind"] == "val")
    assert "loss" not in metrics
    assert 0 < metrics["train_mean_entropy"] <= math.log(12) + 1e-6
    assert 0 < metrics["train_teacher_entropy"] <= metrics["train_mean_entropy"] + 1e-6
    assert metrics["train_feature_spread"] > 0


@pytest.mark.parametrize("step", [2, 3])
def test_a_killed_run_continues_bit_for_bit(whole, tmp_path, step):
    with pytest.raises(Killed):
        train(tmp_path / "run", hooks=[KilledAt(step + 1)])
    assert read_checkpoint(tmp_path / "run" / "last.pth")["progress"]["step"] == step
    vitkit.train(resume=tmp_path / "run", device="cpu")
    one, other = (read_checkpoint(folder / "last.pth") for folder in (whole[0], tmp_path / "run"))
    assert one["model"].keys() == other["model"].keys()
    for name, value in one["model"].items():
        assert torch.equal(value, other["model"][name]), name
    for a, b in zip(one["optimizer"]["state"].values(), other["optimizer"]["state"].values(), strict=True):
        assert all(torch.equal(value, b[name]) for name, value in a.items())
    assert one["optimizer"]["param_groups"] == other["optimizer"]["param_groups"]
    assert losses_of(whole[0]) == losses_of(tmp_path / "run")


def test_a_skipped_step_moves_neither_teacher_nor_center(tmp_path, monkeypatch):
    original, calls, states = SelfDistillationLoss.forward, [], []

    def sometimes_nan(criterion, outputs, targets):
        calls.append(0)
        losses = original(criterion, outputs, targets)
        return {name: value * (math.nan if len(calls) == 3 else 1) for name, value in losses.items()}

    class States(Hook):
        def after_step(self, run, step):
            names = ("center", "backbone.cls_token", "head.mlp.0.weight")
            state = run.model.state_dict()
            states.append((step.decision.take, [state[name].clone() for name in names]))

    monkeypatch.setattr(SelfDistillationLoss, "forward", sometimes_nan)
    train(tmp_path / "run", make_config(epochs=2), hooks=[States()])
    assert [taken for taken, _ in states] == [True, False, True, True]
    assert all(torch.equal(a, b) for a, b in zip(states[0][1], states[1][1]))
    assert not any(torch.equal(a, b) for a, b in zip(states[1][1], states[2][1]))


def two_ranks_train(folder: Path) -> None:
    train(folder / "two")


def test_two_processes_train_as_one(whole, tmp_path):
    on_ranks(2, tmp_path, two_ranks_train)
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(whole[0]), rel=1e-5)
    one, two = (read_checkpoint(folder / "last.pth")["model"] for folder in (whole[0], tmp_path / "two"))
    torch.testing.assert_close(two["center"], one["center"], rtol=1e-4, atol=1e-6)
    for name in ("backbone.cls_token", "head.mlp.4.weight", "student.head.last_layer.weight_v"):
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-5)


def test_class_token_maps_of_a_run_are_drawn_and_measured(whole, tmp_path):
    scene = DATASETS.build("ShapesDetection", num_images=1, image_size=16, masks=True).load_annotated(0)
    result = vitkit.explain(whole[0], image=scene.image, out=tmp_path)
    assert {"image_class_token.png", "image_class_token_masks.png"} <= {path.name for path in result.files}
    assert any(name.startswith("class token, block 2, head 1") for name in result.numbers)
    # By head, relative to uniform attention: as in the lectures' notebook on backbones.
    layers = backbone_attention(vitkit.load(whole[0]), scene.image)
    mask = torch.from_numpy(scene.masks[0].astype(bool))
    maps = layers[-1].class_token()
    assert [layer.name for layer in layers] == ["backbone.blocks.0.attn", "backbone.blocks.1.attn"]
    inside = torch.nn.functional.adaptive_avg_pool2d(mask.float()[None, None], 2)[0, 0]
    expected = (maps * inside).sum((1, 2)) / maps.sum((1, 2)) / mask.float().mean()
    torch.testing.assert_close(attention_ratio(maps, mask), expected)
    assert draw_class_token(scene.image, layers, tmp_path / "measured.png", region=mask).is_file()


COLLAPSES = {
    "one prototype": (
        dict(HOOK, teacher_temperature=0.002, warmup_teacher_temperature=0.002, frozen_last_layer_epochs=0),
        dict(center_momentum=1.0, lr=0.03),
        r"the teacher gives all images the same prototype \(entropy of the mean .*lower criterion.center_momentum",
    ),
    "uniform": (
        dict(HOOK, teacher_temperature=10.0, warmup_teacher_temperature=10.0),
        dict(),
        r"the teacher's outputs are uniform \(entropy 2\.48\d of at most ln K = 2\.485\), so nothing is learned\. "
        r"Set model\.batch_norm=True, .* lower the hook's teacher_temperature and warmup_teacher_temperature "
        r"\(now 10 and 10; published 0\.04\)",
    ),
}


@pytest.mark.parametrize("kind", COLLAPSES)
def test_a_collapse_is_said_once_in_one_line(kind, tmp_path, capsys):
    hook, options, message = COLLAPSES[kind]
    train(tmp_path / "run", make_config(hook, **options))
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "self-distillation has collapsed" in line)
    assert re.search(message, line), line


def test_batches_of_one_image_are_no_collapse_and_without_a_metric_the_newest_state_is_used(tmp_path, capsys):
    config = make_config(images_per_step=2, images_per_gpu=1, epochs=2)
    config["train"]["best_metric"] = None
    run = train(tmp_path / "run", config)
    assert run.weights.name == "last.pth" and not (tmp_path / "run" / "best.pth").exists()
    captured = capsys.readouterr()
    assert "collapsed" not in captured.err and "best" not in captured.out
    values = next(record["metrics"] for record in log_of(tmp_path / "run") if record["kind"] == "val")
    assert values["train_teacher_entropy"] > 0 and values["train_feature_spread"] is None


def test_layer_decay_is_that_of_the_student():
    model = MODELS.build(make_config()["model"])
    factors = layer_factors(model, 0.5)
    assert factors["student.backbone.patch_embed.proj.weight"] == 0.125 and factors["student.head.mlp.0.weight"] == 1
    assert factors["student.backbone.blocks.0.norm1.weight"] == 0.25
    assert factors["student.backbone.blocks.1.norm1.weight"] == 0.5 and factors["student.backbone.norm.weight"] == 1
    groups = parameter_groups(model, lr=1.0, layer_decay=0.5)
    assert {group["lr"] for group in groups if "part" in group} == {0.125, 0.25, 0.5, 1.0}


def test_a_spread_of_zero_is_a_collapse_and_a_good_run_is_none(whole):
    hook = SelfDistillationSchedules()
    good = dict(teacher_entropy=3.0, mean_entropy=5.0, feature_spread=0.7)
    assert hook.describe_collapse(good, 4096) is None
    line = hook.describe_collapse(good | dict(feature_spread=0.001), 4096)
    assert "all images have nearly the same features (spread 0.001; 1 is even), so nothing is learned. Lower" in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model="Classifier"), r"SelfDistillationSchedules: Classifier has no teacher\. It is for model\.type=Sel"),
        (dict(strategy="fsdp"), r"train\.strategy=fsdp: self-distillation keeps both"),
        (dict(momentum=1.5), r"SelfDistillationSchedules: momentum=1\.5: expected 0 to 1"),
        (dict(teacher_temperature=0.0), r"teacher_temperature=0\.0: expected above 0"),
        (dict(clip_parameter_norm=0.0), r"clip_parameter_norm=0\.0: expected above 0"),
        (dict(hook=None), r"nothing moves the teacher"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_trained_is_said(changes, message, tmp_path):
    config = make_config({**HOOK, **{k: v for k, v in changes.items() if k not in ("model", "strategy", "hook")}})
    if "model" in changes:
        config["model"] = dict(type="Classifier", backbone=config["model"]["backbone"])
        config["criterion"] = dict(type="ClassificationLoss")
        world = dict(**WORLD, num_images=4)
        config["data"] |= dict(train=world, val=world)
        config["evaluator"], config["train"]["best_metric"] = dict(type="ClassificationEvaluator"), "top1"
    if "strategy" in changes:
        config["train"]["strategy"] = "fsdp"
    if "hook" in changes:
        config["train"]["hooks"] = []
    with pytest.raises(ConfigError, match=message) as error:
        train(tmp_path / "run", config)
    assert "\n" not in str(error.value)
