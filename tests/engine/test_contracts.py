"""A part of a user's own that lacks something is refused before the first epoch, in one line that names it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import vitkit
from vitkit.apps.training.api import FIGURES
from vitkit.apps.training.checking import check_training
from vitkit.engine import trainer
from vitkit.engine.hooks import Hook
from vitkit.errors import VitkitError
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.heads.detr import DETRHead
from vitkit.losses.set_criterion import SetCriterion
from vitkit.registry import CRITERIA, DATASETS, EVALUATORS, HEADS, HOOKS
from vitkit.tools import train as train_tool
from vitkit.tools.data.make_shapes import main as make_shapes

SIZE = (48, 64)


class Photos(vitkit.Dataset):
    """Four photos with an object each."""

    classes = ("cat", "dog")
    category_ids = (3, 7)
    annotations = ("objects",)
    image_ids = (10, 11, 12, 13)

    def __len__(self):
        return len(self.image_ids)

    def __getitem__(self, index):
        index, _ = index
        return {"image": torch.full((3, *SIZE), 40 * index, dtype=torch.uint8), "target": self.target(index)}

    def target(self, index):
        boxes = torch.tensor([[0.5, 0.5, 0.2, 0.4]])
        sizes = dict(image_size=SIZE, original_size=SIZE)
        return dict(labels=torch.tensor([index % 2]), boxes_cxcywh=boxes, image_id=self.image_ids[index], **sizes)

    def ground_truth(self):
        box = dict(bbox=[25.6, 14.4, 12.8, 19.2], area=245.76, iscrowd=0)
        annotations = [
            dict(id=k + 1, image_id=image_id, category_id=self.category_ids[k % 2], **box)
            for k, image_id in enumerate(self.image_ids)
        ]
        categories = [dict(id=k, name=name) for k, name in zip(self.category_ids, self.classes)]
        return dict(images=[dict(id=k) for k in self.image_ids], annotations=annotations, categories=categories)


class WithoutTuples(Photos):
    images = ["a", "b", "c", "d"]

    def __getitem__(self, index):
        return self.images[index]


class FloatImages(Photos):
    def __getitem__(self, index):
        return super().__getitem__(index) | {"image": torch.rand(3, *SIZE)}


class ArrayImages(Photos):
    def __getitem__(self, index):
        return super().__getitem__(index) | {"image": np.zeros((*SIZE, 3), np.uint8)}


class PixelBoxes(Photos):
    def target(self, index):
        return super().target(index) | dict(boxes_cxcywh=torch.tensor([[32.0, 24.0, 12.8, 19.2]]))


class WithoutBoxes(Photos):
    def target(self, index):
        return {name: value for name, value in super().target(index).items() if name != "boxes_cxcywh"}


class WithoutOriginalSize(Photos):
    def target(self, index):
        return {name: value for name, value in super().target(index).items() if name != "original_size"}


class WithoutTruth(Photos):
    ground_truth = vitkit.Dataset.ground_truth


class WithoutIds(Photos):
    category_ids = None


class WithoutArea(Photos):
    def ground_truth(self):
        truth = super().ground_truth()
        return truth | {"annotations": [{**entry, "area": 0} for entry in truth["annotations"]][:1] + [{"id": 2}]}


class OtherIds(Photos):
    def ground_truth(self):
        return super().ground_truth() | {"images": [dict(id=k) for k in (1, 2, 3, 4)]}


class OtherNames(Photos):
    def ground_truth(self):
        return super().ground_truth() | {"categories": [dict(id=3, name="dog"), dict(id=7, name="cat")]}


class ShiftedIds(Photos):
    def target(self, index):
        return super().target(index) | dict(image_id=self.image_ids[index] + 1)


class SameId(Photos):
    def target(self, index):
        return super().target(index) | dict(image_id=self.image_ids[0])


class CornerBoxes(Photos):
    def target(self, index):
        return super().target(index) | dict(boxes_cxcywh=torch.tensor([[0.3, 0.3, 0.8, 0.9]]))


class FloatLabels(Photos):
    def target(self, index):
        return super().target(index) | dict(labels=torch.tensor([]), boxes_cxcywh=torch.zeros(0, 4))


class TupleSamples(Photos):
    def __getitem__(self, index):
        return tuple(super().__getitem__(index).values())


class BoxlessHead(DETRHead):
    def forward(self, *args, **kwargs):
        return {"pred_logits": super().forward(*args, **kwargs)["pred_logits"]}


class TupleHead(DETRHead):
    def forward(self, *args, **kwargs):
        return tuple(super().forward(*args, **kwargs).values())


class VectorLoss(SetCriterion):
    def forward(self, outputs, targets):
        return {**super().forward(outputs, targets), "extra": outputs["pred_boxes"].mean((1, 2))}


class SumLoss(SetCriterion):
    def forward(self, outputs, targets):
        return sum(super().forward(outputs, targets).values())


class UndeclaredLoss(SetCriterion):
    def forward(self, outputs, targets):
        return {**super().forward(outputs, targets), "depth": outputs["pred_depth"].mean()}


class ListMetrics(CocoEvaluator):
    def compute(self):
        return list(super().compute().values())


class TextMetrics(CocoEvaluator):
    def compute(self):
        return {**super().compute(), "verdict": "good"}


class TablelessMetrics(CocoEvaluator):
    def table(self):
        pass


class MistypedMetrics(CocoEvaluator):
    def update(self, predictions, targets):
        self.predictions = self.predictons + list(predictions)


class Float32Metrics(CocoEvaluator):
    def compute(self):
        return {name: np.float32(value) for name, value in super().compute().items()}


class Baseless:
    def after_step(self, run):
        pass


class ShortHook(Hook):
    def after_step(self, run):
        pass


class UncalledHook(Hook):
    def before_step(self, run):
        pass


CASES = {
    WithoutTuples: r"data.train: dataset WithoutTuples\[0, 0\] raises TypeError: list indices .* \(test_contracts\.py",
    FloatImages: r"data.train: dataset FloatImages: its images are Tensor, shape \(3, 48, 64\), torch.float32; expect",
    ArrayImages: r"data.train: dataset ArrayImages: its images are ndarray, shape \(48, 64, 3\), uint8; expected a ui",
    PixelBoxes: r"data.train: dataset PixelBoxes: target has boxes_cxcywh from 12\.8 to 32; expected .* in 0\.\.1 of ",
    WithoutBoxes: r"data.train: dataset WithoutBoxes: its targets have 'labels', .*, but not 'boxes_cxcywh'\. See cla",
    WithoutOriginalSize: r"data.val: dataset WithoutOriginalSize: its targets have .*, but not 'original_size'\. See ",
    WithoutTruth: r"dataset WithoutTruth has no ground_truth\(\), which evaluator CocoEvaluator needs\. See class Dat",
    WithoutIds: r"dataset WithoutIds has no category_ids, which evaluator CocoEvaluator needs\. See class Dataset in ",
    WithoutArea: r"dataset WithoutArea: ground_truth\(\): \{'id': 2\} of 'annotations' has no 'image_id'\. See Datase",
    OtherIds: r"dataset OtherIds: ground_truth\(\) does not list image_id 1\d of the dataset\. See Dataset\.ground_tr",
    OtherNames: r"dataset OtherNames: ground_truth\(\) calls category 3 'dog', its classes call it 'cat'\. See Dataset",
    ShiftedIds: r"data.val: dataset ShiftedIds: sample 0 has image_id 11, and is 10 in its image_ids; predictions w",
    SameId: r"data.val: dataset SameId: sample 1 has image_id 10, and is 11 in its image_ids; predictions would be ",
    FloatLabels: r"image 10: its target has labels torch.float32 \(0,\) and boxes_cxcywh \(0, 4\); expected tens",
    TupleSamples: r"data.train: dataset TupleSamples: its samples are tuple; expected a dict with 'image' and 'target",
    BoxlessHead: r"head BoxlessHead: returns 'pred_logits', but criterion SetCriterion also needs 'pred_boxes'\. See ",
    TupleHead: r"head TupleHead: returns tuple; expected a dict of outputs by name\. See class Head in vitkit/protoco",
    VectorLoss: r"criterion VectorLoss: loss 'extra' has shape \(2,\); expected a scalar tensor\. See class Criteri",
    SumLoss: r"criterion SumLoss: returns tensor\(.*\); expected a dict of losses by name\. See class Criterion in vi",
    UndeclaredLoss: r"KeyError: 'pred_depth' \(test_contracts\.py, line \d+\): the first validation batch, or what th",
    ListMetrics: r"evaluator ListMetrics\.compute: returns \[.*; expected a dict of metrics by name\. See class Evalua",
    TextMetrics: r"evaluator TextMetrics\.compute: 'verdict' is 'good'; expected a number\. See class Evaluator in vi",
    TablelessMetrics: r"evaluator TablelessMetrics\.table: returns None; expected a text\.",
    MistypedMetrics: r"AttributeError: 'MistypedMetrics' object has no attribute 'predictons' \(test_contracts\.py",
    Baseless: r"hook Baseless: does not derive from Hook\. Write: class Baseless\(Hook\)\. See class Hook in vitkit/p",
    ShortHook: r"hook ShortHook\.after_step: is called with \(run, step\): too many positional arguments\. See class H",
    UncalledHook: r"hook UncalledHook\.before_step: is never called\. Did you mean 'before_epoch'.* See class Hook in",
}


class TrainingLoss(SetCriterion):
    training_only = True

    def forward(self, outputs, targets):
        assert self.training
        return super().forward(outputs, targets)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Register the parts in copies of the registries; return a config of a small DETR on `Photos`."""
    monkeypatch.chdir(tmp_path)
    for registry in (DATASETS, HEADS, CRITERIA, EVALUATORS, HOOKS):
        registry.load_packages()
        monkeypatch.setattr(registry, "_constructors", dict(registry._constructors))
    for part in (Photos, Float32Metrics, TrainingLoss, *CASES):
        kinds = {Photos: DATASETS, DETRHead: HEADS, SetCriterion: CRITERIA, CocoEvaluator: EVALUATORS}
        kind = next((registry for base, registry in kinds.items() if issubclass(part, base)), HOOKS)
        kind.register(part)
    overrides = [
        *("model.neck.out_channels=32", "model.head.d_model=32", "model.head.num_heads=2", "model.head.d_ffn=64"),
        *("model.head.num_encoder_layers=1", "model.head.num_decoder_layers=1", "model.num_queries=4"),
        *("data.train=Photos", "data.val=Photos", "data.images_per_gpu=2", "data.val_images_per_gpu=2"),
        *("train.epochs=1", "schedule.warmup_steps=0"),
    ]
    return "quickstart/detr", overrides


