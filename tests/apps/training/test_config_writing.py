"""Configs written in full as Python files."""

import json

import pytest

from vitkit.apps.training.config_writing import as_python, write_config
from vitkit.config import config_names, find_config, load_config
from vitkit.config.load import Config
from vitkit.errors import ConfigError
from vitkit.tools.train import main


@pytest.mark.parametrize("name", sorted({find_config(name).file: name for name in config_names()}.values()))
def test_a_written_config_is_the_same_and_imports_nothing(name, tmp_path):
    config = load_config(name, check=False)
    write_config(config, tmp_path / "mine.py")
    text = (tmp_path / "mine.py").read_text(encoding="utf-8")
    assert load_config(tmp_path / "mine.py", check=False) == config
    lines = text.splitlines()
    assert not [line for line in lines if line.startswith(("import ", "from "))]
    assert not [line for line in lines if len(line) > 120 and "https://" not in line]


def test_overrides_and_data_paths_are_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, overrides = "mask2former:backbone=swin_tiny,data=ade20k", ["data.root=my data", "train.epochs=3"]
    main([source, *overrides, "--write-config", "my.py"])
    config = load_config("my.py")
    assert config["data"]["root"] == "my data" and config["train"]["epochs"] == 3
    assert config == load_config(source, overrides)
    assert [path.name for path in tmp_path.iterdir()] == ["my.py"]  # nothing was trained
    with pytest.raises(SystemExit, match="my.py: exists, and is not replaced"):
        main(["detr_r50", "--write-config", "my.py"])
    assert load_config("my.py") == config


def test_the_layout_is_that_of_the_projects_configs():
    text = as_python(load_config("mask2former_r50_ade20k_semantic"))
    assert '\n            neck=dict(type="DeformablePixelDecoder", out_channels=256),\n' in text
    assert '\nCLASSES = [\n    "wall", "building", "sky",' in text and text.count('"wall"') == 1
    assert text.count("classes=CLASSES") == 2 and text.endswith("    )  # fmt: skip\n")


def test_unusual_values_are_written_as_python():
    values = dict(
        a=float("inf"), b='it\'s "so"', c="a\\b\n", d=("x",), e={"no name": {}, "class": []}, f=[dict(g=None)], h="ä'"
    )
    written = {}
    exec(as_python(Config({"model": values}, path="odd.py")), written)
    assert written["config"]() == {"model": values}
    assert json.dumps(written["config"]()) == json.dumps({"model": values})


def test_a_file_must_be_python(tmp_path):
    with pytest.raises(ConfigError, match="expected a name that ends in .py"):
        write_config(load_config("detr_r50"), tmp_path / "my.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_config(load_config("detr_r50"), tmp_path / "none" / "my.py")
