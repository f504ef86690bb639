"""Export: what is written, for which models and sizes, and what is refused."""

import importlib
import json
import math
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.processes import run_forked
from helpers.small_exports import CLASSES, IMAGES, export, predictor_of
from huggingface_hub import ModelCard
from PIL import Image
from torch.torch_version import TorchVersion

import vitkit
from vitkit import build_model, load_config, model_zoo
from vitkit.apps.export_reading.graphs import ExportGraph, image_graph
from vitkit.apps.export_reading.loading import open_exported
from vitkit.apps.export_writing import checks
from vitkit.apps.export_writing import export as export_module
from vitkit.apps.export_writing.checks import differences, image_inputs, image_size
from vitkit.apps.export_writing.export import ExportSettings, Part, check_out, read_images, runner_path, write_part
from vitkit.apps.export_writing.metadata import describe
from vitkit.apps.inference import Translator, load
from vitkit.apps.inference.card import zoo_entry
from vitkit.errors import ConfigError
from vitkit.kernels.windows import window_partition, window_reverse
from vitkit.structures import ImageSizes
from vitkit.text.vocabulary import Vocabulary
from vitkit.tools import export as export_tool
from vitkit.weights import save_checkpoint

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
onnx_runner = importlib.import_module("vitkit.apps.export_reading.onnx_runner")


def test_export_prints_no_line_of_its_libraries(run):
    printed = (run / "printed.txt").read_text()
    assert "wrote " in printed and "folding" not in printed
    # What is done is said when it begins, and how long it took.
    lines = printed.splitlines()
    for line in ("loading   ", "tracing   tiny.onnx", "writing   tiny.onnx, opset 20, fp32", "timing    tiny.onnx"):
        begun, ended = (n for n, each in enumerate(lines) if each.startswith(line))
        assert ended > begun and re.fullmatch(rf"{re.escape(lines[begun])}: [\d.]+ s", lines[ended])
    compared = [line for line in lines if line.startswith("compared  ")]
    assert len(compared) == 3
    assert re.fullmatch(r"compared  1 of 3, \(1, 3, \d+, \d+\): [\d.]+ s by PyTorch, [\d.]+ s by the file", compared[0])


def test_quantization_prints_no_advice_of_its_library(tmp_path):
    import onnx
    from onnx import helper

    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 8]) for name in "xy")
    weight = onnx.numpy_helper.from_array(torch.randn(8, 8).numpy(), "weight")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "weight"], ["y"])], "product", [x], [y], [weight])
    path = tmp_path / "product.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    assert run_forked(export_module.quantize, path, tmp_path / "int8.onnx") == (0, "")
    assert "MatMulInteger" in [node.op_type for node in onnx.load(tmp_path / "int8.onnx").graph.node]


def test_exported_file_has_named_dynamic_axes_and_metadata(run):
    import onnx

    graph = onnx.load(run / "out" / "tiny.onnx").graph
    axes = {x.name: [d.dim_param or d.dim_value for d in x.type.tensor_type.shape.dim] for x in graph.input}
    assert axes == {
        "images": ["batch", 3, "height", "width"],
        "padding_mask": ["batch", "height", "width"],
        "image_sizes": ["batch", 2],
    }
    metadata = open_exported(run / "out" / "tiny.onnx").metadata
    assert metadata["classes"] == CLASSES and metadata["license"] == "CC0" and metadata["type"] == "DETR"
    assert metadata["preprocessing"]["resize"] == {"short_side": 64, "max_size": 96, "rounding": "detr"}
    assert metadata["preprocessing"]["mean"] == [0.485, 0.456, 0.406]
    assert metadata["thresholds"]["origin"] == "chosen" and metadata["config"]["model"]["type"] == "DETR"


def test_file_that_exceeds_the_tolerance_is_not_written(run, tmp_path, monkeypatch):
    # Tracing again would take too long.
    monkeypatch.setattr(export_module, "write_part", lambda _, path, *__: shutil.copyfile(run / "out/tiny.onnx", path))
    with pytest.raises(
        SystemExit, match=r"export: b.onnx is not written, as it differs .* pred_logits: .* larger tolerance"
    ):
        export_tool.main([str(run / "run"), "--out", str(tmp_path / "b.onnx"), "--tolerance", "0"])
    assert not list(tmp_path.iterdir())


