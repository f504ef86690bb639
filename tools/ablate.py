"""Train a set of configs, several seeds each, and write their table and their plot.

A set is a file with a function `ablation()`, see configs/ablations. Each arm is trained with each seed in a separate
folder. A run that is in the results is not repeated, an interrupted one is resumed; ctrl-C and SIGTERM stop it after a
step.

Examples:
    vitkit ablate --list
    vitkit ablate detr_parts --seeds 0 1
    vitkit ablate detection_bccd data.root=data/bccd --arms DINO "DN-DETR" --budget 60
    vitkit ablate detection_bccd --plot-only
"""

import argparse
import ast
import json
import math
import re
import runpy
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vitkit.configs.ablations
from vitkit.data.io.json_files import read_json
from vitkit.errors import ConfigError, DataError, TrainingError
from vitkit.registry import nearest
from vitkit.starter.child_runs import run_to_end, time_steps
from vitkit.tools.common import errors_in_one_line, is_override

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vitkit.analysis.power_law import PowerLaw

_SETS = Path(vitkit.configs.ablations.__path__[0])
_SHOWN = ("vitkit", "torch", "torchvision")
Row = dict[str, Any]
"""The record of one run: set, arm, seed, epochs, steps, minutes, processor_minutes, evaluations, command, versions,
device, threads."""
_TEXTS = ("arm", "command", "device")
_COUNTS = ("seed", "epochs", "steps", "threads")
_MINUTES = ("minutes", "processor_minutes")
_LARGEST = 2**63


@dataclass
class Ablation:
    """The fields that a set's `ablation()` returns."""

    base: str
    """The config that the arms change; an arm may have its own `base`."""
    metrics: Sequence[str]
    """The columns of the table; the first metric is plotted."""
    arms: Mapping[str, Mapping[str, Any]]
    """Name -> the arm's changes to the config, by dotted key. They override those of the command line."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the config that all arms share."""
    minutes: float | None = None
    """Processor minutes of training per arm, from which its epochs are computed; None: the epochs of its config."""
    evaluations: int = 4
    """The number of evaluations during a run."""
    curves: Mapping[str, Mapping[float, str]] | None = None
    """The plot's curves, each x -> arm, on a logarithmic axis; None: a curve for each arm, over its training."""
    x_label: str = ""
    """What x is in `curves`."""
    power_law: bool = False
    """Whether a power law a x^-b is fitted to the first metric of each of the `curves`."""


_KEYS = f"dict({', '.join(f'{item.name}=…' for item in fields(Ablation))})"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", nargs="?", help="name of a set (--list prints them), or a file")
    parser.add_argument("overrides", nargs="*", help="key.sub=value for all arms, such as data.root=data/bccd")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="train only these arms (default: all)")
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0, 1],
        metavar="S",
        help="random seeds of the runs of each arm (default: 0 1)",
    )
    parser.add_argument("--budget", type=float, metavar="MINUTES", help="start no run after this many minutes")
    parser.add_argument(
        "--out", type=Path, default=Path("model_zoo/ablations"), help="results folder (default: model_zoo/ablations)"
    )
    text = "folder of the runs (default: runs/ablations)"
    parser.add_argument("--run-dir", type=Path, default=Path("runs/ablations"), help=text)
    parser.add_argument(
        "--list", action="store_true", help="print the sets, or the commands of the set's arms, and stop"
    )
    parser.add_argument(
        "--plot-only", action="store_true", help="train nothing; write the table and the plot of the existing results"
    )
    text = "the runs' device: cpu, cuda, mps, ... (default: auto, the accelerator that PyTorch finds, else cpu)"
    parser.add_argument("--device", default="auto", help=text)
    words = list(sys.argv[1:] if argv is None else argv)
    # Overrides are taken out first: after --seeds or --arms they would be parsed as values of these options.
    overrides = [word for word in words if is_override(word) and not word.startswith("-")]
    args = parser.parse_args([word for word in words if word not in overrides])
    args.overrides = overrides
    if not args.set and not args.list:
        parser.error("name a set; --list prints them")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    with errors_in_one_line():
        if not args.set:
            print("\n".join(f"{path.stem:<24} {summary_of(path)}" for path in set_files()))
            return 0
        path = find_set(args.set)
        ablation = read_set(path)
        for arm in args.arms or []:
            if arm not in ablation.arms:
                raise ConfigError(f"--arms: no arm {arm!r} in {path.name}. {nearest(arm, ablation.arms)}")
        if args.list:
            for arm in args.arms or ablation.arms:
                print(shlex.join(train_command(ablation, arm, args.overrides)))
            return 0
        failures = 0
        if not args.plot_only:
            arms = args.arms or list(ablation.arms)
            check_arms(ablation, arms, args.overrides)
            failures = run_all(
                ablation,
                path,
                arms=arms,
                seeds=args.seeds,
                overrides=args.overrides,
                out=args.out,
                run_dir=args.run_dir,
                budget=args.budget,
                device=args.device,
            )
        if rows := read_rows(args.out / f"{path.stem}.json"):
            write_page(ablation, path, rows, args.out)
            print(f"wrote {args.out / path.stem}.json, .md and .png")
        else:
            print("no run is complete: nothing written")
        return int(failures > 0)


