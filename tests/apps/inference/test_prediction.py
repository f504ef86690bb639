"""The methods of a prediction: its objects, other libraries' formats, images."""

import io
import re
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco_mask

from vitkit.apps.inference import Prediction, load
from vitkit.errors import ConfigError
from vitkit.structures import ScoreThresholds

IMAGE = np.arange(40 * 56 * 3, dtype=np.uint32).astype(np.uint8).reshape(40, 56, 3)


def detection(**changes):
    masks = torch.zeros(4, 40, 56, dtype=torch.bool)
    masks[1, 2:4, 1:3] = True
    fields = {
        "scores": torch.tensor([0.3, 0.9, 0.6, 0.1]),
        "labels": torch.tensor([0, 1, 0, 1]),
        "boxes_xyxy": torch.tensor([[0.0, 0, 1, 1], [1.0, 2, 3, 4], [5.5, 6, 70, 8], [0.0, 0, 9, 9]]),
        "masks": masks,
    }
    return Prediction("a.png", IMAGE, fields, ["cat", "dog"], **changes)


def panoptic():
    ids = torch.zeros(40, 56, dtype=torch.int32)
    ids[:10], ids[10:20] = 7, 8
    segments = [dict(id=7, label=1, score=0.5), dict(id=8, label=0, score=0.9)]
    return Prediction("a.png", IMAGE, {"panoptic": ids, "segments_info": segments}, ["sky", "sea"])


def test_objects_above_the_thresholds_are_listed_best_first():
    prediction = detection()
    assert prediction.names == ["dog", "cat"] and prediction.scores.tolist() == pytest.approx([0.9, 0.6])
    assert prediction.boxes.tolist() == [[1, 2, 3, 4], [5.5, 6, 70, 8]] and len(prediction) == 2
    assert prediction.masks.sum(dim=(1, 2)).tolist() == [4, 0] and prediction.panoptic is None
    by_class = detection(thresholds=ScoreThresholds(0.5, (0.2, None)))
    assert by_class.names == ["dog", "cat", "cat"]


def test_filter_by_class_and_score_may_go_below_the_thresholds():
    prediction = detection()
    assert prediction.filter(score=0.05).names == ["dog", "cat", "cat", "dog"]
    assert prediction.filter("cat").names == ["cat"]
    assert prediction.filter(["dog"], score=0.0).scores.tolist() == pytest.approx([0.9, 0.1])
    assert len(prediction) == 2  # it is left unchanged
    with pytest.raises(ConfigError, match="filter: the model has no class 'cow'. .*Known: cat, dog"):
        prediction.filter(["cow"])


@pytest.mark.parametrize(
    ("score", "kept"),
    [
        ({"cat": 0.7}, ["dog"]),  # a dog of 0.9 reaches the model's 0.2, one of 0.1 does not
        ({"cat": 0.2, "*": 0.5}, ["dog", "cat", "cat"]),
        ({"dog": 0.95}, ["cat"]),
        ({"*": 0.95}, []),
    ],
)
def test_scores_by_class_name(score, kept):
    prediction = detection(thresholds=ScoreThresholds(0.5, (None, 0.2)))
    assert prediction.filter(score=score).names == kept
    assert [found["class"] for found in prediction.to_json(score_threshold=score)["objects"]] == kept


def test_wrong_scores_by_class_name_are_named():
    with pytest.raises(ConfigError, match=r"threshold: the model has no class 'cats'\. Did you mean 'cat'"):
        detection().filter(score={"cats": 0.3})
    with pytest.raises(ConfigError, match="threshold 1.5: expected a score, 0 to 1"):
        detection().filter(score={"cat": 1.5})


def test_scores_by_class_name_apply_to_panoptic_segments():
    assert panoptic().filter(score={"sea": 0.6}).names == ["sky"]
    assert panoptic().filter(score={"sea": 0.4, "*": 0.95}).names == ["sea"]
    assert [s["class"] for s in panoptic().to_json(score_threshold={"sea": 0.6})["segments"]] == ["sky"]


def test_classes_may_come_one_by_one():
    assert detection().filter(iter(["cat"])).names == detection().filter(["cat"]).names == ["cat"]


@pytest.mark.parametrize("task", ["detection", "instance"])
def test_the_best_box_is_drawn_dashed_if_no_object_reaches_its_threshold(task):
    fields = {
        "scores": torch.tensor([0.2, 0.4]),
        "labels": torch.tensor([0, 0]),
        "boxes_xyxy": torch.tensor([[2.0, 2, 20, 38], [4.0, 20, 52, 36]]),
        "masks": torch.ones(2, 40, 56, dtype=torch.bool),
    }
    prediction = Prediction("a.png", np.zeros_like(IMAGE), fields, ["cat", "dog"])
    drawn, nothing = prediction.draw(task=task), prediction.draw(task=task, best=False)
    scale = len(drawn) // 40
    lower = drawn[36 * scale - 1, 4 * scale : 52 * scale].any(axis=-1)
    assert 0.35 < lower.mean() < 0.65 and not nothing.any()  # half of the line; not the other box, nor a mask
    assert not drawn[2 * scale : 12 * scale].any()
    found = prediction.draw(task=task, score_threshold=0.3)[36 * scale - 1, 4 * scale : 52 * scale]
    assert found.any(axis=-1).all()


