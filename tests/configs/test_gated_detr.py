"""The example of a published head with one layer replaced."""

import pytest
import torch

import vitkit
from vitkit import build_model
from vitkit.config import load_config
from vitkit.registry import CRITERIA
from vitkit.weights import load_weights

GATED = "examples/gated_detr/quickstart"


def build(name):
    torch.manual_seed(0)
    return build_model(load_config(name)["model"], classes=["circle", "square"])


@pytest.fixture(scope="module")
def models():
    """The quickstart's model and the gated one, with the same weights but for the gates."""
    plain, gated = build("quickstart/detr").eval(), build(GATED).eval()
    state = {name: value + 0.01 for name, value in plain.state_dict().items() if value.is_floating_point()}
    report = load_weights(gated, state, strict=False)
    load_weights(plain, state, strict=False)
    assert report.missing and all(".cross_attn.gate." in name for name in report.missing)
    return plain, gated


def test_gates_start_open_so_that_the_outputs_are_the_published_heads(models):
    images = torch.randn(2, 3, 64, 64)
    plain, gated = (model(images)["pred_boxes"] for model in models)
    torch.testing.assert_close(gated, plain)


def test_a_closed_gate_hides_the_image(models):
    gated = models[1]
    for layer in gated.head.decoder.layers:
        torch.nn.init.constant_(layer.cross_attn.gate.bias, -100)
    first, second = (gated(torch.randn(1, 3, 64, 64))["pred_boxes"] for _ in range(2))
    biases = [layer.cross_attn.gate.bias for layer in gated.head.decoder.layers]
    torch.testing.assert_close(first, second)
    for bias in biases:
        torch.nn.init.zeros_(bias)
    first, second = (gated(torch.randn(1, 3, 64, 64))["pred_boxes"] for _ in range(2))
    assert not torch.allclose(first, second)


def test_gates_get_gradients(models):
    model, config = models[1].train(), load_config(GATED)
    targets = [dict(labels=torch.tensor([1]), boxes_cxcywh=torch.tensor([[0.4, 0.5, 0.3, 0.2]]), image_id=0)]
    losses = CRITERIA.build(config["criterion"])(model(torch.randn(1, 3, 64, 64)), targets)
    sum(losses.values()).backward()
    for layer in model.head.decoder.layers:
        assert layer.cross_attn.gate.weight.grad.abs().sum() > 0


def test_it_trains_and_is_loaded_again(tmp_path):
    tiny = {"data.train.num_images": 4, "data.val.num_images": 2, "data.images_per_gpu": 2, "train.epochs": 1}
    vitkit.train(GATED, run_dir=tmp_path / "run", device="cpu", **tiny)
    assert any("gate" in name for name in vitkit.load(tmp_path / "run").model.state_dict())
