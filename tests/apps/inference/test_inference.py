"""vitkit.apps.inference: from trained weights to predictions."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit import build_dataset, build_model, load_config
from vitkit.apps.export_reading.settings import ExportSettings
from vitkit.apps.inference import Prediction, Predictor, find_model, is_config_only, load
from vitkit.apps.inference.trained_classes import TrainedOn, read_trained_classes
from vitkit.config import config_names, save_config
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.io.coco_classes import COCO_CATEGORY_IDS, COCO_CLASSES
from vitkit.structures import ScoreThresholds
from vitkit.weights import read_checkpoint, save_checkpoint

pytestmark = pytest.mark.smoke

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
    """Return the folder of a run with random weights; its config is beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(TINY)
    config = load_config("tiny.py")
    torch.manual_seed(0)
    classes = ["cat", "dog", "cow"]
    model = build_model(config["model"], classes=classes)
    state = {"model": model.state_dict(), "classes": classes, "config": json.dumps(config)}
    save_checkpoint(tmp_path / "run" / "best.pth", state)
    save_checkpoint(tmp_path / "run" / "last.pth", state)
    save_config(config, tmp_path / "run" / "config.json")
    return tmp_path / "run"


def test_a_folder_with_only_a_checkpoint_is_loaded(run, monkeypatch):
    (run / "config.json").unlink()
    monkeypatch.chdir(run)
    assert load(".").classes == ["cat", "dog", "cow"]
    (run / "best.pth").unlink()
    assert load(".").classes == ["cat", "dog", "cow"]


def image(height=40, width=56, seed=0):
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


def test_run_predicts_boxes_in_pixels_of_each_image(run):
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


@pytest.mark.parametrize("count", [3, 60])
def test_number_of_detections_is_an_override(count):
    model = load("shapes_dino", overrides=[f"model.num_detections={count}"])
    assert len(model(image()).fields["scores"]) == count


def test_config_and_weights_predict_the_same_as_their_run(run):
    by_run, by_config = load(run), load("tiny.py", run / "best.pth")
    a, b = (p.predict([image()])[0].fields["scores"] for p in (by_run, by_config))
    assert torch.equal(a, b)
    assert str(by_config.report).startswith("loaded ")


def test_every_name_of_a_model_finds_the_same_config_and_weights(run):
    named = {
        "folder": find_model("run"),
        "checkpoint": find_model("run/last.pth"),
        "config and weights": find_model("tiny.py", "run/best.pth"),
        "config and run": find_model("tiny.py", "run"),
        "saved config": find_model("run/config.json", "run/best.pth"),
    }
    assert {str(model.weights) for model in named.values()} == {"run/best.pth", "run/last.pth"}
    for name, model in named.items():
        assert json.dumps(model.config) == json.dumps(named["folder"].config), name
    assert load("run/last.pth").classes == ["cat", "dog", "cow"]
    changed = find_model("run/last.pth", overrides=["train.epochs=77"])
    assert changed.config["train"]["epochs"] == 77


def test_installed_configs_and_the_zoo_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(find_model("detr_r50").weights) == "detr_r50"
    assert find_model("detr_r50", "mine.pth").weights.name == "mine.pth"
    for name in ("quickstart/detr", "configs/quickstart/detr.py"):
        model = find_model(name)
        assert model.weights is None and model.config["model"]["type"] == "DETR"
    assert load_config("quickstart/detr") == load_config("configs/quickstart/detr.py")
    assert {"detr_r50", "quickstart/detr"} <= set(config_names()) and not any("parts" in n for n in config_names())
    assert [is_config_only(n) for n in ("detr_r50", "quickstart/detr", "tiny.py")] == [False, True, True]
    with pytest.raises(ConfigError, match="no config file 'detr_r5O', nor an installed config.* mean 'detr_r50'"):
        load_config("detr_r5O")
    with pytest.raises(
        ConfigError, match="'shapes_dino': that is a trained model.*'quickstart/dino'.*--init shapes_dino"
    ):
        load_config("shapes_dino")


