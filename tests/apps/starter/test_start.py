import itertools
import json
import math
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.starting import RANDOM, start_detection
from helpers.undrawn_models import undrawn
from PIL import Image

import vitkit
from vitkit import load_config
from vitkit.apps.inference.card import read_metrics
from vitkit.apps.starter import child_runs, own_data, start, timed_run
from vitkit.apps.starter.capacity import capacity_lines
from vitkit.apps.starter.child_runs import StepCost
from vitkit.apps.starter.recipes import RECIPES
from vitkit.apps.starter.start import imagenet_weights
from vitkit.apps.visualization import curves
from vitkit.engine.hooks.saving import Interrupted
from vitkit.errors import CheckpointError, ConfigError
from vitkit.tools.start import main

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("fewest", "device", "hours", "network"),
    [
        (100, "cpu", 1, "res3"),
        (99, "cpu", 1, "resnet50"),
        (100, "cuda", 1, "resnet50"),
        (100, "cpu", 2.05, "res3"),  # of one second a step, 0.8 of the time
        (100, "cpu", 2.15, "resnet50"),
    ],
)
def test_backbone_follows_the_numbers_of_objects_and_steps(
    world, step_cost, monkeypatch, fewest, device, hours, network, capsys
):
    read = start.read_own_data
    monkeypatch.setattr(
        start, "read_own_data", lambda *args, **kwargs: replace(read(*args, **kwargs), fewest_objects=fewest)
    )
    monkeypatch.setattr(start, "imagenet_weights", lambda request: (True, "ImageNet weights"))
    monkeypatch.setattr(start, "check", lambda path, request: None)
    images, annotations = str(world / "train2017"), str(world / "annotations/instances_train2017.json")
    start.start(images, annotations, hours=hours, dry_run=True, device=device)
    cfg = load_config(Path("runs/start/config.py"))
    is_short = network == "res3"
    assert cfg["model"]["backbone"]["out_features"] == (["res3"] if is_short else ["res3", "res4"])
    assert cfg["model"]["backbone"]["depth"] == 50 and cfg["model"]["neck"]["num_levels"] == (2 if is_short else 3)
    assert cfg["optimizer"]["backbone_lr"] == (2e-4 if is_short else 1e-4)
    out = capsys.readouterr().out
    assert ("up to res3: each class that has training objects has at least 100" in out) == is_short
    assert ("up to res4: there is time for 6000 steps of a smaller network" in out) == (hours == 2.15)
    start.start(
        images, annotations, hours=1, dry_run=True, device=device, overrides=start.UP_TO_RES4.split(), run_dir="longer"
    )
    assert "up to res3" not in capsys.readouterr().out
    longer = load_config(Path("longer/config.py"), [RANDOM])
    for cfg in (load_config(Path("runs/start/config.py"), [RANDOM]), longer):
        with undrawn():
            vitkit.build_model(cfg["model"], classes=["a"])


def test_epochs_fill_the_time_in_the_faster_precision(world, step_cost, capsys):
    config = start_detection(world, "--hours", "0.1")
    steps_per_epoch = len(json.loads(Path("runs/start/data/train.json").read_text())["images"]) / 2
    first = RECIPES["detection"].small_first
    assert config["train"]["epochs"] == int(0.1 * 3600 * 0.8 / first.mean_cost / steps_per_epoch)
    assert config["train"]["precision"] == "fp32"
    assert step_cost[1] == [(224, "fp32"), (224, "bf16")]
    out = capsys.readouterr().out
    assert "timed     224 pixels, bf16: 2.00 s a step" in out and "24 images (17 train, 7 val)" in out
    assert "chosen    DINO on ResNet-18 from random weights, 224 pixels, fp32" in out
    assert "expected  AP 0.488, AP50 0.784 after 824 steps, which take 10 min here, as on 205 photos of blood" in out
    assert config["schedule"] == dict(type="FlatCosineLR", warmup_share=0.05, flat_until_share=0.6, end_factor=0.02)
    assert "train it  vitkit train runs/start/config.py\n" in out and config["model"]["backbone"]["pretrained"] is False


