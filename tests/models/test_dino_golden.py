"""DINO-R50 with the golden weights against the official implementation; the tolerances are in the JSON.

In training, the recorded noise replaces sampled noise.
"""

import pytest
import torch
from golden.weights import compare, grad_projection, load_case, pinned_topk
from helpers.detection_batches import padded, targets_of
from helpers.undrawn_models import undrawn

from vitkit.configs.dino import config
from vitkit.engine.build import build_model
from vitkit.model_zoo.converters import convert_official
from vitkit.nn.queries import attention_mask, part_sizes
from vitkit.registry import CRITERIA
from vitkit.training_queries.box_denoising import Noise

TERMS = {"labels": "loss_ce", "l1": "loss_bbox", "giou": "loss_giou"}
LAYERS = {"": "", **{f"aux{i}_": f"_{i}" for i in range(5)}, "enc_": "_interm", "dn_": "_dn"}
LAYERS |= {f"dn_aux{i}_": f"_dn_{i}" for i in range(5)}
"""Prefix of our keys -> suffix of the original's."""


@pytest.fixture(scope="module")
def case():
    return load_case("dino_r50_4scale_train")


@pytest.fixture(scope="module")
def model(case):
    with undrawn():
        model = build_model(config()["model"])
    state, converter = convert_official(case.torch_state_dict(), model)
    assert converter.name == "IDEA-Research/DINO"
    model.load_state_dict(state, strict=True)
    return model


def assert_golden(case, outputs):
    report = compare(case, {name: value.detach().numpy() for name, value in outputs.items()})
    assert all(line["ok"] for line in report.values()), report


def by_golden_name(outputs, prefix):
    """Return the outputs of all layers under their golden names."""
    first_stage, *noised = outputs["training_outputs"]
    parts = {"": outputs} | ({"dn_": noised[0]} if noised else {})
    layers = dict(parts)
    for part, layer in parts.items():
        layers |= {f"{part}aux{i}_": aux for i, aux in enumerate(layer["aux_outputs"])}
    layers["interm_"] = first_stage
    named = {
        f"{prefix}{part}{name}": layer[name] for part, layer in layers.items() for name in ("pred_logits", "pred_boxes")
    }
    return {name: value for name, value in named.items() if value.shape[1]}


def recorded_noise(case, variant, label_noise):
    """The random numbers of the golden run."""
    inputs = case.torch_inputs()
    chance = inputs.get(f"{variant}/draw_label_p", torch.zeros(0))
    labels = torch.zeros(len(chance), dtype=torch.int64)
    if len(chance):
        labels[chance < label_noise / 2] = inputs[f"{variant}/draw_label_new"]
    sign = inputs.get(f"{variant}/draw_box_sign", torch.zeros(0, 4)) * 2.0 - 1
    return Noise(chance, labels, sign, inputs.get(f"{variant}/draw_box_part", torch.zeros(0, 4)))


def set_noise(case, denoising, variant, monkeypatch):
    """Let denoising use the random numbers of the golden run."""
    monkeypatch.setattr(denoising, "box_noise", case.meta["dn"][variant]["box_noise_scale"])
    noise = recorded_noise(case, variant, denoising.label_noise)
    monkeypatch.setattr(denoising, "draw", lambda count, device: Noise(*(numbers.to(device) for numbers in noise)))


@pytest.fixture
def train(case, model, monkeypatch):
    """Run the training forward pass of a variant."""

    def run(variant):
        set_noise(case, model.training_queries.denoising, variant, monkeypatch)
        inputs = case.torch_inputs()
        with pinned_topk(case.expected["topk_proposals"].values):
            return model.train()(*padded(inputs["image0"], inputs["image1"]), targets=targets_of(case, variant))

    return run


def test_parameter_count_equals_the_original(model):
    assert sum(p.numel() for p in model.parameters()) == 46_893_182
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 46_670_782


