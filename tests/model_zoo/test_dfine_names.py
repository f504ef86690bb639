"""D-FINE's original files: wrappers, classes of Objects365, and files of other models."""

import pytest
import torch
from helpers.realtime_models import dfine

from vitkit.backbones.timm_adapter import TimmBackbone
from vitkit.configs.rtdetr import config as rtdetr
from vitkit.engine.build import build_model
from vitkit.errors import CheckpointError, ConfigError
from vitkit.io.coco_classes import COCO_CLASSES
from vitkit.model_zoo.converters import write_names
from vitkit.model_zoo.converters.objects365_classes import COCO_ROWS, OBJECTS365_CLASSES
from vitkit.registry import BACKBONES
from vitkit.weights import load_pretrained, load_weights


def official(num_classes):
    """Return a model with random weights, and these under the original's names."""
    torch.manual_seed(0)
    model = dfine("n", num_classes=num_classes)
    return model, write_names(model, "official").state


@pytest.mark.parametrize("wrapped", [
    lambda state: state,
    lambda state: {"model": state, "date": "today"},
    lambda state: {"model": {}, "ema": {"module": state, "updates": 3, "warmups": 1000}, "last_epoch": 7},
], ids=["state", "model", "moving average"])  # fmt: skip
def test_original_files_are_read(wrapped):
    trained, state = official(80)
    model = dfine("n")
    report = load_weights(model, wrapped(state), classes=COCO_CLASSES)
    assert report.converter == "Peterande/D-FINE"
    expected = trained.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def test_half_precision_and_numbers_stored_as_integers_are_read():
    trained, state = official(80)
    stored = {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
    stored |= {key: value.long() for key, value in state.items() if key.endswith("reg_scale")}  # as the original does
    model = dfine("n")
    load_weights(model, stored, classes=COCO_CLASSES)
    torch.testing.assert_close(model.state_dict(), trained.state_dict(), atol=1e-2, rtol=1e-3)


def test_files_converted_for_deployment_are_refused():
    _, state = official(80)
    dropped = ("decoder.decoder.lqe_layers.0.", "decoder.decoder.lqe_layers.1.", "encoder.lateral_convs.0.norm.")
    state = {key: value for key, value in state.items() if not key.startswith(dropped)}
    state["encoder.lateral_convs.0.conv_bn_fused.weight"] = state.pop("encoder.lateral_convs.0.conv.weight")
    with pytest.raises(CheckpointError, match=r"the original's after convert_to_deploy\(\), with batch norms folded"):
        load_weights(dfine("n"), state, classes=COCO_CLASSES)


def test_rows_of_cocos_classes_are_those_of_the_same_names():
    names = [OBJECTS365_CLASSES[row - 1] for row in COCO_ROWS]
    assert len(set(COCO_ROWS)) == 80
    by_name = dict(zip(COCO_CLASSES, names))
    assert by_name["person"] == "Person" and by_name["traffic light"] == "Traffic Light"
    assert by_name["tv"] == "Moniter/TV" and by_name["teddy bear"] == "Stuffed Toy"
    same = [name for name, other in by_name.items() if name.lower() == other.lower()]
    assert len(same) == 69


def test_classes_of_objects365_become_cocos():
    trained, state = official(366)
    model = dfine("n")
    load_weights(model, state, classes=COCO_CLASSES)
    row = 1 + OBJECTS365_CLASSES.index("Hair Dryer")
    label = COCO_CLASSES.index("hair drier")
    for name in (
        "head.class_embed.2.weight",
        "head.proposals.class_embed.bias",
        "training_queries.denoising.label_embed.weight",
    ):
        assert torch.equal(model.state_dict()[name][label], trained.state_dict()[name][row])
    padding = "training_queries.denoising.label_embed.weight"
    assert torch.equal(model.state_dict()[padding][80], trained.state_dict()[padding][366])
    # As many classes as the file has need no change.
    load_weights(dfine("n", num_classes=366), state)


def test_own_classes_start_from_those_of_objects365_by_name():
    trained, state = official(366)
    model = dfine("n", num_classes=3)
    with pytest.raises(CheckpointError, match=r"not trained on 2 classes of the model, flame, smoke"):
        load_weights(model, state, classes=["flame", "street_lights", "smoke"])
    key = "head.class_embed.0.weight"
    fresh = model.state_dict()[key].clone()
    report = load_weights(model, state, classes=["flame", "street_lights", "smoke"], new_class_head=True)
    assert not report.reinitialized and report.class_rows.new == ["flame", "smoke"]
    row = OBJECTS365_CLASSES.index("Street Lights") + 1
    assert torch.equal(model.state_dict()[key][1], trained.state_dict()[key][row])
    assert torch.equal(model.state_dict()[key][[0, 2]], fresh[[0, 2]])
    assert torch.equal(
        model.state_dict()["neck.input_proj.0.0.weight"], trained.state_dict()["neck.input_proj.0.0.weight"]
    )


def test_files_of_another_real_time_detector_name_what_differs():
    _, state = official(80)
    detector = build_model(rtdetr(18)["model"] | dict(num_classes=80))
    with pytest.raises(CheckpointError, match=r"Peterande/D-FINE with 80 classes") as error:
        load_weights(detector, state)
    assert "RTDETR" in str(error.value)
    state = write_names(detector, "official").state
    with pytest.raises(CheckpointError, match=r"lyuwenyu/RT-DETR with 80 classes") as error:
        load_weights(dfine("s"), state)
    assert "DFINE" in str(error.value)


def test_a_detector_is_not_taken_for_a_backbone():
    _, state = official(80)
    with pytest.raises(CheckpointError, match=r"does not fit ResNetVD(.|\n)*seems to be Peterande/D-FINE with 80"):
        load_weights(BACKBONES.build(dict(type="ResNetVD", depth=18)), state)


def test_backbones_of_the_original_are_read(tmp_path):
    trained, state = official(3)
    backbone = {key.removeprefix("backbone."): value for key, value in state.items() if key.startswith("backbone.")}
    torch.save(backbone, tmp_path / "PPHGNetV2_B0_stage1.pth")
    settings = dict(out_features=["res4", "res5"], pretrained=str(tmp_path / "PPHGNetV2_B0_stage1.pth"))
    for norm in (None, "frozen_bn"):
        loaded = TimmBackbone("hgnetv2_b0", norm=norm, frozen_stem=True, **settings)
        load_pretrained(loaded)
        expected = trained.backbone.state_dict()
        assert all(torch.equal(value, expected[key]) for key, value in loaded.state_dict().items())
        assert not any(value.requires_grad for value in loaded.net.stem.parameters())
        assert not loaded.train().net.stem.stem1.conv.training and loaded.net.stages_3.training


def test_unknown_norm_is_named():
    with pytest.raises(ConfigError, match="norm='bn': expected 'frozen_bn', or None for the norms of timm's"):
        TimmBackbone("hgnetv2_b0", norm="bn")
