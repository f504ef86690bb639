"""A text-prompted detector as two files: what they compute, how they are opened, and the program that runs them."""

import importlib
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.grounding_models import bert_tokenizer
from helpers.small_exports import IMAGES, WITHOUT_TORCH
from PIL import Image

import vitkit
from vitkit.apps.export_writing.checks import run_graph
from vitkit.apps.export_writing.prompted import list_known_phrases, prompted_graphs
from vitkit.apps.training.testing import evaluate_model
from vitkit.config import save_config
from vitkit.engine.build import build_model
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.models.grounding_dino import phrase_scores
from vitkit.text.prompt_tokens import words_and_padding
from vitkit.text.vocabulary import Vocabulary
from vitkit.tools import export as export_tool
from vitkit.tools import predict as predict_tool
from vitkit.weights import save_checkpoint
from vitkit.weights.tokenizer_files import find_tokenizer

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
onnx_runner = importlib.import_module("vitkit.apps.export_reading.onnx_runner")

TEXTS = "hot dog . cat .", "a red cat .", ["cat", "dog", "hot dog", "red", "a"]
LONG = [f"{a} {b}" for a in ("cat", "dog", "red") for b in ("cat", "dog", "red")]
"""Phrases with more tokens than the model reads at once."""
WORDS = ["a hot dog . red cat ."]
CONFIG = dict(
    model=dict(
        type="GroundingDINO", num_queries=8, num_detections=30, max_tokens=24,
        backbone=dict(type="ViT", d_model=32, depth=1, num_heads=2, pretrained=False),
        neck=dict(type="PyramidProjection", out_channels=32, num_levels=2, num_groups=4),
        text_encoder=dict(type="BertEncoder", num_layers=1, d_model=16, num_heads=2, d_ffn=16, dropout=0.0),
        head=dict(
            type="GroundingDINOHead", d_model=32, num_heads=2, num_points=2, d_ffn=32, num_encoder_layers=1,
            num_decoder_layers=1, fusion_drop_path=0.0,
        ),
    ),
    data=dict(val=dict(type="ShapesDetection", transforms=dict(type="EvalResize", short_side=64, max_size=96))),
)  # fmt: skip


def write_run(folder, vocabulary):
    """Write a checkpoint of a model with random weights, whose boxes depend on the text, and its config."""
    torch.manual_seed(0)
    model = build_model(CONFIG["model"], vocabularies={"target": vocabulary})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 or "bbox_embed" in name:
                parameter += 0.1 * torch.randn(parameter.shape)
    save_config(CONFIG, folder / "config.json")
    state = {
        "model": model.state_dict(),
        "config": json.dumps(CONFIG),
        "vocabularies": {"target": vocabulary.to_json()},
    }
    save_checkpoint(folder / "best.pth", state)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a run, and the files that the tool wrote for it in `out`."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("prompted")
    (folder / "tokenizer.json").write_text(bert_tokenizer())
    write_run(folder / "run", find_tokenizer(folder / "tokenizer.json"))
    for number, image in enumerate(IMAGES):
        Image.fromarray(image).save(folder / f"{number}.png")
    export_tool.main([str(folder / "run"), "--out", str(folder / "out" / "tiny.onnx"), "--images", str(folder)])
    return folder


def test_files_take_numbers_and_features_of_any_length(folder):
    import onnx

    assert {path.name for path in (folder / "out").iterdir()} == {
        "tiny.onnx", "tiny.text.onnx", "tiny.tokenizer.json", "run_tiny.py", "README.md",
    }  # fmt: skip
    shapes, kinds = {}, {}
    for name in ("tiny", "tiny.text"):
        for value in onnx.load(folder / "out" / f"{name}.onnx").graph.input:
            kind = value.type.tensor_type
            shapes[value.name] = [dim.dim_param or dim.dim_value for dim in kind.shape.dim]
            kinds[value.name] = onnx.TensorProto.DataType.Name(kind.elem_type)
    assert shapes == {
        "images": ["batch", 3, "height", "width"],
        "padding_mask": ["batch", "height", "width"],
        "image_sizes": ["batch", 2],
        "text_features": ["batch", "length", 32],
        "tokens": ["batch", "length"],
        "blocks": ["batch", "length"],
    }
    assert kinds["tokens"] == kinds["blocks"] == "INT64" and "STRING" not in kinds.values()


