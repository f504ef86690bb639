"""The files at the top of configs/: lab notes, tables of the families' members, and their arguments."""

import ast
import re
from pathlib import Path

import pytest

import vitkit
import vitkit.configs
from vitkit import model_zoo
from vitkit.apps.inference import find_model
from vitkit.config import config_names, find_config, load_config
from vitkit.config.names import family_names
from vitkit.errors import ConfigError

FOLDER = Path(vitkit.configs.__path__[0])
TEXTS = {
    path.relative_to(FOLDER).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
    for folder in (FOLDER, FOLDER / "pretrain")
    for path in folder.glob("*.py")
    if path.stem != "__init__"
}
MEMBERS = [name for name in config_names() if "/" not in name and name not in TEXTS]


def file_of(member: str) -> str:
    """Return the key in TEXTS of the file that has a member of a family."""
    return find_config(member).file.relative_to(FOLDER).with_suffix("").as_posix()


def test_the_folder_is_one_screen():
    assert sum("/" not in name for name in TEXTS) <= 50 and set(family_names()) <= set(TEXTS)


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_says_what_it_is_how_to_run_it_and_what_to_expect(name):
    note = ast.get_docstring(ast.parse(TEXTS[name]))
    assert re.search(r"^Run: ", note, re.M) and "Here:" in note
    members = [member for member in MEMBERS if file_of(member) == name]
    command = re.search(r"tools/train\.py (?:configs/)?([\w/]+)", note)[1]
    assert command in (members or [name])
    assert "https://arxiv.org/abs/" in note or "Multi30k" in note


@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_is_found_by_its_name_and_says_what_is_published(name):
    source = find_config(name)
    assert f'"{name}"' in TEXTS[file_of(name)] and source.name == name  # git grep finds it
    assert re.search(r"\d|none published|see above", source.published)


def test_names_are_those_of_one_config_each():
    assert len(config_names()) == len(set(config_names())) and not set(family_names()) & set(config_names())


@pytest.mark.parametrize("name", [name for name in MEMBERS if model_zoo.index().get(name, {}).get("published")])
def test_the_table_cites_the_first_figure_of_the_zoo(name):
    figure = str(next(iter(model_zoo.index()[name]["published"].values())))
    assert figure in find_config(name).published


def test_a_family_takes_arguments_wherever_a_config_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    listed = load_config("mask2former_swin_tiny_ade20k_panoptic")
    for text in (
        "mask2former:backbone=swin_tiny,data=ade20k,task=panoptic",
        "configs/mask2former.py:backbone=swin_tiny,data=ade20k,task=panoptic",
        f"{FOLDER}/mask2former.py:backbone='swin_tiny', data=ade20k, task=panoptic",
        "mask2former_swin_tiny_ade20k_semantic:task=panoptic",
        "configs/mask2former_swin_tiny_ade20k_panoptic.py",
    ):
        assert load_config(text) == listed, text
    config = load_config("mask2former:backbone=swin_tiny,data=ade20k", ["train.epochs=3"])
    assert config["train"]["epochs"] == 3 and config.name == "mask2former_swin_tiny_ade20k"
    assert find_model("dino:scales=5,epochs=24").config == load_config("dino_r50_5scale_24ep")
    assert load_config("dino") == load_config("dino_r50_4scale")  # the defaults


def test_an_own_file_takes_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from vitkit.configs.detr_r50 import config as detr_r50\n\n\n"
        "def config(epochs=3, lr=1e-4):\n    cfg = detr_r50()\n    cfg['train']['epochs'] = epochs\n    return cfg\n"
    )
    assert load_config("mine.py")["train"]["epochs"] == 3
    config = load_config("mine.py:epochs=5,lr=2e-4")
    assert config["train"]["epochs"] == 5 and config.name == "mine_5_0.0002"
    with pytest.raises(ConfigError, match=r"^mine.py: epochs: got 'many'\. Expected int\.$"):
        load_config("mine.py:epochs=many")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mask2former:backbon=swin_tiny", r"no argument 'backbon'. Did you mean 'backbone'\?"),
        ("mask2former:backbone=swin_tny", r"backbone: got 'swin_tny'\. Did you mean 'swin_tiny'"),
        ("mask2former:backbone=swin-tiny", r"backbone: got 'swin-tiny'\. Did you mean 'swin_tiny'"),
        ("mask2former:task=semantic", r"task: got 'semantic' with data=coco, which has 'instance' and 'panoptic'"),
        ("mask2formr:task=panoptic", r"no config 'mask2formr' that takes arguments. Did you mean 'mask2former'"),
        ("configs/mask2formr.py:task=panoptic", r"no file or folder 'configs/mask2formr.py:task=panoptic'"),
        ("mask2former:swin_tiny", r"expected mask2former:NAME=VALUE,NAME=VALUE"),
        ("detr:backbone=vit_b16,dc5=true", "dc5: dilates the last stage of r50 or r101"),
        ("detr_r50:dc5=true", r"config\(\) has no argument 'dc5'. It takes none"),
        ("dino:epochs=13", r"epochs: got 13\. Did you mean .*'12'"),
        ("mask2former_swin_tny_coco_instance", "Did you mean 'mask2former_swin_tiny_coco_instance'"),
        ("configs/dfine_n_cocoa.py", r"no config file 'configs/dfine_n_cocoa.py'. Did you mean 'dfine_n_coco.py'"),
    ],
)
def test_a_mistake_is_an_error_that_names_the_nearest(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_config(text)


def test_a_run_is_named_after_its_config_and_saves_it_resolved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = dict(image_size=32, num_images=2)
    Path("small.py").write_text(
        "from vitkit.configs.quickstart.classifier import config as classifier\n\n\n"
        "def config(images=2):\n    cfg = classifier()\n"
        f"    for part in ('train', 'val'):\n        cfg['data'][part] |= {tiny!r} | dict(num_images=images)\n"
        "    cfg['data']['num_workers'] = 0\n    cfg['train']['epochs'] = 1\n    return cfg\n"
    )
    run = vitkit.train("small.py:images=4", device="cpu")
    assert run.path == Path("runs/small_4")
    assert load_config(run.path / "config.json")["data"]["train"]["num_images"] == 4
