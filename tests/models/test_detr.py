import pytest
import torch
from helpers.detection_specs import detr_spec
from torch import nn

from vitkit.config import load_config
from vitkit.engine.build import build_model
from vitkit.errors import ConfigError
from vitkit.nn.activation_checkpointing import enable_activation_checkpointing
from vitkit.nn.attention import AttentionRecorder
from vitkit.ops.images import normalize_images, pad_to_multiple, resize_mask
from vitkit.structures import FeatureInfo
from vitkit.weights import load_pretrained


def small_batch():
    torch.manual_seed(0)
    mask = torch.zeros(2, 48, 64, dtype=torch.bool)
    mask[1, 40:] = mask[1, :, 33:] = True
    images = torch.randint(0, 256, (2, 3, 48, 64), dtype=torch.uint8) * ~mask[:, None]
    return images, mask


def test_outputs_have_the_promised_shapes_and_ranges():
    outputs = build_model(detr_spec())(*small_batch())
    assert set(outputs) == {"pred_logits", "pred_boxes", "aux_outputs", "queries", "memory"}
    for layer in (outputs, *outputs["aux_outputs"]):
        assert layer["pred_logits"].shape == (2, 10, 4)
        assert layer["pred_boxes"].shape == (2, 10, 4)
        assert layer["pred_boxes"].min() >= 0 and layer["pred_boxes"].max() <= 1
    assert len(outputs["aux_outputs"]) == 2


def test_pixels_are_normalized_inside_and_padding_is_zero_afterwards():
    images, mask = small_batch()
    normalized = normalize_images(images, mask)
    expected = (images[0, :, 5, 7] / 255 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(normalized[0, :, 5, 7], expected)
    assert normalized[1, :, 40:].abs().max() == 0
    model = build_model(detr_spec()).eval()
    torch.testing.assert_close(model(images, mask)["pred_boxes"], model(normalized, mask)["pred_boxes"])
    assert normalize_images(normalized, mask) is normalized


def test_pixel_mean_and_deviation_of_the_backbone_are_used():
    images, mask = small_batch()
    spec = detr_spec()
    mean, std = (0.5, 0.4, 0.25), (0.2, 0.5, 1.0)
    spec["backbone"].update(pixel_mean=mean, pixel_std=std)
    model = build_model(spec).eval()
    expected = (images / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    expected = expected.masked_fill(mask[:, None], 0.0)
    for given in (images, normalize_images(images, mask)):
        prepared, _ = model.prepare(given, mask)
        torch.testing.assert_close(prepared, expected, atol=1e-5, rtol=1e-5)
    assert not any("pixel" in name for name in model.state_dict())


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (dict(pixel_mean=[123.7, 116.3, 103.5]), r"pixel_mean=\(123.7, .*expected three numbers in 0..1.*Divide"),
        (dict(pixel_std=[0.2, 0.0, 0.2]), r"pixel_std=\(0.2, 0.0, 0.2\): expected three numbers above 0"),
        (dict(pixel_mean=[0.5]), r"pixel_mean=\(0.5,\): expected three numbers"),
    ],
)
def test_wrong_pixel_statistics_are_named(argument, message):
    spec = detr_spec()
    spec["backbone"].update(argument)
    with pytest.raises(ConfigError, match=message):
        build_model(spec)


def test_postprocess_gives_every_query_its_best_class_and_pixels():
    model = build_model(detr_spec())
    logits = torch.tensor([[[2.0, 1.0, 0.0, 9.0], [0.0, 3.0, 0.0, 0.0]]])  # the last class is no object
    boxes = torch.tensor([[[0.5, 0.5, 0.2, 0.4], [0.25, 0.5, 0.5, 1.0]]])
    (detections,) = model.postprocess(dict(pred_logits=logits, pred_boxes=boxes), [(100, 200)])
    assert detections["labels"].tolist() == [0, 1]
    torch.testing.assert_close(detections["scores"], torch.stack([logits[0, i].softmax(-1)[i] for i in (0, 1)]))
    torch.testing.assert_close(
        detections["boxes_xyxy"], torch.tensor([[80.0, 30.0, 120.0, 70.0], [0.0, 0.0, 100.0, 100.0]])
    )


def test_every_parameter_gets_a_finite_gradient():
    model = build_model(detr_spec())
    outputs = model(*small_batch())
    sum(o["pred_logits"].square().mean() + o["pred_boxes"].sum() for o in (outputs, *outputs["aux_outputs"])).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_an_image_that_is_all_padding_gives_no_nan():
    images, mask = small_batch()
    mask[1] = True
    model = build_model(detr_spec())
    outputs = model(images, mask)
    (outputs["pred_logits"].sum() + outputs["pred_boxes"].sum()).backward()
    assert torch.isfinite(outputs["pred_logits"]).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("norm_first", [False, True])
