"""vitkit analyze: counts equal those by hand, those of the originals and the published ones."""

import json
import re

import pytest

import vitkit
from vitkit import build_model, load_config
from vitkit.apps.analysis.clips import CLIPS
from vitkit.apps.analysis.reports.training import TrainingMacs
from vitkit.errors import ConfigError
from vitkit.tools import analyze, analyze_tables
from vitkit.weights import save_checkpoint


def test_training_memory_is_reported_for_both_strategies(capsys):
    arguments = ["swin_tiny", "--training", "8", "--size", "64x64"]
    analyze.main([*arguments, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["ddp"]["weights"] == 4 * 28_288_354 > 7 * report["fsdp"]["weights"]
    assert report["saved_bytes"] > 0
    assert (
        report["ddp"]["total"]
        == sum(report["ddp"][k] for k in ("weights", "gradients", "optimizer")) + report["saved_bytes"]
    )
    analyze.main([*arguments, "--no-macs"])
    printed = capsys.readouterr().out
    assert "a training step on each of 8, fp32" in printed and "states of AdamW" in printed


def test_training_memory_is_reported_without_allocating_it(capsys):
    size = ["--training", "2", "--size", "1024x1024", "--json"]
    reports = []
    for settings in ([], ["train.precision=bf16", "train.activation_checkpointing=true"]):
        analyze.main(["quickstart/mask2former_instance", *settings, *size])
        reports.append(json.loads(capsys.readouterr().out))
    full, less = reports
    assert (full["precision"], full["activation_checkpointing"], full["recomputed_bytes"]) == ("fp32", False, 0)
    assert (less["precision"], less["activation_checkpointing"]) == ("bf16", True) and less["recomputed_bytes"] > 0
    assert less["saved_bytes"] + less["recomputed_bytes"] < 0.6 * full["saved_bytes"]
    assert less["fsdp"]["total"] < less["ddp"]["total"] < full["ddp"]["total"]


def test_training_memory_of_low_rank_updates_is_that_of_what_is_trained(capsys):
    arguments = ["quickstart/classifier", "--training", "1", "--no-macs", "--json"]
    reports = []
    for settings in ([], ["train.lora={'layers': 'backbone.*', 'rank': 2}"]):
        analyze.main([*arguments, *settings])
        reports.append(json.loads(capsys.readouterr().out)["ddp"])
    full, lora = reports
    assert full["gradients"] == full["weights"] < lora["weights"] < 1.2 * full["weights"]
    assert 0 < lora["gradients"] < 0.2 * full["gradients"] and lora["optimizer"] == 2 * lora["gradients"]


TRANSFORMER = [
    "ViT",
    "depth=48",
    "num_heads=16",
    "d_model=1024",
    "classifier.pooling=mean",
    "class_token=false",
    "--attention-matrices",
]


@pytest.mark.parametrize(
    ("options", "stored", "fused"),
    [
        (["patch_size=1", "--size", "128x128"], 768 * 2**30, 48 * 2**20),  # a transformer on pixels
        (["patch_size=16", "--size", "224x224"], 48 * 16 * 196**2 * 4, 48 * 16 * 196 * 4),  # 112.5 MiB
    ],
)
@pytest.mark.usefixtures("fused_attention")
def test_memory_of_attention_matrices_is_reported(options, stored, fused, capsys, caplog):
    analyze.main([*TRANSFORMER, *options, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["stored_bytes"], report["fused_bytes"]) == (stored, fused)
    assert report["largest_layer_bytes"] == stored // 48
    assert "0 attention maps were recorded" not in caplog.text


def test_costs_of_a_config_are_reported(capsys):
    config = "deformable_detr_r50"
    analyze.main([config, "--size", "203x181", "--depth", "1", "--json"])
    report = json.loads(capsys.readouterr().out)
    model = report["parts"][""]
    assert (model["total"], model["trainable"]) == (40_069_665, 39_847_265)
    # The original's, counted by fvcore.
    assert model["macs"] == pytest.approx(9_784_241_320, rel=1e-3)
    assert set(report["parts"]) == {"", "backbone", "neck", "head"}
    assert sum(part["total"] for name, part in report["parts"].items() if name) == model["total"]
    assert not report["unknown"]


def test_the_printed_report_names_parts_and_their_costs(capsys):
    analyze.main(["resnet18", "num_classes=10", "--size", "64x32", "--time", "--repeats", "1", "--depth", "1"])
    out = capsys.readouterr().out
    assert "resnet18, input 1x3x64x32" in out
    assert "ms  peak MiB  saved MiB" in out
    assert "layer4" in out and "11,181,642" in out  # 11,689,512 without 990 classes
    assert "not counted, as in papers: add" in out and "UNKNOWN" not in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "counted"),
    [
        ("detr_r50", 91.165),
        ("detr_r50_dc5", 198.556),
        ("deformable_detr_r50_single_scale", 85.313),
        ("deformable_detr_r50", 185.63),
    ],
)
def test_macs_of_detectors_equal_the_originals(config, counted, capsys):
    analyze.main([config, "--size", "800x1199", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["parts"][""]["macs"] / 1e9 == pytest.approx(counted, rel=2e-3)


def test_table_prints_published_and_counted_figures(capsys):
    analyze.main(["--table", "resnet5*"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["resnet50", "224x224", "25,557,032", "25.557", "4.111", "4.089", "76.1"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["runs/none"], "no file or folder 'runs/none'."),
        (["configs/detr_r50", "train.epoch=2"], "detr_r50.py: train.epoch: unknown key 'epoch'"),
        (["configs/detr_r51"], "is neither a backbone nor a model or a config. Did you mean 'detr_r50'"),
        (["swim_tiny"], "'swim_tiny' is neither a backbone nor a model or a config. Did you mean 'swin_tiny'"),
        (["configs/detr_r05.py"], "no config file 'configs/detr_r05.py'. Did you mean 'detr_r50.py'"),
        (["swin_tiny", "windw=7"], "unknown key 'windw'. Did you mean 'window'"),
        (["swin_tiny", "window"], "override 'window' does not parse; expected KEY=VALUE"),
        (["vit_tiny_patch16", "--size", "8x224"], "images of 8 x 224 pixels: expected at least 16 x 16"),
        (["--table", "swim*"], "no backbone matches 'swim*'"),
    ],
)
def test_errors_name_the_remedy(argv, message):
    with pytest.raises(SystemExit) as error:
        analyze.main(argv)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("model", "overrides", "shape", "size_from"),
    [
        ("resnet18", [], (3, 224, 224), "as published"),
        ("detr_r50", [], (3, 800, 1066), "data.val.transforms, of an image of 480x640"),
        ("rf_detr_n_coco", [], (3, 384, 384), "data.val.transforms, of an image of 480x640"),
        ("quickstart/dino", [], (3, 64, 64), "data.val.image_size"),
        ("quickstart/dino", ["data.val.image_size=96"], (3, 96, 96), "data.val.image_size"),
        ("quickstart/dino", ["data.val=none"], (3, 224, 224), "the default"),
        ("timesformer_divided_k400", [], (3, 8, 224, 224), "data.val.transforms, of an image of 480x640"),
    ],
)
def test_models_are_counted_at_the_size_of_their_validation_images(model, overrides, shape, size_from):
    costs = vitkit.analyze(model, overrides=overrides, macs=False, depth=0)
    assert (costs.input, costs.size_from) == ((1, *shape), size_from)
    other = vitkit.analyze(model, overrides=overrides, macs=False, depth=0, size=(448, 448), batch_size=2)
    assert (other.input, other.size_from) == ((2, *shape[:-2], 448, 448), "")


def test_a_number_is_the_side_of_a_square_in_python():
    assert vitkit.analyze("resnet18", size=64, macs=False).input == (1, 3, 64, 64)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(batch_size=0), "batch_size=0: expected at least 1."),
        (dict(repeats=0, time=True), "repeats=0: expected at least 1."),
        (dict(samples=0), "samples=0: expected at least 1."),
        (dict(size=(0, 64)), "height=0: expected at least 1."),
    ],
)
def test_numbers_below_1_are_errors(arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        vitkit.analyze("resnet18", macs=False, **arguments)


def test_size_that_was_not_given_is_printed_with_its_source(capsys):
    analyze.main(["quickstart/dino", "--no-macs", "--depth", "0"])
    assert "input 1x3x64x64 (size: data.val.image_size; another by --size HxW)" in capsys.readouterr().out
    analyze.main(["quickstart/dino", "--no-macs", "--depth", "0", "--size", "64"])
    assert "input 1x3x64x64\n" in capsys.readouterr().out


def test_config_in_memory_is_analyzed():
    config = load_config("configs/quickstart/classifier.py")
    costs = vitkit.analyze(config, size=(64, 64), depth=1)
    assert costs.parts == vitkit.analyze("quickstart/classifier", size=(64, 64), depth=1).parts
    assert costs.parts[""]["macs"] == sum(row["macs"] for name, row in costs.parts.items() if name)


def test_one_number_is_the_side_of_a_square(capsys):
    analyze.main(["resnet18", "--size", "64", "--json"])
    assert json.loads(capsys.readouterr().out)["input"] == [1, 3, 64, 64]


@pytest.mark.parametrize(
    ("argv", "message"), [([], "a model is needed"), (["swin_tiny", "--size", "0x4"], "expected HEIGHTxWIDTH")]
)
def test_contradictory_command_lines_are_errors(argv, message, capsys):
    with pytest.raises(SystemExit):
        analyze.main(argv)
    assert message in capsys.readouterr().err


def test_joint_attention_costs_more_than_divided_for_many_frames_or_large_crops(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(CLIPS, "frames", [clip for clip in CLIPS["frames"] if clip[0] in (8, 16, 96)])
    monkeypatch.setitem(CLIPS, "crop", [clip for clip in CLIPS["crop"] if clip[1] in (224, 288, 336)])
    # Figure 3 of TimeSformer's paper: about equal at 8 frames of 224 pixels, then far apart.
    analyze.main(["timesformer_[jd]*", "--clips", str(tmp_path / "cost.png"), "--json"])
    rows = json.loads(capsys.readouterr().out)
    macs = {(row["model"].partition("_")[2], row["frames"], row["crop"]): row["macs"] / 1e9 for row in rows}
    assert macs["divided", 8, 224] == pytest.approx(196.0, abs=0.1) and macs["joint", 8, 224] < macs["divided", 8, 224]
    for frames, crop in ((16, 224), (8, 288), (8, 336)):
        assert macs["joint", frames, crop] > macs["divided", frames, crop]
    assert macs["joint", 96, 224] > 3 * macs["divided", 96, 224]
    assert (tmp_path / "cost.png").stat().st_size > 10_000


def test_accuracy_against_macs_is_plotted_by_family(tmp_path, monkeypatch, capsys):
    figures = []
    monkeypatch.setattr(
        "vitkit.apps.analysis.reports.cost_plots.save_figure", lambda figure, path, **_: figures.append(figure)
    )
    analyze.main(["--table", "[sr][ew][is]*", "--no-macs", "--plot", "out.png", "--json"])
    rows = {row["backbone"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["swin_tiny"]["top1"] == 81.2 and rows["swinv2_base_window12"]["top1"] is None
    (axes,) = figures[0].axes
    curves = {line.get_label(): list(zip(*line.get_data())) for line in axes.get_lines()}
    assert curves["swin_*"] == [(4.5, 81.2), (8.7, 83.2), (15.4, 83.5)]
    assert curves["swin_*, ImageNet-22k"] == [(34.5, 86.3)]
    assert [x for x, _ in curves["resnet*"]] == [1.814, 3.664, 4.089, 7.801]
    assert axes.get_xscale() == "log" and {"T", "S", "B", "L", "18", "101"} <= {text.get_text() for text in axes.texts}

    monkeypatch.undo()
    analyze.main(["--table", "resnet*", "--no-macs", "--plot", str(tmp_path / "plots" / "accuracy.png")])
    assert (tmp_path / "plots" / "accuracy.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["swin_tiny", "--plot", "a.png"], r"--plot draws what --table lists: give both"),
        (["--table", "--plot", "swin*"], r"--plot: 'swin\*' does not end in \.png"),
        (["--table", "--plot", "a.pdf"], r"--plot: 'a\.pdf' does not end in \.png"),
        (["--table", "swin_tiny", "--training-macs"], r"counts the training of one config; leave out --table"),
        (["swin_tiny", "--samples", "3", "--training", "2"], r"leave out --training"),
        (
            ["swin_tiny", "--attention-matrices", "--training", "2"],
            r"--training, --attention-matrices: these are different reports",
        ),
        (["--table", "swin*", "--size", "64"], r"--size: has no effect on the report of --table; leave this out"),
        (["swin*", "--clips", "a.png", "depths=[1]", "--time"], r"--time, depths: has no effect .* of --clips"),
        (["swin_tiny", "--attention-matrices", "--depth", "3"], r"--depth: has no effect .* of --attention-matrices"),
        (["swin_tiny", "--training", "2", "--lengths", "8"], r"--lengths: has no effect .* of --training"),
        (["swin_tiny", "--repeats", "3"], r"--repeats are those of --time: give both"),
        (["timesformer_divided", "--clips", "a.pdf"], r"--clips: 'a\.pdf' does not end in \.png"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        analyze.main(words)
    assert re.search(message, capsys.readouterr().err)


def test_plot_of_backbones_without_published_accuracy_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"--plot: none of these backbones has a published top-1 on ImageNet-1k"):
        analyze.main(["--table", "lrnet50", "--no-macs", "--plot", str(tmp_path / "a.png")])


def test_image_backbones_are_refused_for_clips(tmp_path):
    with pytest.raises(SystemExit, match="resnet18: cannot be counted on clips"):
        analyze.main(["resnet18", "--clips", str(tmp_path / "cost.png")])


def test_cost_of_a_training_is_three_forward_passes_of_each_image_in_each_epoch(capsys):
    command = ["quickstart/classifier", "train.epochs=3", "--training-macs"]
    analyze.main([*command, "--batch-size", "2", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["input"] == [2, 3, 64, 64]
    forward = report["parts"][""]["macs"] // 2
    assert report["training"] == {"forward": forward, "samples": 6400, "epochs": 3, "macs": 3 * forward * 6400 * 3}
    analyze.main([*command, "data.train.fraction=0.5"])
    macs, images = f"{forward / 1e6:.4g} M MACs", "3.2 k images"
    total = 3 * forward * 3200 * 3
    line = f"training: 3 x {macs} (an image of 64x64) x {images} x 3 epochs = {total:.2g} MACs ({2 * total:.2g} FLOPs)"
    assert line.replace("e+", "e") in capsys.readouterr().out


def test_head_has_the_classes_of_a_trained_model(tmp_path, capsys):
    config = "quickstart/classifier"
    note = "classes: 1000, the model's default; a run has those of its data: model.num_classes=N"
    analyze.main([config, "--size", "64x64", "--depth", "0"])
    assert note in capsys.readouterr().out
    analyze.main([config, "model.num_classes=3", "--no-macs", "--depth", "0"])
    assert "classes" not in capsys.readouterr().out

    model = build_model(load_config(config)["model"], classes=["a", "b", "c"])
    save_checkpoint(tmp_path / "model.pth", {"model": model.state_dict(), "classes": ["a", "b", "c"]})
    analyze.main([config, str(tmp_path / "model.pth"), "--no-macs", "--depth", "0", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["parts"][""]["total"] == sum(parameter.numel() for parameter in model.parameters())
    assert "default_classes" not in report


def test_cost_of_a_published_training(capsys):
    cost = TrainingMacs(4_100_000_000, 1_280_000, 300, 3 * 4_100_000_000 * 1_280_000 * 300)
    expected = "training: 3 x 4.1 G MACs x 1.28 M images x 300 epochs = 4.7e18 MACs (9.4e18 FLOPs)"
    assert analyze_tables.training_text(cost, "images") == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resnet18", "--samples", "10"], r"resnet18 has no train\.epochs\. Analyze a config"),
        (["resnet18", "--training-macs"], r"resnet18 has no train\.epochs\. Analyze a config"),
        (
            ["resnet50_in1k", "data.root=nowhere", "--training-macs"],
            r"no folder 'nowhere/train'.*Give the images or texts of an epoch: --samples N",
        ),
    ],
)
def test_cost_of_a_training_of_unknown_length_is_refused(words, message):
    with pytest.raises(SystemExit, match=message):
        analyze.main(words)
