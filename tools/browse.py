"""Show a config's data as the model will see it: augmented images with their boxes, masks and names.

OUT/figure_1.png, …    figures of several images
OUT/index.html         a report with all of them in a single file; it can be filtered by class

Images are chosen at random unless --images names them, and each is augmented --views times with different seeds, as in
epoch --epoch. Training images that are mixed in a batch (mixup, cutmix) are shown mixed.

Examples:
    python tools/browse.py configs/quickstart/detr.py
    python tools/browse.py configs/detr_r50.py data.root=data/coco --count 24 --views 3 --original --out look
    python tools/browse.py configs/camvid/per_pixel.py --split val --images train/0001TP_006690
    python tools/browse.py configs/detr_r50.py data.root=data/coco --class "hair drier"
    python tools/browse.py my_config.py --epoch 70    # transforms that change between epochs
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitkit.data.io.channel_files import as_rgb
from vitkit.data.loading.batch_augmentation import BatchAugmentation
from vitkit.data.loading.collate import collate
from vitkit.data.loading.loader import DataSettings
from vitkit.engine.settings import require
from vitkit.errors import ConfigError, DataError
from vitkit.inference import find_model
from vitkit.logging import setup_logging
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD, per_channel
from vitkit.protocols import Dataset
from vitkit.registry import nearest
from vitkit.structures import Batch, Sample
from vitkit.tools.annotations import check_out
from vitkit.tools.common import MODEL_HELP, add_trust, errors_in_one_line, new_file, split_weights
from vitkit.visualization.canvas import save_grid
from vitkit.visualization.gallery import Card, write_gallery
from vitkit.visualization.samples import classes_of, describe, draw_sample
from vitkit.words import counted

IMAGES_PER_LINE, IMAGES_PER_FIGURE = 4, 16
MAX_SEARCHED = 5000
"""The maximum number of images that are searched for a class."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help=MODEL_HELP)
    parser.add_argument("overrides", nargs="*", help="key.sub=value, such as data.root=data/coco")
    parser.add_argument(
        "--split", choices=("train", "val", "test"), default="train", help="split to show (default: train)"
    )
    parser.add_argument("--count", type=int, default=16, metavar="N", help="number of images (default: 16)")
    parser.add_argument("--views", type=int, default=1, metavar="N", help="augmentations of each image (default: 1)")
    parser.add_argument(
        "--epoch", type=int, default=0, metavar="N", help="epoch of the augmentation, from 0 (default: 0)"
    )
    parser.add_argument("--original", action="store_true", help="also show each image as it is stored")
    parser.add_argument(
        "--images", nargs="+", metavar="ID", help="ids of the images to show (default: a random choice)"
    )
    parser.add_argument(
        "--class", dest="with_class", metavar="NAME", help="show only images with this class after augmentation"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed of the choice and the augmentation (default: 0)"
    )
    parser.add_argument(
        "--out", type=Path, help="folder to write (default: runs/browse, or runs/browse-2 if it exists)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files of the same names in OUT")
    add_trust(parser)
    args = parser.parse_intermixed_args(argv)
    _, args.overrides = split_weights(args.overrides)  # the data need no weights
    if min(args.count, args.views) < 1 or min(args.seed, args.epoch) < 0:
        parser.error("--count and --views are at least 1, --seed and --epoch at least 0")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with errors_in_one_line():
        setup_logging()
        run(args)


