import math

import pytest
import torch
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from torch import nn
from torchvision.models.video import mvit as tv

from vitkit.backbones.mvit import MVIT_VARIANTS
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.nn.activation_checkpointing import enable_activation_checkpointing
from vitkit.nn.attention import AttentionRecorder
from vitkit.nn.pooling_attention import PoolingAttention
from vitkit.registry import BACKBONES
from vitkit.weights import load_pretrained, load_weights

TINY = dict(depths=(1, 2, 1, 1), embed_dim=16, num_heads=2, image_size=64)


def tiny(**options):
    return BACKBONES.build("MViT", **{**TINY, **options})


def randomize(model):
    """Set random values, with which a forgotten norm, token or table would be noticed."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "pos" in name or "token" in name:
            nn.init.normal_(parameter, std=0.5)
        elif parameter.ndim == 1:
            nn.init.normal_(parameter, mean=float(name.endswith("weight")), std=0.2)
    return model.eval()


def build_on_meta(name, **options):
    with torch.device("meta"):
        return BACKBONES.build(name, **options)


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("variant", "num_classes", "expected"),
    [
        ("mvitv2_tiny", 1000, 24_173_320),
        ("mvitv2_small", 1000, 34_870_216),
        ("mvitv2_base", 1000, 51_472_744),
        ("mvitv2_large", 1000, 217_992_952),
        ("mvitv1_base_16", 1000, 36_982_600),
        ("mvitv1_b_16x4", 400, 36_610_672),
        ("mvitv1_b24_32x3", 400, 53_115_280),
        ("mvitv2_s_16x4", 400, 34_537_744),
        ("mvitv2_b_32x3", 400, 51_230_128),
    ],
)
def test_classifiers_have_the_parameters_of_the_original(variant, num_classes, expected):
    assert count(build_on_meta(variant, num_classes=num_classes)) == expected


@pytest.mark.parametrize(
    ("variant", "num_classes", "millions"),
    [("mvitv2_huge", 1000, 667), ("mvitv2_l_40x3", 174, 213.1), ("mvitv1_b_32x3", 400, 36.6)],
)
def test_classifiers_have_the_published_parameters(variant, num_classes, millions):
    assert count(build_on_meta(variant, num_classes=num_classes)) / 1e6 == pytest.approx(millions, abs=0.2)


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("mvitv2_tiny", 23_405_664),
        ("mvitv2_small", 34_102_560),
        ("mvitv2_base", 50_705_088),
        ("mvitv2_large_cls", 212_484_384),
    ],
)
def test_pyramids_have_the_parameters_of_detectron2(variant, expected):
    assert count(build_on_meta(variant)) == expected


@pytest.mark.parametrize("variant", MVIT_VARIANTS)
def test_feature_info_describes_what_the_network_returns(variant):
    model = build_on_meta(variant, out_features=["res3", "res5"])
    clip = MVIT_VARIANTS[variant].get("num_frames")
    size = (16, 65, 97) if clip else (65, 97)
    features = model(torch.empty(1, 3, *size, device="meta"))
    assert list(features) == list(model.feature_info) == ["res3", "res5"]
    for name, (channels, stride) in model.feature_info.items():
        frames = (8,) if clip else ()
        assert features[name].shape == (1, channels, *frames, *(-(-s // stride) for s in size[-2:]))


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(class_token=True),
        dict(expand_in_attention=False),
        dict(expand_in_attention=False, pooling=dict(kind="max")),
        dict(expand_in_attention=False, pooling=dict(kind="avg")),
    ],
    ids=str,
)
def test_classifier_loads_timm_names_and_equals_timm(options):
    cfg = MultiScaleVitCfg(
        depths=TINY["depths"],
        embed_dim=TINY["embed_dim"],
        num_heads=TINY["num_heads"],
        expand_attn=options.get("expand_in_attention", True),
        mode=options.get("pooling", {}).get("kind", "conv"),
        use_cls_token=options.get("class_token", False),
        # timm also adds the pooled class token; the original does not.
        residual_pooling="class_token" not in options,
    )
    theirs = randomize(MultiScaleVit(cfg, img_size=(64, 64), num_classes=5))
    ours = tiny(num_classes=5, **options).eval()
    if "class_token" in options:
        for block in ours.blocks:
            block.attn.residual = False
    state = {f"module.{key}": value for key, value in theirs.state_dict().items()}
    assert load_weights(ours, state).converter == "timm MViTv2"
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("version", [1, 2])
def test_clip_classifier_loads_torchvision_names_and_equals_torchvision(version):
    settings = []
    improved = version == 2
    channels = [(16, 16), (16, 32), (32, 64), (64, 128)] if improved else [(16, 32), (32, 64), (64, 128), (128, 128)]
    for i, (before, after) in enumerate(channels):
        stride_q = [1, 2, 2] if i else [1, 1, 1]
        settings.append(
            tv.MSBlockConfig(
                num_heads=2**i,
                input_channels=before,
                output_channels=after,
                kernel_q=[3, 3, 3] if improved or i else [],
                kernel_kv=[3, 3, 3],
                stride_q=stride_q if improved or i else [],
                stride_kv=[1, 8 >> i, 8 >> i],
            )
        )
    theirs = tv.MViT(
        (64, 64),
        8,
        settings,
        residual_pool=improved,
        residual_with_cls_embed=False,
        rel_pos_embed=improved,
        proj_after_attn=improved,
        num_classes=5,
    )
    randomize(theirs)
    ours = tiny(
        depths=(1, 1, 1, 1),
        num_heads=1,
        num_frames=8,
        kv_stride=8,
        class_token=True,
        pooling=dict(residual=improved),
        expand_in_attention=improved,
        positions="relative" if improved else "absolute",
        num_classes=5,
    ).eval()
    assert load_weights(ours, theirs.state_dict()).converter == "torchvision MViT"
    clips = torch.randn(2, 3, 8, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(clips), theirs(clips), atol=1e-5, rtol=1e-4)


def table_row(q, k, q_length, k_length):
    """Return the table's row for a query and a key; as in the paper, the shorter side is spread over the longer."""
    q_step, k_step = max(k_length / q_length, 1), max(q_length / k_length, 1)
    return math.floor(q * q_step - k * k_step + (k_length - 1) * k_step)