def set_files() -> list[Path]:
    """List the files of the installed sets."""
    return sorted(path for path in _SETS.glob("*.py") if path.name != "__init__.py")


def find_set(name: str) -> Path:
    """Return the file of a set.

    Raises:
        ConfigError: there is no set of that name.
    """
    path = Path(name) if name.endswith(".py") else _SETS / f"{name}.py"
    if not path.is_file():
        raise ConfigError(f"no set {name!r}. {nearest(name, [path.stem for path in set_files()])}")
    return path


def read_set(path: Path) -> Ablation:
    """Return the set in a file.

    Raises:
        ConfigError: the file has no function `ablation()` that returns the fields of a set.
    """
    try:
        ablation = Ablation(**runpy.run_path(str(path))["ablation"]())
    except (KeyError, TypeError, SyntaxError) as error:
        raise ConfigError(f"{path}: expected a function ablation() that returns {_KEYS} ({error}).") from error
    if ablation.power_law and not ablation.curves:
        raise ConfigError(f"{path}: power_law is fitted to curves; give curves=dict(name={{x: arm, …}}).")
    return ablation


def summary_of(path: Path) -> str:
    """Return the first paragraph of a set's docstring, in one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def train_command(ablation: Ablation, arm: str, overrides: Sequence[str]) -> list[str]:
    """Return the command that trains an arm."""
    changes = dict(ablation.arms[arm])
    base = changes.pop("base", ablation.base)

    def texts(values: Mapping[str, Any]) -> list[str]:
        return [f"{key}={value if isinstance(value, str) else repr(value)}" for key, value in values.items()]

    return ["vitkit", "train", base, *texts(ablation.settings), *overrides, *texts(changes)]


def check_arms(ablation: Ablation, arms: Sequence[str], overrides: Sequence[str]) -> None:
    """Check the configs of all arms before the first one is trained.

    Raises:
        ConfigError: the config of an arm is wrong.
    """
    for arm in arms:
        base, *changes = train_command(ablation, arm, overrides)[2:]
        try:
            vitkit.load_config(base, changes)
        except ConfigError as error:
            raise ConfigError(f"arm {arm!r}: {error}") from error


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
) -> int:
    """Run what is missing in the results, all arms with the first seed first; return the number of failed runs.

    Args:
        path: the set's file, whose name the results have.
        out: the folder of the results.
        run_dir: the folder of the runs.
        budget: start no run after this many minutes; None: no limit.
    """
    name, start, failures = path.stem, time.monotonic(), 0
    results = out / f"{name}.json"
    for seed in seeds:
        for arm in arms:
            rows, command = read_rows(results), train_command(ablation, arm, overrides)
            done = next((row for row in rows if (row["arm"], row["seed"]) == (arm, seed)), None)
            if done is not None:
                if done["command"].rsplit(" ", 3)[0] != shlex.join(command):  # without epochs, eval_every and seed
                    print(f"{arm}, seed {seed}: {results} has it with other settings: {done['command']}")
                continue
            if budget is not None and time.monotonic() - start > 60 * budget:
                print(f"--budget {budget:g}: starting no more runs")
                return failures
            folder = run_dir / name / f"{re.sub(r'[^a-z0-9]+', '_', arm.lower()).strip('_')}-{seed}"
            try:
                epochs = next((row["epochs"] for row in rows if row["arm"] == arm), None)
                row = {"set": name, "arm": arm, "seed": seed} | run_arm(
                    command, folder, seed=seed, epochs=epochs, ablation=ablation, device=device
                )
            except TrainingError as error:
                print(f"{arm}, seed {seed}: {error}", file=sys.stderr)
                failures += 1
                continue
            write_rows(results, [*rows, row])
            write_page(ablation, path, [*rows, row], out)
            metrics = row["evaluations"][-1]["metrics"]
            print(f"{arm}, seed {seed}: " + "  ".join(f"{m} {metrics.get(m, 0):.3f}" for m in ablation.metrics))
    return failures


def run_arm(command: list[str], folder: Path, *, seed: int, epochs: int | None, ablation: Ablation, device: str) -> Row:
    """Train one arm to its end, resuming it if it was interrupted; return its row.

    Raises:
        TrainingError: the run failed.
    """
    from vitkit.engine.checkpointing import CONFIG_NAME, LAST_NAME
    from vitkit.engine.run_folder import RECORD_NAME
    from vitkit.logging import LOG_NAME
    from vitkit.visualization.curves import read_log

    resumes = (folder / LAST_NAME).is_file()
    if resumes:
        epochs = vitkit.load_config(folder / CONFIG_NAME, trust=True)["train"]["epochs"]
    elif epochs is None and ablation.minutes is not None:
        epochs = epochs_of(ablation.minutes, command, folder.with_name(f"{folder.name}-timing"), device)
    epochs = epochs or vitkit.load_config(command[2], command[3:])["train"]["epochs"]
    eval_every = max(1, round(epochs / ablation.evaluations))
    command = [*command, f"train.epochs={epochs}", f"train.eval_every={eval_every}", f"train.seed={seed}"]
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
        evaluations=[{key: value for key, value in record.items() if key != "kind"} for record in evaluations],
        command=shlex.join(command),
        versions=start["versions"],
        device=start["device"]["name"],
        threads=start["device"]["threads"],
    )


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
        and all(value is None or _is_number(value) for value in record["metrics"].values())
    )


def _is_amount(value: Any) -> bool:
    return _is_number(value) and 0 <= value < _LARGEST


def _is_number(value: Any) -> bool:
    """Whether a value is a number that fits a float; a diverged run's metrics are nan or infinity."""
    return type(value) is float or (type(value) is int and abs(value) < _LARGEST)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as JSON, one per line."""
    from vitkit.data.io.output import write_text

    write_text(path, "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def write_page(ablation: Ablation, path: Path, rows: Sequence[Row], out: Path) -> None:
    """Write a set's table and plot."""
    from vitkit.data.io.output import write_text

    write_text(out / f"{path.stem}.md", table(ablation, path, rows))
    plot(ablation, rows, out / f"{path.stem}.png")


