"""Records of measured figures: JSON with a checksum of its own content, and a table with a line for each."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from vitkit.errors import DataError
from vitkit.io.json_files import read_json
from vitkit.io.output import write_text

FORM = 1
"""Version of the form of records."""
TABLE = "table.md"
"""The file of a folder of records that lists them."""
_SUM = "sum"
_REMEDY = "Give a record that vitkit reproduce wrote."
_SIZES = ("sha256", "bytes")


class Figure(NamedTuple):
    """A published figure beside the measured one, in the unit of the publication."""

    name: str
    """The figure's name where it is published, such as "box AP"."""
    metric: str
    """The evaluator's name of it, such as "bbox/AP"."""
    published: float | None
    """None: there is none on the split that was evaluated."""
    measured: float
    low: float | None
    """Ends of the 95 % interval of the measured figure, by a bootstrap over the samples; None: its statistics give
    none."""
    high: float | None

    @property
    def difference(self) -> float | None:
        """The measured figure minus the published one."""
        return None if self.published is None else self.measured - self.published

    @property
    def agrees(self) -> bool | None:
        """Whether the published figure lies in the interval of the measured one, or is what that is rounded to."""
        if self.published is None:
            return None
        half = 0.5 * 10.0 ** -_decimals(self.published)
        low, high = (self.measured if end is None else end for end in (self.low, self.high))
        return low - half <= self.published <= high + half

    def __str__(self) -> str:
        """Write the figure as in "box AP 42.0: 42.06 [41.31, 42.84], +0.06"."""
        decimals = min(_decimals(self.measured if self.published is None else self.published) + 1, 4)
        interval = "" if self.low is None else f" [{self.low:.{decimals}f}, {self.high:.{decimals}f}]"
        measured = f"{self.measured:.{decimals}f}{interval}"
        if self.difference is None:
            return f"{self.name}: {measured}"
        difference = round(self.difference, decimals) + 0.0  # no -0
        return f"{self.name} {self.published:g}: {measured}, {difference:+.{decimals}f}"


@dataclass(frozen=True)
class Record:
    """What was measured of a model, on what, and how; `write` gives it a checksum of its content."""

    name: str
    """The model's name in the model zoo, or of the config that trains it."""
    command: str
    """The command that measures it again."""
    source: str
    """Where the figures are published."""
    figures: list[Figure]
    not_measured: list[str]
    """Published figures that this evaluation does not give, such as those with several image sizes."""
    metrics: dict[str, float | None]
    """All metrics of the evaluation, in the evaluator's units; None: the data have nothing that it measures."""
    weights: dict[str, Any]
    """Their `sha256`, `bytes` and `source`: the URL, the file in the package, or the command that trained them."""
    data: dict[str, Any]
    """See `vitkit.apps.reproduction.data_checks.check_data`."""
    num_samples: int
    """Number of images or sentences that were evaluated."""
    subset: bool
    """Whether these are only some of the data."""
    versions: dict[str, str]
    device: str
    precision: str
    timing: dict[str, Any] = field(default_factory=dict)
    """The date, and the seconds, in all and by sample, and the samples of the process that finished; nothing else of a
    record depends on how often it was killed and resumed."""

    @property
    def file_name(self) -> str:
        """The record's file: its name, with the split unless it is val, and the number of samples of a subset."""
        split = "" if self.data["split"] == "val" else f"-{self.data['split']}"
        return file_name(self.name, split.removeprefix("-") or "val", self.num_samples if self.subset else None)

    def content(self) -> dict[str, Any]:
        """Return the content as it is stored, with its sum."""
        content = {"form": FORM, **asdict(self), "figures": [_figure_content(figure) for figure in self.figures]}
        return {**content, _SUM: sum_of(content)}

    def write(self, folder: Path) -> Path:
        """Write the record to a folder, and the folder's table anew.

        Raises:
            DataError: they cannot be written, or another record of the folder is damaged.
        """
        path = folder / self.file_name
        write_text(path, json.dumps(self.content(), indent=2, ensure_ascii=False) + "\n")
        write_text(folder / TABLE, format_table(read_records(folder).items()))
        return path

    def line(self, file: str | None = None) -> str:
        """Return the record as a row of `format_table`, which links to its file."""
        where = f"{self.data['name']} {self.data['split']}, {self.num_samples}{' of them' if self.subset else ''}"
        agree = [figure.agrees for figure in self.figures if figure.agrees is not None]
        agrees = ("yes" if all(agree) else "**no**") if agree else "none published"
        figures = "; ".join(map(str, self.figures))
        on = f"{self.device}, {self.precision}, torch {self.versions['torch']}"
        record = f"[{self.timing['date']}]({file or self.file_name})"
        return f"| `{self.name}` | {where} | {figures} | {agrees} | {on} | {record} |"

    def __repr__(self) -> str:
        return "\n".join([f"{self.name}: {self.command}", *(f"  {figure}" for figure in self.figures)])