def test_windows_attend_only_to_themselves_and_their_zero_padding():
    torch.manual_seed(0)
    layer = PoolingAttention(8, 12, num_heads=3, q_stride=(2, 2), kv_stride=(2, 2), positions=(3, 3), window=6)
    x = torch.randn(2, 7 * 10, 8)
    found, size = layer(x, (7, 10))
    assert size == (4, 5)

    qkv = layer.qkv(x).view(2, 7, 10, 3, 3, 4)
    pooled = []
    for i, (pool, norm) in enumerate(
        ((layer.pool_q, layer.norm_q), (layer.pool_k, layer.norm_k), (layer.pool_v, layer.norm_v))
    ):
        heads = [norm(pool(qkv[:, :, :, i, h].permute(0, 3, 1, 2)).permute(0, 2, 3, 1)) for h in range(3)]
        padded = torch.zeros(3, 2, 6, 6, 4)
        padded[:, :, :4, :5] = torch.stack(heads)
        pooled.append(padded)
    q, k, v = pooled
    expected = torch.zeros(3, 2, 6, 6, 4)
    for top in (0, 3):
        for left in (0, 3):
            for y in range(3):
                for xx in range(3):
                    query = q[:, :, top + y, left + xx]
                    scores = torch.stack(
                        [
                            (query * k[:, :, top + i, left + j]).sum(-1) / 2
                            + query @ layer.rel_pos_h[table_row(y, i, 3, 3)]
                            + query @ layer.rel_pos_w[table_row(xx, j, 3, 3)]
                            for i in range(3)
                            for j in range(3)
                        ],
                        dim=-1,
                    )
                    values = v[:, :, top : top + 3, left : left + 3].reshape(3, 2, 9, 4)
                    expected[:, :, top + y, left + xx] = (scores.softmax(-1)[..., None] * values).sum(2)
    expected = (expected + q)[:, :, :4, :5].permute(1, 2, 3, 0, 4).reshape(2, 20, 12)
    torch.testing.assert_close(found, layer.proj(expected), atol=1e-5, rtol=1e-4)


