"""Weights of others in a ViT: timm's, torchvision's, the original's arrays, DINOv2's, MAE's; and their URLs."""

import numpy as np
import pytest
import timm
import torch
import torchvision
from helpers.vit_models import SMALL, build, images, randomize
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn import functional

from vitkit.errors import CheckpointError, ConfigError
from vitkit.registry import BACKBONES
from vitkit.weights import load_pretrained, load_weights

THEIRS = dict(img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=2, num_classes=5)


def assert_same(ours, theirs, x, **tolerance):
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), **{"atol": 1e-4, "rtol": 1e-4, **tolerance})


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        (dict(classifier=dict(pooling="mean_norm")), dict(global_pool="avg")),
        (
            dict(classifier=dict(pooling="mean"), class_token=False),
            dict(global_pool="avg", class_token=False, fc_norm=False),
        ),
        (dict(num_registers=3), dict(reg_tokens=3)),
        (dict(num_registers=3), dict(reg_tokens=3, no_embed_class=True)),
        ({}, dict(no_embed_class=True)),
        ({}, dict(init_values=0.1)),
    ],
)
def test_timm_weights_reproduce_timm_logits(ours, theirs):
    theirs = randomize(VisionTransformer(**THEIRS, **theirs))
    ours = build("ViT", **SMALL, num_classes=5, **ours).eval()
    report = load_weights(ours, theirs.state_dict())
    assert not report.missing and not report.unexpected
    assert_same(ours, theirs, images(32, 32))


def test_distilled_deit_weights_give_the_mean_of_both_heads():
    theirs = randomize(timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=2, num_classes=5))
    ours = build("ViT", d_model=192, depth=2, num_heads=3, image_size=32, distilled=True, num_classes=5).eval()
    load_weights(ours, {"model": theirs.state_dict()})
    assert_same(ours, theirs, images(32, 32), atol=1e-3)


@pytest.mark.parametrize("size", [(32, 32), (45, 70), (8, 33)])
def test_any_image_size_equals_timms_dynamic_size(size):
    theirs = randomize(VisionTransformer(**THEIRS, dynamic_img_size=True, dynamic_img_pad=True))
    classifier, dense = build("ViT", **SMALL, num_classes=5).eval(), build("ViT", **SMALL).eval()
    load_weights(classifier, theirs.state_dict())
    load_weights(dense, theirs.state_dict(), strict=False)
    x = images(*size)
    assert_same(classifier, theirs, x)
    with torch.no_grad():
        (theirs_map,) = theirs.forward_intermediates(x, indices=[2], norm=True, intermediates_only=True)
        torch.testing.assert_close(dense(x)["res3"], theirs_map, atol=1e-4, rtol=1e-4)


def torchvision_vit():
    return randomize(
        torchvision.models.VisionTransformer(
            image_size=32, patch_size=8, num_layers=3, num_heads=2, hidden_dim=24, mlp_dim=96, num_classes=5
        )
    )


@pytest.mark.parametrize("mlp_names", [("0", "3"), ("linear_1", "linear_2")])
def test_torchvision_weights_reproduce_torchvision_logits(mlp_names):
    theirs = torchvision_vit()
    state = {
        key.replace(".mlp.0.", f".mlp.{mlp_names[0]}.").replace(".mlp.3.", f".mlp.{mlp_names[1]}."): value
        for key, value in theirs.state_dict().items()
    }
    ours = build("ViT", **SMALL, num_classes=5).eval()
    assert load_weights(ours, state).converter == "torchvision ViT"
    assert_same(ours, theirs, images(32, 32))


@pytest.mark.parametrize("prefix", ["backbone.", "model.backbone."])
def test_torchvision_names_load_with_any_prefix(prefix):
    theirs = torchvision_vit()
    ours = build("ViT", **SMALL, num_classes=5).eval()
    owner = ours
    for name in reversed(prefix.split(".")[:-1]):
        owner = nn.ModuleDict({name: owner})
    load_weights(owner, {prefix + key: value for key, value in theirs.state_dict().items()})
    assert_same(ours, theirs, images(32, 32))


