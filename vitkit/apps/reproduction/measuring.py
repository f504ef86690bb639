"""Measures the figures of published weights, and of configs that are trained first, and writes records of them."""

import copy
import datetime
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitkit import model_zoo
from vitkit.apps.inference import find_trained
from vitkit.apps.inference.load import find_usable
from vitkit.apps.reproduction.data_checks import check_data, known_data
from vitkit.apps.reproduction.figures import compare_figures
from vitkit.apps.reproduction.records import Figure, Record, file_name, read_record
from vitkit.apps.reproduction.versions import versions
from vitkit.apps.training.api import as_overrides, check_resumable, process_group, train
from vitkit.apps.training.stored_predictions import PredictionFiles
from vitkit.apps.training.testing import Evaluation, evaluate_model, evaluation_precision
from vitkit.config import Config, cfg_diff, load_config, value_at
from vitkit.config.paths import make_data_paths_absolute
from vitkit.data.loading.splits import Split
from vitkit.devices import describe_processor, device_name
from vitkit.distributed import broadcast_object, failing_together, is_main, world_size
from vitkit.errors import ConfigError, VitkitError
from vitkit.io.output import unwritable
from vitkit.protocols.evaluator import is_measured
from vitkit.registry import unknown
from vitkit.weights.download import file_digest
from vitkit.weights.locate import RUN_CONFIG, Located
from vitkit.weights.published import load_published_config

logger = logging.getLogger("vitkit")
FOLDER = Path("records")
"""The default folder of records."""
_SETTABLE = ("data.root", "data.num_workers")
"""What may be set of a config without measuring another model than the published one."""
_NOT_TRAINED_WITH = ("data.test", "data.num_workers")
"""Sections of a config that leave the weights of a run the same."""
_PIXELS = 800 * 1200
"""Pixels of an image of an unknown size, for the order of costs."""
_TOLERANCE = {True: 0.005, False: 0.5}
"""Difference of figures without an interval that is due to another machine: of fractions, and of percentages."""


class Stated(NamedTuple):
    """A model whose figures are published, or stated in this project."""

    name: str
    entry: Mapping[str, Any]
    """Its entry of the model zoo's index or of `trained.json`."""
    is_trained_first: bool
    """Whether its weights are not published."""

    @property
    def figures(self) -> Mapping[str, float]:
        return self.entry.get("published") or self.entry.get("measured") or {}

    @property
    def split(self) -> Split:
        """The split that its figures are of."""
        return self.entry.get("split", "val")

    def config(self, overrides: Sequence[str]) -> Config:
        """Return its checked config."""
        if not self.is_trained_first:
            return load_published_config(self.name, overrides)
        return load_config(self.entry["config"], [*self.entry.get("overrides", ()), *overrides])

    def add_split(self, config: Mapping[str, Any], split: Split) -> None:
        """Give a config a published split that it lacks."""
        if config["data"].get(split) is None and split in self.entry.get("splits", {}):
            config["data"][split] = {**config["data"]["val"], **self.entry["splits"][split]}


class OutOfTime(Exception):
    """The time that was given is over; what was predicted is kept."""


class _TimedFiles(PredictionFiles):
    """Stored predictions of an evaluation that ends at a deadline; on several ranks it goes on to its end."""

    deadline: float | None = None

    def add(self) -> None:
        super().add()
        if self.deadline is not None and time.monotonic() > self.deadline and world_size() == 1:
            raise OutOfTime


def find_stated(name: str) -> Stated:
    """Find a model by its name in the model zoo's index, or the config of figures whose weights are trained first.

    Raises:
        ConfigError: there is neither.
    """
    listed = model_zoo.listed_name(name)
    if listed is not None:
        return Stated(listed, model_zoo.index()[listed], False)
    trained = model_zoo.trained()
    if name in trained:
        return Stated(name, trained[name], True)
    raise ConfigError(
        unknown(name, [*model_zoo.index(), *trained], f"{name!r} has no figure to reproduce (model_zoo/models.md)")
    )


