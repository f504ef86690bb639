"""DETR, Deformable DETR, DINO, MaskFormer and Mask2Former beside mmdet's (https://github.com/open-mmlab/mmdetection).

Whole models with random weights, of mmdet 3.3.0 on mmcv 2.1.0 without its compiled operators, see
golden/record_mmdetection.py for what to install.
"""

import importlib.util

import pytest
import torch
from golden.record_mmdetection import CLASSES, MODELS, PADDED, SIZE, build, make_images, run
from helpers.random_weights import randomize

import vitkit
from vitkit.model_zoo.converters import write_names

pytestmark = pytest.mark.peers


@pytest.fixture(autouse=True)
def _package():
    if importlib.util.find_spec("mmdet") is None or importlib.util.find_spec("mmcv") is None:
        pytest.skip("pip install mmengine==0.10.7 mmcv-lite==2.1.0, and --no-deps mmdet==3.3.0")


@pytest.mark.parametrize("name", MODELS)
def test_models_compute_the_same_both_ways(name, tmp_path):
    config = MODELS[name]
    peer = build(config)
    names = tuple(f"class {number}" for number in range(CLASSES))
    meta = dict(cfg=f"model = {config!r}", dataset_meta=dict(classes=names))
    if "panoptic_head" in config and config["panoptic_head"]["num_stuff_classes"]:
        meta["dataset_meta"] |= dict(thing_classes=names[:4])
    torch.save(dict(meta=meta, state_dict=peer.float().state_dict()), tmp_path / "epoch_12.pth")
    ours = vitkit.load(tmp_path / "epoch_12.pth", training_queries=True).model
    images, padding = make_images(), torch.zeros(2, *SIZE, dtype=torch.bool)
    if "mask" not in name:
        padding[1, PADDED[0] :], padding[1, :, PADDED[1] :] = True, True
    for _ in ("as read", "as written"):
        with torch.no_grad():
            outputs = ours.double()(images, padding)
        for part, value in run(peer.double(), images).items():
            torch.testing.assert_close(outputs[part].double(), value, rtol=0, atol=2e-5)
        randomize(ours.float())
        for convolution, _ in ours.neck.levels if config["type"] in ("DeformableDETR", "DINO") else ():
            torch.nn.init.zeros_(convolution.bias)  # which mmdet's convolutions before norms do not have
        written = write_names(ours, "mmdetection").state
        assert written.keys() == peer.state_dict().keys()
        peer.float().load_state_dict(written)
