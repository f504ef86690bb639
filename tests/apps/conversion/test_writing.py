"""Weights written with other projects' names: read back exactly, and read by the transformers library."""

import pytest
import torch
from helpers.transformers_models import BUILDERS, build_theirs, compare

from vitkit import CheckpointError, load_config, load_weights
from vitkit.apps.conversion.transformers_writing import make_config_json, write_safetensors
from vitkit.apps.inference import Predictor, find_model
from vitkit.engine.build import build_model
from vitkit.model_zoo.converters import write_names


def random_model(spec):
    torch.manual_seed(3)
    model = build_model(spec).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
        if spec["type"] == "DFINE":  # its maps would be nearly constant, and so the order of its locations random
            if parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, -1, 1)
            else:
                torch.nn.init.kaiming_normal_(parameter)
    return model


def assert_same(model, other):
    expected = model.state_dict()
    for key, value in other.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            assert torch.equal(value, expected[key]), key


# Detectors are written with timm's names of the backbone, as in all published checkpoints.
@pytest.mark.parametrize("name", sorted(BUILDERS.keys() - {"detr_own_resnet"}))
def test_transformers_library_reads_written_weights(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the comparison needs pip install -e '.[benchmark]'")
    transformers.utils.logging.disable_progress_bar()
    theirs = build_theirs(transformers, name)
    theirs.save_pretrained(tmp_path)
    spec = find_model(tmp_path).config["model"]
    if spec["type"] == "CausalLanguageModel":
        spec = spec | {"output_bias": False}  # which the library's model does not have
    ours = random_model(spec | ({} if "target_size" in spec else {"num_classes": 3}))
    result = write_names(ours, "transformers")
    assert result.format.startswith("transformers ")
    write_safetensors(tmp_path / "model.safetensors", result.state)
    read, info = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    # The norm after a Swin Transformer's last map, and RF-DETR's block after it, which are unused in the library.
    unused = ("encoder.swin.layernorm.", "backbone.encoder.layer.4." if name == "rf_detr_unused_block" else "-")
    assert all(any(part in key for part in unused) for key in info["missing_keys"]), info["missing_keys"]
    compare(read.eval(), ours)
    again = random_model(spec | ({} if "target_size" in spec else {"num_classes": 3}))
    for parameter in again.parameters():
        torch.nn.init.zeros_(parameter)
    load_weights(again, tmp_path)
    assert_same(ours, again)


RESNET = dict(type="ResNet", depth=50, norm="frozen_bn")
SWIN = dict(type="Swin", embed_dim=8, depths=[2, 1, 1, 1], num_heads=[1, 1, 2, 2], window=4)
STACKS = dict(d_model=32, num_heads=2, d_ffn=16, num_decoder_layers=2)
FPN = dict(type="FPNPixelDecoder", out_channels=32, mask_channels=16)
TRANSFORMER_DECODER = dict(
    type="TransformerPixelDecoder", out_channels=32, mask_channels=16, num_layers=1, num_heads=2, d_ffn=16
)
DEFORMABLE_DECODER = dict(
    type="DeformablePixelDecoder", out_channels=32, mask_channels=16, num_layers=1, num_heads=2, d_ffn=16
)
TEXT = dict(type="Transformer", source_size=11, num_layers=[1, 2], d_model=8, num_heads=2, d_ffn=12, final_norm=True)


def detr(type_="DETR", d_model=32, heads=2, **options):
    head = STACKS | dict(type="DETRHead", d_model=d_model, num_heads=heads, num_encoder_layers=1)
    neck = dict(type="ChannelProjection", out_channels=d_model)
    return dict(type=type_, num_classes=3, num_queries=5, backbone=RESNET, neck=neck, head=head, **options)


def deformable(**options):
    neck = dict(type="PyramidProjection", in_features=["res3", "res4", "res5"], out_channels=32, num_levels=4)
    head = STACKS | dict(type="DeformableDETRHead", num_encoder_layers=1, **options)
    return dict(type="DeformableDETR", num_classes=3, num_queries=5, backbone=RESNET, neck=neck, head=head)


def masks(head, neck, backbone, **options):
    return dict(
        type=head.removesuffix("Head"), tasks=["instance"], num_classes=3, num_queries=5, backbone=backbone, neck=neck,
        head=STACKS | dict(type=head, **options),
    )  # fmt: skip


PATCHES = dict(patch_size=16, d_model=16, depth=2, num_heads=2, image_size=32)
OFFICIAL = {
    "facebookresearch/detr": detr(),
    "facebookresearch/detr, with masks": detr("DETRSegmentation", 128, 8),
    "fundamentalvision/Deformable-DETR": deformable(),
    "fundamentalvision/Deformable-DETR ": deformable(refine_boxes=True),
    "fundamentalvision/Deformable-DETR  ": deformable(refine_boxes=True, two_stage=True),
    "facebookresearch/MaskFormer": masks("MaskFormerHead", FPN, RESNET, num_encoder_layers=0),
    "facebookresearch/MaskFormer ": masks("MaskFormerHead", TRANSFORMER_DECODER, SWIN, num_encoder_layers=0),
    "facebookresearch/Mask2Former": masks("Mask2FormerHead", DEFORMABLE_DECODER, RESNET),
    "facebookresearch/Mask2Former ": masks("Mask2FormerHead", DEFORMABLE_DECODER, SWIN),
    "facebookresearch/TimeSformer": dict(type="Classifier", backbone=dict(type="TimeSformer", num_frames=2, **PATCHES)),
    "torch.nn.Transformer": TEXT | dict(target_size=11),
    "torch.nn.Transformer ": TEXT | dict(target_size=7, shared_embeddings=False, tied_output=False),
    "microsoft/Swin-Transformer": dict(type="Classifier", backbone=SWIN),
    "microsoft/Swin-Transformer, V2": dict(type="Classifier", backbone=SWIN | dict(type="SwinV2")),
    "timm ViT": dict(type="Classifier", backbone=dict(type="ViT", **PATCHES)),
    "facebookresearch MViT": dict(type="Classifier", backbone="mvitv2_tiny"),
    "torchvision ResNet": dict(type="Classifier", backbone=dict(type="ResNet", depth=18, pretrained=False)),
}


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_names_are_read_back_exactly(name):
    model = random_model(OFFICIAL[name])
    result = write_names(model, "official")
    assert result.format == name.strip()
    again = build_model(OFFICIAL[name])
    report = load_weights(again, {"model": result.state})
    assert not report.missing and not report.unexpected
    # If the names are the same as vitkit's, no converter is needed.
    same = {f"backbone.{key}" for key in result.state} >= model.state_dict().keys()
    assert report.converter is None if same else report.converter == name.strip()
    assert_same(model, again)


def test_official_names_equal_those_of_the_official_code():
    keys = write_names(random_model(OFFICIAL["facebookresearch/detr"]), "official").state.keys()
    assert {
        "backbone.0.body.layer1.0.conv1.weight",
        "transformer.decoder.layers.1.multihead_attn.in_proj_weight",
    } <= keys
    assert {"transformer.encoder.layers.0.linear1.bias", "bbox_embed.layers.2.weight", "input_proj.bias"} <= keys
    keys = write_names(random_model(OFFICIAL["facebookresearch/Mask2Former"]), "official").state.keys()
    assert {
        "backbone.res2.0.shortcut.norm.running_mean",
        "backbone.stem.conv1.norm.weight",
        "criterion.empty_weight",
        "sem_seg_head.pixel_decoder.adapter_1.norm.bias",
        "sem_seg_head.pixel_decoder.transformer.level_embed",
        "sem_seg_head.predictor.transformer_ffn_layers.1.linear2.weight",
        "sem_seg_head.predictor.static_query.weight",
    } - keys == {"sem_seg_head.predictor.static_query.weight"}
    shared = write_names(random_model(OFFICIAL["fundamentalvision/Deformable-DETR"]), "official").state
    assert torch.equal(shared["class_embed.1.weight"], shared["class_embed.0.weight"])
    assert not any(key.startswith("transformer.decoder.bbox_embed.") for key in shared)


def test_models_missing_from_the_other_project_are_named():
    with pytest.raises(
        CheckpointError, match="on LRNet has no transformers names. Models that have: .*transformers DETR,"
    ):
        write_names(build_model(dict(type="Classifier", backbone="lrnet26")), "transformers")
    spec = masks("MaskFormerHead", TRANSFORMER_DECODER, RESNET, num_encoder_layers=0)
    with pytest.raises(CheckpointError, match="transformers MaskFormer: has no neck.input_proj.weight, "):
        write_names(build_model(spec), "transformers")
    message = "Transformer, official names: differs from torch.nn.Transformer, which has encoder.norm.weight"
    with pytest.raises(CheckpointError, match=message):
        write_names(build_model(TEXT | dict(target_size=11, final_norm=None)), "official")
    neck = dict(type="PyramidProjection", in_features=["res5"], out_channels=32, num_levels=1)
    with pytest.raises(
        CheckpointError, match="DETR, official names: differs from facebookresearch/detr, which has neck"
    ):
        write_names(build_model(detr() | dict(neck=neck)), "official")


def test_deims_activation_is_not_the_librarys():
    spec = load_config("deim_dfine_n_coco")["model"]  # SiLU in all networks, while the library's setting is of one
    with pytest.raises(CheckpointError, match=r"model\.head\.activation='silu': the transformers library's"):
        make_config_json(Predictor(build_model(spec), []), spec)
