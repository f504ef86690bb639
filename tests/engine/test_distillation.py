"""Runs that learn from a frozen teacher, which is found by its name whenever they are started or resumed."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.processes import on_ranks

import vitkit
from vitkit.engine import teaching
from vitkit.engine.hooks import Hook
from vitkit.errors import CheckpointError, ConfigError
from vitkit.losses.feature_distillation import FeatureDistillationLoss
from vitkit.models.feature_distillation import FeatureDistillation
from vitkit.registry import BACKBONES
from vitkit.structures import Batch
from vitkit.weights import read_checkpoint
from vitkit.weights.teachers import find_teacher

VIT = dict(type="ViT", patch_size=16, d_model=16, depth=2, num_heads=2, image_size=32)
SMALL = {
    "model.backbone": dict(type="ResNet", depth=18, base_channels=8, pretrained=False),
    "data.train.source.num_images": 24,
    "data.val.num_images": 12,
    "data.images_per_gpu": 8,
    "data.val_images_per_gpu": 12,
    "train.epochs": 2,
    "train.reference_batch_size": 8,
    "train.channels_last": False,
}


@pytest.fixture
def teacher(tmp_path, monkeypatch):
    """A file of weights in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch.save(BACKBONES.build(VIT).state_dict(), "teacher.pth")
    return dict(VIT, pretrained=str(tmp_path / "teacher.pth"))


def train(folder, teacher, hooks=(), **changes):
    overrides = SMALL | {"model.teacher": teacher} | changes
    return vitkit.train("quickstart/distillation", run_dir=folder, device="cpu", hooks=hooks, **overrides)


class Killed(Hook):
    def after_step(self, run, step):
        if run.progress.step == 4:
            raise ZeroDivisionError


def test_a_killed_and_resumed_run_equals_an_uninterrupted_one_and_saves_no_teacher(teacher):
    whole = train("whole", teacher, **{"train.ema_decay": 0.9})
    with pytest.raises(ZeroDivisionError):
        train("parts", teacher, [Killed()], **{"train.save_every_steps": 1, "train.ema_decay": 0.9})
    resumed = vitkit.train(resume="parts", device="cpu", **{"train.save_every_steps": None})
    assert whole.metrics == resumed.metrics and {"loss", "knn/top1", "location_cosine"} <= whole.metrics.keys()
    a, b = (read_checkpoint(f"{name}/last.pth") for name in ("whole", "parts"))
    for part in ("model", "ema"):
        assert all(torch.equal(value, b[part][name]) for name, value in a[part].items())
        assert not [name for name in a[part] if not name.startswith(("backbone.", "map_pro", "image_pro", "teacher_s"))]
    # Set by the first training images, and different from channel to channel.
    assert a["model"]["teacher_statistics"].std(2).min() > 0
    kept = read_checkpoint("whole/backbone.pth")["model"]
    assert kept.keys() == BACKBONES.build(SMALL["model.backbone"]).state_dict().keys()

    Path("teacher.pth").unlink()
    with pytest.raises(CheckpointError, match=r"^model\.teacher: pretrained: no file '.*teacher\.pth'") as error:
        vitkit.train(resume="parts", device="cpu", **{"train.epochs": 3})
    assert "random" not in str(error.value)


def test_stored_features_of_fixed_views_train_as_the_teacher_does(teacher, monkeypatch):
    fixed = {"data.train.transforms": dict(type="ClassificationEvalTransforms", size=48), "train.epochs": 1}
    images = train("images", teacher, **fixed)
    train("first", teacher, **fixed, **{"data.cache_features": "cache"})
    taught = []
    teach = FeatureDistillation.teach
    monkeypatch.setattr(FeatureDistillation, "teach", lambda self, x: taught.append(self.training) or teach(self, x))
    stored = train("stored", teacher, **fixed, **{"data.cache_features": "cache"})
    assert taught and not any(taught)  # only validation images, whose features are not stored
    assert stored.metrics == images.metrics
    a, b = (read_checkpoint(f"{name}/last.pth")["model"] for name in ("images", "stored"))
    assert all(torch.equal(value, b[name]) for name, value in a.items())

    with pytest.raises(ConfigError, match=r"data\.train\.transforms: they draw random numbers"):
        train("random", teacher, **{"data.cache_features": "elsewhere"})


