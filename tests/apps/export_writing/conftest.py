"""A run that is exported once for all tests of this folder."""

import json

import pytest
import torch
from helpers.processes import run_forked
from helpers.shared_folders import made_once
from helpers.small_exports import CLASSES, IMAGES, LAYERS, TINY
from PIL import Image

from vitkit import build_model, load_config
from vitkit.config import save_config
from vitkit.structures import ScoreThresholds
from vitkit.tools import export as export_tool
from vitkit.weights import save_checkpoint

if torch.__version__ < (2, 7):
    collect_ignore_glob = ["test_*.py"]  # older versions cannot export


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Return the folder of a tiny DETR with random weights, with the files that the tool wrote for it in `out`, and
    what it printed in a new process."""
    return made_once(tmp_path_factory, "exported_run", write_run)


def write_run(folder):
    overrides = [TINY, *LAYERS, "model.neck.out_channels=32", "model.head.d_model=32", "model.head.num_heads=2"]
    val = "data.val.transforms=dict(type='EvalResize', short_side=64, max_size=96)"
    cfg = load_config("quickstart/detr", [*overrides, val, "data.val.num_images=4", "data.val_images_per_gpu=2"])
    torch.manual_seed(0)
    model = build_model(cfg["model"], classes=CLASSES)
    thresholds = ScoreThresholds(0.0, (0.0, 0.0), "chosen").to_json(CLASSES)
    state = {"model": model.state_dict(), "classes": CLASSES, "config": json.dumps(cfg)}
    save_checkpoint(folder / "run" / "best.pth", state | {"measured": {"score_thresholds": thresholds}})
    save_config(cfg, folder / "run" / "config.json")
    Image.fromarray(IMAGES[0]).save(folder / "a.png")
    options = "--out", str(folder / "out" / "tiny.onnx"), "--license", "CC0"
    status, printed = run_forked(export_tool.main, [str(folder / "run"), *options])
    assert status == 0, printed
    (folder / "printed.txt").write_text(printed)
