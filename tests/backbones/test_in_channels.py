"""Backbones take images of any number of channels, and weights for RGB."""

import pytest
import torch
from timm.models import adapt_input_conv

from vitkit.errors import ConfigError, DataError
from vitkit.ops.images import normalize_images
from vitkit.registry import BACKBONES
from vitkit.weights import load_weights

SWIN = dict(embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 4], window=3)
SPECS = {
    "resnet": dict(type="ResNet", depth=18, pretrained=False),
    "resnet_vd": dict(type="ResNetVD", depth=18, pretrained=False),
    "nonlocal_resnet": dict(type="NonLocalResNet", depth=50, pretrained=False),
    "vit": dict(type="ViT", d_model=32, depth=1, num_heads=2, image_size=64),
    "windowed_vit": dict(type="WindowedViT", d_model=32, depth=4, num_heads=2, image_size=64, global_blocks=[2]),
    "spatial_adapter": dict(
        type="SpatialAdapter", vit=dict(type="ViT", d_model=32, depth=3, num_heads=2, image_size=64), blocks=[0, 1, 2]
    ),
    "ecvit": dict(type="ECViT", d_model=32, depth=2, num_heads=2),
    "small_hgnet": dict(type="SmallHGNetV2", size="atto", out_features=["res4"]),
    "swin": dict(type="Swin", **SWIN),
    "swinv2": dict(type="SwinV2", **SWIN),
    "mvit": dict(type="MViT", embed_dim=16, depths=[1, 1, 1, 1], num_heads=1, image_size=64),
    "lrnet": dict(type="LRNet", depth=26, kernel_size=3),
    "timm": dict(type="TimmBackbone", name="resnet10t"),
    "clips: resnet": dict(type="ClipResNet", depth=50),
    "clips: timesformer": dict(type="TimeSformer", d_model=32, depth=1, num_heads=2, image_size=64),
    "clips: mvit": dict(
        type="MViT", embed_dim=16, depths=[1, 1, 1, 1], num_heads=1, image_size=64, num_frames=4, out_features=["res5"]
    ),
}  # fmt: skip


def shape_of(name, channels):
    return (1, channels, 4, 64, 64) if name.startswith("clips") else (1, channels, 64, 64)


def with_channels(name, count):
    return BACKBONES.build(
        {**SPECS[name], "in_channels": count, "pixel_mean": [0.5] * count, "pixel_std": [0.2] * count}
    )


@pytest.mark.parametrize("name", SPECS)
def test_weights_for_rgb_are_repeated_and_rescaled(name):
    rgb, one, six = BACKBONES.build(SPECS[name]).eval(), with_channels(name, 1).eval(), with_channels(name, 6).eval()
    for backbone in (one, six):
        report = load_weights(backbone, {key: value.clone() for key, value in rgb.state_dict().items()})
        assert not report.missing and not report.unexpected
    gray = torch.rand(shape_of(name, 1))
    with torch.no_grad():
        expected = rgb(gray.expand(shape_of(name, 3)))
        for backbone, count in ((one, 1), (six, 6)):
            for key, value in backbone(gray.expand(shape_of(name, count))).items():
                torch.testing.assert_close(value, expected[key], atol=1e-4, rtol=1e-4)


def test_four_channels_get_timms_weights_also_from_its_own_model():
    rgb, four = BACKBONES.build(SPECS["timm"]), with_channels("timm", 4)
    weight = rgb.state_dict()["net.conv1.0.weight"]
    load_weights(four, {key.removeprefix("net."): value for key, value in rgb.state_dict().items()})
    torch.testing.assert_close(four.state_dict()["net.conv1.0.weight"], adapt_input_conv(4, weight))
    again = with_channels("timm", 4)
    load_weights(again, four.state_dict())
    torch.testing.assert_close(again.state_dict()["net.conv1.0.weight"], adapt_input_conv(4, weight))


@pytest.mark.parametrize("name", SPECS)
def test_statistics_of_other_channels_are_required(name):
    with pytest.raises(ConfigError, match=r"pixel_mean=.*: expected a number in 0..1 for each of in_channels=4"):
        BACKBONES.build({**SPECS[name], "in_channels": 4})
    with pytest.raises(DataError, match=r"images of shape \(1, 3, .*64, 64\): expected \(B, 4, .*H, W\)"):
        with_channels(name, 4)(torch.zeros(shape_of(name, 3)))


def test_the_stem_of_a_vit_must_take_its_channels():
    stem = dict(type="ResNet", depth=18, out_features=["res2"], pretrained=False)
    statistics = dict(in_channels=4, pixel_mean=[0.5] * 4, pixel_std=[0.2] * 4)
    vit = dict(type="ViT", patch_size=16, d_model=16, depth=1, num_heads=1, image_size=64, **statistics)
    with pytest.raises(ConfigError, match=r"stem\.in_channels=3: expected in_channels=4"):
        BACKBONES.build({**vit, "stem": stem})
    assert BACKBONES.build({**vit, "stem": stem | statistics})(torch.zeros(1, 4, 64, 64))["res4"].shape[1] == 16


def test_pixels_of_16_bits_are_normalized_like_the_same_of_8_bits():
    pixels = torch.randint(256, (2, 4, 5, 6), dtype=torch.uint8)
    statistics = dict(mean=(0.1, 0.2, 0.3, 0.4), std=(0.4, 0.3, 0.2, 0.1))
    expected = (pixels / 255 - torch.tensor(statistics["mean"])[:, None, None]) / torch.tensor(statistics["std"])[
        :, None, None
    ]
    for images in (pixels, (pixels.int() * 257).to(torch.uint16)):
        torch.testing.assert_close(normalize_images(images, **statistics), expected, atol=1e-5, rtol=1e-5)
    assert normalize_images(expected, **statistics) is expected  # float images are already normalized
    with pytest.raises(DataError, match=r"have 3 channels \(RGB\); expected \(B, 4, H, W\). Set model.backbone.in_ch"):
        normalize_images(pixels[:, :3], **statistics)
