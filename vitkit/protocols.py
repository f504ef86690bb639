"""What each part must offer: backbones, models, criteria, datasets, loaders and evaluators.

`Backbone`, `Criterion`, `Dataset` and the other protocols without "runtime_checkable" are contracts that every such
part keeps; their docstrings name what a part may have beside them. The runtime-checkable ones are capabilities that
some have and others have not: `isinstance(dataset, HasClasses)` asks for one. Both are structural: a class of a user's
own file needs no base class of vitkit.

Capabilities are methods and plain attributes. Submodules are none, because `isinstance` does not see what `nn.Module`
keeps in tables of its own: see `child`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn

from vitkit.logging import RatioMeter
from vitkit.structures import Batch, FeatureInfo, PanopticMap, Sample, ScoreThresholds, UncompiledTargets


class Backbone(Protocol):
    """Feature maps of images; registered in BACKBONES."""

    feature_info: Mapping[str, FeatureInfo]
    """Channels and stride of each map that `forward` returns, fine to coarse."""

    def __call__(self, images: Tensor) -> Mapping[str, Tensor]:
        """Return the maps, in the order of `feature_info`.

        A backbone of clips takes (B, 3, T, H, W); its maps have an axis of frames, too, before the height.
        A backbone whose `forward` also takes `padding_mask`, (B, H, W) bool with True = padding, keeps padding out of
        an image's maps.

        Args:
            images: (B, 3, H, W) float, normalised; any H and W.
        Returns:
            name -> (B, channels, ceil(H / stride), ceil(W / stride)).
        """


class Neck(Protocol):
    """Maps of a backbone made into those that a head reads; registered in NECKS, built with `feature_info`.

    It may have `in_features`, the names of those maps of the backbone that it reads.
    """

    feature_info: Mapping[str, FeatureInfo]

    def __call__(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> Mapping[str, Tensor]:
        """Return the neck's maps. With `padding_mask` (B, H, W), padding does not reach into an image."""


class Head(Protocol):
    """Predictions from a neck's maps; registered in HEADS, built with `feature_info` and `num_classes`.

    Maps are (B, channels, h, w). With a padding mask, (B, H, W) bool of the images with True = padding, padding is not
    attended to.
    """

    def __call__(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Any]:
        """Return the outputs that the model's criterion and `postprocess` read."""


@runtime_checkable
class UsesTargets(Protocol):
    """A model, or a head, that may have queries in training alone, such as noised targets.

    If `uses_targets`, it is also called with `targets` in training, those of the criterion. Without them it adds none.
    """

    uses_targets: bool


@runtime_checkable
class KeepsFeatures(Protocol):
    """A backbone that can leave out maps which nothing reads."""

    def keep_features(self, names: Iterable[str]) -> None:
        """Return these maps alone from now on, and remove what only the others need."""


@runtime_checkable
class MakesFeatures(Protocol):
    """A backbone of feature maps that takes the weights of a classifier of its kind."""

    optional_weights: Sequence[str]
    """Patterns ("*.rel_pos_h") of the entries that these may lack."""

    def needs_none_of(self, names: Sequence[str]) -> list[str]:
        """Return those of a classifier's entries that feature maps are made without; none for a classifier."""


@runtime_checkable
class HasDilation(Protocol):
    """A backbone whose last stage may keep its resolution and dilate its kernels (DC5), with the same weights."""

    is_dilated: bool


@runtime_checkable
class HasPretrained(Protocol):
    """A backbone or a model that has pretrained weights to start from."""

    def load_pretrained(self) -> str | None:
        """Load them. Return where they came from, or None if the weights stay random."""


@runtime_checkable
class HasPixelStatistics(Protocol):
    """A backbone whose weights expect images of a certain mean and standard deviation."""

    pixel_mean: Sequence[float]
    """Of R, G, B in 0..1."""
    pixel_std: Sequence[float]


@runtime_checkable
class HasBlocks(Protocol):
    """A backbone of another library, whose blocks nothing else tells."""

    def block_names(self) -> list[str]:
        """Return the names of the modules that are its blocks, from the first to the last."""


@runtime_checkable
class SupportsActivationCheckpointing(Protocol):
    """A block that may recompute its activations in the backward pass; it sets the attribute to False at first."""

    activation_checkpointing: bool


@runtime_checkable
class AnnealsMasks(Protocol):
    """A model with masked attention in `num_blocks` blocks, which training takes away bit by bit."""

    num_blocks: int

    def set_mask_probabilities(self, probabilities: Sequence[float]) -> None:
        """Set the share of queries that each of the blocks masks, 0 to 1, first block to last."""


