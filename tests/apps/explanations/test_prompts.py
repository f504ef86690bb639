"""What boxes read in a prompt, why they have their labels, and where words look."""

import json
import re

import numpy as np
import pytest
import torch
from helpers.every_model import IMAGE, PROMPT, dense_model
from matplotlib.figure import Figure

import vitkit
from vitkit import AttentionRecorder, Model
from vitkit.apps.explanations.images import QueryPredictions, image_sampling
from vitkit.apps.explanations.prompt_attention import PromptAttention, prompt_attention
from vitkit.apps.explanations.prompts import MAX_WORDS, _shown_words, draw_box_words, draw_word_locations
from vitkit.apps.inference import Predictor


@pytest.fixture(scope="module")
def predictor():
    return Predictor(dense_model("GroundingDINO"), ()).with_text(PROMPT)


@pytest.fixture
def figures(monkeypatch):
    """Return the figures that are saved."""
    saved, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **b: saved.append(figure) or savefig(figure, *a, **b))
    return saved


def test_class_scores_exclude_the_no_object_column_if_there_is_one():
    logits = torch.tensor([[[0.0, 1.0, 2.0]]])
    softmax = Model().query_scores({"pred_logits": logits}, 2)
    assert torch.equal(softmax, logits.softmax(-1)[..., :2])
    assert torch.equal(Model().query_scores({"pred_logits": logits}, 3), logits.sigmoid())


def test_explained_labels_are_phrases_with_the_scores_of_the_prediction(predictor):
    attention, view = prompt_attention(predictor, IMAGE)
    queries = QueryPredictions.of(view)
    prediction = predictor(IMAGE, threshold=0.0)
    assert attention.phrases == prediction.classes == ["a", "b c"]
    assert float(queries.scores.max()) == pytest.approx(float(prediction.scores.max()), abs=1e-6)
    p = attention.probabilities  # <s> a . b c . </s>
    assert torch.equal(attention.phrase_of, torch.tensor([-1, 0, -1, 1, 1, -1, -1]))
    torch.testing.assert_close(attention.scores, torch.stack((p[:, 1], p[:, 3:5].mean(-1)), dim=-1))
    # Earlier layers' scores are also those of phrases.
    sampling = image_sampling(predictor, IMAGE)
    first = view.outputs["aux_outputs"][0]["pred_logits"][0].sigmoid()
    best = max(float(first[0, 1]), float(first[0, 3:5].mean()))
    assert sampling.layers(0)[0].score == pytest.approx(best, abs=1e-6)


def test_recorded_attention_is_that_of_queries_words_and_locations(predictor):
    attention, view = prompt_attention(predictor, IMAGE)
    with torch.no_grad(), AttentionRecorder(predictor.model) as maps:
        predictor.model(**predictor.prepare([IMAGE]).inputs)
    for layer, weights in enumerate(attention.reads):
        torch.testing.assert_close(weights, maps[f"head.decoder.layers.{layer}.text_attn"][0][0])
    to_words, to_locations = maps["head.encoder.fusion_layers.0.attn"]
    torch.testing.assert_close(torch.cat([x.heads.flatten(2) for x in attention.looks], -1), to_locations[0])
    sizes = [size[0] * size[1] for size in view.feature_sizes.values()]
    torch.testing.assert_close(attention.location_reads, to_words[0, :, : sizes[0]])  # the map has at most 28 locations
    on_phrase = attention.reads[-1, :, 2, 3:5].sum(-1).mean()
    assert attention.on_phrase(2, 1) == pytest.approx(float(on_phrase))
    # All of the image has the attention of all of the image.
    everywhere = torch.ones(IMAGE.shape[:2], dtype=torch.bool)
    assert attention.ratio(1, everywhere) == pytest.approx(1.0, abs=1e-5)
    left = everywhere.clone()
    left[:, 28:] = False
    assert (attention.ratio(1, left) + attention.ratio(1, ~left)) / 2 == pytest.approx(1.0, abs=1e-2)


def attention_by_hand(words, phrase_of, num_queries=2):
    count = len(words)
    phrases = [f"phrase {k}" for k in range(max(phrase_of) + 1)]
    generator = torch.Generator().manual_seed(0)
    return PromptAttention(
        words, phrases, torch.tensor(phrase_of),
        torch.full((1, 2, num_queries, count), 1 / count),
        torch.rand(num_queries, count, generator=generator),
        torch.rand(num_queries, len(phrases), generator=generator), [], None, None,
    )  # fmt: skip


