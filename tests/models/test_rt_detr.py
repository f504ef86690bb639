"""RT-DETR: equal to the transformers library's, and trained with denoising and the varifocal loss."""

import pytest
import timm
import torch
from torch import nn

from vitkit import build_model
from vitkit.backbones.resnet_vd import ResNetVD
from vitkit.errors import ConfigError, DataError
from vitkit.heads.rt_detr_v2 import DiscreteDeformableAttention
from vitkit.losses.set_criterion import SetCriterion
from vitkit.model_zoo.converters.rt_detr import TRANSFORMERS
from vitkit.necks.hybrid_encoder import HybridEncoder
from vitkit.structures import FeatureInfo

PUBLISHED = {18: dict(expansion=0.5, num_decoder_layers=3), 50: dict(expansion=1.0, num_decoder_layers=6)}


def rt_detr(depth=18, *, num_classes=80, num_queries=300, training_queries=(), norm="frozen_bn", version="", **head):
    published = PUBLISHED[depth]
    backbone = dict(type="ResNetVD", depth=depth, norm=norm, pretrained=False, out_features=["res3", "res4", "res5"])
    return build_model(
        dict(
            type=f"RTDETR{version}",
            num_queries=num_queries,
            num_classes=num_classes,
            backbone=backbone,
            neck=dict(type="HybridEncoder", out_channels=256, expansion=published["expansion"]),
            head=dict(type=f"RTDETR{version}Head", num_decoder_layers=published["num_decoder_layers"], **head),
            training_queries=list(training_queries),
        )
    )


