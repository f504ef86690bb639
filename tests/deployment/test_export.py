"""Exported files: they compute what their model does, for any size and number of images, and run without torch."""

import importlib
import io
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from PIL import Image, UnidentifiedImageError

import vitkit
from vitkit import build_model, load_config, model_zoo
from vitkit.checkpoint import save_checkpoint
from vitkit.config import save_config, trust
from vitkit.data.io.channel_files import read_channels
from vitkit.data.io.image_files import FORMATS, read_image
from vitkit.deployment import export as export_module
from vitkit.deployment import exported
from vitkit.deployment.checks import differences, image_inputs, image_size, run_graph
from vitkit.deployment.export import ExportSettings, Part, check_out, export_model, read_images, runner_path, write_part
from vitkit.deployment.exported import ExportedGenerator, ExportedModel, open_exported
from vitkit.deployment.graphs import ExportGraph, image_graph, mask_multiple
from vitkit.deployment.metadata import describe, postprocessing, resize_of
from vitkit.deployment.text import text_graphs
from vitkit.errors import CheckpointError, ConfigError
from vitkit.inference import Predictor, Translator, load
from vitkit.inference.tiles import Tiling
from vitkit.kernels.windows import window_partition, window_reverse
from vitkit.seq2seq.vocabulary import Vocabulary
from vitkit.structures import ImageSizes, ScoreThresholds
from vitkit.tools import export as export_tool
from vitkit.tools import test as test_tool
from vitkit.visualization.canvas import class_color

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
onnx_runner = importlib.import_module("vitkit.deployment.onnx_runner")

RESNET = dict(type="ResNet", depth=18, norm="bn", pretrained=False)
TINY = "model.backbone=dict(type='ViT', d_model=32, depth=1, num_heads=2, pretrained=False)"
"""Overrides for a tiny model, as tracing and converting take time for each operation."""
LAYERS = ["model.head.num_encoder_layers=1", "model.head.num_decoder_layers=1", "model.head.d_ffn=32"]
CLASSES = ["circle", "square", "triangle", "star", "ring", "cross"]


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


IMAGES = [noise(70, 90), noise(96, 64, seed=1)]


def predictor_of(config, overrides=(), **arguments):
    """A predictor with random weights, and its config."""
    cfg = load_config(config, list(overrides))
    torch.manual_seed(0)
    return Predictor(build_model(cfg["model"]), arguments.pop("classes", CLASSES), **arguments), cfg


