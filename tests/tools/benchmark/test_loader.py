import time

from vitkit.tools.benchmark import loader
from vitkit.tools.benchmark.timing import Options


def test_both_pipelines_load_the_drawn_images(monkeypatch):
    monkeypatch.setattr(loader, "_ROUNDS", 1)
    rows = loader.measure("loader", Options(clock=time.process_time))
    assert [row.name for row in rows] == ["Pillow + torchvision", "vitkit"]
    assert all(row.ratio > 0 for row in rows) and rows[0].ratio == 1
