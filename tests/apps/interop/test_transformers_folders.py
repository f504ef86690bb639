"""Folders that vitkit writes for the transformers library: the library's classes load them, with equal outputs."""

import json
import re

import pytest
import torch
from helpers.transformers_models import BUILDERS, TEXT_MODELS, build_theirs, compare

from vitkit import CheckpointError, ConfigError, load
from vitkit.apps.conversion.transformers_writing import DIFFERING, _difference, _resolve, write_folder
from vitkit.apps.inference import Predictor
from vitkit.apps.interop.transformers_configs import KINDS
from vitkit.apps.interop.transformers_settings import Settings
from vitkit.config import load_config
from vitkit.configs.deimv2 import SIZES
from vitkit.data.transforms.classification import ClassificationEvalTransforms
from vitkit.engine.build import build_model
from vitkit.model_zoo.converters import write_names
from vitkit.registry import MODELS
from vitkit.text.vocabulary import Vocabulary
from vitkit.tools.convert import main as convert
from vitkit.weights import save_checkpoint

transformers = pytest.importorskip("transformers", reason="the comparison needs pip install -e '.[benchmark]'")
transformers.utils.logging.disable_progress_bar()

TEXT = ["a dog runs", "two dogs run", "ein Hund rennt", "zwei Hunde rennen"] * 3


def trained(tmp_path, name):
    """Return a vitkit checkpoint of one of the library's models, and the library's class."""
    theirs = build_theirs(transformers, name)
    theirs.save_pretrained(tmp_path / "theirs")
    things = ["model.things=[True,False,True]"] if name == "detr_masks" else []
    convert([str(tmp_path / "theirs"), *things, "--to", "vitkit", "--out", str(tmp_path / "ours.pth")])
    return str(tmp_path / "ours.pth"), theirs


@pytest.mark.parametrize("name", sorted(BUILDERS.keys() - {"detr_own_resnet", *TEXT_MODELS}))
def test_library_builds_and_loads_written_folders(name, tmp_path, capsys):
    path, theirs = trained(tmp_path, name)
    folder = tmp_path / "folder"
    convert([path, "--to", "transformers", "--out", str(folder)])
    assert "wrote" in capsys.readouterr().out
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.architectures == [type(theirs).__name__] and config.num_labels == 3
    read = getattr(transformers, config.architectures[0]).from_pretrained(folder).eval()
    ours = load(path)
    compare(read, ours.model)
    again = load(folder)
    assert getattr(again.model, "things", None) == getattr(ours.model, "things", None)
    assert (again.classes, type(again.transforms)) == (ours.classes, type(ours.transforms))
    assert vars(again.transforms).keys() == vars(ours.transforms).keys()
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    assert hasattr(transformers, processor["image_processor_type"])


@pytest.mark.parametrize("shared", [True, False])
def test_translators_keep_their_tokens(shared, tmp_path):
    vocabularies = {side: Vocabulary.train("unigram", TEXT, size=40) for side in ("source", "target")}
    if not shared:
        vocabularies["target"] = Vocabulary.train("bpe", TEXT[2:], size=35)
    spec = dict(
        type="Transformer", num_layers=1, d_model=16, num_heads=2, d_ffn=16, shared_embeddings=shared, max_length=64
    )
    torch.manual_seed(0)
    model = build_model(spec, vocabularies=vocabularies)
    state = {"model": model.state_dict(), "vocabularies": {k: v.to_json() for k, v in vocabularies.items()}}
    save_checkpoint(tmp_path / "ours.pth", state | {"config": json.dumps({"model": spec})})
    folder = tmp_path / "folder"
    convert([str(tmp_path / "ours.pth"), "--to", "transformers", "--out", str(folder)])
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load(folder)
    for text in TEXT[:2]:
        inputs = tokenizer(text, return_tensors="pt")
        assert inputs.input_ids[0].tolist() == [*vocabularies["source"].encode(text), 3]
        ids = theirs.generate(**inputs, num_beams=1, max_length=10)[0]
        expected = tokenizer.decode(ids, skip_special_tokens=True, use_source_tokenizer=False)
        assert ours(text, beams=1).text.startswith(expected)


