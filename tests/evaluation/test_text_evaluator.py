import json
import math
import unicodedata

import pytest
import torch

from vitkit.apps.visualization.metrics import draw_by_length, draw_metrics
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.text import LanguageModelEvaluator, TextEvaluator, perplexity
from vitkit.structures import EOS, PAD


def evaluated(texts, references, sources=None, **options):
    evaluator = TextEvaluator(range(len(texts)), **options)
    sources = sources or ["a b c"] * len(texts)
    targets = [
        {"index": i, "source_text": source, "references": [r] if isinstance(r, str) else r}
        for i, (source, r) in enumerate(zip(sources, references))
    ]
    evaluator.update([{"text": text} for text in texts], targets)
    evaluator.gather()
    return evaluator


def test_bleu_of_a_case_by_hand():
    # 1- to 4-grams: 5 of 6, 3 of 5, 2 of 4, 1 of 3; as long as the reference, so there is no brevity penalty.
    evaluator = evaluated(["the cat sat on a mat"], ["the cat sat on the mat"])
    expected = 100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25
    assert evaluator.compute()["bleu"] == pytest.approx(expected, abs=1e-9)


def test_perplexity_of_extremely_improbable_text_is_infinite():
    assert perplexity(math.log(3)) == pytest.approx(3) and perplexity(1e4) == math.inf


def test_too_short_text_is_penalized():
    # All n-grams are right; 5 words for 6.
    evaluator = evaluated(["the cat sat on the"], ["the cat sat on the mat"])
    assert evaluator.compute()["bleu"] == pytest.approx(100 * math.exp(1 - 6 / 5), abs=1e-9)


def test_exact_match_counts_right_answers():
    evaluator = evaluated(["drei", "Vier", "fünf"], ["drei", "vier", "fünf"])
    metrics = evaluator.compute()
    assert metrics["exact_match"] == pytest.approx(2 / 3)
    assert 0 < metrics["chrf"] < 100
    assert evaluated(["a b c d e"], ["a b c d e"]).compute() == pytest.approx(
        {"bleu": 100.0, "chrf": 100.0, "exact_match": 1.0}
    )


def test_blanks_and_forms_of_unicode_are_no_other_text():
    references = ["drei ", "vier\t", "fünf\u00a0", unicodedata.normalize("NFD", "fünf"), "a  b"]
    assert evaluated(["drei", "vier", "fünf", "fünf", "a b"], references).compute()["exact_match"] == 1


def test_case_and_tokenizer_are_options():
    assert evaluated(["A B C D"], ["a b c d"]).compute()["bleu"] < 1
    in_any_case = evaluated(["A B C D"], ["a b c D"], lowercase=True)
    assert in_any_case.compute() == pytest.approx({"bleu": 100, "chrf": 100, "exact_match": 1})
    assert in_any_case.statistics().exact.all()
    assert evaluated(["abcde"], ["abcde"], tokenize="char").compute()["bleu"] == pytest.approx(100)
    with pytest.raises(ConfigError, match=r"evaluator\.tokenize='13b': sacrebleu refuses it"):
        TextEvaluator([], tokenize="13b")


def test_metrics_can_be_chosen_and_the_first_is_reported_by_length(tmp_path):
    evaluator = evaluated(["drei", "Vier"], ["drei", "vier"], metrics=["exact_match", "chrf"])
    metrics = evaluator.compute()
    assert list(metrics) == ["exact_match", "chrf"] and metrics["exact_match"] == 0.5
    assert evaluator.by_length()[0].score == 0.5 and evaluator.per_class() == {"1 to 5 words": 0.5}
    table = evaluator.table()
    assert table.startswith("exact match 0.5000   chrF ") and "exact match by words of the source: 1-5: 0.500" in table
    assert "BLEU" not in table and table.splitlines()[-1].startswith("chrF nrefs:1")
    evaluator.write_results(tmp_path / "r.json")
    saved = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert saved["by_length"][0]["exact_match"] == 0.5 and "bleu" not in saved and list(saved["signatures"]) == ["chrf"]
    for wrong in ([], ["bleu", "rouge"]):
        with pytest.raises(ConfigError, match=r"evaluator\.metrics: got .*; expected one or more of bleu, chrf, exact"):
            evaluated(["a"], ["a"], metrics=wrong)


def test_every_one_of_several_references_counts():
    evaluator = evaluated(["a b c d", "e f g h"], [["x", "a b c d"], ["e f g h"]])
    assert evaluator.compute() == pytest.approx({"bleu": 100.0, "chrf": 100.0, "exact_match": 1.0})


def test_other_models_and_datasets_are_refused():
    for prediction, target in (({"tokens": []}, {"references": ["a"]}), ({"text": "a"}, {"tokens": []})):
        with pytest.raises(ConfigError, match=r"Set evaluator=LanguageModelEvaluator for language models"):
            TextEvaluator(range(1)).update([prediction], [target])


def test_every_sentence_is_required_and_counts_once():
    evaluator = evaluated(["a"], ["a"])
    evaluator.update([{"text": "b"}], [{"index": 0, "source_text": "", "references": ["b"]}])
    assert evaluator.compute()["exact_match"] == 1
    evaluator.dataset = range(2)
    with pytest.raises(DataError, match=r"1 of the dataset's 2 sentences were predicted; expected all"):
        evaluator.compute()


