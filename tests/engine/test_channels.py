"""A detector on images of four channels and 16 bits, from its data to its predictions, reports and exported files."""

import importlib
import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import vitkit
from vitkit import load_config
from vitkit.apps.doctor import DoctorOptions, run_checks
from vitkit.apps.export_reading.settings import ExportSettings
from vitkit.apps.export_writing.export import export_model
from vitkit.apps.export_writing.metadata import describe
from vitkit.apps.inference import Predictor, load
from vitkit.apps.starter import timed_run
from vitkit.apps.starter.child_runs import StepCost
from vitkit.engine.build import build_model
from vitkit.errors import ConfigError, DataError
from vitkit.tools import browse, predict
from vitkit.tools import test as test_tool

CONFIG = """
from vitkit.configs.quickstart.detr import config as quickstart


def config():
    cfg = quickstart()
    cfg["model"]["backbone"].update(in_channels=4, pixel_mean=[0.3] * 4, pixel_std=[0.2] * 4)
    cfg["model"]["neck"]["out_channels"] = 32
    cfg["model"]["head"].update(d_model=32, num_heads=2, d_ffn=64, num_encoder_layers=1, num_decoder_layers=1)
    transforms = dict(
        type="DETRTrainTransforms", scales=[40, 48], max_size=64, crop_scales=[48], crop_range=[32, 48],
    )
    cfg["data"] = dict(
        train=dict(type="CocoDetection", images="images", annotations="train.json", transforms=transforms),
        val=dict(
            type="CocoDetection", images="images", annotations="train.json",
            transforms=dict(type="EvalResize", short_side=40, max_size=64),
        ),
        channels=4, images_per_gpu=4, num_workers=0,
    )
    cfg["schedule"] = dict(type="MultiStepLR", drop_at_epochs=[100])
    cfg["train"] = dict(epochs=2, log_every=1, best_metric="bbox/AP50")
    return cfg
"""


def stored(image):
    """Return the channels in the order in which OpenCV writes them."""
    return image[:, :, [2, 1, 0, 3]]


@pytest.fixture
def images(tmp_path, monkeypatch):
    """Write images of four channels and 16 bits: PNG, TIFF with four samples, TIFF with four pages, and .npy."""
    monkeypatch.chdir(tmp_path)
    Path("images").mkdir()
    rng, listed, annotations, arrays = np.random.default_rng(0), [], [], {}
    for k, suffix in enumerate([".png", ".tif", "_pages.tif", ".npy"] * 2):
        image = rng.integers(0, 4000, (48, 56, 4)).astype(np.uint16)
        x, y = 4 + 2 * k, 3 + k
        image[y : y + 20, x : x + 24, 3] += 40000  # the object is only seen in the fourth channel
        name = f"image{k}{suffix}"
        if suffix == ".npy":
            np.save(f"images/{name}", image)
        elif suffix == "_pages.tif":
            cv2.imwritemulti(f"images/{name}", list(np.moveaxis(image, 2, 0)))
        else:
            cv2.imwrite(f"images/{name}", stored(image))
        arrays[name] = image
        listed.append({"id": k + 1, "file_name": name, "height": 48, "width": 56})
        box = [x, y, 24, 20]
        annotations.append(dict(id=k + 1, image_id=k + 1, category_id=1, bbox=box, area=480, iscrowd=0))
    content = {"images": listed, "annotations": annotations, "categories": [{"id": 1, "name": "cell"}]}
    Path("train.json").write_text(json.dumps(content))
    Path("config.py").write_text(CONFIG)
    return arrays


