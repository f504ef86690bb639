"""Every Python snippet in a document runs here, or in the test that is named below."""

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.documents import DOCUMENTS, ROOT, name_of
from helpers.grounding_models import build_small
from helpers.video_files import write_video
from PIL import Image
from torch import nn

import vitkit
from vitkit import registry
from vitkit.apps.datasets.synthetic import write_shapes
from vitkit.apps.inference import Predictor, load
from vitkit.data.loading.settings import DataSettings
from vitkit.engine.build import build_model
from vitkit.protocols.model import Model
from vitkit.registry import CRITERIA, DATASETS, MATCHERS
from vitkit.structures import DetectionTarget
from vitkit.text.vocabulary import Vocabulary

SNIPPETS = [
    (name_of(path), number, code)
    for path in DOCUMENTS
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL), 1)
]
REPORT = "vitkit/apps/report"
ELSEWHERE = {
    ("configs/README.md", "# my_data.py"): "tests/data/test_own_dataset.py",
    ("vitkit/data/datasets/README.md", "# my_boxes.py"): "tests/data/test_own_dataset.py",
    ("vitkit/data/transforms/README.md", "# my_transforms.py"): "tests/data/test_own_transforms.py",
    ("vitkit/engine/hooks/README.md", "# trackers.py"): "tests/engine/test_hooks.py",
    ("vitkit/engine/hooks/README.md", "# my_config.py"): "tests/engine/test_hooks.py",
    ("vitkit/apps/report/README.md", "from typing import NamedTuple"): "tests/apps/report/test_own_evaluators.py",
    (
        "vitkit/apps/inference/README.md",
        "from trackers import ByteTrackTracker",
    ): "tests/apps/inference/test_tracking.py",
}
"""Document and first line of a snippet -> the test that runs it, with stand-ins for packages that vitkit lacks."""
TINY_DATA = {"data.train.num_images": 4, "data.val.num_images": 2, "data.num_workers": 0, "data.images_per_gpu": 2}


