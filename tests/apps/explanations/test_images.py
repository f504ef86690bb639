"""What a model attends to in a figure, for every kind of attention."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.every_model import DENSE
from torch import nn

from vitkit.apps.explanations.images import (
    QueryPredictions,
    cell_of,
    compute_covered,
    decoder_layers,
    encoder_layers,
    image_attention,
    image_sampling,
    samples_points,
)
from vitkit.apps.inference import Predictor
from vitkit.engine.build import build_model
from vitkit.errors import ConfigError
from vitkit.nn.attention import AttentionRecorder
from vitkit.structures import ScoreThresholds

RESNET = dict(type="ResNet", depth=18, pretrained=False)
TRANSFORMER = dict(d_model=32, num_heads=2, d_ffn=32, num_decoder_layers=4)
PIXELS = dict(out_channels=32, mask_channels=16)
DETR_HEAD = dict(type="DETRHead", num_encoder_layers=2, **TRANSFORMER)
MODELS = {
    "detr": dict(type="DETR", neck=dict(type="ChannelProjection", out_channels=32), head=DETR_HEAD),
    "detr_segmentation": dict(
        type="DETRSegmentation",
        neck=dict(type="ChannelProjection", out_channels=128),
        head=dict(DETR_HEAD, d_model=128, num_heads=8),
    ),
    "maskformer": dict(
        type="MaskFormer",
        neck=dict(type="TransformerPixelDecoder", num_layers=2, num_heads=2, **PIXELS),
        head=dict(type="MaskFormerHead", **TRANSFORMER),
    ),
    "mask2former": dict(
        type="Mask2Former",
        neck=dict(type="DeformablePixelDecoder", num_layers=1, num_heads=2, **PIXELS),
        head=dict(type="Mask2FormerHead", **TRANSFORMER),
    ),
}
IMAGE = np.random.default_rng(0).integers(0, 255, (60, 90, 3), dtype=np.uint8)


def predictor_of(name):
    torch.manual_seed(0)
    return Predictor(build_model(dict(MODELS[name], backbone=RESNET, num_queries=5, num_classes=3)), ["a", "b", "c"])


@torch.no_grad()
def recorded(predictor, module, image=IMAGE):
    """Return the attention weights of a module's only call, averaged over the heads, (L, S)."""
    batch = predictor.prepare([image])
    with AttentionRecorder(nn.ModuleDict({"module": module})) as maps:
        predictor.model(**batch.inputs)
    return maps["module"][0][0].mean(dim=0)


# Pixels: strides 32 and, for Mask2Former's fourth layer, 32 again; two of three heads pad to a multiple of it.
@pytest.mark.parametrize(
    ("name", "covered"),
    [
        ("detr", (1.0, 1.0)),
        ("detr_segmentation", (1.0, 1.0)),
        ("maskformer", (64 / 60, 96 / 90)),
        ("mask2former", (64 / 60, 96 / 90)),
    ],
)
def test_locations_and_queries_get_the_attention_weights_of_their_layers(name, covered):
    predictor = predictor_of(name)
    attention = image_attention(predictor, IMAGE)
    decoder = decoder_layers(predictor.model)
    assert len(decoder) == 4
    assert attention.decoder.layer == 3 and attention.decoder.maps.shape == (5, 2, 3)
    assert torch.allclose(attention.decoder.maps.flatten(1), recorded(predictor, decoder[3]), atol=1e-6)
    assert attention.decoder.covered == pytest.approx(covered)
    encoder = encoder_layers(predictor.model)
    if name == "mask2former":
        assert encoder == [] and attention.encoder is None
    else:
        assert attention.encoder.layer == 1 and attention.encoder.maps.shape == (6, 2, 3)
        assert torch.allclose(attention.encoder.maps.flatten(1), recorded(predictor, encoder[1]), atol=1e-6)
    assert attention.queries.boxes_xyxy.shape == (5, 4) and attention.queries.scores.shape == (5,)
    assert (attention.queries.masks is None) == (name == "detr")


