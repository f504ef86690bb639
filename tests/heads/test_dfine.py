"""The head of D-FINE on its own: boxes as distributions, refined by every layer."""

import pytest
import torch
from torch import nn

from vitkit.errors import ConfigError, DataError
from vitkit.heads.dfine import DFINEHead, Gate, LocationQuality
from vitkit.necks.dfine_encoder import DFINEEncoder
from vitkit.structures import FeatureInfo


def small(num_queries=20, **changes):
    info = {"res4": FeatureInfo(32, 16), "res5": FeatureInfo(48, 32)}
    head = dict(d_model=32, num_heads=2, num_points=[2, 4], d_ffn=48, num_decoder_layers=3, reg_max=8) | changes
    return DFINEHead(info, 3, num_queries=num_queries, **head)


def maps(batch_size=2):
    return {"res4": torch.randn(batch_size, 32, 8, 10), "res5": torch.randn(batch_size, 48, 4, 5)}


def test_initial_boxes_are_kept_by_all_layers():
    # The last layers of the box heads start at zero: all edges are at distance 0 from the selected boxes.
    torch.manual_seed(0)
    outputs = small().eval()(maps())
    first, *others = outputs["aux_outputs"]
    assert len(others) == 2 and "pred_corners" not in first
    for layer in (*others, outputs):
        torch.testing.assert_close(layer["pred_boxes"], layer["reference_points"], atol=1e-5, rtol=0)
        torch.testing.assert_close(layer["initial_boxes"], first["pred_boxes"])
    assert outputs["distance_bins"].shape == (9,) and outputs["reg_scale"] == 4.0
    assert outputs["pred_corners"].shape == (2, 20, 4 * 9)


def test_distributions_are_sums_over_the_layers_and_boxes_their_means():
    torch.manual_seed(0)
    head = small().eval()
    for parameter in head.decoder.parameters():
        nn.init.normal_(parameter, std=0.2)
    outputs = head(maps())
    layers = [*outputs["aux_outputs"][1:], outputs]
    bins, initial = outputs["distance_bins"], outputs["initial_boxes"]
    for before, layer in zip([None, *layers], layers):
        assert before is None or torch.equal(layer["reference_points"], before["pred_boxes"])
        distances = (layer["pred_corners"].view(2, 20, 4, 9).softmax(-1) * bins).sum(-1)
        left, top, right, bottom = distances.unbind(-1)
        cx, cy, width, height = initial.unbind(-1)
        x0, x1 = cx - (2 + left) * width / 4, cx + (2 + right) * width / 4
        y0, y1 = cy - (2 + top) * height / 4, cy + (2 + bottom) * height / 4
        expected = torch.stack([(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0], dim=-1)
        torch.testing.assert_close(layer["pred_boxes"], expected, atol=1e-5, rtol=1e-5)


def test_gradients_of_a_layer_reach_earlier_ones_only_through_the_distributions():
    torch.manual_seed(0)
    head = small(num_decoder_layers=2)
    for parameter in head.decoder.parameters():
        nn.init.normal_(parameter, std=0.2)
    outputs = head(maps())
    names = ["decoder.corner_embed.0.layers.2.weight", "decoder.bbox_embed.layers.2.weight"]
    corner, box = torch.autograd.grad(
        outputs["pred_boxes"].sum(), [head.get_parameter(name) for name in names], allow_unused=True
    )
    assert corner.any()
    assert box is None  # distances are measured from boxes without gradient
    first = outputs["aux_outputs"][0]
    assert torch.autograd.grad(first["pred_boxes"].sum(), head.get_parameter(names[1]))[0].any()


def test_gate_starts_as_half_of_the_sum():
    gate = Gate(8)
    a, b = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    torch.testing.assert_close(gate(a, b), gate.norm((a + b) / 2))


def test_quality_depends_on_the_largest_probabilities_of_each_edge():
    quality = LocationQuality(8, activation="relu")
    corners = torch.randn(2, 5, 4 * 9)
    assert not quality(corners).any()
    nn.init.normal_(quality.reg_conf.layers[-1].weight)
    moved = corners.view(2, 5, 4, 9).flip(-1).flatten(-2)  # the same probabilities in other bins
    torch.testing.assert_close(quality(moved), quality(corners))
    assert not torch.allclose(quality(3 * corners), quality(corners))


def test_padding_of_the_memory_is_not_read():
    torch.manual_seed(0)
    head = small().eval()
    features = maps(1)
    mask = torch.zeros(1, 128, 160, dtype=torch.bool)
    mask[:, 96:] = True
    with torch.no_grad():
        expected = head(features, mask)
        for name, stride in (("res4", 16), ("res5", 32)):
            features[name][:, :, 96 // stride :] = 100.0
        outputs = head(features, mask)
    torch.testing.assert_close(outputs["pred_boxes"], expected["pred_boxes"])


def test_queries_do_not_start_from_padding():
    torch.manual_seed(0)
    head = small(num_queries=20).eval()
    selection = head.proposals
    with torch.no_grad():  # no location has a higher score than those without content, such as padding
        empty = selection.enc_output_norm(selection.enc_output(torch.zeros(1, head.d_model)))
        selection.class_embed.weight.copy_(empty.expand_as(selection.class_embed.weight))
    mask = torch.zeros(1, 128, 160, dtype=torch.bool)
    mask[:, 64:] = True  # 4 x 10 and 2 x 5 locations are left
    with torch.no_grad():
        boxes = head(maps(1), mask)["training_outputs"][0]["pred_boxes"]
    assert (boxes[..., 1] < 1).all()  # those of padding are the constant 1


def test_wrong_settings_and_images_are_named():
    info = {"res3": FeatureInfo(8, 8), "res5": FeatureInfo(8, 32)}
    with pytest.raises(ConfigError, match="DFINEEncoder: in_features res3, res5 have strides 8, 32; expected each to"):
        DFINEEncoder(info)
    with pytest.raises(ConfigError, match="DFINEEncoder: expansion=0.01 of out_channels=64 leaves no channels"):
        DFINEEncoder({"res5": FeatureInfo(8, 32)}, 64, expansion=0.01)
    with pytest.raises(ConfigError, match="reg_max=2: expected an even number of at least 4"):
        small(reg_max=2)
    with pytest.raises(
        ConfigError,
        match=r"num_points=\[3, 6, 3\] are for 3 levels, but there are 2. Set the backbone's out_features to 3",
    ):
        small(num_points=[3, 6, 3])
    with pytest.raises(ConfigError, match="activation: got 'tanh'; expected one of relu, gelu, gelu_tanh, silu"):
        small(activation="tanh")
    with pytest.raises(ConfigError, match="num_queries=0, num_decoder_layers=3: expected at least 1"):
        small(num_queries=0)
    with pytest.raises(DataError, match="D-FINE: the maps .* have 100 locations, fewer than the 300 queries"):
        small(num_queries=300)(maps())
