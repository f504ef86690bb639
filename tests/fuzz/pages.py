"""Pages and figures that tools draw from JSON: reports, label errors, comparisons, curves of logs."""

import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from fuzz.annotations import odd_segmentation
from fuzz.formats import Format
from fuzz.guard import OPTIONS, check_pages, guarded, run_tool
from fuzz.hostile import NAMES, NUMBERS, PATHS, VALUES
from fuzz.mutate import JUNK, mutate_bytes, mutate_json
from fuzz.world import HEIGHT, WIDTH, make_world, read_json

from vitkit.errors import VitkitError
from vitkit.tools import compare
from vitkit.tools import test as test_tool
from vitkit.tools.data import convert, label_errors

_IMAGES = ["images/0.jpg", "images/1.jpg", "images/2.jpg"]
_CONFIG = (
    "def config():\n"
    '    val = dict(type="CocoDetection", images="data/images", annotations="data/truth.json")\n'
    '    return dict(model=dict(type="DETR"), data=dict(val=val), evaluator=dict(type="CocoEvaluator"), '
    "train=dict(epochs=1))\n"
)


def _boxes(rng: random.Random, *, masks: bool) -> list[dict[str, Any]]:
    """Return predictions near the objects of the world, some of which are wrong."""
    results = []
    for k in range(3):
        for category, shift in ((3, 0), (7, 1), (3, 9)):
            box = [4 + shift, 5, 10 + k, 12 - shift / 2]
            result = {"image_id": 10 + k, "category_id": category, "bbox": box, "score": 0.9 - shift / 20}
            if masks:
                result["segmentation"] = {"size": [HEIGHT, WIDTH], "counts": [100, 20, HEIGHT * WIDTH - 120]}
                if rng.random() < 0.2:
                    result["segmentation"] = odd_segmentation(rng)
            results.append(result)
    return results


def _classes() -> dict[str, Any]:
    names = ["cat", "dog", "bird"]
    images = [
        {"image_id": f"{k}.jpg", "class": names[k % 3], "predicted": [names[k % 2], "bird"], "scores": [0.7, 0.1]}
        for k in range(6)
    ]
    for image in images:
        if len(set(image["predicted"])) < 3:
            image["predicted"] = [*image["predicted"], next(name for name in names if name not in image["predicted"])]
            image["scores"] = [0.7, 0.2, 0.1]
    return {"top1": 0.5, "top5": 1.0, "classes": names, "confusion_matrix": [[1] * 3] * 3, "images": images}


def _sentences() -> dict[str, Any]:
    rows = [
        {"index": k, "source": "ein Hund", "text": "a dog runs", "references": ["a dog runs", "the dog"]}
        for k in range(3)
    ]
    return {"BLEU": 50.0, "sentences": rows}


def _log(rng: random.Random) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for epoch in range(1, 5):
        losses = {"labels": 1 / epoch, "l1": 0.5}
        lines.append({"kind": "train", "step": 10 * epoch, "epoch": epoch, "loss": 2 / epoch, "losses": losses})
        metrics = {"bbox/AP": 0.1 * epoch, "bbox/AP50": 0.2 * epoch, "loss": 1.0}
        lines.append({"kind": "val", "step": 10 * epoch, "epoch": epoch, "metrics": metrics})
    return lines


def _named(content: Any, rng: random.Random) -> Any:
    """Replace the names of classes and images by hostile ones."""
    content = json.loads(json.dumps(content))
    for part, key in (("categories", "name"), ("images", "file_name")):
        for entry in content.get(part, ()) if isinstance(content, dict) else ():
            if key in entry and rng.random() < 0.5:
                entry[key] = rng.choice(NAMES if key == "name" else (*NAMES, *PATHS))
    return content