class Nothing(ExportGraph):
    axes = {}

    def forward(self):
        return {}


def test_a_file_that_cannot_be_run_names_another_opset(run, tmp_path):
    inputs = {name: torch.zeros(1, 4, 8, 8) for name in ("images", "padding_mask", "image_sizes")}
    path = shutil.copyfile(run / "out" / "tiny.onnx", tmp_path / "tiny.onnx")
    part = Part("", Nothing(torch.nn.Identity()), [inputs], inputs)
    message = r"export: b\.onnx is not written, as it cannot be run\. b\.onnx: cannot take .* Choose another opset"
    with pytest.raises(ConfigError, match=message):
        export_module.compare_part(part, path, tmp_path / "out" / "b.onnx", ExportSettings(opset=23))


def test_a_file_is_compared_on_the_first_images_of_a_folder(tmp_path):
    for k in range(4):
        Image.fromarray(IMAGES[0]).save(tmp_path / f"{k}.png")
    predictor = SimpleNamespace(channels=None, to_array=lambda path, _: Path(path).name)
    assert read_images(tmp_path, predictor, 3) == ["0.png", "1.png", "2.png"]
    assert export_tool.parse_args(["detr_r50", "--images", str(tmp_path)]).max_images == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "int8", "--format", "torch"], "precision int8 needs format onnx; got torch"),
        (["--opset", "3"], "got opset 3; expected 18 to 23"),
        (["--tolerance", "-1"], "got tolerance -1; expected 0 or more"),
        (["--format", "torch"], "a.onnx; expected a name that ends in .pt2"),
        (["--images", "nowhere"], "cannot read 'nowhere'"),
        (["data.val.transforms=dict(type='DETRTrainTransforms')"], "DETRTrainTransforms, which a file cannot describe"),
    ],
)
def test_unsupported_exports_are_one_line_errors(run, tmp_path, arguments, message):
    out = ["--out", str(tmp_path / "a.onnx")]
    with pytest.raises(SystemExit, match=message):
        export_tool.main([str(run / "run"), *arguments, *out])
    assert not list(tmp_path.iterdir())


def test_existing_files_are_replaced_only_on_request(run, tmp_path):
    out, settings = tmp_path / "a.onnx", ExportSettings()
    check_out(out, settings)
    # The program finds its file by its own name, less "run_".
    assert [runner_path(Path(name)).name for name in ("a.onnx", "run_a.onnx")] == ["run_a.py", "run_run_a.py"]
    (tmp_path / "run_a.py").touch()
    with pytest.raises(ConfigError, match=r"run_a.py exists already. Choose another name .out., or set overwrite"):
        check_out(out, settings)
    check_out(out, ExportSettings(overwrite=True))
    with pytest.raises(ConfigError, match=r"run_a.py is a file; expected a folder"):
        check_out(tmp_path / "run_a.py" / "b.onnx", settings)
    out.mkdir()
    with pytest.raises(ConfigError, match=r"a.onnx is a folder; expected a file"):
        check_out(out, ExportSettings(overwrite=True))
    with pytest.raises(SystemExit, match=r"a.onnx is a folder"):
        export_tool.main(["no_such_model", "--out", str(out)])


def test_classifier_is_exported_only_for_the_size_of_its_crop():
    crop = dict(transforms=dict(type="ClassificationEvalTransforms", size=32))
    predictor, _ = predictor_of("quickstart/classifier", **crop)
    with pytest.raises(ConfigError, match=r"got size 96x96, but the classifier's images are cropped to 32x32"):
        image_size(predictor, (96, 96))
    assert image_size(predictor, None) is None and image_size(predictor, (32, 32)) == (32, 32)
    batch = image_inputs(predictor, IMAGES, (32, 32))[0]
    assert torch.equal(batch["images"], predictor.prepare(IMAGES[:1]).inputs["images"])
    predictor, _ = predictor_of("quickstart/classifier", image_sizes=ImageSizes(32, 32, 32, 32))
    with pytest.raises(ConfigError, match=r"images are of any size .*ClassificationEvalTransforms"):
        image_size(predictor, (32, 32))


