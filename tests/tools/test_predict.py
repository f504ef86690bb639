"""vitkit predict from its command line to the files that it writes."""

import argparse
import errno
import json
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest
from helpers.untrained_runs import DETR, MASKS, make_run, make_video
from helpers.video_files import number_of, numbered_frame, write_video
from PIL import Image

from vitkit import load
from vitkit.apps.inference import writing
from vitkit.apps.inference.video_writer import VideoWriter, num_written
from vitkit.apps.inference.writing import make_new_folder
from vitkit.errors import DataError
from vitkit.evaluation.maps import read_ids
from vitkit.io.atomic import write_atomically
from vitkit.io.image_files import read_label_map
from vitkit.io.video_files import open_video
from vitkit.models.detr import DETR as DETR_MODEL
from vitkit.tools import predict

pytestmark = pytest.mark.smoke


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a run with random weights in a new folder, with images beside it."""
    monkeypatch.chdir(tmp_path)
    make_run(DETR, "ShapesDetection")
    rng = np.random.default_rng(0)
    for name in ("photos/a.jpg", "photos/deep/a.png", "b.png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(name, rng.integers(0, 255, (48, 64, 3), dtype=np.uint8))
    return "run"


def predictions(*args):
    predict.main([*map(str, args), "--device", "cpu", "--out", "out", "--overwrite"])
    return json.loads(Path("out/predictions.json").read_text())


def fails(capsys, *args) -> str:
    with pytest.raises(SystemExit) as error:
        predict.main([*map(str, args), "--device", "cpu", "--out", "out", "--overwrite"])
    return f"{error.value.code}\n{capsys.readouterr().err}"


def test_files_folders_and_patterns_are_drawn_and_written(run, capsys):
    result = predictions(run, "--input", "photos", "b.png", "photos/*.jpg", "--batch-size", 2, "--json-threshold", 0)
    images = result["images"]
    assert [entry["image"] for entry in images] == ["photos/a.jpg", "photos/deep/a.png", "b.png"]
    assert [entry["drawn"] for entry in images] == ["a.jpg", "deep/a.jpg", "b.jpg"]
    assert all(len(entry["objects"]) == 10 for entry in images) and result["classes"][0] == "circle"
    assert all(cv2.imread(f"out/{entry['drawn']}").std() > 10 for entry in images)
    assert "3 images, " in capsys.readouterr().out


def test_inputs_are_not_overwritten_by_drawings(run):
    before = Path("photos/a.jpg").read_bytes()
    with pytest.raises(SystemExit, match="--out photos: drawing would overwrite the input 'photos/a.jpg'"):
        predict.main([run, "--input", "photos", "--device", "cpu", "--out", "photos"])
    assert Path("photos/a.jpg").read_bytes() == before
    make_video("clip.mp4")
    before = Path("clip.mp4").read_bytes()
    with pytest.raises(SystemExit, match="--out .: drawing would overwrite the input 'clip.mp4'"):
        predict.main([run, "--input", "b.png", "clip.mp4", "--device", "cpu", "--out", "."])
    assert Path("clip.mp4").read_bytes() == before and not Path("b.jpg").exists()


def test_inputs_are_not_overwritten_by_maps(run):
    make_run(MASKS, "ShapesSegmentation")
    Path("b.png").rename("photos/a_semantic.png")
    with pytest.raises(SystemExit, match="--out photos: a map would overwrite the input 'photos/a_semantic.png'"):
        predict.main(["run", "--input", "photos", "--device", "cpu", "--out", "photos", "--no-draw"])


def test_a_drawing_does_not_overwrite_the_map_of_another_image(run, capsys):
    make_run(MASKS, "ShapesSegmentation")
    Path("b_panoptic.png").write_bytes(Path("b.png").read_bytes())
    inputs = ["run", "--input", "b.png", "b_panoptic.png", "--image-format"]
    message = "out/b_panoptic.png' would be the drawing of one image and the map of another"
    assert message in fails(capsys, *inputs, "png")
    assert len(predictions(*inputs, "jpg")["images"]) == 2


def test_the_uncertainty_is_that_of_the_drawn_objects_threshold(run):
    (image,) = load(run)([Path("b.png")], threshold=0.3)
    asked = predictions(run, "--input", "b.png", "--threshold", 0.3, "--json-threshold", 0)["images"][0]
    assert asked["uncertainty"] == pytest.approx(image.uncertainty, abs=1e-4)
    own = predictions(run, "--input", "b.png")["images"][0]
    assert asked["uncertainty"] != pytest.approx(own["uncertainty"], abs=1e-4)


def test_files_with_the_same_name_do_not_overwrite_each_other(run):
    result = predictions(run, "--input", "photos/a.jpg", "photos/deep/a.png", "--image-format", "png")
    assert [entry["drawn"] for entry in result["images"]] == ["a.png", "a_2.png"]


def test_each_call_without_a_folder_writes_into_a_new_one(run):
    for _ in range(2):
        predict.main([run, "--input", "b.png", "--no-draw", "--device", "cpu"])
    assert {path.parent.name for path in Path("runs").glob("*/predictions.json")} == {"predict", "predict-2"}


def test_config_weights_and_overrides_may_be_given(run):
    result = predictions(
        "config.py", "run/best.pth", "model.isolate_padding=true", "--input", "b.png", "--precision", "bf16"
    )
    assert len(result["images"]) == 1
    assert len(predictions("run", "model.isolate_padding=true", "--input", "b.png", "--no-draw")["images"]) == 1


def test_maps_are_written_for_panoptic_and_semantic_models(run):
    make_run(MASKS, "ShapesSegmentation")
    entry = predictions("run", "--input", "b.png", "--task", "semantic", "--json-threshold", 0)["images"][0]
    ids = read_ids(Path("out") / entry["panoptic_map"])
    assert ids.shape == (48, 64)
    assert {s["id"] for s in entry["segments"]} == set(np.unique(ids).tolist()) - {0}
    labels = read_label_map(Path("out") / entry["semantic_map"])
    assert labels.shape == (48, 64) and sum(entry["areas"].values()) == pytest.approx(1)
    assert entry["objects"] and all(o["mask"]["size"] == [48, 64] for o in entry["objects"])


def test_video_gives_a_drawn_video_and_its_frames_in_json(run):
    make_video("clip.mp4")
    video = predictions(run, "--input", "clip.mp4", "--every", 2, "--batch-size", 3)["videos"][0]
    assert [frame["frame"] for frame in video["frames"]] == [0, 2, 4, 6]
    assert video["frames"][1]["seconds"] == pytest.approx(0.2)
    drawn = cv2.VideoCapture(f"out/{video['drawn']}")
    assert drawn.get(cv2.CAP_PROP_FRAME_COUNT) == 4 and drawn.get(cv2.CAP_PROP_FPS) == pytest.approx(5)


def test_frames_of_a_varying_rate_have_their_own_times(run):
    write_video(Path("varying.mp4"), 4, durations=[100, 300, 500], codec="mpeg4")
    video = predictions(run, "--input", "varying.mp4", "--no-draw")["videos"][0]
    assert [frame["seconds"] for frame in video["frames"]] == pytest.approx([0, 1 / 30, 4 / 30, 9 / 30], abs=1e-4)


@pytest.mark.parametrize(
    ("rate", "written"),
    [(1e6, VideoWriter.MAX_RATE), (1000 / 7, 1000 / 7), (29.837, 29.837)],  # phones record at any rate
)
def test_drawn_video_has_the_frame_rate_of_its_source_if_a_codec_supports_it(rate, written, tmp_path):
    file = VideoWriter(tmp_path / "fast.mp4", np.zeros((48, 64, 3), np.uint8), rate)
    file.add(np.zeros((48, 64, 3), np.uint8))
    file.close()
    assert cv2.VideoCapture(str(tmp_path / "fast.mp4")).get(cv2.CAP_PROP_FPS) == pytest.approx(written)


def test_missing_input_is_an_error_before_the_model_is_loaded():
    with pytest.raises(SystemExit, match="'none.jpg': no such file"):
        predict.main(["no_such_run", "--input", "none.jpg"])


def test_missing_camera_is_a_one_line_error(run, capfd):
    with pytest.raises(SystemExit) as error:
        predict.main([run, "--input", "97", "--device", "cpu", "--out", "out"])
    assert str(error.value.code).endswith("no frame of camera 97 can be read. Is it connected, and not in use?")
    assert "WARN" not in capfd.readouterr().err  # OpenCV's log messages


def test_file_at_the_output_folder_is_a_one_line_error(run, capsys):
    with pytest.raises(SystemExit) as error:
        predict.main([run, "--input", "b.png", "--device", "cpu", "--out", "b.png/out"])
    assert str(error.value.code).startswith("error: b.png/out: expected a folder, but there is a file.")


def test_url_is_read_like_a_file(run, tmp_path, monkeypatch):
    monkeypatch.setattr("vitkit.apps.inference.inputs.download", lambda url: tmp_path / "b.png")
    entry = predictions(run, "--input", "https://example.org/street.png")["images"][0]
    assert entry["drawn"] == "street.jpg"


def test_tiles_are_used_for_large_images(run, capsys):
    cv2.imwrite("large.png", np.random.default_rng(0).integers(0, 255, (96, 160, 3), dtype=np.uint8))
    arguments = [run, "--input", "large.png", "--json-threshold", 0, "--tiles", 64, "--batch-size", 4]
    tiled = predictions(*arguments, "--tile-overlap", 16)["images"][0]
    assert tiled["height"] == 96 and len(tiled["objects"]) > 10
    assert max(o["box_xyxy"][2] for o in tiled["objects"]) > 128
    small = predictions(run, "--input", "b.png", "--json-threshold", 0)["images"][0]
    assert predictions(run, "--input", "b.png", "--json-threshold", 0, "--tiles", 64)["images"][0] == small
    assert "--tile-overlap: the size of the tiles is also needed" in fails(
        capsys, run, "--input", "b.png", "--tile-overlap", 8
    )
    assert "a size of 8 pixels; expected at least 16" in fails(capsys, run, "--input", "b.png", "--tiles", 8)


def test_tiles_predict_masks_and_maps(run):
    make_run(MASKS, "ShapesSegmentation")
    cv2.imwrite("large.png", np.random.default_rng(0).integers(0, 255, (64, 112, 3), dtype=np.uint8))
    entry = predictions("run", "--input", "large.png", "--json-threshold", 0, "--tiles", 64)["images"][0]
    ids = read_ids(Path("out") / entry["panoptic_map"])
    assert ids.shape == (64, 112) and {s["id"] for s in entry["segments"]} == set(np.unique(ids).tolist()) - {0}
    assert sum(entry["areas"].values()) == pytest.approx(1)
    assert all(o["mask"]["size"] == [64, 112] for o in entry["objects"])


def test_thresholds_are_printed_only_for_models_that_find_objects(run, capsys):
    assert "thresholds" in predictions(run, "--input", "b.png")
    assert "objects from score 0.50 (the default)" in capsys.readouterr().out
    make_run(MASKS.replace('["panoptic", "semantic", "instance"]', '["semantic"]'), "ShapesSegmentation")
    assert "thresholds" not in predictions("run", "--input", "b.png")
    assert "objects from" not in capsys.readouterr().out


def test_thresholds_by_class_name(run, capsys):
    def count(threshold):
        (entry,) = predictions(run, "--input", "b.png", "--threshold", threshold)["images"]
        return Counter(found["class"] for found in entry["objects"])

    everything = count("0")
    (name, number), *others = everything.items()
    assert count(f"{name}=0,1") == {name: number}
    assert count(f"{name}=1,0") == dict(others)
    assert "objects from score 0.00 to 1.00, by class (as asked for)" in capsys.readouterr().out
    wrong = [run, "--input", "b.png", "--threshold", f"{name}x=0.3"]
    assert f"threshold: the model has no class '{name}x'. Did you mean '{name}'" in fails(capsys, *wrong)


def test_images_without_objects_are_named_with_their_best_box(run, capsys):
    predictions(run, "--input", "b.png", "--threshold", "1")
    lines = capsys.readouterr().out
    assert "nothing was found in 1 of 1 image, where the best box is drawn dashed:" in lines and "the best is" in lines
    predictions(run, "--input", "b.png", "--threshold", "1", "--no-draw")
    assert "nothing was found in 1 of 1 image:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.5", 0.5),
        ("cat=0.3,0.6", {"cat": 0.3, "*": 0.6}),
        ("0.6,a, b=0.3", {"*": 0.6, "a, b": 0.3}),
        ("a=b=0.2", {"a=b": 0.2}),
    ],
)
def test_thresholds_are_read_from_text(text, expected):
    assert predict.threshold(text) == expected


@pytest.mark.parametrize("text", ["", "cat", "cat=x", "cat=2", "cat=0.3,dog", "0.2,0.3"])
def test_wrong_thresholds_are_named(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected a number from 0 to 1|two scores"):
        predict.threshold(text)


def test_broken_images_are_named_and_left_out(run, capsys):
    Path("photos/broken.jpg").write_bytes(b"\xff\xd8 no image")
    Path("photos/endless.jpg").symlink_to("/dev/zero")
    Image.new("1", (20000, 20000)).save("photos/huge.png")
    error = fails(capsys, run, "--input", "photos")
    assert "left out: " in error and all(f"{name}'" in error for name in ("broken.jpg", "endless.jpg", "huge.png"))
    assert "error: 3 of 5 inputs could not be predicted" in error
    result = json.loads(Path("out/predictions.json").read_text())
    assert [entry["image"] for entry in result["images"]] == ["photos/a.jpg", "photos/deep/a.png"]
    assert [entry["input"] for entry in result["failed"]] == [
        f"photos/{n}" for n in ("broken.jpg", "endless.jpg", "huge.png")
    ]
    assert fails(capsys, run, "--input", "photos/broken.jpg").count("broken.jpg") == 1


def test_circular_links_are_left_out(run, capsys):
    Path("photos/circle.png").symlink_to("circle.png")
    error = fails(capsys, run, "--input", "photos")
    assert "left out: input: cannot read 'photos/circle.png' (Too many levels of symbolic links)" in error
    assert len(json.loads(Path("out/predictions.json").read_text())["images"]) == 2


def test_image_too_large_for_memory_is_an_error_with_a_remedy(run, capsys, monkeypatch):
    def postprocess(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 676000000 bytes.\nmore")

    monkeypatch.setattr(DETR_MODEL, "postprocess", postprocess)
    for tiles in ([], ["--tiles", 32]):
        message = fails(capsys, run, "--input", "b.png", *tiles)
        assert "the largest of" in message and "(DefaultCPUAllocator: can't allocate memory: you tried" in message
        assert "Use a smaller batch_size (--batch-size), tiles (--tiles 800)" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--input", "none.jpg"], "'none.jpg': no such file or folder, and no file matches it"),
        (["run", "--input", "empty"], "folder 'empty' has no image ("),
        (["run", "--input", "clip.mp4"], "--input: cannot decode 'clip.mp4' (8 bytes)"),
        (["run", "--input", "b.png", "--task", "semantic"], "task 'semantic': the model does not predict it"),
        (["run", "--input", "b.png", "--batch-size", "0"], "expected an integer of at least 1"),
        (["run", "--input", "b.png", "--threshold", "2"], "expected a number from 0 to 1"),
        (["config.py", "--input", "b.png"], "a config has no weights"),
        (["nothing", "--input", "b.png"], "'nothing' is neither a model of the zoo"),
    ],
)
def test_wrong_arguments_are_helpful_errors(run, capsys, arguments, message):
    Path("empty").mkdir()
    Path("clip.mp4").write_bytes(b"no video")
    assert message in fails(capsys, *arguments)


def test_one_input_does_not_end_the_prediction_of_the_others(run, capsys, monkeypatch):
    run_model = DETR_MODEL.forward

    def forward(model, images, padding_mask=None, **others):
        if images.shape[-1] >= 600:
            raise RuntimeError("Calculated padded input size per channel: (2 x 600). Kernel size can't be greater")
        return run_model(model, images, padding_mask, **others)

    monkeypatch.setattr(DETR_MODEL, "forward", forward)
    cv2.imwrite("photos/b.png", np.zeros((2, 600, 3), np.uint8))
    for batch_size in (1, 3):
        error = fails(capsys, run, "--input", "photos", "--batch-size", batch_size)
        result = json.loads(Path("out/predictions.json").read_text())
        assert "left out: 'photos/b.png': RuntimeError: Calculated padded input" in error
        assert "error: 1 of 3 inputs could not be predicted" in error and "Traceback" not in error
        assert [entry["image"] for entry in result["images"]] == ["photos/a.jpg", "photos/deep/a.png"]
        assert [entry["input"] for entry in result["failed"]] == ["photos/b.png"]
        assert sorted(path.name for path in Path("out").rglob("*.jpg")) == ["a.jpg", "a.jpg"]
    predictor = load(run, device="cpu")
    assert [prediction.name for prediction in predictor("photos")] == ["photos/a.jpg", "photos/deep/a.png"]
    with pytest.raises(RuntimeError, match="Kernel size"):
        predictor("photos/b.png")


def test_an_earlier_prediction_is_not_replaced(run, capsys):
    args = [run, "--input", "b.png", "--device", "cpu", "--out", "out"]
    predict.main(args)
    before = Path("out/predictions.json").read_bytes()
    for more in ([], ["--no-draw"]):
        with pytest.raises(SystemExit, match="--out out: 'out/predictions.json' exists already.*--overwrite"):
            predict.main([*args, *more, "--threshold", "0"])
    assert Path("out/predictions.json").read_bytes() == before
    predict.main([*args, "--threshold", "0", "--overwrite"])
    assert Path("out/predictions.json").read_bytes() != before


def test_nothing_of_an_earlier_prediction_stays_in_a_folder_that_is_overwritten(run):
    args = [run, "--device", "cpu", "--out", "out", "--overwrite", "--threshold", "0"]
    predict.main([*args, "--input", "photos/a.jpg", "photos/deep/a.png", "--format", "coco"])
    Path("out/mine.txt").write_text("mine")
    Path("out/mine.jpg").write_bytes(Path("photos/a.jpg").read_bytes())
    assert Path("out/coco/instances.json").is_file()
    predict.main([*args, "--input", "b.png"])
    assert {path.name for path in Path("out").rglob("*.*") if not path.name.startswith((".", "predictions"))} == {
        "b.jpg",
        "mine.jpg",
        "mine.txt",
    }
    assert not Path("out/coco").exists()
    with pytest.raises(SystemExit, match="--out out: --overwrite would remove the input 'out/b.jpg', which vitkit has"):
        predict.main([*args, "--no-draw", "--input", "out/b.jpg"])
    assert Path("out/b.jpg").is_file()


def test_links_in_the_output_are_not_followed(run, tmp_path):
    (tmp_path / "victim").mkdir()
    Path("victim/a.txt").write_text("mine")
    Path("out").mkdir()
    for name in ("b.jpg", "predictions.json"):
        Path("out", name).symlink_to(tmp_path / "victim/a.txt")
    args = [run, "--device", "cpu", "--out", "out", "--overwrite", "--input"]
    predict.main([*args, "b.png"])
    assert Path("victim/a.txt").read_text() == "mine" and not Path("out/b.jpg").is_symlink()
    Path("out/deep").symlink_to(tmp_path / "victim")
    with pytest.raises(SystemExit, match="lies outside 'out', as a folder in between is a link"):
        predict.main([*args, "photos"])
    assert [path.name for path in Path("victim").iterdir()] == ["a.txt"]


@pytest.mark.parametrize("form", ["jpg", "png"])
def test_a_full_disk_is_one_line_and_no_file_is_cut_off(run, capsys, monkeypatch, form):
    def fail(path, write, *, sync):
        if path.name == f"b.{form}":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomically(path, write, sync=sync)

    monkeypatch.setattr("vitkit.io.output.write_atomically", fail)
    with pytest.raises(SystemExit) as error:
        predict.main([run, "--input", "b.png", "--device", "cpu", "--out", "out", "--image-format", form])
    assert str(error.value.code).startswith(f"error: 'out/b.{form}' cannot be written (No space left on device)")
    assert not list(Path("out").glob("[!.]*"))


def test_video_has_its_name_when_it_is_complete_and_can_be_read_before(tmp_path):
    frame = np.zeros((48, 64, 3), np.uint8)
    writer = VideoWriter(tmp_path / "a.mp4", frame, 10)
    for _ in range(30):
        writer.add(frame)
    shutil.copy(tmp_path / "a.part-0.mp4", tmp_path / "copy.mp4")  # what a killed process leaves
    assert not (tmp_path / "a.mp4").exists()
    assert cv2.VideoCapture(str(tmp_path / "copy.mp4")).get(cv2.CAP_PROP_FRAME_COUNT) >= 12
    writer.close()
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "copy.mp4"}
    assert cv2.VideoCapture(str(tmp_path / "a.mp4")).get(cv2.CAP_PROP_FRAME_COUNT) == 30


def test_a_video_in_several_parts_is_joined_frame_by_frame(tmp_path):
    path, starts, killed = tmp_path / "a.mp4", [], []
    for end in (21, 45, 47, 60):  # the third adds too few frames for a fragment
        start = num_written(path) // 4 * 4
        writer = VideoWriter(path, numbered_frame(start, 48, 64), 10, start=start)
        for number in range(start, end):
            writer.add(numbered_frame(number, 60 if start else 48, 64))  # another legend
        starts.append(start)
        killed.append(writer)  # is not closed
        assert end - 12 <= num_written(path) <= end or end == 47
    assert starts[0] == 0 < starts[1] < starts[2] == starts[3]
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"] and num_written(path) == 0
    with open_video(path) as video:
        numbers = [number_of(frame) for frame in video.frames(range(len(video.times)))]
        assert numbers == [*range(60)] and video.times.tolist() == pytest.approx([number / 10 for number in range(60)])


@pytest.mark.parametrize("draw", [True, False])
def test_a_killed_video_is_continued(run, draw, monkeypatch, capsys):
    write_video(Path("clip.avi"), 40, codec="mpeg4")
    options = ["run", "--input", "clip.avi", "--json-threshold", "0", "--batch-size", "4", "--device", "cpu"]
    options += [] if draw else ["--no-draw"]
    predict.main([*options, "--out", "whole"])

    draw_frame, close, seen = writing.draw_frame, VideoWriter.close, []

    def killed(prediction, **others):
        if prediction.name == "30":
            raise SystemExit
        return draw_frame(prediction, **others)

    monkeypatch.setattr(writing, "draw_frame", killed)
    monkeypatch.setattr(VideoWriter, "close", lambda *args, **others: None)
    with pytest.raises(SystemExit):
        predict.main([*options, "--out", "parts"])
    with Path("parts/clip_frames.jsonl").open("a") as file:
        file.write('{"frame": 30, "sec')

    def counted(prediction, **others):
        seen.append(int(prediction.name))
        return draw_frame(prediction, **others)

    monkeypatch.setattr(writing, "draw_frame", counted)
    monkeypatch.setattr(VideoWriter, "close", close)
    predict.main([*options, "--resume", "parts"])
    first = min(seen)  # frames are drawn in several threads
    assert sorted(seen) == [*range(first, 40)] and 16 <= first <= 28 and first % 4 == 0
    assert f"clip.avi: continues at frame {first} of 40" in capsys.readouterr().out
    for name in ("clip_frames.jsonl", "predictions.json"):
        assert Path("parts", name).read_bytes() == Path("whole", name).read_bytes()
    if draw:
        with open_video("parts/clip.mp4") as parts, open_video("whole/clip.mp4") as whole:
            assert len(parts.times) == len(whole.times) == 40
            frames = zip(parts.frames(range(40)), whole.frames(range(40)))
            assert max(np.abs(a.astype(int) - b).mean() for a, b in frames) < 3  # compressed otherwise
    assert not list(Path("parts").glob("*part-*"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_video_on_a_full_disk_is_a_one_line_error(tmp_path, monkeypatch):
    frame = np.zeros((48, 64, 3), np.uint8)
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok: path.symlink_to("/dev/full"))
    with pytest.raises(DataError, match=r"b.mp4' cannot be written \(No space left on device\)"):
        VideoWriter(tmp_path / "b.mp4", frame, 10).add(frame)
    assert not (tmp_path / "b.mp4").exists()


def test_folders_of_simultaneous_calls_differ(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: make_new_folder(tmp_path / "predict"), range(24)))
    assert {folder.name for folder in folders} == {"predict", *(f"predict-{k}" for k in range(2, 25))}
