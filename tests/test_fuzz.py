"""Broken input of every kind ends in a clean result or in one of vitkit's own errors, which names the file.

Each case takes a sound input and changes it at random, from a seed. 200 cases run by default, 2,200 with `-m slow`.
"""

import copy
import io
import json
import math
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin
from torch import nn

from vitkit import build_model, load_config, load_weights
from vitkit.checkpoint import read_checkpoint
from vitkit.data.captions import CocoCaptions
from vitkit.data.coco import CocoDetection
from vitkit.data.panoptic import CocoPanoptic
from vitkit.data.semantic import SemanticFolder
from vitkit.errors import CheckpointError, ConfigError, DataError, VitkitError

SECONDS = 20
"""Longer is a hang."""
JUNK = [
    None, True, False, 0, 1, -1, 2, 3, 7, 255, 10**12, 2**63, 2**70, 0.0, 0.5, -2.5, 1e-30, 1e308, math.nan, math.inf,
    -math.inf, "", "x", "a/b.jpg", "../up.jpg", "\0", "\ud800", "é", [], {}, [None], [[]], {"id": 1}, [1, 2, 3, 4], "1",
]  # fmt: skip
SMALL_JUNK = [
    None, True, False, 0, 1, -1, 2, 3, 7, 255, 0.0, 0.5, -2.5, 1e308, math.nan, "", "x", "none", "res5", "resnet18", [],
    {}, [None], [1, 2], {"type": "x"}, {"type": None}, "DETR", [[]], {"a": 1},
]  # fmt: skip


