import json

import cv2
import numpy as np
import pytest
from helpers.federated import HEIGHT, WIDTH, federated_truth

from vitkit.data.datasets.lvis import LvisDetection
from vitkit.data.loading.splits import build_dataset
from vitkit.errors import DataError
from vitkit.evaluation.lvis import LvisEvaluator


@pytest.fixture
def content():
    return federated_truth(num_images=3, num_classes=9)


@pytest.fixture
def build(tmp_path, content):
    (tmp_path / "train2017").mkdir()
    for image in content["images"]:
        cv2.imwrite(str(tmp_path / "train2017" / f"{image['id']:012}.jpg"), np.zeros((HEIGHT, WIDTH, 3), np.uint8))

    def build(**options):
        (tmp_path / "lvis.json").write_text(json.dumps(content))
        spec = dict(type="LvisDetection", images=str(tmp_path), annotations=str(tmp_path / "lvis.json"))
        return build_dataset({**spec, **options})

    return build


def test_images_are_found_by_their_address_in_coco(build, content):
    dataset = build(masks=True)
    assert isinstance(dataset, LvisDetection)
    assert dataset.image_path(0).name == "000000000005.jpg"
    target = dataset[0]["target"]
    expected = [a for a in content["annotations"] if a["image_id"] == 5]
    names = {category["id"]: category["name"] for category in content["categories"]}
    assert [dataset.classes[k] for k in target["labels"]] == [names[a["category_id"]] for a in expected]
    assert target["masks"].shape == (len(expected), HEIGHT, WIDTH)


def test_objects_evaluated_as_predictions_score_1(build):
    dataset = build()
    evaluator = LvisEvaluator(dataset)
    evaluator.check_dataset()
    samples = [dataset[index] for index in range(len(dataset))]
    for sample in samples:
        x, y, w, h = (sample["target"]["boxes_cxcywh"] * sample["target"]["boxes_cxcywh"].new([WIDTH, HEIGHT] * 2)).T
        boxes = np.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], axis=1)
        labels = sample["target"]["labels"]
        prediction = dict(labels=labels, scores=labels.new_ones(len(labels)).float(), boxes_xyxy=x.new(boxes))
        evaluator.update([prediction], [sample["target"]])
    metrics = evaluator.compute()
    assert [metrics[f"bbox/AP{group}"] for group in ("", "r", "c", "f")] == pytest.approx([1.0] * 4)


def test_chosen_classes_keep_their_frequency_and_lists(build, content):
    dataset = build()
    chosen = [dataset.classes[k] for k in (7, 2)]
    ids = {category["name"]: category["id"] for category in content["categories"]}
    dataset.use_classes([*chosen, "unicorn"], [1, 0, 5])
    truth = dataset.ground_truth()
    assert [category.get("frequency") for category in truth["categories"]] == ["c", "f", None]
    new = {ids[chosen[0]]: 1, ids[chosen[1]]: 0}
    for image, original in zip(truth["images"], content["images"]):
        for field in ("neg_category_ids", "not_exhaustive_category_ids"):
            assert image[field] == [new[raw] for raw in original[field] if raw in new]
    assert LvisEvaluator(dataset).compute()["bbox/APr"] == -1


def test_number_of_images_of_each_class_is_that_of_the_annotations(build, content):
    dataset = build()
    pairs = {(a["image_id"], a["category_id"]) for a in content["annotations"]}
    expected = [sum(category_id == pair[1] for pair in pairs) for category_id in dataset.category_ids]
    _, labels = dataset.image_classes()
    assert np.bincount(labels, minlength=len(dataset.classes)).tolist() == expected


@pytest.mark.parametrize(
    ("part", "field", "value", "message"),
    [
        ("categories", "frequency", None, r"lvis.json: category 2 \('class 0'\) has no 'frequency'; expected 'r', 'c'"),
        ("categories", "frequency", "x", "has frequency 'x'; expected 'r', 'c' or 'f'"),
        (
            "images",
            "neg_category_ids",
            [1],
            r"has neg_category_ids \[1\]; expected a list of the 9 ids in 'categories'",
        ),
        ("images", "neg_category_ids", 5, "has neg_category_ids 5; expected a list"),
        ("images", "not_exhaustive_category_ids", None, "image 5 .* has no 'not_exhaustive_category_ids'"),
        ("images", "coco_url", None, "image 5 has no 'file_name'"),
        ("annotations", "category_id", 999, "has category_id 999; expected one of the 9 ids in 'categories'"),
    ],
)
def test_files_that_are_not_lvis_are_errors_that_name_the_entry(build, content, part, field, value, message):
    if value is None:
        del content[part][0][field]
    else:
        content[part][0][field] = value
    with pytest.raises(DataError, match=message) as error:
        build()
    assert "\n" not in str(error.value)


def test_absent_categories_are_an_error(build, content):
    del content["categories"]
    with pytest.raises(DataError, match="categories"):
        build()
