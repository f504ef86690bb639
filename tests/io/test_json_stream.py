"""A JSON file that is read in parts has the content, or the error, of one that is read at once."""

import json
import random

import pytest

from vitkit.errors import DataError
from vitkit.io import json_stream
from vitkit.io.json_files import read_json
from vitkit.io.json_stream import read_json_parts

CONTENT = {
    "info": {"a": None, "x": [1.5e3, -2, True]},
    "images": [{"id": 1, "file_name": "\u00e9\u2028\U0001f600"}, {"id": 2}],
    "empty": [],
    "object": {},
    "annotations": [{"bbox": [1.5, 3e-2, -4], "s": {"c": 'a\\"}],'}}, {"id": 7}, 1, "x", [], {}, -12.5e30, 123456],
    "n": 12345678901234,
}
INSERTED = [*map(str.encode, ',}]"{[:- \n\t\\x'), b"\xff", b"0", b'"id":1,', b'"info":1,', b"9" * 5000, b"1e", b"tru"]


def outcome(read):
    try:
        return repr(read())
    except DataError as error:
        return f"error: {error}"


def read_parts(path):
    entries = []
    content = read_json_parts(path, "annotations", entries.extend)
    if isinstance(content, dict) and content.get("annotations") == []:
        content["annotations"] = entries
    return content


def damaged(rng, text):
    data = bytearray(text.encode(rng.choice(["utf-8", "utf-8", "utf-8", "utf-16", "utf-8-sig"])))
    for _ in range(rng.randrange(3)):
        position = rng.randrange(len(data) or 1)
        kind = rng.randrange(4)
        if kind == 0:
            del data[position:]
        elif kind == 1:
            del data[position : position + rng.randrange(1, 9)]
        elif kind == 2:
            data[position:position] = rng.choice(INSERTED)
        else:
            data += rng.choice([b" ", b"\n", b"x", b"{}", b"\xff"])
    return bytes(data)


@pytest.mark.parametrize("seed", range(3))
def test_content_and_errors_are_those_of_reading_at_once(tmp_path, monkeypatch, seed):
    rng, path, numbers = random.Random(seed), tmp_path / "a.json", [0, 0]
    for _ in range(250):
        monkeypatch.setattr(json_stream, "_READ", rng.choice([1, 2, 7, 17, 64, 1000]))
        monkeypatch.setattr(json_stream, "_ENTRIES", rng.choice([1, 3, 4000]))
        path.write_bytes(
            damaged(rng, json.dumps(CONTENT, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5))
        )
        expected = outcome(lambda: read_json(path))
        assert outcome(lambda: read_parts(path)) == expected, path.read_bytes()
        numbers[expected.startswith("error")] += 1
    assert min(numbers) > 30


def test_entries_are_passed_on_before_the_file_has_been_read(tmp_path, monkeypatch):
    monkeypatch.setattr(json_stream, "_READ", 50)
    monkeypatch.setattr(json_stream, "_ENTRIES", 2)
    path, parts = tmp_path / "a.json", []
    path.write_text(json.dumps({"annotations": [{"id": k} for k in range(5)]})[:-1] + ', "x"')
    with pytest.raises(DataError, match="line 1, column .*: Expecting ':' delimiter"):
        read_json_parts(path, "annotations", parts.append)
    assert [len(part) for part in parts] == [2, 2, 1]
