"""Models and criteria built for a run."""

import pytest

from vitkit.config import load_config
from vitkit.engine.build import build_criterion_for
from vitkit.errors import ConfigError
from vitkit.models.deformable_detr import DeformableDETR
from vitkit.models.detr import DETR


@pytest.mark.parametrize(
    ("name", "model_type", "settings", "message"),
    [
        (
            "quickstart/detr",
            DETR,
            {"class_loss": "mal", "no_object_weight": None},
            "criterion.class_loss='mal': DETR predicts classes by a softmax with \"no object\". Expected "
            "'cross_entropy'",
        ),
        (
            "quickstart/dino",
            DeformableDETR,
            {"class_loss": "cross_entropy", "no_object_weight": 0.1},
            "criterion.class_loss='cross_entropy': DeformableDETR predicts classes by a sigmoid per class. Expected "
            "'focal', 'varifocal', 'mal' or 'iou_aware'",
        ),
    ],
)
def test_class_loss_must_be_for_the_models_logits(name, model_type, settings, message):
    config = load_config(name)
    model = model_type.__new__(model_type)
    assert build_criterion_for(config, model).class_loss == config["criterion"].get("class_loss", "cross_entropy")
    config["criterion"].update(settings)
    config["criterion"]["matcher"]["activation"] = "sigmoid" if settings["class_loss"] == "mal" else "softmax"
    with pytest.raises(ConfigError) as error:
        build_criterion_for(config, model)
    assert message in str(error.value)
