import math

import pytest
import torch
from helpers.vit_models import SMALL, build, images, randomize

from vitkit.backbones.vit import VIT_VARIANTS
from vitkit.backbones.vit_blocks import Attention, Block
from vitkit.backbones.vitdet import WindowAttention
from vitkit.errors import ConfigError, DataError
from vitkit.nn.activation_checkpointing import enable_activation_checkpointing
from vitkit.nn.attention import AttentionRecorder
from vitkit.registry import BACKBONES

COUNTS = {
    "vit_tiny_patch16": 5_717_416,
    "vit_small_patch32": 22_878_952,
    "vit_small_patch16": 22_050_664,
    "vit_base_patch32": 88_224_232,
    "vit_base_patch16": 86_567_656,
    "vit_large_patch32": 306_535_400,
    "vit_large_patch16": 304_326_632,
    "vit_large_patch14": 304_203_752,
    "vit_huge_patch14": 632_045_800,
    "deit_tiny_distilled_patch16": 5_910_800,
    "deit_small_distilled_patch16": 22_436_432,
    "deit_base_distilled_patch16": 87_338_192,
}


@pytest.mark.parametrize(("variant", "count"), COUNTS.items())
def test_classifiers_have_the_published_parameters(variant, count):
    with torch.device("meta"):
        assert sum(p.numel() for p in BACKBONES.build(variant, num_classes=1000).parameters()) == count


@pytest.mark.parametrize(
    ("variant", "count"), {"vit_base_patch16": 86_859_496, "vit_large_patch32": 306_632_680}.items()
)
def test_classifiers_at_384_have_the_published_parameters(variant, count):
    with torch.device("meta"):
        model = BACKBONES.build(variant, num_classes=1000, image_size=384)
    assert sum(p.numel() for p in model.parameters()) == count


def test_vitdet_has_the_parameters_of_the_original_except_the_class_token_position():
    # 85,889,024 in detectron2, which keeps a position that nothing uses.
    with torch.device("meta"):
        model = BACKBONES.build("vitdet_base")
    assert sum(p.numel() for p in model.parameters()) == 85_889_024 - 768
    assert [b.attn.window_size for b in model.blocks] == [14, 14, None] * 4
    assert model.blocks[2].attn.rel_pos_h.shape == (127, 64) and model.blocks[0].attn.rel_pos_h.shape == (27, 64)


def test_every_size_and_patch_is_a_variant():
    sizes = ("tiny", "small", "base", "large", "huge")
    assert {f"vit_{size}_patch{patch}" for size in sizes for patch in (32, 16, 14)} <= VIT_VARIANTS.keys()
    for variant in VIT_VARIANTS:
        with torch.device("meta"):
            model = BACKBONES.build(variant)
        ((_, (channels, stride)),) = model.feature_info.items()
        assert channels == VIT_VARIANTS[variant]["d_model"] and stride == VIT_VARIANTS[variant].get("patch_size", 16)


