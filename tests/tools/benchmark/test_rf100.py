"""Tests of training and scoring on every dataset of a folder in Roboflow's layout."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.synthetic.shapes import ShapesDetection
from vitkit.errors import TrainingError
from vitkit.tools.benchmark import rf100
from vitkit.tools.benchmark.rf100 import ANNOTATIONS, SPLITS, main
from vitkit.tools.benchmark.rf100_page import mean_with_interval

MODEL = "start/detection:size=96,pretrained=False"
SMALL = f"{MODEL} data.images_per_gpu=4"


def write_dataset(folder, num_images=4, seed=0):
    """Write a dataset as Roboflow exports it: the first category is what the others are of, and has no object."""
    for k, split in enumerate(SPLITS):
        shapes = ShapesDetection(num_images=num_images, image_size=64, seed=seed + k)
        group = [dict(id=0, name="shapes", supercategory="none")]
        content = shapes.ground_truth()
        categories = [dict(id=c["id"], name=c["name"], supercategory="shapes") for c in content["categories"]]
        (folder / split).mkdir(parents=True)
        for index, image in enumerate(content["images"]):
            image["file_name"] = f"{image['id']}.png"
            Image.fromarray(shapes.load_image(index)).save(folder / split / image["file_name"])
        keys = ("id", "image_id", "category_id", "bbox", "area", "iscrowd")
        annotations = [{**{key: a[key] for key in keys}, "segmentation": []} for a in content["annotations"]]
        content = dict(images=content["images"], categories=group + categories, annotations=annotations)
        (folder / split / ANNOTATIONS).write_text(json.dumps(content))


@pytest.fixture
def sets(monkeypatch, tmp_path):
    """Return a folder of three datasets, from which commands are run."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("blood cells.v1", "crabs", "shapes.v2")):
        write_dataset(tmp_path / "sets" / name, seed=10 * seed)
    return tmp_path / "sets"


@pytest.fixture
def runs(monkeypatch):
    """Let runs take no time; return the models and datasets of those that were made."""
    made = []

    def train_and_score(args, words, dataset, digest):
        made.append((words, dataset.name))
        if words.startswith("detr"):
            raise TrainingError("out of memory (runs/detr.txt)")
        ap = 0.1 * len(made)
        return dict(
            model=words, dataset=dataset.name, AP=[ap, ap - 0.02, ap + 0.03], AP50=[ap, ap, ap], valid_AP=ap,
            images=dataset.num_images, classes=dataset.num_classes, epochs=args.epochs, steps=10,
            minutes=2.0 * len(made), processor_minutes=1.0, command=f"vitkit train {words}", versions={"torch": "2"},
            device="a processor", threads=1, annotations=dataset.annotations, weights="", config="",
        )  # fmt: skip

    monkeypatch.setattr(rf100, "train_and_score", train_and_score)
    return made


def run(*arguments):
    return main(["sets", "--model", MODEL, "--epochs", "2", *arguments])


def test_every_dataset_is_scored_once_and_models_stand_side_by_side(sets, runs, capsys):
    assert run("--datasets", "crabs", "shapes.v2") == 0
    assert run() == 0
    assert runs == [(MODEL, name) for name in ("crabs", "shapes.v2", "blood cells.v1")]
    out = Path("runs/rf100")
    assert "| short_side 96, max_size 160 | 3 of 3 | 0.200 (" in (out / "rf100.md").read_text()
    capsys.readouterr()
    assert main(["sets", "--model", SMALL, "--epochs", "2", "--datasets", "crabs"]) == 0  # the other model's stay
    assert capsys.readouterr().out.startswith(f"training  crabs, {SMALL}\n")
    page = json.loads((out / "rf100.json").read_text())
    assert [(m["model"], m["datasets"], m["all"]) for m in page["models"]] == [(MODEL, 1, 3), (SMALL, 1, 1)]
    assert page["models"][0]["AP"] == pytest.approx([0.1, 0.08, 0.13])
    assert page["protocol"]["max_dets"] == 500 and page["protocol"]["test"] == "once" and not page["failures"]
    text = (out / "rf100.md").read_text()
    assert "| 1 of 3 | 0.100 (0.080 to 0.130) |" in text and "that every model has a record of" in text
    assert f"| crabs | 4 / 4 / 4 | {page['records'][1]['classes']} | {MODEL} |" in text
    with Image.open(out / "rf100.png") as image:
        assert np.asarray(image.convert("RGB")).std() > 10


