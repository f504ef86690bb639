"""A small model of every registered class, and the figures that explain it."""

import numpy as np
import torch
from torch import nn

from vitkit import build_model
from vitkit.seq2seq.decoding import DecodingSettings
from vitkit.text.vocabulary import Vocabulary

IMAGE = np.random.default_rng(0).integers(0, 255, (40, 56, 3), dtype=np.uint8)
RESNET = dict(type="ResNet", depth=18, pretrained=False)
VIT = dict(d_model=16, depth=2, num_heads=2, image_size=32)
SWIN = dict(embed_dim=4, depths=(2, 1, 1, 1), num_heads=(1, 1, 1, 1), window=4)
LAYERS = dict(d_model=16, num_heads=2, d_ffn=16)
PIXELS = dict(type="FPNPixelDecoder", out_channels=32, mask_channels=8)
QUERIES = {"decoder", "decoder_heads", "query0"}
MASKS = QUERIES | {"masks"}
CHANNELS = dict(type="ChannelProjection", out_channels=16)
DETR = dict(type="DETRHead", num_encoder_layers=1, num_decoder_layers=2, **LAYERS)  # one encoder layer is enough

PROMPT = "a . b c ."
"""What a model that takes a prompt looks for."""

# Model -> its spec and its figures, or the reason why it has none.
DENSE = {
    "DETR": (dict(neck=CHANNELS, head=DETR), QUERIES | {"encoder", "encoder_heads"}),
    "DETRSegmentation": (
        dict(neck=dict(CHANNELS, out_channels=128), head=dict(DETR, d_model=128, num_heads=8)),
        QUERIES | {"encoder", "encoder_heads"},
    ),
    "DeformableDETR": (
        dict(
            neck=dict(type="PyramidProjection", out_channels=16, num_levels=4, num_groups=4),
            head=dict(type="DeformableDETRHead", num_encoder_layers=1, num_decoder_layers=2, **LAYERS),
        ),
        {"query0"},
    ),
    "DINO": (
        dict(
            neck=dict(type="PyramidProjection", out_channels=16, num_levels=4, num_groups=4),
            head=dict(type="DINOHead", num_encoder_layers=1, num_decoder_layers=2, **LAYERS),
        ),
        {"query0"},
    ),
    "GroundingDINO": (
        dict(
            neck=dict(type="PyramidProjection", out_channels=16, num_levels=4, num_groups=4),
            head=dict(type="GroundingDINOHead", num_encoder_layers=1, num_decoder_layers=2, **LAYERS),
            text_encoder=dict(type="TransformerTextEncoder", num_layers=1, d_model=8, num_heads=1, d_ffn=8),
        ),
        {"query0", "box_words", "prompt_heads", "word_locations"},
    ),
    "RTDETR": (
        dict(
            neck=dict(
                type="HybridEncoder", in_features=["res3", "res4", "res5"], out_channels=16, num_heads=2, d_ffn=32
            ),
            head=dict(type="RTDETRHead", num_decoder_layers=2, **LAYERS),
        ),
        {"query0"},
    ),
    "RFDETR": (
        dict(
            neck=dict(type="C2fProjection", in_features=["res4"], out_channels=16),
            head=dict(type="RFDETRHead", num_cross_heads=2, num_decoder_layers=2, **LAYERS),
        ),
        {"query0"},
    ),
    "RFDETRSeg": (
        dict(
            neck=dict(type="C2fProjection", in_features=["res4"], out_channels=16),
            head=dict(type="RFDETRHead", num_cross_heads=2, num_decoder_layers=2, masks=True, **LAYERS),
        ),
        {"query0"},
    ),
    "RFDETRKeypoints": (
        dict(
            num_keypoints=5,
            neck=dict(type="C2fProjectionPair", in_features=["res4"], out_channels=16),
            head=dict(type="RFDETRHead", num_cross_heads=2, num_decoder_layers=2, keypoint_classes=[2, 0], **LAYERS),
        ),
        {"query0", "query0_points"},
    ),
    "RTDETRv2": (
        dict(
            neck=dict(
                type="HybridEncoder", in_features=["res3", "res4", "res5"], out_channels=16, num_heads=2, d_ffn=32
            ),
            head=dict(type="RTDETRv2Head", num_decoder_layers=2, num_points=[2, 4, 1], **LAYERS),
        ),
        {"query0"},
    ),
    "DFINE": (
        dict(
            neck=dict(
                type="DFINEEncoder", in_features=["res3", "res4", "res5"], out_channels=16, num_heads=2, d_ffn=32
            ),
            head=dict(type="DFINEHead", num_decoder_layers=2, num_points=[3, 6, 3], **LAYERS),
        ),
        {"query0"},
    ),
    "DEIMv2": (
        dict(
            neck=dict(
                type="DEIMv2Encoder", in_features=["res3", "res4", "res5"], out_channels=16, num_heads=2, d_ffn=32
            ),
            head=dict(type="DEIMv2Head", num_decoder_layers=2, num_points=[3, 6, 3], **LAYERS),
        ),
        {"query0"},
    ),
    "DFINE masks": (
        dict(
            neck=dict(
                type="DFINEEncoder", in_features=["res3", "res4", "res5"], out_channels=16, num_heads=2, d_ffn=32
            ),
            head=dict(
                type="DFINEHead",
                num_decoder_layers=2,
                num_points=[3, 6, 3],
                masks=dict(type="PyramidMasks", channels=32),
                **LAYERS,
            ),
        ),
        {"query0"},
    ),
    "DINO masks": (
        dict(
            neck=dict(type="PyramidProjection", out_channels=16, num_levels=4, num_groups=4),
            head=dict(type="DINOHead", num_encoder_layers=1, num_decoder_layers=2, masks="BlockMasks", **LAYERS),
        ),
        {"query0"},
    ),
    "ECDet": (
        dict(
            backbone=dict(type="ECViT", d_model=16, depth=2, num_heads=2),
            neck=dict(type="DEIMv2Encoder", out_channels=16, num_heads=2, d_ffn=32, activation="silu"),
            head=dict(type="DEIMv2Head", layer="dfine", num_decoder_layers=2, num_points=[3, 6, 3], **LAYERS),
        ),
        {"query0", "points", "rollout"},
    ),
    "ECDet masks": (
        dict(
            backbone=dict(type="ECViT", d_model=16, depth=2, num_heads=2),
            neck=dict(type="DEIMv2Encoder", out_channels=16, num_heads=2, d_ffn=32, activation="silu"),
            head=dict(
                type="DEIMv2Head",
                layer="dfine",
                num_decoder_layers=2,
                num_points=[3, 6, 3],
                masks=dict(type="BlockMasks", one_block=True, initial=True),
                **LAYERS,
            ),
        ),
        {"query0", "points", "rollout"},
    ),
    "ECPose": (
        dict(
            num_keypoints=5,
            backbone=dict(type="ECViT", d_model=16, depth=2, num_heads=2),
            neck=dict(type="DEIMv2Encoder", out_channels=16, num_heads=2, d_ffn=32, activation="silu"),
            head=dict(type="DETRPoseHead", num_decoder_layers=2, **LAYERS),
        ),
        {"query0", "query0_points", "points", "rollout"},
    ),
    "EoMT": (
        dict(backbone=dict(type="ViT", d_model=16, depth=2, num_heads=2, image_size=64), num_blocks=1),
        MASKS | {"encoder", "encoder_heads"},
    ),
    "Mask2Former": (
        dict(
            neck=dict(PIXELS, type="DeformablePixelDecoder", num_layers=1, num_heads=2),
            head=dict(type="Mask2FormerHead", num_decoder_layers=2, **LAYERS),
            tasks=["panoptic"],
        ),
        MASKS | {"panoptic"},
    ),
    "Mask2Former Swin": (
        dict(
            backbone=dict(type="Swin", **SWIN),
            neck=dict(PIXELS, type="DeformablePixelDecoder", num_layers=1, num_heads=2),
            head=dict(type="Mask2FormerHead", num_decoder_layers=2, **LAYERS),
            tasks=["panoptic"],
        ),
        MASKS | {"panoptic", "loss_points", "points"},
    ),
    "MaskFormer": (
        dict(neck=PIXELS, head=dict(type="MaskFormerHead", num_decoder_layers=2, **LAYERS), tasks=["semantic"]),
        MASKS,
    ),
    "PerPixelClassification": (
        dict(neck=PIXELS, head=dict(type="PerPixelBaselineHead")),
        "PerPixelClassification on ResNet has no attention in the image",
    ),
    "PerPixelClassification Swin": (
        dict(neck=PIXELS, head=dict(type="PerPixelBaselineHead"), backbone=dict(type="Swin", **SWIN)),
        {"points"},
    ),
    "PerPixelClassification Plus": (
        dict(neck=PIXELS, head=dict(type="PerPixelBaselinePlusHead", num_decoder_layers=2, **LAYERS)),
        "PerPixelClassification on ResNet has no attention in the image",
    ),
    "PerPixelClassification D-FINE-seg": (
        dict(
            neck=dict(
                type="DFINEEncoder", in_features=["res3", "res4", "res5"], out_channels=16, num_heads=2, d_ffn=32
            ),
            # With one channel for each group of the norms, some of small variance, rounding would be enlarged.
            head=dict(type="DFINESegHead", mask_channels=128, channels=128),
        ),
        "PerPixelClassification on ResNet has no attention in the image",
    ),
    "ShowAttendTell": (dict(d_embedding=8, d_model=8, d_attention=8), {"words", "next_tokens", "beams"}),
    "TransformerCaptioner": (
        dict(num_encoder_layers=1, num_decoder_layers=1, **LAYERS),
        {"words", "decoder_heads", "decoder_arcs", "positions", "next_tokens", "beams"},
    ),
}
ENCODED = {"encoder_heads", "encoder_arcs"}
DECODED = {"decoder_heads", "decoder_arcs"}
TEXTS = {
    "CausalLanguageModel": (LAYERS, DECODED | {"positions", "next_tokens", "beams"}),
    "MaskedLanguageModel": (LAYERS, ENCODED | {"positions", "next_tokens"}),
    "PrefixLanguageModel": (LAYERS, DECODED | {"positions", "next_tokens", "beams"}),
    "RNNTranslator": (dict(d_embedding=8, d_hidden=8), {"cross_heads", "cross_arcs", "next_tokens", "beams"}),
    "Transformer": (LAYERS, ENCODED | DECODED | {"cross_heads", "cross_arcs", "positions", "next_tokens", "beams"}),
}
CLIPS = "the model classifies clips, so an image has no meaning for it"
CLASSIFIERS = {
    "ViT": (VIT, {"points", "rollout", "class_token", "class_token_masks"}),
    "ViTDet": (dict(VIT, window_size=2), {"points", "rollout"}),
    "WindowedViT": (dict(VIT, num_windows=2, global_blocks=[1]), {"points"}),
    "SpatialAdapter": (
        dict(vit=dict(VIT, type="ViT", depth=3), blocks=[0, 1, 2]),
        {"points", "rollout", "class_token", "class_token_masks"},
    ),
    "ECViT": (dict(d_model=16, depth=2, num_heads=2), {"points", "rollout"}),
    "SmallHGNetV2": (dict(size="atto"), "Classifier on SmallHGNetV2 has no attention in the image"),
    "Swin": (SWIN, {"points"}),
    "SwinV2": (SWIN, {"points"}),
    "MViT": (dict(depths=(1, 1, 1, 1), embed_dim=8, num_heads=1), {"points"}),
    "LRNet": (dict(depth=26, channels_per_weight=16, kernel_size=3), {"points", "kernels"}),
    "NonLocalResNet": (dict(depth=50, pretrained=False, positions={"res4": [1]}), {"points", "non_local"}),
    "ResNet": (dict(depth=18, pretrained=False), "Classifier on ResNet has no attention in the image"),
    "ResNetVD": (dict(depth=18, pretrained=False), "Classifier on ResNetVD has no attention in the image"),
    "TimmBackbone": (
        dict(name="test_vit.r160_in1k", pretrained=False),
        {"points", "rollout", "class_token", "class_token_masks"},
    ),
    "ClipResNet": (dict(depth=50), CLIPS),
    "TimeSformer": (dict(VIT, num_frames=2), CLIPS),
}


