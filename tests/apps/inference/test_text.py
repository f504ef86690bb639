"""What a text-prompted model is told to look for: phrases, captions, the classes of its data, and wrong texts."""

import json
import logging

import numpy as np
import pytest
from helpers.grounding_models import build_small, small_config
from PIL import Image

from vitkit.apps.inference import load
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.structures import ScoreThresholds
from vitkit.text.vocabulary import Vocabulary
from vitkit.tools import predict
from vitkit.weights import save_checkpoint

CONFIG = dict(model=small_config(max_tokens=16), data={})
IMAGE = np.random.default_rng(0).integers(0, 255, (96, 128, 3), dtype=np.uint8)
PHRASES = ["a red star", "cat", "blue", "a blue cat", "star"]


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.train("word", ["a red star .", "a blue cat ."])


@pytest.fixture
def weights(vocabulary, tmp_path):
    """Return a function that writes a checkpoint with more than the model in it."""

    def write(name="weights.pth", config=CONFIG, **more):
        content = {
            "model": build_small(vocabulary, max_tokens=16).state_dict(),
            "vocabularies": {"target": vocabulary.to_json()},
            "config": json.dumps(config),
        }
        save_checkpoint(tmp_path / name, content | more)
        return str(tmp_path / name)

    return write


@pytest.fixture
def predictor(weights):
    return load(weights())


def test_phrases_are_the_classes(predictor):
    assert predictor.classes == []
    as_list = predictor(IMAGE, text=["a red  star", "cat"], threshold=0.0)
    as_text = predictor(IMAGE, text="a red star . cat .", threshold=0.0)
    assert set(as_list.names) == {"a red star", "cat"} and as_list.classes == ["a red star", "cat"]
    assert as_list.names == as_text.names
    assert [as_list.classes.index(name) for name in as_list.names] == as_list.labels.tolist()
    batch = predictor([IMAGE, IMAGE[:64]], text="cat", batch_size=2, threshold=0.0)
    assert [set(prediction.names) for prediction in batch] == [{"cat"}] * 2


def test_objects_of_a_long_text_are_those_of_its_parts(predictor):
    together = predictor(IMAGE, text=[*PHRASES, "red"], threshold=0.0)  # 18 tokens, of which the model takes 16
    parts = [predictor(IMAGE, text=part, threshold=0.0) for part in (PHRASES, "red")]
    expected = sorted((p.scores[i].item(), name) for p in parts for i, name in enumerate(p.names))
    assert sorted(zip(together.scores.tolist(), together.names)) == [
        (pytest.approx(score, abs=1e-5), name) for score, name in expected
    ]


def test_a_caption_names_objects_by_its_words(predictor):
    prediction = predictor(IMAGE, text="a red star, a blue cat", text_threshold=0.5, threshold=0.0)
    assert len(prediction) == 20  # each query once
    words = {"a", "red", "star", "blue", "cat"}
    assert all(name and set(name.split()) <= words for name in prediction.names)
    assert prediction.draw().dtype == np.uint8
    with pytest.raises(ConfigError, match="tiles: the phrases of GroundingDINO are not merged"):
        predictor(IMAGE, text="a red star", text_threshold=0.5, tiles=64)


def test_zero_shot_objects_are_shown_from_the_published_threshold(predictor):
    assert predictor.thresholds.overall == predictor.with_text("cat").thresholds.overall == 0.35


def test_tiles_are_merged_by_phrase(predictor):
    tiled = predictor(IMAGE, text="a red star . cat .", tiles=64, threshold=0.0)
    assert len(tiled) > 20 and set(tiled.names) == {"a red star", "cat"}
    assert tiled.boxes[:, 2].max() > 64


def test_a_trained_model_looks_for_the_classes_of_its_data(weights):
    measured = ScoreThresholds(0.4, (0.3, None), "highest F1 in validation")
    classes = ["CAT", "St. Ar"]
    config = dict(CONFIG, data=dict(prompts=dict(phrases={"CAT": "cat", "St. Ar": "star"})))
    path = weights(
        config=config, classes=classes, category_ids=[7, 9], measured={"score_thresholds": measured.to_json(classes)}
    )
    predictor = load(path)
    prediction = predictor(IMAGE, threshold=0.0)
    told = load(path).with_text("cat . star .")
    assert prediction.classes == classes and set(prediction.names) == set(classes)
    assert prediction.scores.tolist() == told(IMAGE, threshold=0.0).scores.tolist()
    assert {entry["category_id"] for entry in prediction.to_coco(1)} == {7, 9}
    assert predictor.thresholds.by_class == (0.3, None)
    assert told.category_ids is None and told.thresholds.by_class == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "text: '' has no phrase"),
        (["St. Bernard"], "text: the phrase 'St. Bernard' has a '.'"),
        ("cat . what? .", r"text: the phrase 'what\?' has a '\?'"),
        ("cat . CAT .", "text: the phrase 'CAT' is given twice"),
        (["cat", "zebra"], "the tokenizer knows no piece of the phrase 'zebra'"),
        ("a red star " * 5, "text: phrase 1 has 16 tokens, and the model takes 14"),
        (7, "text: got 7; expected a text such as"),
    ],
)  # fmt: skip
def test_texts_that_cannot_be_read_are_one_line(predictor, text, message):
    with pytest.raises(DataError, match=message) as error:
        predictor(IMAGE, text=text)
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match=message):
        predictor.with_text(text)


