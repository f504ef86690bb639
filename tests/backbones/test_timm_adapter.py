import copy

import pytest
import timm
import torch
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import nn

from vitkit.backbones.timm_adapter import TimmBackbone
from vitkit.config import load_config
from vitkit.engine.build import build_model
from vitkit.engine.optimizers import layer_factors
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.nn.activation_checkpointing import enable_activation_checkpointing
from vitkit.registry import BACKBONES
from vitkit.weights import load_pretrained, load_weights

CONV, SWIN, VIT = "convnext_atto", "swin_tiny_patch4_window7_224", "vit_tiny_patch16_224"


def images(*size, batch=1):
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", [CONV, SWIN, VIT, "resnet18", "mvitv2_tiny", "efficientnet_lite0"])
def test_maps_have_the_promised_shapes_at_odd_sizes(name):
    model = BACKBONES.build(f"timm/{name}").eval()
    size = (65, 97)
    with torch.no_grad():
        features = model(images(*size))
    assert list(features) == list(model.feature_info)
    assert list(features) == (["res4"] if name == VIT else ["res2", "res3", "res4", "res5"])
    for key, (channels, stride) in model.feature_info.items():
        assert features[key].shape == (1, channels, -(-size[0] // stride), -(-size[1] // stride)), key
        assert 2 ** int(key[3:]) == stride


@pytest.mark.parametrize(
    ("name", "feature", "theirs"),
    [
        (CONV, "res3", dict(out_indices=(1,))),
        ("resnet18", "res5", dict(out_indices=(4,))),
        (SWIN, "res4", dict(out_indices=(2,), strict_img_size=False)),
        (VIT, "res4", dict(out_indices=(11,), dynamic_img_size=True)),
    ],
)
def test_maps_equal_timms_with_channels_first(name, feature, theirs):
    theirs = timm.create_model(name, features_only=True, **theirs).eval()
    ours = BACKBONES.build(f"timm/{name}", out_features=[feature]).eval()
    ours.net.load_state_dict(theirs.state_dict())
    x = images(64, 96)
    with torch.no_grad():
        (expected,) = theirs(x)
        if name == SWIN:
            expected = expected.permute(0, 3, 1, 2)
        torch.testing.assert_close(ours(x)[feature], expected)


def test_layers_deeper_than_the_features_are_dropped():
    model = BACKBONES.build(f"timm/{CONV}", out_features=["res2", "res3"])
    assert list(model.feature_info) == ["res2", "res3"]
    model(images(64, 64))["res3"].square().mean().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "res2" not in name)
    assert sum(p.numel() for p in model.parameters()) < 200_000


@pytest.mark.parametrize("name", [CONV, SWIN, "mvitv2_tiny"])
def test_a_model_may_keep_fewer_features(name):
    model = BACKBONES.build(f"timm/{name}", frozen_stages=1).eval()
    x = images(64, 64)
    before = model(x)["res3"]
    model.keep_features(["res3"])
    assert list(model.feature_info) == ["res3"]
    torch.testing.assert_close(model(x)["res3"], before)
    model.train()(x)["res3"].square().mean().backward()
    trained = {key for key, p in model.named_parameters() if p.grad is not None}
    assert trained == {key for key, p in model.named_parameters() if p.requires_grad}
    assert 0 < len(trained) < len(list(model.parameters()))


def test_stride_2_is_returned_on_request():
    model = BACKBONES.build("timm/resnet18", out_features=["res1", "res2"]).eval()
    assert [x.shape[-2:] for x in model(images(33, 40)).values()] == [(17, 20), (9, 10)]


def test_num_classes_makes_timms_classifier():
    model = BACKBONES.build(f"timm/{CONV}", num_classes=7).eval()
    theirs = timm.create_model(CONV, num_classes=7).eval()
    theirs.load_state_dict(model.net.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(images(64, 64)), theirs(images(64, 64)))
    assert model.class_head == ("net.head.fc.",)


@pytest.mark.parametrize("name", [CONV, SWIN, VIT, "mvitv2_tiny", "resnet18"])
def test_weights_of_the_whole_timm_model_load(name):
    theirs = timm.create_model(name)
    ours = BACKBONES.build(f"timm/{name}")
    report = load_weights(ours, theirs.state_dict(), strict=False)
    assert report.converter is None and not report.missing
    # Only the classifier and the norm before it are left.
    assert all(key.startswith(("head.", "norm.", "fc.")) for key in report.unexpected)
    values = {p.data.flatten()[0].item() for p in theirs.parameters()}
    assert {p.data.flatten()[0].item() for p in ours.parameters()} <= values


def test_pretrained_true_asks_timm_for_the_same_name(monkeypatch):
    theirs = timm.create_model(CONV)
    asked = []
    create = timm.create_model

    def fake(name, pretrained=False, **options):
        asked.append(name) if pretrained else None
        return theirs if pretrained else create(name, **options)

    monkeypatch.setattr(timm, "create_model", fake)
    for options in ({}, dict(num_classes=1000), dict(num_classes=4)):
        model = BACKBONES.build(f"timm/{CONV}.d2_in1k", pretrained=True, **options)
        assert load_pretrained(model) == f"timm/{CONV}.d2_in1k"
        ours = {p.data.flatten()[0].item() for n, p in model.named_parameters() if not n.startswith("net.head.fc")}
        assert ours <= {p.data.flatten()[0].item() for p in theirs.parameters()}
    assert asked == [f"{CONV}.d2_in1k"] * 3


def test_unavailable_weights_name_a_remedy(monkeypatch):
    create = timm.create_model

    def offline(name, pretrained=False, **options):
        if pretrained:
            raise OSError("no route to the hub")
        return create(name, **options)

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(CheckpointError, match=r"cannot be downloaded \(no route to the hub\)"):
        load_pretrained(BACKBONES.build(f"timm/{CONV}", pretrained=True))


@pytest.mark.parametrize(
    ("name", "stages", "frozen"),
    [
        ("resnet18", 5, ("conv1", "bn1", "layer1")),
        (VIT, 13, ("model.patch_embed", "model.pos", "model.cls", "model.blocks.0.")),
    ],
)
def test_frozen_stages_get_no_gradient_and_keep_their_statistics(name, stages, frozen):
    model = BACKBONES.build(f"timm/{name}", frozen_stages=1).train()
    assert len(model.stages()) == stages
    before = {key: value.clone() for key, value in model.state_dict().items()}
    list(model(images(64, 64, batch=2)).values())[-1].square().mean().backward()
    without = {key for key, p in model.named_parameters() if p.grad is None}
    assert without == {key for key, _ in model.named_parameters() if key.removeprefix("net.").startswith(frozen)}
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert not any(key.removeprefix("net.").startswith(frozen) for key in moved)
    assert moved or name == VIT


@pytest.mark.parametrize("name", [CONV, "hgnetv2_b0"])  # the latter's norms have kernels of their own
def test_recomputing_activations_keeps_the_gradients_and_the_statistics(name):
    model = BACKBONES.build(f"timm/{name}").train()
    initial, grads, statistics = copy.deepcopy(model.state_dict()), [], []
    for enabled in (False, True):
        assert enable_activation_checkpointing(model, enabled) == 1
        model.load_state_dict(initial)
        model.zero_grad()
        model(images(64, 64, batch=2))["res5"].square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
        statistics.append([buffer.clone() for buffer in model.buffers()])
    assert model.activation_checkpointing
    for a, b in zip(grads[0] + statistics[0], grads[1] + statistics[1]):
        torch.testing.assert_close(a, b)


def test_what_timm_lacks_for_a_model_is_an_error_only_if_it_is_needed():
    name = "pit_ti_224"
    model = BACKBONES.build(f"timm/{name}", num_classes=2).train().eval()
    assert model(images(224, 224)).shape == (1, 2)
    with pytest.raises(ConfigError, match=f"timm does not divide {name} into groups of layers"):
        BACKBONES.build(f"timm/{name}", num_classes=2, frozen_stages=1)
    with pytest.raises(ConfigError, match=f"timm does not divide {name} into groups of layers"):
        model.block_names()
    with pytest.raises(ConfigError, match=f"timm's {name} cannot recompute its activations"):
        enable_activation_checkpointing(model)


def test_a_detector_takes_a_timm_backbone_by_name(tmp_path):
    spec = dict(
        type="DETR",
        num_queries=4,
        backbone=f"timm/{CONV}",
        neck=dict(type="ChannelProjection", out_channels=8),
        head=dict(type="DETRHead", d_model=8, num_heads=2, d_ffn=8, num_encoder_layers=1, num_decoder_layers=1),
    )
    assert build_model(spec)(images(65, 70))["pred_boxes"].shape == (1, 4, 4)


def test_configs_name_timms_models_and_mistakes_are_found_early():
    cfg = load_config("configs/quickstart/detr.py", [f"model.backbone=timm/{CONV}", "model.backbone.drop_path=0.1"])
    assert cfg["model"]["backbone"] == {"type": f"timm/{CONV}", "drop_path": 0.1}
    with pytest.raises(
        ConfigError, match=r"model\.backbone: timm .* has no model 'convnext_ato'. Did you mean 'convnext_atto'"
    ):
        load_config("configs/quickstart/detr.py", ["model.backbone=timm/convnext_ato"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(name="convnext_tinny"), "no model 'convnext_tinny'. Did you mean 'convnext_tiny'"),
        (
            dict(name="convnext_atto.d3_in1k"),
            "no weights 'convnext_atto.d3_in1k'. Did you mean 'convnext_atto.d2_in1k'",
        ),
        (dict(name=CONV, out_features=["res6"]), "out_features: unknown feature 'res6'. Did you mean 'res5'"),
        (dict(name=CONV, out_features=[]), "out_features is empty"),
        (dict(name=CONV, num_classes=3, out_features=["res5"]), "returns no features"),
        (dict(name=CONV, frozen_stages=9), "frozen_stages=9: expected 0 to 4"),
        (dict(name="vgg11", drop_path=0.1), "unexpected keyword argument 'drop_path_rate'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        TimmBackbone(**arguments)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 1, 64, 64), r"\(1, 1, 64, 64\): expected \(B, 3, H, W\)"),
        ((1, 3, 31, 64), "31 x 64 pixels: expected at least 32 x 32"),
    ],
)
def test_wrong_images_are_named(shape, message):
    with pytest.raises(DataError, match=message):
        TimmBackbone(CONV)(torch.zeros(shape))


DINOV2 = "vit_small_patch14_dinov2"


def test_patch_embeddings_of_another_size_are_resampled_as_in_timm(monkeypatch):
    theirs = timm.create_model(DINOV2, img_size=126)  # 9 x 9 patches of 14 pixels, and a class token
    asked_for = timm.create_model(DINOV2, patch_size=16)
    expected = checkpoint_filter_fn(theirs.state_dict(), asked_for)
    model = BACKBONES.build(f"timm/{DINOV2}", patch_size=16)
    assert model.feature_info == {"res4": (384, 16)}
    load_weights(model, theirs.state_dict(), strict=False)
    ours = model.state_dict()
    for name in ("patch_embed.proj.weight", "pos_embed", "cls_token", "blocks.3.mlp.fc1.weight"):
        torch.testing.assert_close(ours[f"net.model.{name}"], expected[name], msg=name)
    with torch.no_grad():
        assert model.eval()(images(70, 90))["res4"].shape == (1, 384, 5, 6)


def test_patch_size_of_a_network_without_patches_is_an_error():
    with pytest.raises(ConfigError, match="patch_size"):
        BACKBONES.build("timm/resnet18", patch_size=16)


def test_pixels_are_normalized_as_the_weights_expect():
    assert BACKBONES.build(f"timm/{VIT}").pixel_mean == (0.5, 0.5, 0.5)
    assert BACKBONES.build("timm/resnet18").pixel_mean == (0.485, 0.456, 0.406)


@pytest.mark.parametrize(
    ("name", "first", "count"), [(VIT, "net.model.blocks.0", 12), (CONV, "net.stages_0.blocks.0", 12)]
)
def test_each_block_has_its_own_layer_decay_factor(name, first, count):
    """Modules between two blocks, such as a ConvNeXt's downsampling, get the factor of the lower block."""
    model = nn.Module()
    model.backbone = BACKBONES.build(f"timm/{name}")
    model.head = nn.Linear(2, 2)
    blocks = model.backbone.block_names()
    assert blocks[0] == first and len(blocks) == count
    factors = layer_factors(model, 0.5)
    assert factors.keys() == {name for name, _ in model.named_parameters()}
    assert factors["head.weight"] == 1
    for depth, block in enumerate(blocks, start=1):
        inside = {factor for name, factor in factors.items() if name.startswith(f"backbone.{block}.")}
        assert inside == {0.5 ** (count + 1 - depth)}, block
    assert factors[next(name for name, _ in model.named_parameters())] == 0.5 ** (count + 1)


@pytest.mark.parametrize("name", ["hiera_tiny_224", "maxvit_tiny_rw_224"])
def test_size_that_a_model_is_not_built_for_is_named(name):
    backbone = TimmBackbone(name).eval()
    with torch.no_grad():
        assert backbone(torch.zeros(1, 3, 224, 224))["res5"].shape[-2:] == (7, 7)
        with pytest.raises(DataError, match=f"{name} does not take images of 256x320 .* built for 224x224 only"):
            backbone(torch.zeros(1, 3, 256, 320))


def test_images_of_another_floating_type_are_not_taken_for_a_wrong_size():
    with pytest.raises(RuntimeError, match="type"):
        TimmBackbone("resnet18").double()(torch.zeros(1, 3, 64, 64))
