"""Fused models compute what the models compute, of every kind."""

import copy
import logging
import pickle
from collections import Counter

import pytest
import torch
from timm.models import hgnet
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.ops import FrozenBatchNorm2d

from tests.helpers.every_model import CLASSIFIERS, CLIPS, DENSE, RESNET, dense_model
from tests.helpers.norm_statistics import randomize_norms
from tests.helpers.realtime_models import deimv2, dfine, rf_detr
from tests.helpers.weights import assert_same_weights
from vitkit import build_model, load_config
from vitkit.backbones.resnet import BasicBlock, ResNet
from vitkit.backbones.resnet_vd import ResNetVD
from vitkit.backbones.timm_fusion import fuse_timm
from vitkit.errors import CheckpointError, ConfigError
from vitkit.kernels import use_kernels
from vitkit.nn.fusion import FusedConv, can_fold
from vitkit.nn.layers import merge_norm
from vitkit.nn.rep_blocks import ConvNorm, RepBlock
from vitkit.registry import BACKBONES
from vitkit.weights import load_weights

TIMM = ("hgnetv2_b0.ssld_stage2_ft_in1k", "resnet18.a1_in1k", "resnet26d.bt_in1k", "test_efficientnet.r160_in1k")
NORMS = (_BatchNorm, FrozenBatchNorm2d)


def tensors(outputs):
    """Return all tensors of real numbers in the outputs of a model."""
    if isinstance(outputs, torch.Tensor):
        return [outputs] if outputs.is_floating_point() else []
    if hasattr(outputs, "values"):
        outputs = outputs.values()
    elif not isinstance(outputs, list | tuple):
        return []
    return [x for part in outputs for x in tensors(part)]


def assert_same(outputs, expected, tolerance=1e-5):
    outputs, expected = tensors(outputs), tensors(expected)
    assert len(outputs) == len(expected) > 0
    for a, b in zip(outputs, expected):
        torch.testing.assert_close(a, b, atol=tolerance * max(float(b.abs().max()), 1e-3), rtol=0)


def assert_fused_is_equal(model, *inputs, folds=True, tolerance=1e-5):
    """Compare a model with its fused copy, by the fast and by the plain operators."""
    model = randomize_norms(model.eval())
    state = copy.deepcopy(model.state_dict())
    fused = model.fused_copy()
    convolutions = [module for module in fused.modules() if isinstance(module, FusedConv)]
    assert bool(convolutions) == folds
    for choice in ("fast", "plain"):
        with torch.inference_mode(), use_kernels(choice):
            assert_same(fused(*inputs), model(*inputs), tolerance)
    assert_same_weights(model, state)
    return fused


def images(*size, padded=False):
    generator = torch.Generator().manual_seed(1)
    mask = torch.zeros(2, *size, dtype=torch.bool)
    mask[1, :, size[1] // 2 :] = padded
    return torch.randn(2, 3, *size, generator=generator).masked_fill(mask[:, None], 0), mask


@pytest.mark.parametrize("name", [name for name in DENSE if "words" not in DENSE[name][1] and name != "GroundingDINO"])
def test_dense_models(name):
    folds = "Swin" not in name and name != "EoMT"
    tolerance = 2e-5 if name == "RFDETRSeg" else 1e-5  # its masks are sums of large products that cancel out
    fused = assert_fused_is_equal(dense_model(name), *images(96, 64, padded=True), folds=folds, tolerance=tolerance)
    assert not any(isinstance(module, NORMS) for module in fused.modules())


@pytest.mark.parametrize("name", [name for name in CLASSIFIERS if CLASSIFIERS[name][1] != CLIPS])
def test_classifiers(name):
    model = build_model(dict(type="Classifier", num_classes=5, backbone=dict(type=name, **CLASSIFIERS[name][0])))
    folds = any(isinstance(module, NORMS) for module in model.modules())
    assert_fused_is_equal(model, images(96, 96)[0], folds=folds)


@pytest.mark.parametrize("norm", [None, "frozen_bn"])
@pytest.mark.parametrize("name", TIMM)
def test_networks_of_timm(name, norm):
    spec = dict(type="TimmBackbone", name=name, norm=norm, pretrained=False)
    model = build_model(dict(type="Classifier", num_classes=5, backbone=spec))
    fused = assert_fused_is_equal(model, images(96, 96)[0])
    # The norm after resnet26d's stem of three convolutions is not next to them.
    assert sum(hasattr(module, "running_var") for module in fused.modules()) == ("26d" in name)
    backbone = randomize_norms(BACKBONES.build(spec).eval())
    with torch.inference_mode():
        expected = backbone(images(75, 64)[0])
        assert_same(backbone.fused()(images(75, 64)[0]), expected)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: dfine("n", num_classes=3, num_queries=20), id="D-FINE-N"),
        pytest.param(lambda: deimv2("atto", num_classes=3, num_queries=20), id="DEIMv2-Atto"),
    ],
)
def test_hgnetv2_with_learned_scales(model):
    torch.manual_seed(0)  # for some weights, D-FINE's refinement enlarges rounding
    fused = assert_fused_is_equal(model(), images(160, 128)[0])
    assert not [m for m in fused.modules() if isinstance(m, NORMS) or type(m).__name__ == "LearnableAffineBlock"]


