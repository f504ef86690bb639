"""Matching, losses and gradients of the original MaskFormer and Mask2Former, from the golden files."""

from functools import cache

import pytest
import torch
from golden.weights import grad_projection, load_case, rng_for
from helpers.undrawn_models import undrawn

from vitkit.engine.build import build_model
from vitkit.model_zoo.converters import convert_official
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD
from vitkit.registry import CRITERIA

VARIANTS = ["objects", "one_empty"]
TERMS = {"labels": "loss_ce", "mask": "loss_mask", "dice": "loss_dice"}
POINTS = {"candidates": "loss_over", "uniform": "loss_rand"}
BACKBONE = dict(type="ResNet", depth=50, norm="frozen_bn")
SPECS = {
    "mask2former_r50_coco_instance": (
        dict(
            type="Mask2Former",
            num_classes=80,
            backbone=BACKBONE,
            neck=dict(type="DeformablePixelDecoder", out_channels=256),
            head=dict(type="Mask2FormerHead"),
        ),
        dict(
            type="MaskCriterion",
            weights=dict(labels=2.0, mask=5.0, dice=5.0),
            no_object_weight=0.1,
            matcher=dict(type="HungarianMaskMatcher", cost_labels=2.0, cost_mask=5.0, cost_dice=5.0),
        ),
    ),
    "maskformer_r50_ade20k_semantic": (
        dict(
            type="MaskFormer",
            num_classes=150,
            backbone=BACKBONE,
            neck=dict(type="FPNPixelDecoder", out_channels=256),
            head=dict(type="MaskFormerHead"),
        ),
        dict(
            type="MaskCriterion",
            mask_loss="focal",
            no_object_weight=0.1,
            weights=dict(labels=1.0, mask=20.0, dice=1.0),
            matcher=dict(
                type="HungarianMaskMatcher", cost_labels=1.0, cost_mask=20.0, cost_dice=1.0, mask_cost="focal"
            ),
        ),
    ),
}


@pytest.fixture(scope="module", params=SPECS)
def case(request):
    return load_case(request.param)


@pytest.fixture(scope="module")
def model(case):
    with undrawn():
        model = build_model(SPECS[case.name][0]).eval()
    model.load_state_dict(convert_official(case.torch_state_dict(), model)[0])
    return model


@pytest.fixture(scope="module")
def outputs(case, model):
    mean, std = (torch.tensor(values).view(3, 1, 1) * 255 for values in (IMAGENET_MEAN, IMAGENET_STD))
    images = [(case.torch_inputs()[name] - mean) / std for name in ("image0", "image1")]
    batch = torch.zeros(2, 3, max(x.shape[1] for x in images), max(x.shape[2] for x in images))
    for i, image in enumerate(images):
        batch[i, :, : image.shape[1], : image.shape[2]] = image
    return model(batch)


def make_criterion(case, variant, num_aux):
    """Build the criterion with the golden file's points in place of random ones."""
    criterion = CRITERIA.build(SPECS[case.name][1])
    prefix = f"points:{case.name}:{variant}"
    # Here the last layer comes first, then the earlier ones.
    layers = ["final", *(f"aux{i}" for i in range(num_aux))]

    # The points of a layer's masks are drawn in several calls.
    rng_of = cache(lambda name: rng_for(f"{prefix}:{name}"))

    def draw(name, shape):
        return torch.from_numpy(rng_of(name).random(shape, dtype="float32"))

    criterion.draw_points = lambda purpose, layer, num_masks, count, device: draw(
        f"{POINTS[purpose]}:{layers[layer]}", (num_masks, count, 2)
    ).to(device)
    criterion.matcher.draw_points = lambda layer, image, device: draw(
        f"match:{layers[layer]}:{image}", (1, criterion.matcher.num_points, 2)
    )[0].to(device)
    return criterion


def targets_of(case, variant):
    return [{k: torch.from_numpy(target[k]) for k in ("labels", "masks")} for target in case.targets[variant]]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layer_is_matched_as_in_the_original(case, outputs, variant):
    aux = outputs["aux_outputs"]
    matcher = make_criterion(case, variant, len(aux)).matcher
    (matches,) = matcher([([outputs, *aux], targets_of(case, variant))], input_size=outputs["input_size"])
    for i, name in enumerate(["final", *(f"aux{i}" for i in range(len(aux)))]):
        for got, expected in zip(matches[i], case.losses[variant]["indices"][name], strict=True):
            assert [index.tolist() for index in got] == [index.tolist() for index in expected], name


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_term_of_every_layer_and_the_total_equal_the_original(case, outputs, variant):
    aux = outputs["aux_outputs"]
    losses = make_criterion(case, variant, len(aux))(outputs, targets_of(case, variant))
    expected = case.losses[variant]
    for prefix, suffix in [("", ""), *((f"aux{i}_", f"_{i}") for i in range(len(aux)))]:
        for ours, theirs in TERMS.items():
            weighted = expected["terms"][theirs + suffix] * expected["weights"][theirs + suffix]
            assert losses[prefix + ours].item() == pytest.approx(weighted, rel=1e-4), prefix + ours
    assert sum(losses.values()).item() == pytest.approx(expected["total"], rel=1e-4)


def test_gradients_of_all_parameters_equal_the_original(case, model, outputs):
    criterion = make_criterion(case, "objects", len(outputs["aux_outputs"]))
    sum(criterion(outputs, targets_of(case, "objects")).values()).backward()
    names = {name: name for name in case.state_dict}
    official_names, _ = convert_official(names, model)
    grads = {official_names[name]: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert case.grads["objects"].keys() <= grads.keys()
    for name in case.grads["objects"]:
        norm, projection = case.grads["objects"][name]
        got_norm, got_projection = grad_projection(name, grads[name].numpy())
        assert got_norm == pytest.approx(norm, rel=1e-3, abs=1e-4), name
        # Along a random direction, float32 rounding is visible: a flipped ReLU changes it by up to 0.007 of the norm.
        assert got_projection == pytest.approx(projection, abs=1e-2 * norm + 1e-3), name
