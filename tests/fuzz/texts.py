"""Files of text, and vocabularies in the form of checkpoints."""

import base64
import functools
import gzip
import hashlib
import json
import random
from pathlib import Path

from fuzz.formats import OPTIONS, Format, write_options
from fuzz.mutate import mutate_bytes, mutate_json
from fuzz.world import read_json

from vitkit.data.text.monolingual import MonolingualText
from vitkit.data.text.pairs import ParallelText
from vitkit.errors import CheckpointError, VitkitError
from vitkit.text.vocabulary import SPECIAL_TOKENS, Vocabulary, normalize_text

_LINES = ("A dog runs.", "A brown dog, quite old, runs over the grass.", "Zwei Hunde laufen über die Straße.")
_LINES += ("3 € (fast)!",)
_ODD = ("", " ", "\u2581", "\u2585", "\0", "<s>", "<mask>", "\ufeff", "\u2028", "\x85", "\x1c", "a\u0301\u0327" * 300)
_ODD += ("ab" * 20_000, "x" * 3000, "\U0010ffff", "한국어" * 50, "ﷺ" * 40, "\u200b", "a\tb", "\x07", "\r", "é" * 70_000)
_ODD += ("#version: 0.2", "\u202e abc", "ｆｕｌｌ", "𝔘𝔫𝔦", "👩‍👩‍👧" * 20, "İ" * 30, "ß", " a  b ")
KINDS = ("word", "char", "bpe", "unigram")


@functools.cache
def trained(kind: str) -> str:
    """Return the JSON of a valid vocabulary."""
    return Vocabulary.train(kind, _LINES * 3, size=None if kind in ("word", "char") else 60).to_json()


def _write_vocabulary(rng: random.Random, folder: Path, world: Path) -> None:
    content = json.loads(trained(rng.choice(KINDS)))
    if "model" in content and rng.random() < 0.6:
        model = mutate_bytes(base64.b64decode(content["model"]), rng)
        content["model"] = base64.b64encode(model).decode()
        content["sha256"] = hashlib.sha256(model).hexdigest()
        if rng.random() < 0.3:
            del content["sha256"]
        data = json.dumps(content).encode()
    else:
        data = mutate_json(content, rng)
    (folder / "vocabulary.json").write_bytes(data)


def check_vocabulary(folder: Path, world: Path) -> None:
    """Check that ids are in range, text of known tokens is restored, and the vocabulary can be saved."""
    data = (folder / "vocabulary.json").read_bytes()
    vocabulary = Vocabulary.from_json(data.decode(errors="surrogateescape"))
    for line in (*_LINES, *_ODD[:12], "zzz"):
        check_round_trip(vocabulary, line)
    assert Vocabulary.from_json(vocabulary.to_json()).tokens == vocabulary.tokens


def check_round_trip(vocabulary: Vocabulary, line: str) -> None:
    """Check that `decode(encode(line))` is the normalized line if each token is in the vocabulary."""
    ids = vocabulary.encode(line)
    assert all(0 <= index < len(vocabulary) for index in ids)
    decoded = vocabulary.decode(ids)
    text = normalize_text(line)
    text = text.lower() if vocabulary.lowercase else text
    if SPECIAL_TOKENS.index("<unk>") not in ids:
        assert decoded == text.strip(), (decoded[:80], text[:80])


def _write_text(rng: random.Random, folder: Path, world: Path) -> None:
    for name in ("a.txt", "b.txt"):
        lines = [rng.choice(_LINES + _ODD) for _ in range(rng.choice([1, 2, 5, 20]))] + list(_LINES)
        rng.shuffle(lines)
        end = rng.choice(["\n", "\n", "\n", "\r\n", "\r"])
        data = end.join(lines).encode("utf-8" if rng.random() < 0.95 else "utf-16", "surrogatepass")
        if rng.random() < 0.3:
            data = mutate_bytes(data, rng)
        if rng.random() < 0.2:
            data = gzip.compress(data, mtime=0)
            data = mutate_bytes(data, rng) if rng.random() < 0.5 else data
        (folder / name).write_bytes(data)
    kind = rng.choice(KINDS)
    size = rng.choice([None, 200, 400]) if kind in ("word", "char") else rng.choice([150, 400, 2000])
    vocabulary = {"kind": kind, "size": size, "lowercase": rng.random() < 0.3, "min_count": rng.choice([1, 1, 2])}
    lengths = {"max_length": rng.choice([2, 20, 256]), "unfit_lines": rng.choice([None, "keep"])}
    write_options(folder, vocabulary=vocabulary, **lengths, pairs=rng.random() < 0.5)


def check_text(folder: Path, world: Path) -> None:
    """Check that samples have at most `max_length` tokens of the vocabulary, and the lines of the file unchanged."""
    options = read_json(folder / OPTIONS)
    pairs = options.pop("pairs")
    files = [str(folder / name) for name in ("a.txt", "b.txt")]
    dataset = ParallelText(*files, **options) if pairs else MonolingualText(files[0], **options)
    lengths = dataset.lengths()
    assert lengths.shape == (len(dataset), 1 + pairs) and (lengths <= options["max_length"]).all()
    for k in range(len(dataset)):
        tokens = dataset[k]["target"]["tokens"]
        assert 1 <= len(tokens) <= options["max_length"] and (tokens < len(dataset.target_vocabulary)).all()
    for side in dataset.sides:
        for line in list(side)[:8]:
            check_round_trip(dataset.target_vocabulary, line)


FORMATS = [
    Format("vocabularies", _write_vocabulary, check_vocabulary, CheckpointError, 5, lambda *_: [*map(trained, KINDS)]),
    Format("text", _write_text, check_text, VitkitError, 5, lambda *_: [*map(trained, KINDS)]),
]