@pytest.mark.parametrize("text", [*TEXTS, LONG], ids=["two", "one", "five", "in_parts"])
def test_files_predict_like_their_model(folder, text):
    expected, actual = vitkit.load(folder / "run"), vitkit.load(folder / "out" / "tiny.onnx")
    pairs = zip(expected.predict(IMAGES, text=text, batch_size=2), actual.predict(IMAGES, text=text, batch_size=2))
    for a, b in pairs:
        assert a.classes == b.classes and len(a.scores) == len(b.scores)
        for name, value in a.fields.items():
            assert torch.allclose(value, b.fields[name], atol=1e-3), name


def test_texts_are_encoded_once(folder, monkeypatch):
    predictor, runs = vitkit.load(folder / "out" / "tiny.onnx"), []
    file = predictor.model.text_file
    run = file.run
    monkeypatch.setattr(file, "run", lambda inputs: runs.append(inputs["tokens"].shape) or run(inputs))
    for text in ("cat .", "dog . cat .", "cat ."):
        predictor.predict(IMAGES, text=text, batch_size=2)
    assert runs == [(1, 4), (1, 6)]


def test_files_are_evaluated_with_the_prompts_of_the_data(folder, tmp_path):
    config = json.loads((folder / "run" / "config.json").read_text())
    words = "red", "cat", "dog", "hot dog", "red cat", "a"
    prompts = dict(phrases=dict(zip(("circle", "square", "triangle", "star", "ring", "cross"), words)))
    data = dict(prompts=prompts, num_workers=0, val=config["data"]["val"] | dict(num_images=4))
    config |= dict(data=data, evaluator=dict(type="CocoEvaluator"), train=dict(epochs=1))
    predictions = []
    for number, file in enumerate((folder / "run" / "best.pth", folder / "out" / "tiny.onnx")):
        (path,) = evaluate_model(config, file, torch.device("cpu")).write(tmp_path / f"{number}.json")
        predictions.append(json.loads(path.read_text()))
    a, b = ([(one["score"], *one["bbox"]) for one in of_file] for of_file in predictions)
    assert len(a) == len(b) > 60 and np.allclose(a, b, atol=1e-2)