def file_name(name: str, split: str = "val", num_images: int | None = None) -> str:
    """Return the name of the file of a model's record; configs in folders have "-" in place of "/"."""
    parts = [name.replace("/", "-"), *([split] if split != "val" else [])]
    return "-".join([*parts, *([f"{num_images}_images"] if num_images else [])]) + ".json"


def sum_of(content: Mapping[str, Any]) -> str:
    """Return the checksum of a record's content without its sum: SHA-256 of its JSON with sorted keys and no blanks."""
    content = {name: value for name, value in content.items() if name != _SUM}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def read_record(path: str | Path, *, remedy: str = _REMEDY) -> Record:
    """Read a record and check its sum, its form, and that its figures are those of its metrics.

    The sum tells an edit by hand and a damaged file; it is no signature, since anyone can compute it: the command
    repeats what a record states.

    Args:
        remedy: the end of the error of a file that is not a record.
    Raises:
        DataError: it cannot be read, has another form or another sum, or contradicts itself.
    """
    path = Path(path)
    content = read_json(path, key="record", remedy=remedy)
    if not isinstance(content, dict) or content.get("form") != FORM:
        raise DataError(f"{path}: is not a record of form {FORM}. {remedy}")
    if content.get(_SUM) != (expected := _try_sum(content)):
        raise DataError(
            f"{path}: its content has the sum {expected[:19]}…, but it states {str(content.get(_SUM))[:19]}…: it was "
            f"edited by hand, or is damaged. Measure it again: {content.get('command')}"
        )
    missing = [each.name for each in fields(Record) if each.name not in content]
    if missing:
        raise DataError(f"{path}: has no {missing[0]!r}. {remedy}")
    try:
        figures = [Figure(**{name: entry[name] for name in Figure._fields}) for entry in content["figures"]]
        record = Record(**{each.name: content[each.name] for each in fields(Record)} | {"figures": figures})
        _check(record, content, path)
        record.line()  # which reads the rest
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, ArithmeticError) as error:
        raise DataError(f"{path}: has another form ({type(error).__name__}: {error}). {remedy}") from error
    return record


def read_records(folder: Path) -> dict[str, Record]:
    """Return the records of a folder by the names of their files, sorted; raises like `read_record`."""
    return {path.name: read_record(path) for path in sorted(folder.glob("*.json"))}


def format_table(records: Iterable[tuple[str, Record]]) -> str:
    """Return a page in Markdown that lists records: (file, record)."""
    lines = [
        "# Records",
        "",
        "Published figure: measured one with its 95 % interval over the samples, difference. `vitkit reproduce` writes "
        "this page.",
        "",
        "| model | data | figures | published one in the interval | on | record |",
        "|---|---|---|---|---|---|",
        *(record.line(file) for file, record in records),
    ]
    return "\n".join(lines) + "\n"


def _figure_content(figure: Figure) -> dict[str, Any]:
    return {**figure._asdict(), "difference": figure.difference, "agrees": figure.agrees}


def _try_sum(content: Mapping[str, Any]) -> str:
    try:
        return sum_of(content)
    except ValueError:  # NaN, which records do not have
        return "none (not a number)"


def _check(record: Record, content: Mapping[str, Any], path: Path) -> None:
    """Check that figures are those of the metrics, and that files have checksums."""
    for figure, entry in zip(record.figures, content["figures"]):
        value = record.metrics.get(figure.metric)
        if value is None or not any(math.isclose(figure.measured, unit * value) for unit in (1, 100)):
            raise DataError(
                f"{path}: states {figure.name} {figure.measured}, but {figure.metric} is {value}. {_REMEDY}"
            )
        if entry != _figure_content(figure):
            raise DataError(f"{path}: what it says of {figure.name} contradicts itself. {_REMEDY}")
    if record.file_name != path.name:
        raise DataError(f"{path}: is the record {record.file_name}. Give the file its name.")
    for size in _SIZES:
        record.weights[size]


def _decimals(value: float) -> int:
    """Return the number of decimals that a figure is published with: fractions have three, percentages at least one."""
    return max(3 if abs(value) <= 1 else 1, len(repr(float(value)).partition(".")[2].rstrip("0")))
