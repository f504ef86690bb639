"""Which file a name stands for, and that no other file is run."""

import os
from pathlib import Path

import pytest

from vitkit.apps.doctor import diagnose
from vitkit.apps.inference import find_model
from vitkit.config import load_config
from vitkit.errors import ConfigError
from vitkit.weights import find_weights

RUNS = "path: __import__('pathlib').Path('ran').touch()\ntrain: images\nnames: [a]\n"
"""A YOLO data.yaml, which is Python as well."""


@pytest.mark.parametrize(
    "name", ["data.yaml", "data.YML", "config.txt", "config", "config.PY", "config.pyc", "a.py.bak"]
)
def test_only_a_file_that_ends_in_py_is_run(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(RUNS + "def config(): return {}\n" * ("y" not in name.lower()))
    for text in (name, f"./{name}", str(tmp_path / name), f"{name}:size=3"):
        with pytest.raises(ConfigError) as caught:
            load_config(text)
        assert "\n" not in str(caught.value) and ("=" in text or "is not a config" in str(caught.value))
        assert ("vitkit start" in str(caught.value)) is (name.startswith("data") and "=" not in text)
    assert os.listdir() == [name]


@pytest.mark.parametrize("name", ["quickstart/detr", "detr_r50", "mask2former:backbone=swin_tiny"])
def test_nothing_in_the_working_directory_replaces_an_installed_config(tmp_path, monkeypatch, name):
    expected = load_config(name)
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("def config():\n    open('ran', 'w')\n")
    assert load_config(name) == expected and not Path("ran").exists()
    Path(name).unlink()
    Path(name).mkdir()
    (Path(name) / "config.json").write_text("{}")
    assert load_config(name) == expected
    with pytest.raises(ConfigError, match="config.json: data not set"):
        diagnose(f"./{name}", only=["queries"])
    with pytest.raises(ConfigError, match="is a folder; expected a config"):
        load_config(f"./{name}")
    if ":" not in name:
        with pytest.raises(ConfigError, match=rf"write it as a path, \./{name}\."):
            find_model(name)
        with pytest.raises(ConfigError, match=rf"write it as a path, \./{name}\."):
            find_weights(name)
        assert find_model(f"./{name}", "w.pth").config == {}


def test_annotations_are_not_taken_for_a_saved_config(tmp_path):
    (tmp_path / "labels.json").write_text('{"images": [], "annotations": [], "categories": []}')
    with pytest.raises(ConfigError, match="annotations, not a config. Use `vitkit start IMAGES"):
        load_config(tmp_path / "labels.json")


@pytest.mark.parametrize(
    ("name", "override", "expected"),
    [
        ("deimv2", "size=atto", "deimv2:size=atto"),
        ("deimv2_s_coco", "size=atto", "deimv2:size=atto"),
        ("mask2former:backbone=swin_tiny,data=ade20k", "backbone=r50", "mask2former:backbone=r50,data=ade20k"),
        ("start/detection", "size=320", "start/detection:size=320"),
    ],
)
def test_an_override_of_an_argument_says_how_to_write_it(name, override, expected):
    with pytest.raises(ConfigError, match=f"unknown key .* an argument of the config's function: {expected}$"):
        load_config(name, [override])
    with pytest.raises(ConfigError) as error:
        load_config(name, ["sise=atto"])
    assert "argument" not in str(error.value)
