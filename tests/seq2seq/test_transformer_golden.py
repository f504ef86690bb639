"""Transformer base with the golden weights against torch.nn.Transformer; the tolerances are in the JSON."""

import copy

import pytest
import torch
from golden.weights import compare, grad_projection, load_case

from vitkit.losses.sequence import SequenceLoss
from vitkit.model_zoo.converters import convert_official
from vitkit.nn.position import sine_positions_1d
from vitkit.registry import MODELS
from vitkit.structures import PAD


@pytest.fixture(scope="module")
def case():
    return load_case("transformer_base")


@pytest.fixture(scope="module")
def model(case):
    spec = dict(type="transformer_base", source_size=1000, target_size=1000, final_norm=True)
    model = MODELS.build(spec).eval()
    state, converter = convert_official(case.torch_state_dict(), model)
    assert converter.name == "torch.nn.Transformer"
    model.load_state_dict(state, strict=True)
    return model


@pytest.fixture(scope="module")
def texts(case):
    inputs = case.torch_inputs()
    return inputs["src_padded"], inputs["tgt_padded"]


def run(model, source, target):
    inner = {}
    parts = {"memory": model.encoder, "decoder": model.decoder.stack}
    handles = [
        part.register_forward_hook(lambda _, __, output, name=name: inner.update({name: output}))
        for name, part in parts.items()
    ]
    outputs = model(source, source == PAD, target)
    for handle in handles:
        handle.remove()
    return outputs | inner


def test_parameter_counts_equal_the_original(model, case):
    assert sum(p.numel() for p in model.parameters()) == case.meta["num_params"]


def test_positions_equal_the_original(case):
    report = compare(case, {"position": sine_positions_1d(64, 512).numpy()})
    assert report["position"]["ok"], report


def test_outputs_equal_the_original_at_every_token(case, model, texts):
    source, target = texts
    with torch.no_grad():
        outputs = run(model, source, target)
    # The original masks the target's padding too, which changes nothing but padding.
    for name, padding in (("memory", source == PAD), ("decoder", target == PAD), ("logits", target == PAD)):
        expected = torch.from_numpy(case.expected[name].values.copy()).view(*padding.shape, -1)
        got = torch.where(padding[..., None], expected, outputs[name].cpu())
        report = compare(case, {name: got.numpy()})
        assert report[name]["ok"], report


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_and_gradients_equal_the_original(case, model, texts, smoothing):
    model = copy.deepcopy(model)
    source, target = texts
    targets = [{"tokens": tokens[1:][tokens[1:] != PAD]} for tokens in target]
    outputs = {"logits": model(source, source == PAD, target)["logits"][:, :-1]}
    loss = SequenceLoss(label_smoothing=smoothing)(outputs, targets)["cross_entropy"]
    assert loss.item() == pytest.approx(case.losses[f"smoothing_{smoothing}"]["total"], rel=1e-5)
    loss.backward()
    official_names, _ = convert_official({name: name for name in case.state_dict}, model)
    expected = case.grads.get(f"smoothing_{smoothing}", {})
    for name, parameter in model.named_parameters():
        original = official_names[name]
        if original not in expected:
            continue
        norm, projection = expected[original]
        got_norm, got_projection = grad_projection(original, parameter.grad.numpy())
        assert got_norm == pytest.approx(norm, rel=1e-3, abs=1e-5), name
        assert got_projection == pytest.approx(projection, abs=3e-3 * norm + 1e-5), name
