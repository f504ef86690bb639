import math
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from vitkit.distributed import close_distributed
from vitkit.errors import ConfigError
from vitkit.nn import deformable_attention, deformable_bag
from vitkit.nn.deformable_attention import MultiScaleDeformableAttention, SamplingRecorder, deformable_attend

SHAPES = [(5, 7), (3, 2), (1, 1), (4, 1)]
PLACES = 46
HEADS, POINTS = 3, 2
FEW, MANY = 2, 9
"""Queries that read only some of the places, and most of them: their gradients are summed in different ways."""


def inputs(num_queries, *, batch_size=2, channels=6, shapes=SHAPES, dtype=torch.float64, seed=0):
    """Values, locations and weights; of the locations some are outside the maps, some exactly on places or borders."""
    generator = torch.Generator().manual_seed(seed)
    places = sum(height * width for height, width in shapes)
    shape = (batch_size, num_queries, HEADS, len(shapes), POINTS)
    values = torch.randn(batch_size, places, HEADS, channels, generator=generator, dtype=torch.float64)
    locations = torch.rand(*shape, 2, generator=generator, dtype=torch.float64) * 1.6 - 0.3
    weights = torch.rand(shape, generator=generator, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (values, locations, weights)]


def on_places_and_borders(locations):
    """Moves locations to the nearest place, and the first queries' to the borders."""
    sizes = torch.tensor([(width, height) for height, width in SHAPES], dtype=locations.dtype)[:, None]
    moved = ((locations.detach() * sizes - 0.5).round() + 0.5) / sizes
    moved[:, 0] = moved[:, 0].clamp(0, 1)
    moved[:, 1] = (moved[:, 1] > 0.5).to(moved)
    return moved.requires_grad_()


def run(path, values, locations, weights, monkeypatch, *, shapes=SHAPES):
    """Output and gradients by one path."""
    if path == "gather":
        output = deformable_attention._attend_by_gathering(values, shapes, locations, weights)
    else:
        monkeypatch.setenv("VITKIT_DEFORMABLE", path)
        output = deformable_attend(values, shapes, locations, weights)
    upstream = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return output, *torch.autograd.grad(output, (values, locations, weights), upstream, allow_unused=True)


def assert_all_close(got, expected, atol=1e-10):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=atol)


def original(values, shapes, locations, weights):
    """The formulation published for machines without the original's extension."""
    batch_size, _, heads, channels = values.shape
    sampled = []
    for level, (part, shape) in enumerate(zip(values.split([h * w for h, w in shapes], dim=1), shapes)):
        maps = part.permute(0, 2, 3, 1).reshape(batch_size * heads, channels, *shape)
        grid = 2 * locations[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1
        sampled.append(F.grid_sample(maps, grid, padding_mode="zeros", align_corners=False))
    weights = weights.transpose(1, 2).flatten(0, 1).flatten(2)[:, None]
    output = (torch.cat(sampled, dim=-1) * weights).sum(-1)
    return output.view(batch_size, heads * channels, -1).transpose(1, 2)


def test_sums_by_hand(monkeypatch):
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0]).view(1, 5, 1, 1)  # a 2x2 map and a 1x1 map
    # The middle of the first map and its lower right place; half way out of the second map, and far outside.
    places = [[(0.5, 0.5), (0.75, 0.75)], [(1.0, 0.5), (7.0, -7.0)]]
    locations = torch.tensor(places).view(1, 1, 1, 2, 2, 2)
    weights = torch.tensor([1.0, 0.5, 0.2, 9.0]).view(1, 1, 1, 2, 2)
    for path in ("torch", "reference"):
        monkeypatch.setenv("VITKIT_DEFORMABLE", path)
        output = deformable_attend(values, [(2, 2), (1, 1)], locations, weights)
        assert output.tolist() == [[[pytest.approx(2.5 + 0.5 * 4 + 0.2 * 5)]]]


@pytest.mark.parametrize("path", ["torch", "gather"])
@pytest.mark.parametrize("num_queries", [FEW, MANY])
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("channels", [6, 8])
def test_equals_the_loop(path, num_queries, batch_size, channels, monkeypatch):
    tensors = inputs(num_queries, batch_size=batch_size, channels=channels)
    assert_all_close(run(path, *tensors, monkeypatch), run("reference", *tensors, monkeypatch))


