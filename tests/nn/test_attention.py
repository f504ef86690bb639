import pytest
import torch
from torch import nn

from vitkit.errors import ConfigError
from vitkit.nn.attention import (
    AttentionRecorder,
    MultiHeadAttention,
    attend,
    attend_explicit,
    attention_weights,
    mask_bias,
    padding_bias,
)

B, L, S, D, HEADS = 2, 5, 7, 16, 4


@pytest.fixture
def pair():
    """Return an nn.MultiheadAttention, and ours with the same weights."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(D, HEADS, batch_first=True).eval()
    nn.init.normal_(theirs.in_proj_bias)
    nn.init.normal_(theirs.out_proj.bias)
    ours = MultiHeadAttention(D, HEADS).eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs():
    torch.manual_seed(1)
    return torch.randn(B, L, D), torch.randn(B, S, D), torch.randn(B, S, D)


def padding(*lengths):
    return torch.arange(S)[None] >= torch.tensor(lengths)[:, None]


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_fused_attention_equals_its_explicit_twin():
    q, k, v = torch.randn(B, HEADS, L, 4), torch.randn(B, HEADS, S, 4), torch.randn(B, HEADS, S, 6)
    for bias in (None, torch.randn(L, S), padding_bias(padding(7, 3))):
        for scale in (None, 0.3):
            close(attend(q, k, v, bias, scale=scale), attend_explicit(q, k, v, bias, scale=scale)[0])


def test_attention_weights_are_float32_and_sum_to_one():
    weights = attention_weights(torch.randn(3, 4).bfloat16(), torch.randn(4))
    assert weights.dtype == torch.float32
    close(weights.sum(-1), torch.ones(3))


@pytest.mark.parametrize("shared", ["none", "queries_keys", "keys_values", "all"])
def test_equals_pytorch_when_inputs_share_a_projection(pair, shared):
    theirs, ours = pair
    q, k, v = inputs()
    q, k, v = {"none": (q, k, v), "queries_keys": (k, k, v), "keys_values": (q, k, k), "all": (k, k, k)}[shared]
    close(ours(q, k, v), theirs(q, k, v)[0])


def test_equals_pytorch_with_padding(pair):
    theirs, ours = pair
    mask = padding(7, 3)
    close(ours(*inputs(), bias=padding_bias(mask)), theirs(*inputs(), key_padding_mask=mask)[0])


def test_equals_pytorch_with_attention_masks_and_float_biases(pair):
    theirs, ours = pair
    mask = torch.ones(L, S, dtype=torch.bool).triu(1)
    close(ours(*inputs(), bias=mask_bias(mask)), theirs(*inputs(), attn_mask=mask)[0])
    per_head = torch.rand(B, HEADS, L, S) < 0.4
    per_head[..., 0] = False
    close(ours(*inputs(), bias=mask_bias(per_head)), theirs(*inputs(), attn_mask=per_head.flatten(0, 1))[0])
    bias = torch.randn(B, HEADS, L, S)
    close(ours(*inputs(), bias=bias), theirs(*inputs(), attn_mask=bias.flatten(0, 1))[0])
    joined = bias.masked_fill(padding(7, 3)[:, None, None], float("-inf"))
    bias = bias + padding_bias(padding(7, 3))
    close(ours(*inputs(), bias=bias), theirs(*inputs(), attn_mask=joined.flatten(0, 1))[0])


def test_gradients_equal_pytorchs(pair):
    theirs, ours = pair
    ours(*inputs(), bias=padding_bias(padding(7, 3))).square().sum().backward()
    theirs(*inputs(), key_padding_mask=padding(7, 3), need_weights=False)[0].square().sum().backward()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fully_padded_image_stays_finite_and_does_not_affect_others(pair, dtype):
    theirs, ours = pair
    ours.to(dtype)
    q, k, v = (x.to(dtype).requires_grad_() for x in inputs())
    output = ours(q, k, v, bias=padding_bias(padding(3, 0), dtype))
    output.sum().backward()
    assert all(torch.isfinite(x).all() for x in (output, q.grad, k.grad, v.grad, ours.in_proj_weight.grad))
    if dtype == torch.float32:
        close(output[:1], theirs(q[:1], k[:1], v[:1], key_padding_mask=padding(3))[0])
        close(output[1:], theirs(q[1:], k[1:], v[1:])[0])


def test_a_mask_in_place_of_a_bias_is_an_error():
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(ConfigError, match=r"attend: bias is torch.bool; expected float. Of a mask: bias=mask_bias"):
        attend(x, x, x, torch.zeros(1, 1, 1, 3, dtype=torch.bool))


def test_row_with_every_key_masked_attends_everywhere(pair):
    theirs, ours = pair
    mask = torch.zeros(L, S, dtype=torch.bool)
    mask[2, :3] = True  # the second image has only these keys
    output = ours(*inputs(), bias=mask_bias(mask | padding(7, 3)[:, None, None]))
    q, k, v = inputs()
    close(output[1, 2], theirs(q[1:, 2:3], k[1:], v[1:])[0][0, 0])
    close(output[1, :2], theirs(q[1:, :2], k[1:, :3], v[1:, :3])[0][0])


def test_two_mask_biases_that_mask_a_whole_row_give_no_nan():
    halves = torch.arange(S) < 3
    bias = mask_bias(halves) + mask_bias(~halves)
    assert torch.isfinite(attention_weights(torch.randn(1, S), bias)).all()


def test_heads_that_do_not_divide_the_channels_are_an_error():
    with pytest.raises(ConfigError, match=r"num_heads=3 must divide d_model=16"):
        MultiHeadAttention(16, 3)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(MultiHeadAttention(D, HEADS) for _ in range(2))

    def forward(self, x, mask):
        for layer in self.layers:
            x = x + layer(x, x, x, bias=None if mask is None else padding_bias(mask))
        return x


def test_recorder_collects_every_call_and_changes_nothing():
    model = TwoLayers().eval()
    x, mask = torch.randn(B, S, D), padding(7, 3)
    plain = model(x, mask)
    with AttentionRecorder(model) as maps:
        recorded = model(x, mask)
        model(x, mask)
        attend(*torch.randn(3, 1, 1, 2, 4).unbind())  # not the model's
    close(recorded, plain)
    assert list(maps) == ["layers.0", "layers.1"]
    assert [m.shape for m in maps["layers.1"]] == [(B, HEADS, S, S)] * 2
    assert maps["layers.0"][0][1, :, :, 3:].abs().max() == 0
    close(maps["layers.0"][0].sum(-1), torch.ones(B, HEADS, S))
    model(x, mask)
    assert len(maps["layers.0"]) == 2
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_recorder_stops_after_an_error_in_the_model():
    model = TwoLayers()
    with pytest.raises(RuntimeError), AttentionRecorder(model):
        model(torch.randn(B, S, D + 1), None)
    with AttentionRecorder(model) as maps:
        model(torch.randn(B, S, D), None)
    assert len(maps) == 2


def test_attention_compiles_without_graph_breaks_and_can_be_recorded():
    model = TwoLayers().eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, mask = torch.randn(B, S, D), padding(7, 3)
    close(compiled(x, mask), model(x, mask))
    with AttentionRecorder(model) as maps:
        close(compiled(x, mask), model(x, mask))
    assert len(maps["layers.1"]) == 2


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("test_vit", [(1, 2, 101, 101)] * 6),  # 10 x 10 patches and the class token
        ("swin_tiny_patch4_window7_224.ms_in1k", [(64, 3, 49, 49)] * 2),  # 64 windows in the first stage
    ],
)
def test_attention_of_timm_is_recorded_and_the_output_unchanged(name, shapes):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False).eval()
    image = torch.randn(1, 3, *model.pretrained_cfg["input_size"][1:])
    fused = [module for module in model.modules() if hasattr(module, "fused_attn")]
    for module in fused:
        module.fused_attn = True  # timm leaves it off for Swin
    with torch.no_grad():
        expected = model(image)
        with AttentionRecorder(model) as maps:
            output = model(image)
        assert torch.allclose(output, expected, atol=1e-5)
        recorded = [calls[0] for calls in maps.values()]
        assert [tuple(weights.shape) for weights in recorded[: len(shapes)]] == shapes
        assert len(recorded) == len(fused)
        assert all(torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-5) for weights in recorded)
        assert all(module.fused_attn for module in fused)
        assert torch.equal(model(image), expected)


def test_recorder_that_sees_no_attention_says_so(caplog):
    with AttentionRecorder(nn.Linear(2, 2)) as maps:
        pass
    assert maps == {} and "0 attention maps were recorded in Linear" in caplog.text