@pytest.mark.parametrize(("hours", "is_short"), [("1", True), ("1.1", False)])  # of one second a step, 0.8 of the time
def test_short_runs_begin_with_small_images(world, step_cost, hours, is_short):
    config = start_detection(world, "--hours", hours)
    stages = config["data"]["train"]["transforms"]
    first, large = stages["transforms"]
    assert stages["until_shares"] == [0.6] and large["transforms"][1]["scales"] == [192, 224, 224]
    assert first["mosaic"] == 0.3
    assert first["transforms"]["transforms"][1]["scales"] == ([96, 128, 128] if is_short else [192, 224, 224])
    reason = "smaller at first, as there is time for fewer than 3000 steps"
    assert (reason in Path("runs/start/config.py").read_text()) == is_short


def test_pretrained_backbone_is_frozen_further_when_there_is_time_for_few_steps(world, step_cost, monkeypatch):
    monkeypatch.setattr(start, "imagenet_weights", lambda request: (True, "ImageNet weights"))
    timed = step_cost[1]

    def time_steps(command, folder, minutes, epoch_minutes):
        config = load_config(command[2])
        frozen = config["model"]["backbone"]["frozen_stages"]
        timed.append((frozen, config["train"]["precision"], config["train"]["epochs"]))
        return StepCost(1 / 60 if frozen == 1 else 0.5 / 60, 1.0, 10)

    monkeypatch.setattr(timed_run, "time_steps", time_steps)
    images, annotations = str(world / "train2017"), str(world / "annotations/instances_train2017.json")
    main([images, annotations, "--dry-run", "--hours", "0.1"])
    assert timed == [(1, "fp32", 1000), (1, "bf16", 1000), (3, "fp32", 1000)]
    config = load_config(Path("runs/start/config.py"))
    assert config["model"]["backbone"]["frozen_stages"] == 3 and config["train"]["epochs"] == 57
    assert "frozen up to res3, which halves a step's time" in Path("runs/start/config.py").read_text()
    main([images, annotations, "--dry-run", "--hours", "1", "--run-dir", "long"])
    config = load_config(Path("long/config.py"))
    assert config["model"]["backbone"]["frozen_stages"] == 1 and config["train"]["epochs"] == 288


def test_bfloat16_is_not_timed_where_it_is_emulated(world, step_cost, monkeypatch):
    monkeypatch.setattr(start, "has_bfloat16", lambda device: False)
    start_detection(world, "--hours", "0.1")
    assert step_cost[1] == [(224, "fp32")]


def test_config_explains_its_choices_and_names_its_command(world, step_cost):
    start_detection(world, "--hours", "0.1", "--val-fraction", "0.3")
    text = Path("runs/start/config.py").read_text()
    assert f"{RANDOM} --task detection --hours 0.1 --val-fraction 0.3\n" in text
    assert "# random weights, as model.backbone.pretrained=false says" in text
    assert "0.70 s a step" in text and "--hours 0.1" in text and "# the image with the most objects has" in text


@pytest.mark.parametrize(
    ("minutes", "epoch_minutes", "num_records"), [(0.0, math.inf, 16), (30.0, math.inf, 29), (30.0, 0.2, 3)]
)
def test_steps_are_timed_until_their_cost_is_known_or_too_high(
    monkeypatch, tmp_path, minutes, epoch_minutes, num_records
):
    class Child:
        def __init__(self, *_):
            (tmp_path / "timing").mkdir()
            self.process = SimpleNamespace(poll=lambda: None)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    log = [{"step": k, "epoch": k / 2, "minutes": 0.04 * k * k, "processor_minutes": k} for k in range(1, 100)]
    lengths = iter(range(1, 100))
    monkeypatch.setattr(child_runs, "Child", Child)
    monkeypatch.setattr(curves, "read_log", lambda path: (log[: next(lengths)], []))
    monkeypatch.setattr(child_runs.time, "sleep", lambda seconds: None)
    cost = child_runs.time_steps(["vitkit", "train"], tmp_path / "timing", minutes=minutes, epoch_minutes=epoch_minutes)
    assert next(lengths) == num_records + 1
    first, last = log[5 if num_records > 3 else 0], log[num_records - 1]
    assert cost.minutes == pytest.approx((last["minutes"] - first["minutes"]) / (last["step"] - first["step"]))
    assert cost.steps_per_epoch == 2


