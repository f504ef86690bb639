"""Measure the AP that two detectors reach in a number of processor minutes of one core: vitkit's DINO on a ResNet-18
(configs/bccd/dino_r18.py, from random weights) and torchvision's Faster R-CNN R50-FPN (faster_rcnn.py).

Each time has a run of its own, whose schedule ends with it, evaluated once, at its end; DINO gets the whole epochs that
fit by the time of the epochs before. Runs are added to time_to_accuracy.json, and the table is written beside it. A run
that is there for this processor is not repeated, an interrupted one is resumed. To measure as on a processor that has
only AVX2, set ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2; the table says so.

Example:
    python tools/benchmark/time_to_accuracy.py data/bccd --minutes 15 30 50 --seeds 42 43 \\
        --weights resnet50.pth --stride-in-1x1 --pixel-mean 0.48502 0.45796 0.40760
"""

import argparse
import hashlib
import itertools
import os
import re
import shlex
import statistics
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from vitkit.apps.report.intervals import difference_over_seeds
from vitkit.apps.starter.ablations.runs import read_rows, run_arm, write_rows
from vitkit.apps.starter.ablations.sets import Ablation, Row
from vitkit.apps.starter.child_runs import run_to_end, time_steps
from vitkit.config import load_config
from vitkit.devices import describe_processor
from vitkit.errors import CheckpointError, DataError
from vitkit.io.json_files import read_json
from vitkit.io.output import write_text
from vitkit.tools.benchmark.faster_rcnn import RESULT_NAME, add_model_arguments, positive_minutes
from vitkit.tools.common import errors_in_one_line
from vitkit.weights.locate import LAST_NAME, RUN_CONFIG

NAME = "time_to_accuracy"
DINO, FASTER_RCNN = "vitkit's DINO, ResNet-18, from random weights", "torchvision's Faster R-CNN R50-FPN"
EPOCHS_OF_FULL_WARM_UP = 40
"""Epochs from which on the warm-up of 200 steps is at most a twentieth of the run."""
METRICS = ("bbox/AP", "bbox/AP50")
CITED = (
    "YOLO11n by its own recipe, cited, one seed: AP 0.575, AP50 0.889 after 51 minutes of a core of an Intel Xeon, "
    "which are about 76 of a core of an AMD EPYC that has only AVX2."
)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder with images/ and annotations/instances_{train,val}.json")
    text = "processor minutes of training (default: 15 30 50)"
    parser.add_argument("--minutes", nargs="+", type=positive_minutes, default=[15, 30, 50], metavar="M", help=text)
    parser.add_argument("--seeds", nargs="+", type=int, default=[42, 43], metavar="S", help="(default: 42 43)")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the results (default: runs)")
    text = f"folder of the runs (default: runs/{NAME})"
    parser.add_argument("--run-dir", type=Path, default=Path("runs", NAME), help=text)
    add_model_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the runs, which are separate processes
    with errors_in_one_line():
        if args.weights is not None and not args.weights.is_file():  # before DINO trains for nothing
            raise CheckpointError(f"--weights: no file '{args.weights}'. Correct the path, or leave it out.")
        results, processor = args.out / f"{NAME}.json", describe_processor()
        for seed, minutes, arm in itertools.product(args.seeds, args.minutes, (DINO, FASTER_RCNN)):
            rows = read_rows(results)
            done = next((row for row in rows if _key(row) == (arm, minutes, seed, processor)), None)
            if done is not None:
                words = shlex.split(done["command"])
                if arm == DINO:
                    is_same = f"data.root={args.root}" in words
                else:
                    is_same = words[2:] == _faster_rcnn_command(args, minutes, seed)  # after python and the file
                if not is_same:
                    print(f"{arm}, {minutes:g} min, seed {seed}: {results} has it by other settings: {done['command']}")
                continue
            print(f"{arm}, {minutes:g} min, seed {seed} ...", flush=True)
            row = (train_dino if arm == DINO else train_faster_rcnn)(args, minutes, seed, rows)
            row |= {"set": NAME, "arm": arm, "seed": seed, "budget": minutes}
            write_rows(results, [*rows, row])
            write_text(args.out / f"{NAME}.md", table([*rows, row]))
            print(f"AP {row['evaluations'][-1]['metrics']['bbox/AP']:.3f} after {row['steps']} steps", flush=True)
    print(f"wrote {results} and .md")
    return 0


def _key(row: Row) -> tuple[str, float, int, str]:
    return row["arm"], row["budget"], row["seed"], row["device"]


def _folder(args: argparse.Namespace, name: str, minutes: float, seed: int, settings: Sequence[str] = ()) -> Path:
    # A run is not continued on another processor, with other data or by other settings.
    processor = re.sub(r"[^a-z0-9]+", "_", describe_processor().lower()).strip("_")
    about = hashlib.sha256(shlex.join([str(args.root.resolve()), *settings]).encode()).hexdigest()[:8]
    return args.run_dir / processor / f"{name}-{minutes:g}min-{seed}-{about}"


