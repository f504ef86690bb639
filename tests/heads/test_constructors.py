"""A config and a constructor take the same words: heads, necks and training queries are built both ways."""

import pytest
import torch

from vitkit.errors import ConfigError
from vitkit.heads.detr import DETRHead
from vitkit.heads.detrpose import DETRPoseHead
from vitkit.heads.dino import DINOHead
from vitkit.heads.mask2former import Mask2FormerHead
from vitkit.registry import HEADS, NECKS, TRAINING_QUERIES, parameters_of
from vitkit.structures import FeatureInfo

MAPS = {name: FeatureInfo(32, stride) for name, stride in (("res2", 4), ("res3", 8), ("res4", 16), ("res5", 32))}
PIXELS = {"mask_features": FeatureInfo(16, 4), "res4": FeatureInfo(32, 16), "res5": FeatureInfo(32, 32)}
LAYERS = dict(d_model=32, num_heads=4, d_ffn=48, dropout=0.2)
DEFORMABLE = dict(num_points=2, num_encoder_layers=1, num_decoder_layers=2)
DENOISING = dict(num_queries=5, contrastive=False, label_noise=0.1, box_noise=0.2, mirror=True, eps=1e-5, padding=0.0)
WORDS = {
    "DETRHead": dict(
        LAYERS, num_encoder_layers=1, num_decoder_layers=2, norm_first=True, activation="gelu", positions="learned"
    ),
    "DeformableDETRHead": dict(LAYERS, **DEFORMABLE, refine_boxes=True, two_stage=True, masks="BlockMasks"),
    "DABDeformableDETRHead": dict(LAYERS, **DEFORMABLE),
    "DINOHead": dict(
        LAYERS,
        **DEFORMABLE,
        share_heads=False,
        look_forward_twice=False,
        box_eps=1e-5,
        position_offset=-0.5,
        temperature=1e4,
        rounds_padding=False,
        masks="BlockMasks",
    ),
    "GroundingDINOHead": dict(
        LAYERS,
        **DEFORMABLE,
        share_heads=False,
        look_forward_twice=False,
        box_eps=1e-5,
        scale=True,
        bias=True,
        fusion_drop_path=0.2,
        fusion_dropout=0.3,
    ),
    "RTDETRHead": dict(LAYERS, num_points=2, num_decoder_layers=2, masks="BlockMasks"),
    "RFDETRHead": dict(LAYERS, num_cross_heads=8, num_points=2, num_decoder_layers=2, masks=False)
    | dict(num_keypoints=5, keypoint_classes=[2, 0]),
    "RTDETRv2Head": dict(
        LAYERS, num_points=2, num_decoder_layers=2, offset_scale=0.25, sampling="discrete", masks="BlockMasks"
    ),
    "DFINEHead": dict(
        LAYERS, num_points=2, num_decoder_layers=2, activation="silu", reg_max=8, reg_scale=3.0, up=0.25, masks=None
    ),
    "DEIMv2Head": dict(
        LAYERS,
        num_points=2,
        layer="deimv2",
        num_decoder_layers=2,
        gate=False,
        shared_box_head=True,
        activation="relu",
        reg_max=8,
        reg_scale=3.0,
        up=0.25,
        masks=dict(type="BlockMasks", one_block=True),
    ),
    "DETRPoseHead": dict(
        LAYERS,
        num_keypoints=5,
        num_points=2,
        num_decoder_layers=2,
        reg_max=8,
        reg_scale=3.0,
        up=0.25,
        keeps_positions=False,
    ),
    "MaskFormerHead": dict(LAYERS, num_encoder_layers=1, num_decoder_layers=2, norm_first=True, activation="silu"),
    "Mask2FormerHead": dict(LAYERS, num_decoder_layers=2, num_levels=1, masked_attention=False, learned_queries=False),
    "PerPixelBaselineHead": {},
    "DFINESegHead": dict(mask_channels=64, channels=32, dropout=0.2),
    "PerPixelBaselinePlusHead": dict(LAYERS, num_encoder_layers=1, num_decoder_layers=2),
    "ChannelProjection": dict(out_channels=8, in_features=["res3"], isolate_padding=True),
    "PyramidProjection": dict(
        out_channels=32, in_features=["res4", "res5"], num_levels=3, num_groups=8, isolate_padding=True
    ),
    "C2fProjection": dict(out_channels=8, in_features=["res4"], num_blocks=2, isolate_padding=True),
    "C2fProjectionPair": dict(out_channels=8, in_features=["res4"], num_blocks=2, isolate_padding=True),
    "HybridEncoder": dict(
        out_channels=32,
        in_features=["res4", "res5"],
        num_heads=4,
        d_ffn=48,
        dropout=0.2,
        activation="silu",
        finer="res3",
        num_blocks=1,
        expansion=0.5,
        isolate_padding=True,
    ),
    "DFINEEncoder": dict(
        out_channels=32,
        in_features=["res4", "res5"],
        num_heads=4,
        d_ffn=48,
        dropout=0.2,
        activation="silu",
        finer="res3",
        num_blocks=1,
        expansion=0.5,
        isolate_padding=True,
    ),
    "DEIMv2Encoder": dict(
        out_channels=32,
        in_features=["res4", "res5"],
        num_heads=4,
        d_ffn=48,
        dropout=0.2,
        activation="silu",
        finer="res3",
        block="dfine",
        num_blocks=1,
        expansion=0.5,
        isolate_padding=True,
    ),
    "LiteEncoder": dict(
        out_channels=32, in_features=["res4"], block="deim", num_blocks=1, expansion=0.5, isolate_padding=True
    ),
    "SimpleFeaturePyramid": dict(
        out_channels=32,
        in_feature="res4",
        strides=[8, 16],
        neck=dict(type="ChannelProjection", out_channels=8),
        isolate_padding=True,
    ),
    "FPNPixelDecoder": dict(out_channels=32, mask_channels=16, isolate_padding=True),
    "TransformerPixelDecoder": dict(
        out_channels=32,
        mask_channels=16,
        num_layers=1,
        num_heads=4,
        d_ffn=48,
        dropout=0.2,
        norm_first=True,
        activation="gelu",
        isolate_padding=True,
    ),
    "DeformablePixelDecoder": dict(
        out_channels=32,
        mask_channels=16,
        num_levels=2,
        num_layers=1,
        num_heads=4,
        num_points=2,
        d_ffn=48,
        dropout=0.2,
        isolate_padding=True,
    ),
    "BoxDenoising": DENOISING,
    "TextDenoising": DENOISING,
    "MaskDenoising": dict(num_queries=5, label_flips=0.1, mask_flips=0.3),
    "KeypointDenoising": dict(num_queries=5, label_noise=0.1, noise_labels=7, published_noise=True),
    "QueryGroups": dict(groups=3),
    "OneToManyQueries": dict(num_queries=6, repeats=3),
}
"""Name -> all its arguments but those that its owner sets."""


