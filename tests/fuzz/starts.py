"""`vitkit start` on folders with names and annotations of a stranger: the config that it writes."""

import json
import random
import shutil
from pathlib import Path
from unittest import mock

import cv2
import numpy as np
from fuzz import foreign_annotations as annotations
from fuzz.formats import OPTIONS, Format, write_data, write_options
from fuzz.guard import guarded, run_tool
from fuzz.hostile import CODE, NAMES, PATHS
from fuzz.images import odd_image
from fuzz.mutate import mutate_json
from fuzz.world import HEIGHT, WIDTH, read_json

import vitkit
from vitkit.apps.starter import timed_run
from vitkit.apps.starter.child_runs import StepCost
from vitkit.errors import VitkitError
from vitkit.tools.start import main

_WRITERS = (annotations.write_yolo, annotations.write_voc, annotations.write_labelme, annotations.write_cvat)
_WRITERS += (annotations.write_csv, annotations.write_coco)
_RANDOM = "model.backbone.pretrained=false"


def _file_name(rng: random.Random, *, ending: str) -> str:
    """Return a hostile name that a file can have."""
    texts = [name for name in NAMES if CODE in name] if rng.random() < 0.3 else [*NAMES, *PATHS]
    name = rng.choice(texts).replace("/", "_").replace("\0", "").encode("utf-8", "replace").decode()[:60]
    return f"{name if name not in ('', '.', '..') else 'x'}{ending}"


def _write(rng: random.Random, folder: Path, world: Path) -> None:
    kind = rng.choice(["names", "names", "format", "format", "semantic", "classification", "panoptic"])
    arguments, photos, data = [], [], folder / "data"
    data.mkdir()
    if kind == "format":
        rng.choice(_WRITERS)(rng, folder, world)
        options = read_json(folder / OPTIONS)
        source, images = f"data/{options['source']}", options["images"] and f"data/{options['images']}"
        arguments = [images, source] if images else [source]
        photos = options["image_files"]
    elif kind == "names":  # two files of COCO, whose names are those of the splits
        top = data / _file_name(rng, ending="") if rng.random() < 0.5 else data
        for k in range(3):
            (top / "images").mkdir(parents=True, exist_ok=True)
            name = f"{k}.jpg" if rng.random() < 0.7 else f"{k}{_file_name(rng, ending='.jpg')}"
            shutil.copy(world / "images" / f"{k}.jpg", top / "images" / name)
        names = sorted(path.name for path in (top / "images").iterdir())
        classes = [rng.choice(["cat", rng.choice(NAMES)]), "sky"]
        parts = [_file_name(rng, ending=".json"), rng.choice(["val.json", _file_name(rng, ending=".json")])]
        for part in [*parts, "train.json"] if rng.random() < 0.5 else parts:
            content = read_json(world / "instances.json")
            for image, name in zip(content["images"], names):
                image["file_name"] = name
            for category, name in zip(content["categories"], classes):
                category["name"] = name
            (top / part).write_text(json.dumps(content))
        arguments = [str(top.relative_to(folder))]
    elif kind == "classification":
        for name in ("cat", _file_name(rng, ending=""), "dog"):
            for k in range(3):
                photo = np.random.default_rng(rng.randrange(99)).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)
                path = write_data(folder, f"{name}/{k}.jpg", cv2.imencode(".jpg", photo)[1].tobytes())
        if rng.random() < 0.5:
            path.write_bytes(odd_image(world / "images" / "0.jpg", rng))
        arguments = ["data", "--task", "classification"]
    elif kind == "semantic":
        for name in ("images", "labels"):
            shutil.copytree(world / name, data / name)
        if rng.random() < 0.7:
            name, content = annotations.odd_classes(rng, colored=rng.random() < 0.2)
            (data / "labels" / name).write_bytes(content)
        if rng.random() < 0.3:
            (data / "labels" / "0.png").write_bytes(odd_image(world / "labels" / "0.png", rng))
        arguments = ["data/images", "data/labels", "--task", "semantic"]
    else:
        shutil.copytree(world / "images", data / "images")
        shutil.copytree(world / "maps", data / "panoptic")
        (data / "panoptic.json").write_bytes(mutate_json(read_json(world / "panoptic.json"), rng))
        arguments = ["data/images", "data/panoptic.json", "--task", "panoptic"]
    write_options(folder, arguments=arguments, image_files=photos)


def check(folder: Path, world: Path) -> None:
    """Check that the written config is Python that only describes a run, and can be loaded."""
    with guarded(folder, world) as options:
        _start("out/run", *options["arguments"])
        path = Path("out/run/config.py")
        compile(path.read_text("utf-8"), str(path), "exec")
        config = vitkit.load_config(path, [_RANDOM])
        assert config["data"]["train"] and config["train"]["epochs"] >= 1


def _start(run_dir: str, *arguments: str) -> None:
    """Run the tool, which does not measure how long a step takes."""
    with mock.patch.object(timed_run, "time_steps", lambda *_, **__: StepCost(1 / 60, 1.0, 10)):
        run_tool(main, [*arguments, _RANDOM, "--dry-run", "--hours", "0.5", "--run-dir", run_dir])


def _warm_up(world: Path, folder: Path) -> None:
    _start(str(folder / "run"), str(world / "images"), str(world / "instances.json"))


FORMATS = [Format("start", _write, check, VitkitError, 5, _warm_up)]