@contextmanager
def time_limit():
    def stop(*_):
        raise TimeoutError(f"longer than {SECONDS} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def fuzz(case: Callable[[random.Random, list[str]], None], error: type[VitkitError], seeds: range) -> None:
    """Runs a case for each seed.

    Args:
        case: changes a sound input by the random numbers it gets, uses it, and checks a clean result. It puts the file
            that an error has to name, if there is one, into the list that it gets.
        error: how a case may end else.
    """
    failures, clean = [], 0
    for seed in seeds:
        name: list[str] = []
        try:
            with time_limit():
                case(random.Random(seed), name)
            clean += 1
        except error as expected:
            if name and name[0] not in str(expected):
                failures.append(f"seed {seed}: the message does not name {name[0]}: {expected}")
            if len(str(expected)) > 6000:
                failures.append(f"seed {seed}: a message of {len(str(expected))} characters")
        except Exception as other:
            failures.append(f"seed {seed}: {type(other).__name__}: {str(other)[:300]}")
    assert not failures, f"{len(failures)} of {len(seeds)} ({clean} clean):\n" + "\n".join(failures[:20])


def places(value, path=()):
    """Every place in a JSON value, as keys and positions from the top."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield from places(inner, (*path, key))


def mutate_value(value, rng, junk=JUNK, *, changes=None):
    """A copy with one change or a few: a part replaced, removed, doubled, or swapped with another one."""
    value = copy.deepcopy(value)
    for _ in range(changes or rng.choice([1, 1, 1, 2, 4])):
        path = rng.choice(list(places(value)))
        if not path:
            if rng.random() < 0.02:
                return rng.choice(junk)
            continue
        *parents, last = path
        owner = value
        for key in parents:
            owner = owner[key]
        action = rng.choice(["replace", "replace", "replace", "remove", "double", "swap", "scale"])
        if action == "replace":
            owner[last] = copy.deepcopy(rng.choice(junk))
        elif action == "remove":
            del owner[last]
        elif action == "double" and isinstance(owner, list):
            owner.insert(rng.randrange(len(owner) + 1), copy.deepcopy(owner[last]))
        elif action == "double":
            owner[f"{last}2"] = copy.deepcopy(owner[last])
        elif action == "swap":
            other = rng.choice(list(owner) if isinstance(owner, dict) else range(len(owner)))
            owner[last], owner[other] = owner[other], owner[last]
        elif isinstance(owner[last], int | float) and not isinstance(owner[last], bool):
            owner[last] = owner[last] * rng.choice([-1, 0, 0.5, 1.5, 10, 1000])
    return value


def mutate_bytes(data: bytes, rng) -> bytes:
    """Truncated, emptied, bits turned, a stretch overwritten, removed or repeated."""
    data = bytearray(data)
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


def write_mutated(path: Path, content, rng) -> bool:
    """Writes a changed JSON file; whether it is JSON still."""
    if rng.random() < 0.85:
        path.write_bytes(json.dumps(mutate_value(content, rng)).encode())
        return True
    path.write_bytes(mutate_bytes(json.dumps(content).encode(), rng))
    return False


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Three images with everything that can be annotated of them."""
    folder = tmp_path_factory.mktemp("world")
    rng = np.random.default_rng(0)
    for name in ("images", "maps", "labels"):
        (folder / name).mkdir()
    images, objects, segments, captions = [], [], [], []
    for k in range(3):
        picture = cv2.resize(rng.integers(0, 255, (4, 5, 3), dtype=np.uint8), (40, 32))
        cv2.imwrite(str(folder / "images" / f"{k}.jpg"), picture)
        images.append({"id": 10 + k, "file_name": f"{k}.jpg", "height": 32, "width": 40})
        ids = np.zeros((32, 40, 3), np.uint8)
        ids[:16, :, 2], ids[16:, 5:30, 2] = 1, 2
        cv2.imwrite(str(folder / "maps" / f"{k}.png"), ids)
        cv2.imwrite(str(folder / "labels" / f"{k}.png"), np.where(ids[:, :, 2] == 0, 255, ids[:, :, 2] - 1))
        box = [4, 5, 10 + k, 12]
        polygon = [[4, 5, 14 + k, 5, 14 + k, 17, 4, 17]]
        runs = {"size": [32, 40], "counts": [100, 20, 32 * 40 - 120]}
        for j, segmentation in enumerate((polygon, runs)):
            crowd = j if k == 2 else 0
            objects.append(
                dict(
                    id=len(objects) + 1, image_id=10 + k, category_id=(3, 7)[j], bbox=box, area=120, iscrowd=crowd,
                    segmentation=segmentation,
                )
            )  # fmt: skip
        listed = [dict(id=1, category_id=3, iscrowd=0), dict(id=2, category_id=7, iscrowd=0)]
        segments.append({"image_id": 10 + k, "file_name": f"{k}.png", "segments_info": listed})
        captions.append({"id": k + 1, "image_id": 10 + k, "caption": "a cat on a mat"})
    categories = [{"id": 3, "name": "cat", "isthing": 1}, {"id": 7, "name": "sky", "isthing": 0}]
    for name, annotations in (("instances", objects), ("panoptic", segments), ("captions", captions)):
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def read(path: Path):
    return json.loads(path.read_text())


def detection_case(world, tmp_path):
    content = read(world / "instances.json")

    def case(rng, name):
        path = tmp_path / "fuzzed.json"
        parses = write_mutated(path, content, rng)
        name.append("fuzzed.json")
        masks = rng.random() < 0.5
        dataset = CocoDetection(str(world / "images"), str(path), masks=masks)
        name.clear()  # a picture may be to blame, too
        samples = [dataset[k] for k in range(len(dataset))]
        truth = dataset.ground_truth()
        if parses:
            check_detection(read(path), dataset, samples, truth, masks)

    return case


def check_detection(given, dataset, samples, truth, masks):
    """Nothing that the file holds is lost or changed: objects by image, their classes and boxes."""
    assert len(samples) == len(given["images"]) and len(truth["annotations"]) == len(given["annotations"])
    names = {c["id"]: str(c["name"]) for c in given["categories"]}
    for image, sample in zip(given["images"], samples):
        target = sample["target"]
        mine = [a for a in given["annotations"] if a["image_id"] == image["id"] and not a.get("iscrowd")]
        expected = Counter(names[a["category_id"]] for a in mine)
        found = Counter(dataset.classes[label] for label in target["labels"].tolist())
        # Of a mask that has no pixel nothing is left.
        assert found == expected or (masks and found <= expected)
        if found == expected:
            size = np.array([image["width"], image["height"]] * 2)
            boxes = np.array([a["bbox"] for a in mine], np.float64).reshape(-1, 4)
            corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1).clip(0, size)
            centre, extent = (target["boxes_cxcywh"].numpy() * size).reshape(-1, 2, 2).swapaxes(0, 1)
            loaded = np.concatenate([centre - extent / 2, centre + extent / 2], axis=1)
            assert np.allclose(loaded, corners, atol=1e-3)


def panoptic_case(world, tmp_path):
    content = read(world / "panoptic.json")

    def case(rng, name):
        path = tmp_path / "fuzzed.json"
        write_mutated(path, content, rng)
        name.append("fuzzed.json")
        task = rng.choice(["panoptic", "instance", "semantic"])
        dataset = CocoPanoptic(str(world / "images"), str(world / "maps"), str(path), task=task)
        name.clear()  # a map or an image may be to blame, too
        for k in range(len(dataset)):
            target = dataset[k]["target"]
            assert len(target["masks"]) == len(target["labels"])
        dataset.ground_truth()

    return case


def caption_case(world, tmp_path):
    content = read(world / "captions.json")

    def case(rng, name):
        path = tmp_path / "fuzzed.json"
        write_mutated(path, content, rng)
        name.append("fuzzed.json")
        dataset = CocoCaptions(str(world / "images"), str(path), min_count=1)
        name.clear()
        for k in range(len(dataset)):
            assert dataset[(k, k)]["target"]["references"]

    return case


