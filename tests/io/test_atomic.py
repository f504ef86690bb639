"""Files written by several at once, over links, or to a full disk are complete or not there."""

import errno
from concurrent.futures import ThreadPoolExecutor

import pytest

from vitkit.errors import DataError
from vitkit.io.atomic import link_atomically, remove_left_over, renaming, write_atomically
from vitkit.io.output import write_bytes, writing


def test_the_file_of_two_writers_is_one_of_theirs(tmp_path):
    path = tmp_path / "a.bin"
    contents = [bytes([k]) * 200_000 for k in range(16)]

    def write(content):
        write_atomically(path, lambda file: [file.write(content[k : k + 1000]) for k in range(0, len(content), 1000)])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, contents * 4))
    assert path.read_bytes() in contents and [p.name for p in tmp_path.iterdir()] == ["a.bin"]


def test_a_second_writer_finishes_while_the_first_one_writes(tmp_path):
    path = tmp_path / "a.txt"

    def write(file):
        file.write(b"first, ")
        write_bytes(path, b"second")
        assert path.read_bytes() == b"second"
        file.write(b"complete")

    write_atomically(path, write)
    assert path.read_bytes() == b"first, complete"
    with writing(path) as one, writing(path) as other:
        assert one != other
        one.write_bytes(b"one")
        other.write_bytes(b"other")
    assert path.read_bytes() == b"one" and [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_links_are_replaced_and_long_names_can_be_written(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "a").symlink_to("victim")
    write_bytes(tmp_path / "a", b"new")
    assert (tmp_path / "victim").read_text() == "mine" and not (tmp_path / "a").is_symlink()
    for name in ("x" * 255, "ü" * 127):
        write_bytes(tmp_path / name, b"long")
        link_atomically(tmp_path / "victim", tmp_path / name)
        assert (tmp_path / name).read_text() == "mine"


def test_a_full_disk_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("earlier")

    def write(file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, write)
    with pytest.raises(DataError, match=r"a.txt' cannot be written \(No space left on device\)"), writing(path) as new:
        new.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert path.read_text() == "earlier" and [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_only_what_a_killed_process_left_of_the_named_files_is_removed(tmp_path):
    path, other = tmp_path / ("a" * 60 + ".jpg"), tmp_path / "b.jpg"
    kept = [tmp_path / name for name in ("b.jpg.notes.tmp", "b.jpg.0123abcd.png", "c.jpg.0123abcd.tmp")]
    for file in kept:
        file.write_bytes(b"")
    for target in (path, other):
        with renaming(target, sync=False) as temporary:
            temporary.write_bytes(b"whole")
            temporary.with_name(temporary.name.replace(".tmp", "")[:-8] + "0123abcd.tmp").write_bytes(b"half")
    remove_left_over([path, other, tmp_path / "no folder" / "a.jpg"])
    assert sorted(tmp_path.iterdir()) == sorted([path, other, *kept])