class Batches:
    """Images in a fixed order, each rank's part of every batch."""

    def __init__(self, rank, ranks):
        images = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        self.batches = [Batch({"images": x}, [{}] * len(x)) for x in images.split(4 // ranks)[rank::ranks]]

    def set_position(self, epoch, batch=0):
        pass

    def __iter__(self):
        return iter(self.batches)


def two_steps(rank, ranks):
    torch.manual_seed(0)
    model = FeatureDistillation(VIT, BACKBONES.build(dict(VIT, d_model=32)), maps="all")
    data, train_set = SimpleNamespace(batch_size_per_gpu=4 // ranks), SimpleNamespace(classes=None)
    start = dict(datasets={"train": train_set}, checkpoint=None, loader=Batches(rank, ranks), data=data)
    teaching.Teaching(model, SimpleNamespace(**start)).begin(model)
    trained = torch.nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in Batches(rank, ranks):
        sum(FeatureDistillationLoss()(trained(**batch.inputs), batch.targets).values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def steps_of_a_rank(folder):
    return two_steps(torch.distributed.get_rank(), 2)


def test_two_processes_measure_and_train_as_one(tmp_path):
    one = two_steps(0, 1)
    for state in on_ranks(2, tmp_path, steps_of_a_rank):
        for name, value in one.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


def test_the_students_features_become_those_of_the_teacher_also_for_new_images():
    config = vitkit.load_config("quickstart/distillation")
    torch.manual_seed(0)
    model = vitkit.build_model(dict(config["model"], backbone=dict(type="ResNet", depth=18, base_channels=16)))
    teaching.add_teacher(model, None)
    dataset = vitkit.build_dataset(dict(type="ShapesClassification", image_size=64, num_images=48))
    images = torch.stack([dataset[i]["image"] for i in range(48)])
    model.measure_teacher([Batch({"images": images[:32]}, [{}] * 32)])
    criterion, optimizer = FeatureDistillationLoss(), torch.optim.AdamW(model.parameters(), lr=2e-3)

    def new_images_cosine():
        with torch.no_grad():
            losses = criterion(model.eval()(images[32:]), [{}] * 16)
        return 1 - losses["location"].item()

    before, losses = new_images_cosine(), []
    model.train()
    for step in range(20):
        loss = sum(criterion(model(images[16 * (step % 2) :][:16]), [{}] * 16).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    after = new_images_cosine()
    assert abs(before) < 0.1 and after > 0.2
    assert losses[0] > 1.8 and losses[-1] < 1.2, (losses, before, after)


def test_a_run_teaches_with_the_backbone_that_it_has_trained(teacher):
    train("run", teacher, **{"train.epochs": 1})
    found = find_teacher("run")
    assert found.backbone["pretrained"] == "run" and found.backbone["base_channels"] == 8
    for name in ("run", "run/backbone.pth", "run/last.pth"):
        model = FeatureDistillation(VIT, name)
        teaching.add_teacher(model, None)
        taught = model.frozen_teacher.network.state_dict()
        assert all(torch.equal(x, taught[key]) for key, x in read_checkpoint("run/backbone.pth")["model"].items())
    shutil.rmtree("run")
    with pytest.raises(ConfigError, match=r"^model\.teacher: 'run' is neither a backbone nor a run's folder"):
        teaching.add_teacher(FeatureDistillation(VIT, "run"), None)


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (
            "resnet5",
            "model.teacher: 'resnet5' is neither a backbone nor a run's folder, a checkpoint, or a model of the zoo",
        ),
        ("runs/gone", "model.teacher: no file or folder 'runs/gone'."),
        (dict(VIT, pretrained=False), "model.teacher: pretrained=False: random weights teach nothing."),
        (dict(type="ViT", d_model=18, num_heads=2), "model.teacher: pretrained=True: there are no default weights"),
        (dict(VIT, d_model=20), "model.teacher: pretrained=True: there are no default weights"),
    ],
)
def test_a_teacher_without_weights_is_an_error(teacher, message):
    with pytest.raises((ConfigError, CheckpointError)) as error:
        teaching.add_teacher(FeatureDistillation(VIT, teacher), None)
    assert message in str(error.value)
