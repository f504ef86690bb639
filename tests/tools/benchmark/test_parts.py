"""The parts of a training step."""

import time

import pytest

pytest.importorskip("vitkit.tools", reason="vitkit is not installed (pip install -e .)")
from vitkit.tools.benchmark import parts
from vitkit.tools.benchmark.timing import Options


def test_parts_add_up_to_the_whole_step(monkeypatch):
    make_config, _ = parts.MODELS["D-FINE-N"]
    monkeypatch.setattr(parts, "MODELS", {"D-FINE-N": (make_config, 256)})
    *rows, whole = parts.measure("step", Options(repeats=1, clock=time.process_time))
    assert [row.name for row in rows] == list(parts.PARTS) and whole.name == "whole step"
    assert all(row.seconds > 0 for row in rows if row.name != "rest of forward")
    assert sum(row.seconds for row in rows) == pytest.approx(whole.seconds)
    assert sum(row.ratio for row in rows) == pytest.approx(1)
    backward = rows[parts.PARTS.index("backward")]
    assert backward.ratio > 0.3