def run(args: argparse.Namespace) -> None:
    """Choose images, load and draw them, and write the figures and the report."""
    args.out = args.out or new_file("runs/browse")
    check_out(args.out, overwrite=args.overwrite)
    config = find_model(args.config, overrides=args.overrides, trust=args.trust).config
    require(config, f"data.{args.split}")
    data = DataSettings(**config["data"])
    dataset = data.dataset(args.split)
    if not dataset.has_images:
        raise ConfigError(f"data.{args.split}: {type(dataset).__name__} has no images to look at.")
    names = list(dataset.classes or ())
    if args.with_class is not None and args.with_class not in names:
        raise ConfigError(f"--class {args.with_class}: no class of the data. {nearest(args.with_class, names)}")
    torch.manual_seed(args.seed)
    dataset.set_epoch(args.epoch)
    augment = None
    if args.split == "train" and data.squares is not None:
        augment = BatchAugmentation(data.squares, data.mixup, seed=args.seed)
    # Boxes around the segments of a panoptic or semantic map would only hide it.
    with_boxes = "objects" in dataset.annotations and dataset.task in (None, "instance")
    image_ids = dataset.image_ids

    cards: list[Card] = []
    for index in choose(dataset, image_ids, names, args):
        image_id = image_ids[index]
        if args.original:
            cards.append(Card(f"{image_id}, as stored", as_rgb(dataset.load_image(index))))
        seeds = [seed_of(args.seed, view, index) for view in range(args.views)]
        transform = dataset.batch_transforms
        if transform is not None and args.split == "train":
            views = mixed_views(dataset, transform, index, seeds)
        elif augment is not None:
            views = [augmented(dataset, augment, args.epoch, index, seed) for seed in seeds]
        else:
            views = [dataset[(index, seed)] for seed in seeds]
        cards += [card_of(sample, image_id, names, with_boxes=with_boxes) for sample in views]
    images_per_line = args.views + args.original if args.views + args.original > 1 else IMAGES_PER_LINE
    images_per_figure = max(1, IMAGES_PER_FIGURE // images_per_line) * images_per_line
    for number, start in enumerate(range(0, len(cards), images_per_figure), start=1):
        panels = cards[start : start + images_per_figure]
        save_grid(
            [card.image for card in panels],
            [f"{card.title}  {card.text}" for card in panels],
            args.out / f"figure_{number}.png",
            per_line=images_per_line,
        )
    title = f"{args.config}: data.{args.split}, {counted(len(dataset), 'images')}, seed {args.seed}"
    write_gallery(cards, args.out / "index.html", title=title)
    print(f"wrote {args.out / 'index.html'} and {counted(number, 'figures')} of {counted(len(cards), 'pictures')}")


def choose(dataset: Dataset, image_ids: Sequence[Any], names: Sequence[str], args: argparse.Namespace) -> list[int]:
    """Choose the images to draw, as indices into the dataset.

    Raises:
        DataError: a requested image does not exist, or no image has the class.
    """
    if args.images:
        index_of = {str(image_id): index for index, image_id in enumerate(image_ids)}
        unknown = [image_id for image_id in args.images if image_id not in index_of]
        if unknown:
            hint = nearest(unknown[0], list(index_of))
            raise DataError(f"--images {unknown[0]}: no such image in data.{args.split}. {hint}")
        return [index_of[image_id] for image_id in args.images]
    order = np.random.default_rng(args.seed).permutation(len(dataset)).tolist()
    if args.with_class is None:
        return order[: args.count]
    has_class = (
        index
        for index in order[:MAX_SEARCHED]
        if classes_of(dataset[(index, seed_of(args.seed, 0, index))]["target"], names)[args.with_class]
    )
    indices = list(itertools.islice(has_class, args.count))
    if not indices:
        num_searched = min(len(order), MAX_SEARCHED)
        raise DataError(f"--class {args.with_class}: it is in none of the {counted(num_searched, 'images')} looked at.")
    return indices


def seed_of(*numbers: int) -> int:
    """Return the seed of a sample's transforms."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def mixed_views(
    dataset: Dataset, transform: Callable[[Batch], Batch], index: int, seeds: Sequence[int]
) -> list[Sample]:
    """Return views of a classifier's image after the batch transforms, each mixed with another image."""
    views = []
    for view, seed in enumerate(seeds, start=1):
        partner = (index + view) % len(dataset)
        batch = transform(collate([dataset[(k, seed)] for k in (index, partner)]))
        images = batch.inputs["images"]
        images = images * per_channel(IMAGENET_STD, images) + per_channel(IMAGENET_MEAN, images)
        image = (images[0] * 255).round().clamp(0, 255).byte()
        views.append(Sample(image=image, target=batch.targets[0]))
    return views


def augmented(dataset: Dataset, augment: BatchAugmentation, epoch: int, index: int, seed: int) -> Sample:
    """Return a training image as in a batch of an epoch, after the image that it may be mixed with."""
    before = dataset[((index + 1) % len(dataset), seed)]
    return augment([before, dataset[(index, seed)]], epoch, seed)[1]


def card_of(sample: Sample, image_id: Any, names: Sequence[str], *, with_boxes: bool) -> Card:
    """Draw a sample with its annotations."""
    height, width = sample["image"].shape[-2:]
    target = sample["target"]
    return Card(
        title=f"{image_id}  {width}x{height}",
        image=draw_sample(sample, names, with_boxes=with_boxes),
        text=describe(target, names),
        classes=list(classes_of(target, names)),
    )


if __name__ == "__main__":
    main()
