"""Loads a dataset as batches: settings, worker processes and how their failures are handled."""

import logging
import multiprocessing
import multiprocessing.queues
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader

from vitkit.data.datasets.base import BaseImageDataset
from vitkit.data.loading.batch_augmentation import BatchAugmentation, CopyBlendOptions, MixupOptions, SquareOptions
from vitkit.data.loading.image_weights import Sampler, image_weights
from vitkit.data.loading.samplers import EvalBatches, RemainingBatches, SeededIndex, TokenBatches, TrainBatches
from vitkit.data.text.datasets import TextDataset
from vitkit.data.text.prompts import PromptOptions, Prompts, PromptStep, collate_prompted
from vitkit.data.transforms.annotated_image import MixesImages
from vitkit.distributed import rank as current_rank
from vitkit.distributed import world_size as current_world_size
from vitkit.errors import ConfigError, DataError, VitkitError
from vitkit.io.folders import one_form
from vitkit.io.image_files import MAX_PIXELS
from vitkit.io.packs import mount
from vitkit.protocols import Dataset, require_base
from vitkit.registry import DATASETS, SECTIONS, Spec, nearest, parameters_of
from vitkit.structures import Batch, Sample
from vitkit.text_format import pluralize

logger = logging.getLogger("vitkit")
_MAX_LOGGED = 20
_MAX_ATTEMPTS = 10
_MAX_AUTO_WORKERS = 16
CHOICE = ("fraction", "fraction_seed")
"""Keys of any dataset's spec that choose what is trained on."""
Split = Literal["train", "val", "test"]
StartMethod = Literal["fork", "spawn", "forkserver"]


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
    squares: SquareOptions | None = None
    """Squash the images of each training batch to a square of one size: a dict with the `sizes` to draw from, and for
    the last epochs `until_epoch` and `final_size` (see vitkit.data.loading.batch_augmentation). None: images keep the
    sizes of their transforms, and are padded."""
    mixup: MixupOptions | None = None
    """Mix the squares of training batches in pairs: a dict with `probability`, `share`, `from_epoch`, `until_epoch`."""
    copy_blend: CopyBlendOptions | None = None
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
    samples have: a dict with `negatives`, `max_tokens` and `phrases` (see vitkit.data.text.prompts). None: without."""
    cache_features: str | None = None
    """For captioners with a frozen backbone, and for feature distillation: a folder for the features of all images,
    of the backbone or the teacher, which are computed before training starts unless they are there. A captioner reads
    them in place of the images. Transforms must not be random. None: they are computed from the images in every
    step."""

    def __post_init__(self) -> None:
        if self.num_workers == "auto":
            self.num_workers = _workers_per_rank()
        minima = {"images_per_gpu": 1, "val_images_per_gpu": 1, "num_workers": 0, "max_image_pixels": 1}
        minima["repeated_augmentation"] = 1
        if self.channels is not None:
            minima["channels"] = 1
        for name, minimum in minima.items():
            if getattr(self, name) < minimum:
                raise ConfigError(f"data.{name}: got {getattr(self, name)}; expected at least {minimum}.")
        if not 0 < self.repeat_threshold <= 1:
            raise ConfigError(f"data.repeat_threshold: got {self.repeat_threshold}; expected above 0, at most 1.")
        if self.sampler is not None and self.tokens_per_gpu is not None:
            raise ConfigError("data.sampler: only images have one; leave it out with data.tokens_per_gpu.")
        if self.repeated_augmentation > 1 and self.tokens_per_gpu is not None:
            raise ConfigError("data.repeated_augmentation: only images have it; leave it out with data.tokens_per_gpu.")
        if self.tokens_per_gpu is not None and self.tokens_per_gpu < 1:
            raise ConfigError(f"data.tokens_per_gpu: got {self.tokens_per_gpu}; expected at least 1.")
        if self.tokens_per_gpu is not None and self.squares is not None:
            raise ConfigError("data.squares: only images have them; leave them out with data.tokens_per_gpu.")
        if self.tokens_per_gpu is not None and self.prompts is not None:
            raise ConfigError("data.prompts: only images have them; leave them out with data.tokens_per_gpu.")
        BatchAugmentation(self.squares, self.mixup, self.copy_blend)  # checks the options
        Prompts(**(self.prompts or {}))  # likewise

    def evaluated(self, split: Split = "val", trained: Mapping[str, Any] | None = None) -> Dataset:
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
            spec = {name: value for name, value in spec.items() if name not in (*CHOICE, "transforms")}
            spec = self._with_transforms_of_val(spec, key)
        dataset = self._build(spec, key)
        classes = (trained or {}).get("classes")
        if classes and dataset.classes and _lacks_some(dataset.classes, classes):
            dataset.use_classes(classes, trained.get("category_ids"))
        return dataset

    def _build(self, spec: Spec, key: str) -> Dataset:
        """Build a dataset with the chosen classes."""
        dataset = build_dataset(
            spec, self.root, key=key, max_image_pixels=self.max_image_pixels, channels=self.channels
        )
        if self.prompts is not None:
            if not isinstance(dataset, Dataset) or dataset.collate is not None:
                raise ConfigError(
                    f"data.prompts: {key} is a {type(dataset).__name__}, which has no images with boxes. Leave it out."
                )
            dataset.prompts, dataset.has_vocabularies = Prompts(**self.prompts), True
        if self.classes is not None:
            known = {one_form(name) for name in dataset.classes or ()}
            unknown = [name for name in self.classes if one_form(name) not in known]
            if not self.classes or len({*self.classes}) < len(self.classes):
                raise ConfigError(f"data.classes: got {list(self.classes)}; expected different names, at least one.")
            if unknown and (key == "data.train" or len(unknown) == len(self.classes)):
                raise ConfigError(f"data.classes: {key} has no class {unknown[0]!r}. {nearest(unknown[0], known)}")
            dataset.use_classes(self.classes)
        return dataset

    def dataset(self, split: Split) -> Dataset:
        """Build the dataset of a split; raises like `build_dataset`, or ConfigError if its `fraction` is impossible."""
        spec, key = self._spec(split), f"data.{split}"
        fraction, seed = (spec.get(name) if isinstance(spec, Mapping) else None for name in CHOICE)
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

    @property
    def batch_size_per_gpu(self) -> int:
        """Number of images, or of text tokens, in a training batch."""
        return self.tokens_per_gpu or self.images_per_gpu

    def train_loader(self, dataset: Dataset, seed: int, *, batches_per_step: int = 1) -> "BatchLoader":
        """Return shuffled training batches for this rank; `seed` is the run's, the same on all ranks.

        Args:
            batches_per_step: of images, on each rank, see `TrainBatches`.
        Raises:
            ConfigError: the dataset has no classes to sample by, no tokens to count, or not `Dataset` as a base.
            DataError: a sentence does not fit into a batch.
        """
        require_base("dataset", type(dataset), Dataset)
        ranks = {"rank": current_rank(), "world_size": current_world_size()}
        if self.tokens_per_gpu is not None:
            lengths = self._lengths(dataset)
            batches = TokenBatches(lengths, batch_tokens=self.tokens_per_gpu, training=True, seed=seed, **ranks)
            return BatchLoader(dataset, batches, self, training=True)
        weights = groups = None
        if self.sampler is not None:
            weights = image_weights(dataset, self.sampler, repeat_threshold=self.repeat_threshold)
        if (own := dataset.sample_weights()) is not None:
            weights = own * (1.0 if weights is None else weights)
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
        return BatchLoader(dataset, batches, self, training=True, augment=augment)

    def val_loader(self, dataset: Dataset, *, done: Set[int] = frozenset()) -> "BatchLoader":
        """Return batches that cover every validation image exactly once over all ranks; raises like `train_loader`.

        Args:
            done: the indices of images to leave out, unless their batch has others.
        """
        require_base("dataset", type(dataset), Dataset)
        ranks = {"rank": current_rank(), "world_size": current_world_size()}
        if self.tokens_per_gpu is not None:
            lengths = self._lengths(dataset)
            batches = TokenBatches(lengths, batch_tokens=self.tokens_per_gpu, training=False, **ranks)
        else:
            batches = EvalBatches(len(dataset), batch_size=self.val_images_per_gpu, **ranks)
        return BatchLoader(dataset, RemainingBatches(batches, done) if done else batches, self, training=False)

    def _lengths(self, dataset: Dataset) -> np.ndarray:
        lengths = dataset.lengths()
        if lengths is None:
            raise ConfigError(
                f"data.tokens_per_gpu: {type(dataset).__name__} has no text to count tokens of. Set "
                "data.images_per_gpu."
            )
        return lengths


def build_dataset(
    spec: Spec,
    root: str = "data",
    *,
    key: str = "data",
    max_image_pixels: int | None = None,
    channels: int | None = None,
) -> Dataset:
    """Build a dataset.

    Args:
        spec: spec of a registered dataset. Its `fraction` and `fraction_seed`, if any, are for `DataSettings.dataset`.
        root: replaces `{root}` in the spec's strings; if it is a pack, the folder that stands for it does.
        key: the spec's config key ("data.train"), for error messages.
        max_image_pixels: see `DataSettings`; None: its default.
        channels: see `DataSettings`.
    """
    try:
        if isinstance(spec, Mapping):
            # A spec without {root} does not need what it stands for.
            spec = _with_root(spec, mount(root) if "{root}" in str(spec) else root)
            spec = {name: value for name, value in spec.items() if name not in CHOICE}
        dataset = DATASETS.build(spec)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
    if max_image_pixels is not None:
        dataset.max_image_pixels = max_image_pixels
    if channels is not None:
        if not isinstance(dataset, BaseImageDataset) or dataset.is_video:
            raise ConfigError(f"data.channels={channels}: {type(dataset).__name__} has no image files. Leave it out.")
        dataset.channels = channels
    return dataset


def _with_root(value: Any, root: str) -> Any:
    """Return a value of a spec with `root` in place of `{root}`, also in the specs within it."""
    if isinstance(value, str):
        return value.replace("{root}", root)
    if isinstance(value, Mapping):
        return {name: _with_root(inner, root) for name, inner in value.items()}
    return [_with_root(inner, root) for inner in value] if isinstance(value, list | tuple) else value


def _workers_per_rank() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of this machine
    return min(max(1, cores // ranks - 1), _MAX_AUTO_WORKERS)


def choose_fraction(
    count: int, fraction: float, seed: int | None = None, image_classes: tuple[np.ndarray, np.ndarray] | None = None
) -> np.ndarray:
    """Choose a fraction of so many images or lines, at least one: their indices, ascending.

    With one seed, a smaller fraction is a subset of a larger one.

    Args:
        seed: of the choice; with one, it is stratified: of the images that show the same set of classes, about the same
            fraction is chosen. None: always the same choice, which is not stratified.
        image_classes: of the images, see `Dataset`; None: they are not stratified.
    """
    size = max(1, round(fraction * count))
    if seed is None:
        return np.sort(np.random.default_rng(0).permutation(count)[:size])
    classes_of = [[] for _ in range(count)]
    for image, label in zip(*(column.tolist() for column in image_classes or ())):
        classes_of[image].append(label)
    strata: dict[tuple[int, ...], list[int]] = {}
    for image, labels in enumerate(classes_of):
        strata.setdefault(tuple(sorted(labels)), []).append(image)
    random, ranks = np.random.default_rng(seed), np.empty(count)
    for members in strata.values():
        # Evenly spaced in 0..1, so that any beginning of the order has the strata in proportion.
        ranks[random.permutation(members)] = (np.arange(len(members)) + random.random()) / len(members)
    return np.sort(np.argsort(ranks, kind="stable")[:size])


class BatchLoader:
    """Batches of a dataset, loaded in worker processes. Iterating yields one epoch.

    Args:
        dataset: `dataset[(index, seed)]` returns a sample; if it has a `collate` of its own, that joins the samples.
        batches: indices and seeds of the samples of each batch.
        settings: workers, memory and what to do with unusable files.
        training: keep the workers between epochs, tell the dataset the epoch, and replace samples if
            `settings.on_error` is "skip".
        augment: augments the samples of a batch together; None: it does not.
    """

    def __init__(
        self,
        dataset: Any,
        batches: TrainBatches | EvalBatches | TokenBatches | RemainingBatches,
        settings: DataSettings,
        *,
        training: bool,
        augment: BatchAugmentation | None = None,
    ):
        self.dataset = dataset
        self.batches = batches
        self.num_skipped = 0
        """Number of this rank's samples that were replaced because their files cannot be used."""
        self.num_padded = 0
        """Number of this rank's videos, in this epoch so far, that were padded because they are shorter than a clip."""
        self._named: dict[str, set[str]] = {"skipped": set(), "padded": set()}
        has_workers = settings.num_workers > 0
        prompt = None if getattr(dataset, "prompts", None) is None else PromptStep(dataset, training=training)
        self._loader = DataLoader(
            _BatchedDataset(
                dataset, skip_errors=training and settings.on_error == "skip", augment=augment, prompt=prompt
            ),
            batch_sampler=_Requests(batches, with_epochs=training),
            collate_fn=_identity,
            num_workers=settings.num_workers,
            pin_memory=torch.accelerator.is_available() if settings.pin_memory is None else settings.pin_memory,
            persistent_workers=training and has_workers,
            worker_init_fn=_start_worker,
            multiprocessing_context=settings.start_workers if has_workers else None,
            # A separate generator: a number per epoch drawn from the global one would make a resumed run, which starts
            # one more iteration, differ from the interrupted run.
            generator=torch.Generator().manual_seed(0),
        )

    def __len__(self) -> int:
        """Return the number of batches in a full epoch."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        """Load the batches of the epoch.

        Raises:
            DataError: an image of the batch is missing or invalid.
        """
        self.num_padded = 0
        for loaded in self._loader:
            if isinstance(loaded, VitkitError):
                raise loaded
            batch, errors = loaded
            self.num_skipped += len(errors)
            for error in errors:
                # Logged as an error: ranks other than the main one print nothing less severe, and each rank sees
                # different files.
                self._name_once(
                    "skipped", logging.ERROR, f"{error} Another sample takes its place (data.on_error=skip)."
                )
            # The views of a video share one target.
            padded = {str(target["image_id"]) for target in batch.targets if target.get("is_padded")}
            self.num_padded += len(padded)
            for name in sorted(padded):
                self._name_once(
                    "padded", logging.WARNING, f"video '{name}' is shorter than a clip: its last frame is repeated."
                )
            yield batch

    def _name_once(self, kind: str, level: int, message: str) -> None:
        """Log a message about a file, unless it or many of its kind were logged before."""
        named = self._named[kind]
        if len(named) < _MAX_LOGGED and message not in named:
            named.add(message)
            more = " Later ones are only counted." if len(named) == _MAX_LOGGED else ""
            logger.log(level, "%s%s", message, more)

    def set_position(self, epoch: int, batch: int = 0) -> None:
        """Choose the epoch of the next iteration, and how many of its batches to skip without loading them."""
        self.batches.set_position(epoch, batch)


class _Request(NamedTuple):
    """What a worker is asked to load: the samples of one batch."""

    samples: list[SeededIndex]
    epoch: int | None
    """None: the batch is for evaluation."""
    number: int
    """Number of the batch in its epoch."""


class _Requests:
    """The batches as requests; workers that stay between epochs learn the epoch from them."""

    def __init__(self, batches: TrainBatches | EvalBatches | TokenBatches | RemainingBatches, *, with_epochs: bool):
        self.batches = batches
        self.with_epochs = with_epochs

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[_Request]:
        epoch, first = (self.batches.epoch, self.batches.first_batch) if self.with_epochs else (None, 0)
        for number, samples in enumerate(self.batches, start=first):
            yield _Request(samples, epoch, number)


class _BatchedDataset:
    """Loads, augments and collates a complete batch in the worker."""

    def __init__(
        self, dataset: Any, *, skip_errors: bool, augment: BatchAugmentation | None, prompt: PromptStep | None
    ):
        self.dataset = dataset
        self.skip_errors = skip_errors
        self.augment = augment
        self.prompt = prompt

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, request: _Request) -> tuple[Batch, list[str]] | VitkitError:
        """Return a batch with the messages of skipped samples, or the error if a sample cannot be loaded."""
        errors: list[str] = []
        if request.epoch is not None:
            self.dataset.set_epoch(request.epoch)
        if self.augment is not None:
            self.dataset.square = self.augment.side(request.epoch, request.number)
        try:
            samples = [self._sample(index, errors) for index in request.samples]
            if self.augment is not None:
                samples = self.augment(samples, request.epoch, request.number)
            if self.prompt is not None:
                return collate_prompted(self.prompt, samples, [seed for _, seed in request.samples]), errors
        except VitkitError as error:
            # If it were raised in a worker, the user would only see it as text within a traceback.
            return error
        return (self.dataset.collate or Batch.collate)(samples), errors

    def _sample(self, index: SeededIndex, errors: list[str]) -> Sample:
        """Load a sample; if its file is to be skipped, append the error and load another one, drawn by its seed."""
        for attempt in range(_MAX_ATTEMPTS):
            try:
                sample = self.dataset[index]
                if self.prompt is not None:
                    self.prompt.check(sample)
                return sample
            except DataError as error:
                if not self.skip_errors:
                    raise
                errors.append(str(error))
            random = np.random.default_rng([index[1], attempt])
            indices = self.dataset.training_indices()
            index = int(indices[random.integers(len(indices))]), int(random.integers(2**63))
        raise DataError(f"{_MAX_ATTEMPTS} images in a row cannot be used. The last one: {errors[-1]}")


def _identity(batch: Any) -> Any:
    return batch


def _start_worker(worker: int) -> None:
    # Workers share the cores with each other and the training process; PyTorch limits its own threads itself.
    cv2.setNumThreads(0)
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_exit_without_passing_on)
    sys.excepthook = _print_unless_disconnected
    # Ctrl-C and schedulers signal every process of a run; without its workers it could not finish its step and save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # Linux
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_on_signal_of_trainer, daemon=True).start()
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the training process's handler, which a fork inherits
    # After the signal is blocked, since threads inherit that.
    threading.Thread(target=_exit_with_trainer, daemon=True).start()


def _exit_without_passing_on(error: Exception, _: Any) -> None:
    # Python would print the error and drop the batch, for which the trainer would then wait forever.
    print(f"a batch cannot be passed on by its loading process: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _print_unless_disconnected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # A trainer that ends, as on SIGTERM, may leave a worker that is just passing it a batch.
    if not issubclass(kind, ConnectionError):
        sys.__excepthook__(kind, error, trace)


def _exit_with_trainer() -> None:
    # PyTorch's workers end with their parent, but with "forkserver" that is a process which outlives a killed trainer.
    multiprocessing.parent_process().join()
    os._exit(1)


def _exit_on_signal_of_trainer() -> None:
    trainer = multiprocessing.parent_process().pid  # not os.getppid(): "forkserver" puts a process in between
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(0)


def lost_worker(error: BaseException) -> bool:
    """Return whether an error means that a loading process was killed; PyTorch may raise it anywhere."""
    reasons = ("killed by signal", "exited unexpectedly")
    text = str(error)
    return isinstance(error, RuntimeError) and "DataLoader worker" in text and any(r in text for r in reasons)


def _lacks_some(classes: Sequence[str], others: Sequence[str]) -> bool:
    """Whether classes are in another order than others, or lack some of them, but have none that these lack."""
    names, other_names = ({one_form(name) for name in part} for part in (classes, others))
    return list(classes) != list(others) and names <= other_names and len(names) == len(classes)


def match_classes(train: Dataset, val: Dataset) -> None:
    """Let val have the classes of train, under the same ids, by name: it may lack some, or number them otherwise.

    With prompts it may also have others, which are then found by their phrases.

    Raises:
        DataError: val has a class that train lacks.
        ConfigError: `data.prompts.phrases` has a class that neither has.
    """
    if train.prompts is not None:
        train.prompts.check_names(train, val)
    if train.classes is None or val.classes is None:
        return
    same_ids = train.category_ids is None or list(train.category_ids) == list(val.category_ids or ())
    if _lacks_some(val.classes, train.classes) or (list(val.classes) == list(train.classes) and not same_ids):
        lacking = [name for name in train.classes if name not in val.classes]
        if lacking:
            logger.info("data.val has nothing of %s: %s", pluralize(len(lacking), "classes"), ", ".join(lacking)[:200])
        if type(val).use_classes is not Dataset.use_classes:
            val.use_classes(train.classes, train.category_ids)
    if train.prompts is None:
        check_same_classes(train, val)
    elif new := [name for name in val.classes if name not in train.classes]:
        logger.info("data.val has %s that data.train has not: %s", pluralize(len(new), "classes"), ", ".join(new)[:200])


def check_same_classes(train: Dataset, val: Dataset) -> None:
    """Raise a DataError unless two datasets have the same classes, under the same ids where both have ids."""
    have_ids = train.category_ids is not None and val.category_ids is not None
    train_names, val_names = (
        dict(zip(dataset.category_ids, dataset.classes) if have_ids else enumerate(dataset.classes))
        for dataset in (train, val)
    )
    if train_names != val_names:
        ids = sorted(i for i in train_names.keys() | val_names.keys() if train_names.get(i) != val_names.get(i))
        raise DataError(
            f"data.train has {pluralize(len(train_names), 'classes')} and data.val has {len(val_names)}; "
            f"they differ at id {ids[0]}: {train_names.get(ids[0])!r} and {val_names.get(ids[0])!r}. data.val "
            "may lack classes of data.train, but not have others: add images of them to data.train, or name the "
            "classes to use, data.classes=[…]."
        )
