"""Trains the arms of a set and keeps their results."""

import glob
import itertools
import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitkit.apps.starter.ablations.page import write_page
from vitkit.apps.starter.ablations.sets import Ablation, Row, train_command
from vitkit.apps.starter.child_runs import run_to_end, time_steps
from vitkit.apps.visualization.curves import is_number, read_log
from vitkit.config import load_config
from vitkit.engine.run_folder import RECORD_NAME
from vitkit.errors import DataError, TrainingError
from vitkit.io.json_files import read_json
from vitkit.io.output import write_text
from vitkit.logging import LOG_NAME
from vitkit.weights.locate import LAST_NAME, RUN_CONFIG

_TEXTS = ("arm", "command", "device")
_COUNTS = ("seed", "epochs", "steps", "threads")
_MINUTES = ("minutes", "processor_minutes")
_LARGEST = 2**63


def run_all(
    ablation: Ablation,
    path: Path,
    *,
    arms: Sequence[str],
    seeds: Sequence[int],
    overrides: Sequence[str],
    out: Path,
    run_dir: Path,
    budget: float | None,
    device: str,
    shard: tuple[int, int] | None = None,
    trust: bool = False,
) -> int:
    """Run what is missing in the results, all arms with the first seed first; return the number of failed runs.

    Args:
        path: the set's file, whose name the results have.
        out: the folder of the results.
        run_dir: the folder of the runs.
        budget: start no run after this many minutes; None: no limit.
        shard: (i, n): run only every n-th of the runs, from the i-th on, counted from 1, and keep the results in a file
            of this shard, for `merge`; None: all runs.
        trust: see `load_config`, for the saved configs of interrupted runs.
    """
    name, start, failures = path.stem, time.monotonic(), 0
    first, step = (0, 1) if shard is None else (shard[0] - 1, shard[1])
    results = out / (f"{name}.json" if shard is None else f"{name}.{shard[0]}-of-{shard[1]}.json")
    for seed, arm in list(itertools.product(seeds, arms))[first::step]:
        rows, command = all_rows(out, name), train_command(ablation, arm, overrides)
        done = next((row for row in rows if (row["arm"], row["seed"]) == (arm, seed)), None)
        if done is not None:
            # Without epochs, eval_every and seed.
            if done["command"].rsplit(" ", 3 + len(ablation.seeded))[0] != shlex.join(command):
                print(f"{arm}, seed {seed}: {results} has it with other settings: {done['command']}")
            continue
        if budget is not None and time.monotonic() - start > 60 * budget:
            print(f"--budget {budget:g}: starting no more runs")
            return failures
        folder = run_dir / name / f"{re.sub(r'[^a-z0-9]+', '_', arm.lower()).strip('_')}-{seed}"
        try:
            epochs = next((row["epochs"] for row in rows if row["arm"] == arm), None)
            row = {"set": name, "arm": arm, "seed": seed} | run_arm(
                command, folder, seed=seed, epochs=epochs, ablation=ablation, device=device, trust=trust
            )
        except TrainingError as error:
            print(f"{arm}, seed {seed}: {error}", file=sys.stderr)
            failures += 1
            continue
        write_rows(results, [*read_rows(results), row])
        if shard is None:  # the others of an array would write the page at the same time
            write_page(ablation, path, all_rows(out, name), out)
        metrics = row["evaluations"][-1]["metrics"]
        print(f"{arm}, seed {seed}: " + "  ".join(f"{m} {metrics.get(m, 0):.3f}" for m in ablation.metrics))
    return failures


def all_rows(out: Path, name: str) -> list[Row]:
    """Return the rows of a set's results, and of its shards; duplicates of an arm and a seed are left out."""
    files = [out / f"{name}.json", *sorted(out.glob(f"{glob.escape(name)}.*-of-*.json"))]
    rows: dict[tuple[str, int], Row] = {}
    for row in itertools.chain.from_iterable(map(read_rows, files)):
        rows.setdefault((row["arm"], row["seed"]), row)
    return list(rows.values())