def test_a_detector_trains_evaluates_and_predicts_on_four_channels_of_16_bits(images, capsys):
    run = vitkit.train("config.py", run_dir="run", device="cpu")
    assert len(run.history) == 2 and np.isfinite(run.metrics["loss"])
    assert list(Path("run").glob("*.png")), "no predictions are drawn"
    test_tool.main(["run", "--device", "cpu", "--report", "report.html"])
    assert "the report is report.html" in capsys.readouterr().out
    predictor = load("run")
    assert predictor.channels == 4
    array = images["image0.png"]
    prediction, *others = predictor(["images/image0.png", array, torch.from_numpy(array).permute(2, 0, 1)])
    for other in others:
        torch.testing.assert_close(other.fields["scores"], prediction.fields["scores"])
    assert prediction.image.shape == (48, 56, 3) and prediction.image.dtype == np.uint8
    assert prediction.draw().dtype == np.uint8
    tiled = predictor("images/image0.png", tiles=40)
    assert tiled.fields["boxes_xyxy"].shape[1] == 4
    predict.main(["run", "--input", "images/image0.png", "images/image3.npy", "--out", "drawn", "--device", "cpu"])
    assert Path("drawn/image0.jpg").is_file() and Path("drawn/image3.jpg").is_file()
    predict.main(["run", "--input", "images", "--out", "all", "--device", "cpu"])
    assert len(list(Path("all").glob("*.jpg"))) == len(predictor("images")) == 8
    browse.main(["config.py", "--max-images", "3", "--original", "--out", "pages"])
    assert Path("pages/index.html").is_file()


def test_the_fourth_channel_reaches_the_model(images):
    predictor = untrained()
    image = images["image0.png"]
    changed = image.copy()
    changed[:, :, 3] = 0
    scores = [predictor(array).fields["scores"] for array in (image, changed)]
    assert not torch.allclose(*scores)


def test_costs_are_counted_for_the_channels(images):
    assert vitkit.analyze("config.py", depth=0).input[:2] == (1, 4)
    statistics = [f"{name}=[0.5,0.5,0.5,0.5]" for name in ("pixel_mean", "pixel_std")]
    backbone = vitkit.analyze(
        "ResNet", overrides=["depth=18", "pretrained=false", "in_channels=4", *statistics], depth=0
    )
    assert backbone.input == (1, 4, 224, 224) and backbone.by_operator["convolution"] > 0


@pytest.mark.skipif(torch.__version__ < (2, 7), reason="older versions cannot export")
@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_an_exported_file_takes_its_channels(images, format):
    if format == "onnx":
        pytest.importorskip("onnxruntime")
    predictor, out = untrained(), Path("model.onnx" if format == "onnx" else "model.pt2")
    config = load_config("config.py")
    about = describe(predictor, config, name="model", license=None)
    export_model(predictor, out, ExportSettings(format), images=[images["image0.png"]], metadata=about)
    exported = load(str(out))
    assert exported.channels == 4
    expected, result = (p("images/image1.tif").fields["scores"] for p in (predictor, exported))
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=0)
    if format == "onnx":
        onnx_runner = importlib.import_module("vitkit.apps.export_reading.onnx_runner")
        runner = onnx_runner.Runner(out)
        best = expected.sort(descending=True).values
        for source in ("images/image2_pages.tif", "images/image3.npy", images["image1.tif"]):
            result = runner(source)
            np.testing.assert_allclose(
                result["scores"], predictor(source).fields["scores"].sort().values.flip(0), atol=1e-4
            )
        np.testing.assert_allclose(result["scores"], best, atol=1e-4)
        assert onnx_runner.draw(images["image1.tif"], result).size == (56, 48)
        with pytest.raises(ValueError, match="has 3 channels of uint8; expected 4 of 8 or 16 bits"):
            runner(np.zeros((48, 56, 3), np.uint8))


def test_the_doctor_measures_statistics_that_can_be_set(images):
    issues = list(run_checks(load_config("config.py"), DoctorOptions(), checks=["images"]))
    message = next(issue.message for issue in issues if issue.check == "pixel statistics")
    backbone = load_config("config.py", message.split())["model"]["backbone"]
    values = np.stack(list(images.values())).reshape(-1, 4) / 65535
    assert backbone["pixel_mean"] == pytest.approx(values.mean(axis=0), rel=1e-3)
    assert backbone["pixel_std"] == pytest.approx(values.std(axis=0), rel=1e-3)


