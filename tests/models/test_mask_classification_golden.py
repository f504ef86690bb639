"""MaskFormer and Mask2Former with the golden weights against the official code; the tolerances are in the JSON."""

import pytest
import torch
from golden.weights import compare, load_case
from helpers.undrawn_models import undrawn

from vitkit.engine.build import build_model
from vitkit.model_zoo.converters import convert_official
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD
from vitkit.ops.masks import mask_logits

pytestmark = pytest.mark.smoke

BACKBONE = dict(type="ResNet", depth=50, norm="frozen_bn")
SPECS = {
    "mask2former_r50_coco_instance": dict(
        type="Mask2Former",
        num_queries=100,
        num_classes=80,
        backbone=BACKBONE,
        neck=dict(type="DeformablePixelDecoder", out_channels=256),
        head=dict(type="Mask2FormerHead", d_model=256, num_heads=8, d_ffn=2048, num_decoder_layers=9),
    ),
    "maskformer_r50_ade20k_semantic": dict(
        type="MaskFormer",
        num_queries=100,
        num_classes=150,
        backbone=BACKBONE,
        neck=dict(type="FPNPixelDecoder", out_channels=256),
        head=dict(type="MaskFormerHead", d_model=256, num_heads=8, d_ffn=2048, num_decoder_layers=6),
    ),
}
PARAMETERS = {"mask2former_r50_coco_instance": 43_970_257, "maskformer_r50_ade20k_semantic": 41_254_743}


@pytest.fixture(scope="module", params=SPECS)
def case(request):
    return load_case(request.param)


@pytest.fixture(scope="module")
def model(case):
    with undrawn():
        model = build_model(SPECS[case.name]).eval()
    state, converter = convert_official(case.torch_state_dict(), model)
    assert converter.name == f"facebookresearch/{'Mask2Former' if 'mask2former' in case.name else 'MaskFormer'}"
    model.load_state_dict(state, strict=True)
    return model


def batch(case, *names):
    """Return a batch, normalized and then padded with 0 to a common size, as in the original."""
    mean, std = (torch.tensor(values).view(3, 1, 1) * 255 for values in (IMAGENET_MEAN, IMAGENET_STD))
    inputs = case.torch_inputs()
    images = [(inputs[name] - mean) / std for name in names]
    padded = torch.zeros(len(images), 3, max(x.shape[1] for x in images), max(x.shape[2] for x in images))
    for i, image in enumerate(images):
        padded[i, :, : image.shape[1], : image.shape[2]] = image
    return padded


def assert_golden(case, outputs):
    report = compare(case, {name: value.detach().numpy() for name, value in outputs.items()})
    assert all(line["ok"] for line in report.values()), report


def test_parameter_counts_are_the_originals(case, model):
    # The original's frozen norms are buffers, as here; its criterion has none.
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[case.name]


def test_outputs_of_every_layer_equal_the_originals(case, model):
    inner = {}
    parts = {"features": model.backbone, "maps": model.neck}
    handles = [
        part.register_forward_hook(lambda _, __, output, name=name: inner.update({name: output}))
        for name, part in parts.items()
    ]
    with torch.no_grad():
        outputs = model(batch(case, "image0", "image1"))
    for handle in handles:
        handle.remove()
    features, maps = inner["features"], inner["maps"]
    layers = {f"aux{i}_": layer for i, layer in enumerate(outputs["aux_outputs"])} | {"": outputs}
    expected = {f"{p}pred_logits": layer["pred_logits"] for p, layer in layers.items()}
    expected |= {f"{p}pred_masks": mask_logits(x["mask_embed"], x["mask_features"]) for p, x in layers.items()}
    expected |= {f"backbone_{name}": x for name, x in features.items()}
    expected["mask_features"] = maps["mask_features"]
    if "multi_scale_0" in case.expected:
        expected |= {f"multi_scale_{i}": maps[name] for i, name in enumerate(("res5", "res4", "res3"))}
    assert_golden(case, expected)


def test_single_images_of_odd_sizes_equal_the_originals(case, model):
    for name in {"odd", "tiny"} & set(case.torch_inputs()):
        with torch.no_grad():
            outputs = model(batch(case, name))
        assert_golden(case, {f"{name}/{key}": outputs[key] for key in ("pred_logits", "pred_masks")})
