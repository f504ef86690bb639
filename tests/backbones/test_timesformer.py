import math

import pytest
import torch
from torch import nn

from vitkit.backbones.timesformer import SCHEMES, STEPS, TIMESFORMER_VARIANTS, join_groups, split_groups
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.nn.activation_checkpointing import enable_activation_checkpointing
from vitkit.nn.attention import AttentionRecorder
from vitkit.registry import BACKBONES
from vitkit.weights import load_pretrained, load_weights

build = BACKBONES.build


TINY = dict(d_model=16, depth=2, num_heads=2, image_size=64, num_frames=4)
TINY_VIT = dict(d_model=16, depth=2, num_heads=2, image_size=64)

# From the original code with 400 classes; sparse and axial have one and two more attentions in a block than joint.
PARAMETERS = dict(space=86_106_256, joint=86_112_400, divided=121_566_352, sparse=121_566_352, axial=157_020_304)


def tiny(scheme, *, seed=0, **options):
    """Return a small model, with random values where a new network has zeros."""
    torch.manual_seed(seed)
    model = build("TimeSformer", attention=scheme, **{**TINY, **options}).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def clips(frames=4, height=64, width=64, batch=2):
    return torch.randn(batch, 3, frames, height, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_parameter_counts_equal_the_originals(scheme):
    with torch.device("meta"):
        for num_classes, head in ((400, 0), (174, (400 - 174) * 769)):
            model = BACKBONES.build(f"timesformer_{scheme}", num_classes=num_classes)
            assert sum(p.numel() for p in model.parameters()) == PARAMETERS[scheme] - head


def test_larger_variants_differ_only_in_their_position_tables():
    with torch.device("meta"):
        tables = {
            name: {key: p.shape[1] for key, p in BACKBONES.build(name).named_parameters() if key.endswith("_embed")}
            for name in TIMESFORMER_VARIANTS
        }
    assert tables["timesformer_divided"] == dict(pos_embed=197, time_embed=8)
    assert tables["timesformer_hr"] == dict(pos_embed=785, time_embed=16)
    assert tables["timesformer_l"] == dict(pos_embed=197, time_embed=96)
    assert tables["timesformer_space"] == dict(pos_embed=197)


# Which tokens see which: a and b are (row, column, frame), (h, w) the halves' sizes.
SEES = {
    "joint": lambda a, b, h, w: True,
    "temporal": lambda a, b, h, w: a[:2] == b[:2],
    "spatial": lambda a, b, h, w: a[2] == b[2],
    "width": lambda a, b, h, w: (a[0], a[2]) == (b[0], b[2]),
    "height": lambda a, b, h, w: a[1:] == b[1:],
    "local": lambda a, b, h, w: (a[0] // h, a[1] // w) == (b[0] // h, b[1] // w),
    "global": lambda a, b, h, w: all((i - j) % 2 == 0 for i, j in zip(a, b)),
}


def visible(step, size):
    """Return (N, N) bool: token a (row) may attend to token b (column)."""
    tokens = [(y, x, t) for y in range(size[0]) for x in range(size[1]) for t in range(size[2])]
    half = math.ceil(size[0] / 2), math.ceil(size[1] / 2)
    return torch.tensor([[SEES[step](a, b, *half) for b in tokens] for a in tokens])


def masked_joint_attention(attention, x, seen):
    """Compute joint attention of (B, L, C) in which everything that is not in `seen`, (L, L), is masked."""
    q, k, v = (y.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for y in attention.qkv(x).chunk(3, dim=-1))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -math.inf)
    return attention.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def expected_block(block, x, size):
    for step in block.steps:
        prefix = "" if step == block.steps[-1] else f"{step}_"
        norm, attention = getattr(block, f"{prefix}norm1"), getattr(block, f"{prefix}attn")
        fc = getattr(block, f"{prefix}fc") if prefix else nn.Identity()
        seen = visible(step, size)
        if step == "temporal":
            x = torch.cat((x[:, :1], x[:, 1:] + fc(masked_joint_attention(attention, norm(x[:, 1:]), seen))), dim=1)
            continue
        # Each group has a copy of the class token, which attends to the group and is attended to by it.
        groups = seen.unique(dim=0)  # (G, N)
        num_groups = len(groups)
        both = torch.cat((x[:, :1].expand(-1, num_groups, -1), x[:, 1:]), dim=1)
        mask = torch.cat(
            (torch.cat((torch.eye(num_groups).bool(), groups), dim=1), torch.cat((groups.mT, seen), dim=1))
        )
        out = masked_joint_attention(attention, norm(both), mask)
        class_token, patches = out[:, :num_groups].mean(dim=1, keepdim=True), out[:, num_groups:]
        x = x + fc(torch.cat((class_token, patches), dim=1))
    return x + block.mlp(block.norm2(x))


@pytest.mark.parametrize("size", [(4, 6, 2), (3, 5, 3), (1, 2, 1)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_block_equals_masked_joint_attention(scheme, size):
    block = tiny(scheme).blocks[1]
    x = torch.randn(2, 1 + math.prod(size), 16)
    with torch.no_grad():
        torch.testing.assert_close(block(x, size), expected_block(block, x, size), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("step", STEPS)
def test_joining_groups_reverses_splitting_them(step):
    for size in ((4, 6, 2), (3, 5, 3), (7, 1, 1)):
        tokens = torch.arange(1.0, 1 + math.prod(size)).view(1, *size, 1)
        groups = split_groups(tokens, step)
        torch.testing.assert_close(join_groups(groups, step, size), tokens, rtol=0, atol=0)
        seen = visible(step, size)
        for group in groups[0, :, :, 0]:
            members = group[group > 0].long() - 1
            assert seen[members][:, members].all() and len(members) == seen[members[0]].sum()


@pytest.mark.parametrize("scheme", ["space", "joint", "divided"])
def test_loads_transformers_names_and_equals_transformers(scheme):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = dict(space="space_only", joint="joint_space_time", divided="divided_space_time")[scheme]
    config = transformers.TimesformerConfig(
        image_size=64, num_frames=4, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128
    )
    config.attention_type = kind
    theirs = transformers.TimesformerModel(config).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    ours = build("TimeSformer", attention=scheme, d_model=32, depth=3, num_heads=4, image_size=64, num_frames=4).eval()
    report = load_weights(ours, theirs.state_dict())
    assert report.converter == "transformers TimeSformer" and not report.missing and not report.unexpected
    x = clips()
    with torch.no_grad():
        hidden = theirs(x.transpose(1, 2)).last_hidden_state[:, 1:]
        expected = hidden.view(2, 4, 16, 32).transpose(1, 2) if scheme == "space" else hidden.view(2, 16, 4, 32)
        found = ours(x)["res4"].flatten(3).permute(0, 3, 2, 1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_original_names_load_into_a_classifier_and_another_head_is_reinitialized():
    source = tiny("divided", num_classes=5)
    official = {"model_state": {f"model.{key}": value for key, value in source.state_dict().items()}, "epoch": 3}
    model = tiny("divided", seed=1, num_classes=5)
    load_weights(model, official)
    torch.testing.assert_close(model(clips()), source(clips()))
    fresh = tiny("divided", seed=1, num_classes=3)
    assert load_weights(fresh, official, new_class_head=True).reinitialized == ["head.weight", "head.bias"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_image_vit_is_inflated_with_extra_attention_steps_that_change_nothing(scheme, tmp_path):
    torch.manual_seed(0)
    vit = build("ViT", **TINY_VIT, num_classes=5).eval()
    for parameter in vit.parameters():
        nn.init.normal_(parameter, std=0.3)
    torch.save(vit.state_dict(), tmp_path / "vit.pth")
    model = build("TimeSformer", attention=scheme, **TINY, num_classes=5, pretrained=str(tmp_path / "vit.pth")).eval()
    assert load_pretrained(model) == str(tmp_path / "vit.pth")
    if scheme in ("space", "divided"):  # with identical frames, they see what the ViT sees in one
        image = clips()[:, :, :1]
        with torch.no_grad():
            torch.testing.assert_close(
                model(image.expand(-1, -1, 4, -1, -1)), vit(image[:, :, 0]), atol=1e-4, rtol=1e-4
            )
    for block in model.blocks:
        for step in SCHEMES[scheme][:-1]:
            copied = getattr(block, f"{step}_attn").qkv.weight
            assert torch.equal(copied, block.attn.qkv.weight) and not getattr(block, f"{step}_fc").weight.any()


def test_pretrained_weights_of_a_simpler_scheme_and_another_size_are_completed(tmp_path, caplog):
    caplog.set_level("INFO", logger="vitkit")
    source = tiny("joint", num_classes=5)
    torch.save(source.state_dict(), tmp_path / "joint.pth")
    model = build(
        "TimeSformer",
        attention="axial",
        **{**TINY, "image_size": 128, "num_frames": 8},
        num_classes=3,
        pretrained=str(tmp_path / "joint.pth"),
    )
    load_pretrained(model)
    assert "positions of 4 x 4 patches are resampled to 8 x 8" in caplog.text
    assert "positions of 4 frames are resampled to 8" in caplog.text
    torch.testing.assert_close(model.time_embed, source.time_embed.repeat_interleave(2, dim=1))
    table, small = model.pos_embed[0, 1:].view(8, 8, 16), source.pos_embed[0, 1:].view(4, 4, 16)
    torch.testing.assert_close(table, small.repeat_interleave(2, 0).repeat_interleave(2, 1))
    torch.testing.assert_close(model.blocks[1].width_norm1.weight, source.blocks[1].norm1.weight)


@pytest.mark.parametrize("theirs", SCHEMES)
@pytest.mark.parametrize("ours", SCHEMES)
def test_weights_of_another_scheme_are_named(ours, theirs, tmp_path):
    state, model = tiny(theirs, num_classes=5).state_dict(), tiny(ours, num_classes=5)
    if ours == theirs:
        load_weights(model, state)
        return
    message = rf"attention='{theirs}'.*; this model has '{ours}'.*timesformer_{theirs}"
    with pytest.raises(CheckpointError, match=message):
        load_weights(model, state)
    torch.save(state, tmp_path / "w.pth")
    model.pretrained = str(tmp_path / "w.pth")
    if theirs in ("space", "joint"):
        assert load_pretrained(model)
    else:
        with pytest.raises(CheckpointError, match=message):
            load_pretrained(model)


def test_other_clip_sizes_are_reported_once_and_use_the_nearest_positions(caplog):
    model = tiny("divided", num_classes=5)
    x = clips(frames=2, height=32, width=96)
    found = model(x)
    model(x)
    assert caplog.text.count("positions for 4 x 4 patches, 4 frames are resampled (nearest) for clips of 2 x 6, 2") == 1
    fitting = tiny("divided", num_classes=5)
    places = fitting.pos_embed[0, 1:].view(4, 4, 16)[[0, 2]][:, [0, 0, 1, 2, 2, 3]]
    fitting.grid = (2, 6)
    fitting.pos_embed = nn.Parameter(torch.cat((fitting.pos_embed[:, :1], places.reshape(1, 12, 16)), dim=1))
    fitting.time_embed = nn.Parameter(fitting.time_embed[:, [0, 2]])
    torch.testing.assert_close(fitting(x), found)


def test_all_schemes_except_space_depend_on_the_order_of_frames():
    x = clips()
    for scheme in SCHEMES:
        model = tiny(scheme, num_classes=5)
        with torch.no_grad():
            same = torch.allclose(model(x), model(x.flip(2)), atol=1e-4)
        assert same == (scheme == "space"), scheme


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("num_classes", [None, 3])
def test_every_parameter_gets_a_finite_gradient_at_any_size(scheme, num_classes):
    model = tiny(scheme, num_classes=num_classes).train()
    outputs = model(clips(3, 33, 70))
    if num_classes is None:
        outputs = outputs["res4"]
        assert outputs.shape == (2, 16, 3, 3, 5)
    outputs.square().mean().backward()
    used = [name for name, p in model.named_parameters() if name != "cls_token" or num_classes]
    parameters = dict(model.named_parameters())
    assert all(parameters[name].grad is not None and parameters[name].grad.isfinite().all() for name in used)


def test_all_attention_steps_but_the_last_are_initialized_to_zero():
    for scheme in SCHEMES:
        model = build("TimeSformer", attention=scheme, **TINY)
        layers = [module for name, module in model.named_modules() if name.endswith("_fc")]
        assert len(layers) == 2 * (len(SCHEMES[scheme]) - 1)
        assert not any(layer.weight.any() or layer.bias.any() for layer in layers)
        assert model.time_embed is None or not model.time_embed.any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_activation_checkpointing_gives_the_same_gradients(scheme):
    model = tiny(scheme, num_classes=3, drop_path=0.0).train()
    grads = []
    for enabled in (False, True):
        assert enable_activation_checkpointing(model, enabled) == 2
        model.zero_grad()
        model(clips()).square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)


def test_recorder_collects_the_weights_of_every_step():
    shapes = {
        "space": dict(attn=(8, 2, 17, 17)),
        "joint": dict(attn=(2, 2, 65, 65)),
        "divided": dict(temporal_attn=(32, 2, 4, 4), attn=(8, 2, 17, 17)),
        "sparse": dict(local_attn=(8, 2, 17, 17), attn=(16, 2, 9, 9)),
        "axial": dict(temporal_attn=(32, 2, 4, 4), width_attn=(32, 2, 5, 5), attn=(32, 2, 5, 5)),
    }
    for scheme in SCHEMES:
        model = tiny(scheme)
        with torch.no_grad():
            expected = model(clips())
            with AttentionRecorder(model) as maps:
                found = model(clips())
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert {name: tuple(weights[0].shape) for name, weights in maps.items()} == {
            f"blocks.{i}.{name}": shape for i in (0, 1) for name, shape in shapes[scheme].items()
        }


def test_frozen_blocks_get_no_gradient_and_stay_in_evaluation_mode():
    model = tiny("divided", num_classes=3, frozen_stages=1, drop_path=0.9).train()
    model(clips()).sum().backward()
    for name, p in model.named_parameters():
        frozen = name.startswith(("patch_embed", "cls_token", "pos_embed", "time_embed", "blocks.0."))
        assert (p.grad is None) == frozen, name
    assert not model.blocks[0].training and model.blocks[1].training


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compiles_without_graph_breaks_and_in_bfloat16(scheme):
    model = tiny(scheme, num_classes=3)
    assert torch._dynamo.explain(model)(clips(3, 48, 48)).graph_break_count == 0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model(clips()).isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(attention="divded"), "attention='divded': unknown. Did you mean 'divided'"),
        (dict(num_heads=3), "num_heads=3 must divide d_model=16"),
        (dict(num_frames=0), "num_frames=0: expected at least 1"),
        (dict(out_features=["res5"]), "unknown feature 'res5'"),
        (dict(pretrained=True), "pretrained=True: there are no default weights for this"),
    ],
)
def test_invalid_settings_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        load_pretrained(build("TimeSformer", **{**TINY, **options}))


def test_invalid_clips_are_named():
    model = tiny("divided")
    with pytest.raises(DataError, match=r"expected \(B, 3, T, H, W\)"):
        model(torch.zeros(1, 3, 64, 64))
    with pytest.raises(DataError, match="8 x 64 pixels: expected at least 16 x 16"):
        model(torch.zeros(1, 3, 4, 8, 64))
