import pytest
import torch
import torchvision

from vitkit.backbones.nonlocal_resnet import CLIP_RESNET_VARIANTS, NON_LOCAL_RESNET_VARIANTS
from vitkit.errors import ConfigError, DataError
from vitkit.nn.activation_checkpointing import enable_activation_checkpointing
from vitkit.nn.attention import AttentionRecorder
from vitkit.nn.non_local import PAIRWISE, NonLocalBlock
from vitkit.registry import BACKBONES
from vitkit.weights import load_pretrained, load_weights

build = BACKBONES.build


# Numbers of parameters of the official code, with 400 classes.
OFFICIAL = {
    "c2d_nln_r50": 31_686_096,
    "i3d_r50": 28_043_472,
    "i3d_nln_r50": 35_401_936,
    "i3d_nln_r101": 59_112_656,
    "slow_nln_r50": 39_812_560,
}
SHALLOW = dict(depth=18, positions={"res3": (0,), "res4": (1,)}, pretrained=False)


@pytest.mark.parametrize("variant", OFFICIAL)
def test_parameter_counts_equal_the_originals(variant):
    with torch.device("meta"):
        model = BACKBONES.build(variant, num_classes=400)
    assert sum(p.numel() for p in model.parameters()) == OFFICIAL[variant]


@pytest.mark.parametrize("variant", CLIP_RESNET_VARIANTS)
def test_clip_features_have_the_promised_shapes(variant):
    with torch.device("meta"):
        model = BACKBONES.build(variant, out_features=["res2", "res5"]).eval()
        features = model(torch.zeros(1, 3, 6, 65, 39))
    of_paper = "block" in variant
    frames = 6 if variant.startswith("slow") else 1 if of_paper else 3
    assert features["res2"].shape == (1, 256, 2 if of_paper else 6, 17, 10)
    assert features["res5"].shape == (1, 2048, frames, 3, 2)


@pytest.mark.parametrize("kind", ["c2d", "i3d"])
def test_networks_have_the_sizes_and_blocks_of_the_paper(kind):
    for depth in (50, 101):
        for count in (1, 5, 10):
            with torch.device("meta"):
                model = BACKBONES.build(f"nonlocal_{kind}_r{depth}_{count}block").eval()
                features = model(torch.zeros(1, 3, 32, 224, 224))
            # Table 1.
            assert {name: tuple(x.shape[2:]) for name, x in features.items()} == {
                "res2": (8, 56, 56),
                "res3": (4, 28, 28),
                "res4": (4, 14, 14),
                "res5": (4, 7, 7),
            }
            blocks = [name for name, module in model.named_modules() if isinstance(module, NonLocalBlock)]
            per_stage = {stage: sum(f"layers.{stage}." in name for name in blocks) for stage in ("res3", "res4")}
            assert per_stage == {1: dict(res3=0, res4=1), 5: dict(res3=2, res4=3), 10: dict(res3=4, res4=6)}[count]


@pytest.mark.parametrize("pairwise", PAIRWISE)
def test_every_pairwise_function_trains_on_clips(pairwise):
    torch.manual_seed(0)
    model = build("ClipResNet", num_classes=3, positions={"res3": (0,)}, pairwise=pairwise, paper_pooling=True)
    for module in model.modules():
        if isinstance(module, NonLocalBlock):
            torch.nn.init.ones_(module.norm.weight)  # which starts at 0
    model(torch.randn(2, 3, 9, 33, 40)).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", ["c2d", "i3d"])
def test_inflated_resnet_on_a_still_clip_equals_the_image_resnet(kind, tmp_path):
    torch.manual_seed(0)
    theirs = torchvision.models.resnet50(num_classes=5).eval()
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    model = build("ClipResNet", inflation=kind, num_classes=5, pretrained=str(tmp_path / "w.pth")).eval()
    load_pretrained(model)
    assert torch.equal(model.fc.weight, theirs.fc.weight)
    if kind == "c2d":  # the frames at a clip's ends see zeros beyond it through kernels of several frames
        images = torch.randn(2, 3, 64, 40)
        clips = images[:, :, None].expand(-1, -1, 4, -1, -1)
        torch.testing.assert_close(model(clips), theirs(images), atol=1e-4, rtol=1e-4)
    else:
        kernel = model.layers.res2.res0.branch2.a.weight
        assert kernel.shape[2] == 3 and model.stem.conv.weight.shape[2] == 5
        torch.testing.assert_close(kernel.sum(2), theirs.layer1[0].conv1.weight)
        torch.testing.assert_close(model.stem.conv.weight[:, :, 1] * 5, theirs.conv1.weight)


