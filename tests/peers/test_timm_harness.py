"""Every backbone through the checks that timm makes of its models (tests/test_models.py of timm 1.0.31, Apache-2.0).

timm's wheel does not contain its tests, so their assertions are written anew here, each with the name of timm's test;
TorchScript, FX and what needs timm's pretrained weights are left out. As there, the smallest model of each family is
run, and every registered one on the meta device, which has shapes and no values.
"""

import math

import pytest
import torch

from vitkit.errors import ConfigError
from vitkit.nn.activation_checkpointing import enable_activation_checkpointing
from vitkit.registry import BACKBONES

pytestmark = pytest.mark.peers

SMALLEST = {
    "resnet18": {},
    "resnet50": {},
    "ResNetVD": dict(depth=18),
    "nonlocal_resnet50": {},
    "lrnet26": {},
    "swin_tiny": {},
    "swinv2_tiny": {},
    "mvitv2_tiny": {},
    "mvitv1_base_16": {},
    "vit_tiny_patch16": {},
    "deit_tiny_distilled_patch16": {},
    "vit_small_patch14_reg4_dinov2": dict(image_size=56),
    "vit_small_patch16_dinov3": {},
    "WindowedViT": dict(d_model=64, depth=4, num_heads=2, image_size=64, num_windows=2, global_blocks=[2]),
    "SpatialAdapter": dict(vit=dict(type="ViT", d_model=64, depth=3, num_heads=2, image_size=64), blocks=[0, 1, 2]),
    "ECViT": dict(d_model=64, depth=3, num_heads=2),
    "SmallHGNetV2": dict(size="atto"),
    "TimmBackbone": dict(name="resnet10t"),
    "i3d_r50": {},
    "timesformer_divided": dict(image_size=64, num_frames=2, depth=2),
}
"""The smallest model of each family -> changes to it."""
CLIPS = ("ClipResNet", "TimeSformer", "c2d", "i3d", "slow", "timesformer", "nonlocal_c2d", "nonlocal_i3d")
VIDEO_MVITS = ("mvitv1_b24_32x3", "mvitv1_b_", "mvitv2_b_32x3", "mvitv2_l_40x3", "mvitv2_s_16x4")


def build(name, **arguments):
    return BACKBONES.build(dict(type=name, pretrained=False, **SMALLEST.get(name, {}), **arguments))


def num_frames(name):
    """Return the number of frames of a video model's clips, None for images."""
    if name.startswith(VIDEO_MVITS):
        return 16
    return (2 if name in SMALLEST else 8) if name.startswith(CLIPS) else None


def inputs(name, batch=1, size=64, **options):
    frames = num_frames(name)
    return torch.randn(batch, 3, *(() if frames is None else (frames,)), size, size, **options)


def size_of(name):
    return 56 if "patch14" in name else 64


def test_there_is_a_model_of_every_family():
    families = {type(build(name)).__name__ for name in SMALLEST}
    assert families == {name for name in BACKBONES.names() if name[0].isupper()}


@pytest.mark.parametrize("name", SMALLEST)
def test_model_forward(name):
    torch.manual_seed(0)
    model = build(name).eval()
    x = inputs(name, size=size_of(name))
    with torch.no_grad():
        outputs = model(x)
    assert all(value.shape[0] == 1 and not value.isnan().any() for value in outputs.values())
    enable_activation_checkpointing(model, True)
    for feature, value in model(x).items():
        scale = max(1.0, float(value.detach().abs().max()))
        torch.testing.assert_close(value, outputs[feature], rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("name", SMALLEST)
def test_model_backward(name):
    torch.manual_seed(0)
    model = build(name, num_classes=42).train()
    outputs = model(inputs(name, batch=2, size=size_of(name)))
    outputs.mean().backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []
    assert outputs.shape == (2, 42) and not outputs.isnan().any()


@pytest.mark.parametrize("name", SMALLEST)
def test_features_only_grad_checkpointing_backward(name):
    """The features' gradients are the same with and without activation checkpointing."""
    x = inputs(name, batch=2, size=size_of(name))
    gradients = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = build(name).train()
        enable_activation_checkpointing(model, enabled)
        torch.manual_seed(1)
        sum(value.pow(2).mean() for value in model(x).values()).backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 0
    for without, with_checkpoints in zip(*gradients):
        scale = max(1.0, float(without.abs().max()))
        torch.testing.assert_close(with_checkpoints, without, rtol=1e-3, atol=1e-5 * scale)


@pytest.mark.parametrize("name", SMALLEST)
def test_gcvit_batch_consistency(name):
    """The features of a batch are those of its images one by one."""
    torch.manual_seed(0)
    model = build(name).eval()
    x = inputs(name, batch=3, size=size_of(name))
    with torch.no_grad():
        batched = model(x)
        single = [model(image[None]) for image in x]
    for feature, value in batched.items():
        expected = torch.cat([one[feature] for one in single])
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5 * max(1.0, float(value.abs().max())))


@pytest.mark.parametrize("name", [name for name in SMALLEST if num_frames(name) is None])
def test_other_numbers_of_channels(name):
    """timm's `in_chans=1` in test_model_load_pretrained."""
    model = build(name, in_channels=1, pixel_mean=[0.5], pixel_std=[0.2]).eval()
    with torch.no_grad():
        outputs = model(inputs(name, size=size_of(name))[:, :1])
    assert list(outputs) == list(model.feature_info)


ALL = [name for name in BACKBONES.names() if not name[0].isupper()]


@pytest.mark.parametrize("name", ALL)
def test_model_default_cfgs_on_the_meta_device(name):
    """Feature shapes are as stated, at least the input's, with another size, and after a change to bf16; frozen models
    stay frozen; unknown arguments are errors; a classifier has as many outputs as classes."""
    size = 2 * size_of(name)
    with torch.device("meta"):
        model = BACKBONES.build(dict(type=name, pretrained=False)).eval()
        for dtype in (torch.float32, torch.bfloat16):
            model.to(dtype)
            outputs = model(inputs(name, size=size, dtype=dtype))
            assert list(outputs) == list(model.feature_info)
            for (feature, info), value in zip(model.feature_info.items(), outputs.values()):
                side = math.ceil(size / info.stride)
                assert value.dtype == dtype, feature
                assert value.shape[:2] == (1, info.channels) and value.shape[-2:] == (side, side), feature
        model.requires_grad_(False)
        model.keep_features(list(model.feature_info)[:1])
        assert not any(parameter.requires_grad for parameter in model.parameters())
        with pytest.raises(ConfigError):
            BACKBONES.build(dict(type=name, pretrained=False, not_a_model_arg=1))
        # ViTDet has no class token.
        pooling = dict(classifier=dict(pooling="mean")) if name.startswith("vitdet") else {}
        classifier = BACKBONES.build(dict(type=name, pretrained=False, num_classes=42, **pooling)).eval()
        assert classifier(inputs(name, size=size)).shape == (1, 42)
