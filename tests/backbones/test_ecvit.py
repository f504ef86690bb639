"""ECViT: patches by convolutions, three maps from the mean of two blocks, and weights of the transformer alone."""

import re

import pytest
import torch
import torch.nn.functional as F

from vitkit.backbones.ecvit import ECViT
from vitkit.errors import ConfigError
from vitkit.weights import load_pretrained


def backbone(**changes):
    torch.manual_seed(0)
    return ECViT(**{**dict(d_model=16, depth=3, num_heads=2), **changes}).eval()


@pytest.mark.parametrize("size", [(64, 96), (69, 91), (20, 33)])
@pytest.mark.parametrize("out_channels", [None, 24])
def test_maps_have_the_image_divided_by_their_strides(size, out_channels):
    model = backbone(out_channels=out_channels)
    maps = model(torch.randn(2, 3, *size))
    assert list(model.projections) == (["res5"] if out_channels is None else ["res3", "res4", "res5"])
    for name, stride in (("res3", 8), ("res4", 16), ("res5", 32)):
        assert maps[name].shape == (2, out_channels or 16, -(-size[0] // stride), -(-size[1] // stride))


def test_maps_are_the_resized_mean_of_the_last_two_blocks():
    model, images, blocks = backbone(), torch.randn(1, 3, 64, 96), []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, x: blocks.append(x[:, 1:]))
    maps = model(images)
    x = ((blocks[1] + blocks[2]) / 2).mT.unflatten(2, (4, 6))
    torch.testing.assert_close(maps["res3"], F.interpolate(x, size=(8, 12), mode="bilinear"))
    torch.testing.assert_close(maps["res4"], x)
    expected = model.projections["res5"](F.interpolate(x, size=(2, 3), mode="bilinear"))
    torch.testing.assert_close(maps["res5"], expected)
    assert not hasattr(model, "norm") and model.patch_embed.proj.kernel_size == (3, 3)


def test_parts_without_a_use_are_removed_and_all_others_are_trained():
    model = backbone(out_channels=24)
    model.keep_features(["res3", "res5"])
    assert list(model.projections) == ["res3", "res5"] and len(model.blocks) == 3
    maps = model.train()(torch.randn(2, 3, 64, 64))
    sum(x.square().sum() for x in maps.values()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_file_of_the_transformer_is_loaded_without_projections(tmp_path):
    trained = backbone(num_classes=3)
    theirs = {"register_token": trained.reg_token, "rope_embed.periods": torch.ones(2)}
    for name, value in trained.state_dict().items():
        if name.startswith(("blocks.", "patch_embed.")):
            name = re.sub(r"convs\.(\d)\.0\.", r"convs.\1.conv.", name)
            theirs[re.sub(r"convs\.(\d)\.1\.", r"convs.\1.norm.", name)] = value
    file = str(tmp_path / "ecvit.pth")
    torch.save({name: value.detach() for name, value in theirs.items()}, file)
    torch.manual_seed(1)
    model = ECViT(16, depth=3, num_heads=2, out_channels=24, pretrained=file)
    projections = {name: value.clone() for name, value in model.projections.state_dict().items()}
    load_pretrained(model)
    expected = trained.state_dict() | {f"projections.{name}": value for name, value in projections.items()}
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("changes", "message"), [
    (dict(depth=1), "depth=1, d_model=16: expected at least 2 blocks and 8 channels"),
    (dict(d_model=4), "depth=3, d_model=4: expected at least 2 blocks and 8 channels"),
    (dict(out_channels=0), "out_channels=0: expected at least 1, or None for d_model=16"),
    (dict(num_heads=3), "num_heads=3 must divide d_model=16"),
])  # fmt: skip
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        backbone(**changes)
