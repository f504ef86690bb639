"""The local relation operator against what the original kernels computed, and against plain formulations."""

import pytest
import torch
import torch.nn.functional as F
from golden.weights import compare, load_case

import vitkit.kernels.local_relation
from vitkit.errors import ConfigError
from vitkit.kernels import use_kernels
from vitkit.kernels.local_relation import SIMILARITIES, local_relation
from vitkit.kernels.local_relation.plain import window_scores
from vitkit.nn.attention import AttentionRecorder
from vitkit.nn.local_relation import GeometryPrior, LocalRelation

NAMES = [*list(SIMILARITIES)[:6], "none"]
"""Names of the originals' similarities 0 to 5 and -1, which indexes the last name."""
VARIANTS = (*(f"sim{i}" for i in range(6)), "geometry_only", "stride2", "dilation2", "kernel5", "saliency")


@pytest.fixture(scope="module")
def case():
    return load_case("local_relation_layer")


@pytest.mark.parametrize("variant", VARIANTS)
def test_golden_outputs_scores_and_gradients(case, variant):
    settings = case.meta["settings"]["variants"][variant]
    names = ("query", "key", "value", "pos_weight", "upstream")
    *inputs, upstream = (torch.from_numpy(case.inputs[f"{variant}/{name}"]) for name in names)
    inputs = [x.requires_grad_() for x in inputs]
    similarity = NAMES[settings["sim_method"]]
    options = dict(stride=settings["stride"], dilation=settings["dilation"], scale=settings["scale"])
    output = local_relation(*inputs, similarity=similarity, **options)
    output.backward(upstream)
    ours = {f"{variant}/out": output.detach().numpy(), f"{variant}/sim": scores(inputs, similarity, options).numpy()}
    for name, x in zip(names, inputs):
        ours[f"{variant}/grad_{name}"] = (torch.zeros_like(x) if x.grad is None else x.grad).numpy()
    report = compare(case, ours)
    assert all(row["ok"] for row in report.values()), report


def scores(inputs, similarity, options):
    """Return the scores, (B * G, k * k, h * w)."""
    query, key, _, prior = (x.detach() for x in inputs)
    return window_scores(query, key, prior, similarity=similarity, **options).flatten(0, 1)