def test_config_of_a_checkpoint_imports_only_trusted_code(run):
    Path("theirs.py").write_text("print('ran')")
    config = load_config("tiny.py") | {"imports": [str(Path("theirs.py").resolve())]}
    save_checkpoint("foreign.pth", {"model": {"w": torch.zeros(1)}, "config": json.dumps(config)})
    with pytest.raises(ConfigError, match="foreign.pth.*trust"):
        find_model("foreign.pth")


def test_files_arrays_and_pillow_images_are_the_same_image(run):
    Image.fromarray(image()).save("a.png")
    predictions = load(run).predict(["a.png", image(), Image.fromarray(image())], batch_size=3)
    assert [p.name for p in predictions] == ["a.png", "image_1", "image_2"]
    for other in predictions[1:]:
        assert torch.equal(predictions[0].fields["scores"], other.fields["scores"])


def test_images_are_loaded_a_batch_at_a_time(run):
    taken = []

    def draw_images():
        for k in range(5):
            taken.append(k)
            yield image(seed=k)

    stream = load(run).stream(draw_images(), batch_size=2)
    next(stream)
    assert taken == [0, 1]
    assert [p.name for p in stream] == ["image_1", "image_2", "image_3", "image_4"]


def test_half_precision_is_close_to_full_precision(run):
    full, half = (load(run, precision=p).predict([image()])[0].fields for p in ("fp32", "bf16"))
    assert half["boxes_xyxy"].dtype == torch.float32
    assert torch.allclose(full["boxes_xyxy"], half["boxes_xyxy"], atol=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(precision="float32"), "precision='float32': expected fp32, bf16, fp16 or auto"),
        (dict(device="gpu"), "device=gpu: PyTorch finds no such device here; expected cpu"),
        (dict(device="cuda:99"), "device=cuda:99: PyTorch finds no such device here"),
    ],
)
def test_unknown_precisions_and_devices_are_refused(run, options, message):
    with pytest.raises(ConfigError, match=message):
        load(run, **options)


def test_arguments_of_another_kind_are_refused(run):
    predictor = load(run)
    with pytest.raises(ConfigError, match="threshold 'a': expected a score, 0 to 1"):
        predictor(image(), threshold="a")
    for threshold in (torch.tensor(0.5), np.array(0.5), np.float32(0.5)):
        assert predictor(image(), threshold=threshold).thresholds.overall == 0.5
    with pytest.raises(ConfigError, match="tiles='x': expected a number of pixels, or a Tiling"):
        predictor(image(), tiles="x")
    assert len(predictor(image(), tiles=np.int64(400))) == len(predictor(image()))
    with pytest.raises(ConfigError, match=r"export: got size '64x64'; expected \(height, width\)"):
        ExportSettings(size="64x64")
    with pytest.raises(ConfigError, match=r"export: got size 64; expected \(height, width\)"):
        ExportSettings(size=64)
    assert load(run, device=None).device.type == "cpu"


def test_json_lists_objects_above_the_threshold_best_first():
    fields = {
        "scores": torch.tensor([0.2, 0.9, 0.6]),
        "labels": torch.tensor([0, 1, 0]),
        "boxes_xyxy": torch.tensor([[0.0, 0, 1, 1], [1.0, 2, 3, 4], [5.0, 6, 7, 8]]),
        "masks": torch.zeros(3, 40, 56, dtype=torch.bool),
    }
    fields["masks"][1, :2, :3] = True
    entry = Prediction("a", image(), fields, ["cat", "dog"]).to_json(score_threshold=0.5)
    assert [(o["class"], round(o["score"], 3)) for o in entry["objects"]] == [("dog", 0.9), ("cat", 0.6)]
    assert entry["objects"][0]["box_xyxy"] == [1, 2, 3, 4] and entry["objects"][0]["mask"]["size"] == [40, 56]
    assert (entry["width"], entry["height"]) == (56, 40)
    json.dumps(entry)