def _write(rng: random.Random, folder: Path, world: Path) -> None:
    data = folder / "data"
    data.mkdir()
    tool = rng.choice(["report", "report", "report", "label_errors", "compare", "compare", "curves"])
    kind = rng.choice(["boxes", "boxes", "boxes", "classes", "texts"]) if tool in ("report", "compare") else "boxes"
    masks = rng.random() < 0.3
    sound = {"boxes": _boxes(rng, masks=masks), "classes": _classes(), "texts": _sentences()}[kind]
    truth = read_json(world / "instances.json")
    what = rng.choice(["results", "results", "results", "truth", "names"]) if kind == "boxes" else "results"
    if what == "names":
        truth = _named(truth, rng)
    (data / "truth.json").write_bytes(
        mutate_json(truth, rng, VALUES) if what == "truth" else json.dumps(truth).encode()
    )
    first = mutate_json(sound, rng, [*JUNK, *NAMES, *NUMBERS]) if what == "results" else json.dumps(sound).encode()
    (data / "results.json").write_bytes(first)
    (data / "other.json").write_text(json.dumps(sound))
    (data / "config.py").write_text(_CONFIG)
    if tool == "curves":
        for name in ("first", "second"):
            (data / name).mkdir()
            lines = [json.dumps(line).encode() for line in _log(rng)]
            for k in rng.sample(range(len(lines)), rng.choice([1, 1, 3])):
                lines[k] = mutate_json(json.loads(lines[k]), rng, VALUES)
            content = b"\n".join(lines)
            (data / name / "log.jsonl").write_bytes(mutate_bytes(content, rng) if rng.random() < 0.1 else content)
    more: list[str] = []
    if kind == "boxes" and tool in ("report", "compare"):
        more = ["--annotations", "data/truth.json"] + rng.choice([[], ["--images", "data/images"]])
    if tool == "curves":
        more = rng.choice(
            [[], ["--x", "step"], ["--losses", "loss", "l1"], ["--metrics", "bbox/AP"], ["--smooth", "0.5"]]
        )
        more += ["data/second"] if rng.random() < 0.5 else []
        more = [*more, "--names", *rng.sample(NAMES[3:30], 2)] if more[-1:] == ["data/second"] else more
    options = {"tool": tool, "image_files": _IMAGES, "arguments": more, "fix": rng.random() < 0.5}
    (folder / OPTIONS).write_text(json.dumps(options))


def check(folder: Path, world: Path) -> None:
    """Check that an accepted file gives a page or a figure without markup of the input."""
    with guarded(folder, world) as options:
        tool, more = options["tool"], options["arguments"]
        if tool == "curves":
            run_tool(compare.main, ["data/first", *more, "--curves", "out/curves.png"])
            assert Path("out/curves.png").stat().st_size > 1000
            return
        if tool == "report":
            scored = ["--eval-only", "data/results.json", "--report", "out/page.html"]
            run_tool(test_tool.main, [*scored, *more])
        elif tool == "compare":
            run_tool(compare.main, ["data/other.json", "data/results.json", *more, "--out", "out/page.html"])
        else:
            arguments = ["data/config.py", "--eval-only", "data/results.json", "--out", "out/page.html"]
            run_tool(label_errors.main, arguments)
        assert Path("out/page.html").stat().st_size > 1000
        check_pages(folder / "out")
        if tool == "label_errors" and options["fix"]:
            place = ["--images", "data/images", "--out", "out/fixed.json", "--fix", "ids", "out/page.json"]
            run_tool(convert.main, ["data/truth.json", *place])


@functools.cache
def _warm_up() -> None:
    """Draw a page of each tool once, for fonts and caches."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        world, folder = make_world(Path(name, "world")), Path(name)
        (folder / "results.json").write_text(json.dumps(_boxes(rng, masks=False)))
        (folder / "classes.json").write_text(json.dumps(_classes()))
        (folder / "log.jsonl").write_text("\n".join(map(json.dumps, _log(rng))))
        truth = ["--annotations", str(world / "instances.json"), "--images", str(world / "images")]
        page = ["--out", str(folder / "page.html")]
        results = str(folder / "results.json")
        run_tool(test_tool.main, ["--eval-only", results, *truth, "--report", page[1]])
        run_tool(test_tool.main, ["--eval-only", str(folder / "classes.json"), "--report", page[1]])
        run_tool(compare.main, [results, results, *truth, *page])
        run_tool(compare.main, [str(folder / "log.jsonl"), "--curves", str(folder / "curves.png")])


FORMATS = [Format("pages", _write, check, VitkitError, 6, _warm_up)]
