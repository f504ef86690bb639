"""TimeSformer with the golden weights against what the original computed; the tolerances are in the JSON."""

import pytest
import torch
import torch.nn.functional as F
from golden.weights import compare, grad_projection, load_case
from helpers.undrawn_models import undrawn

from vitkit.registry import BACKBONES
from vitkit.weights import load_weights


@pytest.fixture(scope="module", params=["joint", "space"])
def case(request):
    return load_case(f"timesformer_{request.param}")


@pytest.fixture(scope="module")
def model(case):
    with undrawn():
        model = BACKBONES.build(case.name, image_size=112, num_frames=8, num_classes=400).eval()
    report = load_weights(model, case.torch_state_dict())
    assert not report.missing and not report.unexpected
    assert report.converter == "facebookresearch/TimeSformer"
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
    logits = model(case.torch_inputs()["clip"])
    for handle in handles:
        handle.remove()
    return logits, inner


def assert_golden(case, outputs):
    report = compare(case, {name: value.detach().numpy() for name, value in outputs.items()})
    assert report.keys() >= outputs.keys()
    assert all(line["ok"] for line in report.values()), report


def test_parameters_equal_the_originals(case, model):
    assert sum(p.numel() for p in model.parameters()) == case.meta["num_params"]
    assert [f"model.{key}" for key in model.state_dict()] == list(case.state_dict)


def test_logits_equal_the_originals(case, run):
    assert_golden(case, {"logits": run[0]})


def test_position_tables_are_resampled_for_a_smaller_clip(case, model):
    with torch.no_grad():
        assert_golden(case, {"small/logits": model(case.torch_inputs()["small"])})


def test_intermediate_outputs_equal_the_originals(case, model, run):
    inner = dict(run[1])
    inner["patch_embed"] = inner["patch_embed"].flatten(2).transpose(1, 2)
    last = inner["block11"]
    if model.attention == "space":
        last = last.unflatten(0, (2, 8)).mean(dim=1)
    assert len(inner) == 13
    assert_golden(case, inner | {"norm": model.norm(last)})


def test_dense_map_consists_of_the_normalized_patch_tokens(case, run):
    with undrawn():
        dense = BACKBONES.build(case.name, image_size=112, num_frames=8).eval()
    load_weights(dense, case.torch_state_dict(), strict=False)
    with torch.no_grad():
        features = dense(case.torch_inputs()["clip"])
        expected = dense.norm(run[1]["block11"])[:, 1:]
    assert list(features) == ["res4"] and features["res4"].shape == (2, 768, 8, 7, 7)
    for b, t, y, x in ((0, 0, 0, 0), (1, 7, 2, 6), (1, 3, 6, 1)):
        place = 7 * y + x
        token = expected[8 * b + t, place] if len(expected) == 16 else expected[b, 8 * place + t]
        torch.testing.assert_close(features["res4"][b, :, t, y, x], token, atol=1e-5, rtol=1e-5)


def test_loss_and_gradients_equal_the_originals(case, model, run):
    loss = F.cross_entropy(run[0], torch.cat([torch.as_tensor(t["labels"]) for t in case.targets["labels"]]))
    assert loss.item() == pytest.approx(case.losses["labels"]["total"], rel=1e-4)
    loss.backward()
    for name, parameter in model.named_parameters():
        norm, dot = case.grads["labels"][f"model.{name}"]
        got = grad_projection(f"model.{name}", parameter.grad.numpy())
        assert got == pytest.approx((norm, dot), abs=1e-3 * norm), name
