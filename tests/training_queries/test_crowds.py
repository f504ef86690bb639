"""Of an image with more objects than denoising queries, a sample is denoised."""

import pytest
import torch

from vitkit import build_model, load_config
from vitkit.training_queries import box_denoising


def target(count, **others):
    boxes = torch.rand(count, 4) * 0.2 + 0.3
    return {"labels": torch.arange(count) % 3, "boxes_cxcywh": boxes, "image_size": (64, 64), **others}


def make(name, targets, **settings):
    spec = load_config(name)["model"]
    spec["training_queries"] = [dict(type=spec["training_queries"][0]["type"], num_queries=6, **settings)]
    model = build_model(spec, classes=["a", "b", "c"])
    (kind,) = model.training_queries.values()
    (query_set,) = kind(model.head, targets, None)
    return query_set


def test_boxes_of_a_crowd_are_a_sample(caplog):
    box_denoising._say_once.cache_clear()
    targets = [target(20), target(2), target(0)]
    with caplog.at_level("INFO", "vitkit"):
        query_set = make("quickstart/dino", targets, label_noise=0.0, box_noise=0.0)
    assert caplog.text.count("images with more than 6 objects") == 1
    assert query_set["queries"].content.shape[1] == 12  # six with their objects, and six without
    assert query_set["repeats"] == pytest.approx(8 / 22)
    for (rows, matched), each in zip(query_set["matches"], targets):
        count = len(each["labels"])
        assert len(rows) == len(set(matched.tolist())) == min(count, 6)
        assert all(0 <= j < count for j in matched.tolist())
    boxes = query_set["queries"].references
    rows, matched = query_set["matches"][0]
    found = boxes[0, rows] if boxes.max() <= 1 else boxes[0, rows].sigmoid()
    torch.testing.assert_close(found, targets[0]["boxes_cxcywh"][matched], atol=2e-3, rtol=0)
    again = make("quickstart/dino", targets)["matches"][0][1]
    assert again.tolist() != matched.tolist()  # drawn anew


def test_few_objects_are_all_copied():
    query_set = make("quickstart/dino", [target(3), target(1)])
    assert query_set["repeats"] == 2 and query_set["matches"][0][1].tolist() == [0, 1, 2, 0, 1, 2]
