"""Write the synthetic world to disk in COCO's folder layout: boxes, masks, captions, panoptic and semantic maps.

OUT/train2017/*.png                          images
OUT/annotations/instances_train2017.json     boxes, masks as RLE
OUT/annotations/captions_train2017.json      one caption per image
OUT/annotations/panoptic_train2017.json      segments, with maps in panoptic_train2017/*.png (id = R + 256 G + 65536 B)
OUT/annotations/semantic_train2017/*.png     class index per pixel; the classes are those of panoptic_train2017.json
and the same for val2017; OUT/shapes.json has the settings with which the data was made.

Example:
    vitkit data make-shapes --num-train 1000 --num-val 200 --image-size 128 --out data/shapes
"""

import argparse
from collections.abc import Sequence

from vitkit.tools.common import a_path, add_overwrite, errors_in_one_line, positive


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=a_path, required=True, help="folder to write")
    for split, default in (("train", 1000), ("val", 200)):
        text = f"number of images for {'training' if split == 'train' else 'validation'} (default: {default})"
        parser.add_argument(f"--num-{split}", type=positive, default=default, metavar="N", help=text)
    text = "height and width in pixels (default: 128)"
    parser.add_argument("--image-size", type=int, default=128, metavar="PIXELS", help=text)
    text = "draw heights and widths at random from --image-size to this"
    parser.add_argument("--max-image-size", type=int, metavar="PIXELS", help=text)
    for limit, default in (("min", 1), ("max", 4)):
        text = f"{limit}imum number of shapes per image (default: {default})"
        parser.add_argument(f"--{limit}-objects", type=int, default=default, metavar="N", help=text)
    for limit, default in (("min", 0.15), ("max", 0.45)):
        text = f"{limit}imum diameter of a shape, as a fraction of the image's shorter side (default: {default})"
        parser.add_argument(f"--{limit}-size", type=float, default=default, metavar="F", help=text)
    text = "random seed; another seed gives other images (default: 0)"
    parser.add_argument("--seed", type=int, default=0, metavar="S", help=text)
    text = "format of the images (default: png)"
    parser.add_argument("--image-format", choices=("jpg", "png"), default="png", help=text)
    add_overwrite(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    from vitkit.apps.datasets.synthetic import write_shapes

    with errors_in_one_line(OSError):
        write_shapes(**vars(args))
        print(f"wrote {args.out}; configs that read COCO's layout, such as detr_r50, take it as data.root={args.out}")


if __name__ == "__main__":
    main()
