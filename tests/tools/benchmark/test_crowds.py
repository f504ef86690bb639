"""Training steps by the number of objects."""

import time

import pytest

pytest.importorskip("vitkit.tools", reason="vitkit is not installed (pip install -e .)")
from vitkit.tools.benchmark import crowds
from vitkit.tools.benchmark.timing import Options


@pytest.mark.parametrize("name", ["D-FINE-N", "DETR-R50"])
def test_steps_of_all_counts_are_measured(name, monkeypatch):
    make_config, side = crowds.MODELS[name]
    monkeypatch.setattr(crowds, "MODELS", {name: (make_config, side // 2)})
    monkeypatch.setattr(crowds, "COUNTS", (0, 20))
    monkeypatch.setattr(crowds, "PEERS", {})
    rows = crowds.measure("crowds", Options(repeats=1, memory=False, clock=time.process_time))
    assert [row.name for row in rows] == ["0 objects", "20 objects"]
    assert all(row.seconds > 0 and 0 < row.ratio < 1 for row in rows)


def test_steps_of_other_packages_stand_beside(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(crowds, "MODELS", {"D-FINE-N": (crowds.MODELS["D-FINE-N"][0], 320)})
    monkeypatch.setattr(crowds, "COUNTS", (0, 20))
    monkeypatch.setattr(crowds, "PEERS", {"transformers": crowds.PEERS["transformers"]})
    rows = crowds.measure("crowds", Options(repeats=1, memory=False, clock=time.process_time))
    assert [row.name for row in rows] == ["0 objects", "20 objects", "20 objects, transformers"]
    assert rows[2].seconds > 0 and rows[2].ratio is None