def reproduce(
    name: str | Path,
    *,
    out: str | Path = FOLDER,
    split: Split | None = None,
    images: int | None = None,
    train_first: bool = False,
    overwrite: bool = False,
    device: str | None = None,
    **overrides: Any,
) -> Record:
    """Measure the published figures of a model, as `vitkit reproduce` does, and write a record of them.

    The data are checked first, then the weights are downloaded, and evaluated as by `vitkit.test`. What was killed goes
    on: call it again. Under torchrun every process must call it.

    `vitkit.reproduce("detr_r50", data=dict(root="data/coco"))`

    Args:
        name: a name of the model zoo; or the name of a config whose figures vitkit states, with `train_first`; or a
            record (.json), whose measurement is repeated.
        out: the folder of the record.
        split: "val", "test" or "train"; None: that of the figure, mostly "val".
        images: measure only so many images or sentences, always the same ones.
        train_first: train the weights, where none are published.
        overwrite: replace an earlier record of the same measurement.
        device: "cpu", "cuda", "mps", ...; None: an accelerator if there is one.
        overrides: `data=dict(root=DIR)` and data.num_workers, see `vitkit.train`; other values would be other models.
    Raises:
        DataError: the data are not the published ones, a record is damaged or was edited, or `out` cannot be written.
        CheckpointError: the weights cannot be downloaded, or are damaged.
        ConfigError: there is no such figure, its weights are to be trained first, or are not, or were trained with
            other settings, or the record exists.
    """
    if str(name).endswith(".json"):
        repeated = read_record(name)
        name, split = repeated.name, repeated.data["split"]
        images = repeated.num_samples if repeated.subset else None
    return _measure(
        find_stated(str(name)),
        Path(out),
        split,
        images,
        as_overrides(overrides),
        train_first=train_first,
        overwrite=overwrite,
        device=device,
    )


def reproduce_all(
    *,
    datasets: str | Path = "data",
    out: str | Path = FOLDER,
    images: int | None = None,
    limit_hours: float | None = None,
    device: str | None = None,
) -> Iterator[tuple[str, Record | VitkitError]]:
    """Measure all models of the index that have no record yet, the cheapest first; yield each record, or its error.

    Args:
        datasets: the folder of the datasets' folders: COCO is in DATASETS/coco, as configs name it.
        limit_hours: end after so many hours, also in the middle of a model, which the next call goes on with; None: no
            limit.
        out, images, device: see `reproduce`.
    """
    deadline = None if limit_hours is None else time.monotonic() + 3600 * limit_hours
    _check_out(Path(out))
    for stated in by_cost():
        if (Path(out) / file_name(stated.name, num_images=images)).is_file():
            logger.info("%s: has a record in %s", stated.name, out)
            continue
        if deadline is not None and time.monotonic() > deadline:
            logger.info("%s and the models after it: not measured in %g hours", stated.name, limit_hours)
            return
        try:
            root = stated.config([])["data"].get("root")
            settings = [] if root is None else [f"data.root={Path(datasets, Path(root).name)}"]
            yield stated.name, _measure(stated, Path(out), None, images, settings, deadline=deadline, device=device)
        except OutOfTime:
            logger.info("%s: not finished in %g hours; it goes on when this is called again", stated.name, limit_hours)
            return
        except VitkitError as error:
            yield stated.name, error


def by_cost() -> list[Stated]:
    """Return the models of the index by the work that their evaluation is: their number of parameters times the pixels
    of an image times the number of images; those of unknown size last."""
    counts = {name: max(each.get("val", {}).values(), default=5000) for name, each in known_data().items()}
    costs, index = {}, model_zoo.index()
    for name, entry in index.items():
        number = next((counts[data] for data in counts if entry["dataset"].startswith(data)), 5000)
        pixels = _pixels(load_published_config(name, check=False)["data"]["val"])
        costs[name] = entry.get("parameters", float("inf")) * pixels * number
    ordered = (Stated(name, index[name], False) for name in sorted(costs, key=lambda name: costs[name]))
    return [stated for stated in ordered if stated.figures]


def repeats(record: Record, earlier: Record) -> list[Figure]:
    """Return the figures of an earlier record, as the published ones, beside those of a new one that repeats it."""
    before = {figure.metric: figure.measured for figure in earlier.figures}
    return [figure._replace(published=before[figure.metric]) for figure in record.figures if figure.metric in before]


