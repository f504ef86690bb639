"""Files of predictions: an evaluator's own methods go before the formats of vitkit's evaluators."""

import json

import pytest

from tests.helpers.detection_files import evaluator_of, write_data
from tests.helpers.plain_dataset import PlainDataset
from vitkit.apps.training.result_files import load_results, write_results, writes_results
from vitkit.errors import ConfigError
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.evaluation.lvis import LvisEvaluator
from vitkit.protocols.evaluator import Evaluator


class CountingEvaluator(CocoEvaluator):
    """Writes the number of images in place of COCO's results."""

    def write_results(self, path):
        path.write_text(json.dumps(len(self.stored_predictions)))


class Silent(Evaluator):
    """Has no files."""

    def __init__(self, dataset):
        self.dataset = dataset

    update = gather = compute = table = None


def test_own_method_is_called_and_the_other_is_that_of_the_base(tmp_path):
    write_data(tmp_path)
    evaluator = CountingEvaluator(evaluator_of(tmp_path).dataset)
    load_results(evaluator, tmp_path / "results.json")  # COCO's
    assert write_results(evaluator, tmp_path / "own.json") == [tmp_path / "own.json"]
    assert json.loads((tmp_path / "own.json").read_text()) == len(evaluator.stored_predictions) > 0


def test_subclass_has_the_format_of_its_base(tmp_path):
    write_data(tmp_path)
    assert writes_results(LvisEvaluator(evaluator_of(tmp_path).dataset))


def test_evaluator_without_files_says_so(tmp_path):
    evaluator = Silent(PlainDataset(image_ids=[]))
    assert not writes_results(evaluator)
    with pytest.raises(ConfigError, match=r"a\.json: Silent does not write its predictions to files"):
        write_results(evaluator, tmp_path / "a.json")
    with pytest.raises(ConfigError, match=r"a\.json: Silent cannot read predictions from files"):
        load_results(evaluator, tmp_path / "a.json")