def train_dino(args: argparse.Namespace, minutes: float, seed: int, rows: Sequence[Row]) -> Row:
    """Train vitkit's detector for the epochs that fit into the time; return its row.

    An epoch's time is that of the last run on this processor and data if there is one, otherwise that of a few steps.
    """
    command = ["vitkit", "train", "bccd/dino_r18", f"data.root={args.root}"]
    folder = _folder(args, "dino_r18", minutes, seed)
    earlier = [
        row
        for row in rows
        if (row["arm"], row["device"]) == (DINO, describe_processor()) and command[3] in shlex.split(row["command"])
    ]
    if (folder / LAST_NAME).is_file():
        epochs = load_config(folder / RUN_CONFIG)["train"]["epochs"]
    elif earlier:
        epochs = int(minutes / earlier[-1]["processor_minutes"] * earlier[-1]["epochs"])
    else:
        cost = time_steps([*command, "--device", "cpu"], folder.with_name(f"{folder.name}-timing"))
        epochs = int(minutes / cost.processor_minutes / cost.steps_per_epoch)
    epochs = max(1, epochs)
    if epochs < EPOCHS_OF_FULL_WARM_UP:
        command += ["schedule.warmup_steps=0", f"schedule.warmup_epochs={epochs / 20:g}"]  # as `vitkit start` has it
    ablation = Ablation(base="bccd/dino_r18", metrics=METRICS, arms={}, evaluations=1)
    return run_arm(command, folder, seed=seed, epochs=epochs, ablation=ablation, device="cpu")


def train_faster_rcnn(args: argparse.Namespace, minutes: float, seed: int, rows: Sequence[Row]) -> Row:
    """Train torchvision's detector for the time; return its row."""
    weights = "random" if args.weights is None else args.weights.stem
    command = _faster_rcnn_command(args, minutes, seed)
    folder = _folder(args, f"faster_rcnn-{weights}-{args.size}", minutes, seed, command)
    run_to_end(["vitkit", "benchmark.faster_rcnn", *command, "--run-dir", str(folder)], folder)
    result = read_json(folder / RESULT_NAME, key="results")
    if not isinstance(result, dict):
        raise DataError(
            f"{folder / RESULT_NAME}: expected what faster_rcnn.py writes. Remove its folder to begin again."
        )
    times = {key: result[key] for key in ("minutes", "processor_minutes")}
    metrics = {f"bbox/{name}": result[name] for name in ("AP", "AP50")}
    return dict(
        epochs=result["epochs"],
        steps=result["steps"],
        **times,
        evaluations=[dict(step=result["steps"], epoch=result["epochs"], metrics=metrics, **times)],
        command=shlex.join(["python", "tools/benchmark/faster_rcnn.py", *command]),
        versions={package: version(package) for package in ("vitkit", "torch", "torchvision")},
        device=describe_processor(),
        threads=1,
    )


def _faster_rcnn_command(args: argparse.Namespace, minutes: float, seed: int) -> list[str]:
    command = [str(args.root), "--minutes", f"{minutes:g}", "--seed", str(seed), "--size", str(args.size)]
    command += ["--weights", str(args.weights)] * (args.weights is not None)
    return command + ["--stride-in-1x1"] * args.stride_in_1x1 + ["--pixel-mean", *map(str, args.pixel_mean)]


def table(rows: Sequence[Row]) -> str:
    """Return the markdown page: for each processor and time both detectors, means over seeds, and their difference."""
    lines = [f"# {NAME}", "", " ".join(__doc__.split("\n\n")[0].split()), ""]
    for processor in dict.fromkeys(row["device"] for row in rows):
        lines += [f"{processor}:", "", "| minutes | detector | seeds | steps | minutes taken | AP | AP50 |"]
        lines += ["|---:|---|---|---|---:|---:|---:|"]
        on_it = [row for row in rows if row["device"] == processor]
        for minutes in sorted({row["budget"] for row in on_it}):
            runs = {
                arm: [row for row in on_it if (row["arm"], row["budget"]) == (arm, minutes)]
                for arm in (DINO, FASTER_RCNN)
            }
            lines += [_line(minutes, arm, of_arm) for arm, of_arm in runs.items() if of_arm]
            if all(len(of_arm) > 1 for of_arm in runs.values()):
                lines.append(f"| {minutes:g} | difference, with Welch's 95 % interval | | | | {_differences(runs)} |")
        versions = sorted({f"torch {row['versions']['torch']}, {row['threads']} thread(s)" for row in on_it})
        lines += ["", f"{'; '.join(versions)}.", ""]
    return "\n".join([*lines, CITED, "", f"The command of each run is in {NAME}.json."]) + "\n"


def _line(minutes: float, arm: str, runs: Sequence[Row]) -> str:
    cells = [f"{minutes:g}", arm, ", ".join(str(row["seed"]) for row in runs)]
    cells += [", ".join(str(row["steps"]) for row in runs)]
    cells += [f"{statistics.mean(row['processor_minutes'] for row in runs):.1f}"]
    for metric in METRICS:
        values = _values(runs, metric)
        cells.append(f"{statistics.mean(values):.3f} ({', '.join(f'{value:.3f}' for value in values)})")
    return f"| {' | '.join(cells)} |"


def _differences(runs: dict[str, list[Row]]) -> str:
    cells = []
    for metric in METRICS:
        value, low, high = difference_over_seeds(_values(runs[FASTER_RCNN], metric), _values(runs[DINO], metric))
        cells.append(f"{value:+.3f} ({low:+.3f} to {high:+.3f})")
    return " | ".join(cells)


def _values(runs: Sequence[Row], metric: str) -> list[float]:
    return [row["evaluations"][-1]["metrics"][metric] for row in runs]


if __name__ == "__main__":
    sys.exit(main())
