"""Class heads of weights that were trained on other classes: rows are taken by the classes' names."""

import json

import pytest
import torch

import vitkit
from vitkit import CheckpointError, ConfigError, build_model, load_config, load_weights
from vitkit.tools import convert as convert_tool
from vitkit.tools import train as train_tool
from vitkit.weights import read_checkpoint, save_checkpoint
from vitkit.weights.class_rows import match_class_rows

OLD = ["person", "dog", "traffic light"]
NEW = ["flame", "Traffic_Light", "person"]
QUICK = ["model.num_queries=12", "model.head.num_encoder_layers=1", "model.head.num_decoder_layers=2"]


def model_of(name, classes, *overrides):
    return build_model(load_config(name, overrides)["model"], classes=classes)


def checkpoint_of(model, classes, **others):
    return {"model": {key: value.clone() for key, value in model.state_dict().items()}, "classes": classes, **others}


@pytest.mark.parametrize(
    ("theirs", "ours", "class_map", "sources"),
    [
        (["cat", "dog"], ["dog", "bird", "cat"], {}, [[1], [], [0]]),
        (["Hot Dog", "T-shirt"], ["tshirt", "hot_dog"], {}, [[1], [0]]),
        (["car", "van", "bus"], ["vehicle", "bus"], {"car": "vehicle", "van": "vehicle"}, [[0, 1], [2]]),
        (["cat", "dog"], ["cat", "dog"], {"cat": "dog"}, [[], [0, 1]]),
        (["Cat", "cat"], ["cat"], {}, [[1]]),
        (["0", "1"], ["helmet", "1"], {"0": "helmet"}, [[0], [1]]),
    ],
)
def test_classes_are_matched_by_name(theirs, ours, class_map, sources):
    rows = match_class_rows(theirs, ours, class_map)
    assert [list(row) for row in rows.sources] == sources
    assert rows.new == [name for name, row in zip(ours, sources) if not row]


def test_the_table_names_what_is_kept_new_and_dropped():
    class_map = dict(car="vehicle", van="vehicle")
    rows = match_class_rows(["car", "van", "bus", "cat"], ["vehicle", "Bus", "bike"], class_map)
    kept, new, dropped = str(rows).splitlines()
    assert kept.split(None, 2) == ["kept", "2", "vehicle (the mean of car and van), Bus (from bus)"]
    assert new.split() == ["new", "1", "bike"] and dropped.split() == ["dropped", "1", "cat"]


