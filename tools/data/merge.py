"""Join several datasets into one: classes with the same name become one class, and --map renames or drops classes.

Images are linked into OUT/images (or copied if the disk has no links); splits are kept if every dataset has some.

Examples:
    vitkit data merge own.json roboflow/data.yaml --map "red cell=RBC" "white cell=WBC" --out cells
    vitkit data merge a/data.yaml b/Annotations --map "scratch=" --to yolo --out both
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from vitkit.errors import ConfigError, DataError
from vitkit.tools.common import errors_in_one_line
from vitkit.tools.data.options import add_out


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "annotations in any format that vitkit data convert reads; FILE,DIR if their images are elsewhere"
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help=text)
    text = "the new name of a class; with an empty name its objects are left out"
    parser.add_argument("--map", nargs="+", default=[], metavar="CLASS=NAME", help=text)
    add_out(parser)
    args = parser.parse_args(argv)
    if len(args.sources) < 2:
        parser.error("give two datasets or more")
    return args


@contextmanager
def explain_missing_images() -> Iterator[None]:
    """Add to errors about images how to give their folder."""
    try:
        yield
    except DataError as error:
        if str(error).startswith("images:"):
            raise DataError(f"{error} Images that lie elsewhere: FILE,DIR for the SOURCE.") from error
        raise


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    from vitkit.apps.datasets.contents import summarize
    from vitkit.apps.datasets.merging import merge_datasets
    from vitkit.data.formats import FORMATS, read_annotations
    from vitkit.tools.data.annotations import check_out, image_folder, print_left_out, write_annotations

    with errors_in_one_line():
        check_out(args.out, overwrite=args.overwrite)
        wrong = [entry for entry in args.map if "=" not in entry]
        if wrong:
            raise ConfigError(f"--map {wrong[0]}: expected CLASS=NAME.")
        datasets = []
        for source in args.sources:
            annotations, _, images = source.partition(",")
            with explain_missing_images():
                data = read_annotations(annotations, images or None)
            print(f"{annotations}: {FORMATS[data.format].text}: {summarize(data)}")
            for note in data.notes:
                print(f"  note: {note}")
            print_left_out(data.left_out, "left out")
            datasets.append(data)
        classes = {name: new for name, _, new in (entry.partition("=") for entry in args.map)}
        with image_folder(args.out, args.to) as folder:
            with explain_missing_images():
                merged = merge_datasets(datasets, classes, folder)
            print_left_out(merged.left_out, "left out")
            write_annotations(merged, args.to, args.out)


if __name__ == "__main__":
    main()
