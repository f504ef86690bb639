import pytest
import torch

pytest.importorskip("vitkit.tools", reason="vitkit is not installed (pip install -e .)")
from vitkit.kernels.deformable_attention import deformable_attend
from vitkit.tools.benchmark import kernels
from vitkit.tools.benchmark.kernels import DeformableCase as Case
from vitkit.tools.benchmark.timing import Options

SHAPES = ((6, 8), (3, 4))


@pytest.mark.parametrize("num_queries", [None, 5])
def test_both_formulations_compute_the_same_output(num_queries):
    values, locations, weights = kernels.deformable_inputs(Case(2, num_queries, shapes=SHAPES), Options())
    assert locations.shape == (2, num_queries or 60, 8, 2, 4, 2)
    expected = kernels.grid_sample_attention(values, SHAPES, locations, weights)
    torch.testing.assert_close(deformable_attend(values, SHAPES, locations, weights), expected, atol=1e-5, rtol=1e-5)


def test_rows_are_compared_with_the_original(monkeypatch):
    cases = [Case(1, 5, training, SHAPES) for training in (False, True)]
    monkeypatch.setattr(kernels, "deformable_cases", lambda device: cases)
    rows = kernels.measure("deformable", Options(repeats=1, memory=False))
    assert [row.name for row in rows] == ["original: grid_sample per level", "vitkit"] * 2
    assert [row.what for row in rows[::2]] == [
        "deformable attention, 5 queries, forward, batch 1",
        "deformable attention, 5 queries, forward and backward, batch 1",
    ]
    assert rows[0].ratio == 1
    assert all(row.seconds > 0 for row in rows)


def test_cases_depend_on_the_device():
    assert [case.batch_size for case in kernels.deformable_cases("cpu")] == [1, 1, 2, 2, 2, 2]
    on_gpu = kernels.deformable_cases("cuda")
    assert [case.batch_size for case in on_gpu] == [2, 2, 16, 16, 2, 2]
    assert on_gpu[0].shapes[0] == (100, 167)


def test_lower_bound_moves_every_byte_once():
    case = Case(1, 5, shapes=SHAPES)
    # 60 locations of 256 channels, 5 queries with 64 samples of 3 numbers each, and 5 outputs.
    moved = 4 * (60 * 256 + 5 * 64 * 3 + 5 * 256)
    assert kernels.copying(case, Options())().numel() == moved // 2