def test_isolated_images_do_not_depend_on_padding(norm_first):
    spec = detr_spec(isolate_padding=True)
    spec["head"]["norm_first"] = norm_first
    model = build_model(spec).eval()
    image = torch.randint(0, 256, (1, 3, 37, 51), dtype=torch.uint8)
    alone = model(image)
    for height, width in ((37, 60), (50, 51), (101, 83)):
        images, mask = torch.zeros(2, 3, height, width, dtype=torch.uint8), torch.ones(2, height, width).bool()
        images[0, :, :37, :51], mask[0, :37, :51] = image[0], False
        images[1], mask[1] = 77, False
        outputs = model(images, mask)
        for name in ("pred_logits", "pred_boxes"):
            torch.testing.assert_close(outputs[name][:1], alone[name], atol=1e-4, rtol=1e-4)


def test_isolation_needs_a_backbone_that_accepts_the_mask():
    class Plain(nn.Module):
        feature_info = {"res5": FeatureInfo(3, 1)}

        def forward(self, images):
            return {"res5": images}

    with pytest.raises(
        ConfigError, match=r"backbone Plain does not accept a padding mask, so its kern.*isolate_padding=False"
    ):
        build_model(detr_spec(backbone=Plain(), isolate_padding=True))
    assert load_pretrained(build_model(detr_spec(backbone=Plain()))) is None


def test_recorder_names_every_attention_of_the_model():
    model = build_model(detr_spec()).eval()
    images, mask = small_batch()
    with AttentionRecorder(model) as maps:
        recorded = model(images, mask)
    torch.testing.assert_close(recorded["pred_logits"], model(images, mask)["pred_logits"])
    assert len(maps) == 1 + 2 * 3
    cross = maps["head.decoder.layers.2.cross_attn"][0]
    assert cross.shape == (2, 4, 10, 6 * 8)
    padded = resize_mask(mask, (6, 8)).flatten(1)
    assert cross[1, ..., padded[1]].max() == 0


def test_recomputing_activations_keeps_the_gradients():
    model = build_model(detr_spec())
    grads = []
    for enabled in (False, True):
        enable_activation_checkpointing(model, enabled)
        model.backbone.eval()  # its running statistics would move between the two
        model.zero_grad()
        outputs = model(*small_batch())
        (outputs["pred_logits"].square().mean() + outputs["pred_boxes"].sum()).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)


def test_bfloat16_autocast_stays_close_and_boxes_are_float32():
    model = build_model(detr_spec()).eval()
    images, mask = small_batch()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(images, mask)
    torch.testing.assert_close(outputs["pred_boxes"], model(images, mask)["pred_boxes"], atol=0.05, rtol=0)
    assert model.double()(images.double(), mask)["pred_boxes"].dtype == torch.float64


@pytest.mark.parametrize("isolate_padding", [False, True])
def test_forward_compiles_without_graph_breaks(isolate_padding):
    spec = detr_spec(isolate_padding=isolate_padding)
    spec["backbone"] |= dict(norm="frozen_bn", frozen_stages=1)
    model = build_model(spec).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    images, mask = small_batch()
    torch.testing.assert_close(compiled(images, mask)["pred_boxes"], model(images, mask)["pred_boxes"])


def test_head_and_neck_must_have_the_same_channels():
    spec = detr_spec(neck=dict(type="ChannelProjection", out_channels=16))
    with pytest.raises(ConfigError, match=r"d_model=32, but feature 'res3' has 16 channels.*model\.neck\.out_channels"):
        build_model(spec)


def test_error_of_the_neck_names_an_unknown_feature():
    with pytest.raises(ConfigError, match=r"has no feature 'res5'.*Known: res3"):
        build_model(detr_spec(neck=dict(type="ChannelProjection", out_channels=32, in_features=["res5"])))


def test_padding_to_a_multiple_marks_what_it_adds():
    images, mask = pad_to_multiple(torch.ones(1, 3, 33, 64), torch.zeros(1, 33, 64, dtype=torch.bool), 32)
    assert images.shape == (1, 3, 64, 64) and mask.shape == (1, 64, 64)
    assert mask[0, 33:].all() and not mask[0, :33].any() and images[0, :, 33:].abs().max() == 0


@pytest.mark.parametrize(
    ("name", "stride", "parameters"),
    [("detr_r50_dc5", 16, 41_524_768), ("detr_r101", 32, 60_464_672), ("detr_r101_dc5", 16, 60_464_672)],
)
def test_variant_configs_have_the_published_size_and_stride(name, stride, parameters):
    with torch.device("meta"):
        model = build_model(load_config(name)["model"])
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model.backbone.feature_info["res5"].stride == stride
