import copy

import pytest
import torch
from torch import nn

from vitkit.errors import ConfigError
from vitkit.nn.activation_checkpointing import enable_activation_checkpointing
from vitkit.nn.attention import padding_bias
from vitkit.nn.transformer import TransformerDecoder, TransformerEncoder

D, HEADS, FFN = 16, 4, 32
OPTIONS = dict(num_heads=HEADS, d_ffn=FFN, dropout=0.0)


def pytorch_names(state):
    return {k.replace("ffn.", "").replace("cross_attn", "multihead_attn"): v for k, v in state.items()}


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_without_positions_equals_pytorchs(norm_first):
    ours = TransformerEncoder(2, D, **(OPTIONS | dict(norm_first=norm_first))).eval()
    layer = nn.TransformerEncoderLayer(D, HEADS, FFN, 0.0, batch_first=True, norm_first=norm_first)
    norm = nn.LayerNorm(D) if norm_first else None
    theirs = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False).eval()
    theirs.load_state_dict(pytorch_names(ours.state_dict()))
    x, mask = torch.randn(2, 6, D), torch.arange(6)[None] >= torch.tensor([[6], [4]])
    expected = theirs(x, src_key_padding_mask=mask)
    torch.testing.assert_close(ours(x, bias=padding_bias(mask)), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("norm_first", [False, True])
def test_decoder_without_positions_equals_pytorchs_and_normalizes_every_layer(norm_first):
    ours = TransformerDecoder(2, D, **(OPTIONS | dict(norm_first=norm_first))).eval()
    layer = nn.TransformerDecoderLayer(D, HEADS, FFN, 0.0, batch_first=True, norm_first=norm_first)
    theirs = nn.TransformerDecoder(layer, 2, nn.LayerNorm(D)).eval()
    theirs.load_state_dict(pytorch_names(ours.state_dict()))
    x, memory = torch.randn(2, 5, D), torch.randn(2, 6, D)
    states = ours(x, memory)
    assert states.shape == (2, 2, 5, D)
    torch.testing.assert_close(states[-1], theirs(x, memory), atol=1e-5, rtol=0)
    theirs.layers = theirs.layers[:1]
    torch.testing.assert_close(states[0], theirs(x, memory), atol=1e-5, rtol=0)


def test_positions_reach_queries_and_keys_but_not_values():
    encoder = TransformerEncoder(1, D, **OPTIONS).eval()
    layer = encoder.layers[0]
    x, positions = torch.randn(2, 6, D), torch.randn(1, 6, D)
    attended = layer.self_attn(x + positions, x + positions, x)
    expected = layer.norm1(x + attended)
    expected = layer.norm2(expected + layer.ffn(expected))
    torch.testing.assert_close(encoder(x, positions), expected)

    decoder = TransformerDecoder(1, D, **OPTIONS).eval()
    layer = decoder.layers[0]
    q, q_pos = torch.randn(2, 5, D), torch.randn(1, 5, D)
    expected = layer.norm1(q + layer.self_attn(q + q_pos, q + q_pos, q))
    expected = layer.norm2(expected + layer.cross_attn(expected + q_pos, x + positions, x))
    expected = decoder.norm(layer.norm3(expected + layer.ffn(expected)))
    torch.testing.assert_close(decoder(q, x, positions=q_pos, memory_positions=positions)[0], expected)


def test_recomputing_activations_keeps_the_gradients():
    torch.manual_seed(0)
    model = nn.ModuleDict(
        dict(
            encoder=TransformerEncoder(2, D, **(OPTIONS | dict(dropout=0.2))),
            decoder=TransformerDecoder(2, D, **(OPTIONS | dict(dropout=0.2))),
        )
    )
    other = copy.deepcopy(model)
    assert enable_activation_checkpointing(other) == 4
    x, queries, positions = torch.randn(2, 6, D), torch.randn(2, 5, D), torch.randn(1, 6, D)
    saved = []
    for m in (model, other):
        torch.manual_seed(1)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t):
            m.decoder(queries, m.encoder(x, positions), memory_positions=positions).square().sum().backward()
        saved.append(sum(kept))
    assert saved[1] < saved[0]
    for (name, a), b in zip(model.named_parameters(), other.parameters()):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


def test_activation_checkpointing_needs_a_model_with_blocks():
    with pytest.raises(ConfigError, match="Linear has no blocks"):
        enable_activation_checkpointing(nn.Linear(2, 2))
