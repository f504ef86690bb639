"""Look at a config's data as the model will see it: augmented images with their boxes, masks and names.

OUT/sheet_1.png, …     sheets of pictures
OUT/index.html         one page with all of them, which needs no other file; it can show the images of one class

Images are drawn at random unless --images names them, and each augmented --views times, every time by other random
numbers. The images of a classifier that mixes whole batches (mixup, cutmix) are shown mixed.

Examples:
    python tools/browse.py configs/quickstart/detr.py
    python tools/browse.py configs/detr_r50.py data.root=data/coco --count 24 --views 3 --original --out look
    python tools/browse.py configs/camvid/per_pixel.py --split val --images train/0001TP_006690
    python tools/browse.py configs/detr_r50.py data.root=data/coco --class "hair drier"
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitkit import build_dataset, load_config
from vitkit.data.collate import collate
from vitkit.data.loader import DataSettings
from vitkit.engine.settings import require
from vitkit.errors import ConfigError, DataError, VitkitError, error_line
from vitkit.logging import setup_logging
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD
from vitkit.registry import nearest
from vitkit.structures import Sample
from vitkit.visualization.canvas import save_grid
from vitkit.visualization.pages import Card, write_page
from vitkit.visualization.samples import classes_of, describe, draw_sample

PER_LINE, PER_SHEET = 4, 16
MOST_TRIES = 5000
"""Images looked at for one with a class."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a config file")
    parser.add_argument("overrides", nargs="*", help="key.sub=value, such as data.root=data/coco")
    parser.add_argument("--split", choices=("train", "val"), default="train", help="which of the data (train)")
    parser.add_argument("--count", type=int, default=16, metavar="N", help="images (16)")
    parser.add_argument("--views", type=int, default=1, metavar="N", help="augmentations of each (1)")
    parser.add_argument("--original", action="store_true", help="also each image as it is stored")
    parser.add_argument("--images", nargs="+", metavar="ID", help="these images, by their ids")
    parser.add_argument("--class", dest="with_class", metavar="NAME", help="only images in which this class is left")
    parser.add_argument("--seed", type=int, default=0, help="of the choice and the augmentation (0)")
    parser.add_argument("--out", type=Path, default=Path("runs/browse"), help="folder to write (runs/browse)")
    args = parser.parse_intermixed_args(argv)
    if min(args.count, args.views) < 1 or args.seed < 0:
        parser.error("--count and --views are at least 1, --seed at least 0")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        setup_logging()
        run(args)
    except VitkitError as error:
        sys.exit(error_line(error))


def run(args: argparse.Namespace) -> None:
    """Chooses images, draws them as they are loaded, and writes sheets and page."""
    config = load_config(args.config, args.overrides)
    require(config, f"data.{args.split}")
    data = DataSettings(**config["data"])
    dataset = build_dataset(getattr(data, args.split), data.root, where=f"data.{args.split}")
    if not hasattr(dataset, "load_image"):
        raise ConfigError(f"data.{args.split}: {type(dataset).__name__} has no images to look at.")
    names = list(getattr(dataset, "classes", ()))
    if args.with_class is not None and args.with_class not in names:
        raise ConfigError(f"--class {args.with_class}: no class of the data. {nearest(args.with_class, names)}")
    torch.manual_seed(args.seed)
    # Around the regions of a map boxes would say nothing.
    with_boxes = hasattr(dataset, "ground_truth") and getattr(dataset, "task", "instance") == "instance"

    cards: list[Card] = []
    for index in choose(dataset, names, args):
        image_id = getattr(dataset, "image_ids", range(len(dataset)))[index]
        if args.original:
            cards.append(Card(f"{image_id}, as stored", np.ascontiguousarray(dataset.load_image(index))))
        seeds = [seed_of(args.seed, view, index) for view in range(args.views)]
        views = mixed(dataset, index, seeds, args.split) or [dataset[(index, seed)] for seed in seeds]
        cards += [card_of(sample, image_id, names, with_boxes=with_boxes) for sample in views]
    per_line = args.views + args.original if args.views + args.original > 1 else PER_LINE
    per_sheet = max(1, PER_SHEET // per_line) * per_line
    for number, start in enumerate(range(0, len(cards), per_sheet), start=1):
        some = cards[start : start + per_sheet]
        save_grid(
            [card.picture for card in some], [f"{card.title}  {card.text}" for card in some],
            args.out / f"sheet_{number}.png", per_line=per_line,
        )  # fmt: skip
    title = f"{args.config}: data.{args.split}, {len(dataset)} images, seed {args.seed}"
    write_page(cards, args.out / "index.html", title=title)
    print(f"wrote {args.out / 'index.html'} and {number} sheets of {len(cards)} pictures")


def choose(dataset: Any, names: Sequence[str], args: argparse.Namespace) -> list[int]:
    """Positions of the images to draw.

    Raises:
        DataError: an image that was asked for does not exist, or no image has the class.
    """
    if args.images:
        ids = [str(image_id) for image_id in getattr(dataset, "image_ids", range(len(dataset)))]
        position = {image_id: index for index, image_id in enumerate(ids)}
        unknown = [image_id for image_id in args.images if image_id not in position]
        if unknown:
            raise DataError(f"--images {unknown[0]}: no such image in data.{args.split}. {nearest(unknown[0], ids)}")
        return [position[image_id] for image_id in args.images]
    order = np.random.default_rng(args.seed).permutation(len(dataset)).tolist()
    if args.with_class is None:
        return order[: args.count]
    found = []
    for index in order[:MOST_TRIES]:
        if classes_of(dataset[(index, seed_of(args.seed, 0, index))]["target"], names)[args.with_class]:
            found.append(index)
            if len(found) == args.count:
                break
    if not found:
        tried = min(len(order), MOST_TRIES)
        raise DataError(f"--class {args.with_class}: it is in none of the {tried} images looked at.")
    return found


def seed_of(*numbers: int) -> int:
    """Of a sample's transforms."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def mixed(dataset: Any, index: int, seeds: Sequence[int], split: str) -> list[Sample] | None:
    """Views of a classified image after what is done to whole batches; None where nothing is."""
    transform = getattr(dataset, "batch_transforms", None)
    if transform is None or split == "val":
        return None
    views = []
    for view, seed in enumerate(seeds, start=1):
        partner = (index + view) % len(dataset)
        batch = transform(collate([dataset[(k, seed)] for k in (index, partner)]))
        mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
        image = ((batch.inputs["images"][0] * deviation + mean) * 255).round().clamp(0, 255).byte()
        views.append(Sample(image=image, target=batch.targets[0]))
    return views


def card_of(sample: Sample, image_id: Any, names: Sequence[str], *, with_boxes: bool) -> Card:
    height, width = sample["image"].shape[-2:]
    target = sample["target"]
    return Card(
        title=f"{image_id}  {width}x{height}",
        picture=draw_sample(sample, names, with_boxes=with_boxes),
        text=describe(target, names),
        classes=list(classes_of(target, names)),
    )


if __name__ == "__main__":
    main()
