"""What each part must provide: backbones, models, criteria, datasets, loaders and evaluators.

`Backbone`, `Criterion`, `Dataset` and the other protocols without "runtime_checkable" are contracts that every such
part fulfils; their docstrings list the optional attributes. The runtime-checkable protocols are capabilities that only
some parts have: `isinstance(dataset, HasClasses)` checks for one. Both are structural: a class in a user's
own file needs no base class of vitkit.

Capabilities are methods and plain attributes, never submodules: `nn.Module` keeps submodules in tables of its own,
which `isinstance` does not see; see `child`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn

from vitkit.structures import Batch, FeatureInfo, PanopticMap, Sample, ScoreThresholds, UncompiledTargets


class Backbone(Protocol):
    """Feature maps of images; registered in BACKBONES.

    It may have
        pixel_mean, pixel_std: mean and standard deviation of R, G and B that its weights expect, with pixel values in
            0..1; without them, ImageNet's,
        keep_features(names): returns only these maps from now on, and removes the modules that only the others need,
        load_pretrained(): loads its pretrained weights; returns where they came from, or None if they stay random,
        entries_to_leave_out(names): those of a classifier's entries that a backbone of feature maps has no use for, so
            that it can take a classifier's weights,
        optional_weights: patterns ("*.rel_pos_h") of the entries that such weights may lack,
        block_names(): the names of its blocks, first to last, if they are modules of another library,
        is_dilated: whether its last stage keeps its resolution and dilates its kernels (DC5), with the same weights.
    `BackboneBase` has all of these.
    """

    feature_info: Mapping[str, FeatureInfo]
    """Channels and stride of each map that `forward` returns, fine to coarse."""

    def __call__(self, images: Tensor) -> Mapping[str, Tensor]:
        """Return the maps, in the order of `feature_info`.

        A backbone for clips takes (B, 3, T, H, W); its maps also have an axis of frames, before the height.
        A backbone whose `forward` also takes `padding_mask`, (B, H, W) bool with True = padding, keeps padding from
        affecting an image's maps.

        Args:
            images: (B, 3, H, W) float, normalised; any H and W.
        Returns:
            name -> (B, channels, ceil(H / stride), ceil(W / stride)).
        """


class Neck(Protocol):
    """Turns a backbone's maps into those that a head reads; registered in NECKS, built with `feature_info`.

    It may have `in_features`, the names of the backbone's maps that it reads. If its constructor has an argument
    `isolate_padding`, a model sets it to True where padding must not affect the image; the neck must do so otherwise.
    """

    feature_info: Mapping[str, FeatureInfo]

    def __call__(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> Mapping[str, Tensor]:
        """Return the neck's maps; `padding_mask` is (B, H, W) bool at the size of the images, True = padding."""


class Head(Protocol):
    """Predicts from a neck's maps; registered in HEADS, built with `feature_info` and `num_classes`.

    Maps are (B, channels, h, w). With a padding mask, (B, H, W) bool at the size of the images with True = padding, no
    query attends to padding. A head with queries derives from `vitkit.nn.queries.QueryHead`, so that a config can add
    queries in training.
    """

    def __call__(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Any]:
        """Return the outputs that the model's criterion and `postprocess` read."""


class Model(Protocol):
    """A model that can be trained: `model(**batch.inputs)` gives outputs for a criterion; registered in MODELS.

    An evaluated model is a `DenseModel` or a `GenerativeModel`, unless its evaluator `TakesOutputs`. It may have
        new_parts: prefixes of parts that may be missing altogether from a checkpoint to start training from,
        variant_of(names): describes in words which variant the names in a state dict belong to, for models whose
            variants' checkpoints are easily confused,
        uses_targets: True if its `forward` also takes `targets` in training, the same as the criterion's, since it then
            has queries that are made from them,
        renames_itself: True if its `adapt_state` handles all names of its weights, so that they are not matched against
            the official formats,
        load_pretrained(): loads its backbone's pretrained weights, see `Backbone`,
        semantic_scores: yields each pixel's score per class; see `MaskResults`.
    """

    def __call__(self, *args: Tensor, **inputs: Tensor) -> dict[str, Any]:
        """Return the outputs by field name."""