def table(ablation: Ablation, path: Path, rows: Sequence[Row]) -> str:
    """Return the markdown page of a set: the last evaluation of each arm, mean and standard deviation over seeds."""
    lines = [f"# {path.stem}", "", summary_of(path), ""]
    columns = ["arm", "seeds", "epochs", "steps", "processor minutes", *ablation.metrics]
    lines += ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    for arm in ablation.arms:
        runs = [row for row in rows if row["arm"] == arm]
        if not runs:
            lines.append(f"| {arm} | not run |" + " |" * (len(columns) - 2))
            continue
        cells = [arm, ", ".join(str(row["seed"]) for row in runs)]
        # With a time instead of epochs, seeds may differ in these.
        cells += [", ".join(map(str, sorted({row[key] for row in runs}))) for key in ("epochs", "steps")]
        cells.append(f"{statistics.mean(row['processor_minutes'] for row in runs):.1f}")
        for metric in ablation.metrics:
            cells.append(_mean_and_spread([row["evaluations"][-1]["metrics"].get(metric) for row in runs]))
        lines.append("| " + " | ".join(cells) + " |")
    if ablation.power_law and rows:
        lines += ["", f"Power laws of {ablation.metrics[0]}, a x^-b; x is {ablation.x_label}:", ""]
        lines += [f"- {name}: {law}" for name, law in power_laws(last_values(ablation, rows)).items()]
    if rows:
        versions = sorted({", ".join(f"{k} {v}" for k, v in row["versions"].items() if k in _SHOWN) for row in rows})
        threads = sorted({f"{row['threads']} thread(s) of {row['device']}" for row in rows})
        lines += ["", f"`vitkit ablate {path.stem}`; {'; '.join(versions)}; {'; '.join(threads)}."]
        lines += [f"The command of each run is in [{path.stem}.json]({path.stem}.json).", ""]
        lines += [f"![{ablation.metrics[0]} of each arm]({path.stem}.png)"]
    return "\n".join(lines) + "\n"


def _mean_and_spread(values: Sequence[float | None]) -> str:
    if any(value is None for value in values):
        return "–"
    text = f"{statistics.mean(values):.3f}"
    return text if len(values) == 1 else f"{text} ± {statistics.stdev(values):.3f}"


