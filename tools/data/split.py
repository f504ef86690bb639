"""Split a dataset into training, validation and test images, stratified by class.

Images that look the same, bursts, and frames of one recording (by names such as RECORDING_000123) stay in one split, as
similar images in two splits would leak. The images are not moved; OUT gets instances_train.json and so on, or, for
label maps of classes, train.txt and so on for `names=` of SemanticFolder.

Examples:
    vitkit data split own.json --images photos --val 0.2 --test 0.1 --out annotations
    vitkit data split own.json --images photos --test 40 --out annotations
    vitkit data split labels/train --images images/train --from semantic_maps --val "0006R0_*" --out names
    vitkit data split cells/data.yaml --val 0.2 --seed 1 --to yolo --out cells_split
"""

from __future__ import annotations

import argparse
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from vitkit.errors import DataError
from vitkit.text_format import pluralize
from vitkit.tools.common import errors_in_one_line
from vitkit.tools.data.options import SOURCE_HELP, add_out, add_source

if TYPE_CHECKING:
    from vitkit.data.formats import AnnotatedImages


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
    add_source(parser, with_split=False)
    for name in ("val", "test"):
        text = f"the {name} split: a fraction of the images, their number, or patterns of file names"
        parser.add_argument(f"--{name}", nargs="+", default=[], metavar="PART", help=text)
    text = "random seed of the split (default: 0)"
    parser.add_argument("--seed", type=int, default=0, metavar="S", help=text)
    add_out(parser)
    args = parser.parse_args(argv)
    if not args.val and not args.test:
        parser.error("give --val or --test")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    from vitkit.apps.datasets.splitting import split_dataset
    from vitkit.data.formats import detect_format
    from vitkit.data.formats.label_images import read_semantic_maps
    from vitkit.tools.data.annotations import check_out, print_left_out, read_source, write_annotations

    with errors_in_one_line():
        check_out(args.out, overwrite=args.overwrite)
        sizes, patterns = {}, {}
        for name, parts in (("val", args.val), ("test", args.test)):
            if len(parts) == 1 and (size := as_size(parts[0])) is not None:
                sizes[name] = size
            elif parts:
                patterns[name] = parts
        source = Path(args.source)
        is_semantic = (args.format or detect_format(source, args.images)) == "semantic_maps"
        if is_semantic:
            data = read_semantic_maps(source, args.images, regions=False)
            num_maps, num_classes = (
                pluralize(len(data.images), "label maps"),
                pluralize(len(data.categories), "classes"),
            )
            print(f"{source}: {num_maps} of {num_classes}")
            print_left_out(data.left_out, "left out")
        else:
            data = read_source(source, args.images, format=args.format)
        notes, left_out = len(data.notes), {reason: len(names) for reason, names in data.left_out.items()}
        split_dataset(data, sizes, patterns=patterns, seed=args.seed)
        for note in data.notes[notes:]:
            print(f"  note: {note}")
        print_left_out(
            {k: v[left_out.get(k, 0) :] for k, v in data.left_out.items() if v[left_out.get(k, 0) :]}, "left out"
        )
        print_splits(data, "images" if is_semantic else "objects")
        if is_semantic:
            write_names(data, args.out)
        else:
            write_annotations(data, args.to, args.out)


def print_splits(data: AnnotatedImages, noun: str) -> None:
    """Print for each split the number of images, and of objects of each class."""
    from vitkit.apps.datasets.contents import count_classes

    counts = {split: count_classes(data.split(split)) for split in data.splits}
    width = max((len(category["name"]) for category in data.categories), default=0)
    print(f"  {'':<{width}}" + "".join(f"{split:>10}" for split in counts))
    print(f"  {'images':<{width}}" + "".join(f"{len(ids):>10}" for ids in data.splits.values()))
    print(f"  {noun} of each class:")
    for category in data.categories:
        print(f"  {category['name']:<{width}}" + "".join(f"{of[category['name']]:>10}" for of in counts.values()))


def write_names(data: AnnotatedImages, out: Path) -> None:
    """Write the names of each split's images, without extensions."""
    from vitkit.io.output import write_text

    for split in data.splits:
        names = [PurePosixPath(image["file_name"]).with_suffix("").as_posix() for image in data.split(split).images]
        path = out / f"{split}.txt"
        write_text(path, "".join(f"{name}\n" for name in names))
        print(f"wrote {path}: for data.{split}.names={path}")


def as_size(text: str) -> float | int | None:
    """Return a fraction between 0 and 1, or a number of images; None for a pattern."""
    try:
        number = float(text)
    except ValueError:
        return None
    if 0 < number < 1:
        return number
    if not text.isdecimal() or int(text) == 0:
        raise DataError(f"--val and --test: got {text}; expected a fraction between 0 and 1, or a number of images.")
    return int(text)


if __name__ == "__main__":
    main()
