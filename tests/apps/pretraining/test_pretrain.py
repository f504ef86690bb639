"""From images without labels to a backbone that others start from."""

import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit import load_config, pretrain
from vitkit.apps.pretraining import pretrain as pretraining
from vitkit.apps.pretraining.methods import METHODS, choose_method
from vitkit.apps.pretraining.photos import Photos, check_photos, leave_out_lost
from vitkit.apps.starter import timed_run
from vitkit.apps.starter.child_runs import StepCost
from vitkit.apps.training import api
from vitkit.data.datasets.unlabeled_images import UnlabeledImages
from vitkit.engine.hooks import Hook
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.registry import BACKBONES
from vitkit.tools.pretrain import main
from vitkit.weights import load_pretrained, read_checkpoint

TINY = ["model.backbone.depth=1", "model.backbone.d_model=16", "model.backbone.num_heads=2", "data.num_workers=0"]
SHORT = [*TINY, "model.decoder_depth=1", "model.decoder_d_model=16", "model.decoder_num_heads=2", "train.epochs=3"]
TAIL = ["data.num_workers=0", "train.epochs=2"]
OPTIONS = dict(method="mae", device="cpu", overrides=SHORT)


def write_photos(folder: Path, count: int = 5, *, side: int = 130, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for k in range(count):
        pixels = rng.integers(0, 256, (side // 10, side // 10 + k, 3), np.uint8)
        Image.fromarray(pixels).resize((side + 10 * k, side)).save(folder / f"{k}.png")
    return folder


@pytest.fixture
def photos(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_photos(tmp_path / "photos")


@pytest.fixture
def step_seconds(monkeypatch):
    """Let a step take the seconds in `step_seconds[0]` at 128 pixels; more at larger sizes."""
    seconds = [1.0]

    def time_steps(command, folder, minutes, epoch_minutes):
        size = load_config(command[2])["data"]["train"]["transforms"]["size"]
        cost = seconds[0] / 60 * (size / 128) ** 2
        return StepCost(cost, cost, 1.0)

    monkeypatch.setattr(timed_run, "time_steps", time_steps)
    return seconds


def test_what_cannot_be_learned_from_is_left_out_and_named(photos, capsys):
    (photos / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 not a photo")
    Image.new("RGB", (200, 31)).save(photos / "flat.png")
    shutil.copy(photos / "0.png", photos / "0 (copy).png")
    Image.fromarray(np.arange(40000, dtype=np.uint16).reshape(200, 200)).save(photos / "deep.png")
    Image.new("CMYK", (90, 80)).save(photos / "ink.jpg")
    frames = [Image.new("RGB", (50, 50), (90 * k,) * 3) for k in range(2)]
    frames[0].save(photos / "moving.gif", save_all=True, append_images=frames[1:])
    found = check_photos(photos, photos.parent)
    assert found.count == 5 + 3  # with the deep one, the CMYK one and the first frame
    listed = [Path(line).name for line in Path(found.source).read_text().splitlines()]
    assert {"deep.png", "ink.jpg", "moving.gif"} < {*listed} and not {"broken.jpg", "flat.png"} & {*listed}
    notes = "\n".join(found.notes)
    assert "1 unreadable file left out: broken.jpg: " in notes and "cannot decode" in notes
    assert "1 image below 32 pixels left out: flat.png" in notes
    assert "1 copy of other images left out: 0.png" in notes  # "0 (copy).png" comes first
    assert "1 image of 16 bits, of which the upper 8 are used: deep.png" in notes


def test_names_that_no_list_can_have_are_left_out_and_named(photos):
    for name in ("two\nlines.png", "space.png ", os.fsdecode(b"\xff.png")):
        shutil.copy(photos / "0.png", photos / name)
    found = check_photos([*map(str, photos.iterdir())], photos.parent)
    listed = UnlabeledImages(found.source)
    assert len(listed) == found.count == 5 and all(listed.image_path(index).is_file() for index in range(5))
    assert any(note.startswith("3 images left out, whose name no line of UTF-8 text can have") for note in found.notes)


def test_shown_images_that_are_lost_later_are_left_out_when_a_run_goes_on(photos, capsys):
    found = check_photos(photos, photos.parent)
    (photos / "1.png").unlink()
    (photos / "2.png").write_bytes(b"x")
    leave_out_lost(found)
    assert [Path(name).name for name in UnlabeledImages(found.shown).image_ids] == ["0.png", "3.png", "4.png"]
    assert "2 images are no longer readable, and not shown" in capsys.readouterr().out
    assert len(UnlabeledImages(found.source)) == 5  # training replaces them, in as many steps
    shutil.rmtree(photos)
    with pytest.raises(DataError, match=r"shown\.txt: of 3 images that .* 0 can still be read\. Put them back where"):
        leave_out_lost(found)


def test_of_many_images_some_are_decoded_and_all_headers_read(photos, monkeypatch):
    monkeypatch.setattr("vitkit.apps.pretraining.photos.MAX_DECODED", 2)
    monkeypatch.setattr("vitkit.apps.pretraining.photos.NUM_SHOWN", 2)
    Image.new("RGB", (9, 9)).save(photos / "9.png")
    found = check_photos(photos, photos.parent)
    assert found.count == 5 and len(Path(found.shown).read_text().splitlines()) == 2


def test_images_that_are_not_files_are_taken_from_their_dataset(tmp_path):
    spec = dict(type="ShapesDetection", num_images=3, image_size=48)
    found = check_photos(spec, tmp_path)
    assert (found.source, found.shown, found.count) == (spec, spec, 3)


def error_of(capsys, *arguments: str) -> str:
    """Return what the command says when it fails."""
    with pytest.raises(SystemExit) as error:
        main([*arguments])
    return f"{error.value}\n{capsys.readouterr().err}"


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_images_are_an_error_that_says_what_was_wrong(tmp_path, capsys, count):
    write_photos(tmp_path / "photos", count)
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    error = error_of(capsys, str(tmp_path / "photos"), "--run-dir", str(tmp_path / "run"))
    assert f"photos': {count} image" in error and "expected at least 2. Add some. 1 unreadable file left out" in error
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty' has no image"):
        pretrain(tmp_path / "empty", run_dir=tmp_path / "run")


def test_the_time_decides_size_and_epochs(photos, step_seconds, capsys):
    def chosen(**options):
        result = pretrain(photos, method="mae", dry_run=True, device="cpu", **options)
        return load_config(result.config)

    config = chosen(hours=1)
    # 2880 steps of 5 images in about 20 epochs; there are fewer than the 32 images that a step usually has.
    assert config["data"]["images_per_gpu"] == config["train"]["images_per_step"] == 5
    assert config["data"]["train"]["repeats"] == 144 and config["train"]["epochs"] == 20
    assert config["model"]["backbone"]["image_size"] == 128  # as the photos are 130 pixels high
    assert "5 images a step in place of 32, as there are no more" in capsys.readouterr().out
    write_photos(photos, side=300)
    step_seconds[0] = 0.01
    assert chosen(hours=1)["model"]["backbone"]["image_size"] == 224
    step_seconds[0] = 100.0
    with pytest.raises(ConfigError, match=r"--hours 1: too short: there is time for 28 steps; .* --hours 1\.7"):
        chosen(hours=1)


@pytest.mark.parametrize(
    ("backbone", "size"), [("vit_small_patch14_reg4_dinov2", 126), ("vit_small_patch16_dinov3", 128)]
)
def test_weights_of_mae_fit_the_backbone_of_that_name_whatever_its_patches_and_positions(
    photos, step_seconds, backbone, size
):
    done = pretrain(photos, backbone=backbone, dry_run=True, **OPTIONS)
    config = load_config(done.config)
    assert config["data"]["train"]["transforms"]["size"] == config["model"]["backbone"]["image_size"] == size
    trained = BACKBONES.build(config["model"]["backbone"])
    torch.save(trained.state_dict(), "trained.pth")
    small = {key: config["model"]["backbone"][key] for key in ("depth", "d_model", "num_heads")}
    taker = BACKBONES.build({"type": backbone, "pretrained": "trained.pth", **small})
    assert load_pretrained(taker) and trained.state_dict().keys() == taker.state_dict().keys()


def test_epochs_of_the_command_are_those_of_the_plan(photos, step_seconds):
    done = pretrain(photos, dry_run=True, **{**OPTIONS, "overrides": [*TINY, "train.epochs=10"]})
    assert pretraining.Plan.read(done.folder).choice.epochs == 10
    assert load_config(done.config)["train"]["eval_every"] == 2


def test_images_of_a_step_of_the_command_are_those_of_the_plan(photos, step_seconds, capsys):
    overrides = [*TINY, "train.images_per_step=20"]
    done = pretrain(photos, dry_run=True, **{**OPTIONS, "overrides": overrides})
    choice, config = pretraining.Plan.read(done.folder).choice, load_config(done.config)
    assert (choice.images, choice.batch) == (20, 5) and config["data"]["images_per_gpu"] == 5
    assert config["train"]["images_per_step"] == 20 and ", 20 images a step, " in capsys.readouterr().out
    request = pretraining.PretrainRequest(str(photos), "dino", None, "resnet18", 1.0, None, overrides)
    plan = pretraining.Plan(request, Photos("", "", 640, 130, []), choice)
    assert pretraining.with_wanted_images(choice, plan, minutes=1e6) == choice


def test_an_epoch_has_a_part_of_many_photos(photos, step_seconds):
    request = pretraining.PretrainRequest(str(photos), "dino", None, "resnet18", 1.0, None, [])
    many = Photos(str(photos), str(photos), 10_000, 130, [])
    choice = pretraining.choose(
        pretraining.Plan(request, many, pretraining.PretrainChoice(128, 16)), Path(), "cpu"
    ).choice
    # 2880 steps of 16 images are less than five times all of them, of which the warm-up would be one.
    assert choice.repeats == 0.2304 and choice.epochs == 20 and choice.epochs * choice.steps_per_epoch(many) == 2880
    config = load_config("config.py")
    assert config["data"]["train"]["repeats"] == 0.2304 and "many: an epoch has a part" in Path("config.py").read_text()
    assert "20 epochs, each with 0.23 of the images: 2880 steps" in choice.describe(many)


def test_dino_has_64_images_a_step_if_there_is_time_for_enough_steps(photos, step_seconds, capsys):
    request = pretraining.PretrainRequest(str(photos), "dino", None, "resnet18", 1.0, None, [])
    many = Photos(str(photos), str(photos), 640, 130, [])
    for seconds, images in ((0.5, 64), (1.0, 16)):
        step_seconds[0] = seconds
        choice = pretraining.choose(
            pretraining.Plan(request, many, pretraining.PretrainChoice(128, 16)), Path(), "cpu"
        ).choice
        config = load_config("config.py")
        assert config["train"]["images_per_step"] == choice.images == images
        assert (
            config["data"]["images_per_gpu"] == 16
            and choice.epochs * choice.steps_per_epoch(many) * choice.step_minutes <= 48
        )
    printed = capsys.readouterr().out
    assert "batch     64 images a step, in batches of 16: there is time for 1440 such steps\n" in printed
    assert "16 images a step: dino wants 64, of which there would be 720 steps (about --hours 1.4 for 1000)" in printed
    few = Photos(str(photos), str(photos), 63, 130, [])
    assert pretraining.choose(pretraining.Plan(request, few, choice), Path(), "cpu").choice.images == 16


def test_the_config_says_why_and_how(photos, step_seconds):
    result = pretrain(photos, hours=2, dry_run=True, **{**OPTIONS, "overrides": TINY})
    text = result.config.read_text()
    assert "# 5 images, 130 pixels at the short side (median)\n" in text
    command = f"vitkit pretrain {photos} --method=mae --backbone=vit_tiny_patch16 --hours=2 --run-dir=runs/pretrain"
    assert f"# Written by: {command} " in text and "5760 steps of 1.00 s, 96 min\n" in text
    assert "# The photos are few" in text and "model.backbone.depth=1" in text
    assert result.weights is None and result.after == {} and {"spread", "rank"} == result.before.keys()


def test_method_follows_the_teacher():
    assert choose_method(None, None) == "dino" and choose_method(None, "resnet50") == "distil"
    for arguments, message in (
        (("distil", None), r"--method distil: needs a teacher\. Give one whose weights there are"),
        (("mae", "resnet50"), "only --method distil has a teacher"),
        (("dinov2", None), "unknown. Did you mean 'dino'"),
    ):
        with pytest.raises(ConfigError, match=message):
            choose_method(*arguments)


def test_paths_are_found_from_another_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "lr=1").mkdir(parents=True)
    assert pretraining.as_absolute("runs/lr=1") == str(tmp_path / "runs" / "lr=1")
    assert pretraining.as_absolute("resnet50=w.pth") == f"resnet50={tmp_path / 'w.pth'}"
    for name in ("resnet50", "resnet50=https://a.org/w.pth", "resnet50=timm/resnet50.a1_in1k", "vit=hf:facebook/vit"):
        assert pretraining.as_absolute(name) == name
    assert pretraining.as_plain(["a.png"]) == [str(tmp_path / "a.png")]
    assert pretraining.as_plain({"type": "x", "source": [Path("y")]}) == {"type": "x", "source": ["y"]}
    with pytest.raises(ConfigError, match="photos: .*not Tensor. Give a dataset's spec as in a config"):
        pretraining.as_plain({"type": "x", "of": torch.zeros(1)})
    assert pretraining.as_plain("photos/*.jpg") == str(tmp_path / "photos/*.jpg")


def test_wrong_options_are_errors(photos, capsys):
    for arguments, message in (
        (["--hours", "0"], "--hours 0: expected a finite number above 0"),
        (["labels.json"], "labels.json; put a pattern in quotes"),
        (["--method", "mae", "model.backbon.depth=2"], "backbon"),
        (["--resume", str(photos)], "has no pretrain.json, as vitkit pretrain writes it. Start it anew."),
        (["--backbone", "resnet19"], "resnet19"),
        (["--method", "dinov2"], "--method dinov2: unknown. Did you mean 'dino'"),
        (["--method", "mae", "--backbone", "resnet18"], "--method mae: resnet18 is not a plain ViT"),
        (["--method", "mae", "--backbone", "vitdet_base"], "--method mae: vitdet_base is not a plain ViT"),
        (["--labeled", "nowhere"], "nowhere: no such folder. Expected one with a folder of images for each class."),
    ):
        assert message in error_of(capsys, str(photos), *arguments)
    assert "expected images to learn from, such as a folder, or --resume FOLDER" in error_of(capsys)
    assert "give images to learn from" in error_of(capsys, "")  # an empty variable of the shell, not this folder


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ("vit_tiny_patch16", "no route.*teacher NAME=FILE"),
        ("resnet18=nowhere.pth", "nowhere.pth"),
        ("runs/nothing", "runs/nothing"),
        ("resnt50", r"'resnt50' is neither.*Did you mean 'resnet50' or .*\? There are \d+ names\."),
    ],
)
def test_a_teacher_without_weights_is_an_error_before_anything_else_and_leaves_nothing(
    photos, monkeypatch, teacher, message
):
    def unreachable(url, *, checksum):
        raise CheckpointError("cannot download it (no route).")

    monkeypatch.setattr("vitkit.weights.locate.fetch_file", unreachable)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        pretrain(photos, teacher=teacher, device="cpu", overrides=["data.num_workers=0"])
    assert not Path("runs/pretrain").exists()


def test_a_labeled_folder_has_several_classes(photos, tmp_path):
    write_photos(tmp_path / "labeled/cats")
    (tmp_path / "labeled/dogs").mkdir()
    with pytest.raises(ConfigError, match=r"labeled: has images of 1 class \(cats\), so that every guess is right"):
        pretrain(photos, labeled=tmp_path / "labeled", device="cpu")
    assert not Path("runs/pretrain").exists()


def labeled(folder: Path) -> Path:
    for k, name in enumerate(("cats", "dogs")):
        write_photos(folder / name, 3, seed=10 + k)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a finished run, its photos and a labeled folder."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            timed_run, "time_steps", lambda command, folder, minutes, epoch_minutes: StepCost(0.001, 0.001, 1.0)
        )
        return pretrain(
            write_photos(folder / "photos"), run_dir=folder / "run", labeled=labeled(folder / "labeled"), **OPTIONS
        )


def test_a_run_ends_with_weights_and_a_report(whole):
    folder = whole.folder
    assert {path.name for path in folder.iterdir() if path.suffix != ".png" and path.name[0] != "."} >= {
        "backbone.pth", "last.pth", "config.py", "config.json", "images.txt", "report.html", "log.jsonl", "run.json",
    }  # fmt: skip
    config = load_config(folder / "config.py")
    backbone = BACKBONES.build({**config["model"]["backbone"], "pretrained": str(folder)})
    assert load_pretrained(backbone) == str(folder)
    state = read_checkpoint(folder / "last.pth")["model"]
    assert all(torch.equal(value, state[f"backbone.{key}"]) for key, value in backbone.state_dict().items())
    names = {"knn/top1", "knn/top5", "probe/top1", "probe/top5"}
    assert whole.before.keys() == names == whole.after.keys()
    page = whole.report.read_text()
    for text in ("k-NN top-1 accuracy", "linear probe", "Nearest neighbors", "better than chance", "data:image/jpeg"):
        assert text in page
    assert page.count("data:image/jpeg") == 1 + 5 * 4  # the curves, and each photo with three others
    assert not (folder / "timing").exists()


def test_a_model_with_other_pixels_is_warned_of(whole, caplog):
    spec = {**load_config(whole.folder / "config.py")["model"]["backbone"], "pretrained": str(whole.folder)}
    load_pretrained(BACKBONES.build(spec))
    assert "pixels" not in caplog.text
    load_pretrained(BACKBONES.build({**spec, "pixel_mean": [0.0] * 3, "pixel_std": [1.0] * 3}))
    assert re.search(
        r"learned from pixels normalized by mean \[0\.485, .* this model's backbone gets them by mean \[0\.0, .*Set "
        r"model\.backbone\.pixel_mean",
        caplog.text,
    )


def test_another_run_gets_another_folder(photos, step_seconds):
    first, second = (pretrain(photos, run_dir="run", dry_run=True, **OPTIONS).folder.name for _ in range(2))
    assert (first, second) == ("run", "run-2")


STAGES = ("check_photos", "measure_features", "time_steps", "train", "conclude")


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_that_is_killed_at_any_moment_goes_on_and_ends_with_the_same_weights(
    whole, tmp_path, monkeypatch, step_seconds, stage
):
    """A kill leaves what was written before it, as an error does that nothing catches."""

    class Killed(BaseException):
        pass

    def killed(*_, **__):
        raise Killed

    def killed_later(hooks, **options):
        return api_train(**options, hooks=[*hooks, Killer()])

    class Killer(Hook):
        def after_step(self, run, step):
            if run.progress.step == 2:
                raise Killed

    api_train = api.train
    source, out = whole.folder.parent / "photos", tmp_path / "run"
    options = dict(OPTIONS, labeled=whole.folder.parent / "labeled", run_dir=out)
    with monkeypatch.context() as patch:
        if stage == "train":
            patch.setattr(api, "train", killed_later)
        else:
            patch.setattr(timed_run if stage == "time_steps" else pretraining, stage, killed)
        with pytest.raises(Killed):
            pretrain(source, **options)
    if stage == "check_photos":  # nothing was done yet
        again = pretrain(source, **options)
    else:
        again = pretrain(resume=out, device="cpu")
    assert again.folder == out and again.before == whole.before and again.after == whole.after
    ours, theirs = (read_checkpoint(run.folder / "backbone.pth")["model"] for run in (again, whole))
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    assert again.report.is_file()


def test_ctrl_c_in_the_timing_of_large_crops_says_how_to_go_on_with_the_same_settings(
    tmp_path, step_seconds, monkeypatch, capsys
):
    write_photos(tmp_path / "photos", 2, side=300)
    step_seconds[0] = 0.01
    options = dict(method="mae", device="cpu", dry_run=True, overrides=TINY)
    whole = pretrain(tmp_path / "photos", run_dir=tmp_path / "run", **options)
    time_steps = timed_run.time_steps

    def interrupted(command, *arguments, **how):
        if load_config(command[2])["data"]["train"]["transforms"]["size"] > 128:
            raise KeyboardInterrupt
        return time_steps(command, *arguments, **how)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(timed_run, "time_steps", interrupted)
        pretrain(tmp_path / "photos", run_dir=tmp_path / "run-2", **options)
    assert f"this goes on with it: vitkit pretrain --resume {tmp_path / 'run-2'}" in capsys.readouterr().out
    again = pretrain(resume=tmp_path / "run-2", device="cpu", dry_run=True)
    ours, theirs = (load_config(run.config) for run in (again, whole))
    assert theirs["data"]["train"]["transforms"]["size"] == 224 and ours["train"] == theirs["train"]
    assert all(ours["data"]["train"][key] == theirs["data"]["train"][key] for key in ("repeats", "transforms"))


def test_time_that_has_passed_before_training_is_planned_for(photos, step_seconds, monkeypatch):
    pretrain(photos, hours=1, dry_run=True, **{**OPTIONS, "overrides": TINY})
    plan = pretraining.Plan.read(Path("runs/pretrain"))
    calls = []

    def train(config, hooks, **_):
        calls.append(config["train"])
        return SimpleNamespace(path=Path("runs/pretrain"))

    monkeypatch.setattr(api, "train", train)
    pretraining.train_planned(plan, Path("runs/pretrain"), "cpu", began=pretraining.time.monotonic() - 1800)
    assert plan.choice.epochs == 20 and load_config("runs/pretrain/config.py")["schedule"]["warmup_epochs"] < 1
    assert calls[0]["epochs"] in (9, 10) and calls[0]["eval_every"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(method="dino"), "was started with method mae, not dino"),
        (dict(backbone="vit_small_patch16"), "was started with backbone vit_tiny_patch16, not vit_small_patch16"),
        (dict(overrides=["train.epochs=9"]), "was started with overrides"),
    ],
)
def test_a_run_is_not_resumed_as_another_one(whole, change, message):
    before = (whole.folder / "pretrain.json").read_text()
    with pytest.raises(ConfigError, match=rf"{message}.*for another run, leave out --resume"):
        pretrain(resume=whole.folder, **change)
    assert (whole.folder / "pretrain.json").read_text() == before and (whole.folder / "last.pth").is_file()


