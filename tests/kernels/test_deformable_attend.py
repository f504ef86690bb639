import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers.processes import run_anew

from vitkit.kernels import deformable_attention, use_kernels
from vitkit.kernels.deformable_attention import cpu, deformable_attend, exported, plain

SHAPES = [(5, 7), (3, 2), (1, 1), (4, 1)]
HEADS, POINTS = 3, 2
FEW, MANY = 2, 9
"""Numbers of queries that read only a few of the pixels, and most of them."""


def inputs(num_queries, *, batch_size=2, channels=6, shapes=SHAPES, dtype=torch.float64, seed=0):
    """Return values, locations and weights, with locations outside the maps and exactly on pixels or borders."""
    generator = torch.Generator().manual_seed(seed)
    area = sum(height * width for height, width in shapes)
    shape = (batch_size, num_queries, HEADS, len(shapes), POINTS)
    values = torch.randn(batch_size, area, HEADS, channels, generator=generator, dtype=torch.float64)
    locations = torch.rand(*shape, 2, generator=generator, dtype=torch.float64) * 1.6 - 0.3
    weights = torch.rand(shape, generator=generator, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (values, locations, weights)]


def on_pixels_and_borders(locations):
    """Move locations to the nearest pixel, and the first queries' to the borders."""
    sizes = torch.tensor([(width, height) for height, width in SHAPES], dtype=locations.dtype)[:, None]
    moved = ((locations.detach() * sizes - 0.5).round() + 0.5) / sizes
    moved[:, 0] = moved[:, 0].clamp(0, 1)
    moved[:, 1] = (moved[:, 1] > 0.5).to(moved)
    return moved.requires_grad_()


def run(attend, values, locations, weights, *, shapes=SHAPES):
    """Return the output and the gradients."""
    output = attend(values, shapes, locations, weights)
    upstream = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return output, *torch.autograd.grad(output, (values, locations, weights), upstream, allow_unused=True)


def assert_all_close(got, expected, atol=1e-10):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=atol)


def by_grid_sample(values, shapes, locations, weights):
    """Compute with the formulation that the original uses without its extension."""
    batch_size, _, heads, channels = values.shape
    sampled = []
    for level, (part, shape) in enumerate(zip(values.split([h * w for h, w in shapes], dim=1), shapes)):
        maps = part.permute(0, 2, 3, 1).reshape(batch_size * heads, channels, *shape)
        grid = 2 * locations[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1
        sampled.append(F.grid_sample(maps, grid, padding_mode="zeros", align_corners=False))
    weights = weights.transpose(1, 2).flatten(0, 1).flatten(2)[:, None]
    output = (torch.cat(sampled, dim=-1) * weights).sum(-1)
    return output.view(batch_size, heads * channels, -1).transpose(1, 2)


KERNELS = pytest.mark.parametrize("attend", [deformable_attend, plain.deformable_attend], ids=["fast", "plain"])


@KERNELS
def test_weighted_sums_by_hand(attend):
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0]).view(1, 5, 1, 1)  # a 2x2 map and a 1x1 map
    # The middle of the first map and its lower right pixel; halfway outside the second map, and far outside.
    locations = [[(0.5, 0.5), (0.75, 0.75)], [(1.0, 0.5), (7.0, -7.0)]]
    locations = torch.tensor(locations).view(1, 1, 1, 2, 2, 2)
    weights = torch.tensor([1.0, 0.5, 0.2, 9.0]).view(1, 1, 1, 2, 2)
    output = attend(values, [(2, 2), (1, 1)], locations, weights)
    assert output.tolist() == [[[pytest.approx(2.5 + 0.5 * 4 + 0.2 * 5)]]]


def test_plain_equals_the_original_formulation():
    tensors = inputs(50)
    assert_all_close(run(plain.deformable_attend, *tensors), run(by_grid_sample, *tensors))


