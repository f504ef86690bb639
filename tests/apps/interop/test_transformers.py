"""Models of the transformers library, from its files and folders: equal outputs, and errors that say what is wrong."""

import json
import time

import pytest
import torch
from helpers.transformers_models import BUILDERS, TEXT_MODELS, build_theirs, compare
from helpers.weights import assert_same_weights
from safetensors.torch import load_file, save_file

from vitkit import CheckpointError, ConfigError, load, load_weights
from vitkit.apps.inference import find_model
from vitkit.config import load_config
from vitkit.engine.build import build_model
from vitkit.errors import VitkitError
from vitkit.io.coco_classes import COCO_CLASSES, COCO_PANOPTIC_CLASSES
from vitkit.weights.transformers_folder import is_transformers_folder

transformers = pytest.importorskip("transformers", reason="the comparison needs pip install -e '.[benchmark]'")
transformers.utils.logging.disable_progress_bar()


def ours_for(folder):
    """vitkit's model of a folder, with random weights."""
    torch.manual_seed(5)
    model = find_model(folder)
    classes = {} if "target_size" in model.config["model"] else {"num_classes": 3}
    return build_model(model.config["model"] | classes).eval()


@pytest.mark.parametrize("name", BUILDERS)
def test_model_outputs_are_the_same_from_a_folder_and_from_memory(name, tmp_path):
    theirs = build_theirs(transformers, name)
    theirs.save_pretrained(tmp_path)
    ours = ours_for(tmp_path)
    report = load_weights(ours, tmp_path)
    # The library writes RF-DETR under the original's names.
    assert report.converter.startswith("roboflow/" if name.startswith("rf_detr") else "transformers ")
    assert not report.missing and not report.unexpected
    compare(theirs, ours)
    # In memory, the library uses the newest spelling of its names.
    others = ours_for(tmp_path)
    load_weights(others, dict(theirs.state_dict()))
    counts = "num_batches_tracked"
    assert_same_weights(others, {key: value for key, value in ours.state_dict().items() if not key.endswith(counts)})