def test_larger_images_are_chosen_if_the_time_allows_enough_steps(world, step_cost, monkeypatch):
    monkeypatch.setattr(start, "read_own_data", with_short_side(start.read_own_data, 500))
    step_cost[0]["fp32"] = 0.01
    config = start_detection(world, "--hours", "0.16")
    assert config["data"]["val"]["transforms"]["short_side"] == 416  # 512 is larger than the images
    assert step_cost[1][-1] == (416, "fp32")


def with_short_side(read, short_side):
    def changed(*args, **kwargs):
        data = read(*args, **kwargs)
        return replace(data, short_side=short_side)

    return changed


@pytest.mark.parametrize(
    ("count", "size", "queries"), [(60, 224, 150), (100, 224, 250), (400, 224, 750), (900, 272, 1020)]
)
def test_queries_fit_the_locations_of_the_smallest_training_image(
    world, step_cost, monkeypatch, tmp_path, count, size, queries
):
    content = json.loads((world / "annotations/instances_train2017.json").read_text())
    first = content["images"][0]
    box = dict(image_id=first["id"], category_id=content["categories"][0]["id"], bbox=[8, 8, 9, 9], area=81, iscrowd=0)
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] != first["id"]]
    content["annotations"] += [dict(box, id=10**6 + k) for k in range(count)]
    (tmp_path / "dense.json").write_text(json.dumps(content))
    monkeypatch.setattr(start, "check", lambda path, request: [])
    start.start(world / "train2017", tmp_path / "dense.json", hours=0.1, dry_run=True, device="cpu", overrides=[RANDOM])
    config = load_config(Path("runs/start/config.py"))
    assert config["data"]["val"]["transforms"]["short_side"] == size and config["model"]["num_queries"] == queries
    if count >= 100:
        detections = math.ceil(1.3 * count / 10) * 10
        assert config["model"]["num_detections"] == config["evaluator"].get("max_dets") == detections
    mosaics, single = config["data"]["train"]["transforms"]["transforms"]
    sides = [min(stage["transforms"][1]["scales"]) for stage in (mosaics["transforms"], single)]
    assert (sides[0] < sides[1]) == (count == 60)  # the maps of smaller images have no room for more
    side = min(sides)
    model = vitkit.build_model(config["model"], classes=["a"]).eval()
    assert model(torch.zeros(1, 3, side, side))["pred_logits"].shape[1] == queries >= count


def test_config_is_one_that_trains_for_an_epoch(world, step_cost):
    start_detection(world, "--hours", "0.1")
    few = {"data.train.fraction": 0.25}
    run = vitkit.train("runs/start/config.py", device="cpu", run_dir="one", train=dict(epochs=1), **few)
    assert len(run.history) == 1


@pytest.mark.parametrize(
    ("task", "annotations", "model"),
    [
        ("instance", "instances_train2017.json", "Mask2Former"),
        ("semantic", "semantic_train2017", "Mask2Former"),
        ("panoptic", "panoptic_train2017.json", "Mask2Former"),
    ],
)
def test_semantic_masks_are_supported(world, step_cost, monkeypatch, task, annotations, model):
    monkeypatch.setattr(
        timed_run, "time_steps", lambda command, folder, minutes, epoch_minutes: StepCost(1 / 60, 1 / 60, 10)
    )
    main(
        [str(world / "train2017"), str(world / "annotations" / annotations), RANDOM, "--task", task, "--dry-run"]
        + ["--hours", "0.05"]
    )
    config = load_config(Path("runs/start/config.py"))
    assert config["model"]["type"] == model and config["model"]["tasks"] == [task]