def test_maps_and_classes_are_written_as_json():
    panoptic = torch.zeros(4, 5, dtype=torch.int32)
    panoptic[:2] = 7
    fields = {
        "panoptic": panoptic,
        "segments_info": [dict(id=7, label=1, score=0.5)],
        "semantic": (panoptic > 0).long(),
        "class_scores": torch.tensor([0.25, 0.75]),
    }
    entry = Prediction("a", np.zeros((4, 5, 3), np.uint8), fields, ["sky", "sea"]).to_json()
    assert entry["segments"] == [{"id": 7, "class": "sea", "score": 0.5, "area": 10}]
    assert entry["areas"] == {"sea": 0.5, "sky": 0.5}
    assert [c["class"] for c in entry["classes"]] == ["sea", "sky"]


def test_predictions_of_every_task_can_be_drawn(tmp_path):
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
    assert all(photo.dtype == np.uint8 and photo.shape[1] == 8 * 56 for photo in drawn)
    assert len({photo.tobytes() for photo in drawn}) >= 4
    prediction.save(tmp_path / "new" / "a.jpg", task="detection")
    assert Image.open(tmp_path / "new" / "a.jpg").size == (8 * 56, 8 * 40)
    del fields["masks"]
    with pytest.raises(ConfigError, match="task 'instance': the model does not predict it"):
        prediction.draw(task="instance")


@pytest.mark.parametrize(
    ("source", "weights", "error", "message"),
    [
        ("detr_r51", None, ConfigError, r"'detr_r51' is neither a model of the zoo.* Did you mean 'detr_r50'"),
        ("a" * 300, None, ConfigError, "'a{300}' is neither a model of the zoo"),
        ("rum", None, ConfigError, r"'rum' is neither a model of the zoo.* In '.' there is 'run'. Known: "),
        ("run/best.ckpt", None, ConfigError, r"^no file or folder 'run/best.ckpt'. In 'run' there is 'best.pth'.$"),
        ("runs/a1", None, ConfigError, r"^no file or folder 'runs/a1'. There is no folder 'runs'.$"),
        ("quickstart/detrr", None, ConfigError, r"is neither a model of the zoo.* Did you mean 'quickstart/detr'"),
        ("a\0b", None, ConfigError, r"^'a.x00b' is neither a model of the zoo"),
        ("run/model.pt2", None, CheckpointError, r"^no file 'run/model.pt2'. Write it by `vitkit export`.$"),
        ("https://a.b/c.pth", None, ConfigError, r"c\.pth: weights from a URL or timm are for backbones only"),
        ("tiny.py", "timm/resnet18", ConfigError, r"only \(model.backbone.pretrained=timm/resnet18\)"),
        ("tiny.py", "a" * 300, ConfigError, "'a{300}' is neither a model of the zoo"),
        ("tiny.py", "detr_r51", ConfigError, "nor an exported file. Did you mean 'detr_r50'"),
        ("nosuch", "hf:no/one", ConfigError, "'nosuch' is neither a model of the zoo"),  # before it is downloaded
        ("tinny.py", "hf:no/one", ConfigError, "no config file 'tinny.py'. Did you mean 'tiny.py'"),
        ("run/bestt.pth", None, CheckpointError, "no checkpoint 'run/bestt.pth'.* In 'run': Did you mean 'best.pth'"),
        (("tiny.py", "best.pth"), None, ConfigError, "got tuple for a model or weights; expected a name"),
        ("tiny.py", None, ConfigError, "a config has no weights. Give a checkpoint, or the folder of a run"),
        ("tiny.py", "none.pth", CheckpointError, "no checkpoint 'none.pth'"),
        (
            ".",
            None,
            ConfigError,
            "'.' is not the folder of a run: expected best.pth .* It has runs: give one, such as run.$",
        ),
        ("tinny.py", "run/best.pth", ConfigError, "no config file 'tinny.py'. Did you mean 'tiny.py'"),
        ("quickstart/detr", None, ConfigError, "quickstart/detr: a config has no weights"),
        ("official.pth", None, CheckpointError, "official.pth: has no config.* Give its config as well"),
        ("run/last.pth", "run/best.pth", ConfigError, "run/last.pth: is not a config, and has its own weights"),
    ],
)
def test_unloadable_models_are_helpful_errors(run, source, weights, error, message):
    torch.save({"model": {"w": torch.zeros(1)}}, "official.pth")
    with pytest.raises(error, match=message):
        load(source, weights)