@pytest.mark.parametrize("value", [0, 20000, 65535])
def test_a_constant_channel_has_statistics_that_can_be_set(images, value):
    content = json.loads(Path("train.json").read_text())
    content["images"] = [image for image in content["images"] if image["file_name"].endswith(".npy")]
    content["annotations"] = []
    Path("train.json").write_text(json.dumps(content))
    for image in content["images"]:
        np.save(
            f"images/{image['file_name']}",
            np.dstack([images[image["file_name"]][:, :, :3], np.full((48, 56), value, np.uint16)]),
        )
    issues = list(run_checks(load_config("config.py"), DoctorOptions(), checks=["images"]))
    message = next(issue.message for issue in issues if issue.check == "pixel statistics")
    config = load_config("config.py", message.split())
    assert config["model"]["backbone"]["pixel_std"][3] == 1
    build_model(config["model"], classes=["a"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.channels=3"], "model.backbone.in_channels=4, but data.channels=3 gives images with 3 channels"),
        (["data.channels=none"], "model.backbone.in_channels=4, but data.channels=None gives images with 3 channels"),
        (
            ["model.backbone.in_channels=5"],
            "pixel_mean=(0.3, 0.3, 0.3, 0.3): expected a number in 0..1 for each of in_",
        ),
        (["data.channels=0"], "data.channels: got 0; expected at least 1."),
    ],
)
def test_channels_of_data_and_model_that_differ_are_an_error(images, overrides, message):
    with pytest.raises(ConfigError) as error:
        vitkit.train(load_config("config.py", overrides), run_dir="run", device="cpu")
    assert message in str(error.value)


@pytest.mark.parametrize("task", ["detection", "classification"])
def test_start_trains_on_four_channels_and_measures_their_statistics(images, task, monkeypatch):
    monkeypatch.setattr(timed_run, "time_steps", lambda *_, **__: StepCost(1 / 60, 1 / 60, 1))
    data, count = ["images", "train.json"], 8
    if task == "classification":
        count = 6  # folders of classes have no .npy files
        for number, name in enumerate(images):
            folder = Path("folders", "AB"[number % 2])
            folder.mkdir(parents=True, exist_ok=True)
            Path(folder, name).symlink_to(Path("images", name).resolve())
        data = ["folders"]
    overrides = ["data.channels=4", "model.backbone.pretrained=false"]
    started = vitkit.start(
        *data, task=task, hours=0.05, val_fraction=0.4, dry_run=True, overrides=overrides, device="cpu"
    )
    cfg = load_config(started.config)
    train, val = (vitkit.build_dataset(cfg["data"][part], channels=4) for part in ("train", "val"))
    assert len(train) + len(val) == count
    backbone = cfg["model"]["backbone"]
    values = np.concatenate([train.load_image(k).reshape(-1, 4) for k in range(len(train))]) / 65535
    assert backbone["in_channels"] == 4
    assert backbone["pixel_mean"] == pytest.approx(values.mean(axis=0), abs=1e-3)
    assert backbone["pixel_std"] == pytest.approx(values.std(axis=0), abs=1e-3)
    for dataset in (train, val):
        image = dataset[(0, 0)]["image"]
        assert image.dtype == torch.uint16 and len(image) == 4
    model = build_model(cfg["model"], classes=train.classes)
    transforms = cfg["data"]["val"]["transforms"]
    predictor = Predictor(model, train.classes, transforms=transforms, channels=4)
    assert predictor.run([images["image0.png"]]) and describe(predictor, cfg, name="", license=None)


