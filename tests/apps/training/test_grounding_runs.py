"""A text-prompted detector trains on captions and classes together, and is evaluated on phrases."""

import pytest
from helpers.grounding_models import small_config
from helpers.located_texts import detection_line, grounding_line, write_images, write_odvg

import vitkit


def test_a_mixture_of_captions_and_classes_is_trained_on_and_phrases_are_evaluated(tmp_path):
    images = str(write_images(tmp_path / "images", "a.jpg", "b.jpg"))
    captions = write_odvg(tmp_path / "captions.jsonl", grounding_line(), grounding_line("b.jpg"))
    classes = write_odvg(tmp_path / "classes.jsonl", detection_line())
    resize = dict(type="EvalResize", size=[64, 64])
    grounding = dict(type="GroundingDataset", images=images, annotations=str(captions), transforms=resize)
    detection = dict(type="CocoDetection", images=images, annotations=str(classes), transforms=resize)
    config = dict(
        model=small_config(),
        criterion=dict(
            type="GroundingCriterion",
            weights=dict(labels=2.0, l1=5.0, giou=2.0),
            matcher=dict(type="TokenMatcher", label_cost="phrase", cost_labels=1.0, cost_l1=5.0, cost_giou=2.0),
        ),
        data=dict(
            images_per_gpu=2,
            num_workers=0,
            prompts=dict(negatives=1),
            train=dict(type="MixedDataset", datasets=[grounding, detection], weights=[1, 2]),
            val=grounding,
        ),
        optimizer=dict(type="AdamW", lr=1e-3),
        schedule=dict(type="MultiStepLR", drop_at_epochs=[1]),
        evaluator=dict(type="GroundingEvaluator", ranks=[1, 20], iou=0.01),
        train=dict(epochs=1, best_metric="R20"),
    )
    (tmp_path / "mixture.py").write_text(f"def config():\n    return {config!r}\n")
    run = vitkit.train(tmp_path / "mixture.py", run_dir=tmp_path / "run", device="cpu")
    tested = vitkit.test(run.path, device="cpu").metrics
    assert 0 < tested["R20"] <= 1 and tested["R1"] <= tested["R20"]
    assert {name: run.metrics[name] for name in tested} == pytest.approx(tested)
