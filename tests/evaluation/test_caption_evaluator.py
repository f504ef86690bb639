import json
import logging

import numpy as np
import pytest
from helpers.plain_dataset import PlainDataset

from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.captions import CaptionEvaluator


class Captioned(PlainDataset):
    annotations = ("captions",)
    image_ids = np.array([7, 3, 5])  # as those of real datasets
    _references = (("A dog runs .", "the dog is running fast"), ("Two cats sit.",), ("a red ball on the grass",))

    def references(self, index):
        return list(self._references[index])


def evaluated(texts):
    evaluator = CaptionEvaluator(Captioned())
    evaluator.update([{"text": text} for text in texts.values()], [{"image_id": image_id} for image_id in texts])
    evaluator.gather()
    return evaluator, evaluator.compute()


def test_captions_equal_to_references_score_best():
    _, metrics = evaluated({5: "A red ball on the grass", 7: "a dog runs!", 3: "two cats sit"})
    best = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE-L", "exact_match")
    assert {name: metrics[name] for name in best} == pytest.approx(dict.fromkeys(best, 1.0))
    # With one reference, the score is 10 times the fraction of n-gram lengths that it has; the first image has two
    # references, of which one is matched and the other adds a little.
    assert 5.8 < metrics["CIDEr-D"] < 10
    assert metrics.keys() == {*best, "CIDEr-D"}
    assert {type(value) for value in metrics.values()} == {float}  # a checkpoint holds them


def test_an_image_without_a_caption_counts_as_empty(caplog):
    with caplog.at_level(logging.WARNING, "vitkit"):
        _, metrics = evaluated({7: "a dog runs"})
    assert metrics["exact_match"] == pytest.approx(1 / 3)
    assert metrics["ROUGE-L"] == pytest.approx(1 / 3)
    assert "2 of 3 images have no caption" in caplog.text


def test_an_image_seen_twice_counts_once():
    evaluator, metrics = evaluated({7: "a dog runs", 3: "two cats sit", 5: ""})
    evaluator.update([{"text": "nonsense"}], [{"image_id": 7}])
    assert evaluator.compute() == metrics


def test_results_have_the_coco_format_and_score_the_same_when_read_back(tmp_path):
    evaluator, metrics = evaluated({7: "a dog running", 3: "cats", 5: "a ball – grün"})
    path = tmp_path / "results.json"
    assert evaluator.write_results(path) == [path]
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written[1] == {"image_id": 3, "caption": "cats"}
    again = CaptionEvaluator(Captioned())
    again.load_results(path)
    assert again.compute() == metrics
    assert "CIDEr-D" in again.table() and "4 references" in again.table()
    assert again.per_class().keys() == {"7", "3", "5"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"image_id": 9, "caption": "a"}], r"entry 0 has image_id 9; expected one of the 3 image_ids of the dataset"),
        ([{"image_id": [7], "caption": "a"}], r"image_id \[7\]"),
        ([{"image_id": 7, "caption": "a"}] * 2, r"entry 1 has image_id 7; expected an id that no earlier entry has"),
        ([{"image_id": 7}], r"entry 0 has no 'caption'; expected text"),
        ([], r"not empty"),
    ],
)
def test_wrong_results_are_named(tmp_path, content, message):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=message):
        CaptionEvaluator(Captioned()).load_results(path)


def test_missing_or_damaged_results_are_named(tmp_path):
    with pytest.raises(DataError, match="results: no file .* Give the file that vitkit test wrote"):
        CaptionEvaluator(Captioned()).load_results(tmp_path / "none.json")
    (tmp_path / "cut.json").write_text('[{"image_id"')
    with pytest.raises(DataError, match="not valid JSON"):
        CaptionEvaluator(Captioned()).load_results(tmp_path / "cut.json")


def test_other_datasets_and_models_are_refused():
    with pytest.raises(ConfigError, match=r"needs 'captions' annotations, and dataset PlainDataset has none"):
        CaptionEvaluator(PlainDataset())
    with pytest.raises(ConfigError, match=r"predictions have scores and no 'text'"):
        CaptionEvaluator(Captioned()).update([{"scores": 1}], [{"image_id": 7}])