def test_layers_of_mask2former_attend_to_the_levels_in_turn():
    predictor = predictor_of("mask2former")
    sizes = [tuple(image_attention(predictor, IMAGE, decoder_layer=k).decoder.maps.shape[1:]) for k in range(3)]
    assert sizes == [(2, 3), (4, 6), (8, 12)]


def test_each_layer_of_mask2former_is_gated_by_the_mask_before_it():
    predictor = predictor_of("mask2former")
    attention = image_attention(predictor, IMAGE)
    outputs = attention.view.outputs
    for layer, before in zip(attention.decoder_layers, outputs["aux_outputs"]):
        size = layer.maps.shape[-2:]
        features = F.interpolate(before["mask_features"], size=size, mode="bilinear", align_corners=False)
        inside = (before["mask_embed"][0] @ features[0].flatten(1) >= 0).unflatten(-1, size)
        inside = inside | ~inside.flatten(1).any(1)[:, None, None]  # a query with an empty mask attends everywhere
        assert torch.equal(layer.gates, inside)
        assert (layer.maps[~inside] == 0).all()
    assert len(attention.decoder_layers) == 4
    name, box, mask = attention.predictions(2)[-1]
    assert box is None and torch.equal(mask, attention.queries.masks[2])
    assert name.endswith(f"{attention.queries.scores[2]:.2f}")


@pytest.mark.parametrize("registers", [0, 2])
def test_attention_of_vit_patches_excludes_other_tokens(registers):
    torch.manual_seed(0)
    backbone = dict(type="ViT", d_model=32, depth=2, num_heads=2, image_size=64, num_registers=registers)
    predictor = Predictor(build_model(dict(type="Classifier", backbone=backbone), classes=["a", "b"]), ["a", "b"])
    attention = image_attention(predictor, IMAGE)
    weights = recorded(predictor, predictor.model.backbone.blocks[1].attn)
    assert weights.shape == (25 + registers, 25 + registers)  # 4 x 6 patches of 60 x 90 pixels, and the class token
    assert torch.allclose(attention.encoder.maps.flatten(1), weights[-24:, -24:], atol=1e-6)
    assert attention.encoder.covered == pytest.approx((64 / 60, 96 / 90))
    assert attention.decoder is None and attention.queries is None


def eomt(*tasks):
    torch.manual_seed(0)
    backbone = dict(type="ViT", d_model=32, depth=3, num_heads=2, image_size=64)
    spec = dict(type="EoMT", backbone=backbone, num_queries=5, num_blocks=2, tasks=list(tasks))
    return Predictor(build_model(spec, classes=["a", "b"]), ["a", "b"])


def test_attention_of_queries_among_vit_tokens_is_read():
    predictor = eomt("instance")
    attention = image_attention(predictor, IMAGE[:, :64])
    weights = recorded(predictor, predictor.model.backbone.blocks[2].attn, IMAGE[:, :64])
    assert weights.shape == (5 + 1 + 16,) * 2  # queries, the class token, patches
    assert torch.allclose(attention.decoder.maps.flatten(1), weights[:5, 6:], atol=1e-6)
    assert torch.allclose(attention.encoder.maps.flatten(1), weights[6:, 6:], atol=1e-6)
    assert attention.decoder.layer == 1 and attention.queries.scores.shape == (5,)


def test_image_processed_in_windows_is_refused():
    with pytest.raises(ConfigError, match="EoMT takes an image of this size in windows.* at most 64 x 64 pixels"):
        image_attention(eomt("semantic"), IMAGE)


