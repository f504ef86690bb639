import json
from pathlib import Path

import pytest
from helpers.starting import RANDOM, start_detection

from vitkit import load_config
from vitkit.apps.starter import start, timed_run
from vitkit.errors import ConfigError
from vitkit.tools.start import main


def test_too_little_time_for_an_epoch_is_an_error_that_says_how_much_is_enough(world, step_cost, capsys):
    with pytest.raises(SystemExit) as stopped:
        start_detection(world, "--hours", "0.001")
    assert "too short for one epoch of 17 images" in str(stopped.value) and "The minimum is --hours 0.0" in str(
        stopped.value
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(hours=float("inf")), "hours=inf: expected a number above 0"),
        (dict(overrides=["epochs"]), "override 'epochs' does not parse"),
        (dict(zero_shot="shapes_dino"), "zero_shot='shapes_dino': takes no text, so it can find only the classes"),
        (dict(zero_shot="no_such_model"), "no_such_model"),
        (dict(zero_shot="shapes_grounding", task="semantic"), "is for task='detection', not 'semantic'"),
    ],
)
def test_arguments_without_a_meaning_are_errors(world, step_cost, arguments, message):
    with pytest.raises(ConfigError, match=message):
        start.start(world / "train2017", world / "annotations/instances_train2017.json", device="cpu", **arguments)


def test_too_short_a_time_is_refused_before_anything_is_timed(world, step_cost, monkeypatch):
    monkeypatch.setattr(timed_run, "time_steps", pytest.fail)
    with pytest.raises(SystemExit, match="too short for one epoch of 17 images, which takes 0.0 min here"):
        start_detection(world, "--hours", "0.00001")


def test_hopeless_settings_are_refused_after_the_first(world, step_cost):
    step_cost[0].update(fp32=10.0, bf16=10.0)
    with pytest.raises(SystemExit, match="too short for one epoch of 17 images, which takes 1.4 min here"):
        start_detection(world, "--hours", "0.005")
    assert step_cost[1] == [(224, "fp32")]


@pytest.mark.parametrize(
    "name", ['a"""\nraise SystemExit("run")\n"""b', "\\U0001", "\N{OWL} 'a' \"b\"", "a\x0cb\u2028c", "#"]
)
def test_names_of_files_do_not_become_code(world, step_cost, tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    for split, part in (("train", slice(16)), ("val", slice(16, None))):
        content = json.loads((world / "annotations/instances_train2017.json").read_text())
        content["images"] = content["images"][part]
        ids = {image["id"] for image in content["images"]}
        content["annotations"] = [a for a in content["annotations"] if a["image_id"] in ids]
        content["categories"] = [
            {**c, "name": f"{c['name']} {''.join(filter(str.isprintable, name))}"} for c in content["categories"]
        ]
        (folder / f"{split} {name}.json").write_text(json.dumps(content))
    (tmp_path / f"{name} images").symlink_to(world / "train2017")
    main([str(tmp_path / f"{name} images"), str(folder), RANDOM, "--dry-run", "--hours", "0.1"])
    config = load_config(Path("runs/start/config.py"))
    assert config["data"]["train"]["images"] == str((world / "train2017").resolve())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no file or folder 'nowhere'"),
        (["nowhere", "modl.num_queries=3"], "detection.py: modl: unknown key 'modl'. Did you mean 'model'?"),
        (
            ["{world}/train2017", "{world}/annotations/instances_train2017.json", "--task", "keypoints"],
            "has no object with a keypoint. Choose --task detection",
        ),
        (["{world}/train2017"], "labels.json. Without annotations, a backbone can be trained: vitkit pretrain "),
        (["{world}/train2017", "--task", "semantic"], "also give the folder of the label images"),
        (
            ["{world}/train2017", "{world}/annotations/instances_train2017.json", "--task", "classification"],
            "CLASS/*.jpg",
        ),
    ],
)
def test_wrong_data_is_named(world, step_cost, arguments, message):
    with pytest.raises(SystemExit, match="(?s).*" + message.replace("*", r"\*")):
        main([argument.format(world=world) for argument in arguments])


def test_missing_images_are_an_error_that_does_not_ask_for_more(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().err.endswith("the following arguments are required: IMAGES\n")


def test_options_are_checked(capsys):
    for wrong in (["--hours", "0"], ["--hours", "inf"], ["--val-fraction", "1"], ["a", "b"]):
        with pytest.raises(SystemExit):
            main(["photos", *wrong])