def _using(part):
    if issubclass(part, Photos):
        return [f"data.train={part.__name__}", f"data.val={part.__name__}"]
    if issubclass(part, DETRHead):
        return [f"model.head.type={part.__name__}"]
    if issubclass(part, SetCriterion):
        return [f"criterion.type={part.__name__}"]
    if issubclass(part, CocoEvaluator):
        return [f"evaluator.type={part.__name__}"]
    return [f"train.hooks=['{part.__name__}']"]


@pytest.mark.parametrize("part", CASES, ids=lambda part: part.__name__)
def test_a_part_that_lacks_something_is_named_before_training(part, config, monkeypatch):
    def no_step(*args):
        raise AssertionError("trained a step")

    monkeypatch.setattr(trainer, "next_step", no_step)
    name, overrides = config
    with pytest.raises(VitkitError, match=CASES[part]) as error:
        trainer.run_training(
            vitkit.load_config(name, [*overrides, *_using(part)]), torch.device("cpu"), default=Path("run"), **FIGURES
        )
    assert "\n" not in str(error.value)
    assert not Path("run").exists()  # and nothing was left behind


@pytest.mark.parametrize("part", [WithoutTruth, BoxlessHead, VectorLoss, ShortHook], ids=lambda part: part.__name__)
def test_check_names_the_part_and_writes_nothing(part, config, capsys):
    name, overrides = config
    common = [name, *overrides, "--check", "--device", "cpu"]
    train_tool.main(common)
    assert "checked: every part has what the others ask of it" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="^error: " + CASES[part]):
        train_tool.main([*common, *_using(part)])
    assert list(Path().iterdir()) == []