def test_deformable_attention_is_shown_at_its_sampling_points():
    torch.manual_seed(0)
    head = dict(type="DeformableDETRHead", d_model=32, num_heads=2, d_ffn=32, num_encoder_layers=1)
    neck = dict(type="PyramidProjection", out_channels=32, num_levels=4, num_groups=4)
    spec = dict(type="DeformableDETR", backbone=RESNET, neck=neck, head=dict(head, num_decoder_layers=2))
    predictor = Predictor(build_model(dict(spec, num_queries=5, num_classes=3)), ["a", "b", "c"])
    assert samples_points(predictor.model)
    first, last = image_sampling(predictor, IMAGE).layers(2)
    assert first.locations.shape == (2, 4, 4, 2) and first.weights.sum(dim=(1, 2)) == pytest.approx(torch.ones(2))
    assert first.name in "abc" and last.box_cxcywh.shape == (4,)


def test_sampling_points_of_rf_detr_lie_at_their_pixels_in_images_of_incomplete_patches():
    torch.manual_seed(0)
    backbone = dict(type="WindowedViT", d_model=32, depth=2, num_heads=2, image_size=64, global_blocks=[1])
    head = dict(type="RFDETRHead", d_model=32, num_heads=2, num_cross_heads=2, d_ffn=32, num_decoder_layers=1)
    neck = dict(type="C2fProjection", out_channels=32, num_blocks=1)
    spec = dict(type="RFDETR", backbone=backbone, neck=neck, head=head, num_queries=5, num_classes=3)
    predictor = Predictor(build_model(spec), ["a", "b", "c"])
    check_points_lie_in_the_centers(predictor)


def check_points_lie_in_the_centers(predictor):
    nn.init.zeros_(predictor.model.head.decoder.layers[0].cross_attn.sampling_offsets.bias)
    (layer,) = image_sampling(predictor, IMAGE).layers(2)  # in each box's center
    torch.testing.assert_close(layer.locations, layer.reference[:2].expand_as(layer.locations))


def test_sampling_points_of_dino_lie_at_their_pixels_if_it_does_not_round_padding():
    torch.manual_seed(0)
    head = dict(type="DINOHead", d_model=32, num_heads=2, d_ffn=32, num_encoder_layers=1, num_decoder_layers=1)
    neck = dict(type="PyramidProjection", out_channels=32, num_levels=4, num_groups=4)
    spec = dict(type="DINO", backbone=RESNET, neck=neck, head=head | dict(rounds_padding=False))
    check_points_lie_in_the_centers(Predictor(build_model(spec | dict(num_queries=5, num_classes=3)), ["a", "b", "c"]))


def test_keypoints_sample_the_points_of_their_query_and_group():
    torch.manual_seed(0)
    head = dict(type="RFDETRHead", d_model=32, num_heads=2, num_cross_heads=2, d_ffn=32, num_decoder_layers=2)
    neck = dict(type="C2fProjectionPair", in_features=["res4"], out_channels=32, num_blocks=1)
    spec = dict(type="RFDETRKeypoints", backbone=RESNET, neck=neck, head=dict(head, keypoint_classes=[2, 0]))
    predictor = Predictor(build_model(dict(spec, num_queries=5, num_classes=3, num_keypoints=4)), ["a", "b", "c"])
    sampling = image_sampling(predictor, IMAGE)
    for label, group in ((0, 1), (1, None), (2, 0)):
        sampling.queries.labels.fill_(label)
        layers = sampling.keypoints(3)
        assert len(layers) == (0 if group is None else 4)
        locations, _ = sampling.view.records["keypoints.1"][0]
        for k, layer in enumerate(layers):
            row = (3 * 2 + group) * 4 + k
            torch.testing.assert_close(layer.locations, locations[0, row] * torch.tensor(sampling.covered[0][::-1]))
            predicted = sampling.view.outputs["pred_keypoints"][0, 3, group, k]
            assert layer.keypoint.tolist() == predicted[:2].tolist() and layer.name == f"point {k}"
            assert layer.reference.tolist() == sampling.layers(3)[-1].reference.tolist()


