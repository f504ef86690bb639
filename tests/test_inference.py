"""vitkit.inference: from trained weights to predictions that draw themselves."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit import build_dataset, build_model, load_config
from vitkit.checkpoint import save_checkpoint
from vitkit.config import save_config
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.inference import Prediction, Predictor, load, trained_classes

TINY = """
from vitkit.configs.quickstart.detr import config as quickstart


def config():
    cfg = quickstart()
    cfg["model"]["neck"]["out_channels"] = 32
    cfg["model"]["head"].update(d_model=32, num_heads=2, d_ffn=64, num_encoder_layers=1, num_decoder_layers=1)
    cfg["data"]["val"]["transforms"] = dict(type="EvalResize", short_side=64, max_size=96)
    return cfg
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run, whose weights are random; the config beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(TINY)
    config = load_config("tiny.py")
    torch.manual_seed(0)
    classes = ["cat", "dog", "cow"]
    model = build_model(config["model"], classes=classes)
    save_checkpoint(tmp_path / "run" / "best.pth", {"model": model.state_dict(), "classes": classes})
    save_config(config, tmp_path / "run" / "config.json")
    return tmp_path / "run"


def image(height=40, width=56, seed=0):
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


def test_a_run_predicts_in_pixels_of_each_image(run):
    predictor = load(run)
    assert predictor.classes == ["cat", "dog", "cow"]
    small, large = predictor.predict([image(), image(120, 80)])
    assert (small.name, large.name, small.task) == ("image_0", "image_1", "detection")
    # The same network outputs would give boxes in other pixels.
    direct = predictor.model(**predictor.prepare([image()]).inputs)
    expected = predictor.model.postprocess(direct, [(40, 56)])[0]
    assert torch.allclose(small.fields["boxes_xyxy"], expected["boxes_xyxy"], atol=1e-5)
    assert large.fields["boxes_xyxy"].max() > small.fields["boxes_xyxy"].max()
    assert predictor.prepare([image(120, 80)]).inputs["images"].shape == (1, 3, 96, 64)


def test_config_and_weights_are_the_same_as_their_run(run):
    by_run, by_config = load(run), load("tiny.py", run / "best.pth")
    a, b = (p.predict([image()])[0].fields["scores"] for p in (by_run, by_config))
    assert torch.equal(a, b)
    assert str(by_config.report).startswith("loaded ")


def test_files_arrays_and_pillow_images_are_the_same_picture(run):
    Image.fromarray(image()).save("a.png")
    predictions = load(run).predict(["a.png", image(), Image.fromarray(image())], batch_size=3)
    assert [p.name for p in predictions] == ["a.png", "image_1", "image_2"]
    for other in predictions[1:]:
        assert torch.equal(predictions[0].fields["scores"], other.fields["scores"])


def test_images_are_loaded_a_batch_at_a_time(run):
    taken = []

    def pictures():
        for k in range(5):
            taken.append(k)
            yield image(seed=k)

    stream = load(run).stream(pictures(), batch_size=2)
    next(stream)
    assert taken == [0, 1]
    assert [p.name for p in stream] == ["image_1", "image_2", "image_3", "image_4"]


def test_half_precision_is_near_full_precision(run):
    full, half = (load(run, precision=p).predict([image()])[0].fields for p in ("fp32", "bf16"))
    assert half["boxes_xyxy"].dtype == torch.float32
    assert torch.allclose(full["boxes_xyxy"], half["boxes_xyxy"], atol=1.0)


def test_json_holds_objects_above_the_threshold_best_first():
    fields = {
        "scores": torch.tensor([0.2, 0.9, 0.6]),
        "labels": torch.tensor([0, 1, 0]),
        "boxes_xyxy": torch.tensor([[0.0, 0, 1, 1], [1.0, 2, 3, 4], [5.0, 6, 7, 8]]),
        "masks": torch.zeros(3, 40, 56, dtype=torch.bool),
    }
    fields["masks"][1, :2, :3] = True
    entry = Prediction("a", image(), fields, ["cat", "dog"]).as_json(score_threshold=0.5)
    assert [(o["class"], round(o["score"], 3)) for o in entry["objects"]] == [("dog", 0.9), ("cat", 0.6)]
    assert entry["objects"][0]["box_xyxy"] == [1, 2, 3, 4] and entry["objects"][0]["mask"]["size"] == [40, 56]
    assert (entry["width"], entry["height"]) == (56, 40)
    json.dumps(entry)


def test_maps_and_classes_become_json():
    panoptic = torch.zeros(4, 5, dtype=torch.int32)
    panoptic[:2] = 7
    fields = {
        "panoptic": panoptic,
        "segments_info": [dict(id=7, label=1, score=0.5)],
        "semantic": (panoptic > 0).long(),
        "class_scores": torch.tensor([0.25, 0.75]),
    }
    entry = Prediction("a", np.zeros((4, 5, 3), np.uint8), fields, ["sky", "sea"]).as_json()
    assert entry["segments"] == [{"id": 7, "class": "sea", "score": 0.5, "area": 10}]
    assert entry["areas"] == {"sea": 0.5, "sky": 0.5}
    assert [c["class"] for c in entry["classes"]] == ["sea", "sky"]