def test_a_text_is_needed_and_a_threshold_needs_one(predictor):
    with pytest.raises(ConfigError, match=r"text: not given, and GroundingDINO looks for what it names\. Give one"):
        predictor(IMAGE)
    with pytest.raises(ConfigError, match="text_threshold: is for the words of a caption"):
        predictor(IMAGE, text_threshold=0.2)
    with pytest.raises(DataError, match="expected one text, since text_threshold is for a caption"):
        predictor(IMAGE, text=["a cat"], text_threshold=0.2)
    with pytest.raises(ConfigError, match="text_threshold=1.5: expected a probability"):
        predictor(IMAGE, text="a cat", text_threshold=1.5)


def test_classes_that_are_not_phrases_are_named(weights, tmp_path, caplog):
    message = "class 'St. Bernard': .*has a '.'.*Set data.prompts.phrases={'St. Bernard': 'ANOTHER PHRASE'}"
    with pytest.raises(DataError, match=message):
        load(weights(classes=["St. Bernard"]))
    Image.fromarray(IMAGE).save(tmp_path / "a.png")
    predictor = load(weights(classes=["zebra"]))
    with (
        caplog.at_level(logging.WARNING, "vitkit"),
        pytest.raises(DataError, match="the tokenizer knows no piece of the phrase 'zebra'"),
    ):
        predictor(tmp_path / "*.png")
    # The text is wrong, not the images.
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["prompt"]
    assert predictor(tmp_path / "a.png", text="cat").classes == ["cat"]


def test_a_model_without_vocabulary_says_what_to_set(weights):
    with pytest.raises(CheckpointError, match="has no vocabulary to read text with, and model.tokenizer is not set"):
        load(weights(vocabularies={}))
    with pytest.raises(CheckpointError, match=r"tokenizer 'nowhere': there is no nowhere\. Expected bert-base-uncased"):
        load(weights(vocabularies={}), overrides=["model.tokenizer=nowhere"])


@pytest.fixture
def photos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / "photos").mkdir(exist_ok=True)
        Image.fromarray(IMAGE).save(tmp_path / "photos" / f"{name}.png")
    return "photos"


def test_the_command_line_takes_a_text_or_phrases(weights, photos, tmp_path):
    predict.main([weights(), "--input", photos, "--text", "a red star . cat .", "--threshold", "0.1", "--out", "one"])
    predict.main([weights(), "--input", photos, "--threshold", "0.1", "--out", "two", "--text", "a red star", "cat"])
    one, two = (json.loads((tmp_path / name / "predictions.json").read_text()) for name in ("one", "two"))
    assert one["classes"] == two["classes"] == ["a red star", "cat"]
    assert one["images"][0]["objects"] == two["images"][0]["objects"] != []
    assert one["thresholds"] == {"overall": 0.35, "by_class": {}, "origin": "the default"}


@pytest.mark.parametrize("format", ["coco", "yolo", "voc", "cvat", "label-studio"])
def test_objects_become_annotations_with_the_phrases_as_classes(weights, photos, tmp_path, format, capsys):
    arguments = [weights(), "--input", photos, "--threshold", "0.1", "--format", format, "--no-draw"]
    predict.main([*arguments, "--out", "phrases", "--text", "a red star . cat ."])
    predict.main([*arguments, "--out", "caption", "--text", "a red star, blue cat", "--text-threshold", "0.5"])
    for folder, name in (("phrases", "a red star"), ("caption", "red star")):
        written = [
            path for path in (tmp_path / folder / format).rglob("*") if path.suffix in (".json", ".xml", ".yaml")
        ]
        assert any(name in path.read_text() for path in written), folder
    caption = json.loads((tmp_path / "caption" / "predictions.json").read_text())
    names = [found["class"] for image in caption["images"] for found in image["objects"]]
    assert caption["classes"] == list(dict.fromkeys(names)) != []


def test_wrong_texts_are_one_line_on_the_command_line(weights, photos, capsys):
    def fails(*arguments):
        with pytest.raises(SystemExit) as error:
            predict.main([weights(), "--input", photos, *arguments])
        return f"{error.value} {capsys.readouterr().err}".strip()

    assert "text: not given, and GroundingDINO looks for what it names" in fails()
    assert "text: '' has no phrase" in fails("--text", "")
    assert "text: the phrase 'St. Bernard' has a '.'" in fails("--text", "St. Bernard", "cat")
    assert "--text-threshold: is for the words of a caption" in fails("--text-threshold", "0.2")
    assert "expected one text, since text_threshold is for a caption" in fails(
        "--text", "a", "b", "--text-threshold", "0"
    )
    assert "the tokenizer knows no piece of the phrase 'zebra'" in fails("--text", "zebra")
    with pytest.raises(SystemExit) as error:
        predict.main(["shapes_dino", "--input", photos, "--text", "a red star"])
    assert "text: DINO takes no text to look for. Leave it out." in f"{error.value} {capsys.readouterr().err}"
