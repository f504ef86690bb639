"""The evaluation of a finished run."""

import json
import os

import pytest
import torch

from vitkit import build_dataset, build_model, load_config
from vitkit import compare as compare_models
from vitkit.apps.training import comparing
from vitkit.apps.training.results import score_file, score_run
from vitkit.config import save_config
from vitkit.errors import ConfigError
from vitkit.tools import compare
from vitkit.weights import save_checkpoint


@pytest.fixture
def run(tmp_path):
    """A small detector with random weights, and few images to evaluate."""
    config = load_config(
        "quickstart/detr",
        [
            "data.val.num_images=4",
            "data.num_workers=0",
            "model.neck.out_channels=32",
            "model.head.d_model=32",
            "model.head.num_heads=2",
            "model.head.d_ffn=64",
            "model.head.num_encoder_layers=1",
            "model.head.num_decoder_layers=1",
        ],
    )
    classes = list(build_dataset(config["data"]["val"]).classes)
    torch.manual_seed(0)
    model = build_model(config["model"], classes=classes)
    folder = tmp_path / "small"
    state = {"model": model.state_dict(), "classes": classes, "config": json.dumps(config)}
    save_checkpoint(folder / "best.pth", state)
    save_config(config, folder / "config.json")
    return folder


def test_evaluation_of_a_run_is_written_and_reused(run):
    evaluation = score_run(run, device="cpu")
    results = json.loads((run / "results_val.json").read_text())
    assert len({result["image_id"] for result in results}) == 4
    (run / "results_val.json").write_text(json.dumps(results[1:]))
    again = score_run(run, device="cpu")
    assert again.name == evaluation.name == "small" and again.evaluator.results() == results[1:]


def test_results_of_weights_that_were_replaced_are_not_reused(run):
    before = score_run(run, device="cpu").evaluator.results()
    checkpoint = torch.load(run / "best.pth", weights_only=True)
    changed = {key: 1.1 * value if value.is_floating_point() else value for key, value in checkpoint["model"].items()}
    save_checkpoint(run / "best.pth", checkpoint | {"model": changed})
    os.utime(run / "best.pth", (0, 0))  # as a copy that keeps its time
    after = score_run(run, device="cpu").evaluator.results()
    assert after != before and score_run(run, device="cpu").evaluator.results() == after
    (run / "results_val_weights.json").write_text("[damaged")
    assert score_run(run, device="cpu").evaluator.results() == after


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x, y, w, h: [x, y, w, h], ""),
        (lambda x, y, w, h: [x, y, x + w, y + h], "look like corners x1, y1, x2, y2, as 3 of 4 reach beyond"),
        (lambda x, y, w, h: [x / 640, y / 480, w / 640, h / 480], "look like fractions of the image"),
    ],
)
def test_boxes_in_another_form_are_reported(tmp_path, caplog, change, message):
    boxes = [[10, 10, 60, 50], [400, 20, 100, 60], [20, 300, 80, 90], [500, 300, 120, 150]]
    common = {"image_id": 1, "category_id": 1}
    truth = {
        "images": [{"id": 1, "file_name": "1.jpg", "width": 640, "height": 480}],
        "categories": [{"id": 1, "name": "cell"}],
        "annotations": [
            common | {"id": k, "bbox": box, "area": box[2] * box[3], "iscrowd": 0} for k, box in enumerate(boxes, 1)
        ],
    }
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    results = [common | {"bbox": change(*box), "score": 0.9} for box in boxes]
    (tmp_path / "results.json").write_text(json.dumps(results))
    score_file(tmp_path / "results.json", annotations=tmp_path / "truth.json")
    assert message in caplog.text and ("the boxes look like" in caplog.text) == bool(message)


