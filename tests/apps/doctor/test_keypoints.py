"""What the doctor says of a file's keypoints."""

from pathlib import Path

import numpy as np
import pytest

from vitkit.apps.doctor.annotations import CheckedDetectionFile, find_swapped
from vitkit.data.formats import AnnotatedImages

NAMES = ["nose", "left_hand", "right_hand"]


def check(points, **category):
    """Return verdict and message of each issue about keypoints in a file with these (N, 3, 3) points."""
    images = [{"id": 1, "file_name": "a.jpg", "width": 100, "height": 100}]
    annotations = [
        {"id": k, "image_id": 1, "category_id": 1, "bbox": [20, 20, 40, 40], "iscrowd": 0, "keypoints": each}
        for k, each in enumerate(np.asarray(points).reshape(len(points), -1).tolist(), 1)
    ]
    categories = [{"id": 1, "name": "person", "keypoints": NAMES, **category}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    data = AnnotatedImages("coco", Path("a.json"), Path("images"), content)
    file = CheckedDetectionFile("a.json", "data.train", images, annotations, categories, False, False, data)
    return {issue.check: (issue.verdict, issue.message) for issue in file._keypoints()}


GOOD = [[40, 25, 2], [30, 40, 2], [50, 40, 1]]


def test_correct_keypoints_are_counted():
    assert check([GOOD] * 2) == {"keypoints": ("ok", "6 labeled of 3 keypoints in 2 objects")}


@pytest.mark.parametrize(
    ("points", "category", "name", "verdict", "message"),
    [
        ([GOOD, [[40, 75, 2], *GOOD[1:]]], {}, "keypoints outside boxes", "warn", "1 objects have keypoints far"),
        ([[[40, 25, 0]] * 3] * 3, {}, "unlabeled keypoints", "fail", "has nose, left_hand, right_hand labeled"),
        ([[*GOOD[:2], [0, 0, 0]]] * 3, {}, "unlabeled keypoints", "warn", "no object has right_hand labeled"),
        ([[[0.4, 0.25, 2], [0.3, 0.4, 2], [0.5, 0.4, 1]]], {}, "keypoints", "fail", "are fractions of their image"),
        ([GOOD], {"skeleton": [[1, 9]]}, "keypoints", "fail", "skeleton [[1, 9]]; expected pairs of its 3 keypoints"),
        ([[[40, 25, 5], *GOOD[1:]]], {}, "wrong keypoints", "fail", "visibilities of 0 (not labeled)"),
        ([[[400, 25, 2], *GOOD[1:]]], {}, "repair of keypoints", "note", "a.json --images images --fix keypoints"),
    ],
)  # fmt: skip
def test_problems_are_named(points, category, name, verdict, message):
    found_verdict, found = check(points, **category)[name]
    assert found_verdict == verdict and message in found


def test_no_repair_is_offered_that_changes_nothing():
    assert "repair of keypoints" not in check([[[40, 25, 5], *GOOD[1:]]])  # what 5 means is not known


def test_swapped_pairs_are_those_of_few_objects():
    swapped = [GOOD[0], GOOD[2], GOOD[1]]
    verdict, message = check([GOOD] * 30 + [swapped])["swapped keypoints"]
    assert (
        verdict == "warn"
        and message.startswith("in 1 objects pairs such as left_hand and right_hand")
        and "31" in message
    )
    assert "swapped keypoints" not in check([GOOD] * 20 + [swapped] * 10)  # people from behind
    assert list(find_swapped(np.array([GOOD] * 5 + [swapped], float), [(1, 2)])) == []  # too few to tell
