"""The index of published weights: complete, consistent with the configs, and loadable as far as the download."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import vitkit
from vitkit import model_zoo
from vitkit.apps.inference import find_model
from vitkit.config import config_names, find_config, load_config
from vitkit.engine.build import build_model
from vitkit.errors import CheckpointError
from vitkit.model_zoo import write_table

ROOT = Path(__file__).resolve().parents[2]
INDEX = {name: entry for name, entry in model_zoo.index().items() if not model_zoo.is_packaged(name)}
"""The models to download; for those in the package see test_packaged.py."""
PUBLISHED = [(entry["config"], entry["url"]) for entry in INDEX.values()]
"""Names of configs and the URLs of their weights; a model's name may be shorter than its config's."""
CONFIGS = [name for name in config_names() if "/" not in name]


@pytest.mark.parametrize("name", CONFIGS)
def test_each_config_has_published_weights_or_a_reason_why_not(name):
    reason = model_zoo.unpublished().get(name)
    urls = [url for config, url in PUBLISHED if config == name]
    assert bool(urls) != (reason is not None)
    assert reason is None or len(reason.split()) > 3
    source = find_config(name)
    note = ast.get_docstring(ast.parse(source.file.read_text()))
    if reason and "figures are in its config" in reason:
        assert re.search(r"\d", source.published) or re.search(r"^Here:.*\d", note, re.M)
    file = re.search(r"^Weights:\s+(\S+)", note, re.M)
    if file:  # the lab note and the index name the same file
        assert any(url.endswith(file[1]) for url in urls)


@pytest.mark.parametrize("file", write_table.TABLES)
def test_table_in_a_document_is_that_of_the_index(file):
    text = (write_table.ZOO / file).read_text(encoding="utf-8")
    name, make = write_table.TABLES[file]
    assert write_table.with_table(text, name, make()) == text, "run python model_zoo/write_table.py"


def test_every_reason_belongs_to_an_existing_config():
    assert set(model_zoo.unpublished()) <= set(CONFIGS)


@pytest.mark.parametrize("name", INDEX)
def test_each_entry_is_complete(name):
    entry = INDEX[name]
    assert entry["config"] in CONFIGS
    assert entry["url"].startswith("https://")
    assert re.fullmatch(r"(sha256:[0-9a-f]{8}|md5:[0-9a-f]{6})?", entry["checksum"])
    file = entry.get("file") or entry["url"].rsplit("/", 1)[-1]
    assert re.fullmatch(r"[\w.\-]+\.(pth|pyth|pkl|safetensors)", file)
    assert (entry["published"] or name.startswith("dfine_seg_")) and entry["published_in"] and entry["dataset"]
    licenses = ("Apache-2.0", "MIT", "BSD-3-Clause", "CC-BY-NC-4.0", "DINOv3 License", "Cityscapes (non-commercial)")
    assert entry["license"] in licenses
    if entry["checksum"]:  # it is the checksum in the file's name
        assert entry["checksum"].partition(":")[2] in file


def test_entries_have_distinct_files_in_the_cache():
    files = [entry.get("file") or entry["url"].rsplit("/", 1)[-1] for entry in INDEX.values()]
    assert len(files) == len(set(files))


@pytest.mark.parametrize(
    "name",
    [
        "detr_r101_panoptic",
        "deformable_detr_r50_two_stage",
        "maskformer_swin_tiny_ade20k",
        "mask2former_r50_coco_panoptic",
    ]
    + ["swin_small_in1k", "swinv2_tiny_window16_in1k", "vit_b16_in1k", "deit_tiny_distilled_patch16_in1k"]
    + ["mvitv2_small_in1k", "resnet101_in1k", "timesformer_divided_k400"]
    + ["dfine_sem_n_cityscapes", "dfine_sem_x_cityscapes"]
    + ["rtdetr_r18", "rtdetr_r101_objects365", "rtdetrv2_r50", "rf_detr_n", "rf_detr_seg_l"],
)
def test_model_of_an_entry_has_the_stated_number_of_parameters(name):
    model = find_model(name)
    classes = {"ADE20K-150": 150, "COCO 2017 panoptic": 133, "ImageNet-1k": 1000, "ImageNet-1K": 1000, "COCO 2017": 91}
    num_classes = {"Kinetics-400": 400, "Cityscapes": 19} | classes
    count = 250 if name == "detr_r101_panoptic" else num_classes.get(INDEX[name]["dataset"])
    spec = dict(model.config["model"], num_classes=80 if name.startswith("rtdetr") else count)
    with torch.device("meta"):
        built = build_model(spec)
    assert sum(p.numel() for p in built.parameters()) == INDEX[name]["parameters"]


def test_backbone_weights_belong_to_an_entry_with_that_backbone():
    import json

    rows = json.loads((ROOT / "model_zoo/backbones.json").read_text())
    named = {variant: row["weights"] for variant, row in rows.items() if "weights" in row}
    assert {"swin_base_384", "swinv2_tiny", "deit_tiny_distilled_patch16", "mvitv2_large", "resnet18"} <= set(named)
    assert {"timesformer_hr", "mvitv1_b_16x4"} <= set(named)
    for variant, name in named.items():
        backbone = find_model(name).config["model"]["backbone"]
        assert (backbone if isinstance(backbone, str) else backbone["type"]) == variant


def test_a_listed_model_is_downloaded_from_its_url(tmp_path, monkeypatch):
    asked = {}

    def fetch_file(url, *, checksum, name):
        asked.update(url=url, checksum=checksum, name=name)
        raise CheckpointError("offline")

    monkeypatch.setattr("vitkit.weights.published.fetch_file", fetch_file)
    with pytest.raises(CheckpointError, match="offline"):
        vitkit.load("mask2former_r50_coco_instance")
    assert asked["url"].endswith("coco/instance/maskformer2_R50_bs16_50ep/model_final_3c8ec9.pkl")
    assert asked["checksum"] == "md5:3c8ec9"
    with pytest.raises(CheckpointError, match="offline"):
        vitkit.load("deformable_detr_r50_refine")
    assert asked["name"] == "deformable_detr_r50_refine.pth" and asked["checksum"] == ""


def test_an_entry_loads_from_its_file(tmp_path, monkeypatch):
    config = load_config("resnet50_in1k")
    torch.manual_seed(0)
    trained = build_model(dict(config["model"], backbone=dict(type="resnet18", pretrained=False)))
    file = tmp_path / "published.pth"
    torch.save(trained.backbone.state_dict(), file)
    entry = dict(INDEX["resnet18_in1k"], url=file.as_uri(), checksum="")
    monkeypatch.setattr(model_zoo, "index", lambda: {"resnet18_in1k": entry})
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    model = vitkit.load("resnet18_in1k").model
    assert torch.equal(model.backbone.fc.weight, trained.backbone.fc.weight)
    assert (tmp_path / "home/hub/checkpoints/published.pth.sha256").is_file()


def test_error_for_an_unknown_name_names_the_nearest():
    with pytest.raises(vitkit.ConfigError, match="mean 'mask2former_r50_coco_instance'"):
        vitkit.load("mask2former_r50_coco_instanse")
    with pytest.raises(vitkit.ConfigError, match="'detr_r5O' is neither a model of the zoo, .*mean 'detr_r50'"):
        vitkit.load_weights(nn.Linear(1, 1), "detr_r5O")


def test_coco_may_be_left_out_or_added_at_the_end_of_a_name(monkeypatch):
    assert model_zoo.listed_name("dfine_s") == model_zoo.listed_name("dfine_s_coco") == "dfine_s_coco"
    assert model_zoo.listed_name("dfine") is None
    # The configs' names have it in every case.
    assert model_zoo.listed_name("rf_detr_n") == model_zoo.listed_name("rf_detr_n_coco") == "rf_detr_n"
    assert str(find_model("rf_detr_seg_l_coco").weights) == "rf_detr_seg_l"
    assert model_zoo.listed_name("detr_r50_coco") is None
    assert not model_zoo.index().keys() & model_zoo._other_names().keys()
    found = find_model("dfine_s")
    assert str(found.weights) == "dfine_s_coco" and found.config["model"]["type"] == "DFINE"
    asked = []
    monkeypatch.setattr("vitkit.weights.published.fetch_file", lambda url, **_: asked.append(url) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        vitkit.load("dfine_s")
    assert asked == ["https://github.com/Peterande/storage/releases/download/dfinev1.0/dfine_s_coco.pth"]
