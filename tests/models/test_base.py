"""Properties of every dense model: the same result on its own and in any batch, and clear errors."""

import logging

import pytest
import torch
from torch import nn

from vitkit.backbones.base import check_feature_info
from vitkit.engine.build import build_model
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.models.base import DensePredictionModel
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD, pixel_statistics
from vitkit.protocols.backbone import Backbone, with_defaults
from vitkit.registry import MODELS
from vitkit.structures import FeatureInfo
from vitkit.text.vocabulary import Vocabulary
from vitkit.weights import load_pretrained

RESNET = dict(type="ResNet", depth=18, base_channels=32, pretrained=False)
DETR_HEAD = dict(type="DETRHead", d_model=128, num_heads=8, d_ffn=32, num_encoder_layers=1, num_decoder_layers=2)
MASK2FORMER_HEAD = dict(type="Mask2FormerHead", d_model=32, num_heads=2, d_ffn=32, num_decoder_layers=4)
MASKFORMER_HEAD = dict(type="MaskFormerHead", d_model=32, num_heads=2, d_ffn=32, num_decoder_layers=2)
TASKS = ["semantic", "instance", "panoptic"]
DEFORMABLE_DECODER = dict(type="DeformablePixelDecoder", out_channels=32, mask_channels=16, num_heads=2, num_layers=1)
C2F = dict(type="C2fProjection", out_channels=32, in_features=["res5"])
RF_DETR_HEAD = dict(
    type="RFDETRHead", d_model=32, num_heads=2, num_cross_heads=4, num_points=2, d_ffn=32, num_decoder_layers=2
)
DENSE_MODELS = {
    "detr": dict(type="DETR", neck=dict(type="ChannelProjection", out_channels=128), head=DETR_HEAD, num_queries=6),
    "detr_segmentation": dict(
        type="DETRSegmentation",
        neck=dict(type="ChannelProjection", out_channels=128),
        head=DETR_HEAD,
        num_queries=6,
        tasks=["instance", "panoptic"],
        object_threshold=0.0,
    ),
    "deformable_detr": dict(
        type="DeformableDETR",
        neck=dict(type="PyramidProjection", out_channels=32, num_levels=3, num_groups=4, in_features=["res3", "res4"]),
        head=dict(
            type="DeformableDETRHead",
            d_model=32,
            num_heads=2,
            num_points=2,
            d_ffn=32,
            num_encoder_layers=1,
            num_decoder_layers=2,
            refine_boxes=True,
            two_stage=True,
        ),
        num_queries=6,
    ),
    "dino": dict(
        type="DINO",
        neck=dict(type="PyramidProjection", out_channels=32, num_levels=3, num_groups=4, in_features=["res3", "res4"]),
        head=dict(
            type="DINOHead", d_model=32, num_heads=2, num_points=2, d_ffn=32, num_encoder_layers=1, num_decoder_layers=2
        ),
        num_queries=6,
    ),
    "grounding_dino": dict(
        type="GroundingDINO",
        neck=dict(type="PyramidProjection", out_channels=32, num_levels=3, num_groups=4, in_features=["res3", "res4"]),
        head=dict(
            type="GroundingDINOHead", d_model=32, num_heads=2, d_ffn=32, num_encoder_layers=1, num_decoder_layers=2
        ),
        text_encoder=dict(type="TransformerTextEncoder", num_layers=1, d_model=16, num_heads=2, d_ffn=16, dropout=0.0),
        tokenizer=Vocabulary.train("word", ["a b c ."]),
        num_queries=6,
    ),
    "rt_detr": dict(
        type="RTDETR",
        neck=dict(
            type="HybridEncoder", out_channels=32, in_features=["res4", "res5"], num_heads=2, d_ffn=32, num_blocks=1
        ),
        head=dict(type="RTDETRHead", d_model=32, num_heads=2, num_points=2, d_ffn=32, num_decoder_layers=2),
        num_queries=6,
    ),
    "rf_detr": dict(type="RFDETR", neck=C2F, head=RF_DETR_HEAD, num_queries=2),
    "rf_detr_seg": dict(type="RFDETRSeg", neck=C2F, head=dict(RF_DETR_HEAD, masks=True), num_queries=2),
    "rf_detr_keypoints": dict(
        type="RFDETRKeypoints", neck=dict(C2F, type="C2fProjectionPair"), head=RF_DETR_HEAD, num_queries=2
    ),
    "rt_detr_v2": dict(
        type="RTDETRv2",
        neck=dict(
            type="HybridEncoder", out_channels=32, in_features=["res4", "res5"], num_heads=2, d_ffn=32, num_blocks=1
        ),
        head=dict(type="RTDETRv2Head", d_model=32, num_heads=2, num_points=[2, 3], d_ffn=32, num_decoder_layers=2),
        num_queries=6,
    ),
    "dfine": dict(
        type="DFINE",
        neck=dict(
            type="DFINEEncoder", out_channels=32, in_features=["res4", "res5"], num_heads=2, d_ffn=32, num_blocks=1
        ),
        head=dict(
            type="DFINEHead", d_model=32, num_heads=2, num_points=[2, 4], d_ffn=32, num_decoder_layers=2, reg_max=8
        ),
        num_queries=6,
    ),
    "deimv2": dict(
        type="DEIMv2",
        neck=dict(
            type="DEIMv2Encoder", out_channels=32, in_features=["res4", "res5"], num_heads=2, d_ffn=32, num_blocks=1
        ),
        head=dict(
            type="DEIMv2Head", d_model=32, num_heads=2, num_points=[2, 4], d_ffn=32, num_decoder_layers=2, reg_max=8
        ),
        num_queries=6,
    ),
    "ecdet": dict(
        type="ECDet",
        neck=dict(
            type="DEIMv2Encoder",
            out_channels=32,
            in_features=["res4", "res5"],
            num_heads=2,
            d_ffn=32,
            activation="silu",
        ),
        head=dict(
            type="DEIMv2Head", layer="dfine", d_model=32, num_heads=2, num_points=[2, 4], d_ffn=32, num_decoder_layers=2
        ),
        num_queries=6,
    ),
    "ecpose": dict(
        type="ECPose",
        neck=dict(
            type="DEIMv2Encoder",
            out_channels=32,
            in_features=["res4", "res5"],
            num_heads=2,
            d_ffn=32,
            activation="silu",
        ),
        head=dict(type="DETRPoseHead", d_model=32, num_heads=2, num_points=[2, 4], d_ffn=32, num_decoder_layers=2),
        num_keypoints=3,
        num_queries=6,
    ),
    "mask2former": dict(type="Mask2Former", neck=DEFORMABLE_DECODER, head=MASK2FORMER_HEAD, num_queries=6, tasks=TASKS),
    "mask2former_undivided": dict(
        type="Mask2Former",
        neck=DEFORMABLE_DECODER,
        head=MASK2FORMER_HEAD,
        num_queries=6,
        tasks=TASKS,
        size_divisibility=1,
    ),
    "maskformer": dict(
        type="MaskFormer",
        neck=dict(type="TransformerPixelDecoder", out_channels=32, mask_channels=16, num_heads=2, num_layers=1),
        head=dict(MASKFORMER_HEAD, num_encoder_layers=1),
        num_queries=6,
        tasks=TASKS,
        object_threshold=0.0,
    ),
    "maskformer_fpn": dict(
        type="MaskFormer",
        neck=dict(type="FPNPixelDecoder", out_channels=32, mask_channels=16),
        head=MASKFORMER_HEAD,
        num_queries=6,
        tasks=TASKS,
        size_divisibility=1,
    ),
    "per_pixel": dict(
        type="PerPixelClassification",
        neck=dict(type="FPNPixelDecoder", out_channels=32, mask_channels=16),
        head=dict(type="PerPixelBaselineHead"),
    ),
    "per_pixel_plus": dict(
        type="PerPixelClassification",
        neck=DEFORMABLE_DECODER,
        head=dict(
            type="PerPixelBaselinePlusHead",
            d_model=32,
            num_heads=2,
            d_ffn=32,
            num_encoder_layers=1,
            num_decoder_layers=2,
        ),
    ),
}


