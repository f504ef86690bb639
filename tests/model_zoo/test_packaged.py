"""The trained models in the package: they load anywhere without a network, and are as good as stated."""

import hashlib
import shutil
import socket
from pathlib import Path

import pytest
import torch

import vitkit
from vitkit import load_config, model_zoo
from vitkit.apps.datasets.synthetic import write_shapes
from vitkit.apps.inference.card import zoo_entry
from vitkit.apps.inference.load import find_model
from vitkit.errors import CheckpointError
from vitkit.tools import test as test_tool

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = {name: entry for name, entry in model_zoo.index().items() if model_zoo.is_packaged(name)}
SLICE = {
    "shapes_dino": ("bbox/AP50", 0.9),
    "shapes_keypoints": ("keypoints/AP", 0.62),
    "shapes_segment": ("segm/AP", 0.55),
    "numbers_translator": ("exact_match", 0.9),
    "shapes_grounding": ("bbox/AP_unseen", 0.4),
    "shapes_vit": ("top1", 0.9),
    "shapes_detr": ("bbox/AP50", 0.8),
    "shapes_mask2former": ("PQ", 0.75),
    "shapes_captioner": ("exact_match", 0.8),
}
"""A metric of each model, and its least value on a few images."""


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Stay in an empty folder, without a network or a cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))

    def refuse(*args):
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def file_of(name: str) -> Path:
    return ROOT / "model_zoo" / PACKAGED[name]["url"]


@pytest.mark.parametrize("name", SLICE)
def test_model_reaches_its_figure_on_a_few_validation_samples(name, offline):
    metric, least = SLICE[name]
    val = load_config(PACKAGED[name]["config"])["data"]["val"]
    length = "num_pairs" if "num_pairs" in val else "num_images"
    metrics = vitkit.test(name, data=dict(val={length: 40}), device="cpu").metrics
    assert metrics[metric] >= least
    assert list(Path().iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGED)
def test_model_reaches_its_figures_on_all_validation_data(name):
    metrics = vitkit.test(name, device="cpu").metrics
    for metric, stated in PACKAGED[name]["measured"].items():
        assert metrics[metric] == pytest.approx(stated, abs=0.005), metric


def test_mae_reconstructs_patches_that_it_does_not_see(offline):
    mae = vitkit.load("shapes_mae", device="cpu")
    val = vitkit.build_dataset(dict(load_config("quickstart/mae")["data"]["val"], num_images=40))
    images = mae.prepare([val.load_image(index) for index in range(len(val))]).inputs["images"]
    with torch.no_grad():
        outputs = mae.model(images)
    loss = (outputs["pred_patches"] - outputs["target_patches"]).square().mean()
    assert loss < 0.58  # 0.51 on all images; 1 is that of patches without a pattern


@pytest.mark.slow
def test_training_again_gives_the_stated_figure(tmp_path):
    entry = PACKAGED["numbers_translator"]
    run = vitkit.train(entry["config"], run_dir=tmp_path / "run", device="cpu")
    assert run.metrics["exact_match"] == pytest.approx(entry["measured"]["exact_match"], abs=0.02)


@pytest.mark.parametrize("name", PACKAGED)
def test_entry_describes_its_file(name):
    entry, path = PACKAGED[name], file_of(name)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert entry["checksum"] == f"sha256:{digest[:8]}" and path.name == f"{name}-{digest[:8]}.safetensors"
    assert entry["size_mb"] == round(path.stat().st_size / 1e6, 2)
    assert entry["license"] == "Apache-2.0" and entry["measured"] and entry["processor_minutes"] > 0
    model = vitkit.load(name).model
    assert entry["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    # The file also loads by itself, with the same config.
    assert find_model(path).config["model"] == find_model(name).config["model"]
    assert zoo_entry(find_model(name).weights)["license"] == entry["license"]


def test_all_models_together_are_at_most_15_mb():
    files = list((ROOT / "model_zoo/weights").iterdir())
    assert sorted(files) == sorted(map(file_of, PACKAGED)) and set(PACKAGED) == {*SLICE, "shapes_mae"}
    # 12 before real-time detectors with masks and with keypoints.
    assert sum(file.stat().st_size for file in files) <= 15e6


def test_missing_or_damaged_package_data_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(model_zoo, "FOLDER", tmp_path)
    shutil.copy(ROOT / "model_zoo/index.json", tmp_path)
    with pytest.raises(CheckpointError, match="shapes_dino-.* is missing, although it is part of vitkit. Install"):
        vitkit.load("shapes_dino")
    damaged = tmp_path / PACKAGED["shapes_dino"]["url"]
    damaged.parent.mkdir()
    damaged.write_bytes(file_of("shapes_dino").read_bytes()[:-1] + b"\x00")
    with pytest.raises(CheckpointError, match="sha256 begins .*, expected .*Install vitkit again"):
        vitkit.load_weights(vitkit.load(file_of("shapes_dino")).model, "shapes_dino")


def test_weights_of_a_config_may_be_a_packaged_name(offline):
    by_name = vitkit.load("quickstart/dino", "shapes_dino")
    assert by_name.classes == vitkit.load("shapes_dino").classes and by_name.thresholds is not None


def test_packaged_models_are_exported_explained_and_reported(offline):
    write_shapes("shapes", num_train=1, num_val=2, image_size=64)
    image = sorted(Path("shapes/val2017").iterdir())[0]
    exported = vitkit.export("shapes_detr", "detr.pt2", format="torch", images="shapes/val2017")
    theirs, ours = vitkit.load(exported.path)(image), vitkit.load("shapes_detr")(image)
    assert theirs.names == ours.names and len(ours.names) > 0
    assert theirs.scores.tolist() == pytest.approx(ours.scores.tolist(), abs=1e-3)
    explained = vitkit.explain("shapes_vit", image=image, out="figures")
    assert explained.files and all(path.stat().st_size > 0 for path in explained.files)
    test_tool.main(["shapes_dino", "data.val.num_images=10", "--report", "report.html", "--device", "cpu"])
    assert "triangle" in Path("report.html").read_text(encoding="utf-8")