def test_network_with_frozen_stages_is_fused():
    backbone = BACKBONES.build(dict(type="TimmBackbone", name=TIMM[0], frozen_stages=1, pretrained=False))
    fused = backbone.eval().fused().eval()
    assert not any(isinstance(module, NORMS) for module in fused.modules())


@pytest.mark.parametrize("name", ["RTDETR", "DFINE", "DEIMv2", "Mask2Former", "DETR"])
def test_padding_that_is_isolated_stays_so(name):
    spec = {name: value for name, value in DENSE[name][0].items() if name != "backbone"}
    model = build_model(dict(spec, type=name, backbone=RESNET, num_queries=4, num_classes=3, isolate_padding=True))
    fused = assert_fused_is_equal(model, *images(128, 128, padded=True))
    x, mask = images(128, 128, padded=True)
    with torch.inference_mode():
        batch, alone = fused(x, mask)["pred_logits"][1:], fused(x[1:, :, :, :64])["pred_logits"]
    torch.testing.assert_close(batch, alone, atol=1e-3, rtol=1e-3)


def count_operators(model, x):
    program = torch.export.export(model, (x,), strict=False)
    return Counter(node.target.__name__.partition(".")[0] for node in program.graph.nodes if callable(node.target))


def test_exported_graph_is_convolutions_with_their_activations():
    backbone = randomize_norms(dfine("n", num_classes=3, num_queries=20).eval()).backbone
    x = images(64, 64)[0]
    with torch.no_grad():
        before, after = count_operators(backbone, x), count_operators(copy.deepcopy(backbone).fused(), x)
    assert before["batch_norm"] == before["conv2d"] == after["conv2d"]
    assert not after.keys() & {"batch_norm", "relu", "relu_", "mul"}
    assert after.total() < before.total() / 2


SIZES = [
    *(pytest.param(lambda size=size: dfine(size), id=f"D-FINE-{size}") for size in "nsmlx"),
    *(
        pytest.param(lambda size=size: deimv2(size), id=f"DEIMv2-{size}")
        for size in ("atto", "femto", "pico", "n", "s", "m", "l", "x")
    ),
    *(
        pytest.param(lambda name=name: from_config(name), id=name)
        for name in ("rtdetr_r18", "rtdetr_r34", "rtdetr_r50", "rtdetr_r101", "rtdetrv2_r18", "rtdetrv2_r101")
    ),
    pytest.param(lambda: rf_detr(resolution=384, layers=2), id="RF-DETR-N"),
    pytest.param(lambda: rf_detr(resolution=432, layers=5, patch=12, masks=True), id="RF-DETR-Seg-M"),
]


def from_config(name):
    spec = {key: value for key, value in load_config(name)["model"].items() if key != "training_queries"}
    return build_model(dict(spec, backbone=dict(spec["backbone"], pretrained=False), num_classes=80))


@pytest.mark.slow
@pytest.mark.parametrize("build", SIZES)
def test_published_sizes(build):
    torch.manual_seed(0)
    model = randomize_norms(build().eval())
    side = {"RFDETR": 384, "RFDETRSeg": 432}.get(type(model).__name__, 640)
    x, fused = torch.rand(1, 3, side, side), model.fused_copy()
    assert not any(isinstance(module, NORMS) for module in fused.modules())
    with torch.inference_mode():
        maps = model.backbone(x)
        assert_same(fused.backbone(x), maps)
        features = model.neck(maps)
        assert_same(fused.neck(maps), features)
        # Rounding may exchange two of 300 selected locations, so the head is compared only where it is fused.
        projections = [getattr(part.head, "input_proj", ()) for part in (fused, model)]
        for fused_projection, projection, x in zip(*projections, features.values()):
            assert_same(fused_projection(x), projection(x))


