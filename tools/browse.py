"""Show a config's data as the model will see it: augmented images with their boxes, masks and names.

OUT/figure_1.png, …    figures of several images
OUT/index.html         a page with all of them in a single file; it can be filtered by class

Images are chosen at random unless --ids names them, and each is augmented --views times with different seeds, as in
epoch --epoch. Training images that are mixed in a batch (mixup, cutmix) are shown mixed.

Examples:
    vitkit browse configs/quickstart/detr.py
    vitkit browse configs/detr_r50.py data.root=data/coco --max-images 24 --views 3 --original --out look
    vitkit browse configs/camvid/per_pixel.py --split val --ids train/0001TP_006690
    vitkit browse configs/detr_r50.py data.root=data/coco --class "hair drier"
    vitkit browse my_config.py --epoch 70    (transforms that change between epochs)
"""

import argparse

from vitkit.text_format import pluralize
from vitkit.tools.common import (
    MODEL_HELP,
    a_path,
    add_overwrite,
    add_trust,
    errors_in_one_line,
    positive,
    split_weights,
)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("overrides", nargs="*", default=[], help="key.sub=value, such as data.root=data/coco")
    text = "split to show (default: train)"
    parser.add_argument("--split", choices=("train", "val", "test"), default="train", help=text)
    text = "number of images (default: 16)"
    parser.add_argument("--max-images", type=positive, default=16, metavar="N", help=text)
    text = "augmentations of each image (default: 1)"
    parser.add_argument("--views", type=positive, default=1, metavar="N", help=text)
    text = "epoch of the augmentation, from 0 (default: 0)"
    parser.add_argument("--epoch", type=int, default=0, metavar="N", help=text)
    parser.add_argument("--original", action="store_true", help="also show each image as it is stored")
    text = "ids of the images to show (default: a random choice)"
    parser.add_argument("--ids", nargs="+", metavar="ID", default=[], help=text)
    text = "show only images with this class after augmentation"
    parser.add_argument("--class", dest="with_class", metavar="NAME", help=text)
    text = "random seed of the choice and the augmentation (default: 0)"
    parser.add_argument("--seed", type=int, default=0, metavar="S", help=text)
    text = "folder to write (default: runs/browse, or runs/browse-2 if that exists)"
    parser.add_argument("--out", type=a_path, help=text)
    add_overwrite(parser)
    add_trust(parser)
    args = parser.parse_intermixed_args(argv)
    _, args.overrides = split_weights(args.overrides)  # the data need no weights
    if args.out is not None and args.out.suffix.lower() in (".html", ".htm"):
        parser.error(f"--out {args.out}: expected a folder, in which the page is index.html")
    if min(args.seed, args.epoch) < 0:
        parser.error("--seed and --epoch are at least 0")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    from vitkit.apps.starter.browsing import browse
    from vitkit.logging import setup_logging
    from vitkit.tools.data.annotations import check_out

    with errors_in_one_line():
        setup_logging()
        if args.out is not None:
            check_out(args.out, overwrite=args.overwrite)
        browsed = browse(
            args.model,
            args.out,
            overrides=args.overrides,
            split=args.split,
            max_images=args.max_images,
            views=args.views,
            epoch=args.epoch,
            original=args.original,
            ids=args.ids,
            with_class=args.with_class,
            seed=args.seed,
            trust=args.trust,
        )
        num_figures, num_images = (pluralize(browsed.num_figures, "figures"), pluralize(browsed.num_images, "images"))
        print(f"wrote {browsed.page} and {num_figures} of {num_images}")


if __name__ == "__main__":
    main()