def is_repeated(figure: Figure) -> bool:
    """Whether an earlier figure lies in the interval of the new one or, without one, is close, as on other machines."""
    if figure.low is not None:
        return figure.low <= figure.published <= figure.high
    return abs(figure.difference) <= _TOLERANCE[abs(figure.published) <= 1]


def _measure(
    stated: Stated,
    out: Path,
    split: Split | None,
    images: int | None,
    settings: Sequence[str],
    *,
    train_first: bool = False,
    overwrite: bool = False,
    deadline: float | None = None,
    device: str | None = None,
) -> Record:
    """Check the data, get the weights, evaluate them, and write a record; see `reproduce`."""
    split = split or stated.split
    path = out / file_name(stated.name, split, images)
    if path.exists() and not overwrite:
        raise ConfigError(f"{path}: there is a record already. Choose another --out, or replace it (--overwrite).")
    _check_out(out, replaced=path)
    _check_request(stated, settings, train_first=train_first)
    config = stated.config(settings)
    stated.add_split(config, split)
    data = check_data(config, stated.entry["dataset"], split, published=not stated.is_trained_first)
    if stated.is_trained_first:
        origin = _origin(stated, config, settings)
        folder = (out / file_name(stated.name)).with_suffix(".run")  # of all splits
        _train(config, folder, device)
        config, weights = find_trained(folder, overrides=settings)
        stated.add_split(config, split)
    else:
        origin = {"source": stated.entry["url"]}
        weights = find_usable(Located("published", stated.name))
        weights.fetch()
    with process_group(device) as rank_device:
        folder = path.with_suffix(".stored_predictions")
        files = _TimedFiles(folder, resume=broadcast_object(folder.is_dir()), begins_anew=True)
        files.deadline = deadline
        started = time.monotonic()
        result = evaluate_model(config, weights, rank_device, split=split, prediction_files=files, num_samples=images)
        seconds = time.monotonic() - started
        with failing_together():
            command = command_of(stated, split, images, config["data"].get("root"))
            record = None
            if is_main():
                record = _record(stated, command, config, weights, origin, data, result, rank_device, images)
                record.timing.update(
                    date=datetime.date.today().isoformat(),
                    seconds=round(seconds, 1),
                    seconds_per_sample=round(result.seconds_per_sample, 5),
                    samples=record.num_samples - files.num_done,
                )
                record.write(out)
                files.remove()
        return broadcast_object(record)


def _check_request(stated: Stated, settings: Sequence[str], *, train_first: bool) -> None:
    """Raise a ConfigError if a model has no figures, or not with these settings, or is to be trained first."""
    if not stated.figures:
        raise ConfigError(f"{stated.name}: none of its figures is published (model_zoo/models.md).")
    if train_first and not stated.is_trained_first:
        raise ConfigError(
            f"{stated.name}: its weights are published, and are measured without --train. To train such weights: "
            f"vitkit train {stated.entry['config']}"
        )
    if stated.is_trained_first and not train_first:
        raise ConfigError(
            f"{stated.name}: its weights are not published. vitkit reproduce {stated.name} --train trains them, "
            f"{stated.entry['processor_minutes']} minutes of one core, and then measures them."
        )
    required = stated.entry.get("requires")
    settable = [*_SETTABLE, *([required] if required else [])]
    for setting in settings:
        if setting.partition("=")[0] not in settable:
            raise ConfigError(f"{setting}: would measure another model. Only {' and '.join(settable)} can be set.")
    if required and not any(setting.startswith(f"{required}=") for setting in settings):
        raise ConfigError(f"{stated.name}: its figure is from weights of another project: give {required}=FILE.")


def _check_out(out: Path, *, replaced: Path | None = None) -> None:
    """Raise a DataError if a folder of records cannot be written to, or has a damaged record, which its table lists."""
    folder = next(parent for parent in (out, *out.parents) if os.path.lexists(parent))
    try:
        with tempfile.TemporaryFile(dir=folder):  # permissions do not tell everything, for instance in /proc
            pass
    except OSError as error:
        raise unwritable(out, error) from error
    for path in sorted({*out.glob("*.json")} - {replaced}):
        read_record(path, remedy="Remove it, or choose another --out.")