@runtime_checkable
class DenseModel(Protocol):
    """A model of images whose predictions are computed from its outputs in one step."""

    def postprocess(self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """Return each image's predictions in pixels of the original, whose (height, width) is in `image_sizes`."""


@runtime_checkable
class HasTasks(Protocol):
    """A segmentation model."""

    tasks: Sequence[str]
    """The tasks that the model is configured for, out of "semantic", "instance" and "panoptic"."""


@runtime_checkable
class HasClassScores(Protocol):
    """A dense model that scores each pixel's classes; see `MaskResults`."""

    def semantic_scores(
        self, outputs: Mapping[str, Any], index: int, original: tuple[int, int], *, within: range | None = None
    ) -> Iterator[tuple[range, Tensor]]:
        """Yield ranges of rows of the batch's image `index`, each with its scores (C, rows, W)."""


@runtime_checkable
class GenerativeModel(Protocol):
    """A model that makes its predictions step by step, such as text."""

    def generate(self, inputs: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Return the prediction of each sample of `batch.inputs`."""


@runtime_checkable
class AdaptsState(Protocol):
    """A module that can convert a state dict of another form to its own."""

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Convert the entries whose names start with `prefix`, in place."""


@runtime_checkable
class HasClassHead(Protocol):
    """A module with parameters whose size depends on the number of classes."""

    class_head: Sequence[str]
    """Prefixes of the names of those parameters."""


class Criterion(Protocol):
    """Computes the losses of a batch; registered in CRITERIA.

    It may have `meters`, name -> `RatioMeter`: other quantities that it measures, such as the share of correct classes.
    """

    def __call__(self, outputs: Mapping[str, Any], targets: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return weighted losses, whose sum is minimised; the same keys whatever the targets, even without any."""


class Dataset(Protocol):
    """Samples by index; registered in DATASETS.

    It may have
        noun: what its samples are called in the plural, if not "images",
        num_objects: the number of objects that it trains on,
        task: "semantic", "instance" or "panoptic", the kind of segments in its samples,
        aspect_ratios(): width / height of every image, float64 (len(self),), for batching by orientation,
        lengths(): number of tokens of every sample, for batching text,
        image_classes(): the classes that each image shows, for sampling: (M,) int64 indices of images, and labels;
            each pair once,
        collate(samples): joins its samples into a `Batch`, in place of vitkit's `collate`,
        batch_transforms: transforms training batches on the model's device; None if there are none.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int | tuple[int, int]) -> Sample:
        """Return one sample; for (index, seed) its random transforms depend on the seed alone."""


@runtime_checkable
class HasClasses(Protocol):
    """A dataset with classes, whose number sets the size of a model's head."""

    classes: Sequence[str]
    """Names of the classes, in the order of the labels."""


@runtime_checkable
class HasCategoryIds(HasClasses, Protocol):
    """A dataset whose annotations identify classes by ids or names of their own."""

    category_ids: Sequence[int] | Sequence[str]
    """Raw identifier of each class, in the order of the labels."""


@runtime_checkable
class HasClassActivation(Protocol):
    """A model, or a criterion, for class logits of one kind."""

    class_activation: str
    """"softmax", whose last class is "no object", or "sigmoid", one for each class."""


@runtime_checkable
class HasThings(HasClasses, Protocol):
    """A dataset that distinguishes classes with instances (things) from others."""

    things: Sequence[bool]
    """For each class, whether it has instances."""


@runtime_checkable
class ImageDataset(Protocol):
    """A dataset whose images can be viewed."""

    def load_image(self, index: int) -> np.ndarray:
        """Return the image before any transform, (H, W, 3) uint8 RGB."""


@runtime_checkable
class HasImageIds(Protocol):
    """A dataset that identifies its images; targets have the same `image_id`."""

    image_ids: Sequence[Any]


@runtime_checkable
class HasFrames(Protocol):
    """A dataset of videos."""

    def load_frames(self, index: int, count: int) -> list[np.ndarray]:
        """Return `count` frames spread from the first to the last of a stored video, (H, W, 3) uint8 RGB each."""


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
        """Return the class of each pixel of one stored image, (H, W); `IGNORE_INDEX` for pixels without one."""


@runtime_checkable
class HasReferences(Protocol):
    """A dataset with captions."""

    def references(self, index: int) -> Sequence[str]:
        """Return all captions of one image."""


@runtime_checkable
class HasVocabularies(Protocol):
    """A text dataset. It also has `target_vocabulary` and, if the model reads text, `source_vocabulary`.

    (These two are not members of the protocol: they may be built when first accessed, which `isinstance` must not
    trigger.)
    """

    def use_vocabularies_of(self, other: Any) -> None:
        """Encode with the vocabularies of another dataset, such as the training dataset."""


class Loader(Protocol):
    """Batches of a dataset. Iterating yields one epoch, or the rest of it after `set_position`."""

    num_skipped: int
    """Number of this rank's samples that were replaced because their files cannot be used."""
    num_padded: int
    """Number of this rank's videos, in this epoch so far, that were padded because they are shorter than a clip."""

    def __len__(self) -> int:
        """Return the number of batches in a full epoch."""

    def __iter__(self) -> Iterator[Batch]: ...

    def set_position(self, epoch: int, batch: int = 0) -> None:
        """Set which epoch the next iteration yields, and how many of its batches to skip."""


class Evaluator(Protocol):
    """Computes metrics from predictions; registered in EVALUATORS, built with `dataset`."""

    def update(self, predictions: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> None:
        """Add one batch."""

    def gather(self) -> None:
        """Gather the batches of all ranks on the main process."""

    def compute(self) -> dict[str, float]:
        """Return the metrics on the main process, an empty dict elsewhere."""

    def table(self) -> str:
        """Return the metrics as text to be read by people; to be called after `compute`."""


@runtime_checkable
class TakesOutputs(Protocol):
    """An evaluator that may read each sample's raw outputs in place of predictions."""

    takes_outputs: bool


@runtime_checkable
class NamesPerClassMetric(Protocol):
    """An evaluator whose metric for each class is something other than AP."""

    per_class_metric: str

    def per_class(self) -> dict[str, float]:
        """Return class name -> metric; to be called after `compute`."""


@runtime_checkable
class LoadsResults(Protocol):
    """An evaluator that can evaluate predictions that were written to files earlier."""

    def write_results(self, path: str | Path) -> list[Path] | None:
        """Write the predictions; return the files, or None if `path` is the only one."""

    def load_results(self, path: str | Path) -> None:
        """Load what `write_results` wrote, in place of `update`."""


@runtime_checkable
class HasDetails(Protocol):
    """An evaluator of detections, with metrics by class, object size and threshold."""

    def details(self) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        """Return the metrics of each class, and of each object size; to be called after `compute`."""


@runtime_checkable
class FindsThresholds(Protocol):
    """An evaluator that determines the best score thresholds for showing predictions."""

    def score_thresholds(self) -> ScoreThresholds | None:
        """Return the thresholds, on the main process and after `compute`; None if there are none, and elsewhere."""


@runtime_checkable
class ChecksArguments(Protocol):
    """A registered class that can check a config's arguments before it is built."""

    check_arguments: Callable[..., None]
    """Takes those of the config's arguments that it names as parameters; raises ConfigError."""


def child(module: nn.Module, name: str) -> nn.Module | None:
    """Return the submodule of that name, or None if the module has none."""
    return dict(module.named_children()).get(name)


def training_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the inputs of a model in training: the batch's, and its targets if the model uses them."""
    if not getattr(model, "uses_targets", False):  # optional, see `Model`
        return batch.inputs
    return {**batch.inputs, "targets": UncompiledTargets(batch.targets)}
