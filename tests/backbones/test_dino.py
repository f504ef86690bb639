"""What DINOv2 and DINOv3 change in a ViT, against timm's models with random weights."""

import re
from argparse import Namespace

import pytest
import timm
import torch
from helpers.weights import assert_same_weights
from torch import nn

from vitkit.backbones.vit_blocks import Attention
from vitkit.engine.build import build_model
from vitkit.errors import CheckpointError, ConfigError
from vitkit.nn.attention import AttentionRecorder
from vitkit.registry import BACKBONES
from vitkit.weights import load_weights
from vitkit.weights.contents import state_dict_of

build = BACKBONES.build
SMALL = dict(d_model=48, depth=2, num_heads=4)
THEIRS = dict(embed_dim=48, depth=2, num_heads=4, num_classes=0)


def timm_model(name, **options):
    """Return timm's model with random weights, in which a forgotten entry would be noticed."""
    torch.manual_seed(0)
    model = timm.create_model(name, **THEIRS, **options)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3 if p.ndim < 3 else 1.0)
    return model.eval()


def images(height, width):
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


def assert_same_map(ours, theirs, x):
    with torch.no_grad():
        (got,) = ours.eval()(x).values()
        expected = theirs.forward_features(x)[:, theirs.num_prefix_tokens :]
    assert expected.std() > 0.1
    torch.testing.assert_close(got.flatten(2).mT, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("prefix", ["backbone.", "module.backbone."])
def test_teacher_of_a_dino_training_checkpoint_is_loaded(prefix, tmp_path):
    theirs = timm_model("vit_small_patch16_224.dino", img_size=64)
    head = {f"{prefix.removesuffix('backbone.')}head.mlp.0.weight": torch.ones(8, 48)}
    state = {f"{prefix}{key}": value for key, value in theirs.state_dict().items()}
    student = {key: torch.zeros_like(value) for key, value in state.items()}
    checkpoint = dict(student=student, teacher=state | head, epoch=3, args=Namespace(arch="vit_small", patch_size=16))
    torch.save(checkpoint, tmp_path / "checkpoint.pth")
    ours = build("vit_small_patch16_dino", **SMALL, image_size=64)
    report = load_weights(ours, tmp_path / "checkpoint.pth")
    assert not report.missing and not report.unexpected
    assert_same_map(ours, theirs, images(64, 64))

    features = build_model(
        dict(type="Classifier", backbone=dict(type="vit_small_patch16_dino", **SMALL, image_size=64))
    )
    report = load_weights(features, tmp_path / "checkpoint.pth", strict=False)
    assert report.missing == ["backbone.head.weight", "backbone.head.bias"] and not report.unexpected
    assert torch.equal(features.backbone.cls_token, state[f"{prefix}cls_token"])


def test_chunked_blocks_of_a_dinov2_training_checkpoint_are_loaded(tmp_path):
    settings = dict(embed_dim=48, depth=4, num_heads=4, num_classes=0)
    theirs = timm.create_model("vit_small_patch14_reg4_dinov2", img_size=56, **settings)
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.3 if p.ndim < 3 else 1.0)
    # Two chunks of two blocks, which keep their number in the whole network.
    state = {
        re.sub(r"^blocks\.(\d)", lambda match: f"blocks.{int(match[1]) // 2}.{match[1]}", key): value
        for key, value in theirs.state_dict().items()
    }
    state["register_tokens"], state["mask_token"] = state.pop("reg_token"), torch.zeros(1, 48)
    assert "blocks.1.3.norm1.weight" in state
    teacher = {f"backbone.{key}": value for key, value in state.items()} | {"dino_head.mlp.0.weight": torch.ones(8, 48)}
    torch.save({"teacher": teacher}, tmp_path / "teacher_checkpoint.pth")
    ours = build("vit_small_patch14_reg4_dinov2", d_model=48, depth=4, num_heads=4, image_size=56)
    report = load_weights(ours, tmp_path / "teacher_checkpoint.pth")
    assert report.converter == "facebookresearch/dinov2 training" and not report.missing and not report.unexpected
    assert_same_map(ours, theirs.eval(), images(56, 56))


def test_teacher_of_another_model_keeps_its_names():
    state = {"backbone.conv1.weight": torch.ones(1), "head.weight": torch.ones(1)}
    assert state_dict_of({"teacher": state}, "file").keys() == state.keys()


@pytest.mark.parametrize("name", ["vit_small_patch14_dinov2", "vit_small_patch14_reg4_dinov2"])
def test_dinov2_weights_load_by_name_and_reproduce_timm_features(name):
    theirs, ours = timm_model(name, img_size=56), build(name, **SMALL, image_size=56)
    report = load_weights(ours, theirs.state_dict())
    assert report.converter is None and not report.missing and not report.unexpected
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    assert_same_map(ours, theirs, images(56, 56))


def test_gated_mlp_of_the_giant_variant_reproduces_timm_features():
    theirs = timm_model("vit_giant_patch14_reg4_dinov2", img_size=28)
    ours = build("vit_giant_patch14_reg4_dinov2", **SMALL, image_size=28)
    load_weights(ours, theirs.state_dict())
    assert_same_map(ours, theirs, images(28, 28))


@pytest.mark.parametrize("size", [(64, 64), (48, 80)])
@pytest.mark.parametrize("suffix", ["", "_qkvb"])
@pytest.mark.parametrize("variant", ["small", "small_plus"])
def test_dinov3_weights_load_by_name_and_reproduce_timm_features(variant, suffix, size):
    name = f"vit_{variant}_patch16_dinov3{suffix}"
    theirs, ours = timm_model(name), build(name, **SMALL)
    report = load_weights(ours, theirs.state_dict())
    assert report.converter is None and not report.missing and not report.unexpected
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    assert_same_map(ours, theirs, images(*size))


