"""MViTv2-T with the golden weights against the official implementation; the tolerances are in the JSON."""

import pytest
import torch
from golden.weights import compare, grad_projection, load_case
from helpers.undrawn_models import undrawn
from torch import nn

from vitkit.registry import BACKBONES
from vitkit.weights import load_weights


@pytest.fixture(scope="module")
def case():
    return load_case("mvitv2_tiny")


@pytest.fixture(scope="module")
def model(case):
    with undrawn():
        model = BACKBONES.build("mvitv2_tiny", num_classes=1000).eval()
    load_weights(model, case.torch_state_dict())
    return model


def test_intermediate_and_final_outputs_equal_the_originals(case, model):
    found = {}
    handles = [
        model.patch_embed.register_forward_hook(lambda _, __, output: found.update(patch_embed=output[0])),
        model.norm.register_forward_hook(lambda _, __, output: found.update(norm=output)),
    ]
    for i, block in enumerate(model.blocks):
        handles.append(block.register_forward_hook(lambda _, __, output, i=i: found.update({f"block{i}": output[0]})))
    with torch.no_grad():
        found["logits"] = model(case.torch_inputs()["images"])
    found["probabilities"] = found["logits"].softmax(-1)
    for handle in handles:
        handle.remove()
    assert found.keys() == case.expected.keys()
    report = compare(case, {name: value.numpy() for name, value in found.items()})
    assert all(line["ok"] for line in report.values()), report


def test_weights_with_a_prefix_and_single_frame_kernels_load(case, model):
    state = {
        # SlowFast's image checkpoints hold kernels of clips with one frame.
        f"backbone.{key}": value[:, :, None] if value.ndim == 4 else value
        for key, value in case.torch_state_dict().items()
    }
    holder = nn.Module()
    with undrawn():
        holder.backbone = BACKBONES.build("mvitv2_tiny", num_classes=1000)
    load_weights(holder, state)
    loaded = holder.backbone.state_dict()
    assert all(torch.equal(value.cpu(), loaded[name].cpu()) for name, value in model.state_dict().items())


def test_loss_and_gradients_equal_the_originals(case, model):
    labels = torch.cat([torch.from_numpy(target["labels"]).reshape(-1) for target in case.targets["labels"]])
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(case.torch_inputs()["images"]), labels)
    assert loss.item() == pytest.approx(case.losses["labels"]["total"], rel=1e-5)
    loss.backward()
    parameters = dict(model.named_parameters())
    assert parameters.keys() == case.grads["labels"].keys()
    for name, (norm, dot) in case.grads["labels"].items():
        found_norm, found_dot = grad_projection(name, parameters[name].grad.numpy())
        assert found_norm == pytest.approx(norm, rel=1e-3, abs=1e-6), name
        assert found_dot == pytest.approx(dot, rel=1e-3, abs=1e-3 * norm + 1e-6), name
