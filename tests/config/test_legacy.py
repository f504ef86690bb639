"""Configs that earlier versions saved beside their runs."""

import json

from vitkit import load_config
from vitkit.config.legacy import upgrade
from vitkit.configs.quickstart.detr import config as quickstart


def test_a_saved_config_of_an_earlier_version_is_valid_and_means_the_same(tmp_path):
    old = quickstart()
    old["optimizer"] = dict(
        type="AdamW", lr=1e-3, decay_norms_and_biases=False, decay_norms_and_embeddings=False, no_decay=["query_embed"]
    )
    old["schedule"] = dict(type="StepLR", drop_at_epoch=3, gamma=0.5)
    (tmp_path / "config.json").write_text(json.dumps(old))
    cfg = load_config(tmp_path / "config.json", ["schedule.drop_at_epochs=[4]"])
    assert cfg["optimizer"] == dict(
        type="AdamW", lr=1e-3, no_weight_decay=["vectors", "norms", "embeddings", "query_embed"]
    )
    assert cfg["schedule"] == dict(type="MultiStepLR", drop_at_epochs=[4], gamma=0.5)


def test_weight_decay_on_all_parameters_needs_no_list():
    old = {"optimizer": dict(type="SGD", lr=1.0, decay_norms_and_biases=True), "schedule": "CosineLR"}
    upgrade(old)
    assert old == {"optimizer": dict(type="SGD", lr=1.0), "schedule": "CosineLR"}


def test_up_to_date_config_is_unchanged():
    cfg = json.loads(json.dumps(quickstart()))
    before = json.loads(json.dumps(cfg))
    upgrade(cfg)
    assert cfg == before
