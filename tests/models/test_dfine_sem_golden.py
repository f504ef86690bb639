"""D-FINE-seg's semantic form with the golden weights against what its own package computed."""

import pytest
import torch
import torch.nn.functional as F
from golden.weights import compare, grad_projection, load_case

from vitkit import build_model
from vitkit.configs.dfine_sem import config, dfine_sem_model
from vitkit.model_zoo.converters import convert_official, write_names
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD
from vitkit.registry import CRITERIA
from vitkit.weights.loading import load_weights

NAMES = dict(loss_ce="semantic", loss_dice="dice", loss_aux="aux0_semantic")
GRADS = {
    "decoder.mask_decoder.lateral.0.weight": "head.mask_head.pyramid.lateral.0.0.weight",
    "decoder.mask_decoder.up_conv.weight": "head.mask_head.pyramid.output.0.weight",
    "decoder.neck.0.0.weight": "head.convs.0.0.weight",
    "decoder.neck.1.1.bias": "head.convs.1.1.bias",
    "decoder.classifier.weight": "head.predictor.weight",
    "decoder.aux_head.0.0.weight": "head.aux_conv.0.weight",
    "decoder.aux_head.2.bias": "head.aux_predictor.bias",
    "encoder.pan_blocks.0.cv1.conv.weight": "neck.pan_blocks.0.cv1.0.weight",
    "backbone.stages.1.blocks.0.layers.0.conv.weight": "backbone.net.stages_1.blocks.0.layers.0.conv.weight",
}


@pytest.fixture(scope="module")
def case():
    return load_case("dfine_sem_n")


@pytest.fixture
def model(case):
    spec = dfine_sem_model("n")
    backbone = spec["backbone"] | dict(pretrained=False, pixel_mean=IMAGENET_MEAN, pixel_std=IMAGENET_STD)
    model = build_model(spec | dict(backbone=backbone, num_classes=7))
    state, form = convert_official(case.torch_state_dict(), model)
    assert form.name == "ArgoHA/D-FINE-seg, semantic" and form.classes is None
    model.load_state_dict(state)
    return model


def images_of(case):
    """Return the images as the model reads float ones, normalized by ImageNet's statistics."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (case.torch_inputs()["images"] / 255 - mean) / std


def test_outputs_equal_the_original(case, model):
    model.eval()
    with torch.no_grad():
        outputs = model(images_of(case))
    assert outputs["pred_semantic"].shape == (2, 7, 32, 40) and outputs["input_size"] == (128, 160)
    logits = F.interpolate(outputs["pred_semantic"], scale_factor=4, mode="bilinear")
    report = compare(case, dict(logits=logits.numpy()))
    assert all(line["ok"] for line in report.values()), report
    for semantic, wanted in zip(model.postprocess(outputs, [(128, 160)] * 2), logits.argmax(1), strict=True):
        assert torch.equal(semantic["semantic"], wanted)


def test_terms_and_gradients_equal_the_original(case, model):
    model.train()
    for module in model.modules():
        if isinstance(module, (torch.nn.BatchNorm2d, torch.nn.Dropout2d)):
            module.eval()
    targets = []
    for target in case.targets["train"]:
        label_map = torch.from_numpy(target["labels"])
        labels = torch.tensor([label for label in label_map.unique().tolist() if label != 255])
        targets.append(dict(labels=labels, masks=label_map == labels[:, None, None]))
    losses = CRITERIA.build(config("n")["criterion"])(model(images_of(case)), targets)
    expected = {NAMES[name]: value for name, value in case.losses["train"]["terms"].items()}
    assert {name: loss.item() for name, loss in losses.items()} == pytest.approx(expected, rel=1e-4)
    sum(losses.values()).backward()
    assert GRADS.keys() == case.grads["train"].keys()
    for name, (norm, dot) in case.grads["train"].items():
        found_norm, found_dot = grad_projection(name, model.get_parameter(GRADS[name]).grad.numpy())
        assert found_norm == pytest.approx(norm, rel=1e-3)
        assert found_dot == pytest.approx(dot, rel=1e-3, abs=1e-3 * norm)


def test_training_starts_from_the_published_names_of_instances(model):
    instances = load_case("dfine_seg_n").torch_state_dict()
    report = load_weights(model, instances, new_class_head=True, partial=True)
    assert report.converter == "Peterande/D-FINE"
    assert {name.split(".")[1] for name in model.state_dict().keys() - set(report.loaded) if name[:5] == "head."} == {
        "convs",
        "predictor",
        "aux_conv",
        "aux_predictor",
    }
    pairs = {
        "mask_head.pyramid.lateral.0.0": "mask_decoder.lateral.0",
        "mask_head.pyramid.output.1": "mask_decoder.bn1",
    }
    for ours, theirs in pairs.items():
        assert torch.equal(model.state_dict()[f"head.{ours}.weight"], instances[f"decoder.{theirs}.weight"])


def test_weights_are_written_with_the_names_of_the_original(case, model):
    written, given = write_names(model, "official").state, case.torch_state_dict()
    assert written.keys() == given.keys() and len(given) > 400
    different = [name for name in given if not torch.equal(written[name].float(), given[name].float())]
    assert not different
