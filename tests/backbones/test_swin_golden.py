"""Swin-T with the golden weights against what the official implementations computed; the tolerances are in the JSON."""

import pytest
import torch
import torch.nn.functional as F
from golden.weights import compare, grad_projection, load_case, normal_for

from vitkit.registry import BACKBONES
from vitkit.weights import load_weights

build = BACKBONES.build


def loaded(name, **options):
    case = load_case(name)
    model = build("Swin", **options).eval()
    report = load_weights(model, case.torch_state_dict())
    assert report.missing == report.unexpected == []
    assert sum(p.numel() for p in model.parameters()) == case.meta["num_params"]
    return case, model


@pytest.fixture(scope="module")
def classifier():
    return loaded("swin_tiny", num_classes=1000)


@pytest.fixture(scope="module")
def backbone():
    return loaded("swin_tiny_backbone")


def assert_golden(case, outputs):
    report = compare(case, {name: value.detach().numpy() for name, value in outputs.items()})
    assert all(line["ok"] for line in report.values()), report


def assert_golden_gradients(case, variant, model):
    """Compare the norm and one projection of each parameter's gradient, relative to the norm."""
    parameters = dict(model.named_parameters())
    assert set(case.grads[variant]) == set(parameters)
    for name, (expected_norm, expected_dot) in case.grads[variant].items():
        norm, dot = grad_projection(name, parameters[name].grad.numpy())
        assert norm == pytest.approx(expected_norm, rel=1e-3), name
        assert dot == pytest.approx(expected_dot, abs=1e-3 * expected_norm), name


def test_classifier_equals_the_original(classifier):
    case, model = classifier
    inner = {}

    def keep(name):
        return lambda _, __, output: inner.update({name: output.flatten(1, 2)})

    parts = {"patch_embed": model.patch_embed, "stage3": model.layers[3].blocks[1], "norm": model.norm}
    for i in range(2):
        parts |= {f"block_{i}_{j}": model.layers[i].blocks[j] for j in range(2)}
    # The original's stage ends with the merging.
    parts |= {f"stage{i}": model.layers[i].downsample for i in range(3)}
    handles = [part.register_forward_hook(keep(name)) for name, part in parts.items()]
    with torch.no_grad():
        logits = model(case.torch_inputs()["images"])
    for handle in handles:
        handle.remove()
    assert_golden(case, {"logits": logits, **inner})


def test_classifiers_gradients_equal_the_originals(classifier):
    case, model = classifier
    model.zero_grad()
    labels = torch.as_tensor(case.targets["labels"][0]["labels"])
    loss = F.cross_entropy(model(case.torch_inputs()["images"]), labels)
    assert loss.item() == pytest.approx(case.losses["labels"]["total"], rel=1e-4)
    loss.backward()
    assert_golden_gradients(case, "labels", model)


@pytest.mark.parametrize("name", ["batch", "odd", "small"])
def test_maps_equal_the_original(backbone, name):
    case, model = backbone
    with torch.no_grad():
        features = model(case.torch_inputs()[name])
    assert_golden(case, {f"{name}/{key}": value for key, value in features.items()})


def test_maps_gradients_equal_the_originals(backbone):
    case, model = backbone
    model.zero_grad()
    features = model(case.torch_inputs()["batch"])
    loss = sum(
        (x * torch.from_numpy(normal_for(f"loss:swin_tiny_backbone:{name}", x.shape))).mean()
        for name, x in features.items()
    )
    assert loss.item() == pytest.approx(case.losses["projection"]["total"], rel=1e-4)
    loss.backward()
    assert_golden_gradients(case, "projection", model)