def test_the_parts_train_and_evaluate(config):
    name, overrides = config
    run = vitkit.train(vitkit.load_config(name, overrides), run_dir="run", device="cpu")
    assert {"bbox/AP", "loss"} <= run.metrics.keys()


def test_an_evaluation_has_no_loss_of_a_criterion_that_only_trains(config):
    name, overrides = config
    run = vitkit.train(vitkit.load_config(name, [*overrides, *_using(TrainingLoss)]), run_dir="run", device="cpu")
    assert "bbox/AP" in run.metrics and "loss" not in run.metrics


def test_metrics_may_be_numpys_numbers(config):
    name, overrides = config
    overrides = [*overrides, *_using(Float32Metrics)]
    run = vitkit.train(vitkit.load_config(name, overrides), run_dir="run", device="cpu")
    assert all(type(value) is float for value in run.metrics.values())
    vitkit.train(resume="run", device="cpu", train=dict(epochs=2))  # its checkpoint can be read


def test_boxes_that_seem_to_be_corners_are_named(config, caplog):
    name, overrides = config
    DATASETS.register(CornerBoxes)
    said = "data.train: dataset CornerBoxes: the boxes_cxcywh of sample 0 leave its image"
    for part in (Photos, CornerBoxes):
        check_training(vitkit.load_config(name, [*overrides, *_using(part)]), torch.device("cpu"))
        assert (said in caplog.text) == (part is CornerBoxes)


