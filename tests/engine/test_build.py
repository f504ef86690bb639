"""Models and criteria built for a run."""

import json

import pytest

from vitkit.config import load_config
from vitkit.data.loading.settings import DataSettings
from vitkit.engine.build import build_criterion_for, build_datasets, share_vocabularies
from vitkit.errors import ConfigError
from vitkit.models.deformable_detr import DeformableDETR
from vitkit.models.detr import DETR
from vitkit.weights.locate import find_weights
from vitkit.weights.transformers_folder import read_tokens_in


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


def test_a_run_that_starts_from_a_folder_of_the_library_has_its_tokens(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs pip install 'vitkit[text]'")
    pieces = tokenizers.ByteLevelBPETokenizer()
    pieces.train_from_iterator(["one, two", "two, three"], vocab_size=270, special_tokens=["<|endoftext|>"])
    pieces.save(str(tmp_path / "tokenizer.json"))
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "bos_token_id": 0, "eos_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = load_config("quickstart/causal_language_model")["data"]
    train_set, val_set = build_datasets(DataSettings(**data))
    vocabularies = share_vocabularies(train_set, val_set, find_weights(tmp_path), "CausalLanguageModel")
    assert vocabularies["target"] == read_tokens_in(tmp_path)["target"].vocabulary
