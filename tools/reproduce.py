"""Measure a published figure on your own machine, and write a record of it that anyone can check.

The data are checked: counts and checksums of annotations, that no image is missing, some images opened. The weights are
downloaded and checked, and evaluated as by vitkit test. The record (JSON, and a row of table.md) has the published
figure beside the measured one with its 95 % interval over the images, checksums, versions, the device, the time and the
command. A command that was killed goes on when it is given again.

Examples:
    vitkit reproduce shapes_dino    (weights in the package, on images that it was not trained on)
    vitkit reproduce detr_r50 data.root=data/coco
    vitkit reproduce detr_r50 data.root=data/coco --images 500    (always the same ones: a wider interval)
    vitkit reproduce --all --datasets data --limit-hours 10    (all models without a record, the cheapest first)
    vitkit reproduce bccd/dino_r18 --train data.root=data/bccd    (weights that are not published are trained first)
    vitkit reproduce model_zoo/records/shapes_dino.json    (measure again what a record states)
    vitkit reproduce --verify model_zoo/records/*.json    (were records edited by hand?)
    torchrun --nproc-per-node 8 tools/reproduce.py detr_r50 data.root=data/coco
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitkit.errors import ConfigError, DataError, VitkitError, error_line
from vitkit.text_format import pluralize
from vitkit.tools.common import a_path, add_device, add_overwrite, errors_in_one_line, is_override, positive

if TYPE_CHECKING:
    from vitkit.apps.reproduction import Record


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "a name of the model zoo; a config whose figures are stated, with --train; or a record (.json) to repeat"
    parser.add_argument("name", nargs="?", help=text)
    text = "data.root=DIR, the folder of the data, and data.num_workers=N"
    parser.add_argument("overrides", nargs="*", default=[], help=text)
    parser.add_argument("--all", action="store_true", help="all models of the zoo that have no record, cheapest first")
    text = "with --all: end after H hours; the next --all goes on there"
    parser.add_argument("--limit-hours", type=_hours, metavar="H", help=text)
    text = "with --all: the folder of the datasets' folders: COCO is in DIR/coco (default: data)"
    parser.add_argument("--datasets", type=a_path, metavar="DIR", help=text)
    parser.add_argument("--images", type=positive, metavar="N", help="measure N images only, always the same ones")
    text = "split of the data (default: that of the figure, mostly val)"
    parser.add_argument("--split", choices=("train", "val", "test"), help=text)
    text = "train the weights first, where none are published; a run that was killed goes on"
    parser.add_argument("--train", action="store_true", help=text)
    parser.add_argument("--out", type=a_path, default=Path("records"), help="folder of the records (default: records)")
    parser.add_argument(
        "--verify", type=a_path, nargs="+", metavar="RECORD", help="check the form and the sums of records"
    )
    add_overwrite(parser)
    add_device(parser)
    args = parser.parse_intermixed_args(argv)
    if is_override(args.name):
        args.name, args.overrides = None, [args.name, *args.overrides]
    if sum((args.name is not None, args.all, args.verify is not None)) != 1:
        parser.error("give the name of a model or a record, or --all, or --verify RECORD")
    wrong = {"--limit-hours": args.limit_hours, "--datasets": args.datasets}
    if not args.all and (given := [option for option, value in wrong.items() if value is not None]):
        parser.error(f"{given[0]} is for --all; the folder of one model's data is data.root=DIR")
    others = {"--split": args.split is not None, "--train": args.train, "--overwrite": args.overwrite}
    if args.all and (given := [option for option, value in others.items() if value]):
        parser.error(f"{given[0]} is for one model, not for --all")
    if args.name and args.name.endswith(".json") and (args.images or args.split):
        parser.error("--images and --split are those of the record that is repeated")
    for override in args.overrides:
        if not re.match(r"\w+\.[\w.]+=", override):
            parser.error(f"{override}: expected data.root=DIR or data.num_workers=N")
    if args.all and args.overrides:
        parser.error(f"{args.overrides[0]} is for one model; for --all give --datasets DIR")
    return args


def _hours(text: str) -> float:
    with suppress(ValueError):
        if (hours := float(text)) > 0:
            return hours
    raise argparse.ArgumentTypeError(f"{text!r}: expected a number of hours above 0")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.verify:
        sys.exit(check(args.verify))
    from vitkit.logging import setup_logging

    with errors_in_one_line():
        setup_logging()
        if args.all:
            failed = measure_all(args)
            if failed:
                raise ConfigError(f"{pluralize(failed, 'models')} could not be measured, see above.")
            return
        record = measure(args)
        show(record, args.out)
        if args.name.endswith(".json"):
            compare(record, Path(args.name))


def check(paths: list[Path]) -> int:
    """Print for each record whether it is what it was; return the exit status."""
    from vitkit.apps.reproduction import read_record
    from vitkit.apps.reproduction.versions import SOURCES, source_digest

    failed, sources = 0, source_digest()
    for path in paths:
        try:
            record = read_record(path)
            code = "this" if record.versions.get(SOURCES, sources) == sources else "other"
            print(f"{path}: unchanged{f', measured by {code} code' * (SOURCES in record.versions)}; {record.command}")
        except DataError as error:
            print(error_line(error), file=sys.stderr)
            failed += 1
    return 1 if failed else 0


def measure(args: argparse.Namespace) -> Record:
    """Measure one model."""
    from vitkit.apps.reproduction import reproduce

    settings: dict[str, Any] = dict(override.split("=", 1) for override in args.overrides)
    return reproduce(
        args.name,
        out=args.out,
        split=args.split,
        images=args.images,
        train_first=args.train,
        overwrite=args.overwrite,
        device=args.device,
        **settings,
    )


def measure_all(args: argparse.Namespace) -> int:
    """Measure all models; return how many failed."""
    from vitkit.apps.reproduction import reproduce_all

    failed = 0
    options = {"out": args.out, "images": args.images, "limit_hours": args.limit_hours, "device": args.device}
    for name, result in reproduce_all(datasets=args.datasets or "data", **options):
        if isinstance(result, VitkitError):
            print(f"{name}: {error_line(result)}", file=sys.stderr)
            failed += 1
        else:
            show(result, args.out)
    return failed


def show(record: Record, out: Path) -> None:
    """Print a record's figures, and where it is, on the first of torchrun's ranks, which have ended by then."""
    if os.environ.get("RANK", "0") == "0":
        print(record)
        print(f"the record is {out / record.file_name}")


def compare(record: Record, path: Path) -> None:
    """Compare a record with the earlier one that it repeats.

    Raises:
        DataError: the earlier figures are not repeated.
    """
    from vitkit.apps.reproduction.measuring import is_repeated, repeats
    from vitkit.apps.reproduction.records import read_record

    figures = repeats(record, read_record(path))
    differing = [figure for figure in figures if not is_repeated(figure)]
    if differing:
        raise DataError(f"{path}: not repeated: {'; '.join(map(str, differing))}.")
    print(f"repeats {path}: {pluralize(len(figures), 'figures')} in the interval")


if __name__ == "__main__":
    main()
