"""The adapter that gives a plain transformer maps of three strides, and HGNetV2's smallest sizes."""

import pytest
import torch
import torch.nn.functional as F
from helpers.weights import assert_same_weights

from vitkit.backbones.hgnetv2 import SmallHGNetV2
from vitkit.backbones.spatial_adapter import SpatialAdapter
from vitkit.backbones.timm_adapter import TimmBackbone
from vitkit.backbones.vit import ViT
from vitkit.errors import CheckpointError, ConfigError
from vitkit.weights import load_pretrained

VIT = dict(type="ViT", d_model=16, depth=4, num_heads=2, positions="rotary", num_registers=1)
SIZES = dict(blocks=[0, 2, 3], channels=4, out_channels=24)


def adapter(**changes):
    torch.manual_seed(0)
    return SpatialAdapter(**{**dict(vit=VIT), **SIZES, **changes}).eval()


@pytest.mark.parametrize("size", [(64, 96), (69, 91), (20, 33)])
def test_maps_have_the_image_divided_by_their_strides(size):
    maps = adapter()(torch.randn(2, 3, *size))
    for name, stride in (("res3", 8), ("res4", 16), ("res5", 32)):
        assert maps[name].shape == (2, 24, -(-size[0] // stride), -(-size[1] // stride))


@pytest.mark.parametrize("norm", [True, False])
def test_each_map_joins_its_block_with_the_convolutions(norm):
    model, images = adapter(norm=norm), torch.randn(1, 3, 64, 64)
    blocks, detail = [], model.detail(images)
    for block in model.vit.blocks:
        block.register_forward_hook(lambda module, args, x: blocks.append(x[:, 2:]))
    maps = model(images)
    for name, index, size in (("res3", 0, 8), ("res4", 2, 4), ("res5", 3, 2)):
        x = model.vit.norm(blocks[index]) if norm else blocks[index]
        x = F.interpolate(x.mT.unflatten(2, (4, 4)), size=(size, size), mode="bilinear")
        torch.testing.assert_close(maps[name], model.projections[name](torch.cat([x, detail[name]], dim=1)))
    assert hasattr(model.vit, "norm") == norm


def test_parts_without_a_use_are_removed():
    model = adapter(out_features=["res3", "res4"])
    assert len(model.vit.blocks) == 3 and list(model.detail.levels) == ["res3", "res4"] == list(model.projections)
    model.keep_features(["res3"])
    assert len(model.vit.blocks) == 1 and list(model.detail.levels) == ["res3"] == list(model.projections)
    model.train()(torch.randn(2, 3, 64, 64))["res3"].square().sum().backward()
    # The registers and the class token only matter to patches of later blocks.
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_weights_of_the_transformer_are_its_weights(tmp_path):
    torch.manual_seed(1)
    trained = ViT(**{k: v for k, v in VIT.items() if k != "type"}, num_classes=3)
    file = str(tmp_path / "vit.pth")
    torch.save(trained.state_dict(), file)
    for changes in (dict(), dict(norm=False), dict(blocks=[0, 1, 2])):
        model = adapter(pretrained=file, **changes)
        convolution = model.detail.stem[0].weight.clone()
        assert load_pretrained(model) == file
        assert_same_weights(trained, model.vit)
        assert torch.equal(model.detail.stem[0].weight, convolution)
    with pytest.raises(CheckpointError, match="missing vit.blocks.4"):
        load_pretrained(adapter(vit=dict(VIT, depth=5), blocks=[0, 2, 4], pretrained=file))


def test_frozen_stages_are_the_transformers():
    model = adapter(frozen_stages=4).train()
    assert not any(parameter.requires_grad for parameter in model.vit.blocks.parameters())
    assert all(parameter.requires_grad for parameter in model.detail.parameters())


@pytest.mark.parametrize(("changes", "message"), [
    (dict(blocks=[0, 2]), r"blocks=\[0, 2\]: expected 3 ascending indices, 0 to 3, for the maps at strides 8, 16 and"),
    (dict(blocks=[0, 2, 4]), r"blocks=\[0, 2, 4\]: expected 3 ascending indices, 0 to 3"),
    (dict(blocks=[2, 1, 3]), r"blocks=\[2, 1, 3\]: expected 3 ascending indices"),
    (dict(channels=0), "channels=0, out_channels=24: expected at least 1"),
    (dict(vit=dict(VIT, pretrained=True)), "vit.pretrained=True: an argument of the adapter. Set it there instead"),
    (dict(vit=dict(type="ResNet", depth=18)), "vit: got ResNet; expected a ViT whose blocks attend over all patches"),
    (dict(vit=dict(type="ViTDet", d_model=16, depth=4, num_heads=2)), "vit: got ViTDet; expected a ViT whose blocks"),
])  # fmt: skip
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        adapter(**changes)


def test_b0s_weights_start_the_smaller_sizes(tmp_path):
    torch.manual_seed(0)
    b0 = TimmBackbone("hgnetv2_b0").net.state_dict()
    file = str(tmp_path / "PPHGNetV2_B0_stage1.pth")
    torch.save({key.replace("stages_", "stages."): value for key, value in b0.items()}, file)
    for size in ("femto", "atto"):
        model = SmallHGNetV2(size, out_features=["res4"], pretrained=file)
        load_pretrained(model)
        state = model.net.state_dict()
        fitting = [key for key, value in state.items() if value.shape == b0[key].shape]
        assert all(torch.equal(state[key], b0[key]) for key in fitting if not key.endswith("num_batches_tracked"))
        assert {key for key in state if not key.startswith("stages_2")} <= set(fitting)
    with pytest.raises(ConfigError, match="size='tiny': unknown. Known: atto, femto"):
        SmallHGNetV2("tiny")


def test_a_transformer_with_rotations_does_not_start_from_learned_positions():
    tiny = dict(type="ViT", positions="rotary", d_model=192, depth=12, num_heads=3)
    with pytest.raises(ConfigError, match="pretrained=True"):
        SpatialAdapter(vit=tiny, blocks=[3, 7, 11], pretrained=True).pretrained_source()