def export(predictor, cfg, out, **settings):
    metadata = describe(predictor, cfg, name="tiny", licence="CC0")
    return export_model(predictor, out, ExportSettings(**settings), images=IMAGES, metadata=metadata)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a tiny DETR with random weights, with the files that the tool wrote for it."""
    folder = tmp_path_factory.mktemp("export")
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
    export_tool.main([str(folder / "run"), "--out", str(folder / "out" / "tiny.onnx"), "--licence", "CC0"])
    return folder


def test_export_prints_no_line_of_its_libraries(run, tmp_path):
    command = [sys.executable, "-m", "vitkit.tools.export", str(run / "run"), "--out", str(tmp_path / "tiny.onnx")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "wrote " in printed.stdout and "folding" not in printed.stdout + printed.stderr


def test_quantization_prints_no_advice_of_its_library(tmp_path):
    import onnx
    from onnx import helper

    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 8]) for name in "xy")
    weight = onnx.numpy_helper.from_array(torch.randn(8, 8).numpy(), "weight")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "weight"], ["y"])], "product", [x], [y], [weight])
    path = tmp_path / "product.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    code = f"import pathlib; from vitkit.deployment.export import quantize; quantize(pathlib.Path({str(path)!r}))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout + printed.stderr == ""
    assert "MatMulInteger" in [node.op_type for node in onnx.load(path).graph.node]


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
    assert metadata["classes"] == CLASSES and metadata["licence"] == "CC0" and metadata["type"] == "DETR"
    assert metadata["preprocessing"]["resize"] == {"short_side": 64, "max_size": 96, "rounding": "detr"}
    assert metadata["preprocessing"]["mean"] == [0.485, 0.456, 0.406]
    assert metadata["thresholds"]["origin"] == "chosen" and metadata["config"]["model"]["type"] == "DETR"


def test_exported_file_predicts_like_its_model(run):
    expected, actual = load(run / "run"), load(run / "out" / "tiny.onnx")
    assert actual.classes == CLASSES and actual.thresholds == expected.thresholds
    for a, b in zip(expected.predict(IMAGES, batch_size=2), actual.predict(IMAGES, batch_size=2)):
        for name, value in a.fields.items():
            assert torch.allclose(value, b.fields[name], atol=1e-3), name


def test_exported_file_is_evaluated_on_the_data_of_its_model(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tables = []
    for model in (run / "run", run / "out" / "tiny.onnx"):
        test_tool.main([str(model), "--device", "cpu", "--out", f"{len(tables)}.json"])
        tables.append(capsys.readouterr().out.split("\n")[1:5])
    assert tables[0] == tables[1] and "boxes" in tables[0][3]
    a, b = (json.loads(Path(f"{i}.json").read_text()) for i in range(2))
    assert np.allclose([x["bbox"] for x in a], [x["bbox"] for x in b], atol=1e-2)


WITHOUT_TORCH = """
import importlib.abc, runpy, sys
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torch", "torchvision", "vitkit", "cv2", "timm"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_generated_program_predicts_without_torch(run, tmp_path):
    command = [sys.executable, "-c", WITHOUT_TORCH, run / "out" / "run_tiny.py", run / "a.png", "--out", tmp_path]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    expected = load(run / "run").predict([run / "a.png"])[0]
    assert np.allclose(result["scores"], expected.scores, atol=1e-4)
    assert np.allclose(result["boxes_xyxy"], expected.boxes, atol=0.1)
    assert Image.open(tmp_path / "a.png").size == (90, 70)


def test_drawings_of_the_generated_program_replace_neither_inputs_nor_each_other(run, tmp_path, monkeypatch):
    (tmp_path / "b").mkdir()
    paths = [tmp_path / "a.png", tmp_path / "b" / "a.jpg"]
    for path in paths:
        Image.fromarray(IMAGES[0]).save(path)
    before = paths[0].read_bytes()
    command = ["run_tiny.py", "--model", run / "out" / "tiny.onnx", *paths, "--out", tmp_path]
    monkeypatch.setattr(sys, "argv", list(map(str, command)))
    with pytest.raises(SystemExit, match="0|False"):
        onnx_runner.main()
    assert paths[0].read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "a_2.png", "a_3.png", "b"}


def test_generated_program_names_unreadable_images_and_continues(run, tmp_path, monkeypatch, capsys):
    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["run_tiny.py", "--model", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            onnx_runner.main()
        return stopped.value.code

    model, empty = run / "out" / "tiny.onnx", tmp_path / "empty.png"
    empty.touch()
    assert main(model, "missing.png", empty, run / "a.png") == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["input"] == str(run / "a.png")
    lines = printed.err.splitlines()
    assert len(lines) == 2 and lines[0].startswith("error: missing.png: ") and f"error: {empty}: " in lines[1]
    assert main(model, run / "a.png", "--out", empty) == f"error: --out {empty}: expected a folder (File exists)."
    assert main(tmp_path / "none.onnx", "a.png").startswith(f"error: --model {tmp_path / 'none.onnx'}: no such file")
    assert main(model, run / "a.png") == 0


@pytest.mark.parametrize("channels", [None, 3])
def test_generated_program_opens_the_formats_of_vitkit(channels, tmp_path):
    assert onnx_runner.FORMATS == FORMATS
    path = tmp_path / "a.jpg"
    # Pillow would start Ghostscript to render it.
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 6\n%%EndComments\nshowpage\n%%EOF\n")
    with pytest.raises(UnidentifiedImageError):
        onnx_runner.open_image(path, channels)


@pytest.mark.parametrize("suffix", ["jpg", "png"])  # Pillow 13.0 garbles uncompressed TIFFs that are turned
def test_program_turns_images_of_any_number_of_channels_upright(tmp_path, suffix):
    path, exif = tmp_path / f"a.{suffix}", Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 12)).save(path, exif=exif)
    image = onnx_runner.open_image(path, 1)
    assert image.shape == (12, 4, 1)
    np.testing.assert_array_equal(image, read_channels(path, 1))