def test_every_task_draws_itself(tmp_path):
    panoptic = torch.ones(40, 56, dtype=torch.int32)
    fields = {
        "panoptic": panoptic,
        "segments_info": [dict(id=1, label=1, score=0.5)],
        "semantic": panoptic.long(),
        "scores": torch.tensor([0.9]),
        "labels": torch.tensor([1]),
        "boxes_xyxy": torch.tensor([[1.0, 2, 30, 35]]),
        "masks": torch.ones(1, 40, 56, dtype=torch.bool),
        "class_scores": torch.tensor([0.25, 0.75]),
    }
    prediction = Prediction("a", image(), fields, ["sky", "sea"])
    assert prediction.task == "panoptic"
    drawn = [prediction.draw(task=t) for t in ("panoptic", "semantic", "instance", "detection", "classification")]
    assert all(picture.dtype == np.uint8 and picture.shape[1] == 8 * 56 for picture in drawn)
    assert len({picture.tobytes() for picture in drawn}) >= 4
    prediction.save(tmp_path / "new" / "a.jpg", task="detection")
    assert Image.open(tmp_path / "new" / "a.jpg").size == (8 * 56, 8 * 40)
    del fields["masks"]
    with pytest.raises(ConfigError, match="task 'instance': the model does not predict it"):
        prediction.draw(task="instance")


@pytest.mark.parametrize(
    ("source", "weights", "error", "message"),
    [
        ("detr_r51", None, ConfigError, r"'detr_r51' is neither a config .* Did you mean 'detr_r50'"),
        ("tiny.py", None, ConfigError, "a config has no weights. Give a checkpoint, or the folder of a run"),
        ("tiny.py", "none.pth", CheckpointError, "no checkpoint 'none.pth'"),
        (".", None, ConfigError, "'.' holds no run: expected config.json and best.pth or last.pth"),
        ("tinny.py", "run/best.pth", ConfigError, "no config file 'tinny.py'. Did you mean 'tiny.py'"),
    ],
)
def test_what_cannot_be_loaded_is_an_error_that_helps(run, source, weights, error, message):
    with pytest.raises(error, match=message):
        load(source, weights)


def test_what_is_no_picture_is_an_error(run):
    predictor = load(run)
    (run / "text.jpg").write_text("no picture")
    for picture, message in (
        ("none.jpg", "no file 'none.jpg'"),
        (run / "text.jpg", "text.jpg"),
        (np.zeros((4, 4), np.uint8), r"image_0: got uint8 \(4, 4\); expected a file"),
        (np.zeros((4, 4, 3), np.float32), r"got float32"),
        (np.zeros((0, 4, 3), np.uint8), "has no pixels"),
        (None, "got NoneType"),
    ):
        with pytest.raises(DataError, match=message):
            predictor.predict([picture])


def test_a_model_that_predicts_nothing_of_images_is_an_error():
    with pytest.raises(ConfigError, match=r"Linear predicts nothing of images: it has no postprocess\(\)"):
        Predictor(torch.nn.Linear(1, 1), ["a"])


def test_classes_come_from_the_checkpoint_then_the_config_then_what_is_usual(tmp_path):
    path = tmp_path / "official.pth"
    torch.save({"model": {"w": torch.zeros(1)}}, path)
    stated = {"model": "DETR", "data": {"val": {"type": "SemanticFolder", "classes": ["sky", "sea"]}}}
    assert trained_classes(path, stated).classes == ["sky", "sea"]
    assert len(trained_classes(path, {"model": "DETR"}).classes) == 80
    panoptic = trained_classes(path, {"model": "DETR", "data": {"val": {"type": "CocoPanoptic"}}})
    assert len(panoptic.classes) == 133 and sum(panoptic.things) == 80
    assert trained_classes(path, {"model": {"type": "Classifier"}}).classes[0].startswith("tench")
    streets = {"type": "CityscapesPanoptic", "classes": ["sky", "car", "road"], "things": ["car"]}
    known = trained_classes(path, {"model": "DETR", "data": {"val": streets}})
    assert known == (["sky", "car", "road"], [False, True, False])
    known = trained_classes(path, {"model": "DETR", "data": {"val": streets | {"task": "instance"}}})
    assert known == (["car"], [True])
    torch.save({"model": {"w": torch.zeros(1)}, "classes": ["cat"], "things": [False]}, path)
    assert trained_classes(path, stated) == (["cat"], [False])


def test_panoptic_models_know_which_classes_have_instances(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(
        "from vitkit.configs.quickstart.mask2former_panoptic import config as quickstart\n\n\n"
        "def config():\n    return quickstart()\n"
    )
    config = load_config("config.py")
    dataset = build_dataset(dict(type="ShapesSegmentation", num_images=1))
    model = build_model(config["model"], classes=dataset.classes, things=dataset.things)
    saved = {"model": model.state_dict(), "classes": dataset.classes, "things": dataset.things}
    save_checkpoint(tmp_path / "weights.pth", saved)
    predictor = load("config.py", "weights.pth")
    assert predictor.model.things == dataset.things and not all(dataset.things)
    assert predictor.predict([dataset.load_image(0)])[0].task == "panoptic"