def test_fixed_size_file_is_compared_on_padded_images():
    predictor, _ = predictor_of("quickstart/detr")
    batch = image_inputs(predictor, IMAGES, (100, 45))[0]  # of 70x90
    assert batch["images"].shape == (1, 3, 100, 45) and not batch["images"][..., 35:, :].any()
    assert not batch["padding_mask"][0, :35].any() and batch["padding_mask"][0, 35:].all()
    runner = object.__new__(onnx_runner.Runner)
    runner.inputs, runner.info = ["padding_mask"], {"size": (100, 45), "preprocessing": {"resize": None}}
    assert np.array_equal(runner.prepare(IMAGES[0])["padding_mask"], batch["padding_mask"])


def test_model_card_lies_beside_the_file(run):
    card = ModelCard.load(run / "out" / "README.md")
    assert (card.data.license, card.data.license_name, card.data.library_name) == ("other", "cc0", "onnx")
    assert card.data.pipeline_tag == "object-detection" and card.data.model_name == "tiny"
    assert "python run_tiny.py 'street.jpg'" in card.text and 'vitkit.load("tiny.onnx")("street.jpg")' in card.text


def test_license_of_the_zoo_applies_only_to_its_own_weights(tmp_path):
    assert zoo_entry("detr_r50")["license"] == model_zoo.index()["detr_r50"]["license"] is not None
    torch.save({"weight": torch.zeros(1)}, tmp_path / "detr_r50")
    assert zoo_entry(tmp_path / "detr_r50") == {}


def test_metadata_contain_the_normalization_statistics_of_the_model():
    predictor, cfg = predictor_of("quickstart/classifier")
    predictor.model.backbone.pixel_mean, predictor.model.pixel_mean = (0.1, 0.1, 0.1), (0.5, 0.4, 0.3)
    assert describe(predictor, cfg, name="a", license=None)["preprocessing"]["mean"] == [0.5, 0.4, 0.3]
    predictor, cfg = predictor_of("quickstart/detr")
    predictor.model.backbone.pixel_mean, predictor.model.backbone.pixel_std = (0.5,) * 3, (0.25,) * 3
    preprocessing = describe(predictor, cfg, name="a", license=None)["preprocessing"]
    assert preprocessing["mean"] == [0.5, 0.5, 0.5] and preprocessing["std"] == [0.25, 0.25, 0.25]


