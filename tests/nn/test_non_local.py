import pytest
import torch
import torch.nn.functional as F

from vitkit.errors import ConfigError
from vitkit.nn.attention import AttentionRecorder
from vitkit.nn.non_local import PAIRWISE, NonLocalBlock
from vitkit.weights import load_weights


def block(*, seed=0, **options):
    """Return a block whose norm is the identity."""
    torch.manual_seed(seed)
    made = NonLocalBlock(6, 4, **options).eval()
    torch.nn.init.ones_(made.norm.weight)
    return made


def expected(made, x, *, pool=None):
    """Compute the paper's equation 1, location by location."""
    pooled = x if pool is None else (F.max_pool2d if x.ndim == 4 else F.max_pool3d)(x, pool)
    gaussian = made.pairwise == "gaussian"
    theta, phi = (x, pooled) if gaussian else (made.conv_theta(x), made.conv_phi(pooled))
    theta, phi, g = theta.flatten(2), phi.flatten(2), made.conv_g(pooled).flatten(2)
    y = torch.empty(len(x), g.shape[1], theta.shape[2])
    for b in range(len(x)):
        for i in range(theta.shape[2]):
            similar = torch.stack([theta[b, :, i] @ phi[b, :, j] for j in range(phi.shape[2])])
            if "gaussian" in made.pairwise:
                f = (similar / (len(theta[b]) ** 0.5 if made.scaled else 1)).exp()
                f = f / f.sum()
            elif made.pairwise == "dot_product":
                f = similar / len(similar)
            else:
                both = [torch.cat((theta[b, :, i], phi[b, :, j])) for j in range(phi.shape[2])]
                f = torch.stack([F.relu(made.pair.flatten() @ pair) for pair in both]) / len(both)
            y[b, :, i] = g[b] @ f
    y = made.conv_out(y.unflatten(2, x.shape[2:]))
    return x + y / (1 + made.norm.eps) ** 0.5


@pytest.mark.parametrize("pairwise", PAIRWISE)
def test_output_equals_the_formula_of_the_paper(pairwise):
    for options in (dict(), dict(pool=(2, 2)), dict(pool=(1, 2, 2), axes=3)):
        made = block(pairwise=pairwise, **options)
        x = torch.randn(2, 6, *(2, 3, 5)[3 - made.axes :])
        torch.testing.assert_close(made(x), expected(made, x, pool=options.get("pool")), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pairwise", ["gaussian", "embedded_gaussian"])
def test_scaling_of_scores_is_optional(pairwise):
    made = block(pairwise=pairwise, scaled=False)
    x = torch.randn(1, 6, 3, 4)
    torch.testing.assert_close(made(x), expected(made, x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pairwise", PAIRWISE)
def test_new_block_is_the_identity_and_trains(pairwise):
    made = NonLocalBlock(6, pairwise=pairwise).train()
    x = torch.randn(2, 6, 4, 4)
    torch.testing.assert_close(made(x), x)
    torch.nn.init.ones_(made.norm.weight)
    made(x).square().mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in made.parameters())


@pytest.mark.parametrize("pairwise", PAIRWISE)
def test_recorder_collects_the_weights(pairwise):
    made = block(pairwise=pairwise, pool=(2, 2))
    with AttentionRecorder(made) as maps:
        made(torch.randn(2, 6, 4, 6))
    (weights,) = maps[""]
    assert weights.shape == (2, 1, 24, 6)
    if "gaussian" in pairwise:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 1, 24))


@pytest.mark.parametrize("pairwise", PAIRWISE)
def test_padded_locations_get_no_attention(pairwise):
    made = block(pairwise=pairwise, pool=(2, 2))
    x = torch.rand(1, 6, 4, 4)
    padded, padding = torch.zeros(1, 6, 6, 8), torch.ones(1, 1, 6, 8, dtype=torch.bool)
    padded[..., :4, :4], padding[..., :4, :4] = x, False
    output = made(padded, padding)
    torch.testing.assert_close(output[..., :4, :4], made(x), atol=1e-5, rtol=1e-5)
    assert not output[..., 4:].any()


def test_axis_shorter_than_the_pooling_becomes_one_location():
    made = block(pool=(4, 2))
    assert made(torch.randn(1, 6, 3, 1)).shape == (1, 6, 3, 1)


def test_weights_of_a_clip_block_load_into_an_image_block():
    clips, maps = block(axes=3), NonLocalBlock(6, 4)
    load_weights(maps, clips.state_dict())
    x = torch.randn(1, 6, 3, 4)
    torch.testing.assert_close(maps.eval()(x), clips(x[:, :, None])[:, :, 0])


def test_compiles_without_graph_breaks():
    for pairwise in PAIRWISE:
        made = block(pairwise=pairwise, pool=(2, 2))
        x = torch.randn(1, 6, 4, 5)
        compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), made(x))
        torch.testing.assert_close(made.double()(x.double()).float(), made.float()(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(pairwise="softmax"), "pairwise='softmax': unknown. "),
        (dict(axes=1), r"axes=1: expected 2 \(maps\) or 3 \(clips\)"),
        (dict(pool=(1, 2, 2)), r"pool=\(1, 2, 2\): expected 2 numbers"),
        (dict(pool=(0, 2)), r"pool=\(0, 2\): expected 2 numbers, at least 1 each"),
        (dict(inner_channels=0), "inner_channels=0: expected at least 1"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        NonLocalBlock(8, **arguments)
