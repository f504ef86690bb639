import numpy as np
import pytest
import torch
from helpers.plain_dataset import PlainDataset

from vitkit.data.datasets.grounding import GroundedObjects
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.grounding import GroundingEvaluator

FIRST, SECOND, OTHER = [0.0, 0, 20, 20], [60.0, 60, 80, 80], [30.0, 30, 50, 50]
# [CLS] two men . a hat . [SEP] and a padding
PHRASE_IDS = torch.tensor([-1, 0, 0, 0, 1, 1, 1, -1, -1])
IS_WORD = torch.tensor([False, True, True, False, True, True, False, False, False])


def dataset_of(*located):
    return PlainDataset(
        annotations=["regions"], image_ids=range(1, len(located) + 1), located=lambda index: located[index]
    )


def located(boxes, regions, is_expression=False):
    return GroundedObjects(np.array(boxes, np.float32), np.array(regions), is_expression)


def outputs_of(boxes_xyxy, probabilities):
    """Return the outputs for an image of 100x100 pixels."""
    boxes = torch.tensor(boxes_xyxy) / 100
    return dict(
        pred_boxes=torch.cat([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], dim=1),
        pred_logits=torch.tensor(probabilities).logit(),
        phrase_ids=PHRASE_IDS,
        is_word=IS_WORD,
        text_padding=torch.arange(9) == 8,
    )


def target_of(labels, image_id=1, **fields):
    return dict(labels=torch.tensor(labels), image_id=image_id, original_size=(100, 100), **fields)


def probabilities(*rows):
    """Return a probability for each token from those of "two", "men", "a" and "hat"; [CLS] has 0.05, padding 0.99."""
    return [[0.05, two, men, 0.05, a, hat, 0.05, 0.05, 0.99] for two, men, a, hat in rows]


def test_recall_counts_the_boxes_before_one_that_fits_a_phrase():
    # The mean of "two men" is highest for OTHER, then for SECOND, one of two boxes; that of "a hat" for FIRST.
    outputs = outputs_of(
        [FIRST, SECOND, OTHER], probabilities((0.1, 0.2, 0.6, 0.6), (0.4, 0.4, 0.1, 0.1), (0.1, 0.9, 0.2, 0.1))
    )
    evaluator = GroundingEvaluator(dataset_of(located([SECOND, [0, 50, 9, 60], FIRST], [0, 0, 1])), ranks=[1, 2])
    evaluator.update([outputs], [target_of([0, 0, 1])])
    assert evaluator.compute() == {"R1": 0.5, "R2": 1.0}
    assert "2 phrases, found with IoU 0.5" in evaluator.table() and "R2 1.000" in evaluator.table()


def test_a_phrase_that_is_a_part_of_a_sentence_has_the_tokens_of_its_positive_map():
    outputs = outputs_of([FIRST, SECOND], probabilities((0.9, 0.1, 0, 0), (0.1, 0.8, 0, 0)))
    dataset = dataset_of(located([FIRST, SECOND], [0, 1]))
    whole = GroundingEvaluator(dataset, ranks=[1])
    whole.update([outputs], [target_of([0, 0])])
    assert whole.compute() == {"R1": 0.5}
    parts = GroundingEvaluator(dataset, ranks=[1])
    positive = torch.zeros(2, 8, dtype=torch.bool)
    positive[0, 1] = positive[1, 2] = True
    parts.update([outputs], [target_of([0, 0], positive_map=positive)])
    assert parts.compute() == {"R1": 1.0}


def test_an_expression_is_scored_by_its_best_token():
    # The mean would prefer FIRST; padding does not count.
    outputs = outputs_of([FIRST, SECOND], probabilities((0.6, 0.6, 0.6, 0.6), (0.1, 0.9, 0.1, 0.1)))
    evaluator = GroundingEvaluator(dataset_of(located([SECOND], [0], is_expression=True)))
    evaluator.update([outputs], [target_of([0])])
    assert evaluator.compute() == {"R1": 1.0, "R5": 1.0, "R10": 1.0}


def test_images_without_answers_and_boxes_that_fit_nothing_are_not_found():
    evaluator = GroundingEvaluator(dataset_of(located([SECOND], [0]), located([FIRST], [0])), ranks=[1])
    evaluator.update([outputs_of([OTHER], probabilities((1, 1, 1, 1)))], [target_of([0])])
    assert evaluator.compute() == {"R1": 0.0}
    empty = GroundingEvaluator(dataset_of(located(np.zeros((0, 4)), [])), ranks=[1])
    empty.update([outputs_of([OTHER], probabilities((1, 1, 1, 1)))], [target_of([])])
    assert empty.compute() == {"R1": -1.0}


def test_an_iou_of_exactly_one_half_is_enough():
    half = [0.0, 0, 20, 10]
    for iou, expected in ((0.5, 1.0), (0.51, 0.0)):
        evaluator = GroundingEvaluator(dataset_of(located([FIRST], [0])), ranks=[1], iou=iou)
        evaluator.update([outputs_of([half], probabilities((1, 1, 1, 1)))], [target_of([0])])
        assert evaluator.compute() == {"R1": expected}


def test_objects_that_transforms_removed_are_an_error():
    evaluator = GroundingEvaluator(dataset_of(located([FIRST, SECOND], [0, 1])))
    with pytest.raises(DataError, match="image 1: 1 of 2 objects are left after the transforms"):
        evaluator.update([outputs_of([FIRST], probabilities((1, 1, 1, 1)))], [target_of([0])])


def test_other_models_and_datasets_are_errors():
    evaluator = GroundingEvaluator(dataset_of(located([FIRST], [0])))
    with pytest.raises(ConfigError, match="needs 'phrase_ids', but the model predicts pred_logits, pred_boxes"):
        evaluator.update([dict(pred_logits=torch.zeros(1, 3), pred_boxes=torch.zeros(1, 4))], [target_of([0])])
    with pytest.raises(ConfigError, match="needs 'regions' annotations"):
        GroundingEvaluator(PlainDataset(annotations=["objects"]))
    with pytest.raises(ConfigError, match=r"got ranks=\[0\] and iou=0.5"):
        GroundingEvaluator(dataset_of(), ranks=[0])
