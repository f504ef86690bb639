import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from vitkit.apps.explanations.sampling import SamplingRecorder
from vitkit.apps.training.process_group import close_distributed
from vitkit.errors import ConfigError
from vitkit.kernels.deformable_attention import deformable_attend
from vitkit.nn.deformable_attention import MultiScaleDeformableAttention


def assert_all_close(got, expected, atol=1e-10):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=atol)


@pytest.fixture
def module():
    """Return a module with 8 heads, and a function that calls it."""
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


def test_initial_offsets_point_in_eight_directions():
    attention = MultiScaleDeformableAttention(16, 8, num_levels=2, num_points=3)
    offsets = attention.sampling_offsets.bias.detach().view(8, 2, 3, 2)
    assert not attention.sampling_offsets.weight.any()
    torch.testing.assert_close(offsets[:, 0], offsets[:, 1])
    directions = [(1, 0), (1, 1), (0, 1), (-1, 1), (-1, 0), (-1, -1), (0, -1), (1, -1)]
    for step in range(3):
        expected = torch.tensor(directions) * (step + 1.0)
        torch.testing.assert_close(offsets[:, 0, step], expected, atol=1e-5, rtol=0)


def test_sampling_locations_surround_points_and_boxes():
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


def uneven(**options):
    """Return attention to 3, 6 and 3 points on three levels, its inputs, and the inputs' shapes."""
    torch.manual_seed(0)
    attention = MultiScaleDeformableAttention(16, 2, num_levels=3, num_points=[3, 6, 3], **options)
    nn.init.normal_(attention.attention_weights.weight)
    nn.init.normal_(attention.sampling_offsets.weight, std=0.1)
    boxes = torch.rand(2, 5, 1, 4).expand(-1, -1, 3, -1)
    call = dict(queries=torch.randn(2, 5, 16), memory=torch.randn(2, 38, 16), reference_points=boxes)
    return attention, call, [(5, 6), (3, 2), (1, 2)]


def test_levels_can_have_different_numbers_of_points():
    attention, call, shapes = uneven()
    with SamplingRecorder(attention) as samples:
        output = attention(**call, shapes=shapes)
    (locations, weights) = samples[""][0]
    assert attention.levels == [0, 1, 1, 2]  # groups of three points
    assert locations.shape == (2, 5, 2, 4, 3, 2) and weights.shape == (2, 5, 2, 4, 3)
    torch.testing.assert_close(weights.sum((-2, -1)), torch.ones(2, 5, 2))
    # The same by hand: offsets in units of half a box over the level's number of points, sampled level by level.
    points = torch.tensor([3, 6, 3]).repeat_interleave(torch.tensor([3, 6, 3]))[:, None]
    offsets = attention.sampling_offsets(call["queries"]).view(2, 5, 2, 12, 2)
    boxes = call["reference_points"][:, :, :1, None]
    by_hand = boxes[..., :2] + offsets * boxes[..., 2:] * 0.5 / points
    torch.testing.assert_close(locations.flatten(3, 4), by_hand)
    values = attention.value_proj(call["memory"]).view(2, 38, 2, 8)
    sums = 0
    for part, map_values, shape in zip(
        (slice(0, 3), slice(3, 9), slice(9, 12)), values.split([30, 6, 2], dim=1), shapes, strict=True
    ):
        level = by_hand[:, :, :, None, part], weights.flatten(3)[:, :, :, None, part]
        sums = sums + deformable_attend(map_values, [shape], *level)
    torch.testing.assert_close(output, attention.output_proj(sums))


def test_initial_offsets_grow_with_the_points_of_each_level():
    attention = MultiScaleDeformableAttention(16, 4, num_levels=2, num_points=[2, 3])
    offsets = attention.sampling_offsets.bias.detach().view(4, 5, 2)
    torch.testing.assert_close(offsets[0, :, 0], torch.tensor([1.0, 2, 1, 2, 3]))


def test_without_projections_the_memory_is_the_values():
    attention, call, shapes = uneven(projections=False)
    assert [name for name, _ in attention.named_children() if list(getattr(attention, name).parameters())] == [
        "sampling_offsets",
        "attention_weights",
    ]
    with SamplingRecorder(attention) as samples:
        output = attention(**call, shapes=shapes)
    values = call["memory"].view(2, 38, 2, 8)
    expected = deformable_attend(values, shapes, *samples[""][0], levels=attention.levels)
    torch.testing.assert_close(output, expected)
    attention.reset_parameters()


def test_export_with_different_numbers_of_points():
    attention, call, shapes = uneven(projections=False)

    class FixedShapes(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = attention

        def forward(self, queries, memory, reference_points):
            return self.attention(queries, memory, reference_points=reference_points, shapes=shapes)

    exported = torch.export.export(FixedShapes(), (), call, strict=False)
    assert "ops.vitkit" not in str(exported.graph)
    torch.testing.assert_close(exported.module()(**call), attention(**call, shapes=shapes))


def test_recorder_collects_every_call_by_name(module):
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


def test_incompatible_inputs_are_refused(module):
    attention, call = module
    with pytest.raises(ConfigError, match="num_heads=3 must divide d_model=32"):
        MultiScaleDeformableAttention(32, 3, num_levels=1, num_points=1)
    with pytest.raises(
        ConfigError, match=r"num_points=\[4, 4\] are for 2 levels, but there are 3. Set the backbone's out_feat"
    ):
        MultiScaleDeformableAttention(32, 4, num_levels=3, num_points=[4, 4])
    for points in (0, [4, 0], []):
        with pytest.raises(ConfigError, match="expected at least 1"):
            MultiScaleDeformableAttention(32, 4, num_levels=2, num_points=points)
    with pytest.raises(ValueError, match="num_levels=2, but got 1 shapes and reference points for 2 levels"):
        attention(**call | {"shapes": [(6, 6)]})
    with pytest.raises(ValueError, match=r"2 coordinates \(x, y\) or 4 \(cxcywh\), got 3"):
        attention(**call | {"reference_points": torch.rand(2, 7, 2, 3)})
    with pytest.raises(ValueError, match="values have 35 locations"):
        attention(**call | {"memory": call["memory"][:, 1:]})


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(module, dynamic):
    attention, call = module
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    output, expected = compiled(**call), attention(**call)
    assert_all_close([output, *gradients(attention, output)], [expected, *gradients(attention, expected)], atol=1e-5)


def test_export_contains_only_pytorch_operators(module):
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
    torch.testing.assert_close(exported.module()(**arguments), expected)
    traced = torch.jit.trace(FixedShapes(), example_kwarg_inputs=arguments)
    assert "vitkit::" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(**arguments), expected)


def test_locations_and_sums_stay_float32_under_autocast(module):
    attention, call = module
    with torch.autocast("cpu", torch.bfloat16), SamplingRecorder(attention) as samples:
        output = attention(**call)
    locations, weights = samples[""][0]
    assert (output.dtype, locations.dtype, weights.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    torch.testing.assert_close(output.float(), attention(**call), atol=0.05, rtol=0.05)
    assert all(grad.isfinite().all() for grad in gradients(attention, output.float()))


def test_checkpointing_and_deterministic_mode_keep_the_gradients(module):
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
