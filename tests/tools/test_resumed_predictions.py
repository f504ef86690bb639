"""vitkit predict, killed and resumed, or shared by several processes: the files are those of a single, whole run."""

import json
import os
import shutil
import signal
from functools import partial
from itertools import count
from pathlib import Path

import cv2
import numpy as np
import pytest
from helpers.real_runs import finish, start
from helpers.untrained_runs import DETR, MASKS, make_run, make_video

from vitkit.apps.inference.journal import Journal
from vitkit.apps.inference.writing import Output, find_start
from vitkit.io.folders import OUTPUT_LIST
from vitkit.tools import predict

NUM_IMAGES = 40


def die_after(entries: int) -> None:
    """Have this process kill itself in the middle of a line, after so many entries."""
    add, numbers = Journal.add, count(1)

    def killed(journal, index, entry):
        if next(numbers) > entries:
            os.write(journal._file.fileno(), b'{"index": %d, "image": "half' % index)
            os.kill(os.getpid(), signal.SIGKILL)
        add(journal, index, entry)

    Journal.add = killed


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Make a new folder with a run and images of several sizes, two of which cannot be read."""
    monkeypatch.chdir(tmp_path)
    make_run(DETR, "ShapesDetection")
    rng = np.random.default_rng(0)
    Path("photos/deep").mkdir(parents=True)
    for number in range(NUM_IMAGES):
        size = (40 + 8 * int(rng.integers(3)), 48 + 8 * int(rng.integers(3)))
        name = f"photos/{'deep/' if number % 3 else ''}{number:02}.jpg"
        cv2.imwrite(name, rng.integers(0, 255, (*size, 3), dtype=np.uint8))
    for name in ("photos/00.jpg", "photos/deep/19.jpg"):
        Path(name).write_bytes(b"\xff\xd8 no image")


def run(out: str, *options, whole: bool = True, folder: str = "--out") -> None:
    """Predict in this process; `whole` is whether it ends with the line of the inputs that failed."""
    arguments = ["run", "--input", "photos", "--device", "cpu", folder, out, "--json-threshold", "0", *options]
    if not whole:
        return predict.main(arguments)
    with pytest.raises(SystemExit, match="error: 2 of 40 inputs could not be predicted"):
        predict.main(arguments)


def kill(after: int, out: str, *options, inputs: str = "photos") -> None:
    """Predict in a process that is killed in the middle of a line."""
    arguments = ["run", "--input", inputs, "--out", out, "--json-threshold", "0", *options]
    processes = start(*arguments, tool="predict", prepare=partial(die_after, after))
    assert finish(processes) == [-signal.SIGKILL], Path("output.txt").read_text()


def files(out: str) -> dict[str, bytes]:
    """Return what a prediction has written, but for the lines of its processes and the list of what is no data."""
    found = {str(path.relative_to(out)): path.read_bytes() for path in Path(out).rglob("*") if path.is_file()}
    return {name: data for name, data in found.items() if not name.endswith((".jsonl", OUTPUT_LIST))}


def test_killed_and_resumed_prediction_is_that_of_an_uninterrupted_one(photos, capsys):
    options = ("--batch-size", "3", "--format", "coco")
    run("whole", *options)
    kill(13, "killed", *options)
    kept = Path("killed/predictions.jsonl").read_bytes()
    assert kept.count(b"\n") == 13 and kept.endswith(b"half") and not Path("killed/predictions.json").exists()
    capsys.readouterr()
    Path("killed/deep").mkdir(exist_ok=True)  # threads draw ahead, so a kill may leave the folder and a few halves
    Path("killed/deep/13.jpg.0123abcd.tmp").write_bytes(b"half")
    run("killed", *options, folder="--resume")
    assert "resuming killed: 12 of 40 inputs are done" in capsys.readouterr().out
    assert files("killed") == files("whole") and len(files("whole")) == 38 + 4
    lines = Path("killed/predictions.jsonl").read_bytes()
    assert lines.startswith(kept[: -len(b'{"index": 13, "image": "half')])
    images = [json.loads(line)["index"] for line in lines.splitlines() if b'"failed"' not in line[:30]]
    assert len(images) == len(set(images)) == NUM_IMAGES - 2


def test_failed_inputs_are_predicted_again_when_resumed_and_others_are_not(photos, capsys):
    run("out")
    for name in ("photos/00.jpg", "photos/deep/19.jpg"):
        shutil.copy("photos/03.jpg", name)
    before = {path: path.stat().st_mtime_ns for path in Path("out").rglob("*.jpg")}
    run("out", whole=False, folder="--resume")
    assert "2 images, " in capsys.readouterr().out
    result = json.loads(Path("out/predictions.json").read_text())
    assert len(result["images"]) == NUM_IMAGES and "failed" not in result
    assert {path: path.stat().st_mtime_ns for path in before} == before
    run("out", "--format", "yolo", whole=False, folder="--resume")  # nothing is left but to write the annotations
    assert len(list(Path("out/yolo/labels").rglob("*.txt"))) == NUM_IMAGES


def test_a_photo_that_was_replaced_is_predicted_again_when_resumed(photos, capsys):
    run("out")
    shutil.copy("photos/03.jpg", "photos/06.jpg")
    run("out", folder="--resume")
    assert "1 input changed since: predicted again" in capsys.readouterr().out
    run("whole")
    assert Path("out/predictions.json").read_bytes() == Path("whole/predictions.json").read_bytes()
    assert Path("out/06.jpg").read_bytes() == Path("whole/06.jpg").read_bytes()


def test_a_second_command_into_one_folder_ends_in_a_line_that_names_the_first(photos, monkeypatch):
    add, errors = Journal.add, []

    def interrupted(journal, index, entry):
        for options in ((), ("--overwrite",), ("--batch-size", "2")) if not errors else ():
            with pytest.raises(SystemExit) as error:
                predict.main(["run", "--input", "photos", "--out", "out", "--device", "cpu", *options])
            errors.append(str(error.value))
        add(journal, index, entry)

    monkeypatch.setattr(Journal, "add", interrupted)
    run("out")
    assert len(errors) == 3 and all(f"'predictions.jsonl' (process {os.getpid()} on " in error for error in errors)
    run("whole")
    assert files("out") == files("whole")


def test_lines_of_another_model_are_not_merged_where_nothing_is_locked(photos, monkeypatch):
    add = Journal.add

    def replaced(journal, index, entry):
        settings = json.loads(Path("out/predictions_settings.json").read_text())
        Path("out/predictions_settings.json").write_text(json.dumps(settings | {"weights": "another"}))
        add(journal, index, entry)

    monkeypatch.setattr(Journal, "add", replaced)
    with pytest.raises(SystemExit, match='were made with weights "another", and now it is'):
        predict.main(["run", "--input", "photos", "--out", "out", "--device", "cpu"])
    assert not Path("out/predictions.json").exists()


def test_a_video_that_was_replaced_is_not_continued(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(DETR, "ShapesDetection")
    make_video("a.mp4")
    kill(1, "out", inputs="a.mp4")
    frames = Path("out/a_frames.jsonl").read_text().splitlines(keepends=True)
    Path("out/a_frames.jsonl").write_text("".join(frames).replace('"frame"', '"other"'))
    os.utime("a.mp4", (0, 0))
    predict.main(["run", "--input", "a.mp4", "--device", "cpu", "--json-threshold", "0", "--resume", "out"])
    assert Path("out/a_frames.jsonl").read_text().splitlines(keepends=True) == frames


def test_shards_are_merged_by_the_last_one(photos, capsys):
    run("whole", "--batch-size", "2")
    options = ("--batch-size", "2", "--shard")
    run("shards", *options, "3/3", whole=False)
    assert "shard 3/3 is done; 28 of 40 inputs are left to the others" in capsys.readouterr().out
    kill(5, "shards", *options, "1/3")
    run("shards", *options, "1/3", whole=False, folder="--resume")
    assert not Path("shards/predictions.json").exists()
    run("shards", *options, "2/3")
    assert files("shards") == files("whole")
    with pytest.raises(SystemExit, match="were made with batch_size 2, and now it is 1"):
        predict.main(["run", "--input", "photos", "--resume", "shards", "--json-threshold", "0"])
    with pytest.raises(SystemExit, match="--overwrite: would remove what the other processes write"):
        predict.main(["run", "--input", "photos", "--out", "shards", "--overwrite", "--shard", "1/2"])
    with pytest.raises(SystemExit, match="--out: not given. Name the folder that the processes share"):
        predict.main(["run", "--input", "photos", "--shard", "1/2"])


def test_processes_of_torchrun_share_the_inputs(photos):
    run("whole")
    arguments = ["run", "--input", "photos", "--out", "shared", "--json-threshold", "0"]
    assert 1 in finish(start(*arguments, tool="predict", ranks=2))
    assert "2 of 40 inputs could not be predicted" in Path("output.txt").read_text()
    assert files("shared") == files("whole")
    lines = [Path(f"shared/predictions-{k}-of-2.jsonl").read_text().count("\n") for k in (1, 2)]
    assert lines == [NUM_IMAGES // 2] * 2


def test_maps_and_videos_are_those_of_an_uninterrupted_prediction(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(MASKS, "ShapesSegmentation")
    Path("mixed").mkdir()
    for number in range(2):
        cv2.imwrite(f"mixed/{number}.png", np.random.default_rng(number).integers(0, 255, (48, 64, 3), dtype=np.uint8))
    for name in ("a", "b"):
        make_video(f"mixed/{name}.mp4")
    arguments = ["run", "--input", "mixed", "--device", "cpu", "--json-threshold", "0", "--out"]
    predict.main([*arguments, "whole"])
    kill(3, "killed", inputs="mixed")
    assert len(Path("killed/a_frames.jsonl").read_text().splitlines()) == 7
    predict.main([*arguments[:-1], "--resume", "killed"])
    assert files("killed") == files("whole") and len(files("whole")) == 2 * 3 + 2 + 2
    assert [len(video["frames"]) for video in json.loads(files("killed")["predictions.json"])["videos"]] == [7, 7]


@pytest.mark.parametrize(
    ("lines", "start"),
    [(b"", 0), (b"{}\n" * 9, 8), (b'{}\n{}\n{}\n{"half', 2), (b"{}\n" * 5 + b"\0\0\0{}\n{}\n{}\n", 4)],
)
def test_a_video_continues_before_the_first_damaged_line(tmp_path, lines, start):
    (tmp_path / "a_frames.jsonl").write_bytes(lines)
    assert find_start("a", Output(tmp_path, draw=False, resume=True)) == start
    assert find_start("a", Output(tmp_path, draw=False, resume=True, batch_size=4)) == start // 4 * 4
