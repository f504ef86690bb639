"""Draws a config's data as the model will see it."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from vitkit.apps.inference import find_model
from vitkit.apps.inference.writing import make_new_folder
from vitkit.apps.starter.gallery import Card, write_gallery
from vitkit.apps.starter.samples import classes_of, describe, draw_sample
from vitkit.apps.visualization.canvas import save_grid
from vitkit.config import value_at
from vitkit.data.loading.batch_augmentation import BatchAugmentation
from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import Split
from vitkit.engine.settings import require
from vitkit.errors import ConfigError, DataError
from vitkit.io.channel_files import as_rgb
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD, per_channel
from vitkit.protocols.dataset import Dataset
from vitkit.registry import nearest
from vitkit.structures import Batch, KeypointInfo, Sample
from vitkit.text_format import pluralize

IMAGES_PER_LINE, IMAGES_PER_FIGURE = 4, 16
MAX_SEARCHED = 5000
"""The maximum number of images that are searched for a class."""


class Browsed(NamedTuple):
    """The results of `browse`."""

    page: Path
    num_figures: int
    num_images: int
    """Number of drawn images: each view of an image counts, and the image as it is stored."""


def browse(
    model: str | Path,
    out: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    split: Split = "train",
    max_images: int = 16,
    views: int = 1,
    epoch: int = 0,
    original: bool = False,
    ids: Sequence[str] = (),
    with_class: str | None = None,
    seed: int = 0,
    trust: bool = False,
) -> Browsed:
    """Draw images of a config's data as the model will see them, with their annotations: figures and an HTML page.

    Args:
        model: a config or what else has one, see `find_model`.
        out: the folder to write: figure_1.png, …, index.html; None: a new one, runs/browse, with a number if that
            exists.
        overrides: `key.sub=value` changes to the config.
        split: "train", "val" or "test".
        max_images: the number of images, chosen at random.
        views: the number of augmentations of each image.
        epoch: the epoch whose augmentation is drawn, from 0.
        original: whether each image is also drawn as it is stored.
        ids: the images to draw instead of a random choice.
        with_class: draw only images with this class after augmentation; None: any.
        seed: random seed of the choice and the augmentation.
        trust: let a saved config import the code that it names, see `load_config`.
    Raises:
        ConfigError: the config cannot be loaded, its data has no images, or there is no such class.
        DataError: there is no such image, or none has the class.
    """
    config = find_model(str(model), overrides=overrides, trust=trust).config
    require(config, f"data.{split}")
    data = DataSettings(**config["data"])
    dataset = data.dataset(split)
    if not dataset.has_images:
        raise ConfigError(f"data.{split}: {type(dataset).__name__} has no images to draw.")
    names = list(dataset.classes or ())
    if with_class is not None and with_class not in names:
        raise ConfigError(f"--class {with_class}: the data has no such class. {nearest(with_class, names)}")
    torch.manual_seed(seed)
    if num_epochs := value_at(config, "train.epochs", None):
        dataset.set_num_epochs(num_epochs)
    dataset.set_epoch(epoch)
    augment = None
    if split == "train" and data.squares is not None:
        augment = BatchAugmentation(data.squares, data.mixup, data.copy_blend, seed=seed)
    # Boxes around the segments of a panoptic or semantic map would only hide it.
    with_boxes = "objects" in dataset.annotations and dataset.task in (None, "instance")

    cards: list[Card] = []
    chosen = choose(dataset, names, split=split, max_images=max_images, ids=ids, with_class=with_class, seed=seed)
    for index in chosen:
        image_id = dataset.image_ids[index]
        if original:
            cards.append(Card(f"{image_id}, as stored", as_rgb(dataset.load_image(index))))
        seeds = [seed_of(seed, view, index) for view in range(views)]
        transform = dataset.batch_transforms
        if transform is not None and split == "train":
            samples = mix_views(dataset, transform, index, seeds)
        elif augment is not None:
            samples = [draw_augmented(dataset, augment, epoch, index, each) for each in seeds]
        else:
            samples = [dataset[(index, each)] for each in seeds]
        shown = {"with_boxes": with_boxes, "keypoints": dataset.keypoints}
        cards += [draw_card(sample, image_id, names, **shown) for sample in samples]
    out = make_new_folder(Path("runs/browse")) if out is None else Path(out)
    num_figures = save_figures(cards, out, views + original if views + original > 1 else IMAGES_PER_LINE)
    title = f"{model}: data.{split}, {pluralize(len(dataset), 'images')}, seed {seed}"
    write_gallery(cards, out / "index.html", title=title)
    return Browsed(out / "index.html", num_figures, len(cards))


def save_figures(cards: Sequence[Card], out: Path, images_per_line: int) -> int:
    """Draw cards as OUT/figure_1.png and so on; return the number of figures."""
    images_per_figure = max(1, IMAGES_PER_FIGURE // images_per_line) * images_per_line
    for number, start in enumerate(range(0, len(cards), images_per_figure), start=1):
        panels = cards[start : start + images_per_figure]
        texts = [f"{card.title}  {card.text}" for card in panels]
        path = out / f"figure_{number}.png"
        save_grid([card.image for card in panels], texts, path, per_line=images_per_line)
    return number


def choose(
    dataset: Dataset,
    names: Sequence[str],
    *,
    split: str,
    max_images: int,
    ids: Sequence[str],
    with_class: str | None,
    seed: int,
) -> list[int]:
    """Choose the images to draw, as indices into the dataset.

    Raises:
        DataError: a requested image does not exist, or no image has the class.
    """
    if ids:
        index_of = {str(image_id): index for index, image_id in enumerate(dataset.image_ids)}
        unknown = [image_id for image_id in ids if image_id not in index_of]
        if unknown:
            hint = nearest(unknown[0], list(index_of))
            raise DataError(f"--ids {unknown[0]}: no such image in data.{split}. {hint}")
        return [index_of[image_id] for image_id in ids]
    order = np.random.default_rng(seed).permutation(len(dataset)).tolist()
    if with_class is None:
        return order[:max_images]
    has_class = (
        index
        for index in order[:MAX_SEARCHED]
        if classes_of(dataset[(index, seed_of(seed, 0, index))]["target"], names)[with_class]
    )
    indices = list(itertools.islice(has_class, max_images))
    if not indices:
        num_searched = min(len(order), MAX_SEARCHED)
        raise DataError(f"--class {with_class}: none of the first {pluralize(num_searched, 'images')} has it.")
    return indices


def seed_of(*numbers: int) -> int:
    """Return the seed of a sample's transforms."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def mix_views(dataset: Dataset, transform: Callable[[Batch], Batch], index: int, seeds: Sequence[int]) -> list[Sample]:
    """Return views of a classifier's image after the batch transforms, each mixed with another image."""
    views = []
    for view, seed in enumerate(seeds, start=1):
        partner = (index + view) % len(dataset)
        batch = transform(Batch.collate([dataset[(k, seed)] for k in (index, partner)]))
        images = batch.inputs["images"]
        images = images * per_channel(IMAGENET_STD, images) + per_channel(IMAGENET_MEAN, images)
        image = (images[0] * 255).round().clamp(0, 255).byte()
        views.append(Sample(image=image, target=batch.targets[0]))
    return views


def draw_augmented(dataset: Dataset, augment: BatchAugmentation, epoch: int, index: int, seed: int) -> Sample:
    """Return a training image as in a batch of an epoch, after the image that it may be mixed with."""
    dataset.square = augment.side(epoch, seed)
    before = dataset[((index + 1) % len(dataset), seed)]
    return augment([before, dataset[(index, seed)]], epoch, seed)[1]


def draw_card(
    sample: Sample, image_id: Any, names: Sequence[str], *, with_boxes: bool, keypoints: KeypointInfo | None
) -> Card:
    """Draw a sample with its annotations."""
    height, width = sample["image"].shape[-2:]
    target = sample["target"]
    return Card(
        title=f"{image_id}  {width}x{height}",
        image=draw_sample(sample, names, with_boxes=with_boxes, keypoints=keypoints),
        text=describe(target, names),
        classes=list(classes_of(target, names)),
    )