def test_a_missing_package_is_named_with_the_extra(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(SystemExit, match=r"error: export: needs the package onnx: pip install 'vitkit\[export\]'"):
        export_tool.main([str(run / "run"), "--out", str(tmp_path / "a.onnx")])


def test_a_torch_that_is_too_old_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.6.0+cpu"))
    with pytest.raises(SystemExit, match=r"PyTorch 2\.6\.0\+cpu cannot export these models; expected 2\.7 or newer"):
        export_tool.main([str(run / "run"), "--out", str(tmp_path / "a.onnx")])


def test_a_predictor_is_no_model_to_export(run):
    with pytest.raises(ConfigError, match="got Predictor for a model or weights; expected a name, a path or a config"):
        vitkit.export(vitkit.load(run / "run"))


def test_an_operation_that_a_format_lacks_is_named(tmp_path):
    cfg = load_config("translation_rnnsearch_multi30k", ["model.d_hidden=8", "model.d_embedding=8"])
    vocabulary = Vocabulary.train("word", ["a b c"])
    model = build_model(cfg["model"], vocabularies=dict(source=vocabulary, target=vocabulary))
    with pytest.raises(ConfigError, match="no graph is defined for RNNTranslator: .*pack_padded_sequence"):
        export(Translator(model, dict(source=vocabulary, target=vocabulary)), cfg, tmp_path / "a.onnx")


def test_weights_that_no_onnx_file_can_hold_are_an_error_before_anything_is_traced(tmp_path):
    class Large(ExportGraph):
        axes = {"x": ("batch", None)}

        def forward(self, x):
            raise AssertionError("traced")

    with torch.device("meta"):
        part = Part("", Large(torch.nn.Linear(2**15, 2**14)), [], {"x": torch.ones(2, 2**15)})  # 2 GiB
        large = Part("", Large(torch.nn.Linear(2**15, 2**16)), [], {"x": torch.ones(2, 2**15)})
    with pytest.raises(ConfigError, match=r"a.onnx have 2.0 GiB; .* 2 GiB at most\. Choose format torch, or .* fp16\."):
        write_part(part, tmp_path / "a.onnx", ExportSettings(), {})
    with pytest.raises(ConfigError, match=r"a.onnx have 8.0 GiB; .* Choose format torch\."):
        write_part(large, tmp_path / "a.onnx", ExportSettings(), {})


class Decomposition(ExportGraph):
    """Eigenvalues, which ONNX has no operation for."""

    axes = {"x": ("batch", None, None)}

    def forward(self, x):
        return {"y": torch.linalg.eigvalsh(x)}


def test_an_operation_that_onnx_lacks_is_named(tmp_path):
    part = Part("", Decomposition(torch.nn.Identity()), [], {"x": torch.eye(3).repeat(2, 1, 1)})
    with pytest.raises(ConfigError, match=r"export: ONNX does not support the operation aten\._linalg_eigh"):
        write_part(part, tmp_path / "a.onnx", ExportSettings(), {})


def test_fixed_size_models_are_exported_for_their_size():
    swin = dict(type="Swin", embed_dim=16, depths=[1, 2, 1, 1], num_heads=[1, 1, 2, 2], pretrained=False)
    crop = dict(transforms=dict(type="ClassificationEvalTransforms", size=32))
    predictor, _ = predictor_of("swin_tiny_in1k", [f"model.backbone={swin}"], **crop)
    assert image_size(predictor, None) == (32, 32)
    predictor.transforms = None
    with pytest.raises(ConfigError, match=r"a classifier on Swin has windows that depend on the size of its images"):
        image_size(predictor, None)
    predictor, _ = predictor_of("quickstart/eomt")
    assert image_size(predictor, None) == (96, 96)
    with pytest.raises(ConfigError, match=r"got size 64x96, but EoMT pads images to 96x96 .* Leave size out"):
        image_size(predictor, (64, 96))


class Scored(ExportGraph):
    """Two detections, and one that is not compared."""

    axes = {"x": ("batch",)}

    def forward(self, x):
        return {"scores": self.model.scores, "labels": torch.tensor([[0, 1, 2]])}


class Swapped:
    """A file that has the first two detections in the other order."""

    def run(self, inputs):
        return {"scores": torch.tensor([[0.9, 0.9, 0.1]]), "labels": torch.tensor([[1, 0, 2]])}


@pytest.mark.parametrize(("second", "expected"), [(0.9, 0.0), (0.9 - 1e-7, 0.0), (0.8, 1.0)])
def test_order_of_detections_with_equal_scores_is_not_a_difference(second, expected):
    model = torch.nn.Module()
    model.scores = torch.tensor([[0.9, second, 0.1]])
    scores, labels = differences(Scored(model), Swapped(), [{"x": torch.zeros(1)}], 1e-3)
    assert labels.output == "labels" and labels.largest == expected
    assert scores.largest == pytest.approx(0.9 - second, abs=1e-6)


class Selected(ExportGraph):
    """Four queries, of which the last are nearly equal."""

    axes = {"x": ("batch",)}

    def forward(self, x):
        torch.manual_seed(0)
        logits, boxes = torch.randn(2, 4, 3), torch.rand(2, 4, 4)
        logits[..., 2] = -math.inf
        return {"pred_logits": logits, "pred_boxes": boxes, "pred_masks": torch.randn(2, 4, 8, 8)}


@pytest.mark.parametrize("is_wrong", [False, True])
def test_order_of_queries_is_not_a_difference(is_wrong, capsys):
    graph = Selected(torch.nn.Module())
    outputs = graph(torch.zeros(1))
    order = torch.tensor([[0, 1, 3, 2], [0, 1, 2, 3]])
    file = {name: value[torch.arange(2)[:, None], order] for name, value in outputs.items()}
    file["pred_boxes"][0, 0, 0] += 0.1 * is_wrong
    run = SimpleNamespace(run=lambda inputs: file)
    found = {each.output: each.largest for each in differences(graph, run, [{"x": torch.zeros(1)}], 1e-3)}
    assert found == {"pred_logits": 0, "pred_boxes": pytest.approx(0.1 * is_wrong), "pred_masks": 0}
    assert "2 of 8 queries are elsewhere in the file's order" in capsys.readouterr().out


OWN_MODEL = """
from torch import nn

from vitkit import MODELS, Model
from vitkit.apps.export_reading.graphs import ImageGraph
from vitkit.ops.images import normalize_images


@MODELS.register
class OwnHeatmap(Model):
    def __init__(self, num_classes=2):
        super().__init__()
        self.layer = nn.Conv2d(3, num_classes, 8, stride=8)

    def forward(self, images, padding_mask=None):
        return {"heat": self.layer(normalize_images(images, padding_mask))}

    def postprocess(self, outputs, image_sizes):
        return [{"semantic": heat.argmax(0)} for heat in outputs["heat"]]

    def export_graph(self):
        return ImageGraph(self, outputs=["heat"])


def config():
    return dict(model=dict(type="OwnHeatmap"))
"""


def test_a_users_model_says_itself_what_its_file_returns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "heatmap.py").write_text(OWN_MODEL)
    torch.manual_seed(0)
    model = build_model(load_config("heatmap.py")["model"], classes=["left", "right"])
    state = {"model": model.state_dict(), "classes": ["left", "right"], "config": json.dumps(load_config("heatmap.py"))}
    save_checkpoint("heatmap.pth", state)
    export = vitkit.export("heatmap.pth", precision="fp16")
    assert export.path == Path("heatmap.onnx") and export.runner == Path("run_heatmap.py")
    assert [difference.output for difference in export.parts[0].differences] == ["heat"]
    expected, actual = (load(name)(IMAGES[0]).fields["semantic"] for name in ("heatmap.pth", "heatmap.onnx"))
    assert expected.shape == (8, 11) and (actual == expected).float().mean() > 0.9
    with pytest.raises(ConfigError, match="no graph is defined for Identity.* Give the model a method export_graph"):
        image_graph(torch.nn.Identity())
    pretrained = build_model(dict(type="MAE", backbone=dict(type="ViT", patch_size=8, image_size=16, depth=1)))
    with pytest.raises(ConfigError, match="MAE trains a backbone for other models. Train one of these with model.back"):
        image_graph(pretrained)


