"""ECDet's names: the original's, both ways, with one projection and with three, and with ECSeg's masks; others' files
are told apart."""

import pytest
import torch
from helpers.weights import assert_same_weights

from vitkit.engine.build import build_model
from vitkit.errors import CheckpointError
from vitkit.io.coco_classes import COCO_CLASSES
from vitkit.model_zoo.converters import write_names
from vitkit.weights import load_weights

VIT = dict(type="ECViT", d_model=32, depth=3, num_heads=2)
SPEC = dict(
    type="ECDet",
    num_queries=5,
    num_classes=80,
    neck=dict(type="DEIMv2Encoder", out_channels=32, d_ffn=48, num_heads=4, num_blocks=1, activation="silu"),
    head=dict(
        type="DEIMv2Head", layer="dfine", d_model=32, num_heads=4, d_ffn=48, num_decoder_layers=2, num_points=[3, 6, 3]
    ),
    training_queries=[dict(type="BoxDenoising", num_queries=4)],
)
NAMES = ("backbone.backbone.register_token", "decoder.decoder.layers.1.norm2.bias", "decoder.decoder.reg_scale")


def build(out_channels=None, **changes):
    return build_model(SPEC | dict(backbone=VIT | dict(out_channels=out_channels)) | changes)


def trained(out_channels=None):
    torch.manual_seed(0)
    model = build(out_channels)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("out_channels", [None, 32])
def test_names_are_written_and_read(out_channels):
    model = trained(out_channels)
    written = write_names(model, "official").state
    assert set(NAMES) <= written.keys()
    projections = {key.split(".")[2] for key in written if key.startswith("backbone.projector.")}
    assert projections == ({"0"} if out_channels is None else {"0", "1", "2"})
    periods = written["backbone.backbone.rope_embed.periods"]
    torch.testing.assert_close(periods, torch.tensor([1.0, 100**0.25, 10.0, 100**0.75]))
    other = build(out_channels)
    report = load_weights(other, {"ema": {"module": dict(written)}})
    assert report.converter == "Intellindust-AI-Lab/EdgeCrafter"
    assert_same_weights(other, model)


def test_rows_of_cocos_classes_are_not_taken_for_others():
    state, own = dict(write_names(trained(), "official").state), [f"own {number}" for number in range(80)]
    load_weights(build(), state, classes=COCO_CLASSES)
    with pytest.raises(CheckpointError, match="own 0"):
        load_weights(build(), state, classes=own)
    with pytest.raises(CheckpointError, match=r"EdgeCrafter with 80 classes \(COCO's things\)"):
        load_weights(build(num_classes=3), state, classes=own[:3])


def test_masks_have_the_originals_names_and_start_from_boxes():
    boxes, masks = trained(), dict(SPEC["head"], masks=dict(type="BlockMasks", one_block=True, initial=True))
    model, other = build(head=masks), build(head=masks)
    written = dict(write_names(model, "official").state)
    leaves = ["blocks.1.dwconv.bias", "blocks.1.pwconv1.weight", "query_features_block.layers.2.bias", "bias"]
    assert {f"decoder.decoder.segmentation_head.{leaf}" for leaf in leaves} <= written.keys()
    assert load_weights(other, written).converter == "Intellindust-AI-Lab/EdgeCrafter"
    assert_same_weights(other, model)
    report = load_weights(other, dict(write_names(boxes, "official").state), new_class_head=True)
    assert report.new_parts == ["head.mask_head."] and "newly initialized: head.mask_head" in str(report)
    kept = {key: value for key, value in model.state_dict().items() if key.startswith("head.mask_head.")}
    assert_same_weights(other, boxes.state_dict() | kept)
    assert other.state_dict().keys() == boxes.state_dict().keys() | kept.keys()
    with pytest.raises(CheckpointError, match=r"missing \(\d+\): head\.mask_head"):
        load_weights(other, dict(write_names(boxes, "official").state))


def test_projections_of_another_size_are_an_error():
    with pytest.raises(CheckpointError, match=r"missing \(10\): backbone\.projections\.res4"):
        load_weights(build(32), dict(write_names(trained(), "official").state))
