import shlex

import pytest
import torch
import torch.nn.functional as F
from helpers.weights import assert_same_weights
from torch import nn

from vitkit.config import load_config
from vitkit.engine.build import build_model
from vitkit.errors import ConfigError
from vitkit.necks.simple_pyramid import SimpleFeaturePyramid
from vitkit.registry import BACKBONES, NECKS
from vitkit.structures import FeatureInfo
from vitkit.weights import load_weights

build = BACKBONES.build
INFO = {"res4": FeatureInfo(16, 16)}


def randomize(model):
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model.eval()


def test_four_levels_are_made_from_one_map():
    neck = NECKS.build("SimpleFeaturePyramid", feature_info=INFO, out_channels=8)
    maps = neck({"res4": torch.randn(2, 16, 5, 7)})
    assert neck.feature_info == {"res2": (8, 4), "res3": (8, 8), "res4": (8, 16), "res5": (8, 32)}
    assert {name: x.shape for name, x in maps.items()} == {
        "res2": (2, 8, 20, 28),
        "res3": (2, 8, 10, 14),
        "res4": (2, 8, 5, 7),
        "res5": (2, 8, 3, 4),
    }
    sum(x.square().mean() for x in maps.values()).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in neck.parameters())


def channel_norm(x, weight, bias):
    mean, variance = x.mean(1, keepdim=True), x.var(1, keepdim=True, unbiased=False)
    return (x - mean) / (variance + 1e-6).sqrt() * weight[:, None, None] + bias[:, None, None]


def test_each_level_is_as_in_the_paper():
    neck = randomize(SimpleFeaturePyramid(INFO, 8)).double()
    state = neck.state_dict()
    x = torch.randn(1, 16, 4, 6, dtype=torch.float64)

    def finish(y, prefix, first):
        for i, padding in ((first, 0), (first + 1, 1)):
            y = F.conv2d(y, state[f"{prefix}.{i}.weight"], padding=padding)
            y = channel_norm(y, state[f"{prefix}.{i}.norm.weight"], state[f"{prefix}.{i}.norm.bias"])
        return y

    def grow(y, layer):
        return F.conv_transpose2d(y, state[f"{layer}.weight"], state[f"{layer}.bias"], stride=2)

    fine = channel_norm(grow(x, "levels.res2.0"), state["levels.res2.1.weight"], state["levels.res2.1.bias"])
    expected = {
        "res2": finish(grow(F.gelu(fine), "levels.res2.3"), "levels.res2", 4),
        "res3": finish(grow(x, "levels.res3.0"), "levels.res3", 1),
        "res4": finish(x, "levels.res4", 0),
        "res5": finish(F.max_pool2d(x, 2), "levels.res5", 1),
    }
    with torch.no_grad():
        for name, y in neck({"res4": x}).items():
            torch.testing.assert_close(y, expected[name], msg=name)


def test_maps_of_other_strides_give_other_levels():
    neck = SimpleFeaturePyramid({"res3": FeatureInfo(12, 8), "res5": FeatureInfo(16, 32)}, 4, strides=[64, 8])
    assert neck.in_feature == "res5" and neck.feature_info == {"res3": (4, 8), "res6": (4, 64)}
    maps = neck({"res3": torch.randn(1, 12, 8, 8), "res5": torch.randn(1, 16, 2, 2)})
    assert [x.shape for x in maps.values()] == [(1, 4, 8, 8), (1, 4, 1, 1)]
    pixels = SimpleFeaturePyramid({"res0": FeatureInfo(4, 1)}, 4, strides=(1, 4))
    assert pixels({"res0": torch.randn(1, 4, 9, 9)})["res2"].shape == (1, 4, 3, 3)


def test_masked_padding_does_not_affect_the_image():
    neck = randomize(SimpleFeaturePyramid(INFO, 8, isolate_padding=True))
    image = torch.randn(1, 16, 4, 6)
    alone = neck({"res4": image}, torch.zeros(1, 64, 96, dtype=torch.bool))
    padded = torch.full((1, 16, 8, 10), 7.0)
    padded[..., :4, :6] = image
    mask = torch.ones(1, 128, 160, dtype=torch.bool)
    mask[:, :64, :96] = False
    for name, x in neck({"res4": padded}, mask).items():
        height, width = alone[name].shape[-2:]
        torch.testing.assert_close(x[..., :height, :width], alone[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("nested", [True, False])
def test_vitdet_names_load_into_backbone_and_neck(nested):
    backbone = build(
        "ViTDet", patch_size=8, d_model=16, depth=2, num_heads=2, image_size=32, window_size=2, relative_positions=4
    )
    neck = SimpleFeaturePyramid(backbone.feature_info, 8, strides=(2, 4, 8, 16))
    source = nn.ModuleDict({"backbone": backbone, "neck": neck})
    randomize(source)
    official = {}
    for key, value in source.state_dict().items():
        key = key.replace("backbone.", "backbone.net.").replace("neck.levels.res", "backbone.simfp_")
        official[key if nested else key.removeprefix("backbone.")] = value.clone()
    pos_embed = "backbone.net.pos_embed" if nested else "net.pos_embed"
    # The original keeps a position for the class token, which it does not have.
    official[pos_embed] = torch.cat((torch.full((1, 1, 16), 9.0), official[pos_embed]), dim=1)
    backbone = build(
        "ViTDet", patch_size=8, d_model=16, depth=2, num_heads=2, image_size=32, window_size=2, relative_positions=4
    )
    target = nn.ModuleDict(
        {"backbone": backbone, "neck": SimpleFeaturePyramid(INFO | backbone.feature_info, 8, strides=(2, 4, 8, 16))}
    )
    report = load_weights(target, official)
    assert report.converter == "facebookresearch/detectron2 ViTDet"
    assert_same_weights(target, source)


@pytest.mark.parametrize(
    ("info", "arguments", "message"),
    [
        (INFO, dict(in_feature="res3"), "has no feature 'res3'. Did you mean 'res4'"),
        ({"res4": FeatureInfo(16, 14)}, {}, "stride 14 of the map 'res4': expected a power of 2"),
        (INFO, dict(strides=(4, 6)), "stride 6 of a level: expected a power of 2"),
        (INFO, dict(strides=()), "strides is empty"),
        ({"res4": FeatureInfo(18, 16)}, {}, "18 channels cannot be halved down to stride 4: expected a multiple of 4"),
    ],
)
def test_wrong_arguments_are_named(info, arguments, message):
    with pytest.raises(ConfigError, match=message):
        SimpleFeaturePyramid(info, 8, **arguments)


@pytest.mark.parametrize(
    ("config", "overrides"), [("mask2former_instance", []), ("deformable_detr", ["model.neck.in_features=[res3,res4]"])]
)
def test_the_remedy_for_a_backbone_of_one_map_works_when_pasted(config, overrides):
    overrides = [*overrides, "model.backbone=dict(type='ViT', d_model=16, depth=1, num_heads=2, image_size=32)"]
    path = f"configs/quickstart/{config}.py"
    with pytest.raises(ConfigError, match="for a backbone with one map, make several") as error:
        build_model(load_config(path, overrides)["model"], classes=["thing"])
    (pasted,) = shlex.split(str(error.value).partition("make several: ")[2])
    model = build_model(load_config(path, [*overrides, pasted])["model"], classes=["thing"])
    assert isinstance(model.neck, SimpleFeaturePyramid)
    model.eval()(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