def test_keypoints_are_learned(world, step_cost, capsys):
    files = [str(world / "train2017"), str(world / "annotations" / "keypoints_train2017.json"), RANDOM, "--dry-run"]
    main([*files, "--task", "keypoints"])
    config = load_config(Path("runs/start/config.py"))
    assert config["model"]["type"] == "RFDETRKeypoints" and config["train"]["best_metric"] == "keypoints/AP"
    assert config["model"]["num_queries"] == 50 and config["data"]["val"]["keypoints"]
    assert "--task keypoints" not in capsys.readouterr().out
    main([*files, "--run-dir", "runs/boxes"])
    assert "objects have keypoints, which --task keypoints learns" in capsys.readouterr().out


def test_elongated_images_have_as_many_queries_as_one_map_of_points_has_locations(world):
    data = start.OwnData("", 17, 7, 64, [], most_objects=500, elongation=1.0)
    lines = capacity_lines("keypoints", data, "size=224, pretrained=True", ())
    assert lines[1] == 'cfg["model"]["num_queries"] = 140'  # 12 x 12 locations of stride 16, in tens


def test_folders_of_classes_are_split(world, step_cost, monkeypatch, tmp_path):
    monkeypatch.setattr(
        timed_run, "time_steps", lambda command, folder, minutes, epoch_minutes: StepCost(1 / 60, 1 / 60, 1)
    )
    images = sorted((world / "train2017").glob("*.png"))
    for k, image in enumerate(images):
        folder = tmp_path / "flowers" / ("rose", "tulip")[k % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / image.name).write_bytes(image.read_bytes())
    main([str(tmp_path / "flowers"), "--task", "classification", RANDOM, "--dry-run", "--hours", "0.05"])
    config = load_config(Path("runs/start/config.py"))
    folders = [Path(config["data"][split]["folder"]) for split in ("train", "val")]
    counts = [[len(list((folder / name).iterdir())) for name in ("rose", "tulip")] for folder in folders]
    assert [sum(column) for column in zip(*counts)] == [12, 12] and all(counts[1])


@pytest.mark.parametrize("task", ["detection", "keypoints", "instance", "classification", "semantic", "panoptic"])
def test_images_are_not_mirrored_where_names_of_classes_are_sides(task):
    choice = start.StartChoice(224, "fp32", "", "small", flips=False)
    mirrored, still = (
        load_config(f"start/{task}:{options.replace(' ', '')}", check=False)["data"]["train"]["transforms"]
        for options in (replace(choice, flips=True).options(None), choice.options(None))
    )
    found = [
        re.findall("'type': 'HorizontalFlip', 'p': ([0-9.]+)|'flip_probability': ([0-9.]+)", str(transforms))
        for transforms in (mirrored, still)
    ]
    assert [{*map("".join, values)} for values in found] == [{"0.5"}, {"0.0"}]


def test_start_says_that_it_does_not_mirror(world, step_cost, tmp_path, capsys):
    content = json.loads((world / "annotations/instances_train2017.json").read_text())
    content["categories"][0]["name"] = "arrow_left"
    (tmp_path / "arrows.json").write_text(json.dumps(content))
    main([str(world / "train2017"), str(tmp_path / "arrows.json"), RANDOM, "--dry-run", "--hours", "0.1"])
    text = capsys.readouterr().out
    assert (
        "flips     none, as they would make classes such as arrow_left wrong" in text and "mirrored texts" not in text
    )
    assert "flips=False" in Path("runs/start/config.py").read_text()


@pytest.mark.parametrize("end", [KeyboardInterrupt(), Interrupted(signal.SIGTERM)])
def test_the_command_of_the_report_is_printed_where_a_signal_ends_the_training(monkeypatch, tmp_path, capsys, end):
    def train_chosen(*args, **options):
        assert "if this process is killed: vitkit test " in capsys.readouterr().out
        raise end

    monkeypatch.setattr(start, "train_chosen", train_chosen)
    with pytest.raises(type(end)):
        start.train_and_report(None, None, None, tmp_path / "start", leaks=[], facts={}, deadline=0.0)
    command = f"vitkit test {tmp_path}/start/run --report {tmp_path}/start/report.html\n"
    assert capsys.readouterr().out.endswith(f"this writes the report: {command}")