def test_input_that_is_not_an_image_is_an_error(run):
    predictor = load(run)
    (run / "text.jpg").write_text("no image")
    for photo, message in (
        ("none.jpg", "cannot read 'none.jpg'"),
        (run / "text.jpg", "text.jpg"),
        (np.zeros((4, 4), np.uint8), r"image_0: got uint8 \(4, 4\); expected a file"),
        (np.zeros((4, 4, 3), np.float32), r"got float32"),
        (np.zeros((0, 4, 3), np.uint8), "has no pixels"),
        (None, "got NoneType"),
        (torch.rand(3, 4, 4) * 3, r"got torch.float32 \(3, 4, 4\); expected .* float in 0..1"),
        (b"no image", "image_0.*not an image of a known format"),
    ):
        with pytest.raises(DataError, match=message):
            predictor.predict([photo])


def test_model_that_does_not_predict_on_images_is_an_error():
    with pytest.raises(ConfigError, match=r"Linear has no postprocess\(\), so it predicts nothing in images"):
        Predictor(torch.nn.Linear(1, 1), ["a"])

    class Constant(torch.nn.Linear):
        def postprocess(self, outputs, image_sizes):
            return []

    with pytest.raises(ConfigError, match=r"^model Constant does not derive from vitkit\.Model"):
        Predictor(Constant(1, 1), ["a"])


def test_classes_come_from_the_checkpoint_or_the_config_or_the_defaults():
    stated = {"model": "DETR", "data": {"val": {"type": "SemanticFolder", "classes": ["sky", "sea"]}}}
    assert read_trained_classes({}, "official.pth", stated).classes == ["sky", "sea"]
    assert len(read_trained_classes({}, "official.pth", {"model": "DETR"}).classes) == 80
    panoptic = read_trained_classes({}, "official.pth", {"model": "DETR", "data": {"val": {"type": "CocoPanoptic"}}})
    assert len(panoptic.classes) == 133 and sum(panoptic.things) == 80
    assert read_trained_classes({}, "official.pth", {"model": {"type": "Classifier"}}).classes[0].startswith("tench")
    streets = {"type": "CityscapesPanoptic", "classes": ["sky", "car", "road"], "things": ["car"]}
    known = read_trained_classes({}, "official.pth", {"model": "DETR", "data": {"val": streets}})
    assert known == TrainedOn(["sky", "car", "road"], [False, True, False])
    known = read_trained_classes({}, "official.pth", {"model": "DETR", "data": {"val": streets | {"task": "instance"}}})
    assert known == TrainedOn(["car"], [True])
    known = read_trained_classes({"classes": ["cat"], "things": [False]}, "run.pth", stated)
    assert known == TrainedOn(["cat"], [False])


def test_results_of_an_official_model_have_cocos_category_ids(run, tmp_path):
    config = load_config("tiny.py")
    torch.save(build_model(config["model"], classes=COCO_CLASSES).state_dict(), tmp_path / "official.pth")
    prediction = load("tiny.py", "official.pth")(image(), threshold=0.0)
    ids = [result["category_id"] for result in prediction.to_coco(1)]
    assert [COCO_CATEGORY_IDS.index(id_) for id_ in ids] == prediction.labels.tolist()
    assert load(run).category_ids is None  # other classes, whose ids the checkpoint does not tell


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


MEASURED = {
    "score_thresholds": {"overall": 0.5, "by_class": {"dog": 0.49}, "origin": "highest F1 in validation"},
    "image_sizes": {"least_short": 40, "median_short": 48, "most_short": 64, "most_long": 64},
}


def measured_run(run, transforms=None, **changes):
    """Add the measurements of an evaluation to the run, and remove the resize in validation."""
    state = read_checkpoint(run / "best.pth") | {"measured": MEASURED | changes}
    config = json.loads(state["config"])
    config["data"]["val"]["transforms"] = transforms
    save_checkpoint("measured.pth", state | {"config": json.dumps(config)})
    return "measured.pth"