def test_a_model_is_fused_once_and_in_evaluation_mode():
    model = dense_model("DETR")
    with pytest.raises(ConfigError, match=r"fuse: DETR is in training mode\. Call eval\(\) first\."):
        model.train().fuse()
    model.eval().backbone.train()
    with pytest.raises(ConfigError, match=r"fuse: DETR\.backbone is in training mode"):
        model.fuse()
    assert model.eval().fuse() is model
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(CheckpointError, match="load_weights: the model is fused"):
        load_weights(model, {})
    with pytest.raises(ConfigError, match="fuse: DETR is fused already"):
        model.fuse()
    with pytest.raises(ConfigError, match="fuse: DETR is fused already"):
        copy.deepcopy(model).fuse()
    assert model.fused_copy().is_fused
    with pytest.raises(ConfigError, match=r"fuse: DETR has weights without values, in \S+ \(device meta\)"):
        dense_model("DETR").eval().to("meta").fuse()


def test_fused_model_is_neither_trained_nor_saved_nor_loaded():
    model = dense_model("DETR").eval()
    state, fused = model.state_dict(), model.fused_copy()
    with pytest.raises(ConfigError, match="train: DETR is fused"):
        fused.train()
    assert not any(module.training for module in fused.modules())
    with pytest.raises(ConfigError, match="train: the module is fused"):
        fused.backbone.train()
    fused.eval()
    with pytest.raises(CheckpointError, match=r"state_dict: the model is fused .* predictor.model"):
        fused.state_dict()
    with pytest.raises(CheckpointError, match="state_dict: the model is fused"):
        fused.backbone.state_dict()
    with pytest.raises(CheckpointError, match="load_state_dict: the model is fused"):
        fused.load_state_dict(state)


def test_model_without_norms_to_fold_is_neither_trained_nor_saved_nor_loaded():
    model = build_model(
        dict(type="Classifier", num_classes=3, backbone=dict(type="ViT", **CLASSIFIERS["ViT"][0]))
    ).eval()
    state, fused = model.state_dict(), model.fused_copy()
    with pytest.raises(ConfigError, match="train: the module is fused"):
        fused.backbone.train()
    with pytest.raises(CheckpointError, match="state_dict: the model is fused"):
        fused.state_dict()
    with pytest.raises(CheckpointError, match="load_state_dict: the model is fused"):
        fused.load_state_dict(state)


def test_copies_and_other_types_of_a_fused_model_compute_the_same():
    fused = randomize_norms(dense_model("RTDETR").eval()).fuse()
    x, _ = images(96, 64)
    with torch.inference_mode():
        expected = fused(x)
        assert_same(copy.deepcopy(fused)(x), expected)
        assert_same(pickle.loads(pickle.dumps(fused))(x), expected)
        double = copy.deepcopy(fused).double()(x.double())
        assert double["pred_logits"].dtype == torch.float64
        torch.testing.assert_close(double["pred_logits"].float(), expected["pred_logits"], atol=1e-3, rtol=1e-3)
        assert_same(fused.double().float()(x), expected)
    convolution = copy.deepcopy(fused.backbone.conv1).to("meta")  # on another device than the one it was prepared on
    assert convolution(x.to("meta")).device.type == "meta"


def test_fused_copy_shares_what_it_does_not_fold():
    model = dense_model("DETR").eval()
    fused = model.fused_copy()
    assert fused.head.class_embed.weight.data_ptr() == model.head.class_embed.weight.data_ptr()
    assert not model.is_fused
    assert fused.is_fused


def test_what_is_done_to_a_fused_copy_does_not_change_the_model():
    model = dense_model("DETR").eval()
    trained = [parameter.requires_grad for parameter in model.parameters()]
    fused = model.fused_copy()
    assert not any(parameter.requires_grad for parameter in fused.parameters())
    fused.double()
    assert [parameter.requires_grad for parameter in model.parameters()] == trained
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


class OwnBackbone(nn.Module):
    feature_info = dense_model("DETR").backbone.feature_info

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 512, 3, stride=32, bias=False), nn.BatchNorm2d(512), nn.ReLU())

    def forward(self, images):
        before_norm = self.body[0](images)
        return {"res5": self.body[2](self.body[1](before_norm)) + before_norm}