def test_generated_program_writes_names_inside_the_image():
    box = [-30.0, -20.0, 60.0, 50.0]
    result = dict(
        labels=[0, 0], names=["cell", "cell"], scores=[0.5, 0.5], boxes_xyxy=[box, [160.0, 85.0, 240.0, 120.0]]
    )
    drawn = np.asarray(onnx_runner.draw(np.full((100, 200, 3), 128, np.uint8), result)).astype(int)
    white = (drawn > 160).all(axis=2)
    apart = onnx_runner.draw(np.full((300, 600, 3), 128, np.uint8), result | dict(boxes_xyxy=[[9.0, 9.0, 90.0, 90.0]]))
    one_name = (np.asarray(apart) > 160).all(axis=2).sum()
    assert one_name > 20 and white[:20].sum() == white[80:].sum() == one_name


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_generated_program_reads_all_bits_or_says_that_it_does_not(suffix, tmp_path):
    image, path = np.arange(8 * 6 * 3, dtype=np.uint16).reshape(8, 6, 3), f"{tmp_path}/a{suffix}"
    cv2.imwrite(path, image)
    with pytest.raises(ValueError, match="of 16 bits in colour, Pillow reads 8: store a .npy file"):
        onnx_runner.open_image(path, 3)
    cv2.imwrite(path, image[:, :, 0])
    np.testing.assert_array_equal(onnx_runner.open_image(path, 1), image[:, :, :1])


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_generated_program_reads_grey_images_of_16_bits_like_vitkit(suffix, tmp_path):
    path = f"{tmp_path}/a{suffix}"
    cv2.imwrite(path, np.arange(0, 60000, 1000, dtype=np.uint16).reshape(6, 10))
    np.testing.assert_array_equal(onnx_runner.open_image(path), read_image(path))
    assert read_image(path).max() == 59000 >> 8


def test_generated_program_draws_in_the_colors_of_vitkit():
    assert [onnx_runner.color_of(k) for k in range(1, 31)] == [class_color(k) for k in range(30)]
    assert onnx_runner.color_of(0) == (0, 0, 0)


def test_file_that_exceeds_the_tolerance_is_not_written(run, tmp_path, monkeypatch):
    # Tracing again would take too long.
    monkeypatch.setattr(export_module, "write_part", lambda _, path, *__: shutil.copyfile(run / "out/tiny.onnx", path))
    with pytest.raises(
        SystemExit, match=r"export: b.onnx is not written, as it differs .* pred_logits: .* larger tolerance"
    ):
        export_tool.main([str(run / "run"), "--out", str(tmp_path / "b.onnx"), "--tolerance", "0"])
    assert not list(tmp_path.iterdir())


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


def test_licence_of_the_zoo_applies_only_to_its_own_weights(tmp_path):
    assert export_module.zoo_licence("detr_r50") == model_zoo.index()["detr_r50"]["licence"] is not None
    (tmp_path / "detr_r50").mkdir()
    assert export_module.zoo_licence(tmp_path / "detr_r50") is None


