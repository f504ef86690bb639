"""The comparison of Grounding DINO with transformers': the same prompts, layers and numbers of parameters."""

import pytest
import torch

pytest.importorskip("vitkit.tools", reason="vitkit is not installed (pip install -e .)")
from vitkit.tools.benchmark import grounding, models
from vitkit.tools.benchmark.models import Case
from vitkit.tools.benchmark.timing import Options


@pytest.mark.parametrize(("num_classes", "num_tokens"), [(80, 195), (3, 8)])
def test_prompts_have_as_many_tokens_as_cocos_names_or_three_words(num_classes, num_tokens):
    tokens, phrase_ids, is_word = grounding.random_prompt(num_classes, 2, torch.device("cpu"))
    assert tokens.shape == (2, num_tokens) and torch.equal(tokens[0], tokens[1])
    assert tokens[0, 0] == grounding.CLS and tokens[0, -1] == grounding.SEP
    assert phrase_ids.max() == num_classes - 1 and (tokens == grounding.DOT).sum() == 2 * num_classes
    assert torch.equal(is_word, (tokens != grounding.DOT) & (phrase_ids >= 0))


@pytest.mark.slow
def test_both_run_and_train_the_same_number_of_parameters():
    pytest.importorskip("transformers")
    case, family = Case(224, 224, training=True), grounding.FAMILIES["3 phrases"]
    torch.manual_seed(0)
    batch = models.random_batch(case, family.num_classes)
    trained = []
    for build in family.builders.values():
        contestant = build(family.num_classes, batch, case)
        assert torch.isfinite(contestant.loss()) and contestant.predict() is not None
        trained.append(sum(p.numel() for p in contestant.model.parameters() if p.requires_grad))
    assert trained[0] == trained[1]


def test_part_measures_both_prompts(monkeypatch):
    monkeypatch.setattr(grounding, "compare_family", lambda family, case, options, what: [what])
    assert grounding.measure("grounding_dino", Options()) == [
        "80 phrases, inference, 800x1066, batch 1",
        "80 phrases, training step, 800x1066, batch 1",
        "3 phrases, inference, 800x1066, batch 1",
        "3 phrases, training step, 800x1066, batch 1",
    ]