class TwoObjects(Model):
    """Detects a car and a person in every image."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, images, padding_mask):
        return {"images": images}

    def postprocess(self, outputs, image_sizes):
        boxes = torch.tensor([[0.0, 0.0, 20.0, 20.0], [8.0, 8.0, 30.0, 40.0]])
        fields = dict(scores=torch.tensor([0.95, 0.6]), labels=torch.tensor([0, 1]), boxes_xyxy=boxes)
        return [fields for _ in outputs["images"]]


@pytest.fixture
def names(tmp_path, monkeypatch):
    """Make the files and objects that the snippets name, and return the objects."""
    monkeypatch.chdir(tmp_path)
    for kind in vars(registry).values():
        if isinstance(kind, registry.Registry):
            kind.load_packages()
            own = {k: made for k, made in kind._constructors.items() if not made.__module__.startswith("vitkit_user")}
            monkeypatch.setattr(kind, "_constructors", own)  # without what other tests have registered
    image = np.full((48, 64, 3), 90, np.uint8)
    for name in ("street.jpg", "shapes.png"):
        Image.fromarray(image).save(name)
    monkeypatch.setattr(vitkit, "load", lambda *_: Predictor(TwoObjects(), ["car", "person"]))
    monkeypatch.setattr(vitkit, "train", partial(vitkit.train, device="cpu", **TINY_DATA))
    monkeypatch.setattr(vitkit, "test", partial(vitkit.test, device="cpu"))
    cfg = vitkit.load_config("quickstart/detr")
    return {"vitkit": vitkit, "cfg": cfg}


def run(name, number, names):
    code = next(code for document, n, code in SNIPPETS if (document, n) == (name, number))
    exec(compile(code, f"{name}, snippet {number}", "exec"), names)


@pytest.mark.parametrize(("document", "number", "code"), SNIPPETS, ids=[f"{name} {k}" for name, k, _ in SNIPPETS])
def test_snippet_has_a_test(document, number, code):
    compile(code, f"{document}, snippet {number}", "exec")
    path = ELSEWHERE.get((document, code.splitlines()[0]))
    if path is None:
        assert f'"{document}", {number}' in Path(__file__).read_text(encoding="utf-8"), "no test runs it"
    else:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert document in text or '"README.md"' in text


def test_figure_is_reproduced(names, capsys):
    run("vitkit/apps/reproduction/README.md", 1, names)
    assert re.search(r"bbox/AP 0\.78: 0\.7\d+ \[", capsys.readouterr().out)


def test_readme_predicts_and_trains(names, capsys, monkeypatch):
    monkeypatch.setattr(vitkit, "load", load)
    write_shapes("shapes", num_train=1, num_val=4, image_size=64)
    run("README.md", 1, names)
    assert "000000000004.png: 1 triangle, 1 star" in capsys.readouterr().out and Path("star.png").exists()
    assert "bbox/AP" in names["run"].metrics


def test_own_backbone_is_built_from_its_config(names):
    for key in [("configs/README.md", 1), ("configs/README.md", 2)]:
        _, _, code = next(snippet for snippet in SNIPPETS if snippet[:2] == key)
        Path(re.match(r"# (\w+\.py)\n", code)[1]).write_text(code)
    model = build_model(vitkit.load_config("my_config.py")["model"] | dict(num_classes=2))
    assert model.backbone.feature_info["patches"].channels == 128
    assert model(torch.zeros(1, 3, 64, 64), None)["pred_logits"].shape == (1, 100, 3)


def test_own_head_has_the_methods_that_training_queries_need(names):
    run("configs/README.md", 3, names)
    head = names["MyHead"]({}, 2, num_queries=5, d_model=8)
    assert head.make_queries(torch.zeros(1, 5, 8)).content.shape == (1, 5, 8) and head.learned_channels == 8


def test_own_loss_is_computed(names):
    run("configs/README.md", 5, names)
    spec = names["cfg"]["criterion"] | dict(type="CenterCriterion")
    criterion = CRITERIA.build(spec | dict(weights=spec["weights"] | dict(center=1.0)))
    boxes = torch.tensor([[0.5, 0.5, 0.2, 0.2]])
    assert criterion.box_losses(boxes, boxes + 0.1)["center"] == pytest.approx(0.1 * 2**0.5)


def test_own_matcher_adds_its_cost_to_the_pairs_of_each_image(names):
    run("configs/README.md", 6, names)
    spec = names["cfg"]["criterion"]
    matcher = spec["matcher"] | dict(type="CenterMatcher", cost_labels=0.0, cost_l1=0.0, cost_giou=0.0, cost_center=2.0)
    logits = torch.zeros(2, 3, 4)
    boxes = torch.tensor([[0.2, 0.2], [0.5, 0.5], [0.8, 0.8]])
    layer = dict(pred_logits=logits, pred_boxes=torch.cat([boxes, torch.full((3, 2), 0.1)], 1).expand(2, 3, 4))
    objects = torch.tensor([[0.8, 0.5, 0.1, 0.1], [0.2, 0.6, 0.1, 0.1], [0.5, 0.5, 0.1, 0.1]])
    targets = [dict(labels=torch.zeros(k.numel(), dtype=torch.int64), boxes_cxcywh=objects[k])
               for k in (torch.tensor([0, 1]), torch.tensor([2]))]  # fmt: skip
    costs, terms = MATCHERS.build(matcher).costs([layer], targets)
    expected = 2 * torch.cdist(objects[:, :2], boxes)
    torch.testing.assert_close(costs, expected[None])
    torch.testing.assert_close(terms["center"], expected[None] / 2)
    matches = MATCHERS.build(matcher)([([layer], targets)])
    # The first object is as near to the second query as to the third, the second one nearest to the second.
    pairs = [[of_image[0].tolist(), of_image[1].tolist()] for of_image in matches[0][0]]
    assert pairs == [[[1, 2], [1, 0]], [[1], [0]]]
    criterion = CRITERIA.build(spec | dict(matcher=matcher))
    assert type(criterion.matcher).__name__ == "CenterMatcher"


def test_fields_of_targets_are_in_one_table(capsys):
    help(DetectionTarget)
    shown = [line.strip(" |") for line in capsys.readouterr().out.splitlines() if line.count(" | ") > 1]
    lines = (ROOT / "configs/README.md").read_text(encoding="utf-8").splitlines()
    table = lines[lines.index("| field | type | what |") :]
    assert shown == [line.strip(" |") for line in table if not line.startswith("|---")]
    assert [row.split("`")[1] for row in table[2:]] == list(DetectionTarget.__annotations__)


def test_weights_are_loaded_from_a_file(names, capsys):
    weights = build_model(vitkit.load_config("detr_r50")["model"]).state_dict()
    torch.save({"model": weights}, "detr-r50-e632da11.pth")
    Path("configs").symlink_to(ROOT / "configs")
    run("model_zoo/README.md", 1, names)
    assert capsys.readouterr().out


def test_prompts_are_made_of_the_classes(names):
    names["data"] = dict(train=dict(type="ShapesDetection", num_images=2, image_size=48), num_workers=0)
    run("vitkit/data/datasets/README.md", 1, names)
    names["data"]["prompts"]["phrases"] = {"star": names["data"]["prompts"]["phrases"]["RBC"]}
    data = DataSettings(**names["data"])
    phrases = {p for batch in data.train_loader(data.dataset("train"), seed=0) for p in batch.targets[0]["phrases"]}
    assert "red blood cell" in phrases and "star" not in phrases


def test_augmentation_that_depends_on_the_epoch_is_built(names):
    names["cfg"]["data"]["train"] = dict(type="ShapesDetection", num_images=4, image_size=48)
    names["cfg"]["data"]["val"] = dict(type="ShapesDetection", num_images=2, image_size=48)
    run("vitkit/data/transforms/README.md", 2, names)
    data = DataSettings(**names["cfg"]["data"])
    loader = data.train_loader(data.dataset("train"), seed=0)
    loader.set_position(70)
    assert next(iter(loader)).inputs["images"].shape[2:] == (640, 640)


def test_folder_of_label_images_is_read(names):
    run("vitkit/data/formats/README.md", 1, names)
    root = Path(names["data"]["root"])
    for folder in ("images/train", "labels/train"):
        (root / folder).mkdir(parents=True)
    (root / "classes.txt").write_text("\n".join(f"class {k}" for k in range(11)))
    (root / "train.txt").write_text("a\n")
    Image.new("RGB", (8, 8)).save(root / "images/train/a.jpg")
    Image.new("L", (8, 8), 3).save(root / "labels/train/a.png")
    spec = json.loads(json.dumps(names["data"]["train"]).replace("{root}", str(root)))
    assert DATASETS.build(spec).load_sample(0, 0)["target"]["labels"].tolist() == [3]


def test_training_and_testing_from_python(names):
    run("vitkit/engine/README.md", 1, names)
    assert 0 <= vitkit.test(names["run"].path).metrics["bbox/AP"] <= 1


def test_settings_are_searched(names, monkeypatch):
    optuna = pytest.importorskip("optuna")
    optimize = optuna.Study.optimize
    monkeypatch.setattr(optuna.Study, "optimize", lambda study, objective, n_trials: optimize(study, objective, 2))
    run("vitkit/engine/hooks/README.md", 4, names)
    assert len(names["study"].trials) == 2 and 1e-4 <= names["study"].best_params["lr"] <= 1e-2
    assert all(Path("runs/search", str(number), "best.pth").exists() for number in (0, 1))


def test_own_model_is_exported_as_a_graph(names):
    run("vitkit/apps/export_writing/README.md", 1, names)

    class Mean(names["Heatmap"]):
        def forward(self, images, padding_mask=None):
            return {"heat": images.float().mean(1)}

        def postprocess(self, outputs, image_sizes):
            return list(outputs["heat"])

    graph = Mean().export_graph()
    assert isinstance(graph, names["ImageGraph"]) and graph.outputs == ("heat",)


def test_predictions_of_images_and_videos(names, capsys):
    write_video(Path("drive.mp4"), 3)
    run("vitkit/apps/inference/README.md", 1, names)
    printed = capsys.readouterr().out
    assert "street.jpg: 1 car, 1 person" in printed and printed.count("['car', 'person']") == 3
    assert len(names["cars"]) == 1 and Path("cars.jpg").exists()


def test_objects_that_a_text_names(names, monkeypatch):
    vocabulary = Vocabulary.train("word", ["a dog chases the red ball . car"])
    model = build_small(vocabulary)
    monkeypatch.setattr(
        vitkit, "load", lambda name: Predictor(model, (), transforms=dict(type="EvalResize", short_side=96))
    )
    run("vitkit/apps/inference/README.md", 2, names)


def test_a_model_is_compiled_as_cuda_graphs(names, monkeypatch):
    modes = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, mode: modes.append(mode))
    monkeypatch.setattr(vitkit, "load", lambda name, device, precision: SimpleNamespace(model=TwoObjects()))
    run("vitkit/apps/inference/README.md", 3, names)
    assert modes == ["reduce-overhead"]


def test_decoder_layers_of_a_run_are_scored(names, monkeypatch, capsys):
    monkeypatch.setattr(vitkit, "load", load)
    size = {"data.train.image_size": 64, "data.val.image_size": 64}
    vitkit.train("quickstart/detr", run_dir="runs/detr", train=dict(epochs=1), **size)
    capsys.readouterr()
    run("model_zoo/ablations/README.md", 1, names)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1", "2", "3"]
