"""DEIMv2's names: the original's and the transformers library's, both ways, for HGNetV2 and for transformers."""

import pytest
import torch
from helpers.weights import assert_same_weights

from vitkit.engine.build import build_model
from vitkit.errors import CheckpointError
from vitkit.io.coco_classes import COCO_CLASSES
from vitkit.model_zoo.converters import write_names
from vitkit.weights import load_weights

HEAD = dict(type="DEIMv2Head", d_model=32, num_heads=4, d_ffn=48, num_decoder_layers=2)
ENCODER = dict(type="DEIMv2Encoder", out_channels=32, d_ffn=48, num_heads=4, num_blocks=1, expansion=0.5)
VIT = dict(type="ViT", d_model=32, depth=3, num_heads=2, positions="rotary")
ADAPTER = dict(type="SpatialAdapter", blocks=[0, 1, 2], channels=4)
DINOV3 = dict(VIT, num_registers=4, blocks=dict(layer_scale=0.1, norm_eps=1e-5, qkv_bias="qv"))
SPECS = {
    "lite": dict(
        backbone=dict(type="SmallHGNetV2", size="atto", out_features=["res4"]),
        neck=dict(type="LiteEncoder", out_channels=32),
        head=dict(HEAD, num_points=[4, 2], gate=False, shared_box_head=True),
    ),
    "hgnet": dict(
        backbone=dict(type="TimmBackbone", name="hgnetv2_b0", out_features=["res4", "res5"]),
        neck=dict(ENCODER, block="dfine"),
        head=dict(HEAD, num_points=[6, 6]),
    ),
    "vit": dict(backbone=dict(ADAPTER, vit=VIT, norm=False), neck=ENCODER, head=dict(HEAD, num_points=[3, 6, 3])),
    "dinov3": dict(
        backbone=dict(ADAPTER, vit=dict(DINOV3, mlp="swiglu"), out_channels=32),
        neck=ENCODER,
        head=dict(HEAD, num_points=[3, 6, 3]),
    ),
}
NAMES = {
    "lite": ("decoder.dec_bbox_head.1.layers.2.weight", "model.encoder.bi_fusion_conv.conv.weight"),
    "hgnet": ("encoder.fpn_blocks.0.cv2.1.conv.weight", "model.encoder.fpn_blocks.0.csp_rep1.conv2.conv.weight"),
    "vit": ("backbone.dinov3._model.blocks.2.norm1.bias", "model.conv_encoder.backbone.layer.2.layer_scale2.lambda1"),
    "dinov3": ("backbone.dinov3.blocks.0.mlp.w2.weight", "model.conv_encoder.backbone.layer.0.mlp.gate_proj.weight"),
}
"""An entry of each format that only this kind of model has."""


def build(kind, **changes):
    denoising = [dict(type="BoxDenoising", num_queries=4)]
    return build_model(
        dict(type="DEIMv2", num_queries=5, num_classes=80, training_queries=denoising) | SPECS[kind] | changes
    )


def trained(kind):
    torch.manual_seed(0)
    model = build(kind)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("library", ["official", "transformers"])
def test_names_are_written_and_read(kind, library):
    model = trained(kind)
    written = write_names(model, library).state
    assert NAMES[kind][library == "transformers"] in written
    other = build(kind)
    report = load_weights(other, {"model": dict(written)} if library == "official" else dict(written))
    expected = {"official": "Intellindust-AI-Lab/DEIMv2", "transformers": "transformers DEIMv2"}
    assert report.converter == expected[library]
    assert_same_weights(other, model)


@pytest.mark.parametrize("library", ["official", "transformers"])
def test_rows_of_cocos_classes_are_not_taken_for_others(library):
    state, own = dict(write_names(trained("vit"), library).state), [f"own {number}" for number in range(80)]
    load_weights(build("vit"), state, classes=COCO_CLASSES)
    with pytest.raises(CheckpointError, match="own 0"):
        load_weights(build("vit"), state, classes=own)
    report = load_weights(build("vit"), state, classes=own, new_class_head=True)
    assert any(name.startswith("head.class_embed") for name in report.reinitialized)
    with pytest.raises(CheckpointError, match=r"DEIMv2 with 80 classes \(COCO's things\)"):
        load_weights(build("vit", num_classes=3), state, classes=own[:3])


def test_the_original_stores_anchors_and_masked_biases():
    state = write_names(trained("dinov3"), "official").state
    assert state["decoder.anchors"].shape == (1, 80**2 + 40**2 + 20**2, 4)
    q, k, v = state["backbone.dinov3.blocks.1.attn.qkv.bias"].chunk(3)
    assert q.any() and not k.any() and v.any()
    mask = state["backbone.dinov3.blocks.1.attn.qkv.bias_mask"]
    assert mask.chunk(3)[1].sum() == 0 and mask.sum() == 64
    periods = state["backbone.dinov3.rope_embed.periods"]
    torch.testing.assert_close(periods, torch.tensor([1.0, 100**0.25, 10.0, 100**0.75]))
    assert state["backbone.dinov3.storage_tokens"].shape == (1, 4, 32)
    assert not state["backbone.dinov3.mask_token"].any()


def test_files_that_do_not_fit_are_refused():
    state = write_names(trained("lite"), "official").state
    state["decoder.dec_bbox_head.1.layers.0.bias"] = state["decoder.dec_bbox_head.1.layers.0.bias"] + 1
    with pytest.raises(CheckpointError, match=r"another head of distributions in each decoder layer"):
        load_weights(build("lite"), state)
    state = write_names(trained("vit"), "transformers").state
    state["model.enc_output.0.bias"] += 0.1
    with pytest.raises(CheckpointError, match=r"encoder ends with layers that were trained \(model.enc_output\)"):
        load_weights(build("vit"), state)
    state = write_names(trained("vit"), "official").state
    state["encoder.lateral_convs.0.conv_bn_fused.weight"] = state.pop("encoder.lateral_convs.0.conv.weight")
    with pytest.raises(CheckpointError, match=r"after convert_to_deploy\(\), with batch norms folded"):
        load_weights(build("vit"), state)
    with pytest.raises(CheckpointError, match=r"Intellindust-AI-Lab/DEIMv2"):
        load_weights(build("hgnet"), write_names(trained("lite"), "official").state, classes=COCO_CLASSES)
