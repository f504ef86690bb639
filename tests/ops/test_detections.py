import pytest
import torch

from vitkit.ops.detections import best_classes, best_pairs, in_pixels, suppress_duplicates

BOXES = torch.tensor([[[0.5, 0.5, 0.4, 0.2], [0.5, 0.5, 0.4, 0.2], [0.25, 0.25, 0.1, 0.1]]])  # cxcywh
CORNERS = [[0.3, 0.4, 0.7, 0.6], [0.3, 0.4, 0.7, 0.6], [0.2, 0.2, 0.3, 0.3]]


def test_each_query_has_its_best_class_except_no_object():
    logits = torch.tensor([[[0.0, 1.0, 9.0], [2.0, 0.0, 0.0], [0.0, 0.0, -9.0]]])
    scores, labels, boxes_xyxy, queries = best_classes(logits, BOXES)
    assert labels.tolist() == [[1, 0, 0]] and queries.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(scores, logits.softmax(-1)[0, [0, 1, 2], [1, 0, 0]][None])
    torch.testing.assert_close(boxes_xyxy[0], torch.tensor(CORNERS))


def test_the_best_pairs_may_repeat_a_query_and_are_at_most_all_pairs():
    logits = torch.tensor([[[3.0, 2.0], [-1.0, 1.0], [-2.0, -3.0]]])
    best = best_pairs(logits, BOXES, 3)
    assert best.queries.tolist() == [[0, 0, 1]] and best.labels.tolist() == [[0, 1, 1]]
    torch.testing.assert_close(best.scores[0], torch.tensor([3.0, 2.0, 1.0]).sigmoid())
    assert best_pairs(logits, BOXES, 100).scores.shape == (1, 6)


def test_duplicates_of_a_class_come_last_with_score_0():
    logits = torch.tensor([[[3.0], [2.0], [1.0]]])
    best = best_pairs(logits, BOXES, 3)
    assert suppress_duplicates(best, None) is best
    kept = suppress_duplicates(best, 0.5)
    assert kept.queries.tolist() == [[0, 2, 1]] and kept.scores[0, 2] == 0
    torch.testing.assert_close(kept.boxes_xyxy[0], torch.tensor(CORNERS)[[0, 2, 1]])


def test_boxes_are_scaled_to_each_image():
    (result,) = in_pixels(best_classes(torch.zeros(1, 3, 2), BOXES), [(100, 200)])
    assert list(result) == ["scores", "labels", "boxes_xyxy"]
    torch.testing.assert_close(result["boxes_xyxy"][2], torch.tensor([40.0, 20.0, 60.0, 30.0]))
    with pytest.raises(ValueError, match="longer"):
        in_pixels(best_classes(torch.zeros(1, 3, 2), BOXES), [(100, 200)] * 2)
