"""D-FINE-seg with the golden weights against what its own package computed."""

import pytest
import torch
from golden.weights import compare, grad_projection, load_case

from vitkit import build_model
from vitkit.configs.dfine_seg import dfine_seg_criterion, dfine_seg_model
from vitkit.model_zoo.converters import convert_official
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD
from vitkit.ops.masks import mask_logits
from vitkit.registry import CRITERIA

SIZE = (128, 160)
NAMES = dict(vfl="labels", bbox="l1", giou="giou", fgl="fgl", ddf="ddf", mask_bce="mask", mask_dice="dice")
LAYERS = {"": "", "_pre": "aux0_", "_aux_0": "aux1_", "_aux_1": "aux2_", "_enc_0": "enc_"}


@pytest.fixture(scope="module")
def case():
    return load_case("dfine_seg_n")


@pytest.fixture
def model(case):
    spec = dfine_seg_model("n")
    backbone = spec["backbone"] | dict(pretrained=False, pixel_mean=IMAGENET_MEAN, pixel_std=IMAGENET_STD)
    model = build_model(spec | dict(backbone=backbone, training_queries=[], num_classes=7, num_queries=40))
    state, form = convert_official(case.torch_state_dict(), model)
    assert form.name == "Peterande/D-FINE"
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
    masks = mask_logits(outputs["mask_embed"], outputs["mask_features"]).sigmoid()
    found = dict(pred_logits=outputs["pred_logits"], pred_boxes=outputs["pred_boxes"], pred_masks=masks)
    report = compare(case, {name: value.numpy() for name, value in found.items()})
    assert all(line["ok"] for line in report.values()), report


def test_terms_and_gradients_equal_the_original(case, model):
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    targets = [
        dict(
            labels=torch.from_numpy(target["labels"]),
            boxes_cxcywh=torch.from_numpy(target["boxes"]),
            masks=torch.from_numpy(target["masks"]),
            image_size=SIZE,
        )
        for target in case.targets["train"]
    ]
    losses = CRITERIA.build(dfine_seg_criterion())(model(images_of(case)), targets)
    expected = {}
    for name, value in case.losses["train"]["terms"].items():
        term = next(term for term in sorted(NAMES, key=len, reverse=True) if name.startswith(f"loss_{term}"))
        expected[LAYERS[name.removeprefix(f"loss_{term}")] + NAMES[term]] = value
    assert losses.keys() == expected.keys()
    assert {name: loss.item() for name, loss in losses.items()} == pytest.approx(expected, rel=2e-4)
    sum(losses.values()).backward()
    ours = {
        "decoder.mask_head.layers.0.weight": "head.mask_head.embed.layers.0.weight",
        "decoder.mask_decoder.lateral.0.weight": "head.mask_head.pyramid.lateral.0.0.weight",
        "decoder.mask_decoder.up_conv.weight": "head.mask_head.pyramid.output.0.weight",
        "decoder.mask_decoder.bn.2.bias": "head.mask_head.pyramid.lateral.2.1.bias",
        "backbone.stages.1.blocks.0.layers.0.conv.weight": "backbone.net.stages_1.blocks.0.layers.0.conv.weight",
    }
    assert ours.keys() == case.grads["train"].keys()
    for name, (norm, dot) in case.grads["train"].items():
        found_norm, found_dot = grad_projection(name, model.get_parameter(ours[name]).grad.numpy())
        assert found_norm == pytest.approx(norm, rel=2e-3) and found_dot == pytest.approx(
            dot, rel=2e-3, abs=1e-3 * norm
        )


def test_weights_are_written_with_the_names_of_the_original(case, model):
    from vitkit.model_zoo.converters.dfine import OFFICIAL

    written = OFFICIAL[0].table.write(dict(model.state_dict()), model)
    given = case.torch_state_dict()
    computed = ("anchors", "valid_mask", "num_points_scale", "project")  # by the original, for its size of images
    names = [name for name in given if name.split(".")[-1] not in computed]
    different = [name for name in names if not torch.equal(written[name].float(), given[name].float())]
    assert not different and len(names) > 400
