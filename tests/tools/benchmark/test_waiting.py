"""A training step beside loading its images."""

from functools import partial

import pytest

pytest.importorskip("vitkit.tools", reason="vitkit is not installed (pip install -e .)")
from vitkit.configs import dfine
from vitkit.tools.benchmark import waiting
from vitkit.tools.benchmark.models import Case
from vitkit.tools.benchmark.timing import Options


def test_ratio_is_the_number_of_cores_that_load_as_fast_as_the_device_trains(monkeypatch):
    case = Case(288, 288, batch_size=4, training=True)
    monkeypatch.setattr(waiting, "RECIPES", {"dfine_n_coco": (partial(dfine.config, "n"), case)})
    step, loading = waiting.measure("waiting", Options(repeats=1))
    assert step.what == loading.what == "dfine_n_coco, training step, 288x288, batch 1"
    assert step.name == "training, an image on cpu" and loading.ratio == pytest.approx(loading.seconds / step.seconds)
    assert 0.001 < loading.seconds < 1
