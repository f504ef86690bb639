"""The reports of maps, classes, captions and texts have the evaluators' numbers, and their cells open images."""

import json
import re

import numpy as np
import pytest
import torch
from helpers.browser import open_page
from helpers.plain_dataset import PlainDataset

from vitkit import EVALUATORS, build_dataset
from vitkit.apps.report import write_report
from vitkit.apps.report.pages.panoptic import panoptic_pair, pixel_statistics
from vitkit.apps.report.parts import choose_shown_classes
from vitkit.apps.report.sections import rank
from vitkit.apps.training.results import score_file
from vitkit.errors import VitkitError
from vitkit.evaluation.text import LanguageModelEvaluator, TextEvaluator


class NumberedSentences(PlainDataset):
    noun = "sentences"

    def __len__(self):
        return 6


def shapes(kind, **more):
    size = {} if kind == "ShapesCaptions" else {"image_size": 48}
    return build_dataset(dict(type=kind, num_images=6, split="val", **size, **more))


def semantic():
    dataset = shapes("ShapesSegmentation", task="semantic")
    evaluator = EVALUATORS.build(dict(type="SemanticEvaluator"), dataset=dataset)
    for k, image_id in enumerate(dataset.image_ids):
        labels = dataset.load_semantic(k).astype(np.int64)
        labels[: 5 * k] = 1
        labels[labels >= len(dataset.classes)] = 0
        evaluator.update([dict(semantic=torch.from_numpy(labels))], [dict(image_id=image_id)])
    return evaluator


def panoptic():
    dataset = shapes("ShapesSegmentation", task="panoptic")
    evaluator = EVALUATORS.build(dict(type="PanopticEvaluator"), dataset=dataset)
    for k, image_id in enumerate(dataset.image_ids):
        ids, segments = dataset.load_panoptic(k)
        ids = ids.copy()
        ids[: 5 * k] = 0
        kept = [s for s in segments if (ids == s["id"]).any()]
        evaluator.update([dict(panoptic=torch.from_numpy(ids), segments_info=kept)], [dict(image_id=image_id)])
    return evaluator


def classification():
    dataset = shapes("ShapesClassification")
    evaluator = EVALUATORS.build(dict(type="ClassificationEvaluator"), dataset=dataset)
    scores = np.random.default_rng(1).dirichlet(np.ones(len(dataset.classes)), size=6)
    for k, image_id in enumerate(dataset.image_ids):
        evaluator.update([dict(class_scores=torch.from_numpy(scores[k]))], [dict(image_id=image_id, label=k % 2)])
    return evaluator


def captions():
    dataset = shapes("ShapesCaptions")
    evaluator = EVALUATORS.build(dict(type="CaptionEvaluator"), dataset=dataset)
    for k, image_id in enumerate(dataset.image_ids):
        text = dataset.references(k)[0] if k % 2 else "a <i>circle</i>"
        evaluator.update([dict(text=text)], [dict(image_id=image_id)])
    return evaluator


def texts():
    dataset = NumberedSentences()
    evaluator = TextEvaluator(dataset, smallest_group=2)
    for k in range(6):
        target = dict(index=k, source_text="eins zwei " * (k + 1), references=[f"one two {k}"])
        evaluator.update([dict(text="one <b>two</b>" if k % 2 else f"one two {k}")], [target])
    return evaluator


def language_model():
    dataset = NumberedSentences()
    evaluator = LanguageModelEvaluator(dataset)
    for index in range(6):
        logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(index))
        evaluator.update([dict(logits=logits)], [dict(index=index, tokens=torch.arange(1, 5))])
    return evaluator


MAKERS = [semantic, panoptic, classification, captions, texts, language_model]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_page_contains_the_numbers_and_is_self_contained(make, tmp_path):
    evaluator = make()
    metrics = evaluator.compute()
    page = write_report(evaluator, tmp_path / "report.html", title=make.__name__).read_text()
    for value in metrics.values():
        assert value < 0 or f"<td>{value:.3f}" in page
    assert not re.search(r"""(src|href)=['"](?!data:|#)""", page) and "<b>two" not in page and "<i>circle" not in page
    has_images = make not in (texts, language_model)
    assert ("data:image/jpeg" in page) == has_images