def plot(ablation: Ablation, rows: Sequence[Row], path: Path) -> None:
    """Draw the first metric: the mean over seeds, with their range shaded; or the points and their power law, with its
    95 % interval shaded."""
    from matplotlib.figure import Figure

    from vitkit.visualization.canvas import save_figure

    if ablation.curves:
        curves, x = last_values(ablation, rows), ablation.x_label
    else:
        x = "processor_minutes" if ablation.minutes else "epoch"
        curves = values_over_training(ablation, rows, x)
    laws = power_laws(curves) if ablation.power_law else {}
    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, points) in enumerate(curves.items()):
        style = dict(color=f"C{number % 10}", linestyle=("-", "--", ":")[number // 10])
        law = laws.get(name)
        if law is None or isinstance(law, str) or not law.falls:
            _draw_means(axes, points, label=name, **style)
        else:
            _draw_power_law(axes, points, law, label=name, **style)
    axes.set(xlabel=x.replace("_", " "), ylabel=ablation.metrics[0], title=path.stem)
    if ablation.power_law:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    if ablation.curves:
        ticks = sorted({x for points in curves.values() for x in points})
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.xaxis.minorticks_off()
    else:
        axes.set_xlim(left=0)
    if x == "epoch":
        axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False)
    save_figure(figure, path, dpi=110)


def _draw_means(axes: "Axes", points: Mapping[float, list[float]], *, label: str, color: str, linestyle: str) -> None:
    positions = list(points)
    means = [statistics.mean(values) for values in points.values()]
    axes.plot(positions, means, marker="o", markersize=3, label=label, color=color, linestyle=linestyle)
    lowest, highest = [min(values) for values in points.values()], [max(values) for values in points.values()]
    axes.fill_between(positions, lowest, highest, alpha=0.15, color=color)


def _draw_power_law(
    axes: "Axes", points: Mapping[float, list[float]], law: "PowerLaw", *, label: str, color: str, linestyle: str
) -> None:
    import numpy as np

    positions, values = flat(points)
    axes.plot(positions, values, marker="o", markersize=4, linestyle="none", color=color)
    line = np.geomspace(min(positions), max(positions))
    text = rf"{label}: {law.scale:.3g} $x^{{-{law.exponent:.2f} \pm {law.margin:.2f}}}$"
    axes.plot(line, law.at(line), label=text, color=color, linestyle=linestyle)
    axes.fill_between(line, *law.band(line), alpha=0.15, color=color)


def flat(points: Mapping[float, list[float]]) -> tuple[list[float], list[float]]:
    """Return the x and the y of a curve's points, one for each seed."""
    pairs = [(x, value) for x, values in points.items() for value in values]
    return [x for x, _ in pairs], [y for _, y in pairs]


def power_laws(curves: "Curves") -> "dict[str, PowerLaw | str]":
    """Return the power law of each curve, or why it has none."""
    from vitkit.analysis.power_law import fit_power_law

    laws: dict[str, PowerLaw | str] = {}
    for name, points in curves.items():
        try:
            laws[name] = fit_power_law(*flat(points))
        except ValueError as error:
            laws[name] = str(error)
    return laws


Curves = dict[str, dict[float, list[float]]]
"""Name of a curve -> x -> the metric with each seed."""


def values_over_training(ablation: Ablation, rows: Sequence[Row], x: str) -> Curves:
    """Return a curve for each arm, with a point for each evaluation; `x` is the mean over seeds."""
    metric, curves = ablation.metrics[0], {}
    for arm in ablation.arms:
        runs = [row["evaluations"] for row in rows if row["arm"] == arm]
        if runs:
            curves[arm] = {
                statistics.mean(record[x] for record in point): [_metric(record, metric) for record in point]
                for point in zip(*runs)  # for each evaluation, the records of all seeds
            }
    return curves


def last_values(ablation: Ablation, rows: Sequence[Row]) -> Curves:
    """Return the set's `curves`, without the arms that have not been run."""
    metric, values = ablation.metrics[0], {}
    for row in rows:
        values.setdefault(row["arm"], []).append(_metric(row["evaluations"][-1], metric))
    return {
        name: {x: values[arm] for x, arm in points.items() if arm in values} for name, points in ablation.curves.items()
    }


def _metric(record: Mapping[str, Any], name: str) -> float:
    """Return a metric of an evaluation; nan, which is not drawn, if it was not measured."""
    value = record["metrics"].get(name)
    return math.nan if value is None else value


if __name__ == "__main__":
    sys.exit(main())
