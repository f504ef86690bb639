import pytest
import torch

pytest.importorskip("vitkit.tools", reason="vitkit is not installed (pip install -e .)")
from vitkit.nn.deformable_attention import deformable_attend
from vitkit.tools import benchmark_deformable
from vitkit.tools.benchmark_deformable import Case

SHAPES = ((6, 8), (3, 4))


@pytest.mark.parametrize("num_queries", [None, 5])
def test_both_formulations_compute_the_same(num_queries):
    values, locations, weights = benchmark_deformable.random_inputs(Case(2, num_queries, shapes=SHAPES))
    assert locations.shape == (2, num_queries or 60, 8, 2, 4, 2)
    expected = benchmark_deformable.grid_sample_attention(values, SHAPES, locations, weights)
    torch.testing.assert_close(deformable_attend(values, SHAPES, locations, weights), expected, atol=1e-5, rtol=1e-5)


def test_rows_compare_with_the_original(monkeypatch):
    cases = [Case(1, 5, training, SHAPES) for training in (False, True)]
    monkeypatch.setattr(benchmark_deformable, "cases", lambda device, precision: cases)
    rows = benchmark_deformable.measure(repeats=1, memory=False)
    assert [row.name for row in rows] == ["original: grid_sample per level", "vitkit"] * 2
    assert [row.what for row in rows[::2]] == [
        "deformable attention, 5 queries, forward, batch 1",
        "deformable attention, 5 queries, forward and backward, batch 1",
    ]
    assert rows[0].ratio == 1
    assert all(row.seconds > 0 for row in rows)


def test_cases_by_device():
    assert [case.batch_size for case in benchmark_deformable.cases("cpu", "fp32")] == [1, 1, 2, 2, 2, 2]
    on_gpu = benchmark_deformable.cases("cuda", "bf16")
    assert [case.batch_size for case in on_gpu] == [2, 2, 16, 16, 2, 2]
    assert on_gpu[0].shapes[0] == (100, 167)


def test_the_limit_moves_every_byte_once():
    case = Case(1, 5, shapes=SHAPES)
    # 60 places of 256 channels, 5 queries with 64 samples of 3 numbers each, and 5 outputs.
    moved = 4 * (60 * 256 + 5 * 64 * 3 + 5 * 256)
    assert benchmark_deformable.copying(case)().numel() == moved // 2