def tensors(*, channels=2, groups=3, size=(5, 6), kernel_size=3, stride=1, salient=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    out_size = [-(-length // stride) for length in size]
    shapes = (
        (2, groups * channels, *out_size),
        (2, groups * channels + salient, *size),
        (2, groups * 2, *size),
        (groups, kernel_size, kernel_size),
    )
    return [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize(
    "options",
    [dict(), dict(stride=2, dilation=2, scale=0.5), dict(stride=2, dilation=3), dict(stride=4, dilation=2)],
    ids=str,
)
def test_gradients_equal_finite_differences(similarity, options):
    inputs = tensors(salient=3, stride=options.get("stride", 1))
    assert torch.autograd.gradcheck(
        lambda *x: local_relation(*x, similarity=similarity, **options), inputs, fast_mode=True
    )


@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [(1, 1), (3, 11), (9, 4)], ids=str)
def test_fast_equals_plain(size, stride, dilation):
    for settings in (dict(scale=0.5), dict(similarity="square"), dict(salient=1)):
        inputs = tensors(size=size, kernel_size=5, stride=stride, salient=settings.pop("salient", 0))
        results = {}
        for choice in ("fast", "plain"):
            with use_kernels(choice):
                output = local_relation(*inputs, stride=stride, dilation=dilation, **settings)
            results[choice] = [output, *torch.autograd.grad(output.square().sum(), inputs)]
        for fast, plain in zip(results["fast"], results["plain"]):
            torch.testing.assert_close(fast, plain)


def test_recorder_collects_the_weights_and_changes_nothing():
    layer, x = LocalRelation(24, 5, stride=2), torch.randn(2, 24, 3, 11)
    with AttentionRecorder(layer) as maps:
        recorded = layer(x)
    torch.testing.assert_close(recorded, layer(x))
    (weights,) = maps[""]
    assert weights.shape == (2, 3, 2 * 6, 25)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


@pytest.mark.parametrize("options", [dict(), dict(stride=2), dict(stride=4, dilation=2)], ids=str)
def test_processing_a_few_maps_at_a_time_changes_nothing(monkeypatch, options):
    inputs = tensors(size=(9, 7), stride=options.get("stride", 1), salient=1)
    whole = local_relation(*inputs, **options)
    gradients = torch.autograd.grad(whole.square().sum(), inputs)
    monkeypatch.setattr(vitkit.kernels.local_relation, "_WEIGHTS_AT_A_TIME", 1)
    with torch.no_grad():
        torch.testing.assert_close(local_relation(*inputs, **options), whole)
    for ours, expected in zip(
        torch.autograd.grad(local_relation(*inputs, **options).square().sum(), inputs), gradients
    ):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("grad", [True, False])
def test_an_empty_batch_gives_an_empty_batch(grad):
    with torch.set_grad_enabled(grad):
        assert LocalRelation(8)(torch.zeros(0, 8, 5, 6)).shape == (0, 8, 5, 6)


def test_padding_counts_if_all_scores_inside_are_lower():
    query, key, value = torch.full((1, 1, 2, 2), 10.0), torch.full((1, 1, 2, 2), -20.0), torch.ones(1, 1, 2, 2)
    output = local_relation(query, key, value, torch.zeros(1, 3, 3))  # inside -200, outside -100
    torch.testing.assert_close(output, torch.zeros_like(value))


def test_padding_has_no_weight_beside_scores_of_any_size():
    query = key = torch.full((1, 1, 2, 2), 1e5)  # scores of 1e10, from which float32 cannot subtract 70
    output = local_relation(query, key, torch.ones(1, 1, 2, 2), torch.zeros(1, 3, 3))
    torch.testing.assert_close(output, torch.ones(1, 1, 2, 2))


def test_channels_last_memory_format_changes_nothing():
    query = torch.full((1, 2, 1, 1), 10.0).to(memory_format=torch.channels_last)
    value = torch.ones(1, 2, 1, 1).to(memory_format=torch.channels_last)
    output = local_relation(query, -query, value, torch.zeros(1, 3, 3))  # inside -200, outside -100
    torch.testing.assert_close(output, torch.zeros(1, 2, 1, 1))


def test_even_window_extends_further_up_and_left():
    query, key, value = (torch.zeros(1, 1, 4, 4) for _ in range(3))
    value[0, 0, 1, 1] = 1
    prior = torch.full((1, 4, 4), -50.0)
    prior[0, 0, 3] = 50  # two rows up and one column right
    output = local_relation(query, key, value, prior)
    assert output[0, 0, 3, 0] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_layer_keeps_the_dtype_and_halves_any_size(dtype):
    layer = LocalRelation(20, 5, channels_per_weight=8, stride=2).to(dtype)
    output = layer(torch.randn(2, 20, 7, 10, dtype=dtype))
    assert output.shape == (2, 20, 4, 5) and output.dtype == dtype


def test_layer_under_autocast_is_close_to_full_precision():
    layer = LocalRelation(16, 5)
    x = torch.randn(1, 16, 8, 9)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), layer(x), atol=0.03, rtol=0.05)


def test_the_last_group_may_have_fewer_channels():
    layer = LocalRelation(10, 3, channels_per_weight=4)
    x = torch.randn(1, 10, 5, 5)
    with AttentionRecorder(layer) as maps:
        output = layer(x)
    weights = maps[""][0]  # (1, 3, 25, 9)
    windows = F.unfold(x, 3, padding=1).view(1, 10, 9, 25)
    mixed = torch.stack([(windows[0, c] * weights[0, c // 4].T).sum(0).view(5, 5) for c in range(10)])
    torch.testing.assert_close(output, layer.proj(mixed[None]))
    output.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


def test_prior_depends_only_on_the_relative_position():
    small, large = GeometryPrior(4, 3), GeometryPrior(4, 7)
    large.load_state_dict(small.state_dict())
    torch.testing.assert_close(large()[:, 2:5, 2:5], small())
    shift = torch.tensor([1.0, -1.0])  # one column right, one row up
    torch.testing.assert_close(small()[:, 0, 2], small.mlp(shift))


def test_layer_compiles_without_graph_breaks():
    layer = LocalRelation(12, 5, channels_per_weight=4, stride=2)
    x = torch.randn(1, 12, 7, 9, requires_grad=True)
    expected = layer(x)
    (grad,) = torch.autograd.grad(expected.square().sum(), x)
    output = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(torch.autograd.grad(output.square().sum(), x)[0], grad)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(kernel_size=0), "kernel_size=0: expected an odd number"),
        (dict(kernel_size=4), "kernel_size=4: expected an odd number"),
        (dict(channels_per_weight=9), "channels_per_weight=9: expected 1 to the 8 channels"),
        (dict(stride=0), "stride=0, dilation=1: expected at least 1"),
        (dict(similarity="produkt"), "similarity='produkt': unknown. Did you mean 'product'"),
    ],
)
def test_wrong_layer_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        LocalRelation(8, **arguments)
