"""Videos from the command lines to the images that the tools write."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.video_files import number_of, numbered_frame, write_video
from PIL import Image

from vitkit.apps.inference import load
from vitkit.apps.inference.videos import classify_video
from vitkit.config import load_config
from vitkit.data.datasets.video import VideoFolder
from vitkit.engine.validation import merge_views
from vitkit.errors import ConfigError, DataError
from vitkit.io.video_files import open_video
from vitkit.tools import browse, doctor, explain, predict
from vitkit.tools import test as test_tool
from vitkit.tools import train as train_tool

CONFIG = """
def config():
    videos = dict(type="VideoFolder", folder="videos", num_frames=4, sampling_rate=2)
    size = dict(size=16, short_side=16)
    return dict(
        model=dict(
            type="Classifier",
            backbone=dict(
                type="TimeSformer", image_size=16, num_frames=4, patch_size=8, d_model=16, depth=1, num_heads=2
            ),
        ),
        criterion=dict(type="ClassificationLoss"),
        data=dict(
            train=dict(
                **videos, temporal_jitter=True,
                transforms=dict(type="ClassificationTrainTransforms", size=16, erasing=0.2, mixup=0.8),
            ),
            val=dict(**videos, num_clips=2, transforms=dict(type="ClipEvalTransforms", num_crops=3, **size)),
            images_per_gpu=2, num_workers=0,
        ),
        optimizer=dict(type="AdamW", lr=1e-3),
        schedule=dict(type="CosineLR"),
        evaluator=dict(type="ClassificationEvaluator"),
        train=dict(epochs=1, best_metric="top1"),
    )
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with a config, videos of two classes, and a run on them."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, number in (("jump", 0), ("jump", 1), ("run", 0), ("run", 1)):
            (folder / "videos" / name).mkdir(parents=True, exist_ok=True)
            write_video(folder / "videos" / name / f"{number}.mp4", 6 + 10 * number)
        (folder / "clips.py").write_text(CONFIG)
        train_tool.main(["clips.py", "--device", "cpu", "--run-dir", "trained"])
    return folder


@pytest.fixture(autouse=True)
def inside(run, monkeypatch):
    monkeypatch.chdir(run)


def test_views_of_each_video_are_averaged_and_classes_listed(run, capsys):
    test_tool.main(["trained", "--per-class", "--device", "cpu", "--out", "results.json"])
    printed = capsys.readouterr().out
    assert "4 videos, 2 classes" in printed and "jump" in printed
    assert "2 videos shorter than a clip: the last frame was repeated\n" in printed and "ms per clip" in printed
    images = json.loads((run / "results.json").read_text())["images"]
    assert [image["image_id"] for image in images] == ["jump/0.mp4", "jump/1.mp4", "run/0.mp4", "run/1.mp4"]
    predictor = load("trained")
    expected = classify_video(predictor, "videos/run/1.mp4", num_clips=2).scores.mean(dim=0)
    assert images[3]["scores"] == pytest.approx(sorted(expected.tolist(), reverse=True), abs=1e-5)


def test_each_video_is_drawn_once_with_the_mean_of_its_views():
    scores = ([0.1, 0.9], [0.5, 0.5], [1.0, 0.0])
    targets = [{"image_id": name, "label": 0} for name in ("a", "a", "b")]
    samples = merge_views([{"class_scores": torch.tensor(row)} for row in scores], targets)
    assert [target["image_id"] for _, target in samples] == ["a", "b"]
    torch.testing.assert_close(samples[0][0]["class_scores"], torch.tensor([0.3, 0.7]))
    torch.testing.assert_close(samples[1][0]["class_scores"], torch.tensor([1.0, 0.0]))


def test_drawn_frames_span_the_video_from_first_to_last(run):
    videos = VideoFolder("videos")
    assert [number_of(frame) for frame in videos.load_frames(1, 4)] == [0, 5, 10, 15]


def test_training_counts_short_videos_in_its_log(run):
    log = (run / "trained" / "console.txt").read_text()
    assert "epoch 1/1 done" in log and "2 videos shorter than a clip padded" in log
    assert log.count("video 'run/0.mp4' is shorter than a clip") == 2  # in training and in evaluation