def jax_arrays(*, width=24, heads=2, depth=3, tokens=17, new_names=False, stacked=False):
    """Random arrays under the names and shapes of the original JAX code."""
    generator = np.random.default_rng(0)

    def new(*shape):
        return generator.normal(size=shape, scale=0.3).astype(np.float32)

    attention, mlp, norm2 = ("MultiHeadDotProductAttention_0", "MlpBlock_0", "LayerNorm_1")
    if not new_names:
        attention, mlp, norm2 = ("MultiHeadDotProductAttention_1", "MlpBlock_3", "LayerNorm_2")
    arrays = {
        "cls": new(1, 1, width),
        "embedding/kernel": new(8, 8, 3, width),
        "embedding/bias": new(width),
        "pos_embedding" if new_names else "Transformer/posembed_input/pos_embedding": new(1, tokens, width),
        "Transformer/encoder_norm/scale": new(width),
        "Transformer/encoder_norm/bias": new(width),
        "head/kernel": new(width, 5),
        "head/bias": new(5),
    }
    for i in range(depth):
        block = {}
        for norm in ("LayerNorm_0", norm2):
            block |= {f"{norm}/scale": new(width), f"{norm}/bias": new(width)}
        for name in ("query", "key", "value"):
            block |= {f"{attention}/{name}/kernel": new(width, heads, width // heads)}
            block |= {f"{attention}/{name}/bias": new(heads, width // heads)}
        block |= {f"{attention}/out/kernel": new(heads, width // heads, width), f"{attention}/out/bias": new(width)}
        block |= {f"{mlp}/Dense_0/kernel": new(width, 4 * width), f"{mlp}/Dense_0/bias": new(4 * width)}
        block |= {f"{mlp}/Dense_1/kernel": new(4 * width, width), f"{mlp}/Dense_1/bias": new(width)}
        arrays |= {f"Transformer/encoderblock_{i}/{name}": value for name, value in block.items()}
    if stacked:
        names = [key.split("/", 2)[2] for key in arrays if key.startswith("Transformer/encoderblock_0/")]
        for name in names:
            parts = [arrays.pop(f"Transformer/encoderblock_{i}/{name}") for i in range(depth)]
            arrays[f"Transformer/encoderblock/{name}"] = np.stack(parts)
    return arrays


@pytest.mark.parametrize(
    ("prefix", "options"),
    [("", {}), ("opt/target/", {}), ("params/", dict(new_names=True)), ("params/", dict(new_names=True, stacked=True))],
)
def test_original_npz_files_load_as_in_timm(tmp_path, prefix, options):
    arrays = jax_arrays(**options)
    # timm reads the files of one naming scheme without stacks, below the prefix.
    readable = jax_arrays(new_names="new_names" in options)
    path, readable_path = tmp_path / "theirs.npz", tmp_path / "readable.npz"
    np.savez(path, **{prefix + key: value for key, value in arrays.items()})
    timm_prefix = "params/" if "new_names" in options else prefix
    np.savez(readable_path, **{timm_prefix + key: value for key, value in readable.items()})
    theirs = VisionTransformer(**THEIRS).eval()
    theirs.load_pretrained(str(readable_path))
    ours = build("ViT", **SMALL, num_classes=5).eval()
    report = load_weights(ours, path)
    assert report.converter == "google-research/vision_transformer"
    assert_same(ours, theirs, images(32, 32))


def test_arrays_in_bfloat16_are_read(tmp_path):
    arrays = jax_arrays()
    arrays["cls"] = torch.ones(1, 1, 24, dtype=torch.bfloat16).view(torch.int16).numpy().view("V2")
    np.savez(tmp_path / "w.npz", **arrays)
    model = build("ViT", **SMALL, num_classes=5)
    load_weights(model, tmp_path / "w.npz")
    assert torch.equal(model.cls_token, torch.ones(1, 1, 24))


def test_pickled_or_damaged_arrays_are_refused(tmp_path):
    np.savez(tmp_path / "pickled.npz", a=np.array([{}], dtype=object))
    (tmp_path / "damaged.npz").write_bytes(b"PK\x03\x04 and no more")
    for name in ("pickled.npz", "damaged.npz"):
        with pytest.raises(CheckpointError, match=rf"{name}: damaged, or contains more than numbers"):
            load_weights(build("ViT", **SMALL), tmp_path / name)


def test_positions_for_another_image_size_are_resampled_as_in_timm():
    theirs = randomize(VisionTransformer(**THEIRS))
    model = build("ViT", **{**SMALL, "image_size": (40, 56)}, num_classes=5)
    load_weights(model, theirs.state_dict())
    expected = resample_abs_pos_embed(theirs.pos_embed, (5, 7), num_prefix_tokens=1)
    torch.testing.assert_close(model.pos_embed, expected)


def test_weights_with_other_prefix_tokens_load():
    theirs = randomize(VisionTransformer(**THEIRS))
    windowed = build("ViTDet", **SMALL, window_size=2, relative_positions=None)
    report = load_weights(windowed, theirs.state_dict(), strict=False)
    assert not report.missing and {"cls_token", "norm.weight"} <= set(report.unexpected)
    torch.testing.assert_close(windowed.pos_embed, theirs.pos_embed[:, 1:])
    distilled = build("ViT", **SMALL, distilled=True)
    assert load_weights(distilled, theirs.state_dict(), strict=False).missing == ["dist_token"]
    torch.testing.assert_close(distilled.pos_embed[:, 1], torch.zeros(1, 24))


def test_non_square_positions_require_the_image_size():
    state = build("ViT", **{**SMALL, "image_size": (32, 64)}).state_dict()
    with pytest.raises(CheckpointError, match=r"pos_embed: 33 positions .*grid is 4 x 4"):
        load_weights(build("ViT", **SMALL), state)


def test_dinov2s_names_and_layer_scale_load():
    theirs = randomize(VisionTransformer(**THEIRS, init_values=0.1, reg_tokens=2, no_embed_class=True))
    state = theirs.state_dict()
    state["register_tokens"] = state.pop("reg_token")
    state["mask_token"] = torch.zeros(1, 24)
    ours = build("ViT", **SMALL, num_registers=2, num_classes=5).eval()
    load_weights(ours, state)
    assert_same(ours, theirs, images(32, 32))


def test_error_for_a_checkpoint_of_another_variant_shows_both_shapes():
    state = build("ViT", **{**SMALL, "d_model": 48}).state_dict()
    with pytest.raises(CheckpointError, match=r"checkpoint \(1, 1, 48\), model \(1, 1, 24\)"):
        load_weights(build("ViT", **SMALL), state)


@pytest.mark.parametrize(
    ("variant", "url"),
    [
        ("vit_base_patch16", "deit_base_patch16_224-b5f2ef4d.pth#sha256=b5f2ef4d"),
        ("deit_tiny_distilled_patch16", "deit_tiny_distilled_patch16_224-b40b3cf7.pth#sha256=b40b3cf7"),
        ("vit_large_patch32", "vit_l_32-c7638314.pth#sha256=c7638314"),
        ("vit_huge_patch14", ".pth#sha256=c1eb923e"),
        (dict(type="WindowedViT", out_features=["block3"]), "timm/vit_small_patch14_dinov2.lvd142m"),
    ],
)
def test_pretrained_names_the_published_file(variant, url):
    with torch.device("meta"):
        assert BACKBONES.build(variant)._url().endswith(url)


def test_error_for_a_size_without_published_weights_names_a_remedy():
    with pytest.raises(ConfigError, match=r"pretrained=True: there are no default weights for this ViT"):
        load_pretrained(build("ViT", **SMALL, pretrained=True))


def test_pretrained_weights_load_from_a_file_into_any_form(tmp_path):
    theirs = randomize(VisionTransformer(**THEIRS))
    path = tmp_path / "vit.pth"
    torch.save({"model": theirs.state_dict()}, path)
    for options in (dict(), dict(num_classes=3), dict(type="ViTDet", window_size=2, relative_positions=4)):
        model = build(dict(type="ViT", **SMALL, pretrained=str(path)) | options)
        assert load_pretrained(model) == str(path)
        torch.testing.assert_close(model.blocks[2].mlp.fc2.weight, theirs.blocks[2].mlp.fc2.weight)


def test_mae_weights_initialize_a_classifier_with_another_norm(tmp_path):
    state = {k: v for k, v in build("ViT", **SMALL, num_classes=3).state_dict().items() if not k.startswith("head.")}
    torch.save({"model": {**state, "mask_token": torch.zeros(1, 1, 8)}}, tmp_path / "mae.pth")
    model = build(
        "ViT", **SMALL, num_classes=3, classifier=dict(pooling="mean_norm"), pretrained=str(tmp_path / "mae.pth")
    )
    assert load_pretrained(model) == str(tmp_path / "mae.pth")
    torch.testing.assert_close(model.blocks[2].mlp.fc2.weight, state["blocks.2.mlp.fc2.weight"])


@pytest.mark.parametrize(
    ("options", "antialias"),
    [({}, True), ({"positions": "sincos"}, False), ({"distilled": True}, False)],
    ids=["timm", "MAE", "DeiT"],
)
def test_positions_are_resized_as_by_the_original(options, antialias):
    """MAE's and DeiT's fine-tuning at another size is plain bicubic (util/pos_embed.py; DeiT's main.py)."""
    large = build(dict(type="ViT", **SMALL | {"image_size": 64}, **options))
    small = build(dict(type="ViT", **SMALL, **options))
    table = torch.randn(large.pos_embed.shape, generator=torch.Generator().manual_seed(2))
    load_weights(small, large.state_dict() | {"pos_embed": table})
    count = small.num_positioned
    maps = table[:, count:].mT.unflatten(2, (8, 8))
    expected = functional.interpolate(maps, size=(4, 4), mode="bicubic", align_corners=False, antialias=antialias)
    torch.testing.assert_close(small.pos_embed[:, count:], expected.flatten(2).mT)
    torch.testing.assert_close(small.pos_embed[:, :count], table[:, :count])