def slowfast_shapes(norm):
    """SlowFast's I3D-R50 with five non-local blocks, each entry's name and shape as its code makes them.

    Args:
        norm: the name of a non-local block's norm: "bn", or "norm" in other versions.
    """
    shapes = {}

    def add_norm(name, channels):
        shapes.update({f"{name}.{kind}": (channels,) for kind in ("weight", "bias", "running_mean", "running_var")})
        shapes[f"{name}.num_batches_tracked"] = ()

    shapes["s1.pathway0_stem.conv.weight"] = (64, 3, 5, 7, 7)
    add_norm("s1.pathway0_stem.bn", 64)
    frames = {2: [3, 3, 3], 3: [3, 1, 3, 1], 4: [3, 1, 3, 1, 3, 1], 5: [1, 3, 1]}
    nonlocal_after = {3: (1, 3), 4: (1, 3, 5)}
    channels = 64
    for stage, kernels in frames.items():
        width = 64 * 2 ** (stage - 2)
        for i, kernel in enumerate(kernels):
            block = f"s{stage}.pathway0_res{i}"
            if i == 0:
                shapes[f"{block}.branch1.weight"] = (4 * width, channels, 1, 1, 1)
                add_norm(f"{block}.branch1_bn", 4 * width)
            shapes[f"{block}.branch2.a.weight"] = (width, channels, kernel, 1, 1)
            shapes[f"{block}.branch2.b.weight"] = (width, width, 1, 3, 3)
            shapes[f"{block}.branch2.c.weight"] = (4 * width, width, 1, 1, 1)
            for letter, size in (("a", width), ("b", width), ("c", 4 * width)):
                add_norm(f"{block}.branch2.{letter}_bn", size)
            channels = 4 * width
            if i in nonlocal_after.get(stage, ()):
                block = f"s{stage}.pathway0_nonlocal{i}"
                for name in ("theta", "phi", "g"):
                    shapes[f"{block}.conv_{name}.weight"] = (channels // 2, channels, 1, 1, 1)
                    shapes[f"{block}.conv_{name}.bias"] = (channels // 2,)
                shapes[f"{block}.conv_out.weight"] = (channels, channels // 2, 1, 1, 1)
                shapes[f"{block}.conv_out.bias"] = (channels,)
                add_norm(f"{block}.{norm}", channels)
    return shapes | {"head.projection.weight": (400, channels), "head.projection.bias": (400,)}


def slowfast_state(norm):
    """Return a state dict in which every entry has a different value."""
    return {
        key: torch.full(shape, i, dtype=torch.int64 if key.endswith("tracked") else torch.float32)
        for i, (key, shape) in enumerate(slowfast_shapes(norm).items())
    }


@pytest.mark.parametrize("norm", ["bn", "norm"])
def test_official_names_load(norm):
    official = slowfast_state(norm)
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert sum(v.numel() for k, v in official.items() if not k.endswith(statistics)) == OFFICIAL["i3d_nln_r50"]
    model = build("i3d_nln_r50", num_classes=400)
    report = load_weights(model, official)
    assert report.converter == "facebookresearch/SlowFast ResNet" and not report.missing and not report.unexpected
    loaded = model.state_dict()
    assert len(loaded) == len(official)
    for ours, theirs in {
        "stem.conv.weight": "s1.pathway0_stem.conv.weight",
        "layers.res2.res0.branch1_bn.running_var": "s2.pathway0_res0.branch1_bn.running_var",
        "layers.res3.nonlocal1.conv_theta.weight": "s3.pathway0_nonlocal1.conv_theta.weight",
        "layers.res3.nonlocal1.norm.weight": f"s3.pathway0_nonlocal1.{norm}.weight",
        "layers.res4.nonlocal5.norm.running_mean": f"s4.pathway0_nonlocal5.{norm}.running_mean",
        "layers.res5.res2.branch2.c_bn.bias": "s5.pathway0_res2.branch2.c_bn.bias",
        "fc.weight": "head.projection.weight",
    }.items():
        assert torch.equal(loaded[ours], official[theirs]), ours


def test_official_names_load_with_a_prefix():
    official = {f"backbone.{key}": value for key, value in slowfast_state("bn").items()}
    below = torch.nn.ModuleDict({"backbone": build("i3d_nln_r50", num_classes=400)})
    load_weights(below, official)
    expected = official["backbone.s4.pathway0_nonlocal3.bn.bias"]
    assert torch.equal(below["backbone"].layers.res4.nonlocal3.norm.bias, expected)


def test_clip_gradients_are_finite_and_frozen_stages_have_none():
    torch.manual_seed(0)
    model = build("ClipResNet", inflation="slow", frozen_stages=1, out_features=["res3"], positions={"res3": (0,)})
    model(torch.randn(2, 3, 1, 17, 22))["res3"].square().mean().backward()
    for name, p in model.named_parameters():
        assert (p.grad is None) == name.startswith(("stem.", "layers.res2.")), name
        assert p.grad is None or torch.isfinite(p.grad).all()


def test_activation_checkpointing_works_on_clips():
    torch.manual_seed(0)
    model = build("ClipResNet", out_features=["res3"])
    clips = torch.randn(2, 3, 2, 16, 16)
    grads = []
    for enabled in (False, True):
        assert enable_activation_checkpointing(model, enabled) == 3 + 4 + 2
        model.zero_grad()
        model(clips)["res3"].square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("variant", NON_LOCAL_RESNET_VARIANTS)
def test_a_new_network_equals_the_resnet_whose_weights_it_loads(variant, tmp_path):
    theirs = getattr(torchvision.models, variant.removeprefix("nonlocal_"))()
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    model = BACKBONES.build(variant, pretrained=str(tmp_path / "w.pth"), out_features=["res4"]).eval()
    load_pretrained(model)
    plain = build("ResNet", depth=model.depth, out_features=["res4"]).eval()
    plain.load_state_dict(theirs.state_dict(), strict=False)
    images = torch.randn(1, 3, 45, 37)
    torch.testing.assert_close(model(images)["res4"], plain(images)["res4"])
    with AttentionRecorder(model) as maps:
        model(images)
    assert [*maps] == [*(f"layer2.non_local{i}" for i in (1, 3)), *(f"layer3.non_local{i}" for i in (1, 3, 5))]


@pytest.mark.parametrize("norm", ["bn", "frozen_bn"])
def test_gradients_are_finite_and_padding_is_ignored(norm):
    torch.manual_seed(0)
    model = build("NonLocalResNet", **SHALLOW, norm=norm).train()
    model(torch.randn(2, 3, 65, 65))["res5"].square().mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    torch.nn.init.ones_(model.layer2.non_local0.norm.weight)
    model.eval()
    image = torch.randn(1, 3, 64, 64)
    padded, mask = torch.full((1, 3, 96, 128), 7.0), torch.ones(1, 96, 128, dtype=torch.bool)
    padded[..., :64, :64], mask[:, :64, :64] = image, False
    alone, within = model(image), model(padded, mask)
    for name, x in alone.items():
        height, width = x.shape[-2:]
        torch.testing.assert_close(within[name][..., :height, :width], x, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: build("NonLocalResNet", positions={"res6": (0,)}), "unknown stage 'res6'"),
        (lambda: build("NonLocalResNet", positions={"res4": (5, 6)}), r"res4 has blocks 0 to 5, got \[6\]"),
        (lambda: build("NonLocalResNet", pairwise="cosine"), "pairwise='cosine': unknown"),
        (lambda: build("ClipResNet", depth=18), "depth=18: expected one of 50, 101"),
        (lambda: build("ClipResNet", inflation="i3"), "inflation='i3': unknown. Did you mean 'i3d'"),
        (lambda: build("ClipResNet", pool=(2, 2)), r"pool=\(2, 2\): expected 3 numbers"),
        (lambda: build("ClipResNet", out_features=["res1"]), "unknown feature 'res1'"),
    ],
)
def test_wrong_arguments_are_named(build, message):
    with torch.device("meta"), pytest.raises(ConfigError, match=message):
        build()


def test_wrong_clips_are_named():
    with torch.device("meta"):
        model = build("ClipResNet", out_features=["res2"])
        with pytest.raises(DataError, match=r"images of shape \(1, 3, 8, 8\): expected \(B, 3, T, H, W\)"):
            model(torch.zeros(1, 3, 8, 8))
        with pytest.raises(DataError, match="clips of 1 frames"):
            model(torch.zeros(1, 3, 1, 8, 8))