def test_a_single_image_is_refused_by_a_model_of_videos(run, tmp_path):
    image = tmp_path / "a.png"
    Image.new("RGB", (16, 16)).save(image)
    with pytest.raises(SystemExit, match=r"a\.png' is a single image, but the model classifies videos"):
        predict.main(["trained", "--input", str(image), "--out", str(tmp_path / "out"), "--device", "cpu"])
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit, match="--every: the model classifies clips, whose frames its config chooses"):
        predict.main(["trained", "--input", "videos/run/1.mp4", "--every", "2", "--device", "cpu"])
    with pytest.raises(DataError, match=r"a\.png' is a single image\. Give a video"):
        load("trained")(image)


def test_classes_of_a_video_are_drawn_over_time(run, capsys):
    args = ["trained", "--input", "videos/run/1.mp4", "--task", "classification", "--out", "drawn", "--device", "cpu"]
    predict.main(args)
    video = json.loads((run / "drawn" / "predictions.json").read_text())["videos"][0]
    assert {entry["class"] for entry in video["classes"]} == {"jump", "run"}
    # 16 frames at 30 per second are two clips of 8.
    assert [clip["seconds"] for clip in video["clips"]] == [
        pytest.approx([0, 7 / 30], abs=1e-3),
        pytest.approx([8 / 30, 15 / 30], abs=1e-3),
    ]
    assert Image.open(run / "drawn" / video["drawn"]).size[0] > 800
    assert "videos/run/1.mp4: " in capsys.readouterr().out


def test_folders_of_frames_are_videos(run):
    for name in ("frames", "deeper/frames"):
        (run / name).mkdir(parents=True)
        for number in range(12):
            Image.fromarray(numbered_frame(number, 48, 64)).save(run / name / f"{number}.png")
    inputs = ["frames", "deeper", "videos/run/1.mp4"]
    predict.main(["trained", "--input", *inputs, "--out", "of_frames", "--device", "cpu"])
    predictions = json.loads((run / "of_frames" / "predictions.json").read_text())
    videos = {video["video"]: video for video in predictions["videos"]}
    assert "images" not in predictions and set(videos) == {"frames", "deeper/frames", "videos/run/1.mp4"}
    scores = {entry["class"]: entry["score"] for entry in videos["frames"]["classes"]}
    predictor = load("trained")
    expected = classify_video(predictor, "frames").scores.mean(dim=0).tolist()
    assert [scores[name] for name in predictor.classes] == pytest.approx(expected, abs=1e-5)
    drawn = {video["drawn"] for video in videos.values()}
    assert len(drawn) == 3 and all((run / "of_frames" / file).is_file() for file in drawn)


def test_a_call_predicts_on_one_video_or_several(run, tmp_path):
    model = load("trained")
    expected = [classify_video(model, f"videos/{name}.mp4").scores.mean(dim=0) for name in ("run/1", "jump/0")]
    one = model("videos/run/1.mp4")
    torch.testing.assert_close(one.fields["class_scores"], expected[0])
    assert one.name == "videos/run/1.mp4" and one.names[0] == model.classes[int(expected[0].argmax())]
    one.save(tmp_path / "drawn.png")
    both = model(["videos/run/1.mp4", "videos/jump/0.mp4"])
    torch.testing.assert_close([prediction.fields["class_scores"] for prediction in both], expected)
    with pytest.raises(ConfigError, match="tiles: the model classifies videos"):
        model("videos/run/1.mp4", tiles=64)


def test_a_damaged_video_does_not_stop_the_others(run, capsys):
    (run / "damaged.mp4").write_bytes(b"no video")
    inputs = ["damaged.mp4", "videos/run/1.mp4"]
    with pytest.raises(SystemExit, match="error: 1 of 2 inputs could not be predicted"):
        predict.main(["trained", "--input", *inputs, "--out", "of_some", "--no-draw", "--device", "cpu"])
    videos = json.loads((run / "of_some" / "predictions.json").read_text())["videos"]
    assert [video["video"] for video in videos] == ["videos/run/1.mp4"]
    printed = capsys.readouterr().err
    assert "left out: input: cannot decode 'damaged.mp4' (8 bytes)" in printed
    with pytest.raises(SystemExit, match=r"error: input: cannot decode 'damaged.mp4'"):
        predict.main(["trained", "--input", "damaged.mp4", "--out", "of_none", "--device", "cpu"])


def test_a_run_is_tested_from_another_folder(run, monkeypatch, capsys):
    monkeypatch.chdir(run / "videos")
    test_tool.main(["../trained", "--device", "cpu", "--out", "../elsewhere.json"])
    assert "4 videos, 2 classes" in capsys.readouterr().out


def test_images_are_refused_by_a_clip_model(run):
    with pytest.raises(ConfigError, match="give a video"):
        load("trained").run([np.zeros((16, 16, 3), np.uint8)])


