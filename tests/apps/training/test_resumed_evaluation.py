"""An evaluation that was killed goes on with what it had predicted, and has the same results."""

import os
import pickle
import signal
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from helpers.real_runs import finish, start
from helpers.untrained_runs import DETR, make_run

from vitkit import build_dataset, build_model, load_config
from vitkit.apps.inference import find_trained
from vitkit.apps.training import testing
from vitkit.apps.training.stored_predictions import PredictionFiles
from vitkit.apps.training.testing import evaluate_model
from vitkit.distributed import rank
from vitkit.errors import ConfigError, DataError
from vitkit.registry import EVALUATORS
from vitkit.tools import test

ARGUMENTS = ["run", "data.val.num_images=21", "data.val_images_per_gpu=2", "--out"]


def evaluate(arguments: list[str]) -> None:
    test.main([*arguments, "--device", "cpu"])


def die_after(batches: int, of_rank: int) -> None:
    """Have the process of a rank kill itself in the middle of a prediction, after so many batches."""
    write, numbers = PredictionFiles._write, count(1)

    def killed(files, content):
        if next(numbers) > batches and rank() == of_rank:
            os.write(files._file.fileno(), b"half of a prediction")
            os.kill(os.getpid(), signal.SIGKILL)
        write(files, content)

    PredictionFiles._write = killed


def kill(after: int, *arguments: str, processes: int = 1) -> None:
    """Evaluate in processes, the last of which is killed after some batches; the others end because they lose it."""
    prepare = partial(die_after, after, processes - 1)
    statuses = finish(start(*ARGUMENTS, *arguments, tool="test", ranks=processes, prepare=prepare))
    assert statuses == [1] * (processes - 1) + [-signal.SIGKILL], Path("output.txt").read_text()


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(DETR, "ShapesDetection")


def table(text: str) -> str:
    return text[text.index("AP") : text.index("ms per image")].rpartition("results are in")[0]


def test_killed_evaluation_is_resumed(run, capsys):
    evaluate([*ARGUMENTS, "whole.json"])
    expected = table(capsys.readouterr().out)
    kill(4, "killed.json")  # the first frame is what the evaluation depends on
    evaluate([*ARGUMENTS, "killed.json", "--resume", "killed.stored_predictions"])
    printed = capsys.readouterr().out
    assert "resuming: 6 of 21 images are done" in printed and table(printed) == expected
    assert Path("killed.json").read_bytes() == Path("whole.json").read_bytes()
    assert not list(Path().glob("*.stored_predictions"))


def test_evaluation_runs_a_fused_copy(run, monkeypatch):
    models = []
    monkeypatch.setattr(testing, "evaluate", lambda model, *_, **__: models.append(model) or {})
    evaluate_model(*find_trained("run"), torch.device("cpu"))
    assert models[0].is_fused


def test_killed_evaluation_of_two_processes_is_resumed_by_one(run, capsys):
    evaluate([*ARGUMENTS, "whole.json", "data.val_images_per_gpu=1"])
    expected = table(capsys.readouterr().out)
    kill(3, "killed.json", "data.val_images_per_gpu=1", processes=2)
    before = len(list(Path("killed.stored_predictions").iterdir()))
    evaluate([*ARGUMENTS, "killed.json", "data.val_images_per_gpu=1", "--resume", "killed.stored_predictions"])
    printed = capsys.readouterr().out
    assert before == 2 and "resuming: " in printed and table(printed) == expected
    assert Path("killed.json").read_bytes() == Path("whole.json").read_bytes()


def test_other_settings_are_refused_and_without_resume_it_begins_anew(run, capsys):
    kill(4, "out.json")
    with pytest.raises(
        SystemExit, match=r"--resume: the predictions in 'out.stored_predictions' are of another evaluation, whose data"
    ):
        evaluate([*ARGUMENTS, "out.json", "--resume", "out.stored_predictions", "data.val.num_images=22"])
    with pytest.raises(SystemExit, match="another evaluation, whose tiles differs"):
        evaluate([*ARGUMENTS, "out.json", "--resume", "out.stored_predictions", "--tiles", "64"])
    evaluate([*ARGUMENTS, "out.json"])
    assert "resuming" not in capsys.readouterr().out and not Path("out.stored_predictions").exists()


@pytest.mark.parametrize("config", ["detr", "mask2former_panoptic", "maskformer_semantic", "classifier", "video"])
def test_predictions_of_every_task_are_read_as_they_were_written(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    count = "num_videos" if config == "video" else "num_images"
    config = load_config(f"quickstart/{config}", [f"data.val.{count}=3", "data.num_workers=0"])
    dataset = build_dataset(config["data"]["val"])
    torch.manual_seed(0)
    known = {"classes": dataset.classes, "things": dataset.things}
    model = build_model(config["model"], **known)
    torch.save({"model": model.state_dict(), **known}, "best.pth")
    device = torch.device("cpu")
    first = evaluate_model(config, "best.pth", device, prediction_files=PredictionFiles(Path("a"), resume=False))
    again = evaluate_model(config, "best.pth", device, prediction_files=PredictionFiles(Path("a"), resume=True))
    assert again.metrics == first.metrics
    for part, other in zip(first.evaluator.parts, again.evaluator.parts):
        assert (
            pickle.dumps(part.stored_predictions) == pickle.dumps(other.stored_predictions)
            and len(part.stored_predictions) == 3
        )


def test_likelihoods_of_text_are_not_resumed(tmp_path):
    config, weights = find_trained("numbers_translator", overrides=["data.val.num_pairs=4", "data.num_workers=0"])
    files = PredictionFiles(tmp_path / "a", resume=True)
    with pytest.raises(ConfigError, match="--resume: the likelihood of the references is a sum over all sentences"):
        evaluate_model(config, weights, torch.device("cpu"), prediction_files=files)


def test_stored_predictions_call_no_code(tmp_path):
    class Bad:
        def __reduce__(self):
            return os.system, ("touch called",)

    dataset = build_dataset(dict(type="ShapesDetection", num_images=2))
    evaluator = EVALUATORS.build(dict(type="CocoEvaluator"), dataset=dataset)
    files = PredictionFiles(tmp_path / "a", resume=False)
    files.begin(evaluator, {})
    files._write([{1: Bad()}])
    with pytest.raises(DataError, match=r"is damaged \(names posix.system, which is not a stored prediction\)"):
        PredictionFiles(tmp_path / "a", resume=True).begin(evaluator, {})


def test_evaluators_without_stored_predictions_cannot_be_resumed(tmp_path):
    class Counter:
        parts = property(lambda self: [self])

    assert PredictionFiles(tmp_path / "a", resume=False).begin(Counter(), {}) == set()
    with pytest.raises(ConfigError, match="Counter stores no predictions by sample"):
        PredictionFiles(tmp_path / "a", resume=True).begin(Counter(), {})


def test_a_folder_that_cannot_be_written_does_not_end_the_evaluation(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    dataset = build_dataset(dict(type="ShapesDetection", num_images=2))
    evaluator = EVALUATORS.build(dict(type="CocoEvaluator"), dataset=dataset)
    files = PredictionFiles(tmp_path / "file" / "a", resume=False)
    assert files.begin(evaluator, {}) == set()
    files.add()
    assert "predictions are not stored for --resume (Not a directory)" in caplog.text
