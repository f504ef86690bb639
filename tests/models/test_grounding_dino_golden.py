"""Grounding DINO with the golden weights against the official implementation; the tolerances are in the JSON."""

import pytest
import torch
from golden.weights import compare, load_case
from helpers.detection_batches import padded
from helpers.grounding_models import OUTSIDE, SEPARATORS, build_grounding, grounding_config, prompt_of

from vitkit.weights import load_weights


@pytest.fixture(scope="module")
def case():
    return load_case("grounding_dino")


@pytest.fixture(scope="module")
def model(case):
    config = grounding_config()
    head = config["head"] | dict(d_model=256, num_heads=8, d_ffn=512)
    model = build_grounding(head=head, neck=config["neck"] | dict(out_channels=256)).eval()
    report = load_weights(model, case.torch_state_dict())
    assert report.converter == "IDEA-Research/GroundingDINO"
    return model


@pytest.mark.parametrize("variant", ["one", "two"])
@torch.no_grad()
def test_outputs_equal_the_original(case, model, variant):
    inputs = case.torch_inputs()
    images = [inputs["image0"]] if variant == "one" else [inputs["image0"], inputs["image1"]]
    tokens = inputs[f"{variant}/tokens"]
    encoded = []
    handle = model.head.encoder.register_forward_hook(lambda *call: encoded.append(call[2]))
    try:
        outputs = model(*padded(*images), prompt_of(tokens, SEPARATORS, OUTSIDE))
    finally:
        handle.remove()
    ((memory, memory_text),) = encoded
    results = {
        **{name: outputs[name] for name in ("pred_logits", "pred_boxes")},
        "memory": memory,
        "memory_text": memory_text,
    }
    report = compare(case, {f"{variant}/{name}": value.numpy() for name, value in results.items()})
    assert all(line["ok"] for line in report.values()), report
