"""Exported files as models: they compute what their model does, and are opened safely."""

import importlib
import io
import json
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.small_exports import CLASSES, IMAGES, LAYERS, TINY, export, predictor_of

import vitkit
from vitkit import build_model, load_config
from vitkit.apps.export_reading import loading, runtimes
from vitkit.apps.export_reading.graphs import image_graph
from vitkit.apps.export_reading.loading import ExportedGenerator, ExportedModel, open_exported
from vitkit.apps.export_writing.checks import run_graph
from vitkit.apps.export_writing.metadata import describe
from vitkit.apps.export_writing.text import text_graphs
from vitkit.apps.inference import Predictor, load
from vitkit.apps.inference.tiles import Tiling
from vitkit.config import trust
from vitkit.errors import CheckpointError, ConfigError
from vitkit.text.vocabulary import Vocabulary
from vitkit.tools import export as export_tool
from vitkit.tools import test as test_tool

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
onnx_runner = importlib.import_module("vitkit.apps.export_reading.onnx_runner")


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


class GraphInPython:
    """A stand-in for an exported file that runs the graph of a model."""

    path, inputs = "a.onnx", ("images", "padding_mask", "image_sizes")

    def __init__(self, model, graph=None):
        self.graph = image_graph(model) if graph is None else graph
        self.metadata = {"size": None, "postprocessing": model.postprocess_settings()}

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


def test_an_exported_file_keeps_its_classes(run):
    path = run / "out" / "tiny.onnx"
    assert load(path, classes=CLASSES).classes == CLASSES
    with pytest.raises(ConfigError, match=f"exported file keeps its 6 classes, {', '.join(CLASSES)}; got others"):
        load(path, classes=CLASSES[::-1])


def test_file_is_opened_only_once_to_be_loaded(run, monkeypatch):
    opened, file = [], run / "out" / "tiny.onnx"
    monkeypatch.setattr(loading, "open_exported", lambda path, _: opened.append(path) or open_exported(path))
    load(file)
    load(file)  # it may have changed since
    assert opened == [file, file]


LOOPS = ["loop", "scan", "map", "loop in a branch", "loop in a function", "functions of functions"]


@pytest.mark.parametrize("kind", LOOPS)
def test_a_graph_that_may_run_without_an_end_is_refused(kind, run, tmp_path):
    onnx, make = pytest.importorskip("onnx"), pytest.importorskip("onnx.helper")
    model = onnx.load(run / "out" / "tiny.onnx")
    go_in, go = (make.make_tensor_value_info(name, onnx.TensorProto.BOOL, []) for name in ("go_in", "go"))
    count = make.make_tensor_value_info("i", onnx.TensorProto.INT64, [])
    same = make.make_node("Identity", ["go_in"], ["go"])
    body = make.make_graph([same], "body", [count, go_in], [go])
    empty = make.make_graph([], "branch", [], [])
    loop = make.make_node("Loop", ["most", ""], [], body=body)
    nodes = {
        "loop": loop,
        "scan": make.make_node("Scan", ["most"], [], body=empty, num_scan_inputs=1),
        "map": make.make_node("SequenceMap", ["most"], ["y"], body=empty),
        "loop in a branch": make.make_node(
            "If", ["c"], [], then_branch=make.make_graph([loop], "branch", [], []), else_branch=empty
        ),
        "loop in a function": make.make_node("f", [], [], domain="own"),
        "functions of functions": make.make_node("f", [], [], domain="own"),
    }
    model.graph.initializer.append(make.make_tensor("most", onnx.TensorProto.INT64, [], [2**60]))
    model.graph.node.append(nodes[kind])
    if "function" in kind:
        body = [loop] if "loop" in kind else [nodes[kind], nodes[kind]]
        model.functions.append(make.make_function("own", "f", [], [], body, [make.make_opsetid("", 20)]))
    onnx.save(model, tmp_path / "tiny.onnx")
    with pytest.raises(CheckpointError, match=r"its graph has (Loop|Scan|SequenceMap|functions), which"):
        load(tmp_path / "tiny.onnx")


def test_a_graph_that_computes_for_very_long_is_given_up(run, tmp_path, monkeypatch):
    onnx, make = pytest.importorskip("onnx"), pytest.importorskip("onnx.helper")
    file = open_exported(run / "out" / "tiny.onnx")
    model = onnx.load(run / "out" / "tiny.onnx")
    # ONNX Runtime computes what depends on no input when it opens a file.
    model.graph.initializer.append(make.make_tensor("one", onnx.TensorProto.FLOAT, [1], [1.0]))
    model.graph.initializer.append(make.make_tensor("sides", onnx.TensorProto.INT64, [2], [2500, 2500]))
    model.graph.node.append(make.make_node("Expand", ["one", "sides"], ["m0"]))
    model.graph.node.extend(make.make_node("MatMul", [f"m{k}", f"m{k}"], [f"m{k + 1}"]) for k in range(4))
    model.graph.output.append(make.make_tensor_value_info("m4", onnx.TensorProto.FLOAT, [2500, 2500]))
    onnx.save(model, tmp_path / "tiny.onnx")
    monkeypatch.setattr(runtimes, "_MAX_SECONDS", 0.3)
    with pytest.raises(CheckpointError, match=r"tiny.onnx: has not computed anything in 0.3 s. Export the model again"):
        load(tmp_path / "tiny.onnx")
    is_given_up = threading.Event()
    monkeypatch.setattr(file, "_session", SimpleNamespace(run=lambda *_: is_given_up.wait()))
    with pytest.raises(CheckpointError, match="has not computed anything in 0.3 s"):
        file.run({name: torch.zeros(1) for name in file.inputs}, outputs=[])
    is_given_up.set()
    assert file._options.terminate