def test_metadata_contain_the_normalisation_statistics_of_the_model():
    predictor, cfg = predictor_of("quickstart/classifier")
    predictor.model.backbone.pixel_mean, predictor.model.pixel_mean = (0.1, 0.1, 0.1), (0.5, 0.4, 0.3)
    assert describe(predictor, cfg, name="a", licence=None)["preprocessing"]["mean"] == [0.5, 0.4, 0.3]
    predictor, cfg = predictor_of("quickstart/detr")
    predictor.model.backbone.pixel_mean, predictor.model.backbone.pixel_std = (0.5,) * 3, (0.25,) * 3
    preprocessing = describe(predictor, cfg, name="a", licence=None)["preprocessing"]
    assert preprocessing["mean"] == [0.5, 0.5, 0.5] and preprocessing["std"] == [0.25, 0.25, 0.25]


class GraphInPython:
    """A stand-in for an exported file that runs the graph of a model."""

    path, inputs = "a.onnx", ("images", "padding_mask", "image_sizes")

    def __init__(self, model, graph=None):
        self.graph = image_graph(model) if graph is None else graph
        self.metadata = {"size": None, "postprocessing": postprocessing(model)}

    def run(self, inputs, outputs=None):
        values = run_graph(self.graph, inputs)
        return {name: value for name, value in values.items() if outputs is None or name in outputs}


def test_exported_model_has_the_properties_of_its_model():
    found = {}
    for config in ("quickstart/classifier", "quickstart/detr", "quickstart/eomt", "quickstart/maskformer_semantic"):
        predictor, _ = predictor_of(config)
        predictor.model = ExportedModel(GraphInPython(predictor.model), predictor.model)
        found[config] = predictor.finds_objects
    assert list(found.values()) == [False, True, False, False]
    expected = predictor_of(config)[0](IMAGES[0], tiles=Tiling(64, 16)).fields["semantic"]
    assert torch.equal(predictor(IMAGES[0], tiles=Tiling(64, 16)).fields["semantic"], expected)


def test_file_is_opened_only_once_to_be_loaded(run, monkeypatch):
    opened, file = [], run / "out" / "tiny.onnx"
    exported._opened.cache_clear()
    monkeypatch.setattr(exported, "open_exported", lambda path: opened.append(path) or open_exported(path))
    load(file)
    load(file)  # it may have changed since
    assert opened == [file, file]


