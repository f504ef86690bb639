"""The config's `data` section: the datasets and the settings of loading them."""

import os
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from vitkit.data.datasets.base import BaseImageDataset
from vitkit.data.loading.batch_augmentation import BatchAugmentation, CopyBlend, Mixup, Squares
from vitkit.data.loading.image_weights import Sampler, image_weights
from vitkit.data.loading.loader import Batches, BatchLoader, StartMethod
from vitkit.data.loading.samplers import EvalBatches, TokenBatches, TrainBatches
from vitkit.data.loading.splits import FRACTION_KEYS, Split, build_dataset, choose_fraction, match_record, names_without
from vitkit.data.text.datasets import TextDataset
from vitkit.data.transforms.annotated_image import MixesImages
from vitkit.distributed import rank as current_rank
from vitkit.distributed import world_size as current_world_size
from vitkit.errors import ConfigError
from vitkit.io.image_files import MAX_PIXELS
from vitkit.protocols.dataset import Dataset
from vitkit.registry import DATASETS, SECTIONS, Spec, nearest, parameters_of, require_base
from vitkit.text.class_prompts import PromptOptions, Prompts

_MAX_AUTO_WORKERS = 16


@SECTIONS.register(name="data")
@dataclass
class DataSettings:
    """The config's `data` section."""

    train: Spec | None = None
    """The training dataset; `{root}` in its strings stands for `root`. With `fraction` in the spec of a dataset of
    images or text, only that fraction of the images or lines is trained on: the same ones in every run, and a smaller
    fraction is always a subset of a larger one. A text's vocabulary is made from these lines only. With
    `fraction_seed`, another choice for each seed, which keeps the proportions of the classes, see `choose_fraction`."""
    val: Spec | None = None
    """The dataset evaluated on during training; the same rules apply."""
    test: Spec | None = None
    """A dataset that training never sees, and that chooses nothing, for vitkit test --split test; likewise. It has
    the transforms of `val` unless it sets its own."""
    root: str = "data"
    """Folder that contains the data; or the folder or address (https://, s3://, gs://) of a pack, see vitkit.io.packs,
    whose images are read where they are."""
    classes: Sequence[str] | None = None
    """Names of the classes to use, in this order, of all that the data have: objects, files and pixels of others are
    left out. None: all classes of `train`."""
    images_per_gpu: int = 2
    """Number of images in a batch; a process trains on several batches per step if `train.accumulate` or
    `train.images_per_step` says so."""
    val_images_per_gpu: int = 1
    """1: no image is padded, so results depend neither on which images share a batch nor on the number of ranks."""
    num_workers: int | Literal["auto"] = 2
    """Number of loading processes per rank; 0 loads in the training process; "auto": one for each core that this
    machine has for the rank, but one, up to 16."""
    tokens_per_gpu: int | None = None
    """For text, instead of both numbers of images: maximum number of tokens per batch and side, padding included."""
    aspect_ratio_grouping: bool = True
    """Portrait and landscape images do not share a training batch, which saves padding."""
    pin_memory: bool | None = None
    """Copy batches to page-locked memory, from which a GPU copies faster; None: only if there is a GPU."""
    on_error: Literal["raise", "skip"] = "raise"
    """What to do in training if a file cannot be used: raise an error, or log it and use another image, drawn by the
    sample's seed. In evaluation it is always an error: metrics over fewer images would not be comparable."""
    sampler: Sampler | None = None
    """How often images occur in an epoch: "repeat_factor" repeats those of rare classes, "class_aware" makes all
    classes occur equally often (see vitkit.data.loading.image_weights); None: every image once."""
    repeat_threshold: float = 0.001
    """For "repeat_factor": the fraction of images below which a class is rare."""
    repeated_augmentation: int = 1
    """How often each image of a training batch is in it, with other random transforms (Hoffer et al. 2019,
    https://arxiv.org/abs/1901.09335); DeiT has 3. An epoch keeps its number of batches, so its images are fewer."""
    squares: Mapping[str, Any] | Squares | None = None
    """Squash the images of each training batch to a square of one size: a dict with the `sizes` to draw from, and for
    the last epochs `until_epoch` and `final_size` (see vitkit.data.loading.batch_augmentation). None: images keep the
    sizes of their transforms, and are padded."""
    mixup: Mapping[str, Any] | Mixup | None = None
    """Mix the squares of training batches in pairs: a dict with `probability`, `share`, `from_epoch`, `until_epoch`."""
    copy_blend: Mapping[str, Any] | CopyBlend | None = None
    """Blend objects of the batch into the squares of training batches that are not mixed: a dict with `probability`,
    `num_objects`, `min_area`, `share`, `margin`, `from_epoch`, `until_epoch`."""
    max_image_pixels: int = MAX_PIXELS
    """Largest width x height of an image file; larger ones, perhaps built to exhaust the memory, are not decoded."""
    channels: int | None = None
    """Number of channels of the images, which are then read as they are stored, of 8 or 16 bits (see
    vitkit.io.channel_files); model.backbone.in_channels is the same number. None: RGB of 8 bits, whatever the
    files have."""
    start_workers: StartMethod | None = None
    """How worker processes are started; None: the system's default."""
    prompts: PromptOptions | None = None
    """Prompts for a text-prompted detector, made of the classes of any dataset with boxes, or of the phrases that its
    samples have: a dict with `negatives`, `max_tokens` and `phrases` (see vitkit.text.class_prompts). None: without."""
    cache_features: str | None = None
    """For captioners with a frozen backbone, and for feature distillation: a folder for the features of all images,
    of the backbone or the teacher, which are computed before training starts unless they are there. A captioner reads
    them in place of the images. Transforms must not be random. None: they are computed from the images in every
    step."""

    def __post_init__(self) -> None:
        if self.num_workers == "auto":
            self.num_workers = _workers_per_rank()
        counts = ("images_per_gpu", "val_images_per_gpu", "num_workers", "max_image_pixels", "repeated_augmentation")
        for name in (*counts, "channels", "tokens_per_gpu"):
            minimum = 0 if name == "num_workers" else 1
            if getattr(self, name) is not None and getattr(self, name) < minimum:
                raise ConfigError(f"data.{name}: got {getattr(self, name)}; expected at least {minimum}.")
        if not 0 < self.repeat_threshold <= 1:
            raise ConfigError(f"data.repeat_threshold: got {self.repeat_threshold}; expected above 0, at most 1.")
        for name in ("sampler", "repeated_augmentation", "squares", "prompts"):
            if self.tokens_per_gpu is not None and getattr(self, name) not in (None, 1):
                raise ConfigError(f"data.{name}: is for images only; leave it out with data.tokens_per_gpu.")
        BatchAugmentation(self.squares, self.mixup, self.copy_blend)  # checks the options
        Prompts(**(self.prompts or {}))  # likewise

    def dataset(self, split: Split) -> Dataset:
        """Build the dataset of a split; raises like `build_dataset`, or ConfigError if its `fraction` is impossible."""
        spec, key = self._spec(split), f"data.{split}"
        fraction, seed = (spec.get(name) if isinstance(spec, Mapping) else None for name in FRACTION_KEYS)
        if fraction is not None and (split != "train" or not 0 < fraction <= 1):
            raise ConfigError(f"{key}.fraction: got {fraction}; expected above 0, at most 1, and only in data.train.")
        if seed is not None and (fraction is None or seed < 0):
            raise ConfigError(f"{key}.fraction_seed: got {seed}; expected at least 0, and {key}.fraction beside it.")
        dataset = self._build(spec, key)
        if fraction is not None:
            if isinstance(dataset, BaseImageDataset):
                dataset.chosen_indices = choose_fraction(len(dataset), fraction, seed, dataset.image_classes())
            elif isinstance(dataset, TextDataset):
                dataset.choose(choose_fraction(len(dataset.sides[0]), fraction, seed))
            else:
                raise ConfigError(
                    f"{key}.fraction: only images, videos and text have one, not {type(dataset).__name__}."
                )
        if split != "train" and isinstance(dataset, BaseImageDataset) and dataset.transforms_by_epoch is not None:
            raise ConfigError(
                f"{key}.transforms: TransformsByEpoch is for training; results of all epochs are compared. Use it only "
                "in data.train; use EvalResize here."
            )
        if split != "train" and isinstance(dataset, BaseImageDataset) and isinstance(dataset.transforms, MixesImages):
            raise ConfigError(
                f"{key}.transforms: {type(dataset.transforms).__name__} combines images, while results are compared "
                "with the annotations of single ones. Use it only in data.train; use EvalResize here."
            )
        return dataset

    def evaluation_dataset(self, split: Split = "val", trained: Mapping[str, Any] | None = None) -> Dataset:
        """Build the dataset of a split for evaluation: training data also gets the transforms of validation.

        Args:
            trained: a checkpoint, of whose `classes` the dataset may lack some: then it takes them, with their ids.
        Raises:
            ConfigError: there is no such dataset; also like `build_dataset`.
        """
        key = f"data.{split}"
        if getattr(self, split) is None:
            remedy = "Set it, such as data.test=… with the values of data.val and other annotations."
            raise ConfigError(f"{key}: the config has none. {remedy}")
        spec = self._spec(split)
        if split == "train" and isinstance(spec, Mapping):
            spec = {name: value for name, value in spec.items() if name not in (*FRACTION_KEYS, "transforms")}
            spec = self._with_transforms_of_val(spec, key)
        dataset = self._build(spec, key)
        match_record(dataset, trained or {})
        return dataset

    def _spec(self, split: Split) -> Spec | None:
        """Return the spec of a split's dataset, with the transforms that it has if it sets none."""
        spec = getattr(self, split)
        return self._with_transforms_of_val(spec, "data.test") if split == "test" and spec is not None else spec

    def _with_transforms_of_val(self, spec: Spec, key: str) -> Spec:
        """Return a dataset's spec with the transforms of `val`, unless it sets its own or its class takes none."""
        transforms = self.val.get("transforms") if isinstance(self.val, Mapping) else None
        constructor, arguments = DATASETS.resolve(spec, key)
        if transforms is None or "transforms" in arguments or "transforms" not in parameters_of(constructor):
            return spec
        return {**({"type": spec} if isinstance(spec, str) else spec), "transforms": transforms}

    def _build(self, spec: Spec, key: str) -> Dataset:
        """Build a dataset with the chosen classes."""
        dataset = build_dataset(
            spec, self.root, key=key, max_image_pixels=self.max_image_pixels, channels=self.channels
        )
        if self.prompts is not None:
            if dataset.collate is not None:
                raise ConfigError(
                    f"data.prompts: {key} is a {type(dataset).__name__}, which has no images with boxes. Leave it out."
                )
            dataset.prompts, dataset.has_vocabularies = Prompts(**self.prompts), True
        if self.classes is not None:
            names = dataset.classes or ()
            unknown = names_without(self.classes, names)
            if not self.classes or len({*self.classes}) < len(self.classes):
                raise ConfigError(f"data.classes: got {list(self.classes)}; expected different names, at least one.")
            if unknown and (key == "data.train" or len(unknown) == len(self.classes)):
                raise ConfigError(f"data.classes: {key} has no class {unknown[0]!r}. {nearest(unknown[0], names)}")
            dataset.use_classes(self.classes)
        return dataset

    @property
    def batch_size_per_gpu(self) -> int:
        """Number of images, or of text tokens, in a training batch."""
        return self.tokens_per_gpu or self.images_per_gpu

    def train_loader(
        self, dataset: Dataset, seed: int, *, batches_per_step: int = 1, device: torch.device | None = None
    ) -> BatchLoader:
        """Return shuffled training batches for this rank; `seed` is the run's, the same on all ranks.

        Args:
            batches_per_step: of images, on each rank, see `TrainBatches`.
            device: see `BatchLoader`.
        Raises:
            ConfigError: the dataset has no classes to sample by, no tokens to count, or not `Dataset` as a base.
            DataError: a sentence does not fit into a batch.
        """
        require_base("dataset", type(dataset), Dataset)
        ranks = {"rank": current_rank(), "world_size": current_world_size()}
        if self.tokens_per_gpu is not None:
            batches = self._token_batches(dataset, training=True, seed=seed, **ranks)
            return self.loader(dataset, batches, training=True, device=device)
        weights = groups = None
        if self.sampler is not None:
            weights = image_weights(dataset, self.sampler, repeat_threshold=self.repeat_threshold)
        if (sample_weights := dataset.sample_weights()) is not None:
            weights = sample_weights * (1.0 if weights is None else weights)
        indices = dataset.training_indices()
        if len(indices) < len(dataset):
            weights = np.bincount(indices, minlength=len(dataset)) * (1.0 if weights is None else weights)
        if self.aspect_ratio_grouping and (aspect_ratios := dataset.aspect_ratios()) is not None:
            groups = (aspect_ratios >= 1).astype(np.int64)
        blocks = dataset.image_blocks() if isinstance(dataset, BaseImageDataset) else None
        images = {"groups": groups, "weights": weights, "blocks": blocks, "repeats": self.repeated_augmentation}
        steps = {"seed": seed, "batches_per_step": batches_per_step, **ranks}
        augment = None
        if self.squares is not None:
            augment = BatchAugmentation(self.squares, self.mixup, self.copy_blend, **steps)
        batches = TrainBatches(len(dataset), batch_size=self.images_per_gpu, **images, **steps)
        return self.loader(dataset, batches, training=True, augment=augment, device=device)

    def val_loader(self, dataset: Dataset, *, done: Set[int] = frozenset()) -> BatchLoader:
        """Return batches that cover every validation image exactly once over all ranks; raises like `train_loader`.

        Args:
            done: the indices of images to leave out, unless their batch has others.
        """
        require_base("dataset", type(dataset), Dataset)
        ranks = {"rank": current_rank(), "world_size": current_world_size()}
        if self.tokens_per_gpu is not None:
            batches = self._token_batches(dataset, training=False, **ranks)
        else:
            batches = EvalBatches(len(dataset), batch_size=self.val_images_per_gpu, **ranks)
        if done:  # a batch of which a sample is left is loaded as a whole, so that its padding is the same
            batches = [batch for batch in batches if not done.issuperset(index for index, _ in batch)]
        return self.loader(dataset, batches, training=False)

    def loader(self, dataset: Dataset, batches: Batches, *, training: bool, **options: Any) -> BatchLoader:
        """Return these batches, loaded as the settings say; arguments are those of `BatchLoader`."""
        return BatchLoader(
            dataset,
            batches,
            training=training,
            **options,
            num_workers=self.num_workers,
            start_workers=self.start_workers,
            pin_memory=self.pin_memory,
            skip_errors=training and self.on_error == "skip",
        )

    def _token_batches(self, dataset: Dataset, **options: Any) -> TokenBatches:
        lengths = dataset.lengths()
        if lengths is None:
            raise ConfigError(
                f"data.tokens_per_gpu: {type(dataset).__name__} has no text to count tokens of. Set "
                "data.images_per_gpu."
            )
        return TokenBatches(lengths, batch_tokens=self.tokens_per_gpu, **options)


def _workers_per_rank() -> int:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of this machine
    return min(max(1, cores // ranks - 1), _MAX_AUTO_WORKERS)
