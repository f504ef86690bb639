"""Comparisons of real-time detectors: both sides run, and train the same parameters."""

import pytest
import torch

pytest.importorskip("vitkit.tools", reason="vitkit is not installed (pip install -e .)")
from vitkit.tools.benchmark import models, realtime
from vitkit.tools.benchmark.models import Case
from vitkit.tools.benchmark.timing import Options


@pytest.mark.parametrize("name", realtime.FAMILIES)
def test_both_forms_run_and_train_the_same_number_of_parameters(name):
    pytest.importorskip("transformers")
    case, family = Case(288, 288, training=True), realtime.FAMILIES[name]
    torch.manual_seed(0)
    batch = models.random_batch(case, family.num_classes)
    trained = []
    for build in family.builders.values():
        contestant = build(family.num_classes, batch, case)
        assert torch.isfinite(contestant.loss()) and contestant.predict() is not None
        trained.append(sum(p.numel() for p in contestant.model.parameters() if p.requires_grad))
    assert trained[0] == trained[1]


def test_part_measures_each_size(monkeypatch):
    monkeypatch.setattr(realtime, "compare_family", lambda family, case, options, what: [what])
    assert realtime.measure("rtdetr", Options())[:2] == [
        "rtdetr_r18, inference, 640x640, batch 1",
        "rtdetr_r18, training step, 640x640, batch 4",
    ]
