"""ECPose's names: the original's, both ways, with the row of persons alone and with both rows."""

import pytest
import torch
from helpers.weights import assert_same_weights

from vitkit.configs.ecpose import ecpose_model
from vitkit.engine.build import build_model
from vitkit.errors import CheckpointError
from vitkit.model_zoo.converters import write_names
from vitkit.weights import load_weights

NAMES = ("backbone.backbone.register_token", "decoder.decoder.layers.1.within_norm.bias", "decoder.reg_scale")


def build(**changes):
    spec = ecpose_model("s")
    spec["backbone"] |= dict(d_model=32, depth=3, num_heads=2, pretrained=False)
    spec["neck"] |= dict(out_channels=32, d_ffn=48, num_heads=4)
    spec["head"] |= dict(d_model=32, num_heads=4, d_ffn=48, num_decoder_layers=2)
    torch.manual_seed(0)
    model = build_model(spec | changes)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("num_classes", [1, 2])
def test_names_are_written_and_read(num_classes):
    model = build(num_classes=num_classes)
    written = write_names(model, "official").state
    assert set(NAMES) <= written.keys()
    assert written["decoder.anchors"].shape == (1, 8400, 2) and written["decoder.anchors"].isfinite().all()
    assert written["decoder.valid_mask"].sum() == 4 * 79  # void: the outermost locations at stride 8
    heads = {key: value for key, value in written.items() if "class_embed" in key and key.endswith("bias")}
    assert len(heads) == 3 and all(len(bias) == 2 for bias in heads.values())
    other = build(num_classes=num_classes)
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    report = load_weights(other, {"ema": {"module": dict(written)}})
    assert report.converter == "Intellindust-AI-Lab/EdgeCrafter, poses"
    assert_same_weights(other, model)


def test_persons_are_the_second_row_and_the_second_label():
    two, one = build(num_classes=2), build(num_classes=1)
    written = dict(write_names(two, "official").state)
    load_weights(one, dict(written), classes=["person"])
    head = one.head.proposals.class_embed
    assert torch.equal(head.weight, two.head.proposals.class_embed.weight[1:])
    assert torch.equal(head.bias, two.head.proposals.class_embed.bias[1:])
    labels = (model.training_queries.denoising.label_embed.weight for model in (one, two))
    first, second = labels
    assert torch.equal(first[0], second[1]) and torch.equal(first[1], second[0]) and torch.equal(first[2:], second[2:])
    # Written back, the row without objects is never best, and persons predict the same.
    back = write_names(one, "official").state
    assert (back["decoder.class_embed.0.bias"][0], back["decoder.class_embed.0.weight"][0].any()) == (-100, False)
    load_weights(again := build(num_classes=2), dict(back))
    pixels = torch.randint(0, 256, (1, 3, 96, 96), dtype=torch.uint8)
    with torch.no_grad():
        logits, (first, second) = one.eval()(pixels)["pred_logits"], again.eval()(pixels)["pred_logits"].unbind(-1)
    torch.testing.assert_close(logits[..., 0].sort().values, second.sort().values, atol=1e-3, rtol=1e-3)
    assert (first < second - 50).all()


def test_persons_are_not_taken_for_another_class():
    state = dict(write_names(build(num_classes=2), "official").state)
    with pytest.raises(CheckpointError, match="person"):
        load_weights(build(num_classes=1), state, classes=["dog"])
    with pytest.raises(CheckpointError, match="EdgeCrafter, poses with 2 classes"):
        load_weights(build(num_classes=3), state, classes=["a", "b", "c"])
