"""Latency of real-time detectors: each form is built and measured, and shown as a table and a figure."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("vitkit.tools", reason="vitkit is not installed (pip install -e .)")
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.tools.benchmark import __main__ as benchmark
from vitkit.tools.benchmark import latency
from vitkit.tools.benchmark.latency_plot import STYLES, plot_latencies
from vitkit.tools.benchmark.timing import Measurement, OnnxFromOutside, Options

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
    """Have one small model take the place of all that are measured, and compile nothing; return the modes."""
    (tmp_path / "small.py").write_text(CONFIG)
    monkeypatch.setattr(latency, "MODELS", {"small": latency.Published(str(tmp_path / "small.py"), 64, 39.5, 1.5)})
    modes = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, mode: modes.append(mode))
    return modes


def write_onnx(path, shape, name="images", dtype="FLOAT"):
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    x = helper.make_tensor_value_info(name, getattr(onnx.TensorProto, dtype), shape)
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    nodes = [helper.make_node("Cast", [name], ["z"], to=onnx.TensorProto.FLOAT), helper.make_node("Relu", ["z"], ["y"])]
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x], [y]), opset_imports=[opset], ir_version=9), path)
    return path


@pytest.mark.skipif(torch.__version__ < (2, 7), reason="needs PyTorch 2.7 or newer")
def test_every_form_of_a_model_is_measured_and_one_that_fails_says_why(small, monkeypatch):
    for package in ("onnxruntime", "onnxscript", "transformers"):
        pytest.importorskip(package)
    monkeypatch.setattr(latency, "missing_compiler", lambda: None)
    forms = ("vitkit", "vitkit-compiled", "onnxruntime", "int8", "transformers-compiled")
    monkeypatch.setattr(latency, "FORMS", {"cpu": {name: latency.FORMS["cpu"][name] for name in forms}})
    *measured, failed = latency.measure("latency", Options(repeats=1, batch_sizes=[2], models=["all"]))
    assert [row.name for row in measured] == [
        *("vitkit", "vitkit, compiled", "vitkit, ONNX Runtime", "vitkit, ONNX Runtime int8")
    ]
    assert all(row.what == "small, 64x64 (T4: 1.5 ms)" and row.published_ap == 39.5 for row in measured)
    assert all(row.setting == "batch 2" and row.seconds > 0 and row.ratio is None for row in measured)
    assert failed.name == "transformers, compiled" and failed.seconds is None and "backbone" in failed.note
    assert small == ["default"] and latency.compile_mode(Options(device="cuda")) == "reduce-overhead"


def test_pytorch_returns_boxes_in_pixels(tmp_path):
    model = latency.Published("quickstart/deformable_detr", 64, 40.0, None)
    outputs = latency.by_pytorch(latency.Job("model", model, 3, Options(), tmp_path))()
    assert outputs["boxes_xyxy"].shape == (*outputs["scores"].shape, 4) and len(outputs["scores"]) == 3
    assert 1 < outputs["boxes_xyxy"].abs().max() <= 128


def test_the_reference_is_the_fastest_form_of_transformers():
    now = [0.0]

    def form(seconds):
        return lambda: lambda: now.__setitem__(0, now[0] + seconds)

    def broken():
        raise TypeError("first line\nsecond line")

    builders = {"vitkit": form(1.0), "transformers": form(4.0), "transformers, compiled": form(2.0), "official": broken}
    options = Options(repeats=3, clock=lambda: now[0])
    rows = latency.compare_forms("model", builders, options, published_ap=42.8, setting="")
    assert [row.ratio for row in rows] == pytest.approx([0.5, 2.0, 1.0, None])
    assert rows[3].note == "first line" and [row.name for row in rows] == list(builders)


def test_what_a_machine_lacks_is_left_out_or_an_error_if_it_is_asked_for(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    forms = latency.choose_forms(Options())
    assert "vitkit" in forms and not {"vitkit-compiled", "transformers-compiled"} & forms.keys()
    assert "no rows of vitkit-compiled: no C++ compiler (no-such-compiler)" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"--rows vitkit-compiled: no C\+\+ compiler \(no-such-compiler\)"):
        latency.choose_forms(Options(rows=["vitkit-compiled"]))
    with pytest.raises(ConfigError, match="--rows int8: expected vitkit, .* on the device cuda"):
        latency.choose_forms(Options(device="cuda", rows=["int8"]))
    assert list(benchmark.ROWS) == list(latency.FORMS["cpu"]) and set(latency.DEFAULT_MODELS) < set(latency.MODELS)


def test_a_file_from_outside_is_measured(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(latency, "DEFAULT_MODELS", ())
    path = write_onnx(tmp_path / "a.onnx", [1, 3, 16, 24])
    options = Options(repeats=1, rows=["onnxruntime"], onnx=[OnnxFromOutside("YOLO", 39.5, path)])
    (row,) = latency.measure("latency", options)
    assert (row.what, row.name, row.published_ap) == ("YOLO, 16x24", "file from outside, ONNX Runtime", 39.5)
    assert row.seconds > 0 and row.ratio is None


def test_images_for_a_file_from_outside_are_of_its_size_and_type(tmp_path):
    path = write_onnx(tmp_path / "a.onnx", ["batch", 3, "height", "width"], dtype="UINT8")
    images = latency.inputs_from_outside(OnnxFromOutside("a", None, path), 2)["images"]
    assert images.shape == (2, 3, 640, 640) and images.dtype == torch.uint8 and images.max() > 200


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([1, 10], r"a\.onnx: takes images \[1, 10\]; expected one input of images, \[batch, 3, height, width\]"),
        ([1, 3, 8, 8], r"a\.onnx: takes batches of 1; got 2\."),
    ],
)
def test_a_file_that_takes_something_else_is_named_before_anything_is_measured(shape, message, tmp_path):
    path = write_onnx(tmp_path / "a.onnx", shape)
    options = Options(rows=["vitkit"], batch_sizes=[1, 2], onnx=[OnnxFromOutside("a", None, path)])
    with pytest.raises(DataError, match=message):
        latency.check_options(options)
    path.write_bytes(b"no model")
    with pytest.raises(CheckpointError, match=r"a\.onnx: not an ONNX file"):
        latency.check_options(options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["latency", "--models", "YOLO"], "argument --models: 'YOLO': expected all, D-FINE-N, D-FINE-S"),
        (["latency", "--rows", "tensorrt"], "argument --rows: invalid choice: 'tensorrt'"),
        (
            ["latency", "--onnx", "YOLO11n=missing.onnx"],
            "argument --onnx: 'YOLO11n=missing.onnx': no file 'missing.onnx'",
        ),
        (["latency", "--onnx", "missing.onnx"], "expected NAME=FILE or NAME:AP=FILE, such as YOLO11n:39.5=a.onnx"),
        (["latency", "--onnx", "a:high=setup.cfg"], "AP is 'high'; expected a number in percent"),
        (["latency", "--onnx", "a:nan=setup.cfg"], "AP is 'nan'; expected a number in percent"),
        (["latency", "--onnx", "a:-5=setup.cfg"], "AP is '-5'; expected a number in percent"),
        (["detr", "--plot", "a.png"], "--plot: is for the part latency; expected it among detr"),
        (["detr", "--batch", "4"], "--batch: is for the part latency; expected it among detr"),
        (["latency", "--out", "a.json"], "--out a.json: is for the table, and the rows are written beside it as .json"),
    ],
)
def test_wrong_options_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        benchmark.parse_args(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_file_that_no_row_runs_is_named(device, tmp_path):
    file = OnnxFromOutside("a", None, write_onnx(tmp_path / "a.onnx", [1, 3, 8, 8]))
    with pytest.raises(
        ConfigError, match=r"--onnx: files from outside are run by onnxruntime and openvino; got the rows"
    ):
        latency.check_options(Options(device=device, rows=["vitkit"], onnx=[file]))


def test_options_of_a_later_part_are_checked_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "measure", None)
    monkeypatch.setattr(latency, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"error: --rows openvino: no package openvino"):
        benchmark.main(["decoding", "latency", "--rows", "openvino"])


def test_parts_may_follow_the_numbers_of_threads():
    args = benchmark.parse_args(["--threads", "1", "2", "latency", "detr"])
    assert (args.threads, args.parts) == ([1, 2], ["latency", "detr"])


ROWS = [
    Measurement("D-FINE-N, 640x640", "vitkit", 0.1, 0.5, published_ap=42.8),
    Measurement("D-FINE-N, 640x640", "transformers", 0.2, 1.0, published_ap=42.8),
    Measurement("D-FINE-S, 640x640", "vitkit", 0.4, 0.8, published_ap=48.5),
    Measurement("D-FINE-S, 640x640", "transformers", None, None, published_ap=48.5, note="an | error"),
    Measurement("RF-DETR-N, 384x384", "vitkit", 0.45, None, published_ap=48.4),
    Measurement("YOLO11n, 640x640", "file from outside, OpenVINO", 0.09, None, published_ap=39.5),
]


def test_table_has_the_published_ap_and_why_a_row_cannot_run():
    lines = benchmark.markdown_table([row._replace(setting="2 threads") for row in ROWS]).splitlines()
    assert lines[0] == "| | | COCO AP | time | of transformers' fastest |"
    assert lines[2] == "| D-FINE-N, 640x640, 2 threads | vitkit | 42.8 | 100 ms | 0.50 |"
    assert lines[5:7] == [
        "|  | transformers | 48.5 | cannot run: an / error |  |",
        "| RF-DETR-N, 384x384, 2 threads | vitkit | 48.4 | 450 ms |  |",
    ]


def test_rows_are_written_as_json_and_drawn_for_each_number_of_threads(tmp_path, monkeypatch, capsys):
    measured = []

    class InThisProcess:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, function, part, args, threads):
            measured.append((part, threads))
            return type("Done", (), {"result": lambda self: ROWS})()

    monkeypatch.setattr(benchmark, "ProcessPoolExecutor", InThisProcess)
    files = [f"--out={tmp_path / 'table.md'}", f"--plot={tmp_path / 'plot'}"]
    benchmark.main(["latency", "--threads", "1", "2", *files])
    assert measured == [("latency", 1), ("latency", 2)] and capsys.readouterr().out.count("COCO AP") == 1
    report = json.loads((tmp_path / "table.json").read_text())
    assert [row["setting"] for row in report["rows"]] == ["1 thread"] * 6 + ["2 threads"] * 6
    assert Measurement(**report["rows"][0]) == ROWS[0]._replace(setting="1 thread") and report["machine"]
    assert "| YOLO11n, 640x640, 2 threads |" in (tmp_path / "table.md").read_text()
    assert Image.open(tmp_path / "plot").width > 1500


def test_a_figure_without_a_row_is_an_error_in_one_line(tmp_path):
    rows = [ROWS[3], ROWS[0]._replace(published_ap=None)]
    with pytest.raises(DataError, match="--plot .*a.png: there is no row with a published AP that could be measured"):
        plot_latencies(rows, tmp_path / "a.png", title="a processor")


def test_figure_has_a_line_for_each_form_through_the_models_that_no_other_beats(tmp_path):
    plot_latencies(ROWS, tmp_path / "a.png", title="a processor")
    pixels = np.asarray(Image.open(tmp_path / "a.png").convert("RGB")).reshape(-1, 3)
    for name in ("vitkit", "transformers", "file from outside, OpenVINO"):
        color = np.array([int(STYLES[name][0][k : k + 2], 16) for k in (1, 3, 5)])
        assert (np.abs(pixels - color).max(1) < 3).sum() > 20, name
    names = {form.name for form in latency.FORMS["cpu"].values()} | {name for name, _ in latency.OUTSIDE.values()}
    assert set(STYLES) == names
    assert Path(tmp_path / "a.png").stat().st_size < 150_000