@pytest.mark.parametrize("path", ["torch", "gather"])
def test_equals_the_loop_on_places_and_borders(path, monkeypatch):
    values, locations, weights = inputs(MANY)
    tensors = values, on_places_and_borders(locations), weights
    assert_all_close(run(path, *tensors, monkeypatch), run("reference", *tensors, monkeypatch))


@pytest.mark.parametrize("shapes", [[(4, 6)], [(1, 1)], [(1, 9), (9, 1)]])
def test_equals_the_loop_on_other_levels(shapes, monkeypatch):
    for num_queries in (1, 5):
        tensors = inputs(num_queries, shapes=shapes)
        got = run("torch", *tensors, monkeypatch, shapes=shapes)
        assert_all_close(got, run("reference", *tensors, monkeypatch, shapes=shapes))


def test_equals_the_original_formulation(monkeypatch):
    values, locations, weights = inputs(50, dtype=torch.float32)
    monkeypatch.delenv("VITKIT_DEFORMABLE", raising=False)
    output = deformable_attend(values, SHAPES, locations, weights)
    torch.testing.assert_close(output, original(values, SHAPES, locations, weights), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_queries", [FEW, MANY])
def test_chunks_change_nothing(num_queries, monkeypatch):
    tensors = inputs(num_queries)
    whole = run("torch", *tensors, monkeypatch)
    monkeypatch.setattr(deformable_bag, "CHUNK", 2 * HEADS * len(SHAPES) * POINTS)
    assert_all_close(run("torch", *tensors, monkeypatch), whole)


@pytest.mark.parametrize("path", ["torch", "reference", "gather"])
def test_no_queries_give_no_output_and_no_gradient(path, monkeypatch):
    output, grad_values, *_ = run(path, *inputs(0), monkeypatch)
    assert output.shape == (2, 0, HEADS * 6)
    assert not grad_values.any()


@pytest.mark.parametrize("num_queries", [FEW, 4])
def test_gradients_are_those_of_the_output(num_queries, monkeypatch):
    monkeypatch.setenv("VITKIT_DEFORMABLE", "torch")
    tensors = inputs(num_queries, batch_size=1, channels=2)
    assert torch.autograd.gradcheck(lambda v, l, w: deformable_attend(v, SHAPES, l, w), tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("path", ["torch", "gather"])
def test_low_precision_inputs_sum_in_float32(path, dtype, monkeypatch):
    low = inputs(MANY, dtype=dtype)
    full = [x.detach().float().requires_grad_() for x in low]
    got, expected = run(path, *low, monkeypatch), run(path, *full, monkeypatch)
    assert all(x.dtype == dtype for x in got)
    # One rounding, of the result.
    assert_all_close(got[:1], [expected[0].to(dtype)], atol=0)
    scale = torch.finfo(dtype).eps
    for a, b in zip(got[1:], expected[1:]):
        assert (a - b).abs().max() <= 2 * scale * b.abs().max()


def test_a_location_that_is_not_a_number_gives_nan_where_it_is_used(monkeypatch):
    values, locations, weights = inputs(3)
    locations.data[0, 1, 2, 0, 0] = torch.tensor([math.nan, 0.5])
    locations.data[0, 2] = 1e30
    for path in ("torch", "gather"):
        output, grad_values, *_ = run(path, values, locations, weights, monkeypatch)
        assert output.isnan().nonzero()[:, :2].unique(dim=0).tolist() == [[0, 1]]
        assert not output[0, 2].any()
        assert grad_values[1].isfinite().all()


def test_tensors_that_do_not_fit_are_refused():
    values, locations, weights = inputs(2)
    with pytest.raises(ValueError, match=r"values have 46 places, but the levels \[\(5, 7\)\] have 35"):
        deformable_attend(values, [(5, 7)], locations, weights)
    with pytest.raises(ValueError, match="weights are for 3 levels, but shapes has 4"):
        deformable_attend(values, SHAPES, locations, weights[:, :, :, :3])
    with pytest.raises(ValueError, match=r"expected weights .* = \(2, 2, 3, 4, 2\) .* got \(2, 2, 3, 4, 2\) and"):
        deformable_attend(values, SHAPES, locations[:, :1], weights)
    with pytest.raises(ValueError, match="sampling_locations of that shape"):
        deformable_attend(values[:1], SHAPES, locations, weights)


def test_forced_paths_that_cannot_run_are_refused(monkeypatch):
    tensors = inputs(2)
    monkeypatch.setenv("VITKIT_DEFORMABLE", "cuda")
    with pytest.raises(ConfigError, match="VITKIT_DEFORMABLE='cuda': expected one of reference, torch, triton"):
        deformable_attend(tensors[0], SHAPES, *tensors[1:])
    monkeypatch.setenv("VITKIT_DEFORMABLE", "triton")
    with monkeypatch.context() as patch:
        patch.setattr(deformable_attention, "_has_triton", lambda: False)
        with pytest.raises(ConfigError, match=r"not installed \(pip install triton\)"):
            deformable_attend(tensors[0], SHAPES, *tensors[1:])
    pytest.importorskip("triton")
    with pytest.raises(ConfigError, match="needs tensors on a GPU"):
        deformable_attend(tensors[0], SHAPES, *tensors[1:])


def test_paths_by_device(monkeypatch):
    monkeypatch.delenv("VITKIT_DEFORMABLE", raising=False)
    path = deformable_attention._path
    monkeypatch.setattr(deformable_attention, "_has_triton", lambda: True)
    assert [path("cpu", True), path("cuda", True), path("mps", True)] == ["bag", "triton", "gather"]
    torch.use_deterministic_algorithms(True)
    try:
        assert [path("cuda", True), path("cuda", False)] == ["gather", "triton"]
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(deformable_attention, "_has_triton", lambda: False)
    assert path("cuda", True) == "gather"


def test_no_path_is_imported_before_it_is_used():
    code = "import sys, vitkit.nn.deformable_attention; print([m for m in sys.modules if 'deformable_' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "deformable_bag" not in done.stdout
    assert "deformable_triton" not in done.stdout


@pytest.fixture
def module():
    """A module with 8 heads, and what calls it."""
    torch.manual_seed(0)
    attention = MultiScaleDeformableAttention(32, 8, num_levels=2, num_points=4)
    nn.init.normal_(attention.attention_weights.weight)
    nn.init.normal_(attention.sampling_offsets.weight, std=0.1)
    call = dict(
        queries=torch.randn(2, 7, 32),
        memory=torch.randn(2, 36, 32),
        reference_points=torch.rand(2, 7, 2, 2),
        shapes=[(5, 6), (3, 2)],
    )
    return attention, call


def gradients(attention, output):
    return torch.autograd.grad(output.square().sum(), list(attention.parameters()))


def test_offsets_start_in_eight_directions():
    attention = MultiScaleDeformableAttention(16, 8, num_levels=2, num_points=3)
    offsets = attention.sampling_offsets.bias.detach().view(8, 2, 3, 2)
    assert not attention.sampling_offsets.weight.any()
    torch.testing.assert_close(offsets[:, 0], offsets[:, 1])
    directions = [(1, 0), (1, 1), (0, 1), (-1, 1), (-1, 0), (-1, -1), (0, -1), (1, -1)]
    for step in range(3):
        expected = torch.tensor(directions) * (step + 1.0)
        torch.testing.assert_close(offsets[:, 0, step], expected, atol=1e-5, rtol=0)


def test_places_around_points_and_boxes():
    attention = MultiScaleDeformableAttention(16, 8, num_levels=2, num_points=2)
    memory, shapes = torch.randn(1, 36, 16), [(5, 6), (3, 2)]
    boxes = torch.tensor([0.4, 0.6, 0.2, 0.1]).expand(1, 1, 2, 4)
    with SamplingRecorder(attention) as samples:
        attention(torch.randn(1, 1, 16), memory, reference_points=boxes[..., :2], shapes=shapes)
        attention(torch.randn(1, 1, 16), memory, reference_points=boxes, shapes=shapes)
    (around_point, weights), (around_box, _) = samples[""]
    assert around_point.shape == (1, 1, 8, 2, 2, 2)
    torch.testing.assert_close(weights, torch.full((1, 1, 8, 2, 2), 0.25))
    # The second head goes right and down, in cells of a 6 wide and 5 high map, or in quarters of the box.
    torch.testing.assert_close(around_point[0, 0, 1, 0, 1], torch.tensor([0.4 + 2 / 6, 0.6 + 2 / 5]))
    torch.testing.assert_close(around_box[0, 0, 1, 0, 1], torch.tensor([0.4 + 2 * 0.2 / 4, 0.6 + 2 * 0.1 / 4]))


def test_recorder_keeps_every_call_by_name(module):
    attention, call = module
    model = nn.ModuleDict({"cross_attn": attention})
    with SamplingRecorder(model) as samples:
        output = model["cross_attn"](**call)
        model["cross_attn"](**call)
    assert list(samples) == ["cross_attn"]
    assert len(samples["cross_attn"]) == 2
    attention(**call)
    assert len(samples["cross_attn"]) == 2
    locations, weights = samples["cross_attn"][0]
    values = attention.value_proj(call["memory"]).unflatten(-1, (8, -1))
    again = attention.output_proj(deformable_attend(values, call["shapes"], locations, weights))
    torch.testing.assert_close(again, output)


def test_padding_reads_as_zero(module):
    attention, call = module
    padding_mask = torch.zeros(2, 36, dtype=torch.bool)
    padding_mask[1, 20:] = True
    output = attention(**call, padding_mask=padding_mask)
    call["memory"][1, 20:] = 1e6
    torch.testing.assert_close(attention(**call, padding_mask=padding_mask), output)
    call["memory"][1, 20:] = math.nan
    torch.testing.assert_close(attention(**call, padding_mask=padding_mask), output)


def test_module_refuses_what_does_not_fit(module):
    attention, call = module
    with pytest.raises(ConfigError, match="num_heads=3 must divide d_model=32"):
        MultiScaleDeformableAttention(32, 3, num_levels=1, num_points=1)
    with pytest.raises(ValueError, match="num_levels=2, but got 1 shapes and reference points for 2 levels"):
        attention(**call | {"shapes": [(6, 6)]})
    with pytest.raises(ValueError, match=r"2 coordinates \(x, y\) or 4 \(cxcywh\), got 3"):
        attention(**call | {"reference_points": torch.rand(2, 7, 2, 3)})
    with pytest.raises(ValueError, match="values have 35 places"):
        attention(**call | {"memory": call["memory"][:, 1:]})


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(module, dynamic, monkeypatch):
    monkeypatch.delenv("VITKIT_DEFORMABLE", raising=False)
    attention, call = module
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    output, expected = compiled(**call), attention(**call)
    assert_all_close([output, *gradients(attention, output)], [expected, *gradients(attention, expected)], atol=1e-5)


def test_export_has_pytorch_operations_only(module, monkeypatch):
    monkeypatch.delenv("VITKIT_DEFORMABLE", raising=False)
    attention, call = module
    arguments = {name: x for name, x in call.items() if name != "shapes"}

    class FixedShapes(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = attention

        def forward(self, queries, memory, reference_points):
            return self.attention(queries, memory, reference_points=reference_points, shapes=call["shapes"])

    expected = attention(**call)
    exported = torch.export.export(FixedShapes(), (), arguments, strict=False)
    assert "ops.vitkit" not in str(exported.graph)
    assert "grid_sampler" not in str(exported.graph)
    torch.testing.assert_close(exported.module()(**arguments), expected)
    traced = torch.jit.trace(FixedShapes(), example_kwarg_inputs=arguments)
    assert "vitkit::" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(**arguments), expected)


def test_autocast_keeps_locations_and_sums_in_float32(module):
    attention, call = module
    with torch.autocast("cpu", torch.bfloat16), SamplingRecorder(attention) as samples:
        output = attention(**call)
    locations, weights = samples[""][0]
    assert (output.dtype, locations.dtype, weights.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    torch.testing.assert_close(output.float(), attention(**call), atol=0.05, rtol=0.05)
    assert all(grad.isfinite().all() for grad in gradients(attention, output.float()))


def test_checkpointing_and_determinism_keep_gradients(module):
    attention, call = module
    expected = gradients(attention, attention(**call))
    torch.use_deterministic_algorithms(True)
    try:
        recomputed = checkpoint(lambda: attention(**call), use_reentrant=False)
        assert_all_close(gradients(attention, recomputed), expected, atol=1e-6)
    finally:
        torch.use_deterministic_algorithms(False)


def test_trains_with_distributed_data_parallel(module, tmp_path):
    attention, call = module
    expected = gradients(attention, attention(**call))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(attention)(**call).square().sum().backward()
    finally:
        close_distributed()
    assert_all_close([p.grad for p in attention.parameters()], expected, atol=1e-6)