def test_settings_unsupported_by_the_library_are_named(tmp_path):
    head = dict(type="DETRHead", d_model=32, num_heads=2, d_ffn=16, num_encoder_layers=1, num_decoder_layers=1)
    spec = dict(
        type="DETR", num_queries=5, backbone="resnet18", neck=dict(type="ChannelProjection", out_channels=32),
        head=head | dict(activation="gelu"),
    )  # fmt: skip
    state = {"model": build_model(spec, classes=["a"]).state_dict(), "classes": ["a"]}
    save_checkpoint(tmp_path / "ours.pth", state | {"config": json.dumps({"model": spec})})
    with pytest.raises(SystemExit, match="model.head.activation='gelu': the transformers library's model has no such"):
        convert([str(tmp_path / "ours.pth"), "--to", "transformers", "--out", str(tmp_path / "folder")])
    assert not (tmp_path / "folder").exists()


def test_a_model_that_the_library_computes_in_another_way_is_warned_of(tmp_path, caplog):
    spec = load_config("deimv2_atto_coco", check=False)["model"] | dict(num_classes=1, num_queries=5)
    spec["backbone"] = dict(spec["backbone"], pretrained=False)
    state = {"model": build_model(spec, classes=["a"]).state_dict(), "classes": ["a"]}
    save_checkpoint(tmp_path / "ours.pth", state | {"config": json.dumps({"model": spec})})
    convert([str(tmp_path / "ours.pth"), "--to", "transformers", "--out", str(tmp_path / "folder")])
    assert DIFFERING["deimv2"] in caplog.text
    assert f"{DIFFERING['deimv2']} With vitkit:" in (tmp_path / "folder" / "README.md").read_text()


def test_unsupported_interpolation_is_named(tmp_path):
    spec = dict(type="Classifier", backbone="resnet18", num_classes=1)
    transforms = ClassificationEvalTransforms(size=32, interpolation="nearest")
    with pytest.raises(CheckpointError, match="interpolation='nearest': expected bilinear or bicubic"):
        write_folder(tmp_path / "folder", Predictor(build_model(spec), ["a"], transforms=transforms), spec)
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("size", SIZES)
def test_settings_of_published_sizes_are_written_and_read(size):
    spec = load_config(f"deimv2_{size}_coco", check=False)["model"]
    model = _resolve(spec, MODELS)
    written = json.loads(json.dumps(KINDS["deimv2"].write(model)))
    base, read = KINDS["deimv2"].read(Settings(written, "config.json"), "")
    assert base == f"deimv2_{size}_coco" and _difference(model, _resolve(read, MODELS), "model") is None
    with torch.device("meta"):
        theirs = transformers.Deimv2ForObjectDetection(transformers.Deimv2Config(**written, num_labels=80))
    if size in ("pico", "n", "s"):  # the larger ones take long to build
        state = write_names(build_model(spec, classes=["a"] * 80), "transformers").state
        # In files, the transformer's blocks have a shorter name.
        parameters = {
            key.replace("backbone.model.layer.", "backbone.layer."): p for key, p in theirs.named_parameters()
        }
        expected = {key: value.shape for key, value in parameters.items()}
        assert {key: state[key].shape for key in expected} == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_feature_levels=3, feat_strides=[8, 16, 32]), "num_feature_levels=3: vitkit's model has 2 or 3, with"),
        (dict(encoder_type="hybrid"), "encoder_type: vitkit's has 'lite' on atto, femto, pico only"),
        (dict(encoder_fuse_op="cat"), "encoder_fuse_op='cat': vitkit's model only has 'sum'"),
        (dict(backbone_config=dict(model_type="swin")), "'swin': vitkit's DEIMv2 knows hgnet_v2"),
    ],
)
def test_settings_that_the_model_does_not_have_are_named(changes, message):
    model = _resolve(load_config("deimv2_atto_coco", check=False)["model"], MODELS)
    settings = Settings(KINDS["deimv2"].write(model) | dict(encode_proj_layers=[1]) | changes, "config.json")
    with pytest.raises(ConfigError, match=re.escape(message)):
        KINDS["deimv2"].read(settings, "")