@pytest.mark.parametrize("num_queries", [FEW, MANY])
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("channels", [6, 8])
def test_fast_equals_plain(num_queries, batch_size, channels):
    tensors = inputs(num_queries, batch_size=batch_size, channels=channels)
    assert_all_close(run(deformable_attend, *tensors), run(plain.deformable_attend, *tensors))


def test_fast_equals_plain_on_pixels_and_borders():
    values, locations, weights = inputs(MANY)
    tensors = values, on_pixels_and_borders(locations), weights
    assert_all_close(run(deformable_attend, *tensors), run(plain.deformable_attend, *tensors))


@pytest.mark.parametrize("shapes", [[(4, 6)], [(1, 1)], [(1, 9), (9, 1)]])
def test_fast_equals_plain_with_other_numbers_of_levels(shapes):
    for num_queries in (1, 5):
        tensors = inputs(num_queries, shapes=shapes)
        expected = run(plain.deformable_attend, *tensors, shapes=shapes)
        assert_all_close(run(deformable_attend, *tensors, shapes=shapes), expected)


@KERNELS
def test_groups_of_points_on_one_level_sum_as_one_group(attend):
    values, locations, weights = inputs(MANY)
    together = run(attend, values, locations, weights)
    levels = [0, 0, 1, 1, 2, 2, 3, 3]
    split = locations.detach().flatten(3, 4)[..., None, :].requires_grad_(), weights.detach().flatten(3)[..., None]
    apart = run(partial(attend, levels=levels), values, split[0], split[1].requires_grad_())
    assert_all_close([x.view_as(y) for x, y in zip(apart, together)], together)