def test_a_missing_package_is_named_with_the_extra(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(SystemExit, match=r"error: export: needs the package onnx: pip install 'vitkit\[export\]'"):
        export_tool.main([str(run / "run"), "--out", str(tmp_path / "a.onnx")])


def test_other_files_are_refused_as_exported_models(tmp_path):
    (tmp_path / "a.onnx").write_bytes(b"no model")
    with pytest.raises(CheckpointError, match=r"a.onnx: ONNX Runtime cannot open it"):
        load(tmp_path / "a.onnx")
    (tmp_path / "a.pt2").write_bytes(b"no archive")
    with pytest.raises(CheckpointError, match=r"a.pt2: was not written by `vitkit export`, or is damaged"):
        load(tmp_path / "a.pt2")
    with pytest.raises(CheckpointError, match="no file 'missing.onnx'"):
        load("missing.onnx")


@pytest.mark.parametrize(
    ("name", "value"),
    [("size", [1e9]), ("inputs", "images"), ("outputs", 5), ("postprocessing", {"mask_multiple": 0}), ("config", [])],
)
def test_wrong_metadata_are_one_line(name, value, run, tmp_path):
    onnx = pytest.importorskip("onnx")
    model = onnx.load(run / "out" / "tiny.onnx")
    entries = {entry.key: entry.value for entry in model.metadata_props} | {name: json.dumps(value)}
    onnx.helper.set_model_props(model, entries)
    onnx.save(model, tmp_path / "a.onnx")
    with pytest.raises(CheckpointError, match=rf"a\.onnx: damaged: its metadata has {name}="):
        load(tmp_path / "a.onnx")


def test_an_input_that_the_model_does_not_have_is_named(program, tmp_path):
    with zipfile.ZipFile(program) as archive:
        name = next(name for name in archive.namelist() if name.endswith("vitkit.json"))
        about = json.loads(archive.read(name))
    about["inputs"] = json.dumps([*json.loads(about["inputs"]), "depth"])
    with_member(program, tmp_path / "a.pt2", "vitkit.json", json.dumps(about))
    with pytest.raises(CheckpointError, match=r"a\.pt2: damaged: it takes an input 'depth'; the model has images, pad"):
        load(tmp_path / "a.pt2", trust=True)(np.zeros((32, 32, 3), np.uint8))


class Attack:
    """Unpickling it runs code, which writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def with_member(source, target, ending, content):
    """Copy an archive with the content of a member replaced."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        names = old.namelist()
        assert any(name.endswith(ending) for name in names)
        for name in names:
            new.writestr(name, content if name.endswith(ending) else old.read(name))


@pytest.fixture(scope="module")
def program(run):
    path = run / "program" / "tiny.pt2"
    export_tool.main([str(run / "run"), "--format", "torch", "--out", str(path)])
    return path


@pytest.mark.parametrize(
    ("command", "call"),
    [
        ("export", lambda path, out: vitkit.export(path, out / "b.pt2", format="torch")),
        ("convert", lambda path, out: vitkit.convert(path, out / "b.pth")),
        ("explain", lambda path, out: vitkit.explain(path, image=IMAGES[0], out=out / "b")),
    ],
)
def test_an_exported_file_is_refused_where_the_model_is_needed(command, call, program, tmp_path):
    with pytest.raises(ConfigError, match=rf"{command}: .*tiny.pt2 is an exported file, .* Give the checkpoint"):
        call(program, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_program_keeps_its_precision_under_autocast(program):
    image = IMAGES[0]
    expected, actual = (load(program, precision=precision)(image, threshold=0.0) for precision in ("fp32", "bf16"))
    assert torch.equal(actual.scores, expected.scores) and torch.equal(actual.boxes, expected.boxes)


def test_a_program_of_somebody_else_runs_only_if_it_is_trusted(program, tmp_path, monkeypatch):
    victim, path = tmp_path / "written", tmp_path / "a.pt2"
    pickled = io.BytesIO()
    torch.save(Attack(victim), pickled)
    with_member(program, path, "sample_inputs/model.pt", pickled.getvalue())
    with pytest.raises(ConfigError, match="this exported program would run code .*\n.*a.pt2 .*sha256"):
        load(path)
    assert not victim.exists()
    monkeypatch.setattr(trust, "_trusted_here", set())
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="--trust"):
        load(program)
    assert load(program, trust=True).classes == load(program).classes


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"config": "1"}', b'{"config": 1}', b"[" * 100_000, b"\xff"])
def test_a_program_without_its_metadata_is_refused(content, program, tmp_path):
    with_member(program, tmp_path / "a.pt2", "extra/vitkit.json", content)
    with pytest.raises(CheckpointError, match="a.pt2: was not written by `vitkit export`"):
        load(tmp_path / "a.pt2", trust=True)


def test_an_operation_that_a_format_lacks_is_named(tmp_path):
    cfg = load_config("translation_rnnsearch_multi30k", ["model.d_hidden=8", "model.d_embedding=8"])
    vocabulary = Vocabulary.train("word", ["a b c"])
    model = build_model(cfg["model"], vocabularies=dict(source=vocabulary, target=vocabulary))
    with pytest.raises(ConfigError, match="no graph is defined for RNNTranslator: .*pack_padded_sequence"):
        export(Translator(model, dict(source=vocabulary, target=vocabulary)), cfg, tmp_path / "a.onnx")


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


