"""D-FINE-S against outputs and gradients of the original code, in training mode, with weights and images by a rule.

`golden/dfine_s.npz` was recorded from d-fine-project 1.0.0, whose network is that of the original's repository, with
the weights and inputs of `drawn`: 5 classes, 30 queries, no denoising, two images of 160x160 pixels, in float64. The
gradients are those of the sum of all outputs, each weighted by `drawn` numbers, stored as their products with such.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.drawn_weights import assert_close, drawn, projections, weighted_sum, weights
from helpers.realtime_models import dfine

from vitkit.model_zoo.converters.dfine import OFFICIAL

SIZE, NUM_CLASSES, NUM_QUERIES = 160, 5, 30


@pytest.fixture(scope="module")
def golden():
    with np.load(Path(__file__).parents[1] / "golden" / "dfine_s.npz") as file:
        return {name: torch.from_numpy(file[name]).double() for name in file.files}


def test_outputs_and_gradients_equal_the_originals(golden):
    model = dfine("s", num_classes=NUM_CLASSES, num_queries=NUM_QUERIES, training_queries=[])
    official = OFFICIAL[0].table.write(model.state_dict(), model)
    official = {key: value for key, value in official.items() if not key.endswith(("anchors", "valid_mask"))}
    model.load_state_dict(OFFICIAL[0].table.read(weights(official), model))
    model.double().train()
    outputs = model(drawn("images", (2, 3, SIZE, SIZE)))
    initial, *layers = [*outputs["aux_outputs"], outputs]
    named = {f"pre/{name}": initial[name] for name in ("pred_logits", "pred_boxes")}
    for number, layer in enumerate(layers):
        fields = ("pred_logits", "pred_boxes", "pred_corners")
        named |= {f"layer{number}/{name}": layer[name] for name in fields}
    (encoder,) = outputs["training_outputs"]
    named |= {f"enc/{name}": encoder[name] for name in ("pred_logits", "pred_boxes")}
    assert {name for name in golden if not name.startswith("grad/")} == named.keys()
    for name, value in named.items():
        torch.testing.assert_close(
            value.double(), golden[name], atol=2e-5, rtol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )

    parameters = dict(model.named_parameters())
    gradients = dict(zip(parameters, torch.autograd.grad(weighted_sum(named), list(parameters.values()))))
    buffers = {key: value for key, value in model.state_dict().items() if key not in parameters}
    written = OFFICIAL[0].table.write(buffers | gradients, model)
    trained = {key: written[key] for key in (name.removeprefix("grad/") for name in golden if name.startswith("grad/"))}
    assert len(trained) == len(gradients)
    assert_close(projections(trained), golden, 2e-4)