def test_fast_equals_plain_with_different_numbers_of_points():
    levels = [0, 1, 1, 2, 3, 3, 3]
    generator = torch.Generator().manual_seed(0)
    for num_queries in (FEW, MANY):
        values, *_ = inputs(num_queries)
        shape = (2, num_queries, HEADS, len(levels), POINTS)
        locations = torch.rand(*shape, 2, generator=generator, dtype=torch.float64) * 1.6 - 0.3
        weights = torch.rand(shape, generator=generator, dtype=torch.float64)
        tensors = values, locations.requires_grad_(), weights.requires_grad_()
        expected = run(partial(plain.deformable_attend, levels=levels), *tensors)
        assert_all_close(run(partial(deformable_attend, levels=levels), *tensors), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_form_for_exported_files_equals_plain(dtype):
    values, locations, weights = inputs(MANY, dtype=dtype)
    for points in (locations, on_pixels_and_borders(locations)):
        tensors = values, SHAPES, points, weights, [0, 1, 2, 3]
        got, expected = exported.deformable_attend(*tensors), plain.deformable_attend(*tensors)
        torch.testing.assert_close(got, expected, rtol=1e-10 if dtype == torch.float64 else 2e-3, atol=1e-10)
    # Several groups of points on a level.
    split = locations.flatten(3, 4)[..., None, :], weights.flatten(3)[..., None]
    tensors = values, SHAPES, *split, [0, 0, 1, 1, 2, 2, 3, 3]
    torch.testing.assert_close(exported.deformable_attend(*tensors), plain.deformable_attend(*tensors))


class Attend(torch.nn.Module):
    def forward(self, values, locations, weights):
        return deformable_attend(values, SHAPES, locations, weights)


def test_exported_programs_sample_by_one_operator_for_each_group():
    tensors = tuple(x.detach().float() for x in inputs(FEW))
    program = torch.export.export(Attend(), tensors, strict=False)
    operators = [str(node.target) for node in program.graph.nodes]
    assert sum("grid_sampler" in name for name in operators) == len(SHAPES)
    torch.testing.assert_close(program.module()(*tensors), Attend()(*tensors))


@pytest.mark.parametrize("num_queries", [FEW, MANY])
def test_chunking_does_not_change_the_output(num_queries, monkeypatch):
    tensors = inputs(num_queries)
    in_one_chunk = run(deformable_attend, *tensors)
    monkeypatch.setattr(cpu, "CHUNK", 2 * HEADS * len(SHAPES) * POINTS)
    assert_all_close(run(deformable_attend, *tensors), in_one_chunk)


@KERNELS
def test_empty_queries_give_an_empty_output_and_zero_gradients(attend):
    output, grad_values, *_ = run(attend, *inputs(0))
    assert output.shape == (2, 0, HEADS * 6)
    assert not grad_values.any()


@pytest.mark.parametrize("num_queries", [FEW, 4])
def test_gradients_equal_finite_differences(num_queries):
    tensors = inputs(num_queries, batch_size=1, channels=2)
    assert torch.autograd.gradcheck(lambda v, l, w: deformable_attend(v, SHAPES, l, w), tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@KERNELS
def test_low_precision_inputs_sum_in_float32(attend, dtype):
    low = inputs(MANY, dtype=dtype)
    full = [x.detach().float().requires_grad_() for x in low]
    got, expected = run(attend, *low), run(attend, *full)
    assert all(x.dtype == dtype for x in got)
    # Only the result is rounded.
    assert_all_close(got[:1], [expected[0].to(dtype)], atol=0)
    scale = torch.finfo(dtype).eps
    for a, b in zip(got[1:], expected[1:]):
        assert (a - b).abs().max() <= 2 * scale * b.abs().max()


@KERNELS
def test_nan_location_gives_nan_only_where_it_is_used(attend):
    values, locations, weights = inputs(3)
    locations.data[0, 1, 2, 0, 0] = torch.tensor([math.nan, 0.5])
    locations.data[0, 2] = 1e30
    output, grad_values, *_ = run(attend, values, locations, weights)
    assert output.isnan().nonzero()[:, :2].unique(dim=0).tolist() == [[0, 1]]
    assert not output[0, 2].any()
    assert grad_values[1].isfinite().all()


def test_incompatible_shapes_are_refused():
    values, locations, weights = inputs(2)
    with pytest.raises(ValueError, match=r"values have 46 locations, but the levels \[\(5, 7\)\] have 35"):
        deformable_attend(values, [(5, 7)], locations, weights)
    with pytest.raises(ValueError, match="weights are for 3 levels, but shapes has 4"):
        deformable_attend(values, SHAPES, locations, weights[:, :, :, :3])
    with pytest.raises(ValueError, match="weights are for 4 groups, but levels has 5"):
        deformable_attend(values, SHAPES, locations, weights, levels=[0, 1, 2, 3, 3])
    with pytest.raises(ValueError, match=r"levels=\[0, 1, 2, 4\], but shapes has 4: expected a group for each"):
        deformable_attend(values, SHAPES, locations, weights, levels=[0, 1, 2, 4])
    with pytest.raises(ValueError, match=r"expected weights .* = \(2, 2, 3, 4, 2\) .* got \(2, 2, 3, 4, 2\) and"):
        deformable_attend(values, SHAPES, locations[:, :1], weights)
    with pytest.raises(ValueError, match="sampling_locations of that shape"):
        deformable_attend(values[:1], SHAPES, locations, weights)


def test_kernel_is_chosen_by_device(monkeypatch):
    runs_plain = deformable_attention._runs_plain
    monkeypatch.setattr(deformable_attention, "_has_triton", lambda: True)
    assert [runs_plain(device, True) for device in ("cpu", "cuda", "mps")] == [False, False, True]
    torch.use_deterministic_algorithms(True)
    try:
        assert [runs_plain("cuda", True), runs_plain("cuda", False), runs_plain("cpu", True)] == [True, False, False]
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(deformable_attention, "_has_triton", lambda: False)
    assert runs_plain("cuda", True)
    with use_kernels("plain"):
        assert runs_plain("cpu", True)


def test_triton_is_imported_only_when_used():
    status, printed = run_anew("import sys, vitkit.nn.deformable_attention; print([*sys.modules])")
    assert status == 0 and "'vitkit.kernels.deformable_attention'" in printed, printed
    assert "vitkit.kernels.deformable_attention.triton" not in printed