@pytest.mark.parametrize(
    ("theirs", "ours", "class_map", "message"),
    [
        (["cat"], ["Cat", "CAT"], {}, "'Cat' and 'CAT' differ only in case"),
        (["Cat", "CAT"], ["cat"], {}, "'Cat' and 'CAT' differ only in case"),
        (["cat"], ["cat"], {"dgo": "cat"}, "the checkpoint has no class 'dgo'"),
        (["dog"], ["cat"], {"dog": "cta"}, "the data has no class 'cta'. Did you mean 'cat'?"),
    ],
)
def test_unclear_names_are_an_error(theirs, ours, class_map, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        match_class_rows(theirs, ours, class_map)


@pytest.mark.parametrize(
    "name", ["quickstart/detr", "quickstart/dino", "quickstart/mask2former_instance", "quickstart/keypoints"]
)
def test_a_head_of_new_classes_keeps_the_rows_of_old_ones(name):
    """All layers' class heads, the encoder's, those of groups, and the labels' embeddings for denoising."""
    torch.manual_seed(0)
    source, model = model_of(name, OLD), model_of(name, NEW)
    fresh, stored = {k: v.clone() for k, v in model.state_dict().items()}, source.state_dict()
    report = load_weights(model, checkpoint_of(source, OLD), classes=NEW, new_class_head=True)
    assert report.class_rows.new == ["flame"]
    assert {"head.keypoint_head.label_groups"} >= set(report.reinitialized)  # whether a label has keypoints
    heads = [k for k in fresh if k.startswith(tuple(model.class_head)) and k not in report.reinitialized]
    assert len(heads) >= 2 and any("class_embed" in key for key in heads)
    for key, value in model.state_dict().items():
        if key not in heads:
            assert torch.equal(value, stored[key]) or key in report.reinitialized
            continue
        assert len(value) - len(NEW) in (0, 1)  # one row for "no object", or for no label
        assert torch.equal(value[0], fresh[key][0])
        assert torch.equal(value[1], stored[key][2]) and torch.equal(value[2], stored[key][0])
        assert torch.equal(value[3:], stored[key][3:])
    assert "kept        2  Traffic_Light (from traffic light), person" in str(report)


def test_several_classes_become_their_mean():
    source, model = model_of("quickstart/detr", OLD), model_of("quickstart/detr", ["living", "light"])
    names = {"person": "living", "dog": "living", "traffic light": "light"}
    options = dict(classes=["living", "light"], new_class_head=True)
    load_weights(model, checkpoint_of(source, OLD), class_map=names, **options)
    weight = source.head.class_embed.weight
    torch.testing.assert_close(model.head.class_embed.weight[0], weight[:2].mean(0))
    assert torch.equal(model.head.class_embed.weight[1:], weight[2:])
    with pytest.raises(ConfigError, match="no names of classes, so there is nothing to map by class_map"):
        load_weights(model, {"model": source.state_dict()}, class_map=names, **options)


def test_rows_without_names_are_taken_by_number_and_said():
    source, model = model_of("quickstart/detr", OLD), model_of("quickstart/detr", ["a", "b", "c"])
    report = load_weights(model, {"model": source.state_dict()}, classes=["a", "b", "c"], new_class_head=True)
    assert torch.equal(model.head.class_embed.weight, source.head.class_embed.weight)
    assert "it does not name its classes, so rows of the class head are taken by their numbers" in str(report)
    report = load_weights(model_of("quickstart/detr", ["a"]), {"model": source.state_dict()}, new_class_head=True)
    assert report.reinitialized == ["head.class_embed.weight", "head.class_embed.bias"]


def test_coco_s_classes_are_found_among_rows_of_raw_ids():
    """Official heads have 91 rows and "no object"; those of other data's classes are taken, each by its id."""
    config = load_config("detr_r50", ["model.backbone.pretrained=false", *QUICK])["model"]
    official, model = build_model(config), build_model(config, classes=["flame", "Person", "toothbrush"])
    state = vitkit.model_zoo.converters.write_names(official, "official").state
    report = load_weights(model, {"model": state}, classes=["flame", "Person", "toothbrush"], new_class_head=True)
    rows = official.head.class_embed.weight
    assert report.class_rows.new == ["flame"] and len(rows) == 92
    assert torch.equal(model.head.class_embed.weight[1:], rows[[1, 90, 91]])


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The checkpoint of a tiny detector that was trained on OLD."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = load_config("quickstart/dino")
    about = dict(config=json.dumps(config), category_ids=[7, 3, 5])
    save_checkpoint("old.pth", checkpoint_of(model_of("quickstart/dino", OLD), OLD, **about))
    return "old.pth"


def test_some_classes_are_loaded_in_any_order_and_predict_as_before(run, capsys):
    image = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8).numpy()
    whole = vitkit.load(run)
    part = vitkit.load(run, classes=["traffic_light", "person"])
    assert part.classes == ["traffic_light", "person"] and part.category_ids == [5, 7]
    inputs = torch.rand(1, 3, 64, 64)
    before, after = (p.model(inputs, None)["pred_logits"] for p in (whole, part))
    assert after.shape[-1] == 2 and before.shape[-1] == 3
    with pytest.raises(CheckpointError, match="not trained on 1 class of the model, flame"):
        vitkit.load(run, classes=["person", "flame"])
    convert_tool.main([run, "--classes", "traffic_light,person", "--out", "part.pth", "--to", "vitkit"])
    assert "kept        2" in capsys.readouterr().out
    again = vitkit.load("part.pth")
    assert again.classes == ["traffic_light", "person"] and again.category_ids == [5, 7]
    first, second = (predictor(image, threshold=0).scores for predictor in (part, again))
    assert torch.equal(torch.as_tensor(first), torch.as_tensor(second))
    weight = "head.class_embed.0.weight"
    rows = read_checkpoint(run)["model"][weight][[2, 0]]
    assert torch.equal(read_checkpoint("part.pth")["model"][weight], rows)


def test_training_starts_from_rows_by_name(run, capsys):
    overrides = ["data.train.num_images=4", "data.val.num_images=2", "train.epochs=1", "data.num_workers=0"]
    start = ["quickstart/dino", *overrides, "--init", run, "--device", "cpu"]
    train_tool.main([*start, "--check", "--class-map", "person=circle", "--class-map", "dog=circle"])
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert "circle (the mean of person and dog)" in text and "dropped     1  traffic light" in text
    for wrong, message in (
        (["person"], "--class-map person: expected OLD=NEW"),
        (["person=crcle"], "the data has no class 'crcle'. Did you mean 'circle'?"),
    ):
        with pytest.raises(SystemExit) as caught:
            train_tool.main([*start, "--check", *(["--class-map", *wrong])])
        assert message in f"{caught.value}{capsys.readouterr().err}"


def test_a_text_prompted_model_has_no_class_rows():
    with pytest.raises(ConfigError, match="GroundingDINO has no class head"):
        vitkit.train("quickstart/grounding", init="shapes_grounding", class_map={"a": "b"}, data=dict(num_workers=0))