OWN_MODEL = """
from torch import nn

from vitkit import MODELS, Model
from vitkit.deployment.graphs import ImageGraph
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


def captioner():
    """A predictor with random weights, and its config."""
    vocabulary = Vocabulary.train("word", ["a red ring above a blue star"])
    small = [TINY, "model.d_ffn=32", "model.num_decoder_layers=1", "model.decoding.max_length=6"]
    cfg = load_config("quickstart/captioning", small)
    torch.manual_seed(0)
    return Predictor(build_model(cfg["model"], vocabularies=dict(target=vocabulary)), ()), cfg


def test_encoder_and_step_graphs_write_the_captions_of_the_model(monkeypatch):
    predictor, cfg = captioner()
    written = {"text": predictor(IMAGES[0]).fields["text"]}
    files = [GraphInPython(predictor.model, graph=graph) for graph in text_graphs(predictor.model)]
    files[0].metadata["step"] = "a.step.onnx"
    monkeypatch.setattr(exported, "open_exported", lambda path: files[1])
    runner = object.__new__(onnx_runner.Runner)
    runner.info = describe(predictor, cfg, name="tiny", licence=None) | {"size": None}
    runner.inputs, (runner.session, runner.step) = ["images", "padding_mask"], files

    def run(file, arrays):
        outputs = file.run({name: torch.from_numpy(value) for name, value in arrays.items()})
        return {name: value.numpy() for name, value in outputs.items()}

    monkeypatch.setattr(onnx_runner, "run", run)
    assert runner(IMAGES[0]) == written
    predictor.model = ExportedGenerator(files[0], predictor.model)
    assert predictor(IMAGES[0]).fields["text"] == written["text"] != ""


def test_products_with_a_vector_are_not_quantised(tmp_path):
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    helper, path = onnx.helper, tmp_path / "a.onnx"
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
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), path)
    export_module.quantize(path)
    products = [node.op_type for node in onnx.load(path).graph.node if "MatMul" in node.op_type]
    assert products == ["MatMulInteger", "MatMul"]
    rows = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)
    (found,) = onnxruntime.InferenceSession(path).run(None, {"x": rows})
    expected = rows @ weight @ vector
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.slow
def test_captioner_is_exported_as_an_encoder_and_a_step(tmp_path):
    predictor, cfg = captioner()
    parts = export(predictor, cfg, tmp_path / "a.onnx")
    assert [part.path.name for part in parts] == ["a.onnx", "a.step.onnx"]
    written = {"text": predictor(IMAGES[0]).fields["text"]}
    assert load(tmp_path / "a.onnx")(IMAGES[0]).fields["text"] == written["text"] != ""
    assert onnx_runner.Runner(tmp_path / "a.onnx")(IMAGES[0]) == written


class Outputs:
    """Random outputs of a mask model, for images resized from 36x60 to 24x40 pixels, and the runner's results."""

    def __init__(self, cfg, *, boxes=False, threshold=0.0):
        self.model, num_classes = build_model(cfg), cfg["num_classes"]
        generator = torch.Generator().manual_seed(0)
        masks = torch.nn.functional.interpolate(torch.randn(1, 9, 3, 5, generator=generator) * 6, (12, 20))
        num_logits = num_classes + (self.model.class_activation != "sigmoid")
        self.raw = {"pred_logits": torch.randn(1, 9, num_logits, generator=generator) * 3, "pred_masks": masks}
        if boxes:
            self.raw["pred_boxes"] = torch.rand(1, 9, 4, generator=generator)
        multiple = mask_multiple(self.model)
        self.covered = tuple(-(-side // multiple) * multiple for side in (24, 40))
        runner = object.__new__(onnx_runner.Runner)
        runner.threshold, runner.inputs = threshold, []
        thresholds = {"overall": 0.0, "by_class": {}}
        runner.info = {"classes": list("abcdef"[:num_classes]), "postprocessing": postprocessing(self.model)}
        runner.info["thresholds"] = thresholds
        inputs = {"images": torch.zeros(1, 3, 24, 40, dtype=torch.uint8)}
        inputs |= {"padding_mask": torch.zeros(1, 24, 40, dtype=torch.bool), "image_sizes": torch.tensor([[36, 60]])}
        results = self.raw | image_graph(self.model).finish(self.raw, inputs)
        arrays = {name: value[0].numpy() for name, value in results.items()}
        self.results = runner.postprocess(arrays, {k: v.numpy() for k, v in inputs.items()}, (36, 60))

    def expected(self):
        outputs = dict(self.raw, input_size=self.covered, image_sizes=torch.tensor([[24, 40]]))
        return self.model.postprocess(outputs, [(36, 60)])[0]


def masks_model(config, **settings):
    cfg = load_config(config)["model"] | dict(num_classes=5, num_queries=9, backbone=RESNET) | settings
    return cfg


def test_generated_program_finds_the_segments_and_instances_of_the_model():
    things = [True, False, True, True, False]
    cfg = masks_model("quickstart/mask2former_panoptic", things=things, object_threshold=0.4, tasks=["panoptic"])
    case = Outputs(cfg | dict(overlap_threshold=0.2))
    expected = case.expected()
    assert expected["segments_info"] and np.array_equal(case.results["panoptic"], expected["panoptic"])
    assert [s["label"] for s in case.results["segments_info"]] == [s["label"] for s in expected["segments_info"]]

    case = Outputs(masks_model("quickstart/mask2former_panoptic", things=things, tasks=["instance"], num_instances=7))
    expected = case.expected()
    order = expected["scores"].argsort(descending=True, stable=True)
    assert len(order) and np.allclose(case.results["scores"], expected["scores"][order], atol=1e-5)
    assert np.array_equal(case.results["boxes_xyxy"], expected["boxes_xyxy"][order])
    assert np.array_equal(case.results["masks"], expected["masks"][order])


def test_generated_program_finds_the_segments_and_instances_of_a_panoptic_detr():
    cfg = load_config("detr_r50_panoptic")["model"] | dict(num_classes=5, num_queries=9)
    cfg["things"], cfg["object_threshold"] = [True, False, True, True, False], 0.4
    cfg["backbone"] = RESNET
    case = Outputs(cfg | dict(tasks=["panoptic", "instance"]), boxes=True)
    expected = case.expected()
    assert expected["segments_info"] and np.array_equal(case.results["panoptic"], expected["panoptic"])
    assert [s["label"] for s in case.results["segments_info"]] == [s["label"] for s in expected["segments_info"]]
    order = expected["scores"].argsort(descending=True, stable=True)
    assert np.allclose(case.results["boxes_xyxy"], expected["boxes_xyxy"][order], atol=1e-3)
    assert np.array_equal(case.results["masks"], expected["masks"][order])


def test_generated_program_finds_the_instances_of_rf_detr():
    cfg = load_config("rf_detr_seg_n_coco")["model"] | dict(num_classes=5, num_queries=9, num_detections=12)
    vit = dict(patch_size=12, d_model=32, depth=2, num_heads=2, image_size=24, out_features=["block1", "block2"])
    cfg["backbone"] = dict(type="WindowedViT", num_windows=1, global_blocks=[1], pretrained=False, **vit)
    case = Outputs(cfg | dict(training_queries=[]), boxes=True)
    expected = case.expected()
    assert np.allclose(case.results["scores"], expected["scores"]) and len(expected["masks"]) == 12
    assert np.allclose(case.results["boxes_xyxy"], expected["boxes_xyxy"], atol=1e-3)
    assert np.array_equal(case.results["masks"], expected["masks"])


def test_exported_semantic_map_equals_that_of_the_model_at_image_size():
    case = Outputs(masks_model("quickstart/maskformer_semantic"))
    inputs = {"images": torch.zeros(1, 3, 24, 40, dtype=torch.uint8)}
    semantic = image_graph(case.model).finish(case.raw, inputs)["semantic"]
    outputs = dict(case.raw, input_size=case.covered, image_sizes=torch.tensor([[24, 40]]))
    assert torch.equal(semantic[0], case.model.postprocess(outputs, [(24, 40)])[0]["semantic"])


def test_generated_program_resizes_images_like_the_model(tmp_path):
    cases = {
        "the middle": dict(transforms=dict(type="ClassificationEvalTransforms", size=32)),
        "squashed": dict(transforms=dict(type="ClassificationEvalTransforms", size=32, squash=True)),
        "the short side": dict(transforms=dict(type="EvalResize", short_side=48, max_size=60)),
        "nearest sides": dict(transforms=dict(type="EvalResize", short_side=48, max_size=61, rounding="nearest")),
        "one size": dict(transforms=dict(type="EvalResize", size=[48, 56])),
        "the trained size": dict(image_sizes=ImageSizes(20, 30, 40, 80)),
        "nothing": dict(),
    }
    for name, arguments in cases.items():
        predictor, _ = predictor_of("quickstart/classifier", **arguments)
        runner = object.__new__(onnx_runner.Runner)
        runner.inputs = ["images", "padding_mask"]
        runner.info = {"size": None, "preprocessing": {"resize": resize_of(predictor)}}
        for pixels in [*IMAGES, noise(1, 400)]:
            expected, actual = predictor.prepare([pixels]).inputs, runner.prepare(pixels)
            assert np.array_equal(actual["images"], expected["images"]), name
            assert np.array_equal(actual["padding_mask"], expected["padding_mask"]), name


def test_file_of_a_model_without_pixel_statistics_and_with_one_size_says_so_and_predicts_like_it(tmp_path):
    pixels = "model.backbone.pixel_mean=[0,0,0]", "model.backbone.pixel_std=[1,1,1]", "model.num_classes=6"
    resize = dict(type="EvalResize", size=[64, 96])
    narrow = ("model.neck.out_channels=32", "model.head.d_model=32", "model.head.num_heads=2")
    predictor, cfg = predictor_of("quickstart/detr", [TINY, *LAYERS, *narrow, *pixels], transforms=resize)
    cfg["data"]["val"]["transforms"] = resize
    export(predictor, cfg, tmp_path / "tiny.onnx")
    actual = load(tmp_path / "tiny.onnx")
    about = open_exported(tmp_path / "tiny.onnx").metadata["preprocessing"]
    assert (about["resize"], about["mean"], about["std"]) == ({"size": [64, 96]}, [0] * 3, [1] * 3)
    (a,), (b,) = predictor.predict(IMAGES[0]), actual.predict(IMAGES[0])
    assert actual.prepare(IMAGES[:1]).inputs["images"].shape[-2:] == (64, 96)
    assert torch.allclose(a.fields["boxes_xyxy"], b.fields["boxes_xyxy"], atol=1e-2)


def test_override_of_what_a_file_computes_is_refused(run):
    for override in ("model.num_queries=3", "model.backbone=resnet18", "model=DETR"):
        with pytest.raises(ConfigError, match="is an exported file, whose model cannot be changed by"):
            load(run / "out" / "tiny.onnx", overrides=[override])
    load(run / "out" / "tiny.onnx", overrides=["data.val.transforms.max_size=90"])


def test_scores_of_other_classes_than_the_metadata_name_are_one_line(run, tmp_path):
    import onnx

    model = onnx.load(run / "out" / "tiny.onnx")
    for entry in model.metadata_props:
        if entry.key == "classes":
            entry.value = json.dumps([*CLASSES, "more"])
        if entry.key == "thresholds":
            entry.value = "null"
    onnx.save(model, tmp_path / "a.onnx")
    with pytest.raises(CheckpointError, match="a.onnx: damaged: its pred_logits have 7 entries"):
        load(tmp_path / "a.onnx")(IMAGES[0])
