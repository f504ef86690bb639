"""Attention over space and time, combined from the steps of a block."""

import pytest
import torch

from vitkit.backbones.timesformer import SCHEMES
from vitkit.errors import ConfigError
from vitkit.explanations.clips import GroupedAttention, clip_attention, clip_page
from vitkit.models import build_model
from vitkit.nn.attention import AttentionRecorder

H, W, T = 2, 3, 4


def model_of(scheme):
    torch.manual_seed(0)
    sizes = dict(patch_size=8, d_model=16, depth=2, num_heads=2, image_size=24, num_frames=T)
    backbone = dict(type="TimeSformer", attention=scheme, position_std=1.0, **sizes)
    model = build_model(dict(type="Classifier", backbone=backbone), classes=["a", "b"]).eval()
    for name, parameter in model.named_parameters():
        if "_fc.weight" in name or "qkv.weight" in name:
            torch.nn.init.normal_(parameter)
    return model


@pytest.fixture
def clip():
    return torch.randn(1, 3, T, 8 * H, 8 * W, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def recorded(model, clip):
    with AttentionRecorder(model.backbone.blocks[1]) as maps:
        model(clip)
    return {name: calls[0].mean(dim=1) for name, calls in maps.items()}


def test_joint_attention_equals_the_row_of_the_token(clip):
    model = model_of("joint")
    weights = recorded(model, clip)["attn"][0]
    attention = clip_attention(model, clip)
    token = 1 + (1 * W + 2) * T + 3
    assert torch.allclose(attention.of_token(1, 2, 3), weights[token, 1:].view(H, W, T))
    assert torch.allclose(attention.class_token, weights[0, 1:].view(H, W, T))


def test_spatial_attention_stays_within_its_frame(clip):
    model = model_of("space")
    weights = recorded(model, clip)["attn"]  # (T, 1 + h w, 1 + h w)
    attention = clip_attention(model, clip)
    seen = attention.of_token(1, 2, 3)
    assert torch.allclose(seen[..., 3], weights[3, 1 + 1 * W + 2, 1:].view(H, W))
    assert (seen[..., :3] == 0).all()
    assert torch.allclose(attention.class_token, weights[:, 0, 1:].view(T, H, W).permute(1, 2, 0))


def test_divided_attention_combines_space_and_time_at_each_location(clip):
    model = model_of("divided")
    maps = recorded(model, clip)
    spatial, temporal = maps["attn"][:, 1:, 1:], maps["temporal_attn"].view(H, W, T, T)
    in_frame = spatial[3, 1 * W + 2].view(H, W)
    expected = in_frame[..., None] * temporal[:, :, 3]
    assert torch.allclose(clip_attention(model, clip).of_token(1, 2, 3), expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_attention_weights_sum_to_at_most_one(scheme, clip):
    attention = clip_attention(model_of(scheme), clip, block=0)
    seen = torch.stack([attention.of_token(r, c, t) for r in range(H) for c in range(W) for t in range(T)])
    assert seen.shape == (H * W * T, H, W, T) and attention.class_token.shape == (H, W, T)
    total = seen.sum(dim=(1, 2, 3))
    assert (seen >= 0).all() and (total > 0).all() and (total <= 1 + 1e-5).all()


def test_other_backbones_and_blocks_are_errors(clip):
    resnet = build_model(dict(type="Classifier", backbone=dict(type="resnet18", pretrained=False)), classes=["a", "b"])
    with pytest.raises(ConfigError, match="ResNet has no attention over space and time: expected TimeSformer, an MViT"):
        clip_attention(resnet, clip)
    with pytest.raises(ConfigError, match="encoder_layer: got 2; the model's layers are 0 to 1"):
        clip_attention(model_of("joint"), clip, 2)


def test_page_of_a_clip_shows_its_frames_side_by_side():
    # Attention of one step over all 2 x 2 x 3 tokens: token i sees token i + 1.
    weights = torch.roll(torch.eye(12), 1, dims=1)[None]
    attention = GroupedAttention(torch.arange(12.0).view(2, 2, 3), [("joint", weights)], (2, 2, 3))
    locations, token = clip_page(attention)
    assert locations.rows == locations.columns == (2, 6) and token.rows == ["class token"]
    assert token.weights[0, 0].view(2, 6).tolist() == [[0, 3, 1, 4, 2, 5], [6, 9, 7, 10, 8, 11]]
    for row, (i, j, t) in enumerate((i, j, t) for i in range(2) for t in range(3) for j in range(2)):
        expected = attention.of_token(i, j, t).permute(0, 2, 1).flatten()
        assert torch.equal(locations.weights[0, row], expected) and expected.sum() == 1