def test_a_transform_of_colors_is_named(images):
    spec = load_config("config.py")["data"]["train"]
    jitter = dict(type="ComposedTransforms", transforms=[dict(type="ColorDistortion")])
    dataset = vitkit.build_dataset({**spec, "transforms": jitter}, channels=4)
    with pytest.raises(
        ConfigError, match=r"ColorDistortion: needs RGB of 8 bits, and the images have 4 channels of 16"
    ):
        dataset[(0, 0)]
    hue = dict(type="ComposedTransforms", transforms=[dict(type="HueSaturationValue", p=1.0)])
    dataset = vitkit.build_dataset({**spec, "transforms": hue}, channels=4)
    with pytest.raises(DataError, match=r"Those of colors need RGB of 8 bits, not 4 channels of 16 bits"):
        dataset[(0, 0)]
    gamma = dict(type="ComposedTransforms", transforms=[dict(type="RandomGamma", p=1.0)])
    dataset = vitkit.build_dataset({**spec, "transforms": gamma}, channels=4)
    with pytest.raises(
        ConfigError, match="not an image of uint16 with 4 channels.* need RGB of 8 bits, such as Random"
    ):
        dataset[(0, 0)]


@pytest.mark.parametrize(
    "transforms",
    [
        dict(type="LargeScaleJitter", size=40),
        dict(type="MultiImageTransforms", mosaic=1.0, mixup=1.0),
        dict(type="GridMosaic", probability=1.0, tile=40),
        dict(type="ComposedTransforms", transforms=[dict(type="RandomZoomOut", p=1.0), dict(type="RandomIoUCrop")]),
        dict(type="ComposedTransforms", transforms=[dict(type="D4"), dict(type="RandomBrightnessContrast", p=1.0)]),
    ],
    ids=lambda spec: spec["type"],
)
def test_transforms_that_change_no_colors_keep_channels_and_bits(images, transforms):
    spec = load_config("config.py")["data"]["train"]
    image = vitkit.build_dataset({**spec, "transforms": transforms}, channels=4)[(0, 1)]["image"]
    assert image.dtype == torch.uint16 and len(image) == 4 and image.int().max() > 20000


def test_hundreds_of_channels_reach_the_model_unchanged_or_a_transform_says_that_it_cannot(images):
    pixels = np.random.default_rng(0).integers(0, 65536, (48, 56, 224)).astype(np.uint16)
    content = json.loads(Path("train.json").read_text())
    content.update(images=content["images"][:1], annotations=content["annotations"][:1])
    content["images"][0]["file_name"] = "many.npy"
    np.save("images/many.npy", pixels)
    Path("many.json").write_text(json.dumps(content))
    spec = {**load_config("config.py")["data"]["train"], "annotations": "many.json", "transforms": None}
    image = vitkit.build_dataset(spec, channels=224)[(0, 0)]["image"]
    np.testing.assert_array_equal(image, pixels.transpose(2, 0, 1))
    spec["transforms"] = dict(type="ComposedTransforms", transforms=[dict(type="Transpose", p=1.0)] * 2)
    try:  # OpenCV's limit differs by version
        image = vitkit.build_dataset(spec, channels=224)[(0, 0)]["image"]
        np.testing.assert_array_equal(image, pixels.transpose(2, 0, 1))
    except DataError as error:
        assert str(error).endswith("not 224 channels of 16 bits. Many need at most 128 channels.")


def test_a_file_with_other_channels_is_named_with_both_numbers(images):
    cv2.imwrite("images/image1.tif", np.zeros((48, 56, 3), np.uint16))
    dataset = vitkit.build_dataset(load_config("config.py")["data"]["train"], channels=4)
    with pytest.raises(DataError, match=r"images 'images/image1.tif': has 3 channels .*; expected 4, by data.channels"):
        dataset[(1, 0)]
    with pytest.raises(DataError, match=r"image_0: has 3 channels \(height 8, width 9\); expected 4"):
        untrained()(np.zeros((8, 9, 3), np.uint8))


def untrained():
    torch.manual_seed(0)
    config = load_config("config.py")
    model, transforms = build_model(config["model"], classes=["cell"]), config["data"]["val"]["transforms"]
    return Predictor(model, ["cell"], transforms=transforms, channels=4)
