"""Pages, tables and figures that tools make of JSON: reports, label errors, comparisons, curves of logs, ablations."""

import json
import random
from pathlib import Path
from typing import Any

from fuzz.annotations import odd_segmentation
from fuzz.formats import Format, write_data, write_options
from fuzz.guard import check_pages, guarded, run_tool
from fuzz.hostile import NAMES, NUMBERS, PATHS, VALUES
from fuzz.mutate import JUNK, mutate_bytes, mutate_json
from fuzz.world import read_json, run_lengths

from vitkit.errors import VitkitError
from vitkit.tools import ablate, compare
from vitkit.tools import test as test_tool
from vitkit.tools.data import convert, label_errors

_IMAGES = ["images/0.jpg", "images/1.jpg", "images/2.jpg"]
_CURVES = ((), ("--x", "step"), ("--losses", "loss", "l1"), ("--metrics", "bbox/AP"), ("--smooth", "0.5"))
_CONFIG = """def config():
    val = dict(type="CocoDetection", images="data/images", annotations="data/truth.json")
    return dict(model=dict(type="DETR"), data=dict(val=val), evaluator=dict(type="CocoEvaluator"), train=dict(epochs=1))
"""
_ABLATION = """'''A set of two arms.'''

def ablation():
    return dict(
        base="quickstart/detr", metrics=["bbox/AP", "loss"], {more}
        arms={{"plain": {{}}, "wide": {{"model.head.d_ffn": 64}}}},
    )
"""
_ABLATIONS = (
    "",
    "minutes=1.0,",
    'curves={"a": {1: "plain", 2: "wide"}}, x_label="images",',
    'curves={"a": {1: "plain", 2: "wide", 3: "third"}}, x_label="images", power_law=True,',
)


def _boxes(rng: random.Random, *, masks: bool) -> list[dict[str, Any]]:
    """Return predictions near the objects of the world, some of which are wrong."""
    results = []
    for k in range(3):
        for category, shift in ((3, 0), (7, 1), (3, 9)):
            box = [4 + shift, 5, 10 + k, 12 - shift / 2]
            result = {"image_id": 10 + k, "category_id": category, "bbox": box, "score": 0.9 - shift / 20}
            if masks:
                result["segmentation"] = odd_segmentation(rng) if rng.random() < 0.2 else run_lengths()
            results.append(result)
    return results


def _classes() -> dict[str, Any]:
    names = ["cat", "dog", "bird"]
    images = [
        {"image_id": f"{k}.jpg", "class": names[k % 3], "predicted": [names[k % 2], "bird", names[1 - k % 2]]}
        | {"scores": [0.7, 0.2, 0.1]}
        for k in range(6)
    ]
    return {"top1": 0.5, "top5": 1.0, "classes": names, "confusion_matrix": [[1] * 3] * 3, "images": images}


def _sentences() -> dict[str, Any]:
    texts = {"source": "ein Hund", "text": "a dog runs"}
    rows = [{"index": k, **texts, "references": ["a dog runs", "the dog"]} for k in range(3)]
    return {"BLEU": 50.0, "sentences": rows}


def _log() -> list[dict[str, Any]]:
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
    tool = rng.choice(["report", "report", "report", "label_errors", "compare", "compare", "curves"])
    kind = rng.choice(["boxes", "boxes", "boxes", "classes", "texts"]) if tool in ("report", "compare") else "boxes"
    masks = rng.random() < 0.3
    sound = {"boxes": _boxes(rng, masks=masks), "classes": _classes(), "texts": _sentences()}[kind]
    truth = read_json(world / "instances.json")
    what = rng.choice(["results", "results", "results", "truth", "names"]) if kind == "boxes" else "results"
    if what == "names":
        truth = _named(truth, rng)
    write_data(folder, "truth.json", mutate_json(truth, rng, VALUES) if what == "truth" else json.dumps(truth))
    first = mutate_json(sound, rng, [*JUNK, *NAMES, *NUMBERS]) if what == "results" else json.dumps(sound)
    write_data(folder, "results.json", first)
    write_data(folder, "other.json", json.dumps(sound))
    write_data(folder, "config.py", _CONFIG)
    if tool == "curves":
        for name in ("first", "second"):
            lines = [json.dumps(line).encode() for line in _log()]
            for k in rng.sample(range(len(lines)), rng.choice([1, 1, 3])):
                lines[k] = mutate_json(json.loads(lines[k]), rng, VALUES)
            content = b"\n".join(lines)
            write_data(folder, f"{name}/log.jsonl", mutate_bytes(content, rng) if rng.random() < 0.1 else content)
    more: list[str] = []
    if kind == "boxes" and tool in ("report", "compare"):
        more = ["--annotations", "data/truth.json"] + rng.choice([[], ["--images", "data/images"]])
    if tool == "curves":
        more = list(rng.choice(_CURVES))
        if rng.random() < 0.5:
            more += ["data/second", "--names", *rng.sample(NAMES[3:30], 2)]
    write_options(folder, tool=tool, image_files=_IMAGES, arguments=more, fix=rng.random() < 0.5)


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