def test_the_program_reads_texts_by_itself(folder, tmp_path):
    program = folder / "out" / "run_tiny.py"
    command = [sys.executable, "-c", WITHOUT_TORCH, program, folder / "0.png", "--text", TEXTS[0], "--threshold", 0]
    done = subprocess.run([*map(str, command), "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result, expected = (
        json.loads(done.stdout),
        vitkit.load(folder / "run")(folder / "0.png", text=TEXTS[0], threshold=0),
    )
    assert np.allclose(result["scores"], expected.scores, atol=1e-4)
    assert np.allclose(result["boxes_xyxy"], expected.boxes, atol=0.1)
    assert result["labels"] == expected.labels.tolist() and result["names"] == expected.names
    assert (tmp_path / "0.png").is_file()


@pytest.mark.parametrize("text", [*TEXTS, "Hotdogs . [SEP] cat . DOG"], ids=["two", "one", "five", "unknown"])
def test_the_program_encodes_like_vitkit(folder, text):
    expected = vitkit.load(folder / "run").model.tokenize([text])
    reader = onnx_runner.Runner(folder / "out" / "tiny.onnx").prompts
    tokens, blocks = reader.encode(onnx_runner.split_phrases(text))
    assert tokens.tolist() == expected.tokens.tolist() and blocks.tolist() == expected.phrase_ids.tolist()


def test_wrong_texts_are_one_line_each(folder, capsys, monkeypatch):
    runner, predictor = onnx_runner.Runner(folder / "out" / "tiny.onnx"), vitkit.load(folder / "out" / "tiny.onnx")
    with pytest.raises(ValueError, match="9 phrases have 29 tokens; the model takes 24. Give fewer"):
        runner(IMAGES[0], LONG)
    for text, error in (
        ("zzz .", "the tokenizer knows no piece of the phrase 'zzz'"),
        (" . ", "has no phrase"),
        ("cat . Cat", "the phrase 'Cat' is given twice"),
        ("cat? .", "where the model takes it to end"),
    ):
        with pytest.raises(ValueError, match=error):
            runner(IMAGES[0], text)
        with pytest.raises(DataError, match=error):
            predictor(IMAGES[0], text=text)
    with pytest.raises(ValueError, match="--text: the model looks for what a text names. Give one"):
        runner(IMAGES[0])
    monkeypatch.setattr(sys, "argv", ["run_tiny.py", "--model", str(folder / "out/tiny.onnx"), str(folder / "0.png")])
    with pytest.raises(SystemExit, match="1|True"):
        onnx_runner.main()
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_or_wrong_file_beside_is_one_line(folder, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(folder / "out", out)
    path, text_file, tokenizer = out / "tiny.onnx", out / "tiny.text.onnx", out / "tiny.tokenizer.json"

    def refused(message, of_runner):
        with pytest.raises(CheckpointError, match=message) as error:
            vitkit.load(path)
        assert "\n" not in str(error.value)
        with pytest.raises(ValueError, match=of_runner):
            onnx_runner.Runner(path)

    content = tokenizer.read_text()
    tokenizer.write_text(content.replace('"hot"', '"cold"'))
    refused("tiny.tokenizer.json: is not the tokenizer's file that was exported with tiny.onnx", "is not the tokenizer")
    tokenizer.unlink()
    refused("tokenizer's file tiny.tokenizer.json cannot be read beside it", "there is no tiny.tokenizer.json beside")
    tokenizer.write_text(content)
    other = write_changed(text_file, tmp_path / "other.onnx")
    shutil.copyfile(other, text_file)
    refused("tiny.text.onnx: was exported from another model than tiny.onnx", "was exported from another model")
    text_file.unlink()
    refused("there is no tiny.text.onnx beside it, its text encoder", "there is no tiny.text.onnx beside it")


def write_changed(path, out):
    """Write a text encoder as of other weights."""
    import onnx

    model = onnx.load(path)
    for entry in model.metadata_props:
        if entry.key == "text_id":
            entry.value = json.dumps("0" * 16)
    onnx.save(model, out)
    return out


def test_the_command_line_predicts_with_a_text(folder, tmp_path):
    options = "--input", folder / "0.png", "--text", TEXTS[0], "--threshold", 0, "--out", tmp_path
    predict_tool.main([str(folder / "out/tiny.onnx"), *map(str, options)])
    (image,) = json.loads((tmp_path / "predictions.json").read_text())["images"]
    assert {found["class"] for found in image["objects"]} == {"hot dog", "cat"}


def test_detections_of_the_graph_are_those_of_the_model():
    vocabulary = Vocabulary.train("word", WORDS)
    torch.manual_seed(0)
    model = build_model(CONFIG["model"], vocabularies={"target": vocabulary}).eval()
    detector, encoder = prompted_graphs(model)
    encoded = model.tokenize([TEXTS[0], TEXTS[1]])
    images = torch.randint(256, (2, 3, 64, 96), dtype=torch.uint8)
    mask = torch.zeros(2, 64, 96, dtype=torch.bool)
    with torch.no_grad():
        outputs = model(images, mask, encoded)
    expected = model.postprocess(outputs, [(64, 96), (32, 48)])
    features = run_graph(encoder, dict(tokens=encoded.tokens, blocks=encoded.phrase_ids))["text_features"]
    inputs = dict(images=images, padding_mask=mask, image_sizes=torch.tensor([[64, 96], [32, 48]]))
    actual = run_graph(detector, inputs | dict(text_features=features, blocks=encoded.phrase_ids))
    for row, result in enumerate(expected):
        count = 16 if row == 0 else 8  # a pair for each query and phrase
        assert len(result["scores"]) == count and (actual["labels"][row, count:] == -1).all()
        for name, value in result.items():
            torch.testing.assert_close(actual[name][row, :count], value, atol=1e-4, rtol=1e-4)
    words, padding = words_and_padding(encoded.phrase_ids)
    assert torch.equal(words, encoded.is_word) and torch.equal(padding, outputs["text_padding"])
    every = phrase_scores(outputs["pred_logits"], encoded.phrase_ids, words)
    again = phrase_scores(outputs["pred_logits"], encoded.phrase_ids, words, encoded.phrase_ids)
    assert torch.equal(again[0, :, 1], every[0, :, 0]) and not again[:, :, 0].any()


def test_padding_a_text_to_a_fixed_length_changes_nothing():
    torch.manual_seed(0)
    model = build_model(CONFIG["model"], vocabularies={"target": Vocabulary.train("word", WORDS)}).eval()
    detector, encoder = prompted_graphs(model)
    inputs = dict(
        images=torch.randint(256, (1, 3, 64, 96), dtype=torch.uint8),
        padding_mask=torch.zeros(1, 64, 96, dtype=torch.bool), image_sizes=torch.tensor([[64, 96]]),
    )  # fmt: skip
    results = []
    for extra in (0, 9):
        text = model.tokenize([TEXTS[0]])
        tokens = torch.nn.functional.pad(text.tokens, (0, extra))
        blocks = torch.nn.functional.pad(text.phrase_ids, (0, extra), value=-1)
        features = run_graph(encoder, dict(tokens=tokens, blocks=blocks))["text_features"]
        results.append(run_graph(detector, inputs | dict(text_features=features, blocks=blocks)))
    for name in ("scores", "labels", "boxes_xyxy"):
        torch.testing.assert_close(results[1][name][:, :16], results[0][name][:, :16], atol=1e-4, rtol=1e-4)


def test_fusion_is_computed_in_float32_in_a_file_of_float16():
    torch.manual_seed(0)
    model = build_model(CONFIG["model"], vocabularies={"target": Vocabulary.train("word", WORDS)}).eval()
    attention = model.head.encoder.fusion_layers[0].attn
    with torch.no_grad():
        # The products of trained weights exceed float16's largest number, 65504.
        attention.image_proj.weight *= 900
        attention.text_proj.weight *= 900
        model.head.encoder.fusion_layers[0].text_scale.fill_(0.5)
    encoded = model.tokenize([TEXTS[0], TEXTS[1]])
    images = torch.randint(256, (2, 3, 64, 96), dtype=torch.uint8)
    mask = torch.zeros(2, 64, 96, dtype=torch.bool)
    mask[1, :, 48:] = True
    inputs = dict(images=images, padding_mask=mask, image_sizes=torch.tensor([[64, 96]] * 2), blocks=encoded.phrase_ids)
    results = []
    for precise in (True, False):
        detector, encoder = prompted_graphs(model if precise else model.half())
        features = run_graph(encoder, dict(tokens=encoded.tokens, blocks=encoded.phrase_ids))["text_features"]
        with torch.no_grad(), vitkit.AttentionRecorder(attention) as maps:
            outputs = run_graph(detector, inputs | dict(text_features=features))
        results.append((outputs["pred_logits"], maps[""][0]))
    assert results[1][1].dtype == torch.float32 and results[1][1].isfinite().all()
    assert not results[1][1][1, ..., encoded.tokens[1] == 0].any()  # padding of the second text
    assert (results[1][0].isfinite() == results[0][0].isfinite()).all()


def test_vocabularies_of_words_need_no_file_beside(tmp_path):
    run = write_run(tmp_path / "run", Vocabulary.train("word", WORDS))
    predictor = vitkit.load(run)
    assert list_known_phrases(predictor.model, ["red", "a. b", "zebra"]) == ["red"]
    assert list_known_phrases(predictor.model, ["zebra"]) == ["cat", "dog", "hot dog"]  # COCO's
    assert "hot" in list_known_phrases(build_model(CONFIG["model"], vocabularies={"target": words()}), [])


def words():
    return Vocabulary.train("word", ["hot . red ."])


def test_a_model_without_a_tokenizer_is_refused():
    with pytest.raises(
        ConfigError, match="export: GroundingDINO has no vocabulary to read prompts with. Set model.tok"
    ):
        prompted_graphs(build_model(CONFIG["model"]))


@pytest.mark.slow
@pytest.mark.parametrize(("form", "precision"), [("onnx", "fp16"), ("torch", "fp32")])
def test_other_forms_predict_like_the_model(folder, tmp_path, form, precision):
    suffix = {"onnx": "onnx", "torch": "pt2"}[form]
    path = tmp_path / f"tiny.{suffix}"
    vitkit.export(folder / "run", path, format=form, precision=precision, images=folder, tolerance=0.2)
    expected, actual = vitkit.load(folder / "run"), vitkit.load(path, trust=True)
    a, b = (predictor(IMAGES[0], text=TEXTS[0], threshold=0.0) for predictor in (expected, actual))
    assert np.allclose(a.scores, b.scores, atol=1e-3 if precision == "fp32" else 0.05)