def test_a_metric_that_an_own_evaluator_lacks_is_named_before_training(config, caplog):
    name, overrides = config
    overrides = [*overrides, *_using(Float32Metrics), "train.best_metric=recal"]
    check_training(vitkit.load_config(name, overrides), torch.device("cpu"))
    assert "train.best_metric=recal: not among the metrics of the first batch" in caplog.text


def test_the_lowest_value_is_the_best_if_an_own_evaluator_says_so(config):
    values = iter([10.0, 9.0, 5.0, 3.0])  # before training, and after each epoch

    class Errors(CocoEvaluator):
        extra_metrics = ("mean_error",)
        lower_is_better = ("mean_error",)

        def _compute(self):
            return super()._compute() | {"mean_error": next(values)}

    EVALUATORS.register(Errors)
    name, overrides = config
    overrides = [*overrides, *_using(Errors), "train.epochs=3", "train.best_metric=mean_error", "train.patience=1"]
    run = vitkit.train(vitkit.load_config(name, overrides), run_dir="run", device="cpu")
    assert len(run.history) == 3
    assert torch.load("run/best.pth", weights_only=True)["progress"]["epoch"] == 3


def test_images_with_more_objects_than_queries_are_named_before_training(tmp_path, caplog):
    make_shapes(["--out", str(tmp_path), "--num-train", "4", "--num-val", "2", "--image-size", "64"])
    file = tmp_path / "annotations/instances_train2017.json"
    content = json.loads(file.read_text())
    box = dict(image_id=content["images"][3]["id"], category_id=1, bbox=[8, 8, 9, 9], area=81, iscrowd=0)
    content["annotations"] += [dict(box, id=10**6 + k, segmentation=[]) for k in range(60)]
    file.write_text(json.dumps(content))
    split = "type='CocoDetection',bad_boxes='drop'"
    overrides = [
        f"data.{name}=dict({split},images='{tmp_path}/{name}2017',annotations='{tmp_path}/annotations/instances_{name}2017.json')"
        for name in ("train", "val")
    ]
    overrides += ["data.num_workers=0", "model.num_queries=20"]
    check_training(vitkit.load_config("quickstart/detr", overrides), torch.device("cpu"))
    assert re.search(r"data.train: at most 6\d objects in an image, 20 queries: in 1 image some can", caplog.text)
    caplog.clear()
    check_training(
        vitkit.load_config("quickstart/detr", [*overrides[:-1], "model.num_queries=90"]), torch.device("cpu")
    )
    assert "queries" not in caplog.text
