"""Changes of valid input: JSON values, JSON text and bytes."""

import copy
import json
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

# Added in two lines, as the formatter would put each value on its own line.
JUNK: list[Any] = [None, True, False, 0, 1, -1, 2, 3, 7, 255, 10**12, 2**31, 2**63, 2**70, 0.0, 0.5, -2.5, 1e-30, 1e308]
JUNK += [math.nan, math.inf, -math.inf, "", "x", "0", "1", "a/b.jpg", "../up.jpg", "/dev/zero", "\0", "\ud800", "é"]
JUNK += [[], {}, [None], [[]], {"id": 1}, [1, 2, 3, 4], [[0, 0, 9, 0, 9, 9]], {"size": [32, 40], "counts": [1280]}]
"""Values of any kind that may replace a value in a file."""


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path to every part of a JSON value, as keys and indices from the top."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield from places(inner, (*path, key))


def mutate_value(value: Any, rng: random.Random, junk: Sequence[Any] = tuple(JUNK)) -> Any:
    """Return a copy with a few changes: a part is replaced, removed, duplicated, scaled, or swapped with another."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        path = rng.choice(list(places(value)))
        if not path:
            if rng.random() < 0.02:
                return copy.deepcopy(rng.choice(junk))
            continue
        owner = value
        for key in path[:-1]:
            owner = owner[key]
        _change(owner, path[-1], rng, junk)
    return value


def _change(owner: Any, key: Any, rng: random.Random, junk: Sequence[Any]) -> None:
    action = rng.choice(["replace", "replace", "replace", "remove", "double", "swap", "scale", "shift", "text"])
    old = owner[key]
    number = isinstance(old, int | float) and not isinstance(old, bool)
    if action == "remove":
        del owner[key]
    elif action == "double" and isinstance(owner, list):
        owner.insert(rng.randrange(len(owner) + 1), copy.deepcopy(old))
    elif action == "double":
        owner[f"{key}2"] = copy.deepcopy(old)
    elif action == "swap":
        other = rng.choice(list(owner) if isinstance(owner, dict) else range(len(owner)))
        owner[key], owner[other] = owner[other], owner[key]
    elif action == "scale" and number:
        owner[key] = old * rng.choice([-1, 0, 0.5, 1.5, 10, 1000])
    elif action == "shift" and number:
        owner[key] = old + rng.choice([-1, 1, 0.5, 1e-9, 100])
    elif action == "text" and (number or isinstance(old, str)):
        owner[key] = str(old) if number else old + rng.choice(["", "\0", " ", "é", "x" * 5000])
    else:
        owner[key] = copy.deepcopy(rng.choice(junk))


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes truncated, emptied, with flipped bits, or with a part overwritten, removed or repeated."""
    data = bytearray(data or b"\0")
    action = rng.choice(["truncate", "flip", "flip", "flips", "zero", "remove", "repeat", "random", "empty"])
    start = rng.randrange(len(data))
    length = rng.choice([1, 4, 64, len(data) // 4 + 1])
    if action == "truncate":
        del data[start:]
    elif action in ("flip", "flips"):
        for _ in range(1 if action == "flip" else 20):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif action == "zero":
        data[start : start + length] = bytes(len(data[start : start + length]))
    elif action == "remove":
        del data[start : start + length]
    elif action == "repeat":
        data[start:start] = data[start : start + length]
    elif action == "random":
        data[start : start + length] = rng.randbytes(len(data[start : start + length]))
    elif rng.random() < 0.2:
        data.clear()
    return bytes(data)


def mutate_json(content: Any, rng: random.Random, junk: Sequence[Any] = tuple(JUNK)) -> bytes:
    """The bytes of a JSON file with changed values, and sometimes changed text."""
    if rng.random() < 0.85:
        return json.dumps(mutate_value(content, rng, junk)).encode()
    text = json.dumps(content)
    action = rng.choice(["bytes", "bytes", "bytes", "deep", "digits", "mark", "utf-16", "twice", "tail"])
    if action == "deep":
        depth = rng.choice([50, 2000, 200_000])
        inside = rng.choice(["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth])
        text = inside if rng.random() < 0.5 else text[:-1] + f', "extra": {inside}}}'
    elif action == "digits" and any(map(str.isdigit, text)):
        numbers = [place for place in range(len(text)) if text[place].isdigit()]
        place = rng.choice(numbers)
        number = rng.choice(["9" * 400, "1" * 5000, "1e400", "-1e-400", "0x10", "01", "1_0"])
        text = text[:place] + number + text[place + 1 :]
    elif action == "mark":
        text = "\ufeff" + text
    elif action == "twice":
        text = text[:-1] + ", " + text[1:]
    elif action == "tail":
        text += rng.choice(["]", "\0", " x", text])
    data = text.encode("utf-16" if action == "utf-16" else "utf-8")
    return mutate_bytes(data, rng) if action == "bytes" else data
