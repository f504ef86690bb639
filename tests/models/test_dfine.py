"""D-FINE: equal to the transformers library's, and to the original's recorded outputs."""

import numpy as np
import pytest
import torch
from helpers.realtime_models import dfine
from torch import nn

from vitkit.apps.visualization.boxes import draw_detections
from vitkit.configs.dfine import dfine_model
from vitkit.errors import CheckpointError
from vitkit.losses.set_criterion import SetCriterion
from vitkit.model_zoo.converters.dfine import OFFICIAL, TRANSFORMERS

PARAMETERS = {"n": 3_782_691, "s": 10_321_875, "m": 19_590_062, "l": 31_244_150, "x": 62_621_558}
"""Those of the original's models with 80 classes, without the two numbers that are not trained."""
HGNET = {
    "b0": dict(stem_channels=[3, 16, 16], stage_in_channels=[16, 64, 256, 512], stage_mid_channels=[16, 32, 64, 128],
               stage_out_channels=[64, 256, 512, 1024], stage_num_blocks=[1, 1, 2, 1],
               stage_numb_of_layers=[3, 3, 3, 3]),
    "b2": dict(stem_channels=[3, 24, 32], stage_in_channels=[32, 96, 384, 768], stage_mid_channels=[32, 64, 128, 256],
               stage_out_channels=[96, 384, 768, 1536], stage_num_blocks=[1, 1, 3, 1],
               stage_numb_of_layers=[4, 4, 4, 4]),
    "b4": dict(stem_channels=[3, 32, 48], stage_in_channels=[48, 128, 512, 1024],
               stage_mid_channels=[48, 96, 192, 384], stage_out_channels=[128, 512, 1024, 2048],
               stage_num_blocks=[1, 1, 3, 1], stage_numb_of_layers=[6, 6, 6, 6]),
    "b5": dict(stem_channels=[3, 32, 64], stage_in_channels=[64, 128, 512, 1024],
               stage_mid_channels=[64, 128, 256, 512], stage_out_channels=[128, 512, 1024, 2048],
               stage_num_blocks=[1, 2, 5, 2], stage_numb_of_layers=[6, 6, 6, 6]),
}  # fmt: skip
"""The library's settings of HGNetv2."""


def library_model(transformers, size):
    spec = dfine_model(size)
    neck, head = spec["neck"], spec["head"]
    backbone = spec["backbone"]["name"].removeprefix("hgnetv2_")
    levels = 2 if size == "n" else 3
    settings = HGNET[backbone] | dict(hidden_sizes=HGNET[backbone]["stage_out_channels"])
    config = transformers.DFineConfig(
        backbone_config=transformers.HGNetV2Config(
            **settings, depths=settings["stage_num_blocks"], out_indices=[2, 3, 4][-levels:],
            use_learnable_affine_block=backbone in ("b0", "b2"),
        ),
        freeze_backbone_batch_norms=size in ("l", "x"),
        encoder_hidden_dim=neck["out_channels"], encoder_in_channels=settings["hidden_sizes"][-levels:],
        feat_strides=[8, 16, 32][-levels:], encoder_ffn_dim=neck["d_ffn"], encode_proj_layers=[levels - 1],
        hidden_expansion=neck["expansion"], depth_mult=neck["num_blocks"] / 3, d_model=head["d_model"],
        decoder_in_channels=[neck["out_channels"]] * levels, decoder_ffn_dim=head["d_ffn"], num_feature_levels=levels,
        decoder_n_points=head["num_points"], decoder_layers=head["num_decoder_layers"], reg_scale=head["reg_scale"],
        num_labels=80,
    )  # fmt: skip
    return transformers.DFineForObjectDetection(config)


def randomize(model):
    """Draw all weights, so that no part of the model is without effect."""
    torch.manual_seed(0)
    for key, value in model.named_parameters():
        if value.requires_grad or "decoder" not in key:
            if value.dim() > 1:
                nn.init.kaiming_normal_(value, nonlinearity="linear")  # smaller ones leave maps nearly constant
            else:
                is_scale = ("norm" in key and "weight" in key) or key.endswith("scale")
                nn.init.normal_(value, mean=float(is_scale), std=0.1)
    for key, value in model.named_buffers():
        if key.endswith("running_mean"):
            nn.init.normal_(value, std=0.1)
        elif key.endswith(("running_var", "weight")):
            nn.init.uniform_(value, 0.5, 1.5)


def without_counters(state):
    return {key: value for key, value in state.items() if not key.endswith("num_batches_tracked")}


