"""Behavior that all families of backbones have in common."""

import pytest
import torch

from vitkit.errors import ConfigError
from vitkit.nn.activation_checkpointing import enable_activation_checkpointing
from vitkit.registry import BACKBONES

SWIN = dict(embed_dim=16, depths=[1, 2, 1, 1], num_heads=[1, 2, 2, 4], window=3)
SPECS = {
    "resnet_basic": dict(type="ResNet", depth=18, pretrained=False),
    "resnet": dict(type="ResNet", depth=50, pretrained=False),
    "nonlocal": dict(type="NonLocalResNet", depth=50, pretrained=False, positions={"res4": [1]}),
    "vit": dict(type="ViT", d_model=32, depth=3, num_heads=2, image_size=64),
    "windowed_vit": dict(
        type="WindowedViT", d_model=32, depth=4, num_heads=2, image_size=64, num_windows=2, global_blocks=[2]
    ),
    "spatial_adapter": dict(
        type="SpatialAdapter", vit=dict(type="ViT", d_model=32, depth=3, num_heads=2, image_size=64), blocks=[0, 1, 2]
    ),
    "ecvit": dict(type="ECViT", d_model=32, depth=3, num_heads=2),
    "swin": dict(type="Swin", **SWIN),
    "swinv2": dict(type="SwinV2", **SWIN),
    "mvit": dict(type="MViT", embed_dim=16, depths=[1, 1, 2, 1], num_heads=1, image_size=64),
    "mvitv1": dict(
        type="MViT",
        embed_dim=16,
        depths=[1, 1, 2, 1],
        num_heads=1,
        image_size=64,
        positions="absolute",
        pooling=dict(residual=False),
        expand_in_attention=False,
    ),
    "lrnet": dict(type="LRNet", depth=26, kernel_size=3),
    "clips": dict(type="ClipResNet", depth=50, positions={"res3": [1]}),
    "timesformer": dict(type="TimeSformer", d_model=32, depth=3, num_heads=2, image_size=64, num_frames=2),
}
WITHOUT_RES2 = ("vit", "windowed_vit", "spatial_adapter", "ecvit", "timesformer")
PYRAMIDS = [name for name in SPECS if name not in WITHOUT_RES2]


def images(name, batch=2):
    return torch.randn(batch, 3, 2, 36, 45) if name in ("clips", "timesformer") else torch.randn(batch, 3, 36, 45)


TIMMS = (dict(type="TimmBackbone", name="resnet10t"), dict(type="SmallHGNetV2", size="atto"))
TYPES = {spec["type"]: spec for spec in (*SPECS.values(), *TIMMS)}
COMMON = dict(frozen_stages=1, drop_path=0.1, pretrained="weights.pth")
STATISTICS = dict(pixel_mean=[0.5, 0.5, 0.5], pixel_std=[0.2, 0.2, 0.2])


@pytest.mark.parametrize("name", BACKBONES.names())
def test_every_backbone_can_be_built_by_its_spec_and_by_its_constructor_in_the_same_words(name):
    spec = TYPES.get(name, dict(type=name)) | COMMON | ({} if name == "TimmBackbone" else STATISTICS)
    constructor, arguments = BACKBONES.resolve(spec)
    with torch.device("cpu" if name in TYPES else "meta"):  # variants may be large
        torch.manual_seed(0)
        by_spec = BACKBONES.build(spec)
        torch.manual_seed(0)
        by_constructor = constructor(**arguments)
    assert repr(by_spec) == repr(by_constructor)
    assert by_spec.feature_info == by_constructor.feature_info
    assert (by_constructor.frozen_stages, by_constructor.pretrained) == (1, "weights.pth")
    if name != "TimmBackbone":
        assert by_spec.pixel_mean == by_constructor.pixel_mean == (0.5, 0.5, 0.5)
    parameters = dict(by_constructor.named_parameters())
    for key, parameter in by_spec.named_parameters():
        assert parameter.shape == parameters[key].shape and parameter.requires_grad == parameters[key].requires_grad
        assert parameter.is_meta or torch.equal(parameter, parameters[key]), key
    assert not all(parameter.requires_grad for parameter in parameters.values())