def picture_case(world, tmp_path):
    """Damaged files of images, panoptic maps and label pictures."""

    def case(rng, name):
        folder = tmp_path / "pictures"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(world, folder)
        kind = rng.choice(["images", "maps", "labels"])
        path = folder / kind / ("1.jpg" if kind == "images" else "1.png")
        data = path.read_bytes()
        if rng.random() < 0.3:
            data = resaved(path, rng)
        changed = mutate_bytes(data, rng) if rng.random() < 0.9 else data
        path.write_bytes(changed)
        name.append(str(path))
        if kind == "labels":
            dataset = SemanticFolder(str(folder / "images"), str(folder / "labels"), classes=["cat", "sky"])
            loaded, whole = dataset.load_semantic(1), dataset.load_semantic(0)
        elif kind == "maps":
            dataset = CocoPanoptic(str(folder / "images"), str(folder / "maps"), str(folder / "panoptic.json"))
            loaded, whole = dataset.load_panoptic(1).panoptic, dataset.load_panoptic(0).panoptic
        else:
            dataset = CocoDetection(str(folder / "images"), str(folder / "instances.json"))
            loaded, whole = dataset.load_image(1), dataset.load_image(1)
        dataset[1]
        # A PNG has checksums, so that damage need never change a label unnoticed.
        if kind != "images" and changed is not data and strictly_read(changed) is None:
            assert np.array_equal(loaded, whole), "a damaged map was read as another one"

    return case


def resaved(path: Path, rng) -> bytes:
    """The picture in another format, mode or size."""
    picture, data = Image.open(path), io.BytesIO()
    change = rng.choice(["mode", "size", "format", "format"])
    if change == "mode":
        picture = picture.convert(rng.choice(["L", "1", "RGBA", "LA", "CMYK", "F", "P"]))
    elif change == "size":
        picture = picture.resize((rng.choice([1, 39, 40, 41]), rng.choice([1, 31, 32, 33])), Image.Resampling.NEAREST)
    formats = {"1": "PNG", "CMYK": "TIFF", "F": "TIFF"}
    kind = formats.get(picture.mode) or (
        rng.choice(["PNG", "BMP", "GIF", "TIFF", "WEBP"]) if change == "format" else "PNG"
    )
    picture.save(data, format=kind)
    return data.getvalue()


def strictly_read(data: bytes) -> np.ndarray | None:
    """The pixels of a PNG whose every checksum is right; None else."""
    try:
        with Image.open(io.BytesIO(data)) as picture:
            if isinstance(picture, PngImagePlugin.PngImageFile):
                picture.verify()
        with Image.open(io.BytesIO(data)) as picture:
            return np.asarray(picture)
    except Exception:
        return None


def small_config():
    from vitkit.configs.quickstart.detr import config

    cfg = config()
    cfg["model"]["head"].update(d_model=32, num_heads=2, d_ffn=32, num_encoder_layers=1, num_decoder_layers=1)
    cfg["model"]["neck"]["out_channels"] = 32
    return cfg


def config_case(world, tmp_path):
    content = json.loads(json.dumps(small_config()))

    def case(rng, name):
        path = tmp_path / "fuzzed.json"
        if rng.random() < 0.85:
            path.write_text(json.dumps(mutate_value(content, rng, SMALL_JUNK)))
        else:
            path.write_bytes(mutate_bytes(json.dumps(content).encode(), rng))
        name.append("fuzzed.json")
        config = load_config(path)
        name.clear()
        build_parts(config)

    return case


def build_parts(config):
    """The model and the settings, as a run builds them; no memory is taken."""
    from vitkit.data.loader import DataSettings
    from vitkit.engine.settings import TrainSettings, require
    from vitkit.registry import CRITERIA

    require(config, "model", "criterion", "data", "train.epochs")
    TrainSettings(**config["train"])
    DataSettings(**config["data"])
    with torch.device("meta"):
        build_model(config["model"], classes=["cat", "dog"])
    CRITERIA.build(config["criterion"])


def override_case(world, tmp_path):
    path = tmp_path / "sound.json"
    path.write_text(json.dumps(small_config()))
    keys = [".".join(map(str, place)) for place in places(small_config()) if place]

    def case(rng, name):
        overrides = []
        for _ in range(rng.choice([1, 1, 2, 3])):
            key = rng.choice(keys)
            if rng.random() < 0.25:
                letters = list(key)
                letters[rng.randrange(len(letters))] = rng.choice("abcxyz.=_0 é[]\n")
                key = "".join(letters)
            value = rng.choice(
                [*map(str, SMALL_JUNK), "[1,2", "{", "'", "1e999", "__import__('os')", "lambda: 1", "(" * 300]
            )
            overrides.append(rng.choice([f"{key}={value}"] * 8 + [key, value, f"={value}", f"{key}.{key}={value}"]))
        config = load_config(path, overrides)
        build_parts(config)

    return case