def test_a_leak_in_the_users_own_split_is_said_and_does_not_stop(world, step_cost, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        timed_run, "time_steps", lambda command, folder, minutes, epoch_minutes: StepCost(1 / 60, 1 / 60, 1)
    )
    image = next((world / "train2017").glob("*.png"))
    for split, name in itertools.product(("train", "val"), ("rose", "tulip")):
        folder = tmp_path / "flowers" / split / name
        folder.mkdir(parents=True)
        pixels = np.asarray(Image.open(image)) ^ (255 * (name == "tulip"))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / "a.png")
    start.start(tmp_path / "flowers", task="classification", hours=0.05, dry_run=True, overrides=[RANDOM])
    text = capsys.readouterr().out
    assert re.search("fail  leakage +2 val images have the pixels of one of train", text) and "train it" in text
    request = start.StartRequest("classification", tmp_path / "flowers", None, 0.05, 0.2, "cpu", [RANDOM])
    leaks = start.check(Path("runs/start/config.py"), request)
    assert [leak.partition(":")[0] for leak in leaks] == ["2 val images have the pixels of one of train"]


def test_next_start_gets_a_new_folder(world, step_cost, monkeypatch):
    monkeypatch.setattr(
        timed_run, "time_steps", lambda command, folder, minutes, epoch_minutes: StepCost(1 / 60, 1 / 60, 10)
    )
    start_detection(world, "--hours", "0.05")
    start_detection(world, "--hours", "0.05")
    assert Path("runs/start-2/config.py").is_file()


def test_missing_imagenet_weights_are_replaced_by_random_ones_and_reported(monkeypatch, capsys):
    def unreachable(backbone):
        raise CheckpointError("cannot download resnet50.pth (no route).")

    monkeypatch.setattr("vitkit.apps.starter.start.load_pretrained", unreachable)

    def weights(*overrides):
        return imagenet_weights(start.StartRequest("detection", Path("photos"), None, 1, 0.2, "cpu", overrides))

    pretrained, why = weights()
    assert not pretrained and "random weights" in why and "model.backbone.pretrained=FILE" in why
    assert "no route" in capsys.readouterr().out
    assert weights("model.backbone.pretrained=mine.pth") == (True, "weights of mine.pth")
    assert weights("model.backbone.pretrained=none") == (
        False,
        "random weights, as model.backbone.pretrained=none says",
    )
    with pytest.raises(CheckpointError, match="no route"):
        weights("model.backbone.pretrained=true")
    assert weights("model.backbone=swin_tiny") == (False, "those that model.backbone=swin_tiny has by default")


@pytest.mark.parametrize(("depth", "is_resnet50"), [(18, False), (50, True)])
def test_a_network_of_the_backbone_that_a_run_has_pretrained_is_chosen(monkeypatch, depth, is_resnet50):
    monkeypatch.setattr(start, "trained_backbone_spec", lambda path: dict(type="ResNet", depth=depth))
    request = start.StartRequest(
        "detection", Path("photos"), None, 1, 0.2, "cpu", ("model.backbone.pretrained=runs/x",)
    )
    assert imagenet_weights(request) == (is_resnet50, "weights of runs/x")


def test_what_is_printed_and_written_with_overrides_is_true(world, step_cost, capsys):
    start_detection(world, "--hours", "0.1", "train.epochs=3")
    out, text = capsys.readouterr().out, Path("runs/start/config.py").read_text()
    assert "3 epochs: 26 steps of 0.70 s, 0 min\n" in out  # a dry run, and epochs that are given, measure nothing again
    assert "expected  AP 0.488" in out and "% of 0.1 h" not in text
    assert "pixels are chosen where" not in text  # the images have 64 pixels
    assert load_config(Path("runs/start/config.py"))["train"]["eval_every"] == 1
    main(
        [str(world / "train2017"), str(world / "annotations/instances_train2017.json"), "model.backbone=swin_tiny"]
        + ["--dry-run", "--hours", "0.1", "--device", "cpu", "--run-dir", "other"]
    )
    out = capsys.readouterr().out
    assert (
        "weights   those that model.backbone=swin_tiny has by default" in out and "chosen    DINO on swin_tiny, " in out
    )
    assert "expected  without the overrides: AP 0.488" in out
    assert load_config(Path("other/config.py"))["model"]["backbone"]["out_features"] == ["res3", "res4", "res5"]