def test_bars_are_the_probabilities_and_lines_the_scores_of_phrases(figures, tmp_path):
    attention = attention_by_hand(["<s>", "red", "star", ".", "cat", ".", "</s>"], [-1, 0, 0, -1, 1, -1, -1])
    queries = QueryPredictions(
        attention.scores[:, 1], torch.tensor([1, 0]), torch.tensor([[2.0, 3, 9, 8], [-5, -5, 90, 90]]), None, (40, 56)
    )
    draw_box_words(IMAGE, attention, queries, [0, 1], tmp_path / "a.png")
    axes = figures[0].axes
    assert len(axes) == 6 and [tick.get_text() for tick in axes[4].get_xticklabels()] == attention.words
    assert axes[0].get_xlabel() == f"phrase 1 {attention.scores[0, 1]:.2f}"
    bars = [bar.get_height() for bar in axes[2].patches[: len(attention.words)]]
    assert bars == pytest.approx(attention.probabilities[0].tolist())
    lines = [segment[0, 1] for part in axes[2].collections for segment in part.get_segments()]
    assert lines == pytest.approx(attention.scores[0].tolist())
    assert [bar.get_height() for bar in axes[1].patches[:7]] == pytest.approx([1 / 7] * 7)


def test_a_query_that_reads_another_phrase_more_than_its_own_is_noted(predictor, tmp_path, monkeypatch):
    attention = attention_by_hand(["<s>", "red", "star", ".", "cat", ".", "</s>"], [-1, 0, 0, -1, 1, -1, -1])
    assert attention.most_read(0) == 0  # of equal ones the first
    attention.reads[0, :, 0] = torch.tensor([0.0, 0.2, 0.2, 0.2, 0.3, 0.1, 0.0])  # 0.4 on two words, 0.3 on one
    assert attention.read_per_word(0, 0) == pytest.approx(0.2) and attention.most_read(0) == 1
    other = {2: False, 3: True}  # which of the queries reads the phrase that it is not called by

    def most_read(attention, query):
        return abs(other[query] - int(attention.scores[query].argmax()))

    monkeypatch.setattr(PromptAttention, "most_read", most_read)
    result = vitkit.explain(predictor, image=IMAGE, text="c . a b .", queries=[2, 3], out=tmp_path)
    assert [note.split(":")[0] for note in result.notes if "it reads" in note] == ["query 3"]


def test_of_a_long_prompt_the_phrases_of_boxes_and_the_best_ones_are_drawn():
    words, phrase_of = ["<s>"], [-1]
    for phrase in range(60):
        words += [f"w{phrase}", "."]
        phrase_of += [phrase, -1]
    attention = attention_by_hand([*words, "</s>"], [*phrase_of, -1])
    shown, note = _shown_words(attention, [59, 59], [0])
    best = attention.scores[0].argsort(descending=True).tolist()
    kept = set([59, *[k for k in best if k != 59]][: MAX_WORDS // 2])
    assert [attention.words[k] for k in shown if attention.phrase_of[k] >= 0] == [f"w{k}" for k in sorted(kept)]
    assert shown[0] == 0 and shown[-1] == len(words) and note == "; 20 of 60 phrases"


def test_locations_of_words_have_a_row_for_each_word_of_the_best_phrases(predictor, figures, tmp_path):
    attention, view = prompt_attention(predictor, IMAGE)
    queries = QueryPredictions.of(view)
    draw_word_locations(view.image, attention, queries, {1: [0, 2], 0: [1]}, [8, 16, 32, 64], tmp_path / "a.png")
    axes = np.array(figures[0].axes).reshape(3, 5)
    assert [axis.get_ylabel() for axis in axes[:, 0]] == ["b", "c", "a"]
    assert [axis.get_title() for axis in axes[0]] == ["image", "stride 8", "stride 16", "stride 32", "stride 64"]
    assert [len(axis.patches) for axis in axes[:, 2]] == [2, 2, 1]


def test_numbers_and_the_page_are_those_of_the_prompt(predictor, tmp_path):
    result = vitkit.explain(predictor, image=IMAGE, text="c . a b .", queries=[3], html=True, out=tmp_path)
    assert result.prompt.words == ["<s>", "c", ".", "a", "b", ".", "</s>"] and result.prompt.phrases == ["c", "a b"]
    label = int(result.prompt.scores[3].argmax())
    phrase = result.prompt.phrases[label]
    assert result.numbers == {
        f"query 3: {phrase}: fraction of its attention to the prompt on this phrase": result.prompt.on_phrase(3, label),
        f"{phrase}: attention of its words in its boxes, relative to uniform attention": pytest.approx(
            np.mean([result.prompt.ratio(k, box_of(result, 3)) for k in result.prompt.words_of(label)])
        ),
    }
    text = (tmp_path / "image_prompt.html").read_text(encoding="utf-8")
    layers = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])["layers"]
    names = [layer["name"] for layer in layers]
    assert names == [
        "words read, decoder 0", "words read, decoder 1", "words look, map 0", "words look, map 1", "words look, map 2",
        "words look, map 3", "words that locations read",
    ]  # fmt: skip
    assert layers[0]["columns"]["labels"][3] == "3: a" and layers[0]["rows"]["labels"][0].startswith("3: ")
    assert len(layers[0]["boxes"]) == 4 and layers[2]["rows"]["labels"] == layers[6]["columns"]["labels"]


def box_of(result, query):
    """Return the region of a query's box that the page was drawn for."""
    predictor = Predictor(dense_model("GroundingDINO"), ()).with_text("c . a b .")
    return QueryPredictions.of(prompt_attention(predictor, IMAGE)[1]).region(query)