def _warm_up(world: Path, folder: Path) -> None:
    """Draw a page of each tool once, for fonts and caches."""
    results = str(write_data(folder, "results.json", json.dumps(_boxes(random.Random(0), masks=False))))
    classes = str(write_data(folder, "classes.json", json.dumps(_classes())))
    log = str(write_data(folder, "log.jsonl", "\n".join(map(json.dumps, _log()))))
    truth = ["--annotations", str(world / "instances.json"), "--images", str(world / "images")]
    page = str(folder / "page.html")
    run_tool(test_tool.main, ["--eval-only", results, *truth, "--report", page])
    run_tool(test_tool.main, ["--eval-only", classes, "--report", page])
    run_tool(compare.main, [results, results, *truth, "--out", page])
    run_tool(compare.main, [log, "--curves", str(folder / "curves.png")])


def _rows() -> list[dict[str, Any]]:
    """Return rows of both arms, with two seeds each."""
    rows = []
    for arm, seed in (("plain", 0), ("wide", 0), ("plain", 1), ("wide", 1)):
        evaluations: list[dict[str, Any]] = []
        for k in (1, 2):
            metrics = {"bbox/AP": 0.1 * k + 0.01 * seed, "loss": 1 / k}
            times = {"minutes": k / 2, "processor_minutes": k / 3}
            evaluations.append({"step": 10 * k, "epoch": k, "metrics": metrics, **times})
        run = {"set": "toy", "arm": arm, "seed": seed, "epochs": 2, "steps": 20, "minutes": 1.0}
        run |= {"processor_minutes": 0.7, "evaluations": evaluations, "versions": {"torch": "2.6"}, "threads": 1}
        rows.append(run | {"command": "vitkit train quickstart/detr a=1 b=2 c=3", "device": "a processor"})
    return rows


def _write_ablation(rng: random.Random, folder: Path, world: Path) -> None:
    write_data(folder, "toy.py", _ABLATION.format(more=rng.choice(_ABLATIONS)))
    write_data(folder, "toy.json", mutate_json(_rows(), rng, VALUES))
    write_options(folder)


def check_ablation(folder: Path, world: Path) -> None:
    """Check that accepted results give a table with both arms, and a plot."""
    with guarded(folder, world):
        Path("out/toy.json").write_bytes(Path("data/toy.json").read_bytes())
        run_tool(ablate.main, ["data/toy.py", "--plot-only", "--out", "out"])
        if json.loads(Path("out/toy.json").read_bytes()):
            table = Path("out/toy.md").read_text(encoding="utf-8").splitlines()
            assert {"| plain |", "| wide |"} <= {line[: line.find("|", 2) + 1] for line in table}
            assert Path("out/toy.png").stat().st_size > 1000


def _warm_up_ablations(world: Path, folder: Path) -> None:
    """Draw a plot of each kind once, for fonts and caches."""
    for k, more in enumerate(_ABLATIONS):
        (folder / f"toy{k}.py").write_text(_ABLATION.format(more=more))
        (folder / f"toy{k}.json").write_text(json.dumps(_rows()))
        run_tool(ablate.main, [f"{folder}/toy{k}.py", "--plot-only", "--out", str(folder)])


FORMATS = [
    Format("pages", _write, check, VitkitError, 6, _warm_up),
    Format("ablations", _write_ablation, check_ablation, VitkitError, 2, _warm_up_ablations),
]