def merge(out: Path, name: str) -> list[Row]:
    """Write the results of all shards into those of the set, and return their rows."""
    rows = sorted(all_rows(out, name), key=lambda row: row["seed"])
    if len(rows) > len(read_rows(out / f"{name}.json")):
        write_rows(out / f"{name}.json", rows)
    return rows


def run_arm(
    command: list[str],
    folder: Path,
    *,
    seed: int,
    epochs: int | None,
    ablation: Ablation,
    device: str,
    trust: bool = False,
) -> Row:
    """Train one arm to its end, resuming it if it was interrupted; return its row.

    Raises:
        TrainingError: the run failed.
        ConfigError: what lies in its folder would run code that the user has neither run nor trusted.
    """
    resumes = (folder / LAST_NAME).is_file()
    if resumes:
        epochs = load_config(folder / RUN_CONFIG, trust=trust)["train"]["epochs"]
    elif epochs is None and ablation.minutes is not None:
        epochs = epochs_of(ablation.minutes, command, folder.with_name(f"{folder.name}-timing"), device)
    epochs = epochs or load_config(command[2], command[3:])["train"]["epochs"]
    eval_every = max(1, round(epochs / ablation.evaluations))
    pretraining = pretraining_minutes(load_config(command[2], command[3:]))
    command = [*command, *(f"{key}={seed}" for key in ablation.seeded)]
    command += [f"train.epochs={epochs}", f"train.eval_every={eval_every}", f"train.seed={seed}"]
    if not resumes:
        shutil.rmtree(folder, ignore_errors=True)
    where = ["vitkit", "train", "--resume", str(folder)] if resumes else [*command, "--run-dir", str(folder)]
    run_to_end([*where, "--device", device], folder)
    train, evaluations = read_log(folder / LOG_NAME)
    start = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))["starts"][0]
    return dict(
        epochs=epochs,
        steps=train[-1]["step"],
        minutes=train[-1]["minutes"],
        processor_minutes=train[-1]["processor_minutes"],
        **({} if pretraining is None else {"pretraining_minutes": pretraining}),
        evaluations=[{key: value for key, value in record.items() if key != "kind"} for record in evaluations],
        command=shlex.join(command),
        versions=start["versions"],
        device=start["device"]["name"],
        threads=start["device"]["threads"],
    )


def pretraining_minutes(config: Mapping[str, Any]) -> float | None:
    """Return the processor minutes of the run that the backbone's weights come from; None if they are not from a
    run."""
    backbone = config["model"].get("backbone")
    weights = backbone.get("pretrained") if isinstance(backbone, Mapping) else None
    log = Path(weights) / LOG_NAME if isinstance(weights, str) else None
    return read_log(log)[0][-1]["processor_minutes"] if log is not None and log.is_file() else None


def epochs_of(minutes: float, command: list[str], folder: Path, device: str) -> int:
    """Return how many epochs an arm can be trained in `minutes` of processor time; raises like `time_steps`."""
    cost = time_steps([*command, "--device", device], folder)
    return max(1, round(minutes / cost.processor_minutes / cost.steps_per_epoch))


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a set's results; none if there are no results.

    Raises:
        DataError: the file is not what `write_rows` wrote.
    """
    rows = read_json(path, key="results") if path.is_file() else []
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        raise DataError(f"{path}: expected the rows that ablate writes. Move the file away to begin new results.")
    return rows


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and all(isinstance(row.get(key), str) for key in _TEXTS)
        and all(type(row.get(key)) is int and abs(row[key]) < _LARGEST for key in _COUNTS)
        and all(_is_amount(row.get(key)) for key in _MINUTES)
        and isinstance(row.get("versions"), dict)
        and isinstance(row.get("evaluations"), list)
        and len(row["evaluations"]) > 0
        and all(map(_is_evaluation, row["evaluations"]))
    )


def _is_evaluation(record: Any) -> bool:
    return (
        isinstance(record, dict)
        and all(_is_amount(record.get(key)) for key in ("epoch", *_MINUTES))
        and isinstance(record.get("metrics"), dict)
        and all(value is None or is_number(value) for value in record["metrics"].values())
    )


def _is_amount(value: Any) -> bool:
    return is_number(value) and 0 <= value < _LARGEST


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as JSON, one per line."""
    write_text(path, "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