VARIANTS = [
    "vit_small_patch14_dinov2",
    "vit_base_patch14_reg4_dinov2",
    "vit_giant_patch14_reg4_dinov2",
    "vit_small_patch16_dinov3",
    "vit_small_plus_patch16_dinov3",
    "vit_huge_plus_patch16_dinov3",
    "vit_7b_patch16_dinov3",
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_have_the_parameter_counts_and_weight_names_of_timm(variant):
    with torch.device("meta"):
        ours, theirs = build(variant), timm.create_model(variant, num_classes=0)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    name = ours._url().removeprefix("timm/")
    assert name.partition(".")[0] == variant and timm.is_model_pretrained(name)


def test_official_parameter_names_load():
    torch.manual_seed(0)
    model = build("vit_small_plus_patch16_dinov3_qkvb", **SMALL)
    for p in model.parameters():
        nn.init.normal_(p)
    state = {key.replace("reg_token", "storage_tokens"): value for key, value in model.state_dict().items()}
    state |= {"mask_token": torch.zeros(1, 48), "rope_embed.periods": torch.ones(3)}
    for i in range(2):
        attention, mlp = f"blocks.{i}.attn.", f"blocks.{i}.mlp."
        q, v = state.pop(f"{attention}q_bias"), state.pop(f"{attention}v_bias")
        state[f"{attention}qkv.bias"] = torch.cat((q, torch.full_like(q, 7), v))  # masked there
        state[f"{attention}qkv.bias_mask"] = torch.ones(144)
        for leaf in ("weight", "bias"):
            state[f"{mlp}w1.{leaf}"], state[f"{mlp}w2.{leaf}"] = state.pop(f"{mlp}fc1.{leaf}").chunk(2)
            state[f"{mlp}w3.{leaf}"] = state.pop(f"{mlp}fc2.{leaf}")
    other = build("vit_small_plus_patch16_dinov3_qkvb", **SMALL)
    load_weights(other, state)
    assert_same_weights(other, model)


def test_missing_biases_are_zero_and_only_zero_biases_are_dropped():
    without, with_biases = build("vit_small_patch16_dinov3", **SMALL), build("vit_small_patch16_dinov3_qkvb", **SMALL)
    load_weights(with_biases, without.state_dict())
    assert not with_biases.blocks[0].attn.q_bias.any()
    load_weights(without, with_biases.state_dict())
    nn.init.ones_(with_biases.blocks[1].attn.v_bias)
    with pytest.raises(CheckpointError, match=r"unexpected \(2\): blocks\.1\.attn\.q_bias, blocks\.1\.attn\.v_bias"):
        load_weights(without, with_biases.state_dict())


@pytest.mark.parametrize("shape", [(6,), (2, 72), ()])
@pytest.mark.parametrize("name", ["qkv.bias", "q_bias"])
def test_biases_of_another_shape_are_an_error(name, shape):
    model = build("vit_small_patch16_dinov3_qkvb", **SMALL)
    key = f"blocks.1.attn.{name}"
    with pytest.raises(CheckpointError, match=key.replace(".", r"\.")):
        load_weights(model, model.state_dict() | {key: torch.zeros(shape)})


def test_patch_embeddings_are_resampled_as_in_timm():
    theirs = timm_model("vit_small_patch14_reg4_dinov2", img_size=56)
    ours = build("vit_small_patch14_reg4_dinov2", **SMALL, image_size=64, patch_size=16)
    load_weights(ours, theirs.state_dict())
    theirs.set_input_size(img_size=64, patch_size=16)
    assert ours.patch_embed.proj.weight.shape[-2:] == (16, 16)
    assert_same_map(ours, theirs, images(64, 64))


def test_class_token_position_is_added_to_a_class_token_without_one():
    model, other = (build("ViT", **SMALL, image_size=32, positions=p) for p in ("all", "patches"))
    load_weights(other, model.state_dict())
    torch.testing.assert_close(other.cls_token, model.cls_token + model.pos_embed[:, :1])
    torch.testing.assert_close(other.pos_embed, model.pos_embed[:, 1:])


def test_coordinates_are_rescaled_only_in_training():
    model = build("vit_small_patch16_dinov3", **SMALL, rotary_rescale=2.0)
    plain = model.eval().rotations((3, 4))
    assert torch.equal(plain, model.rotations((3, 4)))
    first, second = model.train().rotations((3, 4)), model.rotations((3, 4))
    assert not torch.equal(first, second)
    angles = [torch.atan2(*rotations.flip(0))[:, -1] for rotations in (plain, first)]  # slow ones, below half a turn
    ratio = angles[1] / angles[0]
    assert ratio.std() < 1e-4 and 0.5 <= ratio[0] <= 2


def test_recorded_attention_includes_rotations_and_bias():
    torch.manual_seed(0)
    attention, x = Attention(8, 2), torch.randn(1, 5, 8)
    bias = torch.zeros(1, 1, 5, 5)
    bias[..., 1] = -1e9
    with AttentionRecorder(nn.ModuleDict({"attn": attention})) as maps:
        attention(x, (2, 2), bias=bias)
    (weights,) = maps["attn"]
    assert weights.shape == (1, 2, 5, 5) and weights[..., 1].max() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(mlp="glu"), "mlp='glu': unknown. Did you mean 'gelu'"),
        (dict(blocks=dict(qkv_bias="kv")), "qkv_bias='kv': expected 'qkv', 'qv' or 'none'"),
        (dict(positions="rotatory"), "positions='rotatory': unknown. Did you mean 'rotary'"),
        (dict(rotary_rescale=0.5), "rotary_rescale=0.5: expected at least 1"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build("ViT", **SMALL, image_size=32, **arguments)