def test_own_backbone_is_left_as_it_is(caplog):
    model = build_model(dict(DENSE["DETR"][0], type="DETR", backbone=OwnBackbone(), num_queries=4, num_classes=3))
    for _ in range(2):
        assert_fused_is_equal(model, images(96, 64)[0], folds=False)
    (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)  # once, not for each copy
    assert "fuse: the backbone OwnBackbone is left as it is, with 1 batch norms" in warning.message


def test_backbone_with_norms_that_are_folded_in_part_says_how_many_are_left(caplog):
    backbone = randomize_norms(ResNet(18, pretrained=False).eval())

    class Own(nn.Module):
        feature_info = dense_model("DETR").backbone.feature_info

        def __init__(self):
            super().__init__()
            self.network, self.norm = backbone, nn.BatchNorm2d(512)

        def forward(self, images, padding_mask=None):
            return {"res5": self.norm(self.network(images)["res5"])}

    model = build_model(dict(DENSE["DETR"][0], type="DETR", backbone=Own(), num_queries=4, num_classes=3))
    assert_fused_is_equal(model, images(96, 64)[0])
    assert "fuse: the backbone Own keeps 1 of its 21 batch norms." in caplog.text


def test_what_a_fused_returns_must_be_a_module():
    model = dense_model("DETR").eval()

    class InPlace(type(model.neck)):
        def forward(self, *args, **named):
            return super().forward(*args, **named)

        def fused(self):
            pass

    model.neck.__class__ = InPlace
    with pytest.raises(
        ConfigError, match=r"fuse: InPlace\.fused\(\) returned NoneType; expected a module, such as self"
    ):
        model.fuse()
    assert isinstance(model.neck, InPlace)


class HalvedBlock(BasicBlock):
    def forward(self, x, padding=None):
        return x + 0.5 * self.bn2(self.conv2(self.bn1(self.conv1(x)).tanh()))


class OtherForward(ResNet):
    def forward(self, images, padding_mask=None):
        features = super().forward(images, padding_mask)
        block = self.layer4[1]
        features["res5"] = features["res5"] + block.bn1(block.conv1(features["res5"])).tanh()
        return features


class OtherStem(ResNet):
    def stem(self, images, padding):
        return self.bn1(self.conv1(images)).tanh()


class OtherStemVD(ResNetVD):
    def stem(self, images, padding):
        return self.bn1(self.conv1(images)).tanh()


def with_own_blocks(backbone):
    for block in backbone.layer1:
        block.__class__ = HalvedBlock
    return backbone


@pytest.mark.parametrize(
    "backbone",
    [
        pytest.param(lambda: with_own_blocks(ResNet(18, pretrained=False)), id="blocks"),
        pytest.param(lambda: OtherForward(18, pretrained=False), id="whole network"),
        pytest.param(lambda: OtherStem(18, pretrained=False), id="stem"),
        pytest.param(lambda: OtherStemVD(18, pretrained=False), id="stem of three"),
    ],
)
def test_what_a_subclass_computes_in_its_own_way_is_not_folded(backbone):
    backbone = randomize_norms(backbone().eval())
    model = build_model(dict(DENSE["DETR"][0], type="DETR", backbone=backbone, num_queries=4, num_classes=3))
    assert_fused_is_equal(model, images(96, 64)[0], folds=not isinstance(backbone, OtherForward))


def test_what_a_forward_of_an_objects_own_computes_is_not_folded():
    model = randomize_norms(dense_model("DETR").eval())
    block = model.backbone.layer1[0]
    block.forward = lambda x, padding: block.bn2(block.conv2(x)).tanh()
    with torch.inference_mode():
        expected = model(images(96, 64)[0])
        assert_same(model.fuse()(images(96, 64)[0]), expected)