@pytest.mark.parametrize("form", ["sharded", "bin", "sharded bin", "half"])
def test_every_format_of_weight_files_loads(form, tmp_path):
    theirs = build_theirs(transformers, "vit")
    theirs.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    expected = ours_for(tmp_path)
    load_weights(expected, tmp_path / "model.safetensors")
    parts = [dict(list(state.items())[:10]), dict(list(state.items())[10:])]
    ending = "bin" if "bin" in form else "safetensors"
    stem = "pytorch_model" if "bin" in form else "model"
    (tmp_path / "model.safetensors").unlink()

    def write(tensors, file):
        (torch.save if "bin" in form else save_file)(tensors, tmp_path / file)
        return file

    if "sharded" in form:
        files = [write(part, f"{stem}-{i}-of-2.{ending}") for i, part in enumerate(parts, start=1)]
        weight_map = {key: file for file, part in zip(files, parts) for key in part}
        (tmp_path / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    elif form == "half":
        write({key: value.half() for key, value in state.items()}, f"{stem}.{ending}")
    else:
        write(state, f"{stem}.{ending}")
    ours = ours_for(tmp_path)
    load_weights(ours, tmp_path)
    tolerance = 1e-3 if form == "half" else 0
    torch.testing.assert_close(ours.state_dict(), expected.state_dict(), atol=tolerance, rtol=0)


def folder_of(tmp_path, name="detr", **changes):
    """A saved model, its config changed."""
    build_theirs(transformers, name).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("name", sorted(BUILDERS.keys() - {"detr_own_resnet", *TEXT_MODELS}))
def test_a_folder_that_names_no_classes_has_the_default_of_two(name, tmp_path):
    theirs = build_theirs(transformers, name, num_labels=2)
    theirs.save_pretrained(tmp_path)
    assert "id2label" not in json.loads((tmp_path / "config.json").read_text())
    things = [True, True] if name == "detr_masks" else None
    ours = load(tmp_path, things=things)
    assert ours.classes == ["LABEL_0", "LABEL_1"]
    compare(theirs, ours.model)


def test_classes_and_sizes_come_from_the_folder(tmp_path):
    folder = folder_of(tmp_path, id2label={"0": "cat", "2": "N/A", "1": "dog"})
    processor = dict(size=dict(shortest_edge=64, longest_edge=100), image_mean=[0.485, 0.456, 0.406])
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    model = load(folder)
    assert model.classes == ["cat", "dog", "N/A"]
    assert (model.transforms.short_side, model.transforms.max_size) == (64, 100)
    assert str(model.report).endswith("recognized as transformers DETR")


def test_classifiers_normalize_pixels_as_in_their_folder(tmp_path):
    folder = folder_of(tmp_path, "vit")
    processor = dict(size=dict(height=32, width=32), image_mean=[0.5] * 3, image_std=[0.5] * 3, resample=2)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    model = load(folder)
    images = torch.randint(0, 255, (1, 50, 70, 3), dtype=torch.uint8).numpy()
    batch = model.prepare(list(images))
    assert batch.inputs["images"].shape == (1, 3, 32, 32)  # the whole image, not a part of it
    theirs = transformers.ViTForImageClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = theirs((batch.inputs["images"].float() / 255 - 0.5) / 0.5).logits
        torch.testing.assert_close(model.model(**batch.inputs)["logits"], expected, atol=1e-4, rtol=1e-4)


def test_detectors_with_a_class_for_each_raw_id_get_the_coco_classes(tmp_path):
    names = ["N/A"] * 91
    for id_, name in zip([i for i in range(91) if i not in RAW_GAPS], COCO_CLASSES):
        names[id_] = name
    assert len([name for name in names if name != "N/A"]) == 80
    config = transformers.DetrConfig(
        backbone="resnet18", use_timm_backbone=True, use_pretrained_backbone=False, d_model=32, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, num_queries=5,
        id2label=dict(enumerate(names)),
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.DetrForObjectDetection(config)
    theirs.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.classes == list(COCO_CLASSES)
    weight = theirs.class_labels_classifier.weight
    assert torch.equal(model.model.head.class_embed.weight[0], weight[1])  # person
    assert torch.equal(model.model.head.class_embed.weight[-1], weight[-1])  # no object


RAW_GAPS = (0, 12, 26, 29, 30, 45, 66, 68, 69, 71, 83)


def test_coco_panoptic_things_are_known(tmp_path):
    folder = folder_of(tmp_path, "mask2former_swin", id2label=dict(enumerate(COCO_PANOPTIC_CLASSES)))
    from vitkit.weights import read_checkpoint

    checkpoint = read_checkpoint(folder)
    assert checkpoint["classes"][80] == "banner" and checkpoint["things"][:81] == [True] * 80 + [False]
    assert find_model(folder).config["model"]["tasks"] == ["panoptic"]


@pytest.mark.parametrize("data", ["ade20k", "cityscapes"])
def test_things_of_other_known_classes_are_identified_by_name(data, tmp_path):
    names = load_config(f"mask2former_r50_{data}_semantic")["data"]["val"]["classes"]
    things = load_config(f"mask2former_r50_{data}_panoptic")["model"]["things"]
    spelled = [name.replace("windowpane", "window ").replace("road", "road, route") for name in names]
    folder = folder_of(tmp_path / "panoptic", "mask2former_swin", id2label=dict(enumerate(spelled)))
    assert find_model(folder).config["model"]["things"] == things and not all(things)


def test_unknown_things_must_be_given(tmp_path):
    folder = folder_of(tmp_path / "my-panoptic", "mask2former_swin", id2label={"0": "a", "1": "b", "2": "c"})
    with pytest.raises(ConfigError, match="my-panoptic: does not state which classes are things.* Give things="):
        load(folder)
    assert load(folder, things=[True, False, True]).model.things == [True, False, True]


def test_run_folder_with_exported_weights_is_still_a_run(tmp_path):
    (tmp_path / "config.json").write_text('{"model": {"type": "DETR"}}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert not is_transformers_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "detr"}')
    assert is_transformers_folder(tmp_path)


def test_folder_name_determines_the_mask_task(tmp_path):
    folder = folder_of(tmp_path / "panoptic-runs" / "mask2former-tiny", "mask2former_swin")
    assert find_model(folder).config["model"]["tasks"] == ["semantic"]
    folder = folder_of(tmp_path / "mask2former-tiny-instance", "mask2former_swin")
    assert find_model(folder).config["model"]["tasks"] == ["instance"]
    assert find_model(folder, overrides=["model.tasks=['semantic']"]).config["model"]["tasks"] == ["semantic"]


def test_error_for_an_unsupported_architecture_lists_the_supported_ones(tmp_path):
    folder = folder_of(tmp_path, model_type="conditional_detr", architectures=["ConditionalDetrForObjectDetection"])
    with pytest.raises(
        ConfigError, match="'conditional_detr' .*ConditionalDetrForObjectDetection.* Known: .*deimv2, detr, "
    ):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(position_embedding_type="learned"), "position_embedding_type='learned': vitkit's model only has 'sine'"),
        (dict(decoder_ffn_dim=99), "encoder_ffn_dim=16, decoder_ffn_dim=99: vitkit's model has one number for both"),
        (dict(id2label=[1, 2]), "id2label does not map"),
        (dict(backbone_config=dict(model_type="timm_backbone", backbone="convnext_tiny")), "backbone 'convnext_tiny'"),
    ],
)  # fmt: skip
def test_unsupported_settings_are_named(changes, message, tmp_path):
    with pytest.raises((ConfigError, CheckpointError), match=message):
        load(folder_of(tmp_path, **changes))


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config", dict(hidden_size=0), "hidden_size=0: expected a whole number above 0"),
        ("config", dict(hidden_size=None), "hidden_size=None: expected a whole number above 0"),
        ("config", dict(model_type=["vit"]), "model_type .'vit'. .* is not supported"),
        ("config", dict(architectures=[1]), r"architectures=\[1\]: expected a list of names"),
        ("config", dict(architectures="ViTModel"), "architectures='ViTModel': expected a list of names"),
        ("preprocessor_config", dict(image_mean="a"), "image_mean='a': expected a list of numbers"),
        ("preprocessor_config", dict(image_mean=0.5), "image_mean=0.5: expected a list of numbers"),
        ("preprocessor_config", dict(image_std=[0.5]), "expected three numbers each"),
        ("preprocessor_config", dict(size=[224, 224]), "size is a list; expected a section"),
        ("preprocessor_config", dict(size="224"), "size is a str; expected a section"),
        ("preprocessor_config", dict(size=dict(width=224)), "size: height is missing"),
    ],
)
def test_damaged_settings_are_named(file, changes, message, vit_folder):
    path = vit_folder / f"{file}.json"
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values | changes))
    with pytest.raises(ConfigError, match=message) as error:
        find_model(vit_folder)
    assert "\n" not in str(error.value)


