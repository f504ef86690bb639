"""A dataset in a user's own file, as the README shows it, is trained and evaluated."""

import re
from pathlib import Path

import vitkit

README = Path(__file__).resolve().parents[2] / "README.md"
CONFIG = """
from vitkit.configs.quickstart.classifier import config as quickstart


def config():
    cfg = quickstart()
    cfg["imports"] = ["my_data.py"]
    cfg["data"] = dict(train="Noise", val="Noise", images_per_gpu=25, val_images_per_gpu=50, num_workers=0)
    cfg["train"] = dict(epochs=1, best_metric="top1")
    return cfg
"""


def test_the_readmes_dataset_trains_a_classifier(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vitkit.DATASETS.load_packages()  # otherwise they would fill the copy, which is dropped after the test
    monkeypatch.setattr(vitkit.DATASETS, "_constructors", dict(vitkit.DATASETS._constructors))
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    Path("my_data.py").write_text(next(block for block in blocks if block.startswith("# my_data.py")))
    Path("my_config.py").write_text(CONFIG)
    vitkit.train("my_config.py", run_dir="run", device="cpu")
    result = vitkit.test("run", device="cpu")
    assert 0.5 <= result.metrics["top1"] <= 1.0  # half of the images have each class
    assert "100 images, 2 classes" in result.evaluator.table()