class Windows(torch.nn.Module):
    """Cuts maps into windows, shifted ones with padding, and joins them again."""

    def forward(self, x):
        windows = window_partition(x, 7, shift=3, padding_value=torch.ones(1))
        return windows, window_reverse(2 * windows, 7, x.shape[1:3], shift=3)


def test_windowed_models_are_traced_for_maps_of_any_size():
    free = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(Windows(), (torch.randn(2, 65, 129, 1),), dynamic_shapes=free, strict=False)
    for size in ((1, 16, 22, 1), (3, 15, 30, 1)):
        x = torch.randn(size)
        for a, b in zip(program.module()(x), Windows()(x)):
            assert torch.equal(a, b)


def test_products_with_a_vector_are_not_quantized(tmp_path):
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    helper, path = onnx.helper, tmp_path / "int8.onnx"
    weight, (vector, *_) = np.random.default_rng(0).standard_normal((2, 8, 8)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["hidden"], name="matrix"),
        helper.make_node("MatMul", ["hidden", "vector"], ["y"], name="vector"),
    ]
    shapes = {"x": ["rows", 8], "y": ["rows"]}
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items())
    weights = [onnx.numpy_helper.from_array(weight, "weight"), onnx.numpy_helper.from_array(vector, "vector")]
    graph = helper.make_graph(nodes, "products", [x], [y], weights)
    opset = helper.make_opsetid("", 20)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), tmp_path / "fp32.onnx")
    export_module.quantize(tmp_path / "fp32.onnx", path)
    products = [node.op_type for node in onnx.load(path).graph.node if "MatMul" in node.op_type]
    assert products == ["MatMulInteger", "MatMul"]
    rows = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)
    (found,) = onnxruntime.InferenceSession(path).run(None, {"x": rows})
    expected = rows @ weight @ vector
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