SEEN = {"points", "rollout", "class_token", "class_token_masks"}
PRETRAINING = {
    "MAE": (dict(decoder_d_model=8, decoder_depth=1, decoder_num_heads=2), SEEN | {"reconstruction"}),
    "SelfDistillation": (dict(num_prototypes=4, hidden_channels=8, bottleneck_channels=4), SEEN),
    "FeatureDistillation": (dict(teacher=dict(type="ViT", **VIT)), SEEN),
}
"""Models that learn without labels, on a small ViT."""


def dense_model(name: str) -> nn.Module:
    """Build a model of `DENSE` with random weights."""
    torch.manual_seed(0)
    spec, expected = DENSE[name]
    kind = name.split()[0]
    reads_words = "words" in expected or kind == "GroundingDINO"
    vocabularies = {"target": Vocabulary.train("word", ["a b c ."])} if reads_words else {}
    queries = {} if "words" in expected else {"num_queries": 4, "num_classes": 3}
    if kind == "PerPixelClassification":
        del queries["num_queries"]
    if kind == "GroundingDINO":
        del queries["num_classes"]
    model = build_model(dict(type=kind, backbone=RESNET) | queries | spec, vocabularies=vocabularies)
    if "words" in expected:
        model.decoding = DecodingSettings(max_length=4, min_length=2)
    return model


def text_model(name: str) -> tuple[nn.Module, dict[str, Vocabulary]]:
    """Build a model of `TEXTS` with random weights, and return its vocabularies."""
    torch.manual_seed(0)
    spec, expected = TEXTS[name]
    words = Vocabulary.train("word", ["a b c"], mask=True)
    of_one_text = name in ("CausalLanguageModel", "MaskedLanguageModel")
    vocabularies = dict.fromkeys(("target",) if of_one_text else ("source", "target"), words)
    spec = spec if name == "RNNTranslator" else dict(spec, num_layers=1)
    model = build_model(dict(type=name, **spec), vocabularies=vocabularies).eval()
    if "beams" in expected:
        model.decoding = DecodingSettings(max_length=4, min_length=2)
    return model, vocabularies
