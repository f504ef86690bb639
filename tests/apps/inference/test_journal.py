"""The lines of what is predicted, from which a killed prediction goes on."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from vitkit.apps.inference.journal import SETTINGS_NAME, Journal, Lines, Shard, states_of
from vitkit.apps.inference.writing import Output, find_share
from vitkit.errors import ConfigError, DataError

SETTINGS = {"model": "detr", "threshold": 0.5, "tiles": None}
WHOLE = Shard()


def write(folder: Path, lines: dict[int, str], shard: Shard = WHOLE, **options) -> None:
    with Journal(folder, shard, SETTINGS, **options) as journal:
        for index, kind in lines.items():
            journal.add(index, {kind: f"{index}.jpg", "error": "none"})


def names(entries) -> list[str]:
    return [next(iter(entry.values())) for entry in entries]


def test_entries_are_read_in_the_order_of_the_inputs_whoever_wrote_them(tmp_path):
    write(tmp_path, {2: "image", 0: "image"}, Shard(0, 2))
    write(tmp_path, {3: "failed", 1: "image", 4: "video"}, Shard(1, 2))
    lines = Lines(tmp_path, 6)
    assert names(lines.images) == names(lines.images) == ["0.jpg", "1.jpg", "2.jpg"] and len(lines.images) == 3
    assert names(lines.videos) == ["4.jpg"] and names(lines.failures) == ["3.jpg"]
    assert lines.num_missing == 1 and lines.done.tolist() == [True, True, True, False, True, False]


def test_half_a_last_line_is_removed_and_a_damaged_one_is_predicted_again(tmp_path):
    write(tmp_path, {0: "image", 1: "image", 2: "image"})
    path = tmp_path / "predictions.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0" * len(lines[1]) + b"\n" + lines[2][:-4])
    assert Lines(tmp_path, 3).done.tolist() == [True, False, False]
    write(tmp_path, {1: "image"}, resume=True)
    assert path.read_bytes().endswith(lines[1]) and path.read_bytes().count(b"\n") == 3
    assert Lines(tmp_path, 3).done.tolist() == [True, True, False]


def test_long_half_line_is_removed(tmp_path):
    write(tmp_path, {0: "image"})
    path = tmp_path / "predictions.jsonl"
    whole = path.read_bytes()
    for rest in (b"x" * 70000, b"x" * (1 << 16)):
        path.write_bytes(whole + rest)
        write(tmp_path, {}, resume=True)
        assert path.read_bytes() == whole
    path.write_bytes(b"x" * 70000)
    write(tmp_path, {}, resume=True)
    assert path.read_bytes() == b""


def test_a_success_replaces_a_failure_and_not_the_reverse(tmp_path):
    write(tmp_path, {0: "failed", 1: "image"})
    write(tmp_path, {0: "image", 1: "failed"}, resume=True)
    assert names(Lines(tmp_path, 2).images) == ["0.jpg", "1.jpg"]


def test_resuming_with_other_settings_is_refused(tmp_path):
    write(tmp_path, {0: "image"})
    for changed, message in (
        ({"threshold": 0.3}, "were made with threshold 0.5, and now it is 0.3"),
        ({"model": "x" * 200}, '"detr", and now it is "xxx'),
    ):
        with pytest.raises(ConfigError, match=message):
            Journal(tmp_path, Shard(), SETTINGS | changed, resume=True)
    (tmp_path / SETTINGS_NAME).write_text("[1")
    with pytest.raises(DataError, match=r"predictions_settings.json: not valid JSON"):
        Journal(tmp_path, Shard(), SETTINGS, resume=True)


def test_earlier_lines_are_neither_mixed_nor_lost(tmp_path):
    write(tmp_path, {0: "image"}, Shard(0, 2))
    write(tmp_path, {1: "image"}, Shard(1, 2))
    for shard in (Shard(), Shard(0, 3), Shard(0, 2)):
        with pytest.raises(DataError, match=r"predictions-1-of-2.jsonl' exists already. Continue it by --resume"):
            Journal(tmp_path, shard, SETTINGS)
    with pytest.raises(ConfigError, match="threshold 0.5, and now it is 0.9"):  # a shard that was started otherwise
        Journal(tmp_path, Shard(2, 2), SETTINGS | {"threshold": 0.9})
    write(tmp_path, {0: "image"}, overwrite=True)
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["predictions.jsonl", SETTINGS_NAME]


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}], ids=str)
@pytest.mark.parametrize(
    ("first", "second"),
    [(Shard(), Shard()), (Shard(1, 2), Shard(1, 2)), (Shard(1, 2), Shard()), (Shard(), Shard(1, 2))],
)
def test_two_processes_do_not_write_the_same_results(tmp_path, first, second, options):
    pytest.importorskip("fcntl")
    with Journal(tmp_path, first, SETTINGS) as journal:
        journal.add(0, {"image": "0.jpg"})
        with pytest.raises(ConfigError, match=rf"writing '{first.file_name}' \(process {os.getpid()} on .* since 20"):
            Journal(tmp_path, second, {}, **options)
        journal.add(1, {"image": "1.jpg"})
        assert names(Lines(tmp_path, 2).images) == ["0.jpg", "1.jpg"]
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == [first.file_name, SETTINGS_NAME]
    write(tmp_path, {1: "image"}, second, resume=True)


def test_shards_of_one_number_write_at_once_and_locks_of_killed_processes_are_removed(tmp_path):
    (tmp_path / ".predictions.jsonl.lock").write_text("process 1 on another machine")
    with Journal(tmp_path, Shard(0, 2), SETTINGS), Journal(tmp_path, Shard(1, 2), SETTINGS):
        pass
    assert [path.name for path in tmp_path.glob(".*")] == [".vitkit-output"]


def test_an_input_that_was_changed_since_does_not_count(tmp_path):
    paths = [tmp_path / f"{name}.jpg" for name in "abc"]
    for path in paths:
        path.write_bytes(b"old")
    folder, old = tmp_path / "out", states_of([*paths, tmp_path / "none"])
    with Journal(folder, Shard(), SETTINGS) as journal:
        for index, kind in enumerate(("image", "failed", "started")):
            journal.add(index, {kind: paths[index].name, "error": "none", "state": f"{old[index]:x}"})
    lines = Lines(folder, 4, old)
    assert names(lines.images) == ["a.jpg"] and names(lines.failures) == ["b.jpg"] and lines.started[2]
    for path in paths:
        path.write_bytes(b"new!")
    lines = Lines(folder, 4, states_of([*paths, tmp_path / "none"]))
    assert not lines.done.any() and not lines.started.any() and not len(lines.failures)
    assert (lines.num_changed, lines.num_missing) == (2, 2)


@pytest.mark.parametrize(
    "line", [b'{"index": 0, "image": "a" "b"}\n', b'{"index": 9, "image": "a"}\n', b"[]\n", b"{}\n"]
)
def test_a_line_that_is_not_sound_is_predicted_again(tmp_path, line):
    write(tmp_path, {1: "image"})
    (tmp_path / "predictions.jsonl").write_bytes(line + (tmp_path / "predictions.jsonl").read_bytes())
    assert Lines(tmp_path, 2).done.tolist() == [False, True]


def test_an_error_before_the_first_line_leaves_nothing(tmp_path):
    with pytest.raises(ConfigError), Journal(tmp_path, Shard(), SETTINGS):
        raise ConfigError("no such task")
    assert not list(tmp_path.glob("[!.]*"))


def test_full_disk_is_a_one_line_error(tmp_path):
    (tmp_path / "predictions.jsonl").symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"predictions.jsonl' cannot be written \(No space left"):
        write(tmp_path, {0: "image"}, resume=True)


@pytest.mark.parametrize("of", [1, 2, 3, 7])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_shards_have_the_batches_of_a_single_process_also_when_resumed(of, batch_size):
    num_images, num_videos = 11, 3
    done = np.random.default_rng(of).random(num_images + num_videos) < 0.5
    expected = {tuple(range(k, min(k + batch_size, num_images))) for k in range(0, num_images, batch_size)}
    for skipped in (np.zeros_like(done), done):
        parts = [
            find_share(num_images, num_videos, Output(shard=Shard(k, of), batch_size=batch_size), skipped)
            for k in range(of)
        ]
        images = [[index for index in part if index < num_images] for part in parts]
        batches = [tuple(part[k : k + batch_size]) for part in images for k in range(0, len(part), batch_size)]
        assert len(batches) == len(set(batches)) and set(batches) <= expected
        assert {*np.flatnonzero(~skipped).tolist()} <= {index for part in parts for index in part}
        assert all(not skipped[[*batch]].all() for batch in batches)
        assert sorted(k for part in parts for k in part if k >= num_images) == [
            k for k in range(num_images, num_images + num_videos) if not skipped[k]
        ]


def test_lines_can_be_read_without_vitkit(tmp_path):
    write(tmp_path, {0: "image"})
    assert json.loads((tmp_path / "predictions.jsonl").read_text()) == {"index": 0, "image": "0.jpg", "error": "none"}
