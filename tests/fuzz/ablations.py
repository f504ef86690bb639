"""Results of ablations, of which `vitkit ablate --plot-only` writes the table and the plot."""

import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from fuzz.formats import Format
from fuzz.guard import OPTIONS, guarded, run_tool
from fuzz.hostile import VALUES
from fuzz.mutate import mutate_json

from vitkit.errors import VitkitError
from vitkit.tools import ablate

_SET = """'''A set of two arms.'''

def ablation():
    return dict(
        base="quickstart/detr", metrics=["bbox/AP", "loss"], {more}
        arms={{"plain": {{}}, "wide": {{"model.head.d_ffn": 64}}}},
    )
"""
_KINDS = (
    "",
    "minutes=1.0,",
    'curves={"a": {1: "plain", 2: "wide"}}, x_label="images",',
    'curves={"a": {1: "plain", 2: "wide", 3: "third"}}, x_label="images", power_law=True,',
)


def _rows() -> list[dict[str, Any]]:
    """Return rows of both arms, with two seeds each."""
    rows = []
    for arm, seed in (("plain", 0), ("wide", 0), ("plain", 1), ("wide", 1)):
        evaluations = [
            {
                "step": 10 * k,
                "epoch": k,
                "metrics": {"bbox/AP": 0.1 * k + 0.01 * seed, "loss": 1 / k},
                "minutes": k / 2,
                "processor_minutes": k / 3,
            }
            for k in (1, 2)
        ]
        run = {"set": "toy", "arm": arm, "seed": seed, "epochs": 2, "steps": 20, "minutes": 1.0}
        run |= {"processor_minutes": 0.7, "evaluations": evaluations, "versions": {"torch": "2.6"}, "threads": 1}
        rows.append(run | {"command": "vitkit train quickstart/detr a=1 b=2 c=3", "device": "a processor"})
    return rows


def _write(rng: random.Random, folder: Path, world: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "toy.py").write_text(_SET.format(more=rng.choice(_KINDS)))
    (folder / "data" / "toy.json").write_bytes(mutate_json(_rows(), rng, VALUES))
    (folder / OPTIONS).write_text(json.dumps({}))


def check(folder: Path, world: Path) -> None:
    """Check that accepted results give a table with both arms, and a plot."""
    with guarded(folder, world):
        Path("out/toy.json").write_bytes(Path("data/toy.json").read_bytes())
        run_tool(ablate.main, ["data/toy.py", "--plot-only", "--out", "out"])
        if json.loads(Path("out/toy.json").read_bytes()):
            assert {"| plain |", "| wide |"} <= {line[: line.find("|", 2) + 1] for line in _lines("out/toy.md")}
            assert Path("out/toy.png").stat().st_size > 1000


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


@functools.cache
def _warm_up() -> None:
    """Draw a plot of each kind once, for fonts and caches."""
    with tempfile.TemporaryDirectory() as name:
        for k, more in enumerate(_KINDS):
            Path(name, f"toy{k}.py").write_text(_SET.format(more=more))
            Path(name, f"toy{k}.json").write_text(json.dumps(_rows()))
            run_tool(ablate.main, [f"{name}/toy{k}.py", "--plot-only", "--out", name])


FORMATS = [Format("ablations", _write, check, VitkitError, 2, _warm_up)]