@pytest.mark.parametrize("name", SPECS)
def test_feature_info_is_that_of_the_maps(name):
    """Models check it for backbones of timm and of users only."""
    model = BACKBONES.build(SPECS[name]).eval()
    size = (64, 128)
    with torch.no_grad():
        maps = model(torch.zeros(1, 3, *(2,) * (name in ("clips", "timesformer")), *size))
    expected = [
        (feature, info.channels, *(side // info.stride for side in size))
        for feature, info in model.feature_info.items()
    ]
    assert [(feature, x.shape[1], *x.shape[-2:]) for feature, x in maps.items()] == expected
    strides = [info.stride for info in model.feature_info.values()]
    assert strides == sorted(strides)


@pytest.mark.parametrize("name", PYRAMIDS)
def test_backbone_with_fewer_output_maps_has_no_parameter_without_a_gradient(name):
    torch.manual_seed(0)
    model, x = BACKBONES.build(SPECS[name]).eval(), images(name)
    before = model(x)
    model.keep_features(["res2", "res3"])
    assert list(model.feature_info) == ["res2", "res3"]
    after = model(x)
    assert list(after) == ["res2", "res3"]
    for feature, value in after.items():
        torch.testing.assert_close(value, before[feature])
    sum(value.square().mean() for value in after.values()).backward()
    assert [key for key, p in model.named_parameters() if p.grad is None] == []
    made_so = BACKBONES.build(dict(SPECS[name], out_features=["res2", "res3"]))
    assert model.state_dict().keys() == made_so.state_dict().keys()


@pytest.mark.parametrize("name", ["resnet_basic", "nonlocal", "lrnet", "clips", "TimmBackbone"])
def test_batch_norms_count_a_recomputed_batch_only_once(name):
    torch.manual_seed(0)
    spec = SPECS.get(name) or TYPES[name]
    model, x = BACKBONES.build(dict(spec, out_features=["res2", "res3"])).train(), images(name)
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    states = []
    for enabled in (False, True):
        model.load_state_dict(initial)
        enable_activation_checkpointing(model, enabled)
        sum(value.square().mean() for value in model(x).values()).backward()
        states.append({key: value.clone() for key, value in model.state_dict().items()})
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, msg=key)
    assert any(key.endswith("running_mean") and not torch.equal(v, initial[key]) for key, v in states[0].items())


@pytest.mark.parametrize("name", SPECS)
def test_drop_path_acts_only_in_training(name):
    torch.manual_seed(0)
    model, x = BACKBONES.build(dict(SPECS[name], drop_path=0.9)), images(name)
    deepest = list(model.feature_info)[-1]
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.momentum = 0.0  # so that training leaves nothing behind
            torch.nn.init.ones_(module.weight)
        elif isinstance(module, torch.nn.LayerNorm):
            torch.nn.init.ones_(module.weight)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x)[deepest], model(x)[deepest], rtol=0, atol=0)
        model.train()
        assert not torch.equal(model(x)[deepest], model(x)[deepest])
        assert model(x)[deepest].isfinite().all()


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(num_classes=0), "num_classes=0: expected at least 1, or None for features"),
        (dict(drop_path=1.0), "drop_path=1.0: expected at least 0 and below 1"),
        (dict(drop_path=-0.1), "drop_path=-0.1: expected at least 0"),
        (dict(frozen_stages=-1), "frozen_stages=-1: expected 0 to"),
        (dict(out_features=[]), "out_features is empty"),
    ],
)
def test_invalid_numbers_are_named(name, arguments, message):
    with torch.device("meta"), pytest.raises(ConfigError, match=message):
        BACKBONES.build({**SPECS[name], **arguments})
