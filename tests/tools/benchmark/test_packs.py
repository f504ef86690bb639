import os
import time

import pytest

from vitkit.tools.benchmark import packs
from vitkit.tools.benchmark.timing import Options


@pytest.mark.slow
def test_images_are_read_in_every_way(monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(packs, "_NUM_IMAGES", 4)
    monkeypatch.setenv("VITKIT_CACHE", "mine")
    rows = packs.measure("packs", Options(repeats=1, clock=time.process_time))
    assert [row.name for row in rows][:2] == ["files", "pack on a disk"] and len(rows) == 5
    assert all(row.seconds > 0 for row in rows)
    assert os.environ["VITKIT_CACHE"] == "mine" and "VITKIT_CACHE_GB" not in os.environ