def test_call_accepts_videos_in_every_form(run):
    model = load("trained")
    path = "videos/run/1.mp4"
    expected = classify_video(model, path)
    with open_video(path) as video:
        frames = list(video.frames(range(len(video.times))))
    (run / "frames_of_1").mkdir()
    for number, frame in enumerate(frames):
        Image.fromarray(frame).save(run / "frames_of_1" / f"{number}.png")
    array = np.stack(frames)
    tensor = torch.from_numpy(array).permute(0, 3, 1, 2)
    for one in (path, Path(path), array, tensor, frames, [Image.fromarray(f) for f in frames], "frames_of_1"):
        prediction = model(one)
        torch.testing.assert_close(prediction.fields["class_scores"], expected.scores.mean(dim=0), atol=0.02, rtol=0)
    assert prediction.names[0] in model.classes and prediction.draw().shape[2] == 3
    Path("broken.mp4").write_bytes(b"no video")
    found = model("videos")
    assert len(found) > 1 and [p.name for p in model([path, array])] == [path, "video_1"]
    assert [p.name for p in model("*/*/1.mp4")] and [p.name for p in model(iter([path]))] == [path]
    for source, message in (
        (np.zeros((16, 16, 3), np.uint8), r"video_0, frame 0: got uint8 \(16, 3\)"),
        ("broken.mp4", "broken.mp4"),
        ("none*.mp4", "no file matches"),
        (7, "classifies videos by the order of their frames: expected a video's file"),
    ):
        with pytest.raises(DataError, match=message):
            model(source)


def test_image_model_does_not_classify_videos(run):
    predictor = load("trained")
    predictor.sampling = None
    with pytest.raises(ConfigError, match="predicts on images"):
        classify_video(predictor, "videos/run/1.mp4")


def test_attention_over_space_and_time_is_drawn(run, capsys):
    args = ["trained", "--video", "videos/run/1.mp4", "--out", "maps", "--device", "cpu"]
    explain.main([*args, "--frame", "1", "--points", "3,12", "9,2"])
    assert "1_attention.png" in capsys.readouterr().out
    width, height = Image.open(run / "maps" / "1_attention.png").size
    assert width > 800 and height > 800  # 4 columns of frames, and rows of frames, the class token and two points
    explain.main([*args, "--encoder-layer", "0"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--frame", "4"], "frame: got 4; the clip's frames are 0 to 3"),
        (["--points", "16,0"], "points: 16,0 is outside the clip, which is 16x16 pixels"),
        (["--encoder-layer", "1"], "encoder_layer: got 1; the model's layers are 0 to 0"),
    ],
)
def test_points_frames_and_blocks_that_do_not_exist_are_errors(run, wrong, message):
    with pytest.raises(SystemExit, match=message):
        explain.main(["trained", "--video", "videos/run/1.mp4", "--device", "cpu", *wrong])


def test_browse_draws_clips_as_strips(run):
    browse.main(["clips.py", "--max-images", "2", "--out", "look"])
    assert np.asarray(Image.open(run / "look" / "figure_1.png")).std() > 10
    browse.main(["clips.py", "--split", "val", "--original", "--max-images", "1", "--out", "look_val"])
    assert (run / "look_val" / "index.html").is_file()


def test_doctor_reports_lengths_rates_short_and_unreadable_videos(run, capsys):
    (run / "videos" / "run" / "bad.mp4").write_bytes(b"no video")
    try:
        status = doctor.main(["clips.py", "--only", "images", "class_balance", "--json"])
    finally:
        (run / "videos" / "run" / "bad.mp4").unlink()
    found = json.loads(capsys.readouterr().out)["issues"]
    issues = {(issue["where"], issue["check"]): issue for issue in found}
    failed = [issue["message"] for issue in found if issue["verdict"] == "fail"]
    assert status == 1 and len(failed) == 2  # in both splits
    assert "1 of 5 videos cannot be read" in failed[0] and "bad.mp4" in failed[0]
    short = issues["data.train", "short videos"]
    assert short["verdict"] == "note" and "2 of 4 videos are shorter than a clip" in short["message"]
    assert "30 in 4" in issues["data.train", "frame rates"]["message"]
    assert issues["data.train", "class balance"]["details"] == {"jump": 2, "run": 3}


def test_video_quickstart_is_valid():
    config = load_config("quickstart/video")
    assert config["data"]["train"]["type"] == "ShapesMotion"
