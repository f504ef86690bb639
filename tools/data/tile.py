"""Cut large images and their annotations into tiles for training, so that objects keep their size in pixels.

Tiles are spread evenly over each image and written into OUT/images, as JPEG of quality 95, or as PNG if the image is
one. `vitkit predict --tiles SIZE` predicts on the full images.

Examples:
    python tools/tile.py roofs.json --images aerial --size 800 --out tiles
    python tools/tile.py aerial/data.yaml --size 640 --overlap 128 --min-visible 0.5 --to yolo --out tiles
"""

import argparse
from pathlib import Path

from vitkit.data.formats.merging import tile_dataset
from vitkit.inference import Tiling
from vitkit.tools.annotations import (
    add_out,
    add_source,
    check_out,
    image_folder,
    print_left_out,
    read_source,
    write_annotations,
)
from vitkit.tools.common import errors_in_one_line


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="annotations: a file or a folder in any format that convert reads")
    add_source(parser)
    parser.add_argument("--size", type=int, required=True, metavar="PIXELS", help="height and width of a tile")
    parser.add_argument(
        "--overlap", type=int, metavar="PIXELS", help="minimum overlap of neighbours (default: a quarter of --size)"
    )
    text = "share of an object that a tile must show to keep it (default: 0.25)"
    parser.add_argument("--min-visible", type=float, default=0.25, metavar="SHARE", help=text)
    text = "also keep tiles without objects from images with objects"
    parser.add_argument("--keep-empty", action="store_true", help=text)
    add_out(parser)
    args = parser.parse_args(argv)
    if not 0 < args.min_visible <= 1:
        parser.error("--min-visible is above 0, at most 1")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with errors_in_one_line():
        run(args)


def run(args: argparse.Namespace) -> None:
    """Read the annotations, cut the images, and write the tiles."""
    check_out(args.out, overwrite=args.overwrite)
    tiling = Tiling(args.size, args.overlap)
    data = read_source(args.source, args)
    with image_folder(args.out, args.to) as folder:
        tiled = tile_dataset(data, tiling.tiles, folder, min_visible=args.min_visible, keep_empty=args.keep_empty)
        print_left_out(tiled.left_out, "left out")
        write_annotations(tiled, args.to, args.out)


if __name__ == "__main__":
    main()
