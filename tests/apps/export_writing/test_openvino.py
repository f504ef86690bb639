"""ONNX files run by OpenVINO: they compute what ONNX Runtime does, and errors say what to do."""

import importlib
import json
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.small_exports import IMAGES
from PIL import Image

import vitkit
from vitkit.apps.export_reading import runtimes
from vitkit.apps.export_reading.loading import open_exported
from vitkit.apps.inference import load
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.tools import predict as predict_tool

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")


@pytest.fixture
def file(run, tmp_path):
    """Return a tiny detector whose positions are resized without antialiasing, which OpenVINO ignores."""
    pytest.importorskip("openvino")
    model = onnx.load(run / "out" / "tiny.onnx")
    for attribute in (attribute for node in model.graph.node for attribute in node.attribute):
        if attribute.name in ("antialias", "exclude_outside"):
            attribute.i = 0
    onnx.save(model, tmp_path / "tiny.onnx")
    return tmp_path / "tiny.onnx"


def test_openvino_computes_what_onnx_runtime_does(file):
    expected, actual = load(file), load(file, runtime="openvino")
    for images in (IMAGES, IMAGES[:1]):  # of several shapes
        for a, b in zip(expected.predict(images, batch_size=2), actual.predict(images, batch_size=2), strict=True):
            for name, value in a.fields.items():
                assert torch.allclose(value, b.fields[name], atol=1e-3), name
    assert vitkit.test(file, runtime="openvino", device="cpu").metrics == pytest.approx(
        vitkit.test(file, device="cpu").metrics, abs=1e-6
    )


def test_openvino_keeps_to_pytorchs_threads_and_to_float32(file):
    model = open_exported(file, "openvino")._model
    assert model.get_property("INFERENCE_NUM_THREADS") == torch.get_num_threads()
    assert model.get_property("INFERENCE_PRECISION_HINT").to_string() == "f32"
    assert not model.get_property("ENABLE_CPU_PINNING")


def test_openvino_refuses_what_onnx_runtime_refuses(file, monkeypatch):
    opened = open_exported(file, "openvino")
    images = torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    inputs = dict(images=images, padding_mask=images[:, 0] > 0, image_sizes=torch.tensor([[64, 64]]))
    with pytest.raises(DataError, match=r"tiny.onnx: cannot take images .* \(images is float32; expected uint8\)"):
        opened.run(dict(inputs, images=images / 255))
    assert opened.run(inputs)

    result = SimpleNamespace(to_tuple=lambda: [np.zeros((0, 100), np.float32) for _ in opened.outputs])
    request = SimpleNamespace(infer=lambda *_, **__: result)
    monkeypatch.setattr(opened, "_model", SimpleNamespace(create_infer_request=lambda: request))
    with pytest.raises(DataError, match="OpenVINO returned outputs of no image; are the images too small"):
        opened.run(inputs)


def test_the_command_line_predicts_by_openvino(file, tmp_path):
    Image.fromarray(IMAGES[0]).save(tmp_path / "a.png")
    arguments = ["--input", str(tmp_path / "a.png"), "--device", "cpu", "--json-threshold", "0"]
    results = []
    for runtime in ("onnxruntime", "openvino"):
        predict_tool.main([str(file), *arguments, "--runtime", runtime, "--out", str(tmp_path / runtime)])
        (image,) = json.loads((tmp_path / runtime / "predictions.json").read_text())["images"]
        results.append([item["score"] for item in image["objects"]])
    assert results[0] == pytest.approx(results[1], abs=1e-3) and results[0]


def test_a_missing_openvino_is_named_with_the_extra(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(ConfigError, match=r"openvino: needs the package openvino: pip install 'vitkit\[openvino\]'"):
        load(run / "out" / "tiny.onnx", runtime="openvino")


def test_what_openvino_does_not_run_is_refused(run, monkeypatch):
    monkeypatch.setattr(importlib.import_module("vitkit.apps.inference.load"), "accelerators", lambda: ["cuda"])
    file = run / "out" / "tiny.onnx"
    with pytest.raises(ConfigError, match="tiny.onnx: runtime openvino computes on the CPU; got device cuda. Set"):
        load(file, runtime="openvino", device="cuda")
    with pytest.raises(ConfigError, match="best.pth: runtime openvino is for ONNX files. Write one by `vitkit export`"):
        load(run / "run", runtime="openvino")
    with pytest.raises(ConfigError, match="got runtime 'tensorrt'; expected onnxruntime or openvino"):
        load(file, runtime="tensorrt")


def test_a_file_with_an_operator_that_openvino_lacks_is_named(file, tmp_path):
    model = onnx.load(file)
    next(node for node in model.graph.node if node.op_type == "Softmax").op_type = "Hardest"
    onnx.save(model, tmp_path / "a.onnx")
    message = r"a\.onnx: OpenVINO [\d.]+ cannot read it \(.*No conversion rule found .* Hardest.*\)\. Use runtime"
    with pytest.raises(CheckpointError, match=message):
        open_exported(tmp_path / "a.onnx", "openvino")


@pytest.mark.parametrize("attribute", ["antialias", "exclude_outside"])
def test_resizing_that_openvino_computes_otherwise_is_refused(attribute, file, tmp_path):
    model = onnx.load(file)
    resize = next(node for node in model.graph.node if node.op_type == "Resize" and len(node.attribute) > 1)
    next(item for item in resize.attribute if item.name == attribute).i = 1
    onnx.save(model, tmp_path / "a.onnx")
    with pytest.raises(CheckpointError, match=r"a\.onnx: OpenVINO ignores .* \(--size HxW\), or use runtime"):
        load(tmp_path / "a.onnx", runtime="openvino")


def test_inputs_of_another_shape_are_refused(file):
    opened = open_exported(file, "openvino")
    shapes = dict(images=(1, 4, 8, 8), padding_mask=(1, 8, 8), image_sizes=(1, 2))
    types = dict(images=torch.uint8, padding_mask=torch.bool, image_sizes=torch.int64)
    inputs = {name: torch.zeros(shapes[name], dtype=types[name]) for name in opened.inputs}
    with pytest.raises(DataError, match=r"tiny.onnx: cannot take images \(1, 4, 8, 8\).*incompatible\)"):
        opened.run(inputs)


def test_a_file_that_computes_for_very_long_is_given_up(file, monkeypatch):
    opened, is_canceled = open_exported(file, "openvino"), threading.Event()
    types = dict(images=torch.uint8, padding_mask=torch.bool, image_sizes=torch.int64)
    request = SimpleNamespace(infer=lambda *_, **__: is_canceled.wait(), cancel=is_canceled.set)
    monkeypatch.setattr(opened, "_model", SimpleNamespace(create_infer_request=lambda: request))
    monkeypatch.setattr(runtimes, "_MAX_SECONDS", 0.1)
    with pytest.raises(CheckpointError, match="has not computed anything in 0.1 s"):
        opened.run({name: torch.zeros(1, dtype=types[name]) for name in opened.inputs})
    assert is_canceled.is_set()