@pytest.mark.parametrize("name", ["", "odd/"])
def test_inference_equals_the_original(model, name):
    case = load_case("dino_r50_4scale", weights=False)
    inputs = case.torch_inputs()
    images, mask = padded(inputs["odd"]) if name else padded(inputs["image0"], inputs["image1"])
    with torch.no_grad(), pinned_topk(case.expected[f"{name}topk_proposals"].values):
        outputs = model.eval()(images, mask)
    assert len(outputs["training_outputs"]) == 1
    expected = by_golden_name(outputs, name)
    assert_golden(case, {key: value for key, value in expected.items() if key in case.expected})


def test_postprocessing_equals_the_original(model):
    case = load_case("dino_r50_4scale", weights=False)
    inputs, post = case.torch_inputs(), case.meta["post"]
    outputs = dict(pred_logits=inputs["post_logits"] - 3, pred_boxes=inputs["post_boxes"].sigmoid())
    detections = model.postprocess(outputs, post["target_sizes"])
    for output, field in (("post_scores", "scores"), ("post_labels", "labels"), ("post_boxes", "boxes_xyxy")):
        assert_golden(case, {output: torch.stack([d[field] for d in detections])})


@pytest.mark.parametrize("variant", ["objects", "one_empty", "noise_1"])
def test_denoising_queries_and_mask_equal_the_original(case, model, monkeypatch, variant):
    denoising = model.training_queries.denoising
    set_noise(case, denoising, variant, monkeypatch)
    (noised,) = denoising(model.head, targets_of(case, variant), None)
    inputs, meta = case.torch_inputs(), case.meta["dn"][variant]
    labels = inputs[f"{variant}/dn_label_ids"]
    content = denoising.label_embed.weight.cpu()[labels.clamp(min=0)] * (labels >= 0)[..., None]
    assert torch.equal(noised["queries"].content.cpu(), content)
    assert noised["repeats"] == meta["num_dn_group"]
    expected = inputs[f"{variant}/dn_boxes_unact"].sigmoid()
    torch.testing.assert_close(noised["queries"].references.cpu(), expected, atol=1e-6, rtol=0)
    mask = attention_mask(part_sizes(noised), [True] * noised["num_parts"], 900)
    assert torch.equal(mask, inputs[f"{variant}/dn_attn_mask"])


@pytest.mark.parametrize(
    "variant",
    ["objects", "all_empty", *(pytest.param(name, marks=pytest.mark.slow) for name in ("one_empty", "noise_1"))],
)
def test_training_outputs_losses_and_gradients_equal_the_original(case, model, train, variant):
    outputs = train(variant)
    expected = by_golden_name(outputs, f"{variant}/")
    assert_golden(case, {key: value for key, value in expected.items() if key in case.expected})
    losses = CRITERIA.build(config()["criterion"])(outputs, targets_of(case, variant))
    golden = case.losses[variant]
    assert losses.keys() == {f"{prefix}{term}" for prefix in LAYERS for term in TERMS}
    for prefix, suffix in LAYERS.items():
        for ours, theirs in TERMS.items():
            weighted = golden["terms"][theirs + suffix] * golden["weights"][theirs + suffix]
            assert losses[prefix + ours].item() == pytest.approx(weighted, rel=1e-4), (prefix, ours)
    total = sum(losses.values())
    assert total.item() == pytest.approx(golden["total"], rel=1e-4)
    if variant not in case.grads:
        return
    model.zero_grad()
    total.backward()
    official, _ = convert_official({name: name for name in case.state_dict}, model)
    grads = {official[name]: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, grad in grads.items():
        norm, projection = case.grads[variant][name]
        got_norm, got_projection = grad_projection(name, grad.numpy())
        assert got_norm == pytest.approx(norm, rel=1e-3), name
        assert got_projection == pytest.approx(projection, abs=6e-3 * norm), name
    assert grads.keys() == case.grads[variant].keys()
