import pytest
import torch

from vitkit.apps.analysis.macs import count_macs
from vitkit.backbones.lrnet import LRNET_VARIANTS
from vitkit.errors import ConfigError, DataError
from vitkit.nn.activation_checkpointing import enable_activation_checkpointing
from vitkit.nn.attention import AttentionRecorder
from vitkit.registry import BACKBONES
from vitkit.weights import load_weights

build = BACKBONES.build


SMALL = dict(depth=26, kernel_size=3)

PARAMETERS = {
    "lrnet26": 14_621_492,
    "lrnet26_k3": 14_621_492,
    "lrnet26_m1": 19_291_624,
    "lrnet26_m4": 15_128_698,
    "lrnet50": 23_397_811,
    "lrnet50_k9": 23_397_811,
    "lrnet50_m1": 31_824_072,
    "lrnet50_m2": 26_432_476,
    "lrnet50_m16": 22_977_037,
    "lrnet101": 40_832_127,
}


@pytest.mark.parametrize("variant", PARAMETERS)
def test_classifiers_have_the_published_parameters(variant):
    """The published 23.3 M and 14.7 M to 0.6 %, and exactly those of an independent reconstruction."""
    with torch.device("meta"):
        model = BACKBONES.build(variant, num_classes=1000)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[variant]


def test_macs_of_lrnet50_equal_an_independent_reconstruction():
    """An independent reconstruction has 4.072 G; its queries are computed at twice the needed rows and columns."""
    macs = count_macs(build("LRNet", num_classes=1000), torch.zeros(1, 3, 224, 224))
    unneeded = sum(c * -(-c // 8) * (4 - 1) * side**2 for c, side in ((64, 112), (200, 28), (400, 14), (800, 7)))
    # Each group has eight channels of values and one channel of keys, whose products the reconstruction leaves out.
    products = macs.total - macs.by_operator["native_batch_norm"] - macs.by_operator["im2col"] / 9
    assert (products + unneeded) / 1e9 == pytest.approx(4.072, abs=1e-3)


@pytest.mark.parametrize("variant", LRNET_VARIANTS)
def test_features_have_the_promised_shapes(variant):
    with torch.device("meta"):
        model = BACKBONES.build(variant, out_features=["res3", "res5"]).eval()
        features = model(torch.zeros(1, 3, 33, 79))
    assert list(features) == list(model.feature_info) == ["res3", "res5"]
    for name, (channels, stride) in model.feature_info.items():
        assert features[name].shape == (1, channels, -(-33 // stride), -(-79 // stride))


@pytest.mark.parametrize("num_classes", [None, 5])
def test_gradients_are_finite_at_odd_sizes(num_classes):
    torch.manual_seed(0)
    model = build("LRNet", **SMALL, num_classes=num_classes, drop_path=0.1)
    output = model(torch.randn(2, 3, 45, 61))
    sum(x.square().mean() for x in (output.values() if num_classes is None else [output])).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_stages_beyond_the_deepest_feature_are_not_built():
    model = build("LRNet", **SMALL, out_features=["res3"]).eval()
    assert not any(name.startswith(("layers.res4", "layers.res5", "fc")) for name in model.state_dict())
    assert list(model(torch.randn(1, 3, 8, 8))) == ["res3"]


def test_frozen_stages_get_no_gradient():
    model = build("LRNet", **SMALL, frozen_stages=1, out_features=["res3"]).train()
    model(torch.randn(2, 3, 16, 16))["res3"].square().mean().backward()
    frozen = {name for name, p in model.named_parameters() if p.grad is None}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith(("stem.", "layers.res2."))}


def test_recomputing_activations_keeps_the_gradients():
    torch.manual_seed(0)
    model = build("LRNet", **SMALL, out_features=["res3"])
    images = torch.randn(2, 3, 16, 20)
    grads = []
    for enabled in (False, True):
        assert enable_activation_checkpointing(model, enabled) == 4
        model.zero_grad()
        model(images)["res3"].square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)


def test_recorder_collects_the_weights_of_every_layer():
    model = build("LRNet", **SMALL, out_features=["res3"]).eval()
    with AttentionRecorder(model) as maps:
        model(torch.randn(1, 3, 16, 24))
    assert len(maps) == 5
    weights = maps["layers.res3.0.relation"][0]
    assert weights.shape == (1, 25, 2 * 3, 9)  # groups of 8 of the 200 channels, locations, window
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 25, 6))


def test_weights_load_into_models_with_another_window_size():
    source, model = build("LRNet", **SMALL, num_classes=3), build("LRNet", depth=26, kernel_size=5, num_classes=3)
    load_weights(model, source.state_dict())
    torch.testing.assert_close(model.stem[3].prior()[:, 1:4, 1:4], source.stem[3].prior())


def test_compiles_without_graph_breaks_and_runs_in_other_dtypes():
    model = build("LRNet", **SMALL, out_features=["res2"]).eval()
    images = torch.randn(1, 3, 12, 9)
    expected = model(images)["res2"]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images)["res2"], expected, atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(images)["res2"].float(), expected, atol=0.1, rtol=0.1)
    double = model.double()(images.double())["res2"]
    torch.testing.assert_close(double.float(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(depth=34), "depth=34: expected one of 26, 50, 101"),
        (dict(kernel_size=0), "kernel_size=0"),
        (dict(channels_per_weight=65), "channels_per_weight=65: expected 1 to the 64 channels"),
        (dict(similarity="cosine"), "similarity='cosine': unknown"),
        (dict(out_features=["res6"]), "unknown feature 'res6'"),
        (dict(num_classes=2, out_features=["res5"]), "returns no features"),
        (dict(frozen_stages=5), "frozen_stages=5: expected 0 to 4"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message), torch.device("meta"):
        build("LRNet", **arguments)


def test_wrong_images_are_named():
    model = build("LRNet", **SMALL, out_features=["res2"])
    with pytest.raises(DataError, match=r"images of shape \(1, 4, 8, 8\): expected \(B, 3, H, W\)"):
        model(torch.zeros(1, 4, 8, 8))
    with pytest.raises(DataError, match="images of 3 x 8 pixels: expected at least 4 x 4"):
        model(torch.zeros(1, 3, 3, 8))