@pytest.mark.parametrize("is_paced", [True, False])
def test_an_interrupted_training_names_one_command(photos, step_seconds, monkeypatch, capfd, is_paced):
    class Stopped(Hook):
        def after_step(self, run, step):
            run.guard.stop_signal = signal.SIGINT

    api_train = api.train
    with_stop = lambda hooks, **how: api_train(**how, hooks=[*hooks, Stopped()])  # noqa: E731
    monkeypatch.setattr(api, "train", with_stop)
    overrides = TINY if is_paced else SHORT
    with pytest.raises(KeyboardInterrupt):
        pretrain(photos, **{**OPTIONS, "overrides": overrides})
    printed = capfd.readouterr().out
    assert "SIGINT: saved. Resume with:\n    vitkit pretrain --resume runs/pretrain\n" in printed
    assert printed.count("--resume") == 1 and "goes on" not in printed


def test_sigterm_outside_of_training_says_how_to_go_on(photos, step_seconds, monkeypatch, capsys):
    monkeypatch.setattr(pretraining, "measure_features", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as error:
        main([str(photos), "--method", "mae", "--device", "cpu", *SHORT])
    assert error.value.code == 143 and signal.getsignal(signal.SIGTERM) is before
    assert "interrupted; this goes on with it: vitkit pretrain --resume runs/pretrain\n" in capsys.readouterr().out


def test_a_run_with_another_teacher_is_not_resumed(photos, step_seconds, monkeypatch):
    class Killed(Exception):
        pass

    class Killer(Hook):
        def after_step(self, run, step):
            raise Killed

    def write_teacher(seed):
        torch.manual_seed(seed)
        torch.save(BACKBONES.build("resnet18").state_dict(), "teacher.pth")

    write_teacher(0)
    api_train = api.train
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(api, "train", lambda hooks, **how: api_train(**how, hooks=[Killer()]))
        overrides = ["model.backbone.base_channels=8", *TAIL]
        pretrain(photos, teacher="resnet18=teacher.pth", device="cpu", overrides=overrides)
    write_teacher(1)
    before = Path("runs/pretrain/last.pth").read_bytes()
    with pytest.raises(CheckpointError, match=r"last\.pth: learned from another teacher than .*teacher\.pth is now"):
        pretrain(resume="runs/pretrain", device="cpu")
    assert Path("runs/pretrain/last.pth").read_bytes() == before
    write_teacher(0)
    assert pretrain(resume="runs/pretrain", device="cpu").report.is_file()


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_a_backbone(photos, step_seconds, name, capsys):
    torch.save(BACKBONES.build("resnet18").state_dict(), "teacher.pth")
    narrow = "model.backbone.base_channels=8"
    overrides = {
        "distil": [narrow],
        "mae": SHORT[:-1],
        "dino": [narrow, "model.num_prototypes=16", "model.hidden_channels=16"],
    }[name]
    teacher = "resnet18=teacher.pth" if METHODS[name].has_teacher else None
    done = pretrain(photos, method=name, teacher=teacher, device="cpu", overrides=[*overrides, *TAIL])
    config = load_config(done.config)
    assert config["data"]["train"]["transforms"]["size"] == 128 and config["data"]["images_per_gpu"] == 5
    assert load_pretrained(BACKBONES.build({**config["model"]["backbone"], "pretrained": str(done.folder)}))
    assert done.after["spread"] > 0 and done.report.is_file()
    type_ = "model.backbone=vit_tiny_patch16 " if name == "mae" else ""  # start itself chooses a ResNet
    assert f"ANNOTATIONS {type_}model.backbone.pretrained=runs/pretrain\n" in capsys.readouterr().out