def _origin(stated: Stated, config: Config, settings: Sequence[str]) -> dict[str, Any]:
    """Check the training data; return the command that trains the weights, the checksum of the file that they start
    from, if there is one, and what is found of the data."""
    words = ["vitkit train", stated.entry["config"], *stated.entry.get("overrides", ())]
    start = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key == stated.entry.get("requires"):
            is_file = Path(value).is_file()
            words.append(f"{key}=FILE" if is_file else setting)
            start = {"start_sha256": file_digest(Path(value), "sha256")} if is_file else {}
    words += ["data.root=DIR"] * (config["data"].get("root") is not None)
    data = check_data(config, stated.entry["dataset"], "train", published=False)
    return {"source": " ".join(words), **start, "data": data}


def _train(config: Config, folder: Path, device: str | None) -> None:
    """Train a run, or go on with it.

    Raises:
        ConfigError: the folder's run has another config.
    """
    try:
        check_resumable(folder)
    except ConfigError:
        if is_main():
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed before its first checkpoint
        train(config, run_dir=folder, device=device)
    else:
        saved, config = load_config(folder / RUN_CONFIG), copy.deepcopy(config)
        make_data_paths_absolute(config)
        if config["train"].get("precision") == "auto":  # a run keeps that of the device that it began on
            config["train"]["precision"] = value_at(saved, "train.precision")
        for key in cfg_diff(saved, config):
            if not key.startswith(_NOT_TRAINED_WITH):
                before, now = (value_at(each, key, "its default") for each in (saved, config))
                raise ConfigError(
                    f"{folder}: was trained with {key}={before}, not {now}. Choose another --out, or remove it."
                )
        train(resume=folder, device=device)


def _record(
    stated: Stated,
    command: str,
    config: Config,
    weights: Located,
    origin: Mapping[str, Any],
    data: dict[str, Any],
    result: Evaluation,
    device: torch.device,
    images: int | None,
) -> Record:
    own = "published" not in stated.entry
    published = {name: value if data["split"] == stated.split else None for name, value in stated.figures.items()}
    figures, others = compare_figures(published, result.metrics, result.evaluator, data=data["name"], own=own)
    path = Path(weights.path)
    return Record(
        name=stated.name,
        command=command,
        source=stated.entry.get("published_in", "model_zoo/README.md, measured by vitkit test"),
        figures=figures,
        not_measured=others,
        metrics={name: value if is_measured(value) else None for name, value in result.metrics.items()},
        weights={**origin, "sha256": file_digest(path, "sha256"), "bytes": path.stat().st_size},
        data=data,
        num_samples=len(result.evaluator.dataset),
        subset=images is not None,
        versions=versions(),
        device=f"{world_size()} x " * (world_size() > 1) + _describe(device),
        precision=evaluation_precision(config, device),
    )


def command_of(stated: Stated, split: Split, images: int | None, root: str | None) -> str:
    """Return the command that measures a model; DIR stands for the folder of its data."""
    words = ["vitkit reproduce", stated.name]
    words += ["--train"] * stated.is_trained_first
    words += [f"--split {split}"] * (split != stated.split)
    words += [f"--images {images}"] * (images is not None)
    words += [f"{stated.entry.get('requires')}=FILE"] * ("requires" in stated.entry)
    return " ".join([*words, *["data.root=DIR"] * (root is not None)])


def _describe(device: torch.device) -> str:
    return describe_processor() if device.type == "cpu" else device_name(device)


def _pixels(spec: Any) -> int:
    """Return about how many pixels a validation image has after its transforms."""
    transforms = spec.get("transforms") if isinstance(spec, Mapping) else None
    sizes = transforms if isinstance(transforms, Mapping) else {}
    if isinstance(spec, Mapping) and isinstance(spec.get("image_size"), int):  # of drawn images
        return spec["image_size"] ** 2
    if isinstance(side := sizes.get("size"), int):
        return side**2
    if isinstance(short := sizes.get("short_side"), int) and isinstance(longest := sizes.get("max_size"), int):
        return short * min(longest, 3 * short // 2)
    return _PIXELS