def build(name, **changes):
    torch.manual_seed(0)
    classes = {} if name == "grounding_dino" else {"num_classes": 3}
    model = build_model({**DENSE_MODELS[name], "backbone": RESNET, **classes, **changes}).eval()
    for module in model.modules():  # norms and biases also get distinct values
        if isinstance(module, nn.GroupNorm | nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
        elif isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            nn.init.uniform_(module.bias, -0.3, 0.3)
    if "text" in model.takes:
        forward = model.forward
        model.forward = lambda images, mask=None: forward(images, mask, text=["a . b c ."] * len(images))
    return model


def in_a_batch(image, height, width):
    """Return a batch of the image, padded at the right and bottom, and one of the batch's size."""
    images, mask = torch.zeros(2, 3, height, width, dtype=torch.uint8), torch.ones(2, height, width).bool()
    images[0, :, : image.shape[1], : image.shape[2]] = image
    mask[0, : image.shape[1], : image.shape[2]] = False
    images[1], mask[1] = torch.randint(256, (3, height, width), dtype=torch.uint8), False
    return images, mask


def assert_same(alone, together):
    """Check that the first image's predictions are equal; maps in the batch may extend into the padding."""
    for name in ("pred_logits", "pred_boxes", "pred_masks", "pred_keypoints", "pred_semantic"):
        if name in alone:
            expected = alone[name][0]
            got = together[name][0][tuple(slice(n) for n in expected.shape)]
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_every_dense_model_is_tested():
    constructors = {name: MODELS.resolve(name)[0] for name in MODELS.names()}
    with_a_neck = {name for name, model in constructors.items() if issubclass(model, DensePredictionModel)}
    assert {spec["type"] for spec in DENSE_MODELS.values()} == with_a_neck


@pytest.mark.parametrize(("height", "width"), [(69, 51), (64, 96), (32, 40)])
# Positions of both DINOs are those of boxes in the padded maps, as published, so they depend on the amount of padding.
@pytest.mark.parametrize("name", [name for name in DENSE_MODELS if "dino" not in name])
def test_isolated_images_have_the_same_results_in_any_batch(name, height, width):
    model = build(name, isolate_padding=True)
    image = torch.randint(256, (3, height, width), dtype=torch.uint8)
    original = (2 * height - 5, width + 9)
    with torch.no_grad():
        alone = model(image[None])
        (result,) = model.postprocess(alone, [original])
        for size in ((height, width + 30), (height + 100, width + 3), (160, 192)):
            together = model(*in_a_batch(image, *size))
            assert_same(alone, together)
            for layer, other in zip(alone.get("aux_outputs", ()), together.get("aux_outputs", ())):
                assert_same(layer, other)
            same = model.postprocess(together, [original, (50, 50)])[0]
            assert same.keys() == result.keys()
            for field in same.keys() & {"semantic", "panoptic"}:
                assert (same[field] == result[field]).float().mean() > 0.999, field


@pytest.mark.parametrize("name", DENSE_MODELS)
def test_results_depend_on_the_batch_without_isolation(name):
    model = build(name)  # otherwise the test above could not fail
    image = torch.randint(256, (3, 69, 51), dtype=torch.uint8)
    with torch.no_grad(), pytest.raises(AssertionError, match="not close"):
        assert_same(model(image[None]), model(*in_a_batch(image, 160, 192)))


@pytest.mark.parametrize("name", ["maskformer", "mask2former", "detr"])
def test_isolated_images_equal_single_images_without_isolation(name):
    image = torch.randint(256, (1, 3, 69, 51), dtype=torch.uint8)
    with torch.no_grad():
        assert_same(build(name)(image), build(name, isolate_padding=True)(image))


@pytest.mark.parametrize("name", DENSE_MODELS)
def test_isolated_padding_trains_and_gives_no_nan(name):
    model = build(name, isolate_padding=True).train()
    images, mask = in_a_batch(torch.full((3, 40, 33), 9, dtype=torch.uint8), 70, 64)
    mask[0] = True  # the image is completely masked
    outputs = model(images, mask)
    sum(outputs[key].float().sum() for key in outputs if key.startswith("pred_")).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("isolate_padding", [False, True])
@pytest.mark.parametrize("name", DENSE_MODELS)
def test_too_small_images_are_an_error(name, isolate_padding):
    message = "images of 20x31 pixels are smaller than one location of the coarsest map .stride 32.*Resize them"
    with pytest.raises(DataError, match=message):
        build(name, isolate_padding=isolate_padding)(torch.zeros(1, 3, 20, 31, dtype=torch.uint8))


@pytest.mark.parametrize(("channels", "words"), [(1, r"1 channels \(gray\)"), (4, r"4 channels \(RGB and alpha\)")])
@pytest.mark.parametrize("name", ["detr", "mask2former", "per_pixel"])
def test_images_with_another_number_of_channels_are_an_error_that_names_it(name, channels, words):
    with pytest.raises(DataError, match=rf"{words}; expected \(B, 3, H, W\), RGB"):
        build(name)(torch.zeros(1, channels, 64, 64, dtype=torch.uint8))


class Patches(nn.Module):
    """README's example, whose feature_info may be wrong."""

    def __init__(self, infos=None, order=("fine", "coarse")):
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(3, 16, 8, stride=8), nn.Conv2d(16, 32, 2, stride=2)
        self.feature_info = infos or {"fine": FeatureInfo(16, 8), "coarse": FeatureInfo(32, 16)}
        self.order = order

    def forward(self, images):
        fine = self.fine(images)
        maps = {"fine": fine, "coarse": self.coarse(fine)}
        return {name: maps[name] for name in self.order}


def test_what_a_users_own_backbone_may_leave_out_has_a_default():
    backbone = Patches()
    assert pixel_statistics(backbone) == dict(mean=IMAGENET_MEAN, std=IMAGENET_STD)
    assert load_pretrained(backbone) is None
    stated = with_defaults(backbone, Backbone)
    stated.keep_features(["fine"])
    assert list(backbone(torch.zeros(1, 3, 32, 32))) == ["fine", "coarse"]
    assert stated.feature_info is backbone.feature_info
    assert (stated.patch_size, stated.block_names(), stated.optional_weights) == (None, None, ())
    with pytest.raises(AttributeError, match="pixel_men"):
        _ = stated.pixel_men

    class Offers(Patches):
        pixel_mean, pixel_std = (0.5,) * 3, (0.25,) * 3

        def load_pretrained(self):
            return "a file"

        def keep_features(self, names):
            self.order = tuple(names)

    backbone = Offers()
    assert pixel_statistics(backbone) == dict(mean=(0.5,) * 3, std=(0.25,) * 3)
    assert load_pretrained(backbone) == "a file"
    with_defaults(backbone, Backbone).keep_features(["fine"])
    assert list(backbone(torch.zeros(1, 3, 32, 32))) == ["fine"]


def test_a_users_own_backbone_names_its_weights(tmp_path):
    class Names(Patches):
        optional_weights = ("coarse.*",)

        def pretrained_source(self):
            return str(tmp_path / "fine.pth")

    weights = {name: value for name, value in Patches().state_dict().items() if name.startswith("fine.")}
    torch.save(weights, tmp_path / "fine.pth")
    backbone = Names()
    assert load_pretrained(nn.ModuleDict({"backbone": backbone})) == str(tmp_path / "fine.pth")
    assert torch.equal(backbone.fine.weight, weights["fine.weight"])
    del weights["fine.bias"]
    torch.save(weights, tmp_path / "fine.pth")
    with pytest.raises(CheckpointError, match=r"fine.pth does not fit this Names: missing fine.bias \(1 in all\)"):
        load_pretrained(backbone)


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        (
            dict(infos={"fine": FeatureInfo(16, 8), "coarse": FeatureInfo(64, 16)}),
            r"forward returns .*'coarse': \(1, 32, 4, 5\)}; expected .*'coarse': \(1, 64, 4, 5\)}",
        ),
        (
            dict(infos={"fine": FeatureInfo(16, 4), "coarse": FeatureInfo(32, 8)}),
            r"forward returns {'fine': \(1, 16, 8, 9\), .*; expected {'fine': \(1, 16, 16, 18\), ",
        ),
        (
            dict(infos={"fine": FeatureInfo(16, 8), "rough": FeatureInfo(32, 16)}),
            "forward returns {'fine': .*, 'coarse': .*}; expected {'fine': .*, 'rough': .*} in this order",
        ),
        (dict(order=("coarse", "fine")), "forward returns {'coarse': .*}; expected {'fine': .*} in this order"),
        (
            dict(infos={"coarse": FeatureInfo(32, 16), "fine": FeatureInfo(16, 8)}, order=("coarse", "fine")),
            "features coarse, fine have strides 16, 8. Expected an order from fine to coarse",
        ),
    ],
    ids=["channels", "stride", "name", "order", "coarse_first"],
)
def test_backbone_that_contradicts_its_feature_info_is_an_error_when_built(backbone, message):
    neck = dict(type="ChannelProjection", out_channels=128)
    with pytest.raises(ConfigError, match=f"backbone Patches: .*{message}"):
        build_model(dict(DENSE_MODELS["detr"], backbone=Patches(**backbone), neck=neck))
    build_model(dict(DENSE_MODELS["detr"], backbone=Patches(), neck=neck))


