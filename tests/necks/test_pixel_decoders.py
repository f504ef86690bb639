"""Pixel decoders against their steps one by one, in PyTorch's modules."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitkit.errors import ConfigError
from vitkit.nn.position import sine_positions_2d
from vitkit.registry import NECKS
from vitkit.structures import FeatureInfo

CHANNELS = {"res2": 16, "res3": 24, "res4": 40, "res5": 48}
INFO = {name: FeatureInfo(channels, 4 * 2**i) for i, (name, channels) in enumerate(CHANNELS.items())}
SIZES = {"res2": (19, 26), "res3": (10, 13), "res4": (5, 7), "res5": (3, 4)}
D_MODEL = 64


def features(batch_size=2):
    torch.manual_seed(1)
    return {name: torch.randn(batch_size, CHANNELS[name], *size) for name, size in SIZES.items()}


def build(kind, **options):
    torch.manual_seed(0)
    neck = NECKS.build(dict(type=kind, out_channels=D_MODEL, mask_channels=20, **options), feature_info=INFO).eval()
    for parameter in neck.parameters():  # norms and biases also get distinct values
        nn.init.uniform_(parameter, -0.3, 0.3)
    return neck


def normed(x, layer):
    """Apply a convolution without bias, and a group norm with 32 groups."""
    convolution, norm = layer[0], layer[1]
    x = F.conv2d(x, convolution.weight, padding=convolution.kernel_size[0] // 2)
    return F.group_norm(x, 32, norm.weight, norm.bias)


def pyramid(neck, maps, coarse):
    for name in ("res4", "res3", "res2"):
        coarse = normed(maps[name], neck.path.lateral[name]) + F.interpolate(coarse, SIZES[name], mode="nearest")
        coarse = normed(coarse, neck.path.output[name]).relu()
    return F.conv2d(coarse, neck.mask_features.weight, neck.mask_features.bias, padding=1)


def encoded(x, layers, positions):
    """Apply DETR's post-norm encoder, batch first, with positions added to queries and keys; no norm after it."""
    for layer in layers:
        attention = nn.MultiheadAttention(D_MODEL, 4, batch_first=True)
        attention.load_state_dict(layer.self_attn.state_dict())
        x = layer.norm1(x + attention(x + positions, x + positions, x, need_weights=False)[0])
        x = layer.norm2(x + layer.ffn.linear2(layer.ffn.linear1(x).relu()))
    return x


def test_pyramid_decoder_convolves_the_coarsest_map():
    neck, maps = build("FPNPixelDecoder"), features()
    with torch.no_grad():
        got = neck(maps)
        expected = pyramid(neck, maps, normed(maps["res5"], neck.top).relu())
    assert list(got) == ["mask_features", "res5"] and torch.equal(got["res5"], maps["res5"])
    torch.testing.assert_close(got["mask_features"], expected, rtol=1e-4, atol=1e-4)
    assert neck.feature_info == {"mask_features": FeatureInfo(20, 4), "res5": FeatureInfo(48, 32)}


def test_transformer_encodes_the_coarsest_map_for_pyramid_and_queries():
    neck, maps = build("TransformerPixelDecoder", num_heads=4, d_ffn=96, num_layers=2), features()
    with torch.no_grad():
        got = neck(maps)
        x = F.conv2d(maps["res5"], neck.input_proj.weight, neck.input_proj.bias)
        positions = sine_positions_2d(SIZES["res5"], D_MODEL).flatten(1, 2)
        x = encoded(x.flatten(2).transpose(1, 2), neck.encoder.layers, positions)
        x = x.transpose(1, 2).unflatten(2, SIZES["res5"])
        expected = pyramid(neck, maps, normed(x, neck.top).relu())
    torch.testing.assert_close(got["res5"], x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got["mask_features"], expected, rtol=1e-4, atol=1e-4)
    assert neck.feature_info == {"mask_features": FeatureInfo(20, 4), "res5": FeatureInfo(D_MODEL, 32)}


def test_deformable_decoder_returns_the_coarse_maps_and_a_mask_feature_map():
    maps = features()
    for num_levels, names in ((3, ["res3", "res4", "res5"]), (2, ["res4", "res5"])):
        neck = build("DeformablePixelDecoder", num_heads=4, d_ffn=96, num_layers=1, num_levels=num_levels)
        with torch.no_grad():
            got = neck(maps)
        assert list(got) == list(neck.feature_info) == ["mask_features", *names]
        assert got["mask_features"].shape == (2, 20, *SIZES["res2"])
        assert all(got[name].shape == (2, D_MODEL, *SIZES[name]) for name in names)


@pytest.mark.parametrize("num_levels", [0, 4])
def test_wrong_numbers_of_levels_are_named(num_levels):
    with pytest.raises(ConfigError, match=rf"num_levels={num_levels} needs that many coarse maps and a finer one"):
        build("DeformablePixelDecoder", num_levels=num_levels)