@pytest.mark.parametrize("num_layers", [1, 2])
def test_keypoints_with_tokens_of_their_own_sample_around_where_they_were_found(tmp_path, num_layers):
    torch.manual_seed(0)
    spec = copy.deepcopy(DENSE["ECPose"][0]) | dict(type="ECPose", num_queries=5, num_classes=3, num_keypoints=4)
    spec["head"]["num_decoder_layers"] = num_layers
    predictor = Predictor(build_model(spec).eval(), ["a", "b", "c"])
    nn.init.normal_(predictor.model.head.decoder.shift_embed[0].layers[-1].weight, std=3)  # points that move
    offsets = predictor.model.head.decoder.layers[-1].cross_attn.sampling_offsets
    nn.init.zeros_(offsets.bias)
    nn.init.zeros_(offsets.weight)
    sampling = image_sampling(predictor, IMAGE)
    points = sampling.keypoints(3)
    assert [point.name for point in points] == [f"point {k}" for k in range(4)]
    found = sampling.view.outputs["pred_keypoints"][0, 3]
    for point, predicted in zip(points, found):
        assert point.keypoint.tolist() == predicted.tolist() and point.score is None
        torch.testing.assert_close(point.locations, point.reference.expand_as(point.locations))
        assert num_layers == 1 or not torch.allclose(point.reference, sampling.layers(3)[-1].reference, atol=1e-3)
    sampling.draw_keypoints(3, tmp_path / "points.png")
    assert (tmp_path / "points.png").stat().st_size


def boxes(*scores, masks=None):
    boxes_xyxy = torch.tensor([[0.0, 0, 100, 100], [10, 10, 50, 50], [20, 20, 40, 40]])
    return QueryPredictions(torch.tensor(scores), torch.tensor([0, 1, 2]), boxes_xyxy, masks, (100, 100))


def test_the_smallest_confident_box_around_a_point_is_taken():
    assert boxes(0.9, 0.8, 0.7).at((30, 30), ScoreThresholds()) == 2
    assert boxes(0.9, 0.8, 0.3).at((30, 30), ScoreThresholds()) == 1
    assert boxes(0.9, 0.8, 0.7).at((15, 30), ScoreThresholds()) == 1
    assert boxes(0.2, 0.4, 0.3).at((30, 30), ScoreThresholds()) == 1  # none is confident: the best
    assert boxes(0.2, 0.9, 0.9).at((90, 90), ScoreThresholds()) == 0
    assert boxes(0.9, 0.8, 0.7).at((30, 30), ScoreThresholds(0.5, (None, None, 0.75))) == 1
    assert boxes(0.9, 0.8, 0.7).at((100, 30), ScoreThresholds()) is None


def test_point_is_matched_by_masks_if_there_are_any():
    masks = torch.zeros(3, 10, 20, dtype=torch.bool)
    masks[1, 5, 19] = True
    queries = boxes(0.9, 0.8, 0.7, masks=masks)
    assert queries.at((99, 55), ScoreThresholds()) == 1
    assert queries.at((94, 55), ScoreThresholds()) is None and queries.at((30, 30), ScoreThresholds()) is None


def test_point_is_mapped_to_its_cell_of_the_feature_map():
    assert cell_of((0, 0), (50, 70), (5, 7), (1.0, 1.0)) == 0
    assert cell_of((25.5, 10), (50, 70), (5, 7), (1.0, 1.0)) == 7 + 2
    assert cell_of((69.9, 49.9), (50, 70), (5, 7), (1.0, 1.0)) == 34
    assert cell_of((69.9, 49.9), (50, 70), (5, 7), (2.0, 2.0)) == 2 * 7 + 3


def test_padded_image_size_includes_the_padding():
    padding_mask = torch.ones(1, 8, 10, dtype=torch.bool)
    padding_mask[:, :4, :8] = False
    assert compute_covered(padding_mask) == (2.0, 1.25)


def test_a_model_without_such_attention_is_named():
    model = nn.Module()
    model.head = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="Linear has no attention in the image that can be drawn"):
        samples_points(model)