@pytest.fixture
def vit_folder(tmp_path):
    return folder_of(tmp_path, "vit")


def test_dense_models_normalize_by_the_mean_in_the_folder(tmp_path):
    folder = folder_of(tmp_path, "mask2former_swin")
    (folder / "preprocessor_config.json").write_text(json.dumps(dict(image_mean=[0.5] * 3, image_std=[0.25] * 3)))
    backbone = load(folder).model.backbone
    assert (list(backbone.pixel_mean), list(backbone.pixel_std)) == ([0.5] * 3, [0.25] * 3)


def test_damaged_folders_are_errors_that_name_the_file(tmp_path):
    folder = folder_of(tmp_path, "vit")
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors: truncated, damaged or not in safetensors"):
        load(folder)
    index = folder / "model.safetensors.index.json"
    weights.unlink()
    for content, message in (
        ("{}", "index.json: has no weight_map"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "names '../x.safetensors'; expected files beside it"),
        ('{"weight_map": {"a": "x.safetensors"}}', "lists x.safetensors, which is not beside it"),
        ("[1]", "contains a list; expected a JSON object"),
        ("{", "cannot be read"),
    ):
        index.write_text(content)
        with pytest.raises(CheckpointError, match=message):
            load(folder)
    index.unlink()
    with pytest.raises(CheckpointError, match="has no weights: expected model.safetensors"):
        load(folder)
    weights.write_bytes(data)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match="has weights, but no config.json"):
        load(folder)


def test_error_for_weights_of_another_model_names_their_format(tmp_path):
    folder = folder_of(tmp_path, "vit")
    with pytest.raises(CheckpointError, match="seems to be transformers ViT"):
        load_weights(build_model(dict(type="Classifier", backbone="swin_tiny")), folder)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("detr", "encoder_layers"),
        ("detr", "num_queries"),
        ("mask2former_swin", "encoder_feedforward_dim"),
        ("swin", "depths"),
        ("swin", "window_size"),
        ("vit", "hidden_size"),
        ("vit", "image_size"),
        ("marian", "d_model"),
        ("marian", "vocab_size"),
        ("marian", "max_position_embeddings"),
        ("bert", "num_hidden_layers"),
        ("gpt2", "n_layer"),
    ],
)
@pytest.mark.parametrize("value", [16384, 1 << 62])
def test_size_beyond_the_weights_is_one_line_within_seconds(name, key, value, tmp_path):
    build_theirs(transformers, name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config[key] = [value] * len(config[key]) if isinstance(config[key], list) else value
    path.write_text(json.dumps(config))
    began = time.process_time()
    with pytest.raises(VitkitError):
        load(tmp_path)
    assert time.process_time() - began < 10