def test_a_precision_that_is_given_is_the_only_one_that_is_timed_and_named(world, step_cost, capsys):
    start_detection(world, "--hours", "0.1", "train.precision='bf16'")
    assert step_cost[1] == [(224, "bf16")]
    assert "random weights, 224 pixels, bf16, " in capsys.readouterr().out
    assert "the faster one" not in Path("runs/start/config.py").read_text()


def test_steps_are_timed_whatever_the_number_of_epochs_and_for_minutes_at_most(world, step_cost, monkeypatch):
    timed = []

    def time_steps(command, folder, minutes, epoch_minutes):
        config = load_config(command[2], [word for word in command[3:] if "=" in word])
        timed.append((config["train"]["epochs"], minutes))
        return StepCost(1 / 60, 1 / 60, 8)

    monkeypatch.setattr(timed_run, "time_steps", time_steps)
    start_detection(world, "--hours", "100", "train.epochs=1")
    assert timed == [(1000, timed_run.LONGEST_TIMING)] * 2
    assert load_config(Path("runs/start/config.py"))["train"]["epochs"] == 1


def test_an_announcement_that_steps_are_measured_again_is_true():
    request = start.StartRequest("detection", Path("photos"), None, 1, 0.2, "cpu")
    assert request.is_paced and not replace(request, overrides=("train.epochs=10",)).is_paced


def test_smallest_size_is_used_if_an_epoch_fits_only_there(world, step_cost, monkeypatch):
    read = own_data.read_own_data
    monkeypatch.setattr(start, "read_own_data", with_short_side(read, 480))
    monkeypatch.setattr(
        timed_run, "time_steps", lambda command, folder, minutes, epoch_minutes: StepCost(1 / 60, 1 / 60, 8000)
    )
    config = start_detection(world, "--hours", "3")  # 9180 steps: 1.1 epochs
    assert config["train"]["epochs"] == 1
    assert config["data"]["val"]["transforms"]["short_side"] == 224


def test_empty_folder_is_reused(tmp_path):
    assert start.make_free_folder(tmp_path / "a") == start.make_free_folder(tmp_path / "a") == tmp_path / "a"
    (tmp_path / "a/config.py").touch()
    assert start.make_free_folder(tmp_path / "a") == tmp_path / "a-2"
    with pytest.raises(
        ConfigError, match=r"config\.py/b: cannot be written \(Not a directory\)\. Choose another folder"
    ):
        start.make_free_folder(tmp_path / "a/config.py/b")


def test_epochs_are_fitted_to_what_steps_take_during_training(step_cost, world, monkeypatch, capsys):
    calls, plans = [], iter([(240, 0.6), (67, 2.4), (None, 2.4)])

    def train(config=None, *, run_dir=None, resume=None, device, hooks=(), train=None):
        (pace,) = hooks
        calls.append((resume, round(pace.deadline - now), pace.evaluation_seconds, (train or {}).get("epochs")))
        pace.epochs, pace.step_seconds = next(plans)
        pace.evaluation_seconds = 7.0
        return SimpleNamespace(path=Path("runs/start/run"))

    monkeypatch.setattr(start.api, "train", train)
    start_detection(world, "--hours", "0.5")
    request = start.StartRequest("detection", Path("photos"), Path("labels.json"), 0.5, 0.2, "cpu")
    choice = start.StartChoice(240, "fp32", "random weights", "small", epochs=480, cost=StepCost(0.005, 0.005, 10))
    data = start.OwnData("24 images", 17, 7, 64, "")
    now = float(round(time.monotonic()))  # 600 s after it are exactly 600
    start.train_chosen(request, data, choice, Path("runs/start"), deadline=now + 1800)
    run = Path("runs/start/run")
    assert calls == [(None, 1800, None, None), (run, 1800, 7.0, 240), (run, 1800, 7.0, 67)]
    assert load_config(Path("runs/start/config.py"))["train"]["epochs"] == 67
    assert "paced     0.60 s a step: 240 epochs in all" in capsys.readouterr().out
    # Two thirds of the time have passed before training: there is time for a third of the epochs.
    calls.clear()
    plans = iter([(None, 0.3)])
    monkeypatch.setattr(timed_run, "time", SimpleNamespace(monotonic=lambda: now))
    start.train_chosen(request, data, choice, Path("runs/start"), deadline=now + 600)
    assert load_config(Path("runs/start/config.py"))["train"]["epochs"] == 160