def test_a_mean_has_the_interval_of_independent_figures():
    assert mean_with_interval([[0.5, 0.4, 0.7], [0.7, 0.7, 0.7]]) == pytest.approx([0.6, 0.55, 0.7])


def test_datasets_that_cannot_be_used_are_named_and_the_others_go_on(sets, runs, capsys):
    (sets / "crabs/train" / ANNOTATIONS).write_text('{"images": [')
    shutil.rmtree(sets / "shapes.v2/test")
    write_dataset(sets / "z/without valid")
    shutil.move(sets / "z/without valid", sets / "without valid")
    shutil.rmtree(sets / "without valid/valid")
    shutil.rmtree(sets / "z")
    write_dataset(sets / "no objects")
    path = sets / "no objects/test" / ANNOTATIONS
    path.write_text(json.dumps(json.loads(path.read_text()) | {"annotations": []}))
    assert run() == 1
    assert runs == [(MODEL, "blood cells.v1")]
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("failed ")]
    assert errors[0].startswith("failed    crabs: train: ") and "not valid JSON" in errors[0]
    assert errors[1].startswith(f"failed    no objects: '{Path('sets/no objects/test') / ANNOTATIONS}' has no object")
    assert (
        "shapes.v2: no file 'sets/shapes.v2/test/_annotations.coco.json', the images of which are scored" in errors[2]
    )
    assert "without valid/valid" in errors[3] and "are what the checkpoint is chosen by" in errors[3]
    text = Path("runs/rf100/rf100.md").read_text()
    assert "| 1 of 5 |" in text and "4 failures:" in text and "- crabs: train: " in text


def test_a_failed_run_is_tried_again_and_leaves_no_record(sets, runs, capsys):
    assert main(["sets", "--model", "detr_r50", "--model", MODEL, "--epochs", "2", "--datasets", "crabs"]) == 1
    assert "failed    crabs, detr_r50: out of memory (runs/detr.txt)" in capsys.readouterr().err
    assert main(["sets", "--model", "detr_r50", "--epochs", "2", "--datasets", "crabs"]) == 1
    assert [words for words, _ in runs] == ["detr_r50", MODEL, "detr_r50"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no folder 'nowhere'. Give the folder that contains the datasets."),
        (["empty"], "'empty' contains no folders. Expected one for each dataset, with train/_annotations.coco.json"),
        (["sets/crabs"], "'sets/crabs' is a dataset itself. Give the folder that contains it: '"),
        (["sets", "--datasets", "crab"], "'sets' has no dataset 'crab', only blood cells.v1, crabs, shapes.v2."),
        (["sets", "--model", "dino_r50_coc"], "dino_r50_coc"),
        (
            ["sets", "--model", "quickstart/classifier"],
            "has the ClassificationEvaluator; expected a detector of boxes.",
        ),
        (["sets", "--model", f"{MODEL} train.epochs=9"], "train.epochs=9 is the protocol's. Leave it out"),
        (["sets", "--model", "--init x.pth"], "expected a config first, such as rf_detr_n_coco."),
    ],
)
def test_what_cannot_be_run_is_one_line_and_writes_nothing(arguments, message, sets, runs):
    Path("empty").mkdir()
    model = [] if "--model" in arguments else ["--model", MODEL]
    option, *rest = arguments[1:] or ["--epochs", "2"]
    with pytest.raises(SystemExit) as error:
        main([arguments[0], *model, f"{option}={rest[0]}", *rest[1:]] if option == "--model" else [*arguments, *model])
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not runs and not Path("runs").exists()


def test_records_of_another_protocol_or_of_other_data_are_refused(sets, runs, capsys):
    run("--datasets", "crabs")
    with pytest.raises(SystemExit, match=r"protocol.json' is of another protocol: epochs 2, not 3. Repeat the command"):
        main(["sets", "--model", MODEL, "--epochs", "3"])
    (record,) = Path("runs/rf100/records").glob("*/crabs.json")
    content = json.loads(record.read_text())
    other = content | {"protocol": content["protocol"] | {"max_dets": 100}, "dataset": "copied"}
    record.with_name("copied.json").write_text(json.dumps(other))
    with pytest.raises(SystemExit, match=r"copied.json' is of another protocol: max_dets 100, not 500"):
        run()
    record.with_name("copied.json").write_text("[]")
    with pytest.raises(SystemExit, match=r"copied.json' is not a record that this tool wrote. Remove it"):
        run()
    record.with_name("copied.json").unlink()
    path = sets / "crabs/test" / ANNOTATIONS
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"annotations": content["annotations"][1:]}))
    assert run("--datasets", "crabs") == 1
    assert "its record is of other annotations than 'crabs' has now" in capsys.readouterr().err
    assert len(runs) == 1