def test_relative_positions_of_other_sizes_are_interpolated_and_truncated():
    torch.manual_seed(0)
    layer = PoolingAttention(4, 4, num_heads=1, kv_stride=(2, 2), residual=False, positions=(4, 4))
    with torch.no_grad():
        layer.qkv.weight[4:8] = 0  # all keys are equal, so that the weights are those of the positions
        layer.qkv.bias[4:8] = 0
    x = torch.randn(1, 5 * 3, 4)
    with AttentionRecorder(layer) as maps:
        layer(x, (5, 3))
    q = layer.norm_q(layer.pool_q(layer.qkv(x)[0, :, :4].t().view(1, 4, 5, 3)).permute(0, 2, 3, 1))[0]
    tables = [
        nn.functional.interpolate(table.t()[None], size=2 * length - 1, mode="linear")[0].t()
        for table, length in ((layer.rel_pos_h, 5), (layer.rel_pos_w, 3))
    ]
    scores = torch.zeros(5, 3, 3, 2)
    keys = layer.norm_k.bias
    for y in range(5):
        for xx in range(3):
            for i in range(3):
                for j in range(2):
                    rows = tables[0][table_row(y, i, 5, 3)] + tables[1][table_row(xx, j, 3, 2)]
                    scores[y, xx, i, j] = q[y, xx] @ rows + q[y, xx] @ keys / 2
    torch.testing.assert_close(maps[""][0][0, 0], scores.view(15, 6).softmax(-1), atol=1e-5, rtol=1e-4)