@pytest.mark.parametrize("fused", [True, nn.Identity()])
def test_other_things_of_the_methods_name_are_not_called(fused):
    model = dense_model("DETR").eval()
    model.neck.fused = fused
    assert_fused_is_equal(model, images(96, 64)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_are_folded_in_half_precision_with_one_rounding(dtype):
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(8, 64, 3).to(dtype), randomize_norms(nn.BatchNorm2d(64)).eval().to(dtype)
    with torch.no_grad():
        merged = merge_norm(conv, norm)
        exact = merge_norm(copy.deepcopy(conv).double(), copy.deepcopy(norm).double())
    for a, b in zip(merged, exact):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, atol=1e-6, rtol=0.51 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaled", [False, True])
def test_branches_and_scales_are_folded_in_half_precision_with_one_rounding(dtype, scaled):
    torch.manual_seed(0)
    if scaled:
        block = nn.Sequential(hgnet.ConvBNAct(8, 64, 3, use_lab=True))
        nn.init.constant_(block[0].lab.scale, 1.3)
        nn.init.constant_(block[0].lab.bias, 0.7)
    else:
        block = RepBlock(64)
    block = randomize_norms(block).eval().to(dtype)

    def folded(block):
        if not scaled:
            return block.fused()
        fuse_timm(block)
        return block[0].conv

    with torch.no_grad():
        exact, convolution = folded(copy.deepcopy(block).double()), folded(block)
    for name in ("weight", "bias"):
        a, b = getattr(convolution, name), getattr(exact, name)
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, atol=1e-6, rtol=0.51 * torch.finfo(dtype).eps)


def test_norms_that_are_synchronized_in_training_are_folded():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(dense_model("RTDETR"))
    fused = assert_fused_is_equal(model, images(96, 64)[0])
    assert not any(isinstance(module, NORMS) for module in fused.modules())


class OtherNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).tanh()


def with_other_forward(norm):
    norm.forward = torch.tanh
    return norm


@pytest.mark.parametrize(
    "norm",
    [
        pytest.param(lambda: OtherNorm(4).eval(), id="a subclass"),
        pytest.param(lambda: with_other_forward(nn.BatchNorm2d(4).eval()), id="another forward"),
        pytest.param(lambda: nn.BatchNorm2d(4), id="in training mode"),
        pytest.param(lambda: nn.BatchNorm2d(4, track_running_stats=False).eval(), id="no statistics"),
    ],
)
def test_norms_that_compute_something_else_are_not_folded(norm):
    conv = nn.Conv2d(3, 4, 3)
    assert not can_fold(conv, norm())
    assert can_fold(conv, nn.BatchNorm2d(4).eval())


def test_learned_scale_that_is_watched_is_not_folded():
    backbone = randomize_norms(deimv2("atto", num_classes=3, num_queries=20).eval()).backbone
    scales = [module for module in backbone.modules() if type(module).__name__ == "LearnableAffineBlock"]
    seen = []
    scales[0].register_forward_hook(lambda *_: seen.append("scale"))
    with torch.inference_mode():
        backbone.fused()(images(64, 64)[0])
    assert seen == ["scale"]


def test_branch_that_is_watched_is_not_merged():
    block, seen = RepBlock(4).eval(), []
    block.conv2.register_forward_hook(lambda *_: seen.append("branch"))
    block.fused()(torch.zeros(1, 4, 8, 8))
    assert seen == ["branch"]


def test_branch_that_computes_something_else_is_not_merged():
    class Doubled(ConvNorm):
        def forward(self, x, padding_mask=None):
            return 2 * super().forward(x, padding_mask)

    block, x = RepBlock(4).eval(), torch.rand(1, 4, 8, 8)
    block.conv2 = Doubled(4, 4, 1, silu=False).eval()
    with torch.no_grad():
        assert_same(block.fused()(x), block(x))
    block.conv2 = ConvNorm(4, 4, 1, silu=True).eval()
    with torch.no_grad():
        assert_same(block.fused()(x), block(x))


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_parts_whose_gradients_are_watched_stay(register):
    model = dense_model("RTDETR").eval()
    block = next(module for module in model.modules() if isinstance(module, RepBlock))
    seen = []
    getattr(block, register)(lambda *_: seen.append("block"))
    model.fuse()
    assert block in list(model.modules())
    model(images(96, 64)[0].requires_grad_())["pred_logits"].sum().backward()
    assert seen == ["block"]


def test_what_is_watched_is_not_folded():
    model = dense_model("DETR").eval()
    seen = []
    model.backbone.layer1[0].bn1.register_forward_hook(lambda *_: seen.append("norm"))
    model.backbone.layer2[0].register_forward_hook(lambda *_: seen.append("block"))
    fused = model.fuse()
    assert isinstance(fused.backbone.layer1[0].bn1, nn.BatchNorm2d)
    fused(images(96, 64)[0])
    assert seen == ["norm", "block"]