def test_thresholds_of_the_checkpoint_are_used_and_reported(run):
    predictor = load(measured_run(run))
    assert predictor.thresholds == ScoreThresholds(0.5, (None, 0.49, None), "highest F1 in validation")
    prediction = predictor(image())
    scores, labels = (prediction.fields[name] for name in ("scores", "labels"))
    expected = [s for s, k in zip(scores.tolist(), labels.tolist()) if s >= (0.49 if k == 1 else 0.5)]
    assert 0 < len(expected) < len(scores) and sorted(prediction.scores.tolist()) == sorted(expected)
    assert "score 0.49 to 0.50, by class (highest F1 in validation)" in prediction.summary()
    assert predictor(image(), threshold=0.0).summary().endswith("score 0.00 (as asked for)")
    assert load("run").thresholds == ScoreThresholds()


def test_images_are_resized_to_the_validated_size_if_validation_did_not_resize(run, caplog):
    predictor = load(measured_run(run))
    shapes = [tuple(predictor.prepare([image(*size)]).inputs["images"].shape[-2:]) for size in ((320, 400), (20, 24))]
    assert shapes == [(48, 60), (48, 57)]
    assert [r.getMessage() for r in caplog.records] == [
        "images are resized to a short side of 48 pixels, a long one of at most 64 (here from 400x320 to 60x48), the "
        "size that the model was trained and evaluated at"
    ]
    # Sizes that were evaluated are predicted without a resize.
    for size in ((40, 56), (64, 64), (60, 50)):
        assert predictor.prepare([image(*size)]).inputs["images"].shape[-2:] == size
    boxes = predictor(image(320, 400), threshold=0.0).boxes
    assert boxes[:, 2].max() > 60  # in pixels of the image itself


def test_prediction_resizes_as_in_validation(run, caplog):
    resize = dict(type="EvalResize", short_side=100, max_size=200)
    assert load(measured_run(run, resize)).prepare([image(320, 400)]).inputs["images"].shape[-2:] == (100, 125)
    flip = dict(type="ComposedTransforms", transforms=[dict(type="HorizontalFlip", p=1.0)])
    assert load(measured_run(run, flip)).prepare([image(320, 400)]).inputs["images"].shape[-2:] == (48, 60)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "measured",
    [
        {"score_thresholds": {"overall": 2.0, "by_class": {}, "origin": ""}},
        {"score_thresholds": 0.5},
        {"score_thresholds": {"overall": 0.5, "by_class": {"cat": "low"}, "origin": ""}},
        {"image_sizes": {"short": 3}},
        {"image_sizes": {"least_short": 0, "median_short": 48, "most_short": 64, "most_long": 64}},
    ],
)
def test_damaged_measurements_are_an_error_that_names_the_file(run, measured):
    with pytest.raises(CheckpointError, match="measured.pth: damaged: what its evaluation has measured"):
        load(measured_run(run, **measured))


@pytest.mark.parametrize("ids", ["abc", 7, [1], [[1], [2], [3]], [float("nan")] * 3, {"cat": 1}])
def test_damaged_ids_are_an_error_that_names_the_file(run, ids):
    save_checkpoint("ids.pth", read_checkpoint(run / "best.pth") | {"category_ids": ids})
    with pytest.raises(CheckpointError, match="ids.pth: damaged: its category_ids are .*; expected an id for each"):
        load("ids.pth")


@pytest.mark.parametrize("things", ["abc", 7, [True], ["no", "no", "no"], [1, 2, 3]])
def test_damaged_things_are_an_error_that_names_the_file(run, things):
    save_checkpoint("things.pth", read_checkpoint(run / "best.pth") | {"things": things})
    with pytest.raises(CheckpointError, match="things.pth: damaged: its things are .*; expected true or false"):
        load("things.pth")


def test_head_that_does_not_fit_the_named_classes_is_an_error_with_its_shape(run):
    state = read_checkpoint(run / "best.pth")
    fewer = {"classes": state["classes"][:-1], "category_ids": None}
    save_checkpoint("fewer.pth", state | fewer)
    with pytest.raises(CheckpointError, match=r"class_embed.bias \(4,\); model: .*class_embed.bias \(3,\)"):
        load("fewer.pth")