@pytest.mark.parametrize(("size", "image"), [
    ("n", (512, 512)), ("n", (416, 576)), ("s", (320, 320)), ("s", (256, 416)), ("m", (256, 320)), ("l", (256, 320)),
    ("x", (256, 320)),
])  # fmt: skip
def test_outputs_equal_the_librarys(size, image):
    transformers = pytest.importorskip("transformers", reason="the comparison needs pip install -e '.[benchmark]'")
    theirs = library_model(transformers, size).eval()
    randomize(theirs)
    ours = dfine(size).eval()
    state = without_counters(TRANSFORMERS[0].table.read(theirs.state_dict(), ours))
    assert state.keys() == without_counters(ours.state_dict()).keys()
    ours.load_state_dict(state, strict=False)
    # Rounding would change the order of selected locations whose scores are nearly the same.
    images = torch.randn(2, 3, *image, dtype=torch.float64)
    with torch.no_grad():
        expected, outputs = theirs.double()(images), ours.double()(images)
    torch.testing.assert_close(outputs["pred_logits"].double(), expected.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outputs["pred_boxes"].double(), expected.pred_boxes, atol=1e-5, rtol=1e-5)
    written, stored = TRANSFORMERS[0].table.write(ours.state_dict(), ours), theirs.state_dict()
    assert TRANSFORMERS[0].table.read(written, ours).keys() == ours.state_dict().keys()
    assert all(torch.equal(written[key].double(), stored[key]) for key in written.keys() & stored.keys())


@pytest.mark.parametrize("size", PARAMETERS)
def test_sizes_have_the_originals_numbers_of_parameters(size):
    assert sum(value.numel() for value in dfine(size).parameters()) == PARAMETERS[size]


def test_official_names_are_read_and_written():
    model = dfine("x", num_classes=5)  # the only size with projections before the decoder
    state = model.state_dict()
    written = OFFICIAL[0].table.write(state, model)
    assert {
        "backbone.stages.1.blocks.0.layers.0.conv.weight",
        "encoder.encoder.0.layers.0.linear1.weight",
        "encoder.pan_blocks.1.cv3.0.bottlenecks.2.conv2.norm.weight",
        "encoder.downsample_convs.0.0.cv2.conv.weight",
        "decoder.input_proj.0.conv.weight",
        "decoder.decoder.layers.5.gateway.norm.weight",
        "decoder.decoder.layers.0.cross_attn.num_points_scale",
        "decoder.dec_bbox_head.5.layers.2.weight",
        "decoder.denoising_class_embed.weight",
    } <= written.keys()
    assert not [key for key in written if key.startswith(("head", "neck", "training_queries"))]
    assert written["decoder.anchors"].shape == (1, 80**2 + 40**2 + 20**2, 4)
    assert written["decoder.reg_scale"] == written["decoder.decoder.reg_scale"] == 8 and written["decoder.up"] == 0.5
    again = OFFICIAL[0].table.read(written, model)
    assert again.keys() == state.keys() and all(torch.equal(again[key], value) for key, value in state.items())


def test_weights_for_another_scale_of_distances_are_refused():
    model = dfine("s", num_classes=3)
    state = OFFICIAL[0].table.write(model.state_dict(), model) | {"decoder.reg_scale": torch.tensor([8.0])}
    with pytest.raises(CheckpointError, match=r"the weights are for head.reg_scale=8, but the model has 4: use"):
        OFFICIAL[0].table.read(state, model)


def test_every_parameter_is_trained():
    torch.manual_seed(0)
    model = dfine("n", num_classes=3, num_queries=20, activation="silu")
    matcher = dict(type="HungarianMatcher", activation="sigmoid", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0)
    criterion = SetCriterion(matcher, dict(labels=1.0, l1=5.0, giou=2.0), class_loss="varifocal")
    targets = [
        {"labels": torch.tensor([0, 2]), "boxes_cxcywh": torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.6, 0.6, 0.4, 0.3]])},
        {"labels": torch.tensor([1]), "boxes_cxcywh": torch.tensor([[0.5, 0.5, 0.9, 0.9]])},
    ]
    outputs = model(torch.randn(2, 3, 128, 128), None, targets)
    losses = criterion(outputs, targets)
    assert {"labels", "aux2_giou", "enc_l1", "dn_aux0_labels"} <= losses.keys()
    denoised = outputs["training_outputs"][1]
    assert denoised["pred_corners"].shape[1] == denoised["initial_boxes"].shape[1] == 200
    sum(losses.values()).backward()
    assert [name for name, value in model.named_parameters() if value.grad is None] == []


def test_frozen_parts_have_no_gradient():
    model = dfine("l", num_classes=3).backbone
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    assert frozen and all(name.startswith("net.stem.") for name in frozen)
    assert not [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]


def test_boxes_whose_edges_have_crossed_have_no_area_and_are_drawn():
    model = dfine("n", num_classes=1)
    boxes_cxcywh = torch.tensor([[[0.5, 0.5, -0.2, 0.4], [0.5, 0.5, 0.2, 0.4]]])
    outputs = {"pred_logits": torch.tensor([[[2.0], [1.0]]]), "pred_boxes": boxes_cxcywh}
    boxes = model.postprocess(outputs, [(100, 100)])[0]["boxes_xyxy"]
    torch.testing.assert_close(boxes, torch.tensor([[50.0, 30.0, 50.0, 70.0], [40.0, 30.0, 60.0, 70.0]]))
    draw_detections(np.zeros((100, 100, 3), np.uint8), boxes, [0, 0], ["a"])