def test_a_backbone_without_names_is_an_error():
    class Sequential(nn.Sequential):
        feature_info = {"map": FeatureInfo(4, 2)}

    with pytest.raises(ConfigError, match="backbone Sequential: forward returns a Tensor; expected a dict"):
        check_feature_info(Sequential(nn.Conv2d(3, 4, 2, stride=2)))
    Sequential.feature_info = {"map": (4, 2)}
    with pytest.raises(ConfigError, match=r"backbone Sequential: feature_info has \(4, 2\); expected a FeatureInfo"):
        check_feature_info(Sequential(nn.Conv2d(3, 4, 2, stride=2)))


@pytest.mark.parametrize("error", [DataError, ValueError])
def test_a_backbone_that_refuses_small_images_is_not_checked_and_other_errors_are_named(caplog, error):
    class Large(Patches):
        def forward(self, images):
            if images.shape[-1] != 224:
                raise error("224 pixels only")
            return super().forward(images)

    with caplog.at_level(logging.WARNING, logger="vitkit"):
        check_feature_info(Large({"fine": FeatureInfo(5, 8)}))
    warning = "backbone Large: feature_info is not checked: 64x72 pixels fail with ValueError: 224 pixels only"
    assert [record.message for record in caplog.records] == ([] if error is DataError else [warning])


def test_checking_a_backbone_changes_neither_it_nor_the_random_state():
    backbone = nn.Sequential(nn.Conv2d(3, 4, 2, stride=2), nn.BatchNorm2d(4), nn.Dropout(0.5))
    backbone[1].eval()
    forward = backbone.forward
    backbone.forward = lambda images: {"map": forward(images)}
    backbone.feature_info = {"map": FeatureInfo(4, 2)}
    before, numbers = backbone[1].running_mean.clone(), torch.get_rng_state()
    check_feature_info(backbone)
    assert [module.training for module in backbone.modules()] == [True, True, False, True]
    assert torch.equal(backbone[1].running_mean, before)
    assert torch.equal(torch.get_rng_state(), numbers)
