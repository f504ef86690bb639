"""The program beside an exported file: it runs without torch, and reads, resizes and draws like vitkit."""

import importlib
import json
import subprocess
import sys

import cv2
import numpy as np
import pytest
import torch
from helpers.small_exports import IMAGES, WITHOUT_TORCH, export, noise, predictor_of
from PIL import Image, UnidentifiedImageError

from vitkit import build_model, load_config
from vitkit.apps.export_reading.graphs import image_graph
from vitkit.apps.export_writing.metadata import resize_of
from vitkit.apps.inference import load
from vitkit.apps.visualization.canvas import class_color
from vitkit.data.synthetic.world import SHAPE_KEYPOINTS, World
from vitkit.io.channel_files import read_channels
from vitkit.io.folders import OUTPUT_LIST, is_output
from vitkit.io.image_files import FORMATS, read_image
from vitkit.structures import ImageSizes

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
onnx_runner = importlib.import_module("vitkit.apps.export_reading.onnx_runner")

RESNET = dict(type="ResNet", depth=18, norm="bn", pretrained=False)


def test_generated_program_predicts_without_torch(run, tmp_path):
    command = [sys.executable, "-c", WITHOUT_TORCH, run / "out" / "run_tiny.py", run / "a.png", "--out", tmp_path]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    expected = load(run / "run").predict([run / "a.png"])[0]
    assert np.allclose(result["scores"], expected.scores, atol=1e-4)
    assert np.allclose(result["boxes_xyxy"], expected.boxes, atol=0.1)
    assert Image.open(tmp_path / "a.png").size == (90, 70)


def test_generated_program_takes_thresholds_by_class_name(run, monkeypatch, capsys):
    path, predictor = run / "out" / "tiny.onnx", load(run / "run")
    everything = onnx_runner.Runner(path, 0)(run / "a.png")
    name = everything["names"][0]
    for threshold in ({name: 0.0, "*": 1.0}, {name: 1.0}):
        found = onnx_runner.Runner(path, threshold)(run / "a.png")
        expected = predictor(run / "a.png", threshold=threshold)
        assert found["names"] == expected.names == load(path)(run / "a.png", threshold=threshold).names
        assert np.allclose(found["boxes_xyxy"], expected.boxes, atol=0.1)
    monkeypatch.setattr(
        sys, "argv", ["run_tiny.py", "--model", str(path), str(run / "a.png"), "--threshold", f"{name}=0,1"]
    )
    with pytest.raises(SystemExit, match="0|False"):
        onnx_runner.main()
    assert json.loads(capsys.readouterr().out)["names"] == [name] * everything["names"].count(name)
    with pytest.raises(ValueError, match=f"the model has no class '{name}x'. Did you mean '{name}'"):
        onnx_runner.Runner(path, {f"{name}x": 0.5})(run / "a.png")
    assert onnx_runner.read_threshold("a, b=0.3,0.5") == {"a, b": 0.3, "*": 0.5}


def test_drawings_of_the_generated_program_replace_neither_inputs_nor_each_other(run, tmp_path, monkeypatch):
    (tmp_path / "b").mkdir()
    paths = [tmp_path / "a.png", tmp_path / "b" / "a.jpg"]
    for path in paths:
        Image.fromarray(IMAGES[0]).save(path)
    before = paths[0].read_bytes()
    command = ["run_tiny.py", "--model", run / "out" / "tiny.onnx", *paths, "--out", tmp_path]
    monkeypatch.setattr(sys, "argv", list(map(str, command)))
    with pytest.raises(SystemExit, match="0|False"):
        onnx_runner.main()
    assert paths[0].read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "a_2.png", "a_3.png", "b", OUTPUT_LIST}
    assert is_output(tmp_path / "a_2.png") and is_output(tmp_path / "a_3.png") and not is_output(paths[0])


