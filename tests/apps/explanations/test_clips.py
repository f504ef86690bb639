"""Attention over space and time, combined from the steps of a block."""

import pytest
import torch
from matplotlib.axes import Axes

from vitkit.apps.explanations import clip_drawing, clips
from vitkit.apps.explanations.clips import GroupedAttention, clip_attention, clip_layers, clip_page
from vitkit.apps.explanations.explain_options import ExplainRequest, Explanation
from vitkit.apps.inference.videos import VideoPredictor
from vitkit.backbones.timesformer import SCHEMES
from vitkit.data.datasets.clip_sampling import ClipSampling
from vitkit.engine.build import build_model
from vitkit.errors import ConfigError, DataError
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
    attention = clip_attention(model_of(scheme), clip, layer=0)
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


def full_model(name):
    torch.manual_seed(0)
    backbones = {
        "mvit": dict(
            type="MViT", depths=(1, 1, 1, 1), embed_dim=8, num_heads=1, image_size=32, num_frames=T, kv_stride=2
        )
        | dict(class_token=True),
        "nonlocal": dict(type="ClipResNet", depth=50, positions={"res3": [0], "res4": [1]}),
    }
    return build_model(dict(type="Classifier", backbone=backbones[name]), classes=["a", "b"]).eval()


@pytest.mark.parametrize(
    ("name", "layer", "size", "key_size"),
    [
        # Stride 4 and, between frames, 2; keys of res2 are pooled by 2.
        ("mvit", 0, (8, 12, 2), (4, 6, 2)),
        # Stride 8 in res3, and half of the frames; keys are pooled by 2 in space.
        ("nonlocal", 0, (4, 6, 2), (2, 3, 2)),
        ("nonlocal", None, (2, 3, 2), (1, 1, 2)),
    ],
)
def test_a_token_of_a_full_clip_has_its_row_of_the_recorded_weights(name, layer, size, key_size):
    model = full_model(name)
    clip = torch.randn(1, 3, T, 32, 48, generator=torch.Generator().manual_seed(1))
    attention = clip_attention(model, clip, layer)
    assert (attention.size, attention.key_size) == (size, key_size)
    module = clip_layers(model)[-1 if layer is None else layer]
    with AttentionRecorder(module) as maps, torch.no_grad():
        model(clip)
    weights = maps[""][0][0].mean(0)
    tokens = int(name == "mvit")
    row = tokens + (1 * size[0] + 1) * size[1] + 2  # the second frame, the second row, the third column
    seen = attention.of_token(1, 2, 1)
    expected = weights[row, tokens:].view(key_size[2], *key_size[:2])
    assert seen.shape == key_size and torch.allclose(seen[..., 1], expected[1])
    assert torch.allclose(attention.sum_received()[..., 0], weights[tokens:, tokens:].mean(0).view_as(expected)[0])
    if tokens:
        assert torch.allclose(attention.class_token[..., 0], weights[0, 1:].view_as(expected)[0])
    else:
        assert attention.class_token is None
    pages = clip_page(attention)
    assert [page.name for page in pages] == ["locations", "class token"][: 1 + tokens]
    assert pages[0].columns == (key_size[0], key_size[1] * key_size[2])


def test_arrows_lead_to_the_locations_with_the_largest_weights(monkeypatch, tmp_path):
    monkeypatch.setattr(clip_drawing, "NUM_ARROWS", 2)
    arrows = []
    monkeypatch.setattr(Axes, "annotate", lambda axes, text, xy, **style: arrows.append((xy, style.get("xytext"))))
    monkeypatch.setattr(clip_drawing, "mark_point", lambda *_: None)
    weights = torch.zeros(1, 2, 2)  # 2 columns, 2 frames of keys, each of 2 frames of the clip
    weights[0, 1, 0], weights[0, 0, 1] = 0.6, 0.4
    clip = torch.zeros(3, 4, 160, 320, dtype=torch.uint8)
    clip_drawing.draw_clip_arrows(clip, [((2, 80.0, 40.0), weights)], tmp_path / "a.png")
    # Frames are drawn with 6 pixels between them; the point is in the third frame, so in the second one that is drawn.
    (scale,) = {start[1] / 40.0 for _, start in arrows}
    width = 320 * scale
    assert [xy[0] for xy, _ in arrows] == [0.75 * width, width + 6 + 0.25 * width]
    assert {start for _, start in arrows} == {(width + 6 + 80 * scale, 40 * scale)}
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_clip_of_a_video_is_explained(monkeypatch, tmp_path):
    predictor = VideoPredictor(full_model("nonlocal"), ["a", "b"], sampling=ClipSampling(T, 1))
    clip = torch.randint(0, 255, (1, 3, T, 32, 48), dtype=torch.uint8)
    monkeypatch.setattr(clips, "clip_of", lambda *_: clip)
    result = Explanation(tmp_path, stem="run")
    clips.explain_clip(predictor, "run.mp4", ExplainRequest(points=[(40, 3)], frame=3, html=True), result)
    assert [path.name for path in result.files] == ["run_non_local.png", "run_attention.png", "run_attention.html"]
    assert all(path.stat().st_size > 5000 for path in result.files)
    (share,) = result.numbers.values()
    assert 0 < share < 1
    for request, message in (
        (ExplainRequest(frame=T), "frame: got 4; the clip's frames are 0 to 3"),
        (ExplainRequest(points=[(48, 3)]), "points: 48,3 is outside the clip, which is 48x32 pixels"),
        (ExplainRequest(encoder_layer=2), "encoder_layer: got 2; the model's layers are 0 to 1"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            clips.explain_clip(predictor, "run.mp4", request, result)