class Small(nn.Module):
    class_head = ("head.",)

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)


def checkpoint_case(world, tmp_path):
    torch.manual_seed(0)
    sound = Small().state_dict()
    saved = {"model": sound, "classes": ["cat", "dog"], "config": "{}", "progress": {"epoch": 3, "best": 0.5}}
    file = io.BytesIO()
    torch.save(saved, file)

    def case(rng, name):
        path = tmp_path / rng.choice(["fuzzed.pth", "fuzzed.pth", "fuzzed.pth", "fuzzed.npz", "fuzzed.pkl"])
        name.append(path.name)
        whole = rng.random() < 0.4
        if whole:
            path.write_bytes(mutate_bytes(file.getvalue(), rng))
        else:
            torch.save(mutate_state(saved, rng), path)
        model = Small()
        load_weights(model, path, classes=["cat", "dog"], strict=rng.random() < 0.8)
        if whole and path.suffix == ".pth":
            state = read_checkpoint(path)["model"]
            assert all(torch.equal(value, sound[key]) for key, value in state.items()), "damage changed the weights"
            assert all(torch.equal(value, sound[key]) for key, value in model.state_dict().items())

    return case


def mutate_state(saved, rng):
    """A checkpoint with a part that is missing, of another kind or shape, or under another name."""
    state = {**saved, "model": dict(saved["model"])}
    owner = rng.choice([state, state["model"], state["model"]])
    key = rng.choice(list(owner))
    tensors = [
        torch.zeros(0), torch.zeros(4, 3, 3, 3, dtype=torch.int8), torch.zeros(2, 4, dtype=torch.complex64),
        torch.tensor(math.nan), torch.zeros(5, 4), torch.zeros(4, dtype=torch.bool), torch.zeros(2, 2).to_sparse(),
    ]  # fmt: skip
    action = rng.choice(["junk", "junk", "tensor", "tensor", "remove", "rename"])
    if action == "junk":
        owner[key] = rng.choice(JUNK)
    elif action == "tensor":
        owner[key] = rng.choice(tensors)
    elif action == "remove":
        del owner[key]
    else:
        owner[rng.choice(["module.x", "", "x", 3, None, "ema", "state_dict", "body.weight.x"])] = owner.pop(key)
    return rng.choice([state] * 9 + [rng.choice(JUNK)])


KINDS = {
    "detection": (detection_case, DataError, 5),
    "panoptic": (panoptic_case, DataError, 4),
    "captions": (caption_case, DataError, 2),
    "pictures": (picture_case, DataError, 4),
    "configs": (config_case, VitkitError, 3),
    "overrides": (override_case, ConfigError, 2),
    "checkpoints": (checkpoint_case, CheckpointError, 2),
}
"""What is changed -> its case, the error that it may end with, its part of the cases."""
PARTS = sum(part for _, _, part in KINDS.values())


@pytest.mark.parametrize("kind", KINDS)
def test_broken_input_ends_well(kind, world, tmp_path):
    make, error, part = KINDS[kind]
    fuzz(make(world, tmp_path), error, range(math.ceil(200 * part / PARTS)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_much_broken_input_ends_well(kind, world, tmp_path):
    make, error, part = KINDS[kind]
    fuzz(make(world, tmp_path), error, range(1000, 1000 + math.ceil(2200 * part / PARTS)))


def test_damage_that_torch_does_not_see_is_an_error(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save({"model": {"w": torch.arange(1000.0)}}, path)
    data = bytearray(path.read_bytes())
    place = data.find(torch.arange(1000.0).numpy().tobytes()[400:440])
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged: the checksum of .*data/0 is wrong"):
        read_checkpoint(path)


def test_other_kinds_of_numbers_are_not_converted_in_silence():
    state = {**Small().state_dict(), "body.bias": torch.ones(4, dtype=torch.int64)}
    with pytest.raises(CheckpointError, match=r"body.bias holds torch.int64 .* the model's torch.float32"):
        load_weights(Small(), state)
    load_weights(Small(), {key: value.half() if value.is_floating_point() else value for key, value in state.items()
                           if key != "body.bias"}, strict=False)  # fmt: skip


def test_a_polygon_far_outside_its_image_is_an_error(world, tmp_path):
    content = read(world / "instances.json")
    content["annotations"][0]["segmentation"] = [[4, 5, 2.0**63, 5, 14, 17, 4, 17]]
    (tmp_path / "far.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"annotation 1 has a bad segmentation: a polygon reaches to 9.22337e\+18"):
        CocoDetection(str(world / "images"), str(tmp_path / "far.json"), masks=True)
