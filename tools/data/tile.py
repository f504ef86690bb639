"""Cut large images and their annotations into tiles for training, so that objects keep their size in pixels.

Tiles are spread evenly over each image and written into OUT/images, as JPEG of quality 95, or as PNG if the image is
one, or with --channels as .npy. `vitkit predict --tiles SIZE` predicts on the full images.

Examples:
    vitkit data tile roofs.json --images aerial --tiles 800 --out tiles
    vitkit data tile aerial/data.yaml --tiles 640 --tile-overlap 128 --min-visible 0.5 --to yolo --out tiles
    vitkit data tile bands.json --images satellite --channels 8 --tiles 512 --out tiles
"""

import argparse

from vitkit.tools.common import add_tiles, errors_in_one_line, fraction, positive, tiling_of
from vitkit.tools.data.options import SOURCE_HELP, add_out, add_source


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
    add_source(parser)
    add_tiles(parser, "cut images into tiles of SIZE x SIZE pixels", required=True)
    text = "keep an object in a tile that shows at least this fraction of it (default: 0.25)"
    parser.add_argument("--min-visible", type=fraction, default=0.25, metavar="SHARE", help=text)
    text = "also keep tiles without objects from images with objects"
    parser.add_argument("--keep-empty", action="store_true", help=text)
    text = "channels of the images, of 8 or 16 bits, which are kept (default: RGB of 8 bits); only with --to coco"
    parser.add_argument("--channels", type=positive, metavar="N", help=text)
    add_out(parser)
    args = parser.parse_args(argv)
    if args.min_visible == 0:
        parser.error("--min-visible is above 0")
    if args.channels and args.to != "coco":
        parser.error(f"--channels writes .npy files, which --to {args.to} does not have: use --to coco")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    from vitkit.apps.datasets.contents import count_classes
    from vitkit.apps.datasets.merging import tile_dataset
    from vitkit.tools.data.annotations import check_out, image_folder, print_left_out, read_source, write_annotations

    with errors_in_one_line():
        check_out(args.out, overwrite=args.overwrite)
        tiling = tiling_of(args.tiles, args.tile_overlap)
        data = read_source(args.source, args.images, format=args.format, split=args.split)
        with image_folder(args.out, args.to) as folder:
            tiled = tile_dataset(
                data,
                tiling.tiles,
                folder,
                min_visible=args.min_visible,
                keep_empty=args.keep_empty,
                channels=args.channels,
            )
            print_left_out(tiled.left_out, "left out")
            write_annotations(tiled, args.to, args.out, before=count_classes(data))


if __name__ == "__main__":
    main()