def test_generated_program_names_unreadable_images_and_continues(run, tmp_path, monkeypatch, capsys):
    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["run_tiny.py", "--model", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            onnx_runner.main()
        return stopped.value.code

    model, empty, circular = run / "out" / "tiny.onnx", tmp_path / "empty.png", tmp_path / "circular.png"
    empty.touch()
    circular.symlink_to(circular)
    assert main(model, "missing.png", empty, run / "a.png") == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["input"] == str(run / "a.png")
    lines = printed.err.splitlines()
    assert len(lines) == 2 and lines[0].startswith("error: missing.png: ") and f"error: {empty}: " in lines[1]
    assert main(model, run / "a.png", "--out", empty) == f"error: --out {empty}: expected a folder (File exists)."
    assert main(tmp_path / "none.onnx", "a.png").startswith(f"error: --model {tmp_path / 'none.onnx'}: no such file")
    assert main(model, circular, run / "a.png", "--out", tmp_path / "out") == 1
    assert f"error: {circular}: " in capsys.readouterr().err and (tmp_path / "out" / "a.png").exists()
    for dtype in ("int32", "float32"):
        Image.fromarray(np.arange(0, 240, 4).reshape(6, 10).astype(dtype)).save(tmp_path / "32.tif")
        assert main(model, tmp_path / "32.tif") == 1 and "its values have a sign, 32 bits" in capsys.readouterr().err
    assert main(model, run / "a.png") == 0


@pytest.mark.parametrize("channels", [None, 3])
def test_generated_program_opens_the_formats_of_vitkit(channels, tmp_path):
    # Without those that only some installations of Pillow have.
    assert tuple(f for f in FORMATS if f not in ("AVIF", "JPEG2000", "HEIF")) == onnx_runner.FORMATS
    path = tmp_path / "a.jpg"
    # Pillow would start Ghostscript to render it.
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 6\n%%EndComments\nshowpage\n%%EOF\n")
    with pytest.raises(UnidentifiedImageError):
        onnx_runner.open_image(path, channels)


@pytest.mark.parametrize("suffix", ["jpg", "png"])  # Pillow 13.0 garbles uncompressed TIFFs that are turned
def test_program_turns_images_of_any_number_of_channels_upright(tmp_path, suffix):
    path, exif = tmp_path / f"a.{suffix}", Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 12)).save(path, exif=exif)
    image = onnx_runner.open_image(path, 1)
    assert image.shape == (12, 4, 1)
    np.testing.assert_array_equal(image, read_channels(path, 1))


def test_generated_program_writes_names_inside_the_image():
    box = [-30.0, -20.0, 60.0, 50.0]
    result = dict(
        labels=[0, 0], names=["cell", "cell"], scores=[0.5, 0.5], boxes_xyxy=[box, [160.0, 85.0, 240.0, 120.0]]
    )
    drawn = np.asarray(onnx_runner.draw(np.full((100, 200, 3), 128, np.uint8), result)).astype(int)
    white = (drawn > 160).all(axis=2)
    apart = onnx_runner.draw(np.full((300, 600, 3), 128, np.uint8), result | dict(boxes_xyxy=[[9.0, 9.0, 90.0, 90.0]]))
    one_name = (np.asarray(apart) > 160).all(axis=2).sum()
    assert one_name > 20 and white[:20].sum() == white[80:].sum() == one_name


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_generated_program_reads_all_bits_or_says_that_it_does_not(suffix, tmp_path):
    image, path = np.arange(8 * 6 * 3, dtype=np.uint16).reshape(8, 6, 3), f"{tmp_path}/a{suffix}"
    cv2.imwrite(path, image)
    with pytest.raises(ValueError, match="of 16 bits in color, Pillow reads 8: store a .npy file"):
        onnx_runner.open_image(path, 3)
    cv2.imwrite(path, image[:, :, 0])
    np.testing.assert_array_equal(onnx_runner.open_image(path, 1), image[:, :, :1])


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_generated_program_reads_gray_images_of_16_bits_like_vitkit(suffix, tmp_path):
    path = f"{tmp_path}/a{suffix}"
    cv2.imwrite(path, np.arange(0, 60000, 1000, dtype=np.uint16).reshape(6, 10))
    np.testing.assert_array_equal(onnx_runner.open_image(path), read_image(path))
    assert read_image(path).max() == 59000 >> 8


def test_generated_program_draws_in_the_colors_of_vitkit():
    assert [onnx_runner.color_of(k) for k in range(1, 31)] == [class_color(k) for k in range(30)]
    assert onnx_runner.color_of(0) == (0, 0, 0)


