"""What only training has, in files with other projects' names."""

import pytest
import torch
from helpers.grounding_models import grounding_config
from helpers.weights import assert_same_weights
from torch import nn

import vitkit
from vitkit.engine.build import build_model
from vitkit.model_zoo.converters import write_names
from vitkit.text.vocabulary import Vocabulary
from vitkit.weights import load_weights, read_checkpoint


@pytest.mark.parametrize(("mm", "to"), [(False, "official"), (True, "official"), (False, "transformers")])
def test_training_queries_that_weights_lack_are_not_written(tmp_path, mm, to):
    vocabulary = Vocabulary.train("word", ["a cat . a dog ."])
    plain, trained = (grounding_config(mm=mm, training_queries=parts) for parts in ([], [{"type": "TextDenoising"}]))
    state = build_model(plain, vocabularies={"target": vocabulary}).state_dict()
    torch.save({"model": state, "vocabularies": {"target": vocabulary.to_json()}}, tmp_path / "plain.pth")
    vitkit.convert({"model": trained}, tmp_path / "out.pth", weights=tmp_path / "plain.pth", to=to)
    written = read_checkpoint(tmp_path / "out.pth")
    assert not [key for key in written.get("model", written) if "denoising" in key or "dn_query" in key]
    model = build_model(plain, vocabularies={"target": vocabulary})
    load_weights(model, tmp_path / "out.pth")
    assert all(value.equal(state[key]) for key, value in model.state_dict().items())


def test_mm_labels_that_the_model_does_not_use_are_reported(tmp_path):
    theirs = grounding_config(mm=True, training_queries=[dict(type="BoxDenoising")], shared=False)
    written = write_names(build_model(theirs), "official").state
    assert "dn_query_generator.label_embedding.weight" in written
    model = build_model(grounding_config(mm=True, training_queries=[dict(type="TextDenoising")], shared=False))
    before = {key: value.clone() for key, value in model.training_queries.state_dict().items()}
    report = load_weights(model, {"state_dict": written})
    assert report.new_parts == ["training_queries.denoising."] and "training_queries.denoising" in str(report)
    assert all(value.equal(before[key]) for key, value in model.training_queries.state_dict().items())


@pytest.mark.parametrize("batch_norms", [False, True])
def test_teacher_with_batch_norms_is_written_as_ddp_names_it(batch_norms):
    backbone = (
        dict(type="ResNet", depth=18, base_channels=8, norm="bn")
        if batch_norms
        else dict(type="ViT", patch_size=16, d_model=16, depth=1, num_heads=2, image_size=32)
    )
    sizes = dict(num_prototypes=8, hidden_channels=16, bottleneck_channels=8)
    model = build_model(dict(type="SelfDistillation", backbone=backbone, **sizes))
    assert batch_norms == any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    nested = write_names(model, "official").nested()
    assert all(key.startswith("module.") for key in nested["student"])
    assert all(key.startswith("module.") == batch_norms for key in nested["teacher"])
    other = build_model(dict(type="SelfDistillation", backbone=backbone, **sizes))
    load_weights(other, nested)
    assert_same_weights(other, model)
