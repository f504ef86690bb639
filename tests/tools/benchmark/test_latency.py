"""Latency of real-time detectors: each form is built and measured."""

import pytest
import torch

pytest.importorskip("vitkit.tools", reason="vitkit is not installed (pip install -e .)")
from vitkit.tools.benchmark import latency
from vitkit.tools.benchmark.timing import Options

CONFIG = """
from vitkit.configs.quickstart.detr import config as quickstart


def config():
    cfg = quickstart()
    cfg["model"]["backbone"] = dict(type="ViT", d_model=32, depth=1, num_heads=2, pretrained=False)
    cfg["model"]["head"].update(num_encoder_layers=1, num_decoder_layers=1)
    return cfg
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Have one small model take the place of all that are measured."""
    (tmp_path / "small.py").write_text(CONFIG)
    models = {"small": latency.Published(str(tmp_path / "small.py"), 64, 1.5)}
    monkeypatch.setattr(latency, "MODELS", models)


@pytest.mark.skipif(torch.__version__ < (2, 7), reason="needs PyTorch 2.7 or newer")
def test_every_model_is_measured_by_pytorch_and_as_a_file(small):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    rows = latency.measure("latency", Options(repeats=1))
    assert [(row.what, row.name) for row in rows] == [
        ("small, 64x64 (T4: 1.5 ms)", "PyTorch"),
        ("small, 64x64 (T4: 1.5 ms)", "ONNX Runtime"),
    ]
    assert rows[0].ratio == 1 and all(row.seconds > 0 for row in rows)


def test_pytorch_returns_boxes_in_pixels():
    outputs = latency.by_pytorch("quickstart/deformable_detr", 64, Options())()
    assert outputs["boxes_xyxy"].shape == (*outputs["scores"].shape, 4)
    assert 1 < outputs["boxes_xyxy"].abs().max() <= 128


def test_on_a_gpu_models_are_also_compiled_as_cuda_graphs(small, monkeypatch):
    modes = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, mode: modes.append(mode))
    monkeypatch.setitem(latency.BUILDERS, "cpu", latency.BUILDERS["cuda"])
    assert [row.name for row in latency.measure("latency", Options(repeats=1))] == ["PyTorch", "PyTorch, compiled"]
    assert modes == ["reduce-overhead"]