class Outputs:
    """Random outputs of a mask model, for images resized from 36x60 to 24x40 pixels, and the runner's results."""

    def __init__(self, cfg, *, boxes=False, threshold=0.0):
        self.model, num_classes = build_model(cfg), cfg["num_classes"]
        generator = torch.Generator().manual_seed(0)
        masks = torch.nn.functional.interpolate(torch.randn(1, 9, 3, 5, generator=generator) * 6, (12, 20))
        num_logits = num_classes + (self.model.class_activation != "sigmoid")
        self.raw = {"pred_logits": torch.randn(1, 9, num_logits, generator=generator) * 3, "pred_masks": masks}
        if boxes:
            self.raw["pred_boxes"] = torch.rand(1, 9, 4, generator=generator)
        multiple = self.model.mask_multiple
        self.covered = tuple(-(-side // multiple) * multiple for side in (24, 40))
        runner = object.__new__(onnx_runner.Runner)
        runner.threshold, runner.inputs = threshold, []
        thresholds = {"overall": 0.0, "by_class": {}}
        runner.info = {"classes": list("abcdef"[:num_classes]), "postprocessing": self.model.postprocess_settings()}
        runner.info["thresholds"] = thresholds
        inputs = {"images": torch.zeros(1, 3, 24, 40, dtype=torch.uint8)}
        inputs |= {"padding_mask": torch.zeros(1, 24, 40, dtype=torch.bool), "image_sizes": torch.tensor([[36, 60]])}
        results = self.raw | image_graph(self.model).finish(self.raw, inputs)
        arrays = {name: value[0].numpy() for name, value in results.items()}
        self.results = runner.postprocess(arrays, {k: v.numpy() for k, v in inputs.items()}, (36, 60))

    def expected(self):
        outputs = dict(self.raw, input_size=self.covered, image_sizes=torch.tensor([[24, 40]]))
        return self.model.postprocess(outputs, [(36, 60)])[0]


def masks_model(config, **settings):
    cfg = load_config(config)["model"] | dict(num_classes=5, num_queries=9, backbone=RESNET) | settings
    return cfg


def test_generated_program_finds_the_segments_and_instances_of_the_model():
    things = [True, False, True, True, False]
    cfg = masks_model("quickstart/mask2former_panoptic", things=things, object_threshold=0.4, tasks=["panoptic"])
    case = Outputs(cfg | dict(overlap_threshold=0.2))
    expected = case.expected()
    assert expected["segments_info"] and np.array_equal(case.results["panoptic"], expected["panoptic"])
    assert [s["label"] for s in case.results["segments_info"]] == [s["label"] for s in expected["segments_info"]]

    case = Outputs(masks_model("quickstart/mask2former_panoptic", things=things, tasks=["instance"], num_instances=7))
    expected = case.expected()
    order = expected["scores"].argsort(descending=True, stable=True)
    assert len(order) and np.allclose(case.results["scores"], expected["scores"][order], atol=1e-5)
    assert np.array_equal(case.results["boxes_xyxy"], expected["boxes_xyxy"][order])
    assert np.array_equal(case.results["masks"], expected["masks"][order])


def test_generated_program_finds_the_segments_and_instances_of_a_panoptic_detr():
    cfg = load_config("detr_r50_panoptic")["model"] | dict(num_classes=5, num_queries=9)
    cfg["things"], cfg["object_threshold"] = [True, False, True, True, False], 0.4
    cfg["backbone"] = RESNET
    case = Outputs(cfg | dict(tasks=["panoptic", "instance"]), boxes=True)
    expected = case.expected()
    assert expected["segments_info"] and np.array_equal(case.results["panoptic"], expected["panoptic"])
    assert [s["label"] for s in case.results["segments_info"]] == [s["label"] for s in expected["segments_info"]]
    order = expected["scores"].argsort(descending=True, stable=True)
    assert np.allclose(case.results["boxes_xyxy"], expected["boxes_xyxy"][order], atol=1e-3)
    assert np.array_equal(case.results["masks"], expected["masks"][order])


def test_generated_program_finds_the_instances_of_rf_detr():
    cfg = load_config("rf_detr_seg_n_coco")["model"] | dict(num_classes=5, num_queries=9, num_detections=12)
    vit = dict(patch_size=12, d_model=32, depth=2, num_heads=2, image_size=24, out_features=["block1", "block2"])
    cfg["backbone"] = dict(type="WindowedViT", num_windows=1, global_blocks=[1], pretrained=False, **vit)
    case = Outputs(cfg | dict(training_queries=[]), boxes=True)
    expected = case.expected()
    assert np.allclose(case.results["scores"], expected["scores"]) and len(expected["masks"]) == 12
    assert np.allclose(case.results["boxes_xyxy"], expected["boxes_xyxy"], atol=1e-3)
    assert np.array_equal(case.results["masks"], expected["masks"])


ECPOSE = [
    *("model.backbone=dict(type='ECViT',d_model=32,depth=2,num_heads=2,pretrained=False)", "model.neck.num_blocks=1"),
    *("model.num_queries=10", "model.num_detections=10", "model.num_keypoints=4", "data.val.transforms.size=[64,64]"),
]


@pytest.mark.parametrize(
    ("path", "changes"), [("quickstart/keypoints", []), pytest.param("ecpose_s_coco", ECPOSE, marks=pytest.mark.slow)]
)
def test_file_and_generated_program_return_the_keypoints_of_the_model(path, changes, tmp_path):
    overrides = ["model.head.num_decoder_layers=1", "model.training_queries=[]", "model.num_classes=6", *changes]
    world = World(image_size=64)
    predictor, cfg = predictor_of(path, overrides, keypoint_info=SHAPE_KEYPOINTS)
    for name, parameter in predictor.model.head.named_parameters():
        if parameter.dim() > 1 or "keypoint" in name:
            torch.nn.init.normal_(parameter, std=0.2)  # points and scores that differ
    export(predictor, cfg, tmp_path / "a.onnx", size=(64, 64))
    for number in (0, 1):
        image = world.scene(number).image
        expected = predictor(image, threshold=0.0)
        of_file = load(tmp_path / "a.onnx")(image, threshold=0.0)
        of_program = onnx_runner.Runner(tmp_path / "a.onnx", 0.0)(image)
        assert expected.keypoints.shape == (10 if changes else 8, 4, 3) and len({*expected.scores.tolist()}) > 1
        assert changes or len({*expected.labels.tolist()}) > 1  # RF-DETR's points depend on the label
        assert of_file.keypoint_info == SHAPE_KEYPOINTS
        for found in (of_file.keypoints, of_program["keypoints"]):
            np.testing.assert_allclose(found, expected.keypoints, atol=1e-2)
        np.testing.assert_allclose(of_program["scores"], expected.scores, atol=1e-5)
    drawn = np.asarray(onnx_runner.draw(image, of_program))
    assert np.asarray(onnx_runner.draw(image, {**of_program, "keypoints": []})).tolist() != drawn.tolist()
    json.dumps(onnx_runner.to_json(of_program))


def test_exported_semantic_map_equals_that_of_the_model_at_image_size():
    case = Outputs(masks_model("quickstart/maskformer_semantic"))
    inputs = {"images": torch.zeros(1, 3, 24, 40, dtype=torch.uint8)}
    semantic = image_graph(case.model).finish(case.raw, inputs)["semantic"]
    outputs = dict(case.raw, input_size=case.covered, image_sizes=torch.tensor([[24, 40]]))
    assert torch.equal(semantic[0], case.model.postprocess(outputs, [(24, 40)])[0]["semantic"])


def test_generated_program_resizes_images_like_the_model(tmp_path):
    cases = {
        "the middle": dict(transforms=dict(type="ClassificationEvalTransforms", size=32)),
        "squashed": dict(transforms=dict(type="ClassificationEvalTransforms", size=32, squash=True)),
        "the short side": dict(transforms=dict(type="EvalResize", short_side=48, max_size=60)),
        "nearest sides": dict(transforms=dict(type="EvalResize", short_side=48, max_size=61, rounding="nearest")),
        "one size": dict(transforms=dict(type="EvalResize", size=[48, 56])),
        "the trained size": dict(image_sizes=ImageSizes(20, 30, 40, 80)),
        "nothing": dict(),
    }
    for name, arguments in cases.items():
        predictor, _ = predictor_of("quickstart/classifier", **arguments)
        runner = object.__new__(onnx_runner.Runner)
        runner.inputs = ["images", "padding_mask"]
        runner.info = {"size": None, "preprocessing": {"resize": resize_of(predictor)}}
        for pixels in [*IMAGES, noise(1, 400)]:
            expected, actual = predictor.prepare([pixels]).inputs, runner.prepare(pixels)
            assert np.array_equal(actual["images"], expected["images"]), name
            assert np.array_equal(actual["padding_mask"], expected["padding_mask"]), name