def test_what_the_doctor_shows_is_shown(world, step_cost, monkeypatch, capsys):
    monkeypatch.setattr(start, "SLOW_CHECKS", ("overfit",))
    start_detection(world, "--hours", "0.1")
    shown = capsys.readouterr().out
    issues = vitkit.diagnose("runs/start/config.py", skip=start.SLOW_CHECKS, device="cpu")
    unusual = [issue for issue in issues if issue.verdict != "ok"]
    assert unusual and all(issue.message in shown for issue in unusual)
    assert "`vitkit doctor runs/start/config.py` also checks overfit" in shown


def test_text_prompted_detector_is_a_baseline_in_the_report(world, step_cost, monkeypatch, capsys):
    reported = {}

    def train_and_report(request, data, choice, folder, *, leaks, facts, deadline):
        reported.update(facts)
        return None, None

    monkeypatch.setattr(start, "train_and_report", train_and_report)
    annotations = world / "annotations/instances_train2017.json"
    main([str(world / "train2017"), str(annotations), RANDOM, "--zero-shot", "shapes_grounding"])
    score = re.fullmatch(r"bbox/AP (0\.\d+)", reported["zero-shot shapes_grounding"])
    assert float(score[1]) > 0.1  # it knows shapes with their colors, and is asked for shapes
    assert f"zero-shot shapes_grounding: {score[0]}" in capsys.readouterr().out


def test_baseline_that_cannot_be_scored_is_said_and_does_not_end_the_run(world, step_cost, monkeypatch, tmp_path):
    reported, content = {}, json.loads((world / "annotations/instances_train2017.json").read_text())
    content["categories"][0]["name"] = "St. Bernard"
    (tmp_path / "labels.json").write_text(json.dumps(content))
    monkeypatch.setattr(start, "train_and_report", lambda *_, facts, **__: reported.update(facts) or (None, None))
    main([str(world / "train2017"), str(tmp_path / "labels.json"), RANDOM, "--zero-shot", "shapes_grounding"])
    assert "not scored: " in reported["zero-shot shapes_grounding"]
    assert "St. Bernard" in reported["zero-shot shapes_grounding"]


@pytest.mark.slow
def test_photos_are_trained_on_and_reported(world, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main([str(world / "train2017"), str(world / "annotations/instances_train2017.json"), RANDOM, "--hours", "0.03"])
    out = capsys.readouterr().out
    assert "reached   bbox/AP" in out and "better    vitkit start" in out
    assert Path("runs/start/report.html").stat().st_size > 10_000
    assert Path("runs/start/run/best.pth").is_file()
    (measured,) = read_metrics("runs/start/run/best.pth")  # for a model card
    assert measured.data == "train2017" and 0 <= measured.metrics["bbox/AP"] <= 1


def test_score_is_that_of_the_best_metric_or_says_why_there_is_none():
    results = [{"bbox/AP": 0.25, "loss": 2.0}, {"bbox/AP": -1.0}, {"loss": 1.0}]
    assert start.describe_score("bbox/AP", results) == "bbox/AP 0.250"
    assert start.describe_score("bbox/AP", results[1:]) == "bbox/AP cannot be measured: no object"
    assert start.describe_score(None, results) == "no score, by train.best_metric=none"