def test_a_changed_model_of_the_same_name_is_refused(sets, runs):
    Path("my.py").write_text(
        "from vitkit.configs.start.detection import config as start\n\n\n"
        "def config():\n    return start(size=96, pretrained=False)\n"
    )
    Path("weights.pth").write_bytes(b"a")
    words = "my.py --init weights.pth"
    arguments = ["sets", "--model", words, "--epochs", "2"]
    assert main([*arguments, "--datasets", "crabs"]) == main([*arguments, "--datasets", "crabs"]) == 0
    refused = "the record of crabs is of another model: the config or the weights of 'my.py --init weights.pth' were"
    Path("weights.pth").write_bytes(b"b")
    with pytest.raises(SystemExit, match=refused):
        main(arguments)
    Path("weights.pth").write_bytes(b"a")
    config = Path("my.py").read_text()
    Path("my.py").write_text(config.replace("size=96", "size=128"))
    with pytest.raises(SystemExit, match=refused):
        main(arguments)
    assert main(["sets", "--model", MODEL, "--epochs", "2", "--datasets", "crabs"]) == 0  # of another name
    Path("my.py").write_text(config)
    assert main([*arguments, "--datasets", "crabs", "shapes.v2"]) == 0
    assert runs == [(words, "crabs"), (MODEL, "crabs"), (words, "shapes.v2")]


@pytest.mark.parametrize(
    ("epochs", "every", "number"), [(1, 1, 1), (10, 1, 10), (12, 2, 6), (19, 2, 10), (100, 10, 10)]
)
def test_the_protocol_states_how_often_a_run_is_evaluated(epochs, every, number, sets, runs):
    assert rf100.eval_every(epochs) == every
    assert main(["sets", "--model", MODEL, "--epochs", str(epochs), "--datasets", "crabs"]) == 0
    (record,) = Path("runs/rf100/records").glob("*/crabs.json")
    stated = json.loads(record.read_text())["protocol"]["checkpoint"]
    assert stated == f"the highest AP on valid, of {number} evaluations"
    assert number == sum((epoch % every == 0) or epoch == epochs for epoch in range(1, epochs + 1))


def test_the_supercategory_is_a_class_without_objects_that_counts_in_no_metric(sets):
    dataset = CocoDetection(sets / "crabs/test", sets / "crabs/test" / ANNOTATIONS)
    assert dataset.classes[0] == "shapes" and 0 not in dataset.table.labels
    assert rf100.read_dataset(sets / "crabs").num_classes <= len(dataset.classes) - 1


@pytest.mark.slow
def test_a_model_is_trained_and_scored_and_a_killed_run_goes_on(sets, capfd):
    """With a run that ends in the middle of its training, as if it were killed, before the test."""
    arguments = ["sets", "--model", SMALL, "--datasets", "shapes.v2", "--epochs", "4", "--device", "cpu"]
    main([*arguments, "--out", "whole"])
    (log,) = Path("whole/runs").glob("*/*/log.jsonl")
    (text,) = Path("whole/runs").glob("*/*.txt")
    assert "evaluator.max_dets=500" in json.loads(Path("whole/rf100.json").read_text())["records"][0]["command"]
    config = (log.parent / "config.json").read_text()
    assert "shapes.v2/valid" in config and "shapes.v2/test" not in config  # training cannot read it
    calls = []

    class Interrupted(rf100.Child):
        def finish(self):
            calls.append(self.process.args)
            if len(calls) == 1:
                while not list(Path("killed/runs").glob("*/*/last.pth")):
                    assert self.process.poll() is None
                self.process.kill()
            super().finish()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rf100, "Child", Interrupted)
        assert main([*arguments, "--out", "killed"]) == 1
        assert main([*arguments, "--out", "killed"]) == 0
    assert "--resume" in calls[1]
    first, second = (json.loads(Path(out, "rf100.json").read_text())["records"][0] for out in ("whole", "killed"))
    assert first["AP"] == second["AP"] and first["steps"] == second["steps"] and first["AP"][0] >= 0
    assert text.read_text()