def test_bleu_by_length_groups_sentences_by_words_of_the_source():
    sources = ["a", "a b c d e", "a b c d e f", "a " * 11, ""]
    texts = ["w x y z", "w x y z", "w x y q", "w x y z", "w x y z"]
    groups = evaluated(texts, ["w x y z"] * 5, sources, smallest_group=1).by_length()
    assert [(g.min_words, g.max_words, g.count) for g in groups] == [(1, 5, 3), (6, 10, 1), (11, 15, 1)]
    assert groups[0].score == pytest.approx(100) and groups[1].score < 80


def test_small_groups_are_joined():
    sources = ["a"] * 3 + ["a " * 7] + ["a " * 12] * 3 + ["a " * 30]
    groups = evaluated(["w x y z"] * 8, ["w x y z"] * 8, sources, smallest_group=3).by_length()
    assert [(g.min_words, g.max_words, g.count) for g in groups] == [(1, 10, 4), (11, 30, 4)]


def test_the_table_ends_with_the_signatures():
    evaluator = evaluated(["a b"], ["a b"])
    assert evaluator.table() == ""
    evaluator.compute()
    table = evaluator.table()
    assert "exact match 1.0000   1 sentences" in table and "    reference a b" in table
    assert "BLEU nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:" in table.splitlines()[-2]
    assert "chrF nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no" in table.splitlines()[-1]


def test_results_can_be_read_back(tmp_path):
    evaluator = evaluated(["a b c d", "ö"], ["a b c d", "ä"])
    metrics = evaluator.compute()
    files = evaluator.write_results(tmp_path / "r.json")
    files += draw_metrics(evaluator, tmp_path / "r.json")
    assert [file.name for file in files] == ["r.json", "r.txt", "r_by_length.png"]
    assert (tmp_path / "r.txt").read_text(encoding="utf-8") == "a b c d\nö\n"
    saved = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert saved["bleu"] == metrics["bleu"] and saved["by_length"][0]["count"] == 2
    again = TextEvaluator(range(2))
    again.load_results(tmp_path / "r.json")
    assert again.compute() == metrics
    with pytest.raises(DataError, match=r"r\.txt: not valid JSON"):
        again.load_results(tmp_path / "r.txt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], r"the file contains \[\]; expected texts that vitkit test wrote"),
        ({"sentences": [7]}, "entry 0 of 'sentences' is 7"),
        ({"sentences": [{"index": [0], "text": "a", "source": "a", "references": ["a"]}]}, r"has index \[0\]"),
        ({"sentences": [{"index": 2, "text": "a", "source": "a", "references": ["a"]}]}, "has index 2"),
        ({"sentences": [{"index": 0, "text": None, "source": "a", "references": ["a"]}]}, "has text None"),
        ({"sentences": [{"index": 0, "text": "a", "source": "a", "references": []}]}, r"has references \[\]"),
    ],
)
def test_wrong_results_are_named(tmp_path, content, message):
    (tmp_path / "r.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"r\.json': .*{message}"):
        TextEvaluator(range(2)).load_results(tmp_path / "r.json")


def test_curves_of_several_models_are_drawn_together(tmp_path):
    groups = evaluated(["a b c d"] * 2, ["a b c d"] * 2, ["a", "a " * 8], smallest_group=1).by_length()
    draw_by_length({"one": groups, "two": groups[:1]}, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_perplexity_by_hand():
    # The right tokens have probability 1/2 and 1/4; then padding of the batch.
    logits = torch.full((3, 6), -1e4)
    logits[0, [4, 5]] = 0.0
    logits[1, 2:6] = 0.0
    evaluator = LanguageModelEvaluator(range(1))
    with pytest.raises(DataError, match=r"0 of the dataset's 1 sentences were predicted; expected all"):
        evaluator.compute()
    target = {"index": 0, "tokens": torch.tensor([4, EOS])}
    evaluator.update([{"logits": logits}], [target])
    evaluator.gather()
    metrics = evaluator.compute()
    assert metrics["log_likelihood"] == pytest.approx(math.log(1 / 2 * 1 / 4) / 2)
    assert metrics["perplexity"] == pytest.approx(math.sqrt(8), rel=1e-6)
    assert "2 tokens of 1 sentences" in evaluator.table()


def test_only_masked_tokens_count():
    logits = torch.zeros(3, 4)
    logits[1, 3] = 100.0
    evaluator = LanguageModelEvaluator(range(1))
    target = {"index": 0, "tokens": torch.tensor([1, 3, PAD])}
    evaluator.update([{"logits": logits, "masked": torch.tensor([False, True, True])}], [target])
    evaluator.gather()
    assert evaluator.compute() == pytest.approx({"perplexity": 1.0, "log_likelihood": 0.0, "token_accuracy": 1.0})


@pytest.mark.parametrize(
    "text", ["私の番号は九八二五九七です。", "我的号码是九八二五九七。", "หมายเลขของฉันคือเก้าแปดสอง"]
)
def test_words_without_blanks_are_warned_of(text, caplog):
    evaluated([text], [text])
    assert "the references have no blanks between words, so BLEU stays near 0. Set it to zh for Chinese" in caplog.text
    caplog.clear()
    evaluated([text], [text], tokenize="char")
    evaluated([text], [text], metrics=["chrf"])
    evaluated(["my number is 号"], ["내 번호는 구팔이오구칠입니다 号"])
    assert not caplog.text
