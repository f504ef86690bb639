"""What names of weights and models refer to."""

import json
from pathlib import Path
from typing import get_args

import pytest
import torch

import vitkit
from vitkit.apps.export_reading.settings import FORMATS
from vitkit.apps.inference import find_model
from vitkit.errors import ConfigError
from vitkit.weights import find_weights, load_weights, locate, reading, save_checkpoint
from vitkit.weights.locate import MODEL_KINDS, PRETRAINED_KINDS, USABLE_KINDS, WEIGHTS_KINDS, Kind

FILES = (
    "run/config.json",
    "run/last.pth",
    "started/config.json",
    "loose.bin",
    "bare",
    "timm/x.pth",
    "own.py",
    "a.onnx",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (*FILES, "bare", "shapes_vit", "dfine_s/last.pth", "folder.pth/a", "detr_r50_dc5"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    library = tmp_path / "library"
    library.mkdir()
    (library / "config.json").write_text(json.dumps({"model_type": "vit"}))
    return tmp_path


ROWS = [
    # A beginning that says what the name is.
    ("timm/resnet18.a1_in1k", "timm", PRETRAINED_KINDS),
    ("timm/x.pth", "timm", PRETRAINED_KINDS),
    ("https://host/w.pth#sha256=1a2b", "url", PRETRAINED_KINDS),
    ("file:///w.pth", "url", PRETRAINED_KINDS),
    ("hf:owner/name", "hub", MODEL_KINDS),
    ("hf:owner/name@main", "hub", PRETRAINED_KINDS),
    ("hf:owner/name.bin", "hub", WEIGHTS_KINDS),
    # Folders that are there.
    ("library", "library", MODEL_KINDS),
    ("library", "library", PRETRAINED_KINDS),
    ("run", "run", MODEL_KINDS),
    (Path("run"), "run", WEIGHTS_KINDS),
    ("started", "run", MODEL_KINDS),
    (".", "run", MODEL_KINDS),
    ("folder.pth", "run", WEIGHTS_KINDS),
    ("dfine_s", "run", MODEL_KINDS),  # also a name of the model zoo
    # Paths of configs, and families with arguments.
    ("run/config.json", "config", MODEL_KINDS),
    ("own.py", "config", MODEL_KINDS),
    ("missing.py", "config", MODEL_KINDS),
    ("configs/detr_r50.py", "config", MODEL_KINDS),
    ("dino:scales=5,epochs=24", "config", MODEL_KINDS),
    ("dino:init=w.pth", "config", MODEL_KINDS),
    ("run/config.json", "checkpoint", WEIGHTS_KINDS),  # which reading it reports
    # Paths of exported files and of weights, which need not exist, and any other file.
    ("a.onnx", "exported", USABLE_KINDS),
    ("missing.pt2", "exported", MODEL_KINDS),
    ("a.onnx", "checkpoint", WEIGHTS_KINDS),
    ("missing.onnx", None, WEIGHTS_KINDS),
    ("run/last.pth", "checkpoint", MODEL_KINDS),
    (Path("run/last.pth"), "checkpoint", WEIGHTS_KINDS),
    ("missing.pth", "checkpoint", WEIGHTS_KINDS),
    ("missing.safetensors", "checkpoint", MODEL_KINDS),
    ("library/model.safetensors.index.json", "checkpoint", MODEL_KINDS),  # which is not a config
    ("timm/x.pth", "checkpoint", MODEL_KINDS),
    ("bare", "checkpoint", MODEL_KINDS),
    ("shapes_vit", "checkpoint", MODEL_KINDS),  # also a name of the model zoo
    ("./detr_r50_dc5", "checkpoint", WEIGHTS_KINDS),
    # Names of the model zoo, before configs of the same name.
    ("shapes_dino", "published", WEIGHTS_KINDS),
    ("detr_r50", "published", MODEL_KINDS),
    ("dfine_m", "published", MODEL_KINDS),
    ("detr_r50", None, PRETRAINED_KINDS),
    # Names of installed configs.
    ("quickstart/detr", "config", MODEL_KINDS),
    ("quickstart/detr", None, WEIGHTS_KINDS),
    # Nothing.
    ("detr_r51", None, MODEL_KINDS),
    ("missing/run", None, MODEL_KINDS),
    ("https://host/w", None, MODEL_KINDS),
    ("https://host/w.pth", None, MODEL_KINDS),
    ("x" * 5000, None, MODEL_KINDS),
    ("w\0.", None, MODEL_KINDS),
]


@pytest.mark.parametrize(("name", "kind", "kinds"), ROWS, ids=lambda value: str(value)[:30])
def test_a_name_is_what_the_first_row_of_the_table_says(folder, name, kind, kinds):
    located = locate.locate(name, kinds)
    assert (located and located.kind) == kind


def test_every_row_of_the_table_has_a_case():
    assert {kind for _, kind, _ in ROWS} - {None} == set(get_args(Kind)) == {kind for kind, _ in locate._TABLE}
    assert set(FORMATS.values()) == set(locate.EXPORTED_SUFFIXES)


def test_an_installed_config_and_a_file_of_its_name_are_ambiguous(folder):
    for kinds in (MODEL_KINDS, WEIGHTS_KINDS):
        with pytest.raises(ConfigError, match="'detr_r50_dc5' is the name of an installed config, and there is also"):
            locate.locate("detr_r50_dc5", kinds)


def test_weights_are_a_file_a_folder_or_a_name_to_download(folder):
    assert str(find_weights("run")) == "run/last.pth"
    (folder / "run" / "best.pth").touch()
    assert str(find_weights("run")) == "run/best.pth"
    assert str(find_weights("library")) == "library"
    assert str(find_weights("loose.bin")) == "loose.bin"
    assert str(find_weights("missing.pth")) == "missing.pth"  # which reading it reports
    remote, packaged = find_weights("dfine_m"), find_weights("shapes_dino")
    assert (str(remote), remote.zoo_name, remote.metadata) == ("dfine_m_coco", "dfine_m_coco", {})
    assert packaged.path.is_file() and packaged.path == Path(packaged)
    assert packaged.zoo_name == find_weights(packaged.path).zoo_name == "shapes_dino"
    assert "config" in packaged.metadata


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("started", "'started' is not the folder of a run: expected best.pth or last.pth"),
        ("run/config.json", "run/config.json: a config has no weights"),
        ("quickstart/detr", "quickstart/detr: a config has no weights"),
        ("detr:a=1", "detr:a=1: a config has no weights"),
        ("nothing:a=1", "no config 'nothing' that takes arguments"),
        ("detr_r51", "'detr_r51' is neither a model of the zoo, nor a run's folder or checkpoint.*'detr_r50'"),
        ("missing.onnx", "no file or folder 'missing.onnx'"),
        ("https://host/w.pth", r"w\.pth: weights from a URL or timm are for backbones only"),
        ("timm/resnet18", r"backbones only \(model\.backbone\.pretrained=timm/resnet18\)"),
        (".", r"'\.' is not the folder of a run: .* It has runs: give one, such as started\."),
        (None, "got NoneType for a model or weights; expected a name, a path or a config"),
    ],
)
def test_names_without_weights_are_an_error(folder, name, message):
    with pytest.raises(ConfigError, match=message):
        find_weights(name)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return the folder of a run of a classifier with random weights."""
    monkeypatch.chdir(tmp_path)
    config = {"model": {"type": "Classifier", "backbone": {"type": "ResNet", "depth": 18, "pretrained": False}}}
    model = vitkit.build_model(config["model"], classes=["cat", "dog"])
    state = {"model": model.state_dict(), "classes": ["cat", "dog"], "config": json.dumps(config)}
    save_checkpoint(tmp_path / "run/last.pth", state)
    (tmp_path / "run/config.json").write_text(state["config"])
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["run", "run/last.pth"])
def test_the_header_of_a_file_is_read_once(run, monkeypatch, name):
    calls = []
    torch_load = reading._unpickle
    monkeypatch.setattr(
        reading, "_unpickle", lambda path, mmap=False: calls.append((str(path), mmap)) or torch_load(path, mmap=mmap)
    )
    assert vitkit.load(name).classes == ["cat", "dog"]
    assert calls == [("run/last.pth", True), ("run/last.pth", False)]  # first the header, then the weights


def test_the_folder_of_a_run_is_loaded_into_a_model(run):
    model = vitkit.build_model(find_model("run").config["model"], classes=["cat", "dog"])
    load_weights(model, "run")
    assert torch.equal(model.backbone.conv1.weight, vitkit.load("run").model.backbone.conv1.weight)
