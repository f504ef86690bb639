"""DETR-R50 with the golden weights against the official implementation; the tolerances are in the JSON."""

import pytest
import torch
from golden.weights import compare, load_case
from helpers.detection_batches import padded
from helpers.undrawn_models import undrawn

from vitkit.engine.build import build_model
from vitkit.model_zoo.converters import convert_official
from vitkit.nn.position import sine_positions_2d
from vitkit.ops.images import resize_mask

pytestmark = pytest.mark.smoke

SPEC = dict(
    type="DETR",
    backbone=dict(type="ResNet", depth=50, norm="frozen_bn", frozen_stages=1),
    neck=dict(type="ChannelProjection", out_channels=256),
    head=dict(type="DETRHead", d_model=256, num_heads=8, d_ffn=2048, num_encoder_layers=6, num_decoder_layers=6),
)


@pytest.fixture(scope="module")
def case():
    return load_case("detr_r50")


@pytest.fixture(scope="module")
def model(case):
    return golden_model(case)


def golden_model(case, **options):
    with undrawn():
        model = build_model({**SPEC, **options}).eval()
    state, converter = convert_official(case.torch_state_dict(), model)
    assert converter.name == "facebookresearch/detr"
    model.load_state_dict(state, strict=True)
    return model


@pytest.fixture(scope="module")
def run(case, model):
    """Return the outputs on the golden batch, with those of inner modules."""
    inner = {}
    parts = {"backbone": model.backbone, "memory": model.head.encoder, "states": model.head.decoder}
    handles = [
        part.register_forward_hook(lambda _, __, output, name=name: inner.update({name: output}))
        for name, part in parts.items()
    ]
    inputs = case.torch_inputs()
    images, mask = padded(inputs["image0"], inputs["image1"])
    with torch.no_grad():
        outputs = model(images, mask)
    for handle in handles:
        handle.remove()
    return outputs, inner, mask


def assert_golden(case, outputs):
    report = compare(case, {name: value.numpy() for name, value in outputs.items()})
    assert all(line["ok"] for line in report.values()), report


def test_parameter_counts_equal_the_originals(model):
    assert sum(p.numel() for p in model.parameters()) == 41_524_768
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 41_302_368


def test_intermediate_outputs_equal_the_originals(case, run):
    _, inner, mask = run
    features = inner["backbone"]["res5"]
    small_mask = resize_mask(mask, features.shape[-2:])
    assert_golden(
        case,
        {
            "backbone_0": features,
            "backbone_mask_0": small_mask,
            "pos_embed": sine_positions_2d((7, 8), 256, padding_mask=small_mask).permute(0, 3, 1, 2),
            "encoder_memory": inner["memory"].transpose(1, 2).unflatten(2, (7, 8)),
            "decoder_states": inner["states"],
        },
    )


def test_outputs_of_every_layer_equal_the_originals(case, run):
    outputs = run[0]
    assert len(outputs["aux_outputs"]) == 5
    layers = {f"aux{i}_": layer for i, layer in enumerate(outputs["aux_outputs"])} | {"": outputs}
    assert_golden(
        case, {f"{p}{name}": layer[name] for p, layer in layers.items() for name in ("pred_logits", "pred_boxes")}
    )


@pytest.mark.parametrize("with_mask", [False, True])
def test_odd_sized_image_equals_the_original_with_and_without_a_mask(case, model, with_mask):
    images, mask = padded(case.torch_inputs()["odd"])
    with torch.no_grad():
        outputs = model(images, mask if with_mask else None)
    assert_golden(case, {f"odd/{name}": outputs[name] for name in ("pred_logits", "pred_boxes")})


def test_postprocessing_equals_the_original(case, model):
    stored = {name: torch.from_numpy(case.expected[name].values) for name in ("pred_logits", "pred_boxes")}
    detections = model.postprocess(stored, case.meta["post"]["target_sizes"])
    for output, field in (("post_scores", "scores"), ("post_labels", "labels"), ("post_boxes", "boxes_xyxy")):
        assert_golden(case, {output: torch.stack([d[field] for d in detections])})


def test_isolated_images_do_not_depend_on_the_batch_or_the_padding(case):
    model = golden_model(case, isolate_padding=True)
    odd, other = case.torch_inputs()["odd"], case.torch_inputs()["image0"]
    with torch.no_grad():
        alone = model(odd[None])
        for batch, margin in (((odd, other), 0), ((odd,), 75)):
            outputs = model(*padded(*batch, margin=margin))
            for name in ("pred_logits", "pred_boxes"):
                torch.testing.assert_close(outputs[name][:1], alone[name], atol=1e-4, rtol=1e-4)