def test_windowed_and_global_blocks_alternate_as_in_detectron2():
    model = build_on_meta("mvitv2_tiny")
    attention = [block.attn for block in model.blocks]
    assert [a.window for a in attention] == [56, 56, None, 28, 14, 14, 14, None, 14, None]
    assert [a.kv_stride[0] for a in attention] == [4, 2, 4, 1, 1, 1, 1, 2, 1, 1]
    assert [a.q_stride[0] for a in attention] == [1, 2, 1, 2, 1, 1, 1, 1, 2, 1]
    classifier = build_on_meta("mvitv2_tiny", num_classes=2)
    assert [b.attn.window for b in classifier.blocks] == [None] * 10
    assert [b.attn.kv_stride[0] for b in classifier.blocks] == [4, 2, 2, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "options",
    [
        dict(window_size=8),
        dict(window_size=None),
        dict(num_classes=3, class_token=True),
        dict(
            num_classes=3,
            class_token=True,
            positions="absolute",
            pooling=dict(residual=False),
            expand_in_attention=False,
        ),
        dict(positions="absolute", pooling=dict(residual=False), expand_in_attention=False, window_size=8),
        dict(num_frames=4, num_classes=3, class_token=True),
        dict(num_frames=4, positions="absolute", pooling=dict(residual=False), expand_in_attention=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [(33, 79), (64, 64), (4, 5)], ids=str)
def test_every_parameter_gets_a_finite_gradient_at_any_image_size(options, size):
    torch.manual_seed(0)
    model = tiny(drop_path=0.0, **options).train()
    frames = (5,) if "num_frames" in options else ()
    outputs = model(torch.randn(2, 3, *frames, *size))
    outputs = {"logits": outputs} if isinstance(outputs, torch.Tensor) else outputs
    for name, (_, stride) in model.feature_info.items():
        if name in outputs:
            assert outputs[name].shape[-2:] == (-(-size[0] // stride), -(-size[1] // stride))
    sum(x.square().mean() for x in outputs.values()).backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]


def test_stages_beyond_the_deepest_feature_are_not_built():
    model = tiny(out_features=["res3"])
    assert len(model.blocks) == 3
    assert not any(name.startswith(("scale2", "scale4", "scale5", "norm.", "head")) for name in model.state_dict())
    images = torch.randn(1, 3, 40, 40)
    whole = tiny().eval()
    load_weights(model.eval(), whole.state_dict(), strict=False)
    torch.testing.assert_close(model(images)["res3"], whole(images)["res3"])


def test_frozen_stages_get_no_gradient_and_are_not_dropped():
    model = tiny(frozen_stages=2, drop_path=0.5, positions="absolute").train()
    model(torch.randn(1, 3, 64, 64))["res5"].square().mean().backward()
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    blocks = ("blocks.0.", "blocks.1.", "blocks.2.")
    assert frozen == {n for n, _ in model.named_parameters() if n.startswith(("patch_embed", "pos_embed", *blocks))}
    assert not model.blocks[2].training and model.blocks[3].training


def test_activation_checkpointing_gives_the_same_gradients():
    model, images = tiny(drop_path=0.0, window_size=8).train(), torch.randn(2, 3, 40, 56)
    gradients = []
    for enabled in (False, True):
        assert enable_activation_checkpointing(model, enabled) == len(model.blocks)
        model.zero_grad()
        sum(x.square().mean() for x in model(images).values()).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("options", [dict(window_size=8), dict(num_classes=3, class_token=True)], ids=str)
def test_recorder_collects_the_weights_of_every_block(options):
    model, images = tiny(**options).eval(), torch.randn(1, 3, 48, 64)
    plain = model(images)
    with AttentionRecorder(model) as maps:
        recorded = model(images)
    torch.testing.assert_close(recorded, plain, atol=1e-5, rtol=1e-4)
    assert list(maps) == [f"blocks.{i}.attn" for i in range(len(model.blocks))]
    for (weights,) in maps.values():
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


@pytest.mark.parametrize("options", [dict(window_size=8), dict(num_classes=3, class_token=True)], ids=str)
def test_outputs_agree_in_other_precisions(options):
    model, images = tiny(**options).eval(), torch.randn(1, 3, 48, 64)
    expected = model(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(images)
    high = model.double()(images.double())
    for name in expected if isinstance(expected, dict) else [...]:
        torch.testing.assert_close(low[name].float(), expected[name], atol=0.1, rtol=0.1)
        torch.testing.assert_close(high[name].float(), expected[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [dict(window_size=8), dict(num_classes=3, class_token=True)], ids=str)
def test_compiles_without_graph_breaks(options):
    model, images = tiny(**options).train(), torch.randn(1, 3, 48, 64)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.eval()
    torch.testing.assert_close(compiled(images), model(images), atol=1e-5, rtol=1e-4)


def test_weights_of_another_image_size_are_resized():
    for options in (dict(), dict(positions="absolute"), dict(positions="absolute", num_frames=4)):
        options = dict(num_classes=3, class_token=True, **options)
        small, large = tiny(**options), tiny(**{**options, "image_size": 96})
        randomize(small)
        load_weights(large, small.state_dict())
        large.eval()
        frames = (4,) if "num_frames" in options else ()
        images = torch.randn(1, 3, *frames, 96, 96)
        if options.get("positions") == "absolute":
            torch.testing.assert_close(large(images), small(images), atol=1e-5, rtol=1e-4)
        else:
            resized = nn.functional.interpolate(small.blocks[0].attn.rel_pos_h.t()[None], size=47, mode="linear")
            torch.testing.assert_close(large.blocks[0].attn.rel_pos_h, resized[0].t())


@pytest.mark.parametrize("positions", ["relative", "absolute"])
def test_a_pyramid_takes_a_classifiers_weights(tmp_path, positions):
    classifier = randomize(tiny(num_classes=3, class_token=True, positions=positions))
    torch.save(classifier.state_dict(), tmp_path / "weights.pth")
    pyramid = tiny(positions=positions, pretrained=str(tmp_path / "weights.pth"))
    load_pretrained(pyramid)
    state = classifier.state_dict()
    assert torch.equal(pyramid.blocks[4].attn.qkv.weight, state["blocks.4.attn.qkv.weight"])
    if positions == "absolute":
        assert torch.equal(pyramid.pos_embed, state["pos_embed"][:, 1:])


def test_separate_projections_of_older_weights_are_joined():
    model = randomize(tiny(num_classes=3))
    state = {}
    for key, value in model.state_dict().items():
        if ".qkv." in key:
            parts = zip("qkv", value.chunk(3))
            state |= {f"backbone.{key.replace('.qkv.', f'.{name}.')}": part for name, part in parts}
        else:
            state[f"backbone.{key}"] = value
    holder = nn.Module()
    holder.backbone = tiny(num_classes=3)
    load_weights(holder, state)
    assert torch.equal(holder.backbone.blocks[1].attn.qkv.weight, model.blocks[1].attn.qkv.weight)


def test_backbone_is_loaded_from_detectron2_detector_checkpoints():
    theirs = randomize(tiny())
    state = {f"backbone.bottom_up.{key}": value for key, value in theirs.state_dict().items()}
    state["backbone.fpn_lateral2.weight"] = torch.zeros(1)
    ours = tiny()
    assert load_weights(ours, state).converter == "facebookresearch/detectron2 MViTv2"
    assert torch.equal(ours.scale5_norm.weight, theirs.scale5_norm.weight)
    holder = nn.Module()
    holder.backbone = tiny()
    load_weights(holder, state)
    assert torch.equal(holder.backbone.scale5_norm.weight, theirs.scale5_norm.weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_heads=3), "num_heads=3 must divide embed_dim=16"),
        (dict(num_heads=0), "num_heads=0 must divide"),
        (dict(embed_dim=0), "embed_dim=0: expected at least 1"),
        (dict(kv_stride=0), "kv_stride=0: expected at least 1"),
        (dict(depths=(1, 1, 1)), "expected at least one block in each of 4 stages"),
        (dict(window_size=0), "window_size=0: expected at least 1"),
        (dict(window_size=6), "expected a multiple of the strides, "),
        (dict(pooling=dict(kind="mean")), "pool='mean': expected one of conv, max, avg"),
        (dict(pooling=dict(kernel=2)), "expected odd sizes"),
        (dict(positions="sine"), "expected 'relative' or 'absolute'"),
        (dict(image_size=16), "expected at least 32 pixels"),
        (dict(num_frames=1), "and 2 frames of clips"),
        (dict(out_features=["res6"]), "unknown feature 'res6'.*res5"),
        (dict(frozen_stages=5), "expected 0 to 4"),
    ],
    ids=str,
)
def test_invalid_settings_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        tiny(**options)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((1, 1, 64, 64), {}, r"\(1, 1, 64, 64\): expected \(B, 3, H, W\)"),
        ((1, 3, 4, 64, 64), {}, r"expected \(B, 3, H, W\)"),
        ((1, 3, 64, 64), dict(num_frames=4), r"expected \(B, 3, T, H, W\)"),
        ((1, 3, 3, 64), {}, "3 x 64 pixels: expected at least 4 x 4"),
    ],
    ids=str,
)
def test_invalid_images_are_named(shape, options, message):
    with pytest.raises(DataError, match=message):
        tiny(**options)(torch.zeros(shape))


def test_weights_of_another_variant_are_refused_with_both_shapes():
    with pytest.raises(CheckpointError, match=r"patch_embed.proj.weight: checkpoint \(32, 3, 7, 7\), model \(16,"):
        load_weights(tiny(), tiny(embed_dim=32).state_dict())