def test_backbone_equals_timms_and_loads_its_weights():
    theirs = timm.create_model("resnet50d").eval()
    ours = ResNetVD(50, pretrained=False).eval()
    ours.load_state_dict({k: v for k, v in theirs.state_dict().items() if not k.startswith("fc.")})
    images = torch.randn(1, 3, 97, 130)
    with torch.no_grad():
        torch.testing.assert_close(ours(images)["res5"], theirs.forward_features(images), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("depth", [18, 50])
def test_padding_does_not_affect_the_backbones_maps(depth):
    torch.manual_seed(0)
    model = ResNetVD(depth, pretrained=False).eval()
    image = torch.randn(1, 3, 76, 100)
    padded = torch.randn(1, 3, 128, 160)
    padded[:, :, :76, :100] = image
    mask = torch.ones(1, 128, 160, dtype=torch.bool)
    mask[:, :76, :100] = False
    with torch.no_grad():
        alone, inside = model(image, torch.zeros(1, 76, 100, dtype=torch.bool)), model(padded, mask)
    for name, expected in alone.items():
        height, width = expected.shape[-2:]
        torch.testing.assert_close(inside[name][..., :height, :width], expected, atol=1e-4, rtol=1e-4)


def random_values(theirs):
    """Give every parameter and statistic of a model of the library a random value."""
    torch.manual_seed(0)
    for key, value in theirs.named_parameters():
        nn.init.normal_(value, mean=float("norm" in key and "weight" in key), std=0.1 if value.dim() < 2 else 0.05)
    for key, value in theirs.named_buffers():
        if key.endswith("running_mean"):
            nn.init.normal_(value, std=0.1)
        elif key.endswith(("running_var", "weight")):
            nn.init.uniform_(value, 0.5, 1.5)
    return theirs.eval()


def settings_of(depth, transformers):
    """Return the library's settings of a published size."""
    layers = {
        18: ("basic", [2, 2, 2, 2], [64, 128, 256, 512]),
        50: ("bottleneck", [3, 4, 6, 3], [256, 512, 1024, 2048]),
    }
    layer_type, depths, channels = layers[depth]
    backbone = transformers.RTDetrResNetConfig(
        layer_type=layer_type, depths=depths, hidden_sizes=channels, out_indices=[2, 3, 4]
    )
    return dict(
        backbone_config=backbone, encoder_in_channels=channels[1:], hidden_expansion=PUBLISHED[depth]["expansion"],
        decoder_layers=PUBLISHED[depth]["num_decoder_layers"], num_labels=80,
    )  # fmt: skip


def assert_equal_outputs(theirs, ours, size):
    """Assert that both have the same parameters and, with the library's weights, the same outputs in float64."""
    table = next(form.table for form in TRANSFORMERS if form.is_of(ours))
    counts = [sum(value.numel() for value in model.parameters()) for model in (ours, theirs)]
    assert counts[0] == counts[1]
    state = table.read(theirs.state_dict(), ours)
    assert table.read(table.write(ours.state_dict(), ours), ours).keys() == ours.state_dict().keys()
    ours.load_state_dict({k: v for k, v in state.items() if not k.endswith("num_batches_tracked")})
    # Rounding would change the order of selected locations whose scores are nearly the same.
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        expected, outputs = theirs.double()(images), ours.double()(images)
    torch.testing.assert_close(outputs["pred_logits"].double(), expected.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outputs["pred_boxes"].double(), expected.pred_boxes, atol=1e-5, rtol=1e-5)
    for i, layer in enumerate(outputs["aux_outputs"]):
        boxes = expected.intermediate_reference_points[:, i]
        torch.testing.assert_close(layer["pred_boxes"].double(), boxes, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize("size", [(320, 320), (256, 384)])
def test_outputs_equal_the_librarys(depth, size):
    transformers = pytest.importorskip("transformers", reason="the comparison needs pip install -e '.[benchmark]'")
    config = transformers.RTDetrConfig(**settings_of(depth, transformers))
    theirs = random_values(transformers.RTDetrForObjectDetection(config))
    ours = rt_detr(depth, training_queries=[dict(type="BoxDenoising")]).eval()
    assert_equal_outputs(theirs, ours, size)


@pytest.mark.parametrize(
    "head",
    [
        dict(num_points=[4, 4, 4]),
        dict(num_points=[3, 3, 3], offset_scale=0.25),
        dict(num_points=4, sampling="discrete"),
        dict(num_points=2, sampling="discrete", offset_scale=1.0),
    ],
    ids=str,
)
def test_second_versions_outputs_equal_the_librarys(head):
    transformers = pytest.importorskip("transformers", reason="the comparison needs pip install -e '.[benchmark]'")
    points = head["num_points"]
    config = transformers.RTDetrV2Config(
        **settings_of(18, transformers), decoder_n_points=points if isinstance(points, int) else points[0],
        decoder_offset_scale=head.get("offset_scale", 0.5),
        decoder_method="discrete" if "sampling" in head else "default",
    )  # fmt: skip
    theirs = random_values(transformers.RTDetrV2ForObjectDetection(config))
    ours = rt_detr(18, training_queries=[dict(type="BoxDenoising")], version="v2", **head).eval()
    assert_equal_outputs(theirs, ours, (256, 384))


def test_discrete_sampling_reads_the_nearest_pixels_and_trains_no_offsets():
    torch.manual_seed(0)
    points = [2, 1]
    attention = DiscreteDeformableAttention(8, 1, num_levels=2, num_points=points)
    for projection in (attention.value_proj, attention.output_proj):
        nn.init.eye_(projection.weight)
    nn.init.normal_(attention.sampling_offsets.bias, std=2.0)
    shapes = [(4, 6), (2, 3)]
    memory, queries = torch.randn(1, 30, 8), torch.randn(1, 5, 8)
    boxes = torch.rand(1, 5, 1, 4).expand(-1, -1, 2, -1)
    offsets = attention.sampling_offsets.bias.view(3, 2)
    maps = memory.split([24, 6], dim=1)
    for query, box in enumerate(boxes[0, :, 0]):
        expected = torch.zeros(8)
        for point, level in enumerate((0, 0, 1)):
            height, width = shapes[level]
            x, y = (box[:2] + offsets[point] / points[level] * box[2:] * 0.5).tolist()
            column, row = (min(max(int(a * side + 0.5), 0), side - 1) for a, side in ((x, width), (y, height)))
            expected += maps[level][0, row * width + column] / 3  # the weights are equal
        attended = attention(queries, memory, reference_points=boxes, shapes=shapes)
        torch.testing.assert_close(attended[0, query], expected)
    attended.sum().backward()
    assert attention.sampling_offsets.weight.grad is None and attention.attention_weights.bias.grad is not None


def test_every_parameter_is_trained():
    torch.manual_seed(0)
    model = rt_detr(
        num_classes=3, num_queries=20, norm="bn", training_queries=[dict(type="BoxDenoising", num_queries=8)]
    )
    matcher = dict(type="HungarianMatcher", activation="sigmoid", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0)
    criterion = SetCriterion(matcher, dict(labels=1.0, l1=5.0, giou=2.0), class_loss="varifocal")
    targets = [
        {"labels": torch.tensor([0, 2]), "boxes_cxcywh": torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.6, 0.6, 0.4, 0.3]])},
        {"labels": torch.tensor([1]), "boxes_cxcywh": torch.tensor([[0.5, 0.5, 0.9, 0.9]])},
    ]
    outputs = model(torch.randn(2, 3, 128, 128), None, targets)
    losses = criterion(outputs, targets)
    assert {"labels", "aux1_giou", "enc_l1", "dn_aux0_labels"} <= losses.keys()
    sum(losses.values()).backward()
    # The last row of the denoised labels' embedding has no query.
    unused = [name for name, value in model.named_parameters() if value.grad is None]
    assert unused == []


def test_wrong_settings_and_images_are_named():
    info = {"res3": FeatureInfo(8, 8), "res5": FeatureInfo(8, 32)}
    with pytest.raises(ConfigError, match="in_features res3, res5 have strides 8, 32; expected each to be twice"):
        HybridEncoder(info)
    with pytest.raises(ConfigError, match="the backbone has no feature 'res4'"):
        HybridEncoder(info, in_features=["res3", "res4"])
    with pytest.raises(ConfigError, match="sampling='nearest': expected 'bilinear' or 'discrete'"):
        rt_detr(version="v2", sampling="nearest")
    with pytest.raises(ConfigError, match=r"num_points=\[4, 4\] are for 2 levels, but there are 3"):
        rt_detr(version="v2", num_points=[4, 4])
    with pytest.raises(ConfigError, match="offset_scale=0: expected a value above 0"):
        rt_detr(version="v2", offset_scale=0)
    with pytest.raises(DataError, match="RT-DETR: the maps .* have 21 locations, fewer than the 300 queries"):
        rt_detr().eval()(torch.randn(1, 3, 32, 32))
