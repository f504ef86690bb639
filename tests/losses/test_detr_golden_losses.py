"""Matching, losses and gradients of the original DETR, from the golden file."""

import pytest
import torch
from golden.weights import Case, grad_projection, load_case

from vitkit.model_zoo.converters import convert_official
from vitkit.registry import CRITERIA, MODELS

VARIANTS = ["objects", "one_empty"]
TERMS = {"labels": "loss_ce", "l1": "loss_bbox", "giou": "loss_giou"}
LAYERS = {"final": ("", ""), **{f"aux{i}": (f"aux{i}_", f"_{i}") for i in range(5)}}
"""Golden name of a layer -> (prefix of our keys, suffix of the original's)."""


@pytest.fixture(scope="module")
def case() -> Case:
    return load_case("detr_r50")


@pytest.fixture(scope="module")
def model(case: Case) -> torch.nn.Module:
    model = MODELS.build(
        dict(
            type="DETR",
            num_queries=100,
            num_classes=91,
            backbone=dict(type="ResNet", depth=50, norm="frozen_bn", frozen_stages=1),
            neck=dict(type="ChannelProjection", out_channels=256),
            head=dict(
                type="DETRHead",
                d_model=256,
                num_heads=8,
                d_ffn=2048,
                dropout=0.1,
                num_encoder_layers=6,
                num_decoder_layers=6,
            ),
        )
    )
    model.load_state_dict(convert_official(case.torch_state_dict(), model)[0])
    return model.eval()


@pytest.fixture(scope="module")
def outputs(case: Case, model: torch.nn.Module) -> dict:
    inputs = case.torch_inputs()
    images = [inputs["image0"], inputs["image1"]]
    height, width = (max(image.shape[i] for image in images) for i in (1, 2))
    batch, padding_mask = torch.zeros(2, 3, height, width), torch.ones(2, height, width, dtype=torch.bool)
    for i, image in enumerate(images):
        batch[i, :, : image.shape[1], : image.shape[2]] = image
        padding_mask[i, : image.shape[1], : image.shape[2]] = False
    return model(batch, padding_mask)


def make_criterion() -> torch.nn.Module:
    return CRITERIA.build(
        dict(
            type="SetCriterion",
            no_object_weight=0.1,
            weights=dict(labels=1.0, l1=5.0, giou=2.0),
            matcher=dict(type="HungarianMatcher", cost_labels=1.0, cost_l1=5.0, cost_giou=2.0),
        )
    )


def targets_of(case: Case, variant: str) -> list[dict]:
    return [
        {"labels": torch.from_numpy(target["labels"]), "boxes_cxcywh": torch.from_numpy(target["boxes"])}
        for target in case.targets[variant]
    ]


def assert_terms_equal(losses: dict, expected: dict, layer: str) -> None:
    prefix, suffix = LAYERS[layer]
    for ours, theirs in TERMS.items():
        weighted = expected["terms"][theirs + suffix] * expected["weights"][theirs + suffix]
        assert losses[prefix + ours].item() == pytest.approx(weighted, rel=1e-4), (layer, ours)


@pytest.mark.parametrize("variant", VARIANTS)
def test_golden_outputs_give_the_losses_of_the_final_layer(case, variant):
    stored = {name: torch.from_numpy(case.expected[name].values) for name in ("pred_logits", "pred_boxes")}
    losses = make_criterion()(stored, targets_of(case, variant))
    assert_terms_equal(losses, case.losses[variant], "final")


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layer_is_matched_as_in_the_original(case, outputs, variant):
    matcher = make_criterion().matcher
    for name in LAYERS:
        layer = outputs if name == "final" else outputs["aux_outputs"][int(name[3:])]
        ((matches,),) = matcher([([layer], targets_of(case, variant))])
        for got, expected in zip(matches, case.losses[variant]["indices"][name], strict=True):
            assert [index.tolist() for index in got] == [index.tolist() for index in expected], name


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_term_of_every_layer_and_the_total_equal_the_original(case, outputs, variant):
    losses = make_criterion()(outputs, targets_of(case, variant))
    for layer in LAYERS:
        assert_terms_equal(losses, case.losses[variant], layer)
    assert sum(losses.values()).item() == pytest.approx(case.losses[variant]["total"], rel=1e-4)


def test_gradients_of_all_parameters_equal_the_original(case, model, outputs):
    losses = make_criterion()(outputs, targets_of(case, "objects"))
    sum(losses.values()).backward()
    official_names, _ = convert_official({name: name for name in case.state_dict}, model)
    grads = {official_names[name]: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == case.grads["objects"].keys()
    for name, grad in grads.items():
        norm, projection = case.grads["objects"][name]
        got_norm, got_projection = grad_projection(name, grad.numpy())
        # The first decoder layer attends over zeros: its in_proj_weight has no gradient but rounding, near 1e-4.
        assert got_norm == pytest.approx(norm, rel=1e-3, abs=5e-4), name
        # Along a random direction, the rounding of both float32 runs is visible: up to 0.0024 of the norm from float64.
        assert got_projection == pytest.approx(projection, abs=3e-3 * norm + 5e-4), name
