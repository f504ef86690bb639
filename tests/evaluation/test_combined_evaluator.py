import numpy as np
import pytest
import torch

from vitkit.apps.visualization.metrics import draw_metrics
from vitkit.errors import ConfigError, DataError
from vitkit.registry import DATASETS, EVALUATORS

SPEC = dict(
    type="CombinedEvaluator",
    evaluator=[
        dict(type="PanopticEvaluator"),
        dict(type="CocoEvaluator", iou_types=["segm"]),
        dict(type="SemanticEvaluator", boundary=False),
    ],
)


@pytest.fixture
def dataset():
    return DATASETS.build(
        dict(type="ShapesSegmentation", task="panoptic", num_images=4, image_size=48, split="val", max_objects=3)
    )


def predictions(dataset, *, spoil):
    """Return the ground truth as predictions, with wrong ones for the first image if `spoil`."""
    result = []
    for index in range(len(dataset)):
        ids, segments = dataset.load_panoptic(index)
        semantic = np.zeros(ids.shape, np.int64)
        things = [s for s in segments if dataset.things[s["label"]]]
        for segment in segments:
            semantic[ids == segment["id"]] = segment["label"]
        if spoil and index == 0:
            ids, segments, things, semantic = np.zeros_like(ids), [], [], np.zeros_like(semantic)
        masks = [torch.from_numpy(ids == s["id"]) for s in things]
        result.append(
            dict(
                panoptic=torch.from_numpy(ids.astype(np.int32)),
                segments_info=segments,
                semantic=torch.from_numpy(semantic),
                scores=torch.ones(len(things)),
                labels=torch.tensor([s["label"] for s in things], dtype=torch.int64),
                boxes_xyxy=torch.zeros(len(things), 4),
                masks=torch.stack(masks) if masks else torch.zeros(0, *ids.shape, dtype=torch.bool),
            )
        )
    return result, [dict(image_id=image_id) for image_id in np.asarray(dataset.image_ids).tolist()]


def evaluated(dataset, *, spoil):
    evaluator = EVALUATORS.build(SPEC, dataset=dataset)
    evaluator.update(*predictions(dataset, spoil=spoil))
    evaluator.gather()
    return evaluator


def test_combined_evaluator_returns_the_metrics_of_all(dataset):
    metrics = evaluated(dataset, spoil=False).compute()
    assert metrics["PQ"] == metrics["mIoU"] == pytest.approx(1.0) and metrics["segm/AP"] == pytest.approx(1.0)
    evaluator = evaluated(dataset, spoil=True)
    metrics = evaluator.compute()
    assert max(metrics[name] for name in ("PQ", "mIoU", "segm/AP")) < 0.99
    table = evaluator.table()
    assert "PQ" in table and "AP50" in table and "pixel accuracy" in table
    assert evaluator.per_class_metric == "PQ" and evaluator.per_class().keys() == set(dataset.classes)


def test_metrics_of_a_second_evaluator_of_a_kind_have_its_number(dataset):
    lists = [dict(type="CocoEvaluator", iou_types=["segm"], max_dets=[1, 10, most]) for most in (20, 100)]
    evaluator = EVALUATORS.build(dict(type="CombinedEvaluator", evaluator=lists), dataset=dataset)
    evaluator.update(*predictions(dataset, spoil=True))
    evaluator.gather()
    metrics = evaluator.compute()
    first, second = (part.metrics for part in evaluator.parts)
    assert {metrics[name] for name in first} == {*first.values()} and metrics["segm/AP_2"] == second["segm/AP"]
    assert metrics["segm/AR20"] == first["segm/AR20"] and metrics["segm/AR100"] == second["segm/AR100"]


def test_written_results_give_the_same_metrics(dataset, tmp_path):
    evaluator = evaluated(dataset, spoil=True)
    metrics = evaluator.compute()
    written = evaluator.write_results(tmp_path / "results.json")
    names = {path.name for path in written}
    assert {"results.json", "results_CocoEvaluator.json", "results_SemanticEvaluator.json"} <= names
    again = EVALUATORS.build(SPEC, dataset=dataset)
    again.load_results(tmp_path / "results.json")
    assert again.compute() == pytest.approx(metrics)
    (tmp_path / "results_CocoEvaluator.json").unlink()
    with pytest.raises(DataError, match="results_CocoEvaluator"):
        EVALUATORS.build(SPEC, dataset=dataset).load_results(tmp_path / "results.json")


def test_evaluators_of_the_same_type_write_separate_files(dataset, tmp_path):
    spec = dict(
        type="CombinedEvaluator",
        evaluator=[
            dict(type="PanopticEvaluator"),
            dict(type="CocoEvaluator", iou_types=["segm"]),
            dict(type="CocoEvaluator", iou_types=["bbox"]),
        ],
    )
    evaluator = EVALUATORS.build(spec, dataset=dataset)
    evaluator.update(*predictions(dataset, spoil=True))
    metrics = evaluator.compute()
    written = [path.name for path in evaluator.write_results(tmp_path / "results.json")]
    assert written[-2:] == ["results_CocoEvaluator.json", "results_CocoEvaluator2.json"]
    again = EVALUATORS.build(spec, dataset=dataset)
    again.load_results(tmp_path / "results.json")
    assert again.compute() == pytest.approx(metrics)


def test_an_empty_list_is_refused(dataset):
    with pytest.raises(ConfigError, match="expected a list of evaluators"):
        EVALUATORS.build(dict(type="CombinedEvaluator", evaluator=[]), dataset=dataset)


def test_figures_stand_beside_the_files_of_their_evaluators(tmp_path):
    spec = dict(type="CombinedEvaluator", evaluator=[dict(type="ClassificationEvaluator")] * 2)
    evaluator = EVALUATORS.build(spec, dataset=DATASETS.build(dict(type="ShapesClassification", num_images=2)))
    images = [{"class_scores": torch.rand(len(evaluator.dataset.classes))} for _ in range(2)]
    evaluator.update(images, [{"image_id": k, "label": 0} for k in evaluator.dataset.image_ids])
    evaluator.compute()
    names = ["results_confusion.png", "results_ClassificationEvaluator_confusion.png"]
    assert [path.name for path in draw_metrics(evaluator, tmp_path / "results.json")] == names
    assert all((tmp_path / name).stat().st_size > 5000 for name in names)
