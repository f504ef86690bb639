import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

import vitkit
from vitkit import load
from vitkit.apps.conversion.convert import NAMES
from vitkit.apps.conversion.transformers_writing import write_safetensors
from vitkit.apps.datasets.writing import WRITERS
from vitkit.apps.inference.card import Measured, save_metrics
from vitkit.config import load_config
from vitkit.engine.build import build_model
from vitkit.errors import CheckpointError, ConfigError
from vitkit.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from vitkit.tools import convert
from vitkit.weights import read_checkpoint, save_checkpoint

pytestmark = pytest.mark.smoke

CONFIG = """
from vitkit.configs.quickstart.detr import config as base

def config():
    cfg = base()
    cfg["model"]["backbone"] = dict(type="ResNet", depth=18, norm="frozen_bn", pretrained=False)
    cfg["model"]["head"]["norm_first"] = False  # the transformers library has no other
    return cfg
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(CONFIG)
    config = load_config("tiny.py")
    torch.manual_seed(0)
    model = build_model(config["model"], classes=["cat", "dog"])
    save_checkpoint("best.pth", {"model": model.state_dict(), "config": json.dumps(config), "classes": ["cat", "dog"]})
    return model


@pytest.mark.parametrize(
    ("target", "out", "key"),
    [
        ("official", "a.pth", "transformer.decoder.norm.weight"),
        ("official", "a.safetensors", "transformer.decoder.norm.weight"),
        ("transformers", "a.safetensors", "model.decoder.layernorm.weight"),
        ("transformers", "a.pth", "model.decoder.layernorm.weight"),
        ("vitkit", "a.safetensors", "head.decoder.norm.weight"),
    ],
)
def test_converted_weights_are_read_back_unchanged(run, target, out, key, capsys):
    convert.main(["best.pth", "--to", target, "--out", out])
    assert f"wrote {out}" in capsys.readouterr().out
    content = read_checkpoint(out)
    assert key in content.get("model", content)
    again = load("tiny.py", out, classes=["cat", "dog"]).model.state_dict()
    assert all(torch.equal(again[name], value) for name, value in run.state_dict().items())


def test_folder_has_a_model_card_with_the_metrics_of_an_evaluation(run, capsys):
    save_metrics(Path("metrics.json"), Measured("cells", "val", {}, {"bbox/AP": 0.51}), "best.pth")
    convert.main(["best.pth", "--to", "transformers", "--out", "cats", "--license", "MIT"])
    assert "wrote cats/README.md, a model card" in capsys.readouterr().out
    card = ModelCard.load("cats/README.md")
    (result,) = card.data.eval_results
    assert (result.dataset_name, result.metric_name, result.metric_value) == ("cells", "bbox/AP", 0.51)
    assert (card.data.license, card.data.library_name, card.data.model_name) == ("mit", "transformers", "cats")
    assert "from transformers import AutoImageProcessor, DetrForObjectDetection" in card.text
    assert 'vitkit.load("hf:OWNER/cats")' in card.text and "## 2 classes\n\ncat, dog\n" in card.text


def test_card_of_the_current_folder_has_its_name_and_replaces_no_other_readme(run, monkeypatch):
    Path("cats").mkdir()
    monkeypatch.chdir("cats")
    Path("README.md").write_text("My notes.\n")
    convert.main(["../best.pth", "--to", "transformers", "--out", ".", "--overwrite"])
    assert Path("README.md").read_text() == "My notes.\n"
    card = ModelCard.load("cats.README.md")
    assert card.data.model_name == "cats" and 'vitkit.load("hf:OWNER/cats")' in card.text


@pytest.mark.parametrize("out", ["own.pth", "own.safetensors"])
def test_vitkit_file_is_a_complete_model(run, out):
    convert.main(["best.pth", "--to", "vitkit", "--out", out])
    model = load(out)
    assert model.classes == ["cat", "dog"]
    assert torch.equal(model.model.head.query_embed.weight, run.head.query_embed.weight)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_numbers_are_rounded_to_the_precision_and_loaded_as_fp32(run, precision):
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    convert.main(["best.pth", "--to", "vitkit", "--out", "full.safetensors"])
    convert.main(["best.pth", "--to", "vitkit", "--precision", precision, "--out", "half.safetensors"])
    assert Path("half.safetensors").stat().st_size < 0.51 * Path("full.safetensors").stat().st_size
    again = load("half.safetensors").model.state_dict()
    for name, value in run.state_dict().items():
        expected = value.to(dtype).to(value.dtype) if value.is_floating_point() else value
        assert torch.equal(again[name], expected) and again[name].dtype == value.dtype
    with pytest.raises(ConfigError, match="precision 'fp16': a folder has fp32"):
        vitkit.convert("best.pth", "folder", to="transformers", precision="fp16")
    with pytest.raises(ConfigError, match="precision 'float16': unknown. .*'fp16'"):
        vitkit.convert("best.pth", "other.pth", precision="float16")


def test_header_of_a_safetensors_file_does_not_replace_its_tensors(run):
    convert.main(["best.pth", "--to", "vitkit", "--out", "own.safetensors"])
    contents = read_checkpoint("own.safetensors")
    write_safetensors(Path("own.safetensors"), contents.pop("model"), {**contents, "model": {"a": 1}, "shards": {}})
    assert read_checkpoint("own.safetensors").keys() == {"model", *contents}
    assert torch.equal(load("own.safetensors").model.head.query_embed.weight, run.head.query_embed.weight)


def test_a_number_too_large_for_the_precision_is_an_error(run):
    state = read_checkpoint("best.pth")
    state["model"]["head.query_embed.weight"][0, 0] = 1e5
    save_checkpoint("best.pth", state)
    with pytest.raises(CheckpointError, match="head.query_embed.weight: contains numbers .* too large for fp16"):
        vitkit.convert("best.pth", "half.pth", precision="fp16")
    assert not Path("half.pth").exists()


@pytest.mark.parametrize("out", ["own.pth", "own.safetensors"])
def test_metadata_of_a_checkpoint_are_converted_too(run, out):
    state = read_checkpoint("best.pth")
    measured = {"score_thresholds": {"overall": 0.25, "by_class": {"cat": 0.3, "dog": 0.2}, "origin": "best F1"}}
    save_checkpoint("best.pth", state | {"measured": measured, "category_ids": [3, 7], "progress": {"step": 5}})
    before = load("best.pth")
    convert.main(["best.pth", "--to", "vitkit", "--out", out])
    after = load(out)
    assert after.thresholds == before.thresholds and after.thresholds is not None
    assert after.category_ids == [3, 7] and "progress" not in read_checkpoint(out)


@pytest.mark.parametrize("out", ["own.pth", "own.safetensors"])
def test_translator_is_still_a_translator_after_conversion(run, out):
    vocabularies = {name: Vocabulary("word", [*SPECIAL_TOKENS, "a", "b"]) for name in ("source", "target")}
    spec = dict(type="Transformer", num_layers=[1, 1], d_model=8, num_heads=2, d_ffn=8)
    model = build_model(spec, vocabularies=vocabularies)
    saved = {name: vocabulary.to_json() for name, vocabulary in vocabularies.items()}
    config = json.dumps({"model": spec})
    save_checkpoint("text.pth", {"model": model.state_dict(), "config": config, "vocabularies": saved})
    convert.main(["text.pth", "--to", "vitkit", "--out", out])
    assert load(out).vocabularies["target"] == vocabularies["target"]


def test_unsupported_conversions_are_one_line_errors(run, capsys):
    for argv, message in (
        (["best.pth", "--to", "official", "--out", "best.pth"], "best.pth exists already"),
        (["best.pth", "--to", "official", "--out", "tiny.py/a.pth"], "tiny.py/a.pth: not saved"),
        (["nothing.pth", "--to", "official", "--out", "a.pth"], "nothing.pth"),
    ):
        with pytest.raises(SystemExit) as error:
            convert.main(argv)
        assert message in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(SystemExit):
        convert.main(["own.json", "--to", "coco", "--out", "a.json"])
    assert "Annotations are converted by vitkit data convert" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="ends in .pth or .safetensors"):
        convert.main(["best.pth", "--to", "official", "--out", "a.txt"])


def test_convert_is_a_function_of_a_program(run):
    done = vitkit.convert("best.pth", "a.safetensors", to="transformers")
    assert done.path == Path("a.safetensors") and done.num_entries == len(read_checkpoint("a.safetensors"))
    assert done.names == "transformers DETR" and done.report.missing == []
    with pytest.raises(CheckpointError, match="out a.safetensors exists already"):
        vitkit.convert("best.pth", "a.safetensors", to="transformers")
    with pytest.raises(ConfigError, match="to 'offical': unknown names. Did you mean 'official'"):
        vitkit.convert("best.pth", "b.pth", to="offical")


def test_choices_that_help_lists_are_those_of_the_package():
    assert (NAMES, tuple(WRITERS)) == (convert.NAMES, convert.ANNOTATIONS)
