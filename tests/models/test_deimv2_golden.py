"""DEIMv2 against outputs and gradients of the original code, in training mode, with weights and images by a rule.

`golden/deimv2_SIZE.npz` were recorded from Intellindust-AI-Lab/DEIMv2 at 0fff8d4, built from an archive of the
repository with batch norms in place of synchronized ones, one process per size, since its configs keep what a former
one has set. Inputs and weights are drawn as for D-FINE: 5 classes, 30 queries, no denoising, two images, in
float64. A shared head of boxes has the weights of the first layer's key.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.drawn_weights import assert_close, drawn, projections, weighted_sum, weights
from helpers.realtime_models import deimv2

from vitkit.configs.deimv2 import SIZES, VARIANTS, deimv2_model
from vitkit.engine.build import build_model
from vitkit.model_zoo.converters.deimv2 import OFFICIAL
from vitkit.model_zoo.converters.key_table import KeyTable

TABLE: KeyTable = OFFICIAL[0].table
SIDES = dict(atto=160, n=160, s=96)
PUBLISHED = dict(
    atto=508_985, femto=983_945, pico=1_539_539, n=3_600_421, s=9_779_838, m=18_357_750, l=32_551_214, x=51_211_736
)
"""Parameters of the original's models, each built in a process of its own."""
UNTRAINED = 2
"""The original's settings `up` and `reg_scale` are parameters."""
MASKED = 12 * 384 + 384
"""Parameters of its L and X that are always zero or not used: the keys' biases, and a token for masking."""


def weights_of(official):
    """Replace all floats of an official state dict by drawn numbers; a shared head has those of its first key."""
    shared = not any("gateway" in key for key in official)
    canonical = {k: re.sub(r"dec_bbox_head\.\d\.", "dec_bbox_head.0.", k) if shared else k for k in official}
    kept = {key for key in official if key.endswith(("anchors", "valid_mask", "periods", "bias_mask"))}
    values = weights({canonical[key]: value for key, value in official.items() if key not in kept})
    return {key: official[key] if key in kept else values[canonical[key]] for key in official}


@pytest.mark.parametrize("size", SIDES)
def test_outputs_and_gradients_equal_the_originals(size):
    with np.load(Path(__file__).parents[1] / "golden" / f"deimv2_{size}.npz") as file:
        names = str(file["grad_names"]).split("\n")
        golden = {k: torch.from_numpy(file[k]).double() for k in file.files if not k.startswith("grad")}
        golden |= {f"grad/{name}": value for name, value in zip(names, torch.from_numpy(file["grads"]).double())}
    model = deimv2(size, num_classes=5, num_queries=30, training_queries=[])
    model.load_state_dict(TABLE.read(weights_of(TABLE.write(model.state_dict(), model)), model))
    model.double().train()
    outputs = model(drawn("images", (2, 3, SIDES[size], SIDES[size])))
    initial, *layers = [*outputs["aux_outputs"], outputs]
    named = {f"pre/{name}": initial[name] for name in ("pred_logits", "pred_boxes")}
    for number, layer in enumerate(layers):
        named |= {f"layer{number}/{name}": layer[name] for name in ("pred_logits", "pred_boxes", "pred_corners")}
    (encoder,) = outputs["training_outputs"]
    named |= {f"enc/{name}": encoder[name] for name in ("pred_logits", "pred_boxes")}
    assert {name for name in golden if not name.startswith("grad/")} == named.keys()
    assert_close(named, golden, 2e-5)

    parameters = dict(model.named_parameters())
    gradients = dict(zip(parameters, torch.autograd.grad(weighted_sum(named), list(parameters.values()))))
    buffers = {key: value for key, value in model.state_dict().items() if key not in parameters}
    written = TABLE.write(buffers | gradients, model)
    assert len(names) == len(gradients)
    assert_close(projections({key: written[key] for key in names}), golden, 2e-4)


@pytest.mark.parametrize("size", SIZES)
def test_sizes_have_the_originals_parameters(size):
    with torch.device("meta"):
        model = build_model(deimv2_model(size) | dict(num_classes=80))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == PUBLISHED[size] - UNTRAINED - (MASKED if size in ("l", "x") else 0)
    assert f"; {count:,} parameters" in VARIANTS[f"deimv2_{size}_coco"][1]
