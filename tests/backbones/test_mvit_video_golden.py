"""MViTv2-S on clips with the golden weights against what the official code computed; the tolerances are in the JSON."""

import pytest
import torch
import torch.nn.functional as F
from golden.weights import compare, grad_projection, load_case
from helpers.undrawn_models import undrawn

from vitkit.registry import BACKBONES
from vitkit.weights import load_weights


@pytest.fixture(scope="module")
def case():
    return load_case("mvitv2_small_video")


@pytest.fixture(scope="module")
def model(case):
    with undrawn():
        model = BACKBONES.build("mvitv2_s_16x4", num_classes=400, image_size=128, num_frames=8).eval()
    report = load_weights(model, case.torch_state_dict())
    assert not report.missing and not report.unexpected
    return model


@pytest.fixture(scope="module")
def outputs(case, model):
    found = {}
    handles = [
        model.patch_embed.register_forward_hook(lambda _, __, output: found.update(patch_embed=output[0])),
        model.norm.register_forward_hook(lambda _, __, output: found.update(norm=output)),
    ]
    for i, block in enumerate(model.blocks):
        handles.append(block.register_forward_hook(lambda _, __, output, i=i: found.update({f"block{i}": output[0]})))
    found["logits"] = model(case.torch_inputs()["clip"])
    found["probabilities"] = found["logits"].softmax(-1)
    for handle in handles:
        handle.remove()
    return found


def test_intermediate_and_final_outputs_equal_the_originals(case, outputs):
    assert outputs.keys() == case.expected.keys()
    report = compare(case, {name: value.detach().numpy() for name, value in outputs.items()})
    assert all(line["ok"] for line in report.values()), report


def test_loss_and_gradients_equal_the_originals(case, model, outputs):
    loss = F.cross_entropy(outputs["logits"], torch.cat([torch.as_tensor(t["labels"]) for t in case.targets["labels"]]))
    assert loss.item() == pytest.approx(case.losses["labels"]["total"], rel=1e-4)
    loss.backward()
    for name, parameter in model.named_parameters():
        norm, dot = case.grads["labels"][name]
        got = grad_projection(name, parameter.grad.numpy())
        assert got == pytest.approx((norm, dot), abs=1e-3 * norm + 1e-6), name
