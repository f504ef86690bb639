"""Datasets in a user's own file, as the guides show them, are trained and evaluated."""

import re
from pathlib import Path

import pytest

import vitkit
from vitkit.apps.report.label_errors import inside
from vitkit.errors import DataError
from vitkit.tools import test

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
from vitkit.configs.quickstart.classifier import config as quickstart


def config():
    cfg = quickstart()
    cfg["imports"] = ["my_data.py"]
    cfg["data"] = dict(train="Noise", val="Noise", images_per_gpu=25, val_images_per_gpu=50, num_workers=0)
    cfg["train"] = dict(epochs=1, best_metric="top1")
    return cfg
"""


BOXES = """
from vitkit.configs.quickstart.detr import config as quickstart


def config():
    cfg = quickstart()
    cfg["imports"] = ["my_boxes.py"]
    cfg["model"]["neck"]["out_channels"] = 32
    cfg["model"]["head"].update(d_model=32, num_heads=2, d_ffn=64, num_encoder_layers=1, num_decoder_layers=1)
    squares = dict(type="Squares", num_images=16)
    cfg["data"] = dict(train=squares, val=squares, images_per_gpu=8, val_images_per_gpu=8, num_workers=0)
    cfg["train"] = dict(epochs=1, best_metric="bbox/AP50")
    return cfg
"""


@pytest.fixture(autouse=True)
def own_registry(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vitkit.DATASETS.load_packages()  # otherwise they would fill the copy, which is dropped after the test
    monkeypatch.setattr(vitkit.DATASETS, "_constructors", dict(vitkit.DATASETS._constructors))


def copy_example(guide, name):
    """Write the guide's code that begins with a comment of the file's name into that file."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / guide).read_text(encoding="utf-8"), flags=re.DOTALL)
    Path(name).write_text(next(block for block in blocks if block.startswith(f"# {name}")))


def test_the_guides_dataset_of_boxes_trains_a_detector():
    copy_example("vitkit/data/datasets/README.md", "my_boxes.py")
    Path("my_config.py").write_text(BOXES)
    run = vitkit.train("my_config.py", run_dir="run", device="cpu")
    assert 0 <= run.metrics["bbox/AP"] <= 1
    test.main(["run", "--report", "report.html", "--device", "cpu"])
    assert Path("report.html").is_file()


def test_a_truth_without_sizes_is_named_where_they_are_needed():
    with pytest.raises(DataError, match=r"ground_truth\(\): image 7 has no width and height, in pixels, which masks"):
        inside([1, 2, 3, 4], {"id": 7})


def test_the_guides_dataset_trains_a_classifier():
    copy_example("configs/README.md", "my_data.py")
    Path("my_config.py").write_text(CONFIG)
    vitkit.train("my_config.py", run_dir="run", device="cpu")
    result = vitkit.test("run", device="cpu")
    assert 0.5 <= result.metrics["top1"] <= 1.0  # half of the images have each class
    assert "100 images, 2 classes" in result.evaluator.table()