def test_panoptic_pixel_counts_equal_those_of_a_semantic_evaluator():
    evaluator = panoptic()
    dataset, ids = evaluator.dataset, list(evaluator.dataset.image_ids)
    pairs = [panoptic_pair(evaluator, k) for k in range(6)]

    class Semantic(PlainDataset):
        annotations = ("semantic",)
        image_ids, classes, category_ids = ids, dataset.classes, dataset.category_ids

        def load_semantic(self, index):
            return pairs[index][0]

    other = EVALUATORS.build(dict(type="SemanticEvaluator"), dataset=Semantic())
    statistics, matrix = pixel_statistics(ids, dataset.classes, pairs.__getitem__)
    # The evaluator takes only complete maps, so images without a prediction are compared only by their counts.
    for k, image_id in enumerate(ids):
        complete = np.where(pairs[k][1] == 255, 0, pairs[k][1]).astype(np.int64)
        other.update([dict(semantic=torch.from_numpy(complete))], [dict(image_id=image_id)])
    other.compute()
    assert (other.confusion_matrix().sum(axis=1) == matrix.sum(axis=1)).all()
    assert (matrix.diagonal() == statistics.correct.sum(axis=0)).all() and matrix[:, -1].sum() > 0
    assert (statistics.true == other.statistics().true).all()


def test_maps_are_read_back_as_they_were_predicted():
    evaluator = semantic()
    dataset = evaluator.dataset
    image_id = list(dataset.image_ids)[3]
    assert (evaluator.read_predicted_map(image_id)[:15] == 1).all()
    assert (evaluator.read_predicted_map(image_id)[15:] == dataset.load_semantic(3)[15:]).mean() > 0.9
    del evaluator.stored_predictions[image_id]
    assert (evaluator.read_predicted_map(image_id) == 255).all()


def test_confusion_matrix_shows_the_most_confused_classes():
    matrix = np.diag([9, 9, 9, 9])
    matrix[2, 1] = 3
    assert choose_shown_classes(matrix, most=2) == [1, 2] and choose_shown_classes(matrix) == [0, 1, 2, 3]


def test_no_image_is_among_the_best_and_the_worst():
    assert rank(np.array([0.3, np.nan, 0.1, 0.9]), 5) == ([2], [3, 0])
    assert rank(np.array([0.5]), 5) == ([0], [])


@pytest.mark.parametrize("make", [semantic, classification], ids=lambda make: make.__name__)
def test_matrix_cell_opens_its_images_in_a_browser(make, tmp_path):
    evaluator = make()
    evaluator.compute()
    path = write_report(evaluator, tmp_path / "report.html", title="report")
    with open_page(path, width=390) as (page, issues):
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.locator("button[data-cell]").first.focus()
        page.keyboard.press("Enter")
        assert page.locator("dialog[open] img").count() >= 1
        page.keyboard.press("Escape")
        assert page.locator("dialog[open]").count() == 0 and not issues


CLASSES = {"classes": ["a", "b"], "confusion_matrix": [[1, 0], [0, 0]], "top1": 1.0}
IMAGE = {"image_id": "x.png", "class": "a", "predicted": ["a", "b"], "scores": [0.9, 0.1]}


@pytest.mark.parametrize(
    "content",
    [
        *(CLASSES | {"images": [IMAGE]} | {"classes": x} for x in ([], ["a", "a"], [1, 2], "ab", {"a": 1}, None)),
        *(CLASSES | {"images": images} for images in ([], {}, "x", [1], [{}], [IMAGE, IMAGE], None)),
        *(CLASSES | {"images": [IMAGE | {"image_id": x}]} for x in (None, 1.5, [1], {})),
        *(CLASSES | {"images": [IMAGE | {"predicted": x}]} for x in (None, ["a"], ["c", "b"], [["a"], "b"], "ab")),
        *(
            CLASSES | {"images": [IMAGE | {"scores": x}]}
            for x in (None, [1], ["a", "b"], [1, float("nan")], [1, 10**400])
        ),
        *({"sentences": x} for x in ([], [1], [{}], [{"index": 0, "text": 5}])),
    ],
)
def test_results_of_others_are_checked(tmp_path, content):
    (tmp_path / "r.json").write_text(json.dumps(content))
    with pytest.raises(VitkitError) as raised:
        score_file(tmp_path / "r.json")
    assert "\n" not in str(raised.value)
