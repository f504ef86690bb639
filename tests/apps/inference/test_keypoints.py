"""Predicted keypoints are drawn, written, merged over tiles, and become labels."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.apps.inference.labels import write_labels
from vitkit.apps.inference.merging import ObjectMerger
from vitkit.apps.inference.prediction import Prediction
from vitkit.apps.inference.tiling import Tile, TileResult
from vitkit.apps.visualization.keypoints import draw_keypoints
from vitkit.data.datasets.coco import CocoDetection
from vitkit.structures import KeypointInfo

INFO = KeypointInfo(("nose", "left_hand", "right_hand"), ((0, 1), (0, 2)), ((1, 2),), (0.05,) * 3)
LEFT, RIGHT, MIDDLE = (40, 200, 255), (255, 140, 0), (80, 230, 80)


def prediction(name="a.png"):
    fields = {
        "scores": torch.tensor([0.6, 0.9, 0.1]),
        "labels": torch.tensor([0, 0, 0]),
        "boxes_xyxy": torch.tensor([[10.0, 10, 90, 90], [200, 100, 300, 200], [0, 0, 5, 5]]),
        "keypoints": torch.tensor(
            [
                [[50, 20, 0.9], [20, 60, 0.8], [80, 60, 0.7]],
                [[250, 110, 0.9], [210, 160, 0.8], [290, 160, 0.2]],
                [[1, 1, 0.9], [2, 2, 0.9], [3, 3, 0.9]],
            ]
        ),
    }
    return Prediction(name, np.zeros((240, 320, 3), np.uint8), fields, ["person"], keypoint_info=INFO)


def test_points_are_drawn_in_the_colors_of_their_sides():
    drawn = prediction().draw()
    height = drawn.shape[0] // 240
    assert tuple(drawn[60 * height, 20 * height]) == LEFT and tuple(drawn[60 * height, 80 * height]) == RIGHT
    assert tuple(drawn[20 * height, 50 * height]) == MIDDLE
    assert tuple(drawn[40 * height, 35 * height]) == LEFT  # the limb to the left hand
    assert tuple(drawn[160 * height, 290 * height]) == (0, 0, 0)  # a point that the model doubts
    assert prediction().task == "keypoints"


def test_labels_that_are_hidden_are_hollow_and_others_are_not_drawn():
    points = torch.tensor([[[50.0, 50, 1], [150, 150, 2], [0, 0, 0]]])
    drawn = draw_keypoints(np.zeros((400, 400, 3), np.uint8), points, INFO)
    assert tuple(drawn[50, 50]) == (0, 0, 0) or tuple(drawn[50, 50]) == LEFT  # only the limb passes
    assert tuple(drawn[46, 50]) == MIDDLE and tuple(drawn[150, 150]) == LEFT
    assert not drawn[:20, :20].any()


def test_points_are_written():
    objects = prediction().to_json()["objects"]
    assert [list(found["keypoints"]) for found in objects] == [["nose", "left_hand", "right_hand"]] * 2
    assert objects[1]["keypoints"]["nose"] == pytest.approx([50, 20, 0.9])
    assert prediction().to_coco(3)[0]["keypoints"] == pytest.approx([250, 110, 0.9, 210, 160, 0.8, 290, 160, 0.2])
    assert prediction().filter(score=0.7).keypoints.shape == (1, 3, 3)


@pytest.mark.parametrize("form", ["coco", "yolo", "cvat"])
def test_predictions_become_labels(tmp_path, form):
    path = tmp_path / "a.png"
    Image.fromarray(prediction().image).save(path)
    head = {"images": [prediction(str(path)).to_json()], "classes": ["person"], "keypoints": INFO.to_json()}
    written = write_labels(json.loads(json.dumps(head)), form, tmp_path)
    dataset = CocoDetection(tmp_path if form == "coco" else None, written[0], keypoints=True)
    assert dataset.keypoints.names == INFO.names and dataset.keypoints.flip_pairs == INFO.flip_pairs
    target = dataset[0]["target"]
    np.testing.assert_allclose(
        target["keypoints"], [[(250, 110, 2), (210, 160, 2), (0, 0, 0)], [(50, 20, 2), (20, 60, 2), (80, 60, 2)]],
        atol=0.01,
    )  # fmt: skip


def test_points_of_tiles_are_merged():
    merger = ObjectMerger((100, 150))

    def result(box, points):
        return TileResult(
            {
                "scores": torch.tensor([0.9]),
                "labels": torch.tensor([0]),
                "boxes_xyxy": torch.tensor([box]),
                "keypoints": torch.tensor([points]),
            },
            None,
        )

    left, right = Tile(0, 0, 100, 100), Tile(0, 50, 100, 150)
    # The object reaches from 40 to 120, so both tiles cut it off; each sees one hand well.
    merger.add(left, result([40.0, 20, 100, 80], [[60.0, 30, 0.9], [45, 50, 0.8], [99, 50, 0.1]]))
    merger.add(right, result([0.0, 20, 70, 80], [[11.0, 30, 0.7], [1, 50, 0.1], [65, 50, 0.9]]))
    merged = merger.result()
    torch.testing.assert_close(merged["keypoints"], torch.tensor([[[60.0, 30, 0.9], [45, 50, 0.8], [115, 50, 0.9]]]))
    empty = ObjectMerger((100, 150))
    empty.add(left, TileResult({k: v[:0] for k, v in result([0.0] * 4, [[0.0] * 3] * 3).fields.items()}, None))
    assert empty.result()["keypoints"].shape == (0, 3, 3)
