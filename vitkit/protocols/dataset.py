"""The interfaces of datasets and loaders: samples by index, and batches of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

import numpy as np

from vitkit.errors import DataError
from vitkit.structures import Batch, KeypointInfo, PanopticMap, Sample


class Dataset(ABC):
    """Base of the datasets in DATASETS: samples by index.

    Attributes are None, or empty, for what a dataset does not have.
    """

    noun: str = "images"
    """What its samples are called, in the plural."""
    square: int | None = None
    """Side of the square that an image will be resized to as a whole, which the loader sets before it loads one; a
    dataset may return images of that size already."""
    annotations: Sequence[str] = ()
    """What can be loaded of the ground truth: "label" (a class for each sample), "objects" (by `ground_truth`),
    "panoptic" (by `load_panoptic`), "semantic" (by `load_semantic`), "captions" (by `references`), "regions" of a text
    (by `located`)."""
    annotation_file: Path | None = None
    """The file that lists the samples."""
    file_kind: Literal["objects", "panoptic", "captions"] | None = None
    """On the class: what its argument `annotations` names, which `vitkit doctor` then checks entry by entry, even if
    the dataset cannot be built: "objects", a file of `vitkit.data.formats`; "panoptic" and "captions", COCO's."""
    classes: Sequence[str] | None = None
    """Names of the classes, in the order of the labels; their number sets the size of a model's head."""
    category_ids: Sequence[int] | Sequence[str] | None = None
    """The annotations' own identifier of each class, in the order of the labels."""
    file_ids: Mapping[int, int] = {}
    """The id of each class -> its id in the file of annotations; empty if they are the same."""
    things: Sequence[bool] | None = None
    """For each class, whether it has instances (things, not stuff)."""
    keypoints: KeypointInfo | None = None
    """The keypoints of its objects; None: it has none."""
    task: str | None = None
    """The kind of segments in its samples: "semantic", "instance" or "panoptic"."""
    image_ids: Sequence[Any] | None = None
    """The identifier of each image or video, also in its target as `image_id`."""
    has_images: bool = False
    """Whether `load_image` can show them."""
    is_video: bool = False
    """Whether its samples are videos, see `load_frames`."""
    has_vocabularies: bool = False
    """Whether it has text. It then has `target_vocabulary` and, if the model translates, `source_vocabulary`, which may
    be built when they are first used."""
    prompts: Any = None
    """How prompts for a text-prompted detector are made of its classes, `vitkit.text.class_prompts.Prompts`; None: it
    has none. `DataSettings` sets it, and that the dataset has a vocabulary."""
    source_vocabulary: Any = None
    sides: Sequence[Sequence[str]] = ()
    """The lines of its text: those of the source and of the target, or only one side."""
    num_objects: int | None = None
    """Number of objects that it trains on."""
    num_crowds: int = 0
    """Number of regions of many objects, which are not trained on."""
    max_image_pixels: int | None = None
    """Largest width x height of an image file that is decoded; None: the readers' own limit."""
    collate: Callable[[Sequence[Any]], Batch] | None = None
    """Function that joins its samples into a `Batch`; None: `Batch.collate`."""
    batch_transforms: Callable[[Batch], Batch] | None = None
    """Transforms training batches on the model's device."""

    @cached_property
    def target_vocabulary(self) -> Any:
        """The vocabulary of what the model writes, or of prompts, by default learned from them; None: no text."""
        return None if self.prompts is None else self.prompts.learn_vocabulary(self)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int | tuple[int, int]) -> Sample:
        """Return one sample; for (index, seed) its random transforms depend only on the seed."""

    def set_num_epochs(self, num_epochs: int) -> None:  # noqa: B027
        """Take the number of epochs of the training, before the first of them."""

    def set_epoch(self, epoch: int) -> None:  # noqa: B027
        """Prepare for samples of an epoch of training, counted from 0; called in the process that loads them."""

    def sample_ids(self) -> Sequence[Any]:
        """Return the identifier of each sample: `image_ids`, or else its index."""
        return range(len(self)) if self.image_ids is None else self.image_ids

    def index_parts(self) -> Iterator[Any]:
        """Yield what lists its samples and classes, as arrays and texts, by which ranks compare their data; no image is
        read for it."""
        yield from self.classes or ()
        yield from self.sample_ids()
        for lines in self.sides:
            yield from lines

    def training_indices(self) -> Sequence[int]:
        """Return the indices of the training samples."""
        return range(len(self))

    def aspect_ratios(self) -> np.ndarray | None:
        """Return width / height of every image, float64 (len(self),), for batching by orientation."""
        return None

    def lengths(self) -> np.ndarray | None:
        """Return the number of tokens of every sample, (len(self), sides), for batching text."""
        return None

    def sample_weights(self) -> np.ndarray | None:
        """Return how often each sample occurs in an epoch on average, float64 (len(self),); None: once."""
        return None

    def image_classes(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the classes that each image shows, for sampling: (M,) int64 indices of images, and labels; each pair
        once."""
        return None

    def objects_per_image(self) -> np.ndarray | None:
        """Return the number of objects that each image is trained on, int64 (len(self),)."""
        return None

    def image_path(self, index: int) -> Path | None:
        """Return the file of an image or a video; None if there is none."""
        return None

    def load_image(self, index: int) -> np.ndarray:
        """Return the image before any transform, (H, W, 3) uint8 RGB; of a video, one frame."""
        self._lacks("images")

    def load_frames(self, index: int, count: int) -> list[np.ndarray]:
        """Return `count` frames spread from the first to the last of a stored video, (H, W, 3) uint8 RGB each."""
        self._lacks("videos")

    def ground_truth(self) -> dict[str, Any]:
        """Return "images", "annotations" and "categories" in COCO's format, as pycocotools reads them.

        Masks and reports need the "width" and "height" of each image.
        """
        self._lacks("boxes or masks of objects")

    def load_panoptic(self, index: int) -> PanopticMap:
        """Return the segments of one stored image."""
        self._lacks("panoptic maps")

    def load_semantic(self, index: int) -> np.ndarray:
        """Return the class of each pixel of one stored image, (H, W); `IGNORE_INDEX` for pixels without one."""
        self._lacks("label maps")

    def located(self, index: int) -> Any:
        """Return the objects of one image in its stored size, and which phrases name them; for `GroundingEvaluator`,
        see `vitkit.data.datasets.grounding.GroundedObjects`."""
        self._lacks("regions that a text names")

    def references(self, index: int) -> Sequence[str]:
        """Return all captions of one image."""
        self._lacks("captions")

    def use_classes(self, classes: Sequence[str], category_ids: Sequence[int] | Sequence[str] | None = None) -> None:
        """Number the labels by these names, in this order, and leave out objects of other classes.

        Args:
            category_ids: the identifier of each class; None: the dataset's own, and new ones for classes it lacks.
        """
        self._lacks(f"classes that can be chosen, here {', '.join(classes)[:200]}")

    def use_keypoints(self, names: Sequence[str]) -> None:
        """Number the keypoints by these names, which are its own in another order."""
        self._lacks(f"keypoints that can be put in another order, here {', '.join(names)[:200]}")

    def phrases(self) -> Iterable[str] | None:
        """Return all phrases of its samples' targets, from which a vocabulary may be learned; None if they have none,
        so that prompts are made of its classes."""
        return None

    def use_vocabularies_of(self, other: "Dataset") -> None:
        """Encode with the vocabularies of another dataset, such as the training dataset."""
        if self.prompts is None:
            self._lacks("vocabularies")
        self.target_vocabulary = other.target_vocabulary

    def _lacks(self, what: str) -> NoReturn:
        raise DataError(f"dataset {type(self).__name__} has no {what}. Choose another dataset, or another task.")


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
