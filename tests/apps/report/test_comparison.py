"""Models compared on the same images: paired differences, what got better or worse, and what cannot be compared."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.browser import open_page
from helpers.detection_files import CONFIG, evaluator_of, write_data
from helpers.plain_dataset import PlainDataset

import vitkit
from vitkit.apps.report import write_report
from vitkit.apps.report.comparison import Compared, compare, is_better, write_comparison
from vitkit.apps.report.intervals import Difference, Estimate, difference_over_seeds
from vitkit.apps.training.results import score_file
from vitkit.config import load_config, save_config
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.semantic import SemanticEvaluator
from vitkit.evaluation.text import LanguageModelEvaluator
from vitkit.io.segmentations import encode_segmentation
from vitkit.registry import EVALUATORS
from vitkit.tools import compare as compare_tool
from vitkit.tools import test as test_tool


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path, num_images=8)
    truth = json.loads((tmp_path / "truth.json").read_text())
    perfect = [{**{k: a[k] for k in ("image_id", "category_id", "bbox")}, "score": 0.9} for a in truth["annotations"]]
    (tmp_path / "perfect.json").write_text(json.dumps(perfect))
    (tmp_path / "config.py").write_text(CONFIG)
    return tmp_path


def test_differences_are_paired_differences_of_the_metrics(folder):
    first = score_file("results.json", annotations="truth.json")
    second = score_file("perfect.json", annotations="truth.json")
    models = [Compared("a", first.evaluator), Compared("b", second.evaluator)]
    comparison = compare(models)
    for metric, each in comparison.differences[0].items():
        assert np.nan_to_num(each.first, nan=-1.0) == pytest.approx(first.evaluator.metrics[metric])
        assert np.nan_to_num(each.second, nan=-1.0) == pytest.approx(second.evaluator.metrics[metric])
    assert comparison.differences[0]["bbox/AP"].significant
    assert comparison.by_class[0]["cat"]["AP"].second == pytest.approx(1.0)
    assert (comparison.samples[1] == 1.0).all() and (comparison.samples[0] < 1.0).any()
    same = compare([models[0], Compared("c", first.evaluator)]).differences[0]["bbox/AP"]
    assert same.difference == (0.0, 0.0, 0.0) and not same.significant


def seeds_of(*names):
    """Return compared models: of "a0", "b1" ... the recipe is the letter and the seed the number."""
    models = []
    for name, file in names:
        config = dict(model=dict(type=name[0]), train=dict(seed=int(name[1])))
        models.append(Compared(name, score_file(file, annotations="truth.json").evaluator, config))
    return models


def test_recipes_are_compared_over_their_seeds(folder, capsys):
    worse = [{**result, "score": 0.5} for result in json.loads(Path("perfect.json").read_text())[2:]]
    Path("worse.json").write_text(json.dumps(worse))
    runs = [("a0", "results.json"), ("b0", "worse.json"), ("a1", "results.json"), ("b1", "perfect.json")]
    comparison = write_comparison(seeds_of(*runs), "page.html")
    assert comparison.recipes == [[0, 2], [1, 3]] and comparison.seed_warning() is None
    values = [(each["bbox/AP"].first, each["bbox/AP"].second) for each in comparison.differences]
    first, b0, b1 = values[0][0], values[0][1], values[2][1]
    over_seeds = comparison.over_seeds[0]["bbox/AP"]
    assert (over_seeds.first, over_seeds.second) == pytest.approx((first, (b0 + b1) / 2))
    assert over_seeds.difference == pytest.approx(difference_over_seeds([first, first], [b0, b1]))
    assert "means over seeds" in Path("page.html").read_text()
    compare_tool.print_comparison(comparison)
    printed = capsys.readouterr().out
    assert printed.startswith("b0, b1 against a0, a1, means over seeds:\n") and "warning" not in printed
    assert printed.count(" against a0, on ") == 3


def test_one_seed_is_a_warning(folder, capsys):
    runs = [("a0", "results.json"), ("b0", "perfect.json"), ("b1", "perfect.json")]
    comparison = write_comparison(seeds_of(*runs), "page.html")
    assert "One seed of a0: the intervals are those of other images" in comparison.seed_warning()
    assert "One seed of a0" in Path("page.html").read_text()
    compare_tool.print_comparison(comparison)
    printed = capsys.readouterr().out
    assert "warning: One seed of a0:" in printed and "(no interval)" in printed
    only_seeds = compare(seeds_of(("a0", "results.json"), ("a1", "perfect.json")))
    assert only_seeds.seed_warning().startswith("All models differ only in their seeds") and not only_seeds.over_seeds
    # Two checkpoints of a run have equal configs.
    assert compare(seeds_of(("a0", "results.json"), ("a0", "perfect.json"))).recipes == [[0], [1]]


def test_boxes_are_not_compared_with_masks(folder):
    truth = json.loads((folder / "truth.json").read_text())
    rectangle = lambda x, y, w, h: [[x, y, x + w, y, x + w, y + h, x, y + h]]  # noqa: E731
    for annotation in truth["annotations"]:
        annotation["segmentation"] = rectangle(*annotation["bbox"])
    (folder / "masks_truth.json").write_text(json.dumps(truth))
    boxes = json.loads((folder / "perfect.json").read_text())
    sizes = {image["id"]: (image["height"], image["width"]) for image in truth["images"]}
    # Right boxes, and a mask of the top left corner.
    wrong = [
        {**r, "segmentation": encode_segmentation([[0, 0, 2, 0, 2, 2, 0, 2]], *sizes[r["image_id"]])} for r in boxes
    ]
    (folder / "masks.json").write_text(json.dumps(wrong, default=bytes.decode))
    with_masks = score_file("masks.json", annotations="masks_truth.json").evaluator
    with_boxes = score_file("perfect.json", annotations="masks_truth.json").evaluator
    assert with_masks.iou_types != with_boxes.iou_types
    for models in ([with_masks, with_boxes], [with_boxes, with_masks]):
        comparison = compare([Compared(str(k), evaluator) for k, evaluator in enumerate(models)])
        assert all(each.difference.value == 0 for each in comparison.by_class[0]["cat"].values())
        assert not any(name.startswith("segm") for name in comparison.differences[0])


def test_models_with_several_evaluators_are_compared(folder):
    dataset = evaluator_of(folder).dataset
    combined = EVALUATORS.build("CombinedEvaluator", dataset=dataset, evaluator=["CocoEvaluator", "CocoEvaluator"])
    for evaluator in combined.evaluators:
        evaluator.load_results(folder / "results.json")
    combined.compute()
    comparison = write_comparison([Compared("a", combined), Compared("b", combined)], folder / "page.html")
    assert comparison.differences[0]["bbox/AP"].difference == (0.0, 0.0, 0.0)
    assert f"{len(dataset)} images" in (folder / "page.html").read_text()
    assert write_report(combined, folder / "report.html", title="both").read_text().count("<h2>Overall</h2>") == 2


def test_metrics_missing_from_one_model_are_left_out(folder):
    class Maps(PlainDataset):
        annotations = ("semantic",)
        classes, category_ids, image_ids = ["sky", "road"], [0, 1], [1, 2]

        def load_semantic(self, index):
            return np.array([[0, 1], [index, 1]], np.uint8)

    models = []
    for boundary in (False, True, False):
        evaluator = SemanticEvaluator(Maps(), boundary=boundary)
        predictions = [{"semantic": torch.tensor([[0, 1], [0, 1]])}] * 2
        evaluator.update(predictions, [{"image_id": 1}, {"image_id": 2}])
        evaluator.compute()
        models.append(Compared(str(boundary), evaluator))
    comparison = compare(models)
    assert [list(each) for each in comparison.differences] == [["mIoU", "pixel_accuracy", "mean_accuracy"]] * 2
    assert list(comparison.by_class[0]["sky"]) == ["IoU", "accuracy"]


def test_lower_is_better_for_perplexity():
    difference = Difference(9.0, 8.0, Estimate(-1.0, -1.5, -0.5))
    lower = LanguageModelEvaluator.lower_is_better
    assert is_better("perplexity", difference, lower) is True and is_better("bleu", difference, lower) is False
    assert is_better("bleu", Difference(9.0, 8.0, Estimate(-1.0, -1.5, 0.5))) is None


def test_the_tool_compares_results_files_on_a_page(folder, capsys):
    names = ["results.json", "perfect.json"]
    compare_tool.main([*names, "--annotations", "truth.json", "--images", "images", "--out", "out/compared.html"])
    printed = capsys.readouterr().out
    assert "perfect against results, on 8 samples:" in printed and "better" in printed
    page = (folder / "out" / "compared.html").read_text()
    assert "most improved" in page and "data:image/jpeg" in page and "<b>bird" not in page
    compare_tool.main([*names, "--data", "config.py", "--names", "old", "new"])
    assert "new against old" in capsys.readouterr().out
    with open_page(folder / "out" / "compared.html", width=390) as (page, issues):
        assert page.evaluate("document.documentElement.scrollWidth") <= 390 and not issues


def test_compare_is_a_function_of_a_program(folder):
    comparison = vitkit.compare("results.json", "perfect.json", annotations="truth.json", names=["old", "new"])
    assert comparison.names == ["old", "new"] and not (folder / "comparison.html").exists()
    each = comparison.differences[0]["bbox/AP"]
    assert each.second == 1.0 > each.first and each.difference.value == pytest.approx(1.0 - each.first)
    with pytest.raises(ConfigError, match="got 1 models; expected at least two"):
        vitkit.compare("results.json", annotations="truth.json")


def write_run(folder, name, results, **overrides):
    """Write the folder of a run whose predictions are newer than its checkpoint."""
    run = folder / name
    run.mkdir()
    texts = [f"{key}={value}" for key, value in overrides.items()]
    save_config(load_config(folder / "config.py", texts), run / "config.json")
    torch.save({"model": {}}, run / "best.pth")
    shutil.copy(folder / results, run / "results_val.json")
    losses = [{"kind": "train", "step": k, "epoch": float(k), "loss": 1.0 / k, "losses": {}} for k in (1, 2)]
    values = [{"kind": "val", "step": 2, "epoch": 2.0, "metrics": {"bbox/AP": 0.1}}]
    (run / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in losses + values))
    return run


def test_runs_show_how_their_configs_differ_and_their_curves(folder, capsys):
    runs = [write_run(folder, "a", "results.json"), write_run(folder, "b", "perfect.json", **{"train.epochs": 3})]
    compare_tool.main([*map(str, runs), "perfect.json"])
    printed = capsys.readouterr().out
    assert "perfect against a" in printed
    compare_tool.main(list(map(str, runs)))
    printed = capsys.readouterr().out
    assert "train.epochs: 1  ->  3" in printed and "b against a, on 8 samples:" in printed
    page = (folder / "comparison.html").read_text()
    assert "<h2>Configs</h2>" in page and "training curves of a, b" in page


def test_other_images_are_refused_and_counted(folder):
    results = json.loads((folder / "results.json").read_text())
    for result in results:
        result["image_id"] += 5
    (folder / "other.json").write_text(json.dumps(results))
    message = r"results 'other.json': 3 of their 8 images are among the 8 of the data"
    with pytest.raises(SystemExit, match=message):
        compare_tool.main(["results.json", "other.json", "--annotations", "truth.json"])
    with pytest.raises(SystemExit, match=message):
        compare_tool.main(["results.json", "other.json", "--data", "config.py"])
    (folder / "few").mkdir()
    write_data(folder / "few", num_images=3)
    models = [Compared("all", evaluator_of(folder)), Compared("few", evaluator_of(folder / "few"))]
    with pytest.raises(DataError, match=r"all was scored on 8 images and few on 3, of which 3 match"):
        compare(models)


def test_other_tasks_are_refused(folder):
    class Maps(PlainDataset):
        annotations = ("semantic",)
        image_ids, classes, category_ids = [1], ["a", "b"], [1, 2]

        def load_semantic(self, index):
            return np.zeros((4, 4), np.uint8)

    semantic = SemanticEvaluator(Maps())
    semantic.compute()
    with pytest.raises(ConfigError, match="boxes and maps are of different tasks, detection and semantic"):
        compare([Compared("boxes", evaluator_of(folder)), Compared("maps", semantic)])


def test_wrong_command_lines_are_one_line_errors(folder, capsys):
    for argv, message in [
        (["results.json"], "at least two"),
        (["results.json", "perfect.json"], "contains boxes. Pass their annotations"),
        (["results.json", "none.json", "--annotations", "truth.json"], "no file 'none.json'"),
        (["results.json", "images", "--annotations", "truth.json"], "'images' is not a results file"),
        (["results.json", "none", "--data", "config.py"], "'none' is not a results file"),
        (["detr_r51", "none"], "neither a model of the zoo, nor a run"),
        (["results.json", "perfect.json", "--images", "images"], "--images are those of --annotations"),
    ]:
        with pytest.raises(SystemExit) as error:
            compare_tool.main(argv)
        assert message in f"{error.value.code}\n{capsys.readouterr().err}"
    (folder / "cut.json").write_text((folder / "results.json").read_text()[:300])
    with pytest.raises(SystemExit, match=r"cut.json: not valid JSON .* truncated"):
        compare_tool.main(["cut.json", "results.json", "--annotations", "truth.json"])


def test_report_is_made_from_only_results_and_annotations(folder, capsys, caplog):
    scored = ["--eval-only", "results.json", "--annotations", "truth.json", "--report", "alone.html"]
    test_tool.main(scored)
    assert "the report is alone.html" in capsys.readouterr().out and not caplog.records
    page = (folder / "alone.html").read_text()
    assert "Confusion matrix" in page and "data:image/jpeg" not in page
    test_tool.main([*scored, "--images", "images"])
    assert "data:image/jpeg" in (folder / "alone.html").read_text()
    with pytest.raises(SystemExit, match="contains boxes. Pass their annotations"):
        test_tool.main(["--eval-only", "results.json"])


def test_other_objects_of_the_same_images_are_refused(folder):
    truth = json.loads((folder / "truth.json").read_text())
    truth["annotations"][0]["bbox"][0] += 4
    (folder / "moved.json").write_text(json.dumps(truth))
    models = [
        Compared(name, score_file("perfect.json", annotations=f"{name}.json").evaluator) for name in ("truth", "moved")
    ]
    message = r"truth and moved were scored on other objects: those of 1 of 8 images differ, such as those of image"
    with pytest.raises(DataError, match=message):
        compare(models)