def owner_arguments(name):
    """Return the arguments that a model sets."""
    if name in HEADS:
        info = PIXELS if "Mask" in name or "Pixel" in name else MAPS
        queries = {} if "Pixel" in name or name == "DFINESegHead" else dict(num_queries=6)
        classes = {} if name == "GroundingDINOHead" else dict(num_classes=3)
        return dict(feature_info=info, **classes, **queries)
    if name in NECKS:
        return dict(feature_info=MAPS)
    info, head = (PIXELS, Mask2FormerHead) if name == "MaskDenoising" else (MAPS, DINOHead)
    head = DETRPoseHead if name == "KeypointDenoising" else head
    options = dict(num_decoder_layers=1) | (dict(num_levels=1) if head is Mask2FormerHead else {})
    return dict(head=head(info, 3, num_queries=6, d_model=32, **options), num_classes=3)


@pytest.mark.parametrize("name", [name for kind in (HEADS, NECKS, TRAINING_QUERIES) for name in kind.names()])
def test_a_config_and_a_constructor_take_the_same_words(name):
    registry = next(registry for registry in (HEADS, NECKS, TRAINING_QUERIES) if name in registry)
    constructor, _ = registry.resolve(name)
    arguments = owner_arguments(name)
    assert set(WORDS[name]) == set(parameters_of(constructor)) - set(arguments), "all are tried"
    torch.manual_seed(0)
    from_config = registry.build(dict(type=name, **WORDS[name]), **arguments)
    torch.manual_seed(0)
    from_python = constructor(**arguments, **WORDS[name])
    assert str(from_config) == str(from_python)
    states = from_config.state_dict(), from_python.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    plain = {key: value for key, value in vars(from_config).items() if isinstance(value, int | float | str | bool)}
    assert plain == {key: vars(from_python)[key] for key in plain}


def test_the_words_of_a_config_work_in_python():
    head = DETRHead({"res5": FeatureInfo(256, 32)}, 3, num_queries=5, d_model=256)
    outputs = head({"res5": torch.rand(1, 256, 2, 3)})
    assert outputs["pred_logits"].shape == (1, 5, 4) and outputs["pred_boxes"].shape == (1, 5, 4)


def test_a_wrong_argument_is_named_by_itself_in_python_and_with_its_path_in_a_config():
    with pytest.raises(ConfigError) as alone:
        DETRHead({"res5": FeatureInfo(256, 32)}, 3, num_queries=0)
    assert str(alone.value) == "DETRHead: num_queries=0, expected at least 1."
    with pytest.raises(ConfigError, match=r"^head: DETRHead: num_queries=0, expected at least 1\.$"):
        HEADS.build("DETRHead", feature_info={"res5": FeatureInfo(256, 32)}, num_classes=3, num_queries=0)
    with pytest.raises(ConfigError, match=r"^head: MultiHeadAttention: num_heads=7 must divide d_model=256"):
        HEADS.build(
            dict(type="DETRHead", num_heads=7),
            feature_info={"res5": FeatureInfo(256, 32)},
            num_classes=3,
            num_queries=2,
        )