def test_other_files_are_refused_as_exported_models(tmp_path):
    (tmp_path / "a.onnx").write_bytes(b"no model")
    with pytest.raises(CheckpointError, match=r"a.onnx: not an ONNX file, or a damaged one"):
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
def program(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "tiny.pt2"
    export_tool.main([str(run / "run"), "--format", "torch", "--out", str(path)])
    return path


@pytest.mark.parametrize(
    ("command", "suffix", "call"),
    [
        ("export", "pt2", lambda path, out: vitkit.export(path, out / "b.pt2", format="torch")),
        ("convert", "onnx", lambda path, out: vitkit.convert(path, out / "b.pth")),
        ("explain", "onnx", lambda path, out: vitkit.explain(path, image=IMAGES[0], out=out / "b")),
    ],
)
def test_an_exported_file_is_refused_where_the_model_is_needed(command, suffix, call, run, program, tmp_path):
    path = {"pt2": program, "onnx": run / "out" / "tiny.onnx"}[suffix]
    with pytest.raises(ConfigError, match=rf"{command}: .*tiny.{suffix} is an exported file, .* Give the checkpoint"):
        call(path, tmp_path)
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
    monkeypatch.setattr(loading, "open_exported", lambda path, _: files[1])
    runner = object.__new__(onnx_runner.Runner)
    runner.info = describe(predictor, cfg, name="tiny", license=None) | {"size": None}
    runner.inputs, (runner.session, runner.step) = ["images", "padding_mask"], files

    def run(file, arrays):
        outputs = file.run({name: torch.from_numpy(value) for name, value in arrays.items()})
        return {name: value.numpy() for name, value in outputs.items()}

    monkeypatch.setattr(onnx_runner, "run", run)
    assert runner(IMAGES[0]) == written
    predictor.model = ExportedGenerator(files[0], predictor.model)
    assert predictor(IMAGES[0]).fields["text"] == written["text"] != ""
    assert predictor.model.fused_copy() is predictor.model


@pytest.mark.slow
def test_captioner_is_exported_as_an_encoder_and_a_step(tmp_path):
    predictor, cfg = captioner()
    parts = export(predictor, cfg, tmp_path / "a.onnx")
    assert [part.path.name for part in parts] == ["a.onnx", "a.step.onnx"]
    written = {"text": predictor(IMAGES[0]).fields["text"]}
    assert load(tmp_path / "a.onnx")(IMAGES[0]).fields["text"] == written["text"] != ""
    assert onnx_runner.Runner(tmp_path / "a.onnx")(IMAGES[0]) == written


def test_file_of_a_model_without_pixel_statistics_and_with_one_size_says_so_and_predicts_like_it(tmp_path):
    pixels = "model.backbone.pixel_mean=[0,0,0]", "model.backbone.pixel_std=[1,1,1]", "model.num_classes=6"
    resize = dict(type="EvalResize", size=[64, 96])
    narrow = ("model.neck.out_channels=32", "model.head.d_model=32", "model.head.num_heads=2")
    predictor, cfg = predictor_of("quickstart/detr", [TINY, *LAYERS, *narrow, *pixels], transforms=resize)
    cfg["data"]["val"]["transforms"] = resize
    # Statistics and sizes are the same in both formats, and a program is written in a third of the time.
    export(predictor, cfg, tmp_path / "tiny.pt2", format="torch")
    actual = load(tmp_path / "tiny.pt2")
    about = open_exported(tmp_path / "tiny.pt2").metadata["preprocessing"]
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


def test_the_things_of_a_panoptic_file_are_those_that_it_merges_by(monkeypatch):
    metadata = dict(config=dict(model="m"), classes=["cat", "sky"], postprocessing=dict(things=[True, False]))
    monkeypatch.setattr(loading, "read_onnx_metadata", lambda path: metadata)
    checkpoint = loading.read_as_checkpoint("a.onnx")
    assert checkpoint["things"] == [True, False] and checkpoint["classes"] == ["cat", "sky"]
    monkeypatch.setitem(metadata, "postprocessing", None)
    assert "things" not in loading.read_as_checkpoint("a.onnx")