@pytest.mark.parametrize("area", [0, 1, 480 * 320])
def test_boxes_without_masks_count_by_their_own_area(tmp_path, area):
    boxes = [[10 + k, 10, 60, 50] for k in range(4)]
    common = {"category_id": 1}
    truth = {
        "images": [{"id": k, "file_name": f"{k}.png", "width": 480, "height": 320} for k in range(1, 5)],
        "annotations": [
            {"id": k, "image_id": k, "bbox": box, "area": area, "iscrowd": 0, **common}
            for k, box in enumerate(boxes, start=1)
        ],
        "categories": [{"id": 1, "name": "cell"}],
    }
    results = [{"image_id": k, "bbox": box, "score": 0.9, **common} for k, box in enumerate(boxes[:3], start=1)]
    (tmp_path / "coco.json").write_text(json.dumps(truth))
    (tmp_path / "results.json").write_text(json.dumps(results))
    metrics = score_file(tmp_path / "results.json", annotations=tmp_path / "coco.json").evaluator.metrics
    assert metrics["bbox/APm"] == metrics["bbox/AP"] == pytest.approx(0.752, abs=5e-4)
    assert metrics["bbox/APs"] == metrics["bbox/APl"] == -1


def test_folder_that_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="neither a run nor a results file"):
        score_run(tmp_path)


def test_checkpoints_and_runs_are_compared(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (run / "last.pth").write_bytes((run / "best.pth").read_bytes())
    compare.main([str(run / "best.pth"), str(run / "last.pth"), "--device", "cpu"])
    assert "last against best, on 4 samples" in capsys.readouterr().out
    compare.main([str(run), str(run / "last.pth"), str(run / "results_val.json"), "--device", "cpu"])
    assert "results_val against small, on 4 samples" in capsys.readouterr().out


def test_overrides_change_the_config_of_each_model(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (run / "last.pth").write_bytes((run / "best.pth").read_bytes())
    compare.main([str(run), str(run / "last.pth"), "data.val.num_images=3", "--device", "cpu"])
    assert "last against small, on 3 samples" in capsys.readouterr().out
    assert not (run / "results_val.json").exists()  # those predictions are not of the run's own config
    score_run(run, device="cpu")
    assert len(compare_models(run, run, overrides=["data.val.num_images=2"], device="cpu").sample_ids) == 2
    compare.main([str(run / "results_val.json")] * 2 + ["--data", str(run), "data.images_per_gpu=1"])
    assert "on 4 samples" in capsys.readouterr().out


def test_a_root_is_for_the_models_that_read_files_below_it(tmp_path, monkeypatch):
    used = {}
    monkeypatch.setattr(comparing, "score_run", lambda run, *, overrides, **_: used.update({run.name: list(overrides)}))
    for name in ("bccd/dino_r18", "quickstart/dino"):
        folder = tmp_path / name.partition("/")[0]
        folder.mkdir()
        save_config(load_config(name), folder / "config.json")
        (folder / "best.pth").touch()
    overrides = ["data.root=moved", "train.seed=1"]
    comparing.score_models([tmp_path / "bccd", tmp_path / "quickstart"], overrides=overrides)
    assert used == {"bccd": overrides, "quickstart": ["train.seed=1"]}
    comparing.score_models([tmp_path / "quickstart"] * 2, overrides=overrides)  # which is an error there
    assert used["quickstart"] == overrides


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.json", "b.json", "--annotations", "val.json", "data.root=x"], "have no config to change"),
        (["runs/a", "data.root=x", "--curves", "c.png"], "--curves reads only logs"),
        (["runs/a", "data.root=x"], "at least two models"),
    ],
)
def test_overrides_without_a_config_are_refused(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        compare.main(arguments)
    assert message in f"{error.value.code}\n{capsys.readouterr().err}"


def test_results_of_other_data_are_not_reused(run):
    score_run(run, device="cpu")
    config = load_config(run / "config.json", ["data.val.seed=7"])
    save_config(config, run / "config.json")
    results = json.loads((run / "results_val.json").read_text())
    (run / "results_val.json").write_text(json.dumps(results[:1]))
    assert score_run(run, device="cpu").evaluator.results() != results[:1]
    record = json.loads((run / "results_val_weights.json").read_text())
    (run / "results_val.json").write_text(json.dumps(results[:1]))
    assert score_run(run, device="cpu").evaluator.results() == results[:1] and record["data"][0] == 4


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        (("images", "annotations", "categories"), "annotations in COCO's"),
        (("images", "model", "classes"), "predictions"),
    ],
)
def test_files_that_are_no_results_are_named(tmp_path, keys, what):
    (tmp_path / "a.json").write_text(json.dumps({key: [] for key in keys}))
    with pytest.raises(ConfigError, match=f"a.json: these are .*{what}.*Expected results, a list of {{image_id"):
        score_file(tmp_path / "a.json", annotations=tmp_path / "a.json")