@runtime_checkable
class SamplesWords(Protocol):
    """A model of text whose decoder, in training, may read words that it has itself predicted."""

    def set_sampling(self, part: float) -> None:
        """Set the part of the words that it reads so, 0 to 1."""


class Model(Protocol):
    """What trains: `model(**batch.inputs)` gives outputs for a criterion; registered in MODELS.

    A model that is evaluated is a `DenseModel` or a `GenerativeModel`, unless its evaluator `TakesOutputs`. It may have
        new_parts: prefixes of parts that a checkpoint to start training from may lack altogether,
        variant_of(names): says in words which variant the names of a state dict belong to, where checkpoints of
            variants are easily taken for each other's,
        renames_itself: True if its `adapt_state` knows all names of its weights, so that no official format is looked
            for in them,
        semantic_scores: yields each pixel's score per class; see `MaskClassification`.
    """

    def __call__(self, *args: Tensor, **inputs: Tensor) -> dict[str, Any]:
        """Return the outputs by their field's names."""


@runtime_checkable
class DenseModel(Protocol):
    """A model of images, whose outputs become predictions in one step."""

    def postprocess(self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """Return each image's predictions in pixels of the original image, whose (height, width) are given."""


@runtime_checkable
class HasTasks(Protocol):
    """A model of segmentation."""

    tasks: Sequence[str]
    """Which of "semantic", "instance" and "panoptic" it is set to."""


@runtime_checkable
class HasClassScores(Protocol):
    """A dense model that scores each pixel's classes; `MaskClassification` says more."""

    def semantic_scores(
        self, outputs: Mapping[str, Any], index: int, original: tuple[int, int], *, within: range | None = None
    ) -> Iterator[tuple[range, Tensor]]:
        """Yield rows of an image of the batch, and their scores (C, rows, W)."""


@runtime_checkable
class GenerativeModel(Protocol):
    """A model whose predictions are made step by step, such as text."""

    def generate(self, inputs: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Return the prediction of each sample of `batch.inputs`."""


@runtime_checkable
class AdaptsState(Protocol):
    """A module that can bring a state dict of another form into its own."""

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Change, in place, the entries below `prefix`."""


@runtime_checkable
class HasClassHead(Protocol):
    """A module with parameters whose size follows the classes."""

    class_head: Sequence[str]
    """Prefixes of their names."""


class Criterion(Protocol):
    """Losses of a batch; registered in CRITERIA."""

    def __call__(self, outputs: Mapping[str, Any], targets: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return weighted losses, whose sum is minimised; the same keys for any targets, none included."""


@runtime_checkable
class HasMeters(Protocol):
    """A criterion that measures beside its losses, such as how many classes were right."""

    meters: Mapping[str, RatioMeter]


class Dataset(Protocol):
    """Samples by number; registered in DATASETS.

    It may have
        noun: what its samples are called in the plural, if not "images",
        num_objects: the objects it trains on, counted,
        task: "semantic", "instance" or "panoptic", which it gives its segments as,
        aspect_ratios(): width / height of every image, float64 (len(self),), by which to batch by orientation,
        lengths(): tokens of every sample, by which to batch text,
        image_classes(): which classes each image shows, by which to sample: (M,) int64 positions of images, and labels;
            each pair once,
        collate(samples): joins its samples into a `Batch`, in place of vitkit's `collate`,
        batch_transforms: transforms training batches on the model's device; None if there is nothing to do.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int | tuple[int, int]) -> Sample:
        """Return one sample; for (position, seed) its random transforms follow from the seed alone."""


@runtime_checkable
class HasClasses(Protocol):
    """A dataset with classes, which size a model's head."""

    classes: Sequence[str]
    """Names, in the order of the labels."""


@runtime_checkable
class HasCategoryIds(HasClasses, Protocol):
    """A dataset whose annotations have identifiers of their own for the classes."""

    category_ids: Sequence[int] | Sequence[str]
    """Raw identifier of each class."""


@runtime_checkable
class HasThings(HasClasses, Protocol):
    """A dataset that tells classes with instances from others."""

    things: Sequence[bool]
    """For each class, whether it has instances."""


@runtime_checkable
class ImageDataset(Protocol):
    """A dataset whose pictures can be looked at."""

    def load_image(self, index: int) -> np.ndarray:
        """Return the picture before any transform, (H, W, 3) uint8 RGB."""


@runtime_checkable
class HasImageSizes(Protocol):
    """A dataset that knows how large its images are without loading them."""

    def image_size(self, index: int) -> tuple[int, int]:
        """Return the (height, width) of an image before any transform."""


@runtime_checkable
class HasImageIds(Protocol):
    """A dataset that names its images; targets have the same `image_id`."""

    image_ids: Sequence[Any]


@runtime_checkable
class HasFrames(Protocol):
    """A dataset of videos."""

    def load_frames(self, index: int, count: int) -> list[np.ndarray]:
        """Return frames from the first to the last of a stored video, (H, W, 3) uint8 RGB each."""


@runtime_checkable
class HasGroundTruth(Protocol):
    """A dataset with boxes or masks of objects in COCO's format."""

    def ground_truth(self) -> dict[str, Any]:
        """Return "images", "annotations" and "categories", as pycocotools reads them."""


@runtime_checkable
class HasPanoptic(Protocol):
    """A dataset with panoptic maps."""

    def load_panoptic(self, index: int) -> PanopticMap:
        """Return the segments of one stored image."""


@runtime_checkable
class HasSemantic(Protocol):
    """A dataset with label maps."""

    def load_semantic(self, index: int) -> np.ndarray:
        """Return the class of each pixel of one stored image, (H, W); `IGNORE_INDEX` where there is none."""


@runtime_checkable
class HasReferences(Protocol):
    """A dataset with captions."""

    def references(self, index: int) -> Sequence[str]:
        """Return all captions of one image."""


@runtime_checkable
class HasVocabularies(Protocol):
    """A dataset of text. It also has `target_vocabulary` and, if a model reads text, `source_vocabulary`.

    (These two may be made when they are first asked for, which `isinstance` shall not do.)
    """

    def use_vocabularies_of(self, other: Any) -> None:
        """Encode with the vocabularies of another dataset, such as the training one."""


class Loader(Protocol):
    """Batches of a dataset. Iterating gives one epoch, or what is left of it."""

    num_skipped: int
    """Samples of this rank that were replaced, because their files cannot be used."""
    num_padded: int
    """Videos of this rank, in this epoch so far, that were padded because they are shorter than a clip."""

    def __len__(self) -> int:
        """Return the number of batches in a full epoch."""

    def __iter__(self) -> Iterator[Batch]: ...

    def set_position(self, epoch: int, batch: int = 0) -> None:
        """Choose which epoch the next iteration gives, and how many of its batches to skip."""


class Evaluator(Protocol):
    """What turns predictions into numbers; registered in EVALUATORS, built with `dataset`."""

    def update(self, predictions: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> None:
        """Add one batch."""

    def gather(self) -> None:
        """Bring all ranks' batches to the main process."""

    def compute(self) -> dict[str, float]:
        """Return the metrics on the main process, an empty dict elsewhere."""

    def table(self) -> str:
        """Return the metrics as people read them; after `compute`."""


@runtime_checkable
class TakesOutputs(Protocol):
    """An evaluator that may ask for each sample's raw outputs in place of predictions."""

    takes_outputs: bool


@runtime_checkable
class NamesPerClassMetric(Protocol):
    """An evaluator whose figure for each class is another than AP."""

    per_class_metric: str

    def per_class(self) -> dict[str, float]:
        """Return class name -> figure; after `compute`."""


@runtime_checkable
class LoadsResults(Protocol):
    """An evaluator that can score predictions which were written before."""

    def write_results(self, path: str | Path) -> list[Path] | None:
        """Write the predictions; return the files, None if it is `path` alone."""

    def load_results(self, path: str | Path) -> None:
        """Take what `write_results` wrote, in place of `update`."""


@runtime_checkable
class HasDetails(Protocol):
    """An evaluator of detections, with figures by class, object size and threshold."""

    def details(self) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        """Return the metrics of each class, and of each object size; after `compute`."""


@runtime_checkable
class FindsThresholds(Protocol):
    """An evaluator that finds from which score on predictions are best shown."""

    def score_thresholds(self) -> ScoreThresholds | None:
        """Return the thresholds; None if there are none, and on other processes; after `compute`."""


@runtime_checkable
class ChecksArguments(Protocol):
    """A registered class that can check a config's arguments before it is built."""

    check_arguments: Callable[..., None]
    """Takes those arguments that it names, raises ConfigError."""


def child(module: nn.Module, name: str) -> nn.Module | None:
    """Return the submodule of that name, None if there is none."""
    return dict(module.named_children()).get(name)


def training_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return what a model is called with in training: the batch's inputs, and its targets if the model uses them."""
    uses_targets = isinstance(model, UsesTargets) and model.uses_targets
    return {**batch.inputs, "targets": UncompiledTargets(batch.targets)} if uses_targets else batch.inputs
