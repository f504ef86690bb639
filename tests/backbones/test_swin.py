import pytest
import timm
import torch
import torchvision
from torch import nn

from vitkit.backbones.swin import SWIN_VARIANTS, WindowAttention
from vitkit.backbones.swinv2 import SWINV2_VARIANTS
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.nn.activation_checkpointing import enable_activation_checkpointing
from vitkit.nn.attention import AttentionRecorder
from vitkit.registry import BACKBONES
from vitkit.weights import load_pretrained, load_weights

build = BACKBONES.build


PARAMETERS = {  # the official implementations', with 1000 classes
    "swin_tiny": 28_288_354,
    "swin_small": 49_606_258,
    "swin_base": 87_768_224,
    "swin_large": 196_532_476,
    "swin_base_384": 87_903_584,
    "swin_large_384": 196_735_516,
    "swinv2_tiny": 28_347_154,
    "swinv2_small": 49_728_418,
    "swinv2_base": 87_918_816,
    "swinv2_tiny_window16": 28_347_154,
    "swinv2_small_window16": 49_728_418,
    "swinv2_base_window16": 87_918_816,
    "swinv2_base_window12": 87_918_816,
    "swinv2_base_window12to16": 87_918_816,
    "swinv2_base_window12to24": 87_918_816,
    "swinv2_large_window12": 196_739_932,
    "swinv2_large_window12to16": 196_739_932,
    "swinv2_large_window12to24": 196_739_932,
}
SMALL = dict(embed_dim=16, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8), window=4)
TINY = dict(embed_dim=8, depths=(2, 1, 1, 1), num_heads=(2, 2, 2, 2), window=3, out_features=["res2"])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def randomize(model):
    """Set random weights, with which leaving out any part of a block would be noticed."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            scale = 0.2 if value.ndim < 2 or "table" in name else 1.5 / value[0].numel() ** 0.5
            value.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, scale)
    return model.eval()


def assert_same(ours, theirs, size, batch=2):
    images = torch.randn(batch, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [*SWIN_VARIANTS, *SWINV2_VARIANTS])
def test_parameter_counts_equal_the_originals(name):
    with torch.device("meta"):
        model = BACKBONES.build(name, num_classes=1000)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "theirs", "size"),
    [
        ("swin_tiny", "swin_tiny_patch4_window7_224", 224),
        ("swinv2_tiny", "swinv2_tiny_window8_256", 256),
        ("swinv2_tiny_window16", "swinv2_tiny_window16_256", 256),
    ],
)
def test_classifier_with_timms_weights_equals_timms(name, theirs, size):
    theirs = randomize(timm.create_model(theirs, num_classes=7))
    ours = BACKBONES.build(name, num_classes=7).eval()
    load_weights(ours, theirs.state_dict())
    assert_same(ours, theirs, size)


def test_offsets_of_a_fine_tuned_v2_are_in_units_of_the_pretraining_windows():
    theirs = timm.models.swin_transformer_v2.SwinTransformerV2(
        img_size=256,
        window_size=16,
        embed_dim=32,
        depths=(1, 1, 2, 2),
        num_heads=(1, 2, 4, 8),
        pretrained_window_sizes=(12, 12, 12, 6),
        num_classes=7,
    )
    ours = build(
        "SwinV2",
        embed_dim=32,
        depths=(1, 1, 2, 2),
        num_heads=(1, 2, 4, 8),
        window=16,
        trained_windows=(12, 12, 12, 6),
        num_classes=7,
    ).eval()
    load_weights(ours, randomize(theirs).state_dict())
    assert_same(ours, theirs, 256, batch=1)


@pytest.mark.parametrize(
    ("name", "theirs", "size", "official"),
    [
        ("swin_tiny", torchvision.models.swin_t, 224, "torchvision Swin"),
        ("swinv2_tiny", torchvision.models.swin_v2_t, 256, "torchvision Swin V2"),
    ],
)
def test_classifier_with_torchvisions_weights_equals_torchvisions(name, theirs, size, official):
    theirs = randomize(theirs(num_classes=7))
    ours = BACKBONES.build(name, num_classes=7).eval()
    assert load_weights(ours, theirs.state_dict()).converter == official
    assert_same(ours, theirs, size, batch=1)


def test_backbone_weights_load_from_a_detector_checkpoint():
    model = build("Swin", **SMALL)
    state = {f"backbone.{key}": value for key, value in randomize(build("Swin", **SMALL)).state_dict().items()}
    buffers = {"backbone.layers.0.blocks.0.attn.relative_position_index": torch.zeros(16, 16)}
    report = load_weights(model, {**state, **buffers, "neck.conv.weight": torch.zeros(1)})
    assert report.converter == "SwinTransformer/Swin-Transformer-Object-Detection"
    assert all(torch.equal(value, state[f"backbone.{key}"]) for key, value in model.state_dict().items())


def test_names_with_a_prefix_load():
    theirs = timm.models.SwinTransformer(
        img_size=32, window_size=4, embed_dim=16, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8), num_classes=0
    )
    model = nn.ModuleDict({"backbone": build("Swin", **SMALL)})
    state = {f"backbone.{key}": value for key, value in randomize(theirs).state_dict().items()}
    state["backbone.layers.0.blocks.1.attn_mask"] = torch.zeros(4, 16, 16)
    report = load_weights(model, state, strict=False)
    assert report.missing == [f"backbone.norm{i}.{kind}" for i in range(4) for kind in ("weight", "bias")]
    assert (report.left_out, report.unexpected) == (["backbone.norm.weight", "backbone.norm.bias"], [])
    merging = "downsample.reduction.weight"
    assert torch.equal(
        model["backbone"].state_dict()[f"layers.2.{merging}"], theirs.state_dict()[f"layers.3.{merging}"]
    )


def test_pretrained_classifier_starts_a_dense_backbone(tmp_path):
    path = tmp_path / "classifier.pth"
    torch.save({"model": build("Swin", **SMALL, num_classes=3).state_dict()}, path)
    assert load_pretrained(build("Swin", **SMALL, pretrained=str(path))) == str(path)
    with pytest.raises(CheckpointError, match="layers.0.blocks.0.attn.logit_scale"):
        load_pretrained(build("SwinV2", **SMALL, pretrained=str(path)))


def test_pretrained_true_loads_the_official_weights_of_the_size():
    base = "https://github.com/SwinTransformer/storage/releases/download"
    with torch.device("meta"):
        assert BACKBONES.build("swin_base_384")._url() == f"{base}/v1.0.0/swin_base_patch4_window12_384.pth"
        v2 = BACKBONES.build("swinv2_base_window12to24")._url()
        assert v2 == f"{base}/v2.0.0/swinv2_base_patch4_window12to24_192to384_22kto1k_ft.pth"
        assert BACKBONES.build("swin_tiny")._url() == f"{base}/v1.0.0/swin_tiny_patch4_window7_224.pth"
    with pytest.raises(ConfigError, match="pretrained=True: there are no default weights for this"):
        build("Swin", **SMALL)._url()


def test_bias_tables_are_resampled_when_the_window_changes():
    offsets = torch.arange(7.0)
    state = {"relative_position_bias_table": (offsets[:, None] + 10 * offsets).flatten()[:, None].repeat(1, 2)}
    WindowAttention(4, 2, window=7).adapt_state(state, "")
    wide = state["relative_position_bias_table"].view(13, 13, 2)
    torch.testing.assert_close(wide[6, 6], torch.tensor([33.0, 33.0]))
    torch.testing.assert_close(wide, -wide.flip(0, 1) + 66, atol=1e-3, rtol=0)
    assert (wide[1:] > wide[:-1]).all() and (wide[:, 1:] > wide[:, :-1]).all()
    model = build("Swin", **{**SMALL, "window": 7})
    load_weights(model, build("Swin", **SMALL).state_dict())
    with pytest.raises(CheckpointError, match=r"patch_embed.proj.weight: checkpoint \(16, 3, 4, 4\), model \(32, 3, 4"):
        load_weights(
            build("Swin", embed_dim=32, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8), window=4),
            build("Swin", **SMALL).state_dict(),
        )


def test_stages_smaller_than_a_window_use_the_center_of_a_full_bias_table():
    sizes = dict(embed_dim=12, depths=(2, 1, 2, 1), num_heads=(1, 2, 3, 4), num_classes=3)
    theirs = randomize(timm.models.swin_transformer.SwinTransformer(img_size=64, window_size=4, **sizes)).eval()
    tables = [len(layer.blocks[0].attn.relative_position_bias_table) for layer in theirs.layers]
    assert tables == [49, 49, 49, 9]
    ours = build("Swin", window=4, **sizes).eval()
    load_weights(ours, theirs.state_dict())
    images = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-4)


def test_small_feature_map_is_one_window_with_the_center_of_the_bias_table():
    # Official classifiers have a table for the smaller window; its entries are the central ones of ours.
    theirs = randomize(
        timm.models.SwinTransformer(
            img_size=64, window_size=8, embed_dim=16, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8), num_classes=7
        )
    )
    ours = build("Swin", **{**SMALL, "window": 8}, num_classes=7).eval()
    state = theirs.state_dict()
    for key in [key for key in state if key.endswith("bias_table")]:
        side = int(len(state[key]) ** 0.5)
        edge = (15 - side) // 2
        table = state[key].view(side, side, -1)
        state[key] = nn.functional.pad(table, (0, 0, edge, edge, edge, edge), value=float("nan")).flatten(0, 1)
    load_weights(ours, state)
    assert_same(ours, theirs, 64)


@pytest.mark.parametrize("name", ["Swin", "SwinV2"])
@pytest.mark.parametrize("size", [(4, 5), (33, 79), (64, 64)])
def test_maps_have_the_promised_shapes_and_all_parameters_finite_gradients(name, size):
    model = build(name, **SMALL, out_features=["res3", "res5"])
    features = model(torch.randn(2, 3, *size))
    assert list(features) == list(model.feature_info) == ["res3", "res5"]
    for name, (channels, stride) in model.feature_info.items():
        assert features[name].shape == (2, channels, -(-size[0] // stride), -(-size[1] // stride))
    sum((x * torch.randn_like(x)).mean() for x in features.values()).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name", ["Swin", "SwinV2"])
def test_classifiers_accept_any_image_size(name):
    model = build(name, **SMALL, num_classes=5)
    for size in ((4, 4), (37, 150), (224, 224)):
        logits = model(torch.randn(1, 3, *size))
        assert logits.shape == (1, 5)
        assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name", ["Swin", "SwinV2"])
def test_gradients_equal_finite_differences_with_padding_and_shift(name):
    # With other weights, a step may cross a kink of the ReLU in SwinV2's position network, where the finite difference
    # is not the slope.
    torch.manual_seed(2)
    model = randomize(build(name, **TINY).double())
    images = torch.randn(1, 3, 17, 14, dtype=torch.double)
    weights = torch.randn(1, 8, 5, 4, dtype=torch.double)

    def loss():
        return (model(images)["res2"] * weights).sum()

    loss().backward()
    for name, parameter in model.named_parameters():
        direction = torch.randn_like(parameter)
        step = 1e-5
        with torch.no_grad():
            parameter += step * direction
            above = loss()
            parameter -= 2 * step * direction
            below = loss()
            parameter += step * direction
        expected = (above - below) / (2 * step)
        torch.testing.assert_close((parameter.grad * direction).sum(), expected, rtol=1e-5, atol=1e-6, msg=name)


def test_stages_beyond_the_deepest_feature_are_not_built():
    model = build("Swin", **SMALL, out_features=["res3"])
    assert len(model.layers) == 2
    assert model.layers[1].downsample is None
    assert {name.split(".")[0] for name in model.state_dict()} == {"patch_embed", "layers", "norm1"}


def test_frozen_stages_get_no_gradient():
    model = build("Swin", **SMALL, frozen_stages=1).train()
    sum(x.square().mean() for x in model(torch.randn(1, 3, 32, 32)).values()).backward()
    frozen = {name for name, p in model.named_parameters() if p.grad is None}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith(("patch_embed.", "layers.0."))}


@pytest.mark.parametrize("name", ["Swin", "SwinV2"])
def test_checkpointed_blocks_give_the_same_gradients(name):
    model = randomize(build(name, **SMALL, drop_path=0.0)).train()
    images = torch.randn(1, 3, 35, 50)
    gradients = []
    for enabled in (False, True):
        enable_activation_checkpointing(model, enabled)
        model.zero_grad()
        sum((x**3).mean() for x in model(images).values()).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, grad in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], grad, msg=name)


def test_drop_path_grows_over_the_blocks():
    model = build("Swin", **SMALL, drop_path=0.7)
    rates = [block.drop_path.p for layer in model.layers for block in layer.blocks]
    assert rates == pytest.approx([0.1 * i for i in range(8)])


@pytest.mark.parametrize("name", ["Swin", "SwinV2"])
def test_recorded_attention_masks_tokens_brought_in_by_the_shift(name):
    model = randomize(build(name, **SMALL))
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        plain = model(images)
        with AttentionRecorder(model) as maps:
            recorded = model(images)
    assert list(maps) == [f"layers.{i}.blocks.{j}.attn" for i in range(4) for j in range(2)]
    weights = maps["layers.0.blocks.1.attn"][0]
    assert weights.shape == (4, 1, 16, 16)
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, 1, 16))
    # The last window: its 2x2 groups of locations come from the four corners of the map, and see only their own corner.
    corners = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3])
    assert torch.equal(weights[3, 0] > 0, corners[:, None] == corners)
    for name, x in plain.items():
        torch.testing.assert_close(recorded[name], x, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["Swin", "SwinV2"])
def test_bfloat16_autocast_trains(name):
    model = randomize(build(name, **SMALL)).train()
    images = torch.randn(2, 3, 40, 52)
    expected = model.eval()(images)
    with torch.autocast("cpu", torch.bfloat16):
        features = model.train()(images)
        sum(x.float().square().mean() for x in features.values()).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        features = model.eval()(images)
    for name, x in features.items():
        assert (x - expected[name]).square().mean().sqrt() < 0.1 * expected[name].std(), name


@pytest.mark.parametrize("name", ["Swin", "SwinV2"])
def test_compiles_without_graph_breaks(name):
    model = randomize(build(name, **TINY))
    images, direction = torch.randn(1, 3, 17, 14), torch.randn(1, 8, 5, 4)
    gradients = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        (run(images)["res2"] * direction).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(window=0), "window=0: expected at least 1"),
        (dict(embed_dim=0), "embed_dim=0: expected at least 1"),
        (dict(num_heads=(1, 2, 3, 8)), "num_heads=3 must divide the stage's 64 channels"),
        (dict(depths=(2, 2)), "expected one number for each of 4 stages"),
        (dict(out_features=["res6"]), "out_features: unknown feature 'res6'"),
        (dict(num_classes=3, out_features=["res5"]), "a classifier .* returns no features"),
        (dict(frozen_stages=5), "frozen_stages=5: expected 0 to 4"),
    ],
)
def test_invalid_settings_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build("Swin", **{**SMALL, **arguments})


def test_wrong_windows_of_v2_and_unknown_variants_are_named():
    with pytest.raises(ConfigError, match=r"trained_windows=\[8\]: expected one for each of 4 stages"):
        build("SwinV2", **SMALL, trained_windows=[8])
    with pytest.raises(ConfigError, match="unknown backbone 'swin_tinny'. Did you mean 'swin_tiny'"):
        BACKBONES.build("swin_tinny")


def test_wrong_images_are_named():
    model = build("Swin", **SMALL)
    with pytest.raises(DataError, match=r"Swin: images of shape \(1, 4, 32, 32\): expected \(B, 3, H, W\)"):
        model(torch.randn(1, 4, 32, 32))
    with pytest.raises(DataError, match="Swin: images of 3 x 32 pixels: expected at least 4 x 4"):
        model(torch.randn(1, 3, 3, 32))