def test_a_text_or_a_score_in_place_of_names_is_an_error():
    with pytest.raises(ConfigError, match=r"filter: classes is 0.5; expected names. Of scores: filter\(score=0.5\)"):
        detection().filter(0.5)
    with pytest.raises(
        ConfigError, match=r"classes: got the text 'a,b'; expected a list of texts, such as \['a', 'b'\]"
    ):
        load("shapes_dino", classes="a,b")
    with pytest.raises(ConfigError, match="overrides: got the text 'data.num_workers=0'"):
        load("shapes_dino", overrides="data.num_workers=0")
    for classes, message in (
        (["star", "star"], "classes: 'star' is listed twice. Name each once."),
        ([0, 1], "classes: has 0; expected a list of texts."),
        ([], "classes: is empty; expected at least one name."),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            load("shapes_dino", classes=classes)
    with pytest.raises(ConfigError, match="filter: the model has no class 3."):
        detection().filter([3])


def test_filter_sets_other_panoptic_segments_to_void():
    filtered = panoptic().filter("sea")
    assert filtered.names == ["sea"] and filtered.panoptic.unique().tolist() == [0, 7]
    assert panoptic().filter(score=0.6).names == ["sky"]


def test_summary_without_objects_names_the_threshold_and_the_best_score():
    assert detection().summary() == "a.png: 1 dog, 1 cat; from score 0.50 (the default)"
    high = detection(thresholds=ScoreThresholds(0.95, origin="highest F1 in validation"))
    assert repr(high) == "a.png: nothing from score 0.95 (highest F1 in validation); the best is 0.90 (dog)"
    by_class = detection(thresholds=ScoreThresholds(0.8, (0.85, 0.95)))
    assert by_class.summary().endswith(
        "score 0.80 to 0.95, by class (the default); the best is 0.90 (dog, shown from 0.95)"
    )
    assert str(ScoreThresholds(0.5, (0.2, 0.7))) == "score 0.20 to 0.70, by class (the default)"


def test_drawn_and_written_objects_are_those_above_the_thresholds():
    nothing = detection(thresholds=ScoreThresholds(0.95))
    assert (nothing.draw() == detection().draw(score_threshold=0.95)).all()
    assert len(detection().draw()) > len(nothing.draw()) == 320  # the legend of the classes is below the image
    assert detection().to_json()["threshold"] == {"score": 0.5, "origin": "the default"}
    assert len(detection().to_json()["objects"]) == 2 and len(nothing.to_json()["objects"]) == 0
    shown = Image.open(io.BytesIO(detection()._repr_png_()))
    assert (np.asarray(shown) == detection().draw()).all()


def test_crops_are_the_image_regions_in_the_boxes():
    dog, cat = detection().crop()
    assert (dog == IMAGE[2:4, 1:3]).all()
    assert (cat == IMAGE[6:8, 5:]).all()  # the box extends beyond the image
    with pytest.raises(ConfigError, match="crop: needs boxes, and the model predicts panoptic"):
        panoptic().crop()


def test_coco_results_have_the_category_ids_of_the_data():
    dog, cat = detection(category_ids=[17, 18]).to_coco(5)
    assert (dog["image_id"], dog["category_id"], dog["bbox"]) == (5, 18, [1, 2, 2, 2]) and cat["category_id"] == 17
    assert coco_mask.decode(dog["segmentation"]).sum() == 4
    assert detection().to_coco(5)[0]["category_id"] == 1


def test_classes_and_captions_share_the_prediction_interface():
    classified = Prediction("a.png", IMAGE, {"class_scores": torch.tensor([0.25, 0.75])}, ["cat", "dog"])
    assert classified.names == ["dog", "cat"] and classified.boxes is None
    assert classified.summary() == "a.png: dog 0.75, cat 0.25"
    caption = Prediction("a.png", IMAGE, {"text": "a dog runs " * 30, "score": -1.5}, [])
    assert caption.task == "captioning" and caption.labels is None
    assert caption.to_json()["text"] == caption.text and caption.to_json()["score"] == -1.5
    drawn = caption.draw()
    assert drawn.shape[1] == 8 * 56 and drawn.shape[0] > 8 * 40 + 30  # several lines of text


def test_data_frame_has_a_row_for_each_object():
    pytest.importorskip("pandas")
    frame = detection().to_pandas()
    assert list(frame.columns) == ["class", "label", "score", "x0", "y0", "x1", "y1"]
    assert frame["class"].tolist() == ["dog", "cat"] and frame["x1"].tolist() == [3, 70]
    assert detection(thresholds=ScoreThresholds(1.0)).to_pandas().empty


def test_supervision_gets_boxes_masks_and_names():
    pytest.importorskip("supervision")
    objects = detection().to_supervision()
    assert objects.xyxy.tolist() == [[1, 2, 3, 4], [5.5, 6, 70, 8]] and objects.class_id.tolist() == [1, 0]
    assert objects.mask.shape == (2, 40, 56) and objects.data["class_name"].tolist() == ["dog", "cat"]


@pytest.mark.parametrize("library", ["pandas", "supervision"])
def test_a_library_that_is_not_installed_is_named(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=f"to_{library}: {library} cannot be imported.*pip install {library}"):
        getattr(detection(), f"to_{library}")()


def test_thresholds_are_read_from_json_as_numbers():
    values = dict(overall="0.5", by_class={"cat": "0.25", "dog": 1}, origin="validation")
    thresholds = ScoreThresholds.from_json(values, ["dog", "cat", "cow"])
    assert thresholds == ScoreThresholds(0.5, (1.0, 0.25, None), "validation")
    assert thresholds.interval == "0.25 to 1.00"
    for wrong in (dict(overall=2), dict(by_class={"cat": -1}), dict(by_class={"cat": None}), dict(by_class=[])):
        with pytest.raises(ValueError, match="score thresholds"):
            ScoreThresholds.from_json(values | wrong, ["cat"])
