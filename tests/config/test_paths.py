"""Paths of data in configs."""

import pytest

from vitkit.config import load_config, make_data_paths_absolute
from vitkit.errors import ConfigError


def test_a_root_that_no_dataset_reads_is_refused():
    with pytest.raises(ConfigError, match=r"data\.root: no dataset of this config reads files below it"):
        load_config("quickstart/dino", ["data.root=cows"])
    assert load_config("bccd/dino_r18", ["data.root=cows"])["data"]["root"] == "cows"


def test_only_data_paths_are_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "val").mkdir()  # the name of a split
    data = load_config("configs/detr_r50.py", ["data.root=cows"])["data"]
    data["val"]["images"] = "../photos"
    cfg = {"data": data}
    make_data_paths_absolute(cfg)
    assert data["root"] == str(tmp_path / "cows")
    assert data["train"]["images"] == "{root}/train2017" and data["train"]["bad_boxes"] == "drop"
    assert data["val"]["images"] == str(tmp_path.parent / "photos")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # no shell replaces the ~ in data.root=~/cows
    cfg = {"data": data | dict(root="~/cows")}
    make_data_paths_absolute(cfg)
    assert cfg["data"]["root"] == str(tmp_path / "home/cows")
    shapes = dict(type="ShapesDetection", split="val")
    for values, expected in (
        (dict(val=shapes), dict(val=shapes)),
        (
            dict(train=dict(type="ParallelText", source="{root}/a.de", target="a.en")),
            dict(
                train=dict(type="ParallelText", source="{root}/a.de", target=str(tmp_path / "a.en")),
                root=str(tmp_path / "data"),
            ),
        ),
        (
            dict(val=dict(type="VideoList", folder="videos", list_file="val.txt", num_frames=4)),
            dict(
                val=dict(
                    type="VideoList", folder=str(tmp_path / "videos"), list_file=str(tmp_path / "val.txt"), num_frames=4
                )
            ),
        ),
    ):
        cfg = {"data": values}
        make_data_paths_absolute(cfg)
        assert cfg["data"] == expected
