"""ViT-B/16 with the golden weights against what the original computed; the tolerances are in the JSON."""

import pytest
import torch
import torch.nn.functional as F
from golden.weights import compare, grad_projection, load_case
from helpers.undrawn_models import undrawn

from vitkit.registry import BACKBONES
from vitkit.weights import load_weights


@pytest.fixture(scope="module")
def case():
    return load_case("vit_base_patch16_224")


@pytest.fixture(scope="module")
def model(case):
    with undrawn():
        model = BACKBONES.build("vit_base_patch16", num_classes=1000).eval()
    report = load_weights(model, case.torch_state_dict())
    assert not report.missing and not report.unexpected
    return model


@pytest.fixture(scope="module")
def run(case, model):
    """Return the logits and the outputs of inner modules."""
    inner = {}
    parts = {"patch_embed": model.patch_embed, **{f"block{i}": block for i, block in enumerate(model.blocks)}}
    handles = [
        part.register_forward_hook(lambda _, __, output, name=name: inner.update({name: output.detach().clone()}))
        for name, part in parts.items()
    ]
    logits = model(case.torch_inputs()["images"])
    for handle in handles:
        handle.remove()
    return logits, inner


def assert_golden(case, outputs):
    report = compare(case, {name: value.detach().numpy() for name, value in outputs.items()})
    assert all(line["ok"] for line in report.values()), report


def test_parameters_equal_the_originals(case, model):
    assert sum(p.numel() for p in model.parameters()) == case.meta["num_params"] == 86_567_656
    assert list(model.state_dict()) == list(case.state_dict)


def test_logits_equal_the_originals(case, run):
    assert_golden(case, {"logits": run[0]})


def test_intermediate_outputs_equal_the_originals(case, model, run):
    inner = dict(run[1])
    inner["patch_embed"] = inner["patch_embed"].flatten(2).transpose(1, 2)
    assert len(inner) == 13
    assert_golden(case, inner | {"norm": model.norm(inner["block11"])})


def test_dense_map_consists_of_the_normalized_patch_tokens(case, run):
    with undrawn():
        dense = BACKBONES.build("vit_base_patch16").eval()
    assert load_weights(dense, case.torch_state_dict()).left_out == ["head.weight", "head.bias"]
    with torch.no_grad():
        features = dense(case.torch_inputs()["images"])
        expected = dense.norm(run[1]["block11"])[:, 1:]
    assert list(features) == ["res4"] and features["res4"].shape == (2, 768, 14, 14)
    torch.testing.assert_close(features["res4"].flatten(2).transpose(1, 2), expected, atol=1e-5, rtol=1e-5)


def test_loss_and_gradients_equal_the_originals(case, model, run):
    loss = F.cross_entropy(run[0], torch.from_numpy(case.targets["labels"][0]["labels"]))
    assert loss.item() == pytest.approx(case.losses["labels"]["total"], rel=1e-4)
    loss.backward()
    for name, parameter in model.named_parameters():
        norm, dot = case.grads["labels"][name]
        got = grad_projection(name, parameter.grad.numpy())
        assert got == pytest.approx((norm, dot), abs=1e-3 * norm), name
