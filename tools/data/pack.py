"""Pack a folder of data into tar files that are read where they are: on a disk, a web server or an object store.

DATASET is what data.root names. OUT gets tar files with its images, an index of them, and a tar file with the
annotations and all other files. Copy OUT to where it is to be read from, and train with data.root=ADDRESS, such as
https://example.org/coco, s3://bucket/coco or /mnt/coco. Readers of tar files such as webdataset find KEY.jpg and, for
images of --labels, KEY.json.

Examples:
    vitkit data pack data/coco coco_packed
    vitkit data pack data/coco coco_packed --labels data/coco/annotations/instances_val2017.json data/coco/val2017
    vitkit train configs/detr_r50.py data.root=s3://bucket/coco_packed
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vitkit.tools.common import a_path, add_overwrite, errors_in_one_line

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=a_path, metavar="DATASET", help="the folder of the data")
    parser.add_argument("out", type=a_path, metavar="OUT", help="the folder to write")
    text = "size of a tar file in bytes, or with K, M or G: 512M (default: 1G); one larger image has its own"
    parser.add_argument("--shard-size", type=_num_bytes, default="1G", metavar="BYTES", help=text)
    text = "write what FILE, of any format that vitkit data convert reads, says of each image in DIR beside the image"
    parser.add_argument(
        "--labels", nargs=2, type=a_path, action="append", default=[], metavar=("FILE", "DIR"), help=text
    )
    add_overwrite(parser)
    return parser.parse_args(argv)


def _num_bytes(text: str) -> int:
    parts = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    if parts is None or not int(parts[1]):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of bytes, such as 512M or 1G")
    return int(parts[1]) * _UNITS[parts[2].upper()]


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    from vitkit.apps.datasets.packing import write_pack
    from vitkit.text_format import pluralize

    with errors_in_one_line():
        labels = labels_of(args.labels, args.dataset)
        packed = write_pack(
            args.dataset, args.out, shard_bytes=args.shard_size, labels=labels, overwrite=args.overwrite
        )
        print(
            f"wrote {args.out}: {pluralize(packed.num_images, 'images')} in {pluralize(packed.num_shards, 'shards')} "
            f"({packed.num_bytes / 1e9:.2f} GB), {pluralize(packed.num_files, 'other files')}; train on it with "
            f"data.root={args.out}, or where it is copied to"
        )


def labels_of(pairs: Iterable[tuple[Path, Path]], dataset: Path) -> dict[str, Any]:
    """Return the entry of each image in annotation files and its objects, by the image's path in the dataset."""
    from vitkit.data.formats import read_annotations
    from vitkit.errors import DataError

    labels: dict[str, Any] = {}
    for file, folder in pairs:
        data = read_annotations(file, folder, check_sizes=False, measure_all=False)
        class_names = {category["id"]: category["name"] for category in data.categories}
        entries = {image["id"]: {**image, "annotations": []} for image in data.images}
        for annotation in data.annotations:
            category = {"category": class_names[annotation["category_id"]]}
            entries[annotation["image_id"]]["annotations"].append({**annotation, **category})
        if not data.folder.resolve().is_relative_to(dataset.resolve()):
            raise DataError(
                f"--labels {file}: its images are in '{data.folder}', which is not in '{dataset}'. Give a folder of it."
            )
        inside = data.folder.resolve().relative_to(dataset.resolve())
        labels |= {(inside / entry["file_name"]).as_posix(): entry for entry in entries.values()}
    return labels


if __name__ == "__main__":
    main()