def explicit_attention(attention: Attention, x, size):
    """Compute windows and decomposed relative positions by definition, one window, query and key at a time."""
    window = attention.window_size or max(size)
    height, width = (-(-s // window) * window for s in size) if attention.window_size else size
    padded = x.new_zeros(len(x), height, width, x.shape[-1])
    padded[:, : size[0], : size[1]] = x.unflatten(1, size)
    output = torch.zeros_like(padded)
    for top in range(0, height, window):
        for left in range(0, width, window):
            part = padded[:, top : top + window, left : left + window]
            rows, columns = part.shape[1:3]
            q, k, v = attention.qkv(part.flatten(1, 2)).unflatten(-1, (3, attention.num_heads, -1)).unbind(2)
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
            for i in range(rows * columns):
                for j in range(rows * columns):
                    dy, dx = i // columns - j // columns, i % columns - j % columns
                    relative = attention.rel_pos_h[dy + rows - 1] + attention.rel_pos_w[dx + columns - 1]
                    scores[:, :, i, j] += q[:, i] @ relative
            y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
            output[:, top : top + window, left : left + window] = attention.proj(y).unflatten(1, (rows, columns))
    return output[:, : size[0], : size[1]].flatten(1, 2)


@pytest.mark.parametrize(("window", "size"), [(3, (5, 7)), (3, (6, 3)), (None, (4, 4))])
def test_windows_and_relative_positions_equal_their_definition(window, size):
    attention = WindowAttention(Attention(12, 2), window_size=window, relative_positions=window or 4)
    attention = randomize(attention).double()
    x = torch.randn(2, math.prod(size), 12, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(attention(x, size), explicit_attention(attention, x, size))


def test_relative_positions_take_maps_of_any_size_and_are_resampled_linearly():
    attention = WindowAttention(Attention(4, 1), window_size=None, relative_positions=3)
    attention.rel_pos_h.data = torch.linspace(0, 4, 5)[:, None].repeat(1, 4)
    assert attention(torch.randn(1, 2 * 6, 4), (2, 6)).shape == (1, 12, 4)
    state = {"a.rel_pos_h": torch.arange(9.0)[:, None].repeat(1, 4)}
    attention.adapt_state(state, "a.")
    expected = torch.nn.functional.interpolate(torch.arange(9.0)[None, None], size=5, mode="linear")[0, 0]
    torch.testing.assert_close(state["a.rel_pos_h"], expected[:, None].repeat(1, 4))


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(num_registers=2, distilled=True),
        dict(type="ViTDet", window_size=3, relative_positions=6, drop_path=0.1),
        dict(type="ViTDet", window_size=2, relative_positions=None, global_blocks=[1]),
    ],
)
@pytest.mark.parametrize("size", [(33, 71), (32, 32)])
def test_dense_maps_have_the_promised_shape_and_finite_gradients(options, size):
    model = build(dict(type="ViT", **SMALL) | options).train()
    features = model(images(*size))
    (info,) = model.feature_info.values()
    assert list(features) == list(model.feature_info) == ["res3"] and info == (24, 8)
    assert features["res3"].shape == (2, 24, -(-size[0] // 8), -(-size[1] // 8))
    features["res3"].square().mean().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all(), name


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(distilled=True),
        dict(classifier=dict(pooling="mean"), class_token=False),
        dict(classifier=dict(pooling="mean_norm"), num_registers=1),
        dict(type="ViTDet", window_size=2, relative_positions=None),
    ],
)
def test_classifiers_give_logits_and_gradients_to_every_parameter(options):
    model = build(dict(type="ViT", **SMALL, num_classes=7) | options).train()
    logits = model(images(30, 41))
    assert logits.shape == (2, 7)
    logits.square().mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_heads_may_start_with_small_weights():
    for options in (dict(), dict(distilled=True), dict(classifier=dict(hidden_layer=True))):
        options = {**options, "classifier": {**options.get("classifier", {}), "head_std": 2e-5}}
        model = build(dict(type="ViT", **SMALL, num_classes=100) | options)
        hidden = [model.head[0]] if isinstance(model.head, torch.nn.Sequential) else []
        heads = [model.head[-1] if hidden else model.head, *([model.head_dist] if model.head_dist else [])]
        assert all(head.weight.std().item() == pytest.approx(2e-5, rel=0.1) for head in heads)
        assert all(layer.weight.std() > 0.01 for layer in (*hidden, model.blocks[0].attn.qkv))
    with pytest.raises(ConfigError, match=r"classifier\.head_std=-1: expected at least 0"):
        build("ViT", **SMALL, num_classes=2, classifier=dict(head_std=-1))


def test_patch_size_1_makes_a_transformer_on_pixels():
    model = build("ViT", patch_size=1, d_model=8, depth=1, num_heads=1, image_size=4)
    assert model(images(5, 7))["res0"].shape == (2, 8, 5, 7)
    assert model.feature_info["res0"].stride == 1


def test_features_of_patch_size_14_are_named_by_the_nearest_stride():
    assert build("ViT", patch_size=14, d_model=8, depth=1, num_heads=1, image_size=28).feature_info == {"res4": (8, 14)}


def test_frozen_stages_are_the_embeddings_and_the_first_blocks():
    model = build("ViT", **SMALL, frozen_stages=2, drop_path=0.5).train()
    model(images(32, 32))["res3"].square().mean().backward()
    frozen = {".".join(name.split(".")[:2]) for name, p in model.named_parameters() if p.grad is None}
    assert frozen == {"patch_embed.proj", "pos_embed", "cls_token", "blocks.0", "blocks.1"}
    assert not model.blocks[1].training and model.blocks[2].training


def test_watched_parts_of_a_block_are_called():
    block, seen = Block(16, 2, d_mlp=64, layer_scale=1.0), []
    for part in (block.norm1, block.attn, block.attn.proj, block.ls1, block.mlp, block.mlp.fc1, block.drop_path):
        part.register_forward_hook(lambda *_: seen.append(1))
    block(torch.randn(2, 20, 16), (4, 5))
    assert len(seen) == 8  # two branches share `drop_path`


def test_gradients_at_watched_parts_and_a_replaced_forward_of_a_block_are_seen():
    seen = []
    for name in ("norm1", "attn", "attn.qkv", "mlp", "mlp.fc2"):
        block = Block(16, 2, d_mlp=64, layer_scale=1.0)
        block.get_submodule(name).register_full_backward_hook(lambda *_, name=name: seen.append(name))
        block(torch.randn(2, 20, 16, requires_grad=True), (4, 5)).sum().backward()
    assert seen == ["norm1", "attn", "attn.qkv", "mlp", "mlp.fc2"]
    block = Block(16, 2, d_mlp=64, layer_scale=1.0)
    block.attn.forward = lambda x, *_: torch.zeros_like(x)
    block.mlp.forward = torch.zeros_like
    x = torch.randn(2, 20, 16)
    assert block(x, (4, 5)).equal(x)


def test_recomputing_activations_keeps_the_gradients():
    model = build("ViTDet", **SMALL, window_size=3, relative_positions=4).train()
    grads = []
    for enabled in (False, True):
        assert enable_activation_checkpointing(model, enabled) == 3
        model.zero_grad()
        model(images(33, 47))["res3"].square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", [{}, dict(type="ViTDet", window_size=2, relative_positions=4)])
def test_recorded_weights_sum_to_1_and_recording_changes_nothing(options):
    model = randomize(build(dict(type="ViT", **SMALL) | options))
    x = images(33, 32)
    with torch.no_grad():
        plain = model(x)["res3"]
        with AttentionRecorder(model) as maps:
            recorded = model(x)["res3"]
    assert list(maps) == [f"blocks.{i}.attn" for i in range(3)]
    for (weights,) in maps.values():
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    torch.testing.assert_close(recorded, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, dict(type="ViTDet", window_size=2, relative_positions=4)])
def test_double_precision_and_bfloat16_agree_with_single(options):
    model = build(dict(type="ViT", **SMALL) | options).eval()
    x = images(32, 40)
    with torch.no_grad():
        single = model(x)["res3"]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = model(x)["res3"]
        double = model.double()(x.double())["res3"]
    torch.testing.assert_close(double.float(), single, atol=1e-4, rtol=1e-4)
    assert half.dtype == torch.float32  # the residual stream keeps its precision
    torch.testing.assert_close(half, single, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("options", [dict(num_classes=3), dict(type="ViTDet", window_size=3, relative_positions=4)])
def test_compiles_without_graph_breaks(options):
    model = build(dict(type="ViT", **SMALL) | options).eval()
    x = images(33, 47)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")(x)
        plain = model(x)
    torch.testing.assert_close(compiled, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(image_size=(32, 0)), r"image_size=\(32, 0\): expected at least 1 pixel"),
        (dict(num_heads=5), "num_heads=5 must divide d_model=24"),
        (dict(patch_size=0), "patch_size=0: expected at least 1"),
        (dict(blocks=dict(qkv_bia="none")), "blocks.qkv_bia: unknown key. Did you mean 'qkv_bias'"),
        (dict(type="ViTDet", window_size=0), "window_size=0: expected at least 1"),
        (dict(type="ViTDet", positions="rotary"), "positions='rotary': expected 'patches', 'axes' or 'none'"),
        (dict(type="ViTDet", window_size=None, global_blocks=[1]), "without window_size"),
        (
            dict(type="ViTDet", window_size=2, global_blocks=[3]),
            r"global_blocks=\[3\]: expected indices of blocks, 0 to 2",
        ),
        (dict(out_features=["res5"]), "out_features: unknown feature 'res5'. Did you mean 'res3'"),
        (dict(num_classes=2, out_features=["res3"]), "returns no features"),
        (dict(num_classes=2, classifier=dict(pooling="max")), "classifier.pooling='max': unknown"),
        (dict(num_classes=2, class_token=False), "needs the class token"),
        (dict(num_classes=2, distilled=True, classifier=dict(pooling="mean")), "reads its two tokens"),
        (dict(distilled=True, class_token=False), "needs a class token"),
        (dict(num_registers=-1), "num_registers=-1"),
        (dict(frozen_stages=4), "frozen_stages=4: expected 0 to 3"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build(dict(type="ViT", **SMALL) | arguments)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 4, 32, 32), r"\(1, 4, 32, 32\): expected \(B, 3, H, W\)"),
        ((1, 3, 7, 32), "7 x 32 pixels: expected at least 8 x 8"),
    ],
)
def test_wrong_images_are_named(shape, message):
    with pytest.raises(DataError, match=message):
        build("ViT", **SMALL)(torch.zeros(shape))


def test_error_for_an_unknown_variant_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'vit_base_patch16'"):
        BACKBONES.build("vit_base_patch61")
