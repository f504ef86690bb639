"""Prompts that are longer than the model takes at once: read in parts, from one run of the backbone."""

import pytest
import torch
from helpers.grounding_models import build_small

from vitkit.errors import ConfigError, DataError
from vitkit.registry import CRITERIA
from vitkit.text.prompt_tokens import split_prompts
from vitkit.text.prompts import collate_prompts, encode_phrases
from vitkit.text.vocabulary import Vocabulary

PHRASES = ["a red star", "cat", "blue", "a blue cat", "star"]
SIZES = [(96, 128), (48, 64)]


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.train("word", ["a red star .", "a blue cat ."])


@pytest.fixture
def images():
    return torch.randn(2, 3, 96, 128, generator=torch.Generator().manual_seed(0))


def prompts(vocabulary, *phrases):
    return collate_prompts([encode_phrases(vocabulary, each, max_tokens=None) for each in phrases])


def test_parts_are_prompts_of_whole_phrases(vocabulary):
    # Tokens of the phrases, with their dots: 4, 2, 2, 4, 2.
    parts = split_prompts(prompts(vocabulary, PHRASES, PHRASES[3:]), max_tokens=8)
    chosen = [(PHRASES[:2], PHRASES[3:]), (PHRASES[2:4], []), (PHRASES[4:], [])]
    for part, rows in zip(parts, chosen, strict=True):
        for actual, expected in zip(part.prompt, prompts(vocabulary, *rows)):
            assert torch.equal(actual, expected)
    assert [part.first_phrase.tolist() for part in parts] == [[0, 0], [2, 2], [4, 2]]
    assert [len(part.prompt.tokens) for part in split_prompts(prompts(vocabulary, PHRASES), max_tokens=16)] == [1]


def test_the_number_of_phrases_is_limited(vocabulary):
    parts = split_prompts(prompts(vocabulary, PHRASES), max_tokens=256, max_phrases=2)
    assert [part.first_phrase.item() for part in parts] == [0, 2, 4]
    assert [int(part.prompt.phrase_ids.max()) + 1 for part in parts] == [2, 2, 1]


def test_a_single_phrase_may_be_too_long(vocabulary):
    message = "text: phrase 2 has 4 tokens, and the model takes 3 in a phrase. Shorten it"
    with pytest.raises(DataError, match=message):
        split_prompts(prompts(vocabulary, ["cat"], ["cat", "a red star"]), max_tokens=5)


@pytest.mark.parametrize("options", [dict(max_tokens=8), dict(chunk_size=2)], ids=["tokens", "phrases"])
@torch.no_grad()
def test_chunks_equal_prompts_of_their_own(vocabulary, images, options):
    model = build_small(vocabulary, num_detections=15, **options).eval()
    runs = []
    model.backbone.register_forward_hook(lambda *_: runs.append("backbone"))
    model.text_encoder.register_forward_hook(lambda *_: runs.append("text"))
    outputs = model(images, text=[PHRASES, PHRASES[:2]])
    chunks = [PHRASES[:2], PHRASES[2:4], PHRASES[4:]]
    assert runs == ["text", "text", "text", "backbone"]
    first, second = model.postprocess(outputs, SIZES)
    expected = [model.postprocess(model(images, text=[chunk] * 2), SIZES)[0] for chunk in chunks]
    expected[1]["labels"] += 2
    expected[2]["labels"] += 4
    joined = {name: torch.cat([each[name] for each in expected]) for name in first}
    order = joined["scores"].argsort(descending=True, stable=True)
    assert len(order) == 3 * 15
    for name in ("scores", "labels", "boxes_xyxy"):
        torch.testing.assert_close(first[name], joined[name][order], atol=1e-4, rtol=1e-4)
    alone = model.postprocess(model(images, text=[PHRASES[:2]] * 2), SIZES)[1]
    for name, value in alone.items():
        torch.testing.assert_close(second[name], value, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_detections_name_the_queries_of_all_chunks(vocabulary, images):
    model = build_small(vocabulary, chunk_size=2, num_detections=15).eval()
    outputs = model(images, text=[PHRASES] * 2)
    scores, labels, boxes_xyxy, queries = model.detections(outputs)
    assert scores.shape == (2, 45) and queries.max() >= 40
    chunks = torch.cat([chunk["pred_boxes"] for chunk in outputs["chunks"]], dim=1)
    centers = chunks.gather(1, queries[..., None].expand(-1, -1, 4))[..., :2]
    torch.testing.assert_close((boxes_xyxy[..., :2] + boxes_xyxy[..., 2:]) / 2, centers)
    assert torch.equal(labels // 2, queries // 20)
    with pytest.raises(DataError, match="5 phrases are read in 3 parts, of which each has its own queries. Give fewer"):
        model.query_scores(outputs, 5)


@torch.no_grad()
def test_the_loss_of_chunks_is_the_mean_of_theirs(vocabulary, images):
    criterion = CRITERIA.build(
        dict(
            type="GroundingCriterion", weights=dict(labels=1.0, l1=5.0, giou=2.0),
            matcher=dict(type="TokenMatcher", label_cost="prompt", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0),
        )
    ).eval()  # fmt: skip
    boxes = torch.tensor([[0.5, 0.5, 0.2, 0.2], [0.3, 0.3, 0.2, 0.2]])
    targets = [
        {"labels": torch.tensor([4, 1]), "boxes_cxcywh": boxes},
        {"labels": torch.tensor([0]), "boxes_cxcywh": boxes[:1]},
    ]
    model = build_small(vocabulary, max_tokens=8).eval()
    losses = criterion(model(images, text=[PHRASES] * 2), targets)
    pairs = [  # prompt; labels and rows of boxes of the targets
        (PHRASES[:2], [([1], [1]), ([0], [0])]),
        (PHRASES[2:4], [([], []), ([], [])]),
        (PHRASES[4:], [([0], [0]), ([], [])]),
    ]
    expected = []
    for prompt, chosen in pairs:
        own = [{"labels": torch.tensor(l, dtype=torch.int64), "boxes_cxcywh": boxes[r]} for l, r in chosen]
        expected.append(criterion(model(images, text=[prompt] * 2), own))
    for name, value in losses.items():
        torch.testing.assert_close(value, sum(each[name] for each in expected) / 3, msg=name)

    outputs = model(images, text=[PHRASES] * 2)
    maps = (outputs["phrase_ids"][:, None] == torch.tensor([[4], [1]])) & prompts(vocabulary, PHRASES).is_word
    mapped = [dict(targets[0], positive_map=maps[0, :, :-1]), targets[1]]
    for name, value in criterion(outputs, mapped).items():
        torch.testing.assert_close(value, losses[name], msg=name)


def test_long_prompts_are_an_error_in_training(vocabulary, images):
    model = build_small(vocabulary, max_tokens=8)
    with pytest.raises(DataError, match=r"trains with at most 8\. Set data.prompts.max_tokens=8"):
        model(images, prompt=prompts(vocabulary, PHRASES, PHRASES))
    with pytest.raises(ConfigError, match="chunk_size=0: expected at least 1 phrase"):
        build_small(vocabulary, chunk_size=0)
