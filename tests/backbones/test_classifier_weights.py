"""A classifier's checkpoint initializes a backbone of its kind: the head is left out, which is reported."""

import pytest
import timm
import torch
import torchvision
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer

from vitkit.errors import CheckpointError
from vitkit.registry import BACKBONES
from vitkit.weights import load_weights

SWIN = dict(type="Swin", embed_dim=16, num_heads=[1, 2, 4, 8], depths=[1, 1, 1, 1], window=4)
LRNET = dict(type="LRNet", depth=26, pretrained=False)
VIT = dict(type="ViT", image_size=32, d_model=32, depth=2, num_heads=2)
TIME = dict(type="TimeSformer", attention="divided", image_size=32, d_model=32, depth=2, num_heads=2)


def vit_of_torchvision():
    return VisionTransformer(
        image_size=32, patch_size=16, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=128, num_classes=5
    )


def swin_of_timm():
    return timm.models.SwinTransformer(
        img_size=128, window_size=4, embed_dim=16, depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 8), num_classes=5
    )


def swin_of_torchvision():
    return torchvision.models.SwinTransformer(
        patch_size=[4, 4], embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 2, 4, 8], window_size=[4, 4], num_classes=5
    )


def ours(spec):
    return lambda: BACKBONES.build(spec, num_classes=5)


CASES = {
    "torchvision ResNet": (lambda: torchvision.models.resnet18(), "resnet18", ["fc"], []),
    "timm ResNet": (lambda: timm.create_model("resnet18"), "resnet18", ["fc"], []),
    "timm Swin": (swin_of_timm, SWIN, ["norm", "head"], ["norm0", "norm1", "norm2", "norm3"]),
    "torchvision Swin": (swin_of_torchvision, SWIN, ["norm", "head"], ["norm0", "norm1", "norm2", "norm3"]),
    "torchvision ViT": (vit_of_torchvision, VIT, ["head"], []),
    "TimeSformer": (ours(TIME), TIME, ["head"], []),
    "LR-Net": (ours(LRNET), LRNET, ["fc"], []),
    "timm's own": (lambda: timm.create_model("resnet18"), "timm/resnet18", ["fc"], []),
}


@pytest.mark.parametrize("case", CASES)
def test_classifier_head_is_left_out_and_norms_of_feature_maps_are_initialized(case):
    make, spec, left_out, new = CASES[case]
    theirs = make().state_dict()
    model = BACKBONES.build(spec)
    report = load_weights(model, theirs)
    assert {key.partition(".")[0] for key in report.left_out} == {*left_out}
    assert [part.rstrip(".") for part in report.new_parts] == new and not report.missing and not report.unexpected
    text = str(report)
    assert f"left out, because feature maps do not need it: {', '.join(left_out)}" in text
    if new:
        assert "not in it, so these are newly initialized: norm0, norm1, norm2, norm3" in text
    values = {value.flatten()[0].item() for value in theirs.values() if value.numel()}
    fresh = tuple(report.new_parts) or ("\0",)
    assert {p.flatten()[0].item() for k, p in model.state_dict().items() if not k.startswith(fresh)} <= values


def test_weights_of_stages_that_are_not_built_are_left_out():
    state = torchvision.models.resnet18().state_dict()
    report = load_weights(BACKBONES.build("resnet18", out_features=["res3", "res4"]), state)
    assert {key.split(".")[0] for key in report.left_out} == {"layer4", "fc"}
    swin = dict(SWIN, out_features=["res3"])
    report = load_weights(BACKBONES.build(swin), BACKBONES.build(SWIN, num_classes=5).state_dict())
    parts = {key.rsplit(".", 2)[0] for key in report.left_out if "downsample" in key}
    assert parts == {"layers.1.downsample", "layers.2.downsample"}


class WithHead(nn.Module):
    """A model of a backbone and another part."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone, self.head = BACKBONES.build(backbone), nn.Linear(2, 2)


WINDOWED = dict(type="WindowedViT", patch_size=16, d_model=16, depth=4, num_heads=2, image_size=64, global_blocks=[2])


@pytest.mark.parametrize(
    ("backbone", "used", "unused"),
    [
        (dict(type="ResNet", depth=18), ["res3", "res4"], "layer4."),
        (SWIN, ["res3"], "layers.2."),
        (LRNET, ["res3"], "layers.res4."),
        (dict(type="TimmBackbone", name="resnet18"), ["res3", "res4"], "net.layer4."),
        (dict(type="TimmBackbone", name="hgnetv2_b0"), ["res3", "res4"], "net.stages_3."),
        (WINDOWED, ["block2"], "blocks.3."),
    ],
    ids=lambda value: value.get("name", value["type"]) if isinstance(value, dict) else "",
)
def test_a_model_leaves_out_blocks_that_no_map_needs(backbone, used, unused):
    model = WithHead(backbone | dict(out_features=used))
    deeper = BACKBONES.build(backbone).state_dict().items()
    state = {f"backbone.{name}": value for name, value in deeper if not name.startswith("norm")} | model.state_dict()
    report = load_weights(model, state)
    assert report.left_out and not report.unexpected
    assert any(name.startswith(f"backbone.{unused}") for name in report.left_out)
    assert "left out, because feature maps do not need it: backbone." in str(report)
    with pytest.raises(CheckpointError, match="unexpected"):
        load_weights(model, state | {"backbone.other.weight": torch.zeros(1)})


def test_weights_of_a_deeper_variant_are_an_error():
    state = torchvision.models.resnet34(num_classes=5).state_dict()
    with pytest.raises(CheckpointError, match=r"unexpected \(\d+\): layer1\.2\.conv1\.weight"):
        load_weights(BACKBONES.build("resnet18"), state)


def test_missing_norm_of_a_feature_backbone_is_an_error():
    state = BACKBONES.build(SWIN).state_dict()
    del state["norm2.weight"]
    with pytest.raises(CheckpointError, match=r"missing \(1\): norm2\.weight"):
        load_weights(BACKBONES.build(SWIN), state)


def test_loading_no_weights_is_an_error_even_if_not_strict():
    state = {f"their.{key}": value for key, value in BACKBONES.build("resnet18").state_dict().items()}
    with pytest.raises(CheckpointError, match=r"does not fit ResNet: 0 of the model's \d+ entries are in it"):
        load_weights(BACKBONES.build("resnet18"), state, strict=False)