def test_int8_does_not_overflow_on_any_processor(tmp_path):
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    x, y = (helper.make_tensor_value_info(name, kind, ["rows", 8]) for name in "xy")
    weights = [onnx.numpy_helper.from_array(np.full((8, 8), 0.5, np.float32), "weight")]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "weight"], ["y"])], "product", [x], [y], weights)
    opset = helper.make_opsetid("", 20)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), tmp_path / "fp32.onnx")
    export_module.quantize(tmp_path / "fp32.onnx", tmp_path / "int8.onnx")
    (found,) = onnxruntime.InferenceSession(tmp_path / "int8.onnx").run(None, {"x": np.ones((4, 8), np.float32)})
    assert np.allclose(found, 4, rtol=0.02)
    (quantized,) = (w for w in onnx.load(tmp_path / "int8.onnx").graph.initializer if w.name == "weight_quantized")
    assert np.abs(onnx.numpy_helper.to_array(quantized)).max() <= 64  # two products with 255 are below 2^15


class Product(ExportGraph):
    """A linear layer, whose product int8 quantizes."""

    axes = {"x": ("batch", None)}

    def __init__(self):
        super().__init__(torch.nn.Linear(8, 8))

    def forward(self, x):
        return {"y": self.model(x)}


@pytest.mark.parametrize(("in_int8", "is_noted"), [(0.030, True), (0.015, False)])
def test_int8_that_is_not_faster_on_this_processor_is_noted(in_int8, is_noted, tmp_path, monkeypatch, capsys):
    onnx = pytest.importorskip("onnx")
    torch.manual_seed(0)
    settings, inputs = ExportSettings(precision="int8"), {"x": torch.randn(4, 8)}
    part, path = Part("", Product(), [inputs], inputs), tmp_path / "a.onnx"
    about = dict(config={}, inputs=["x"], size=None, postprocessing=None)
    export_module.write_part(part, path, settings, about)
    calls, times = [], [in_int8, 0.04, 0.02]  # of the file, PyTorch and the file in float32
    monkeypatch.setattr(export_module, "seconds_in_turn", lambda timed: calls.extend(call() for call in timed) or times)
    capsys.readouterr()
    exported = export_module.compare_part(part, path, tmp_path / "final.onnx", settings)
    assert exported.seconds == (in_int8, 0.04) and exported.unquantized_seconds == 0.02
    quantized, expected, unquantized = (call["y"] for call in calls)
    assert torch.allclose(unquantized, expected, atol=1e-6) and not torch.allclose(quantized, expected, atol=1e-6)
    speed = open_exported(path).metadata["speed"]
    assert (speed["seconds"], speed["seconds_in_fp32"]) == (in_int8, 0.02) and speed["processor"]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert len(lines) == is_noted and all("final.onnx takes 30.0 ms, and 20.0 ms in float32" in line for line in lines)
    assert {entry.key for entry in onnx.load(path).metadata_props} == {*about, "speed"}


def test_functions_are_timed_in_turn(monkeypatch):
    now, calls = [0.0], []

    def call(name, seconds):
        calls.append(name)
        now[0] += seconds

    monkeypatch.setattr(checks.time, "perf_counter", lambda: now[0])
    assert checks.seconds_in_turn([lambda: call("a", 2.0), lambda: call("b", 1.0)]) == pytest.approx([2.0, 1.0])
    assert calls == ["a", "b"] * (checks.NUM_RUNS + 1)
