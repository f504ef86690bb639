"""Data structures that the parts pass to each other: features, batches, targets, predictions.

Sizes are (height, width) in pixels. Padding masks are bool with True = padding.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

IGNORE_INDEX = 255
"""In label maps: the value of a pixel without a class, which is neither trained on nor evaluated."""

PAD, UNK, BOS, EOS = range(4)
"""Token ids that every vocabulary has: padding, an unknown token, the beginning and the end of a sentence."""

FINER = "finer"
"""Name of a neck's map that is for masks alone, which no query attends to."""


class FeatureInfo(NamedTuple):
    """One output of a backbone or neck."""

    channels: int
    stride: int
    """Input pixels per location of the map."""


class Sample(TypedDict, total=False):
    """One image as a dataset returns it."""

    image: Tensor
    """uint8 RGB, resized and augmented, not yet normalized: (3, H, W) for an image, (3, T, H, W) for a clip,
    (views, 3, T, H, W) for several views of a video; uint16 (C, H, W) for an image of any channels."""
    views: list[Tensor]
    """Only if the transforms make several images of one: these, each like `image`, which is the first of them."""
    target: "DetectionTarget"


class DetectionTarget(TypedDict, total=False):
    """The annotations of one image with N objects. Tensors are on the batch's device once the batch has moved there.

    | field | type | what |
    |---|---|---|
    | `labels` | (N,) int64 | class of each object from 0, or number of its phrase in `phrases` |
    | `boxes_cxcywh` | (N, 4) float32 | in 0..1 of the transformed image, without padding |
    | `masks` | (N, H, W) bool | of the transformed image, unpadded, only if the dataset loads masks; `PackedMasks` |
    | `has_masks` | (N,) bool | objects with a mask, by default all; rows of others are empty, their boxes train |
    | `keypoints` | (N, K, 3) float32 | x, y (pixels), visibility (0, 1, 2); only when the dataset loads keypoints |
    | `areas` | (N,) float32 | of whole objects in pixels of the transformed image, for OKS; only with keypoints |
    | `image_id` | int | raw id in the annotation file |
    | `image_size` | (int, int) | height and width of the transformed image, without padding |
    | `original_size` | (int, int) | those of the stored image, turned by its EXIF; predictions are scaled to them |
    | `positive_map` | (N, up to T) bool | tokens of the prompt that name each object; only if phrases overlap |
    | `phrases` | list of str | of the image's prompt: the dataset's own, or those of `data.prompts` |
    | `phrase_spans` | list of lists of (int, int) | from a dataset with `phrases`: characters that name each object |
    | `negative_labels` | sequence of int | the only classes its prompt may add; from a dataset without `phrases` |

    Segmentation of every kind trains on the same fields: a mask and a class for each object (instance), for each
    class in the image (semantic), or for each segment (panoptic). Ignored pixels are in no mask, and no mask is
    empty. Evaluators ask the dataset for the truth in the original size. `phrase_spans` are, for each object, the
    characters [begin, end) of its phrase that name it, and become `positive_map`; without them all of it does.
    `negative_labels` are the only classes that a prompt may have besides those shown.

    Keypoints are in pixels from the top left corner of the transformed image, without padding. Visibility is 0 for a
    point that is not labeled or outside the image, with x = y = 0, 1 for one that is hidden, and 2 for a visible one;
    an object with a box only has zeros. `areas` are the annotation's, scaled as the image is: a crop cuts nothing off.
    """

    labels: Tensor
    boxes_cxcywh: Tensor
    masks: Tensor
    has_masks: Tensor
    keypoints: Tensor
    areas: Tensor
    image_id: int
    image_size: tuple[int, int]
    original_size: tuple[int, int]
    positive_map: Tensor
    phrases: list[str]
    phrase_spans: list[list[tuple[int, int]]]
    negative_labels: Sequence[int]


OBJECT_FIELDS = ("labels", "boxes_cxcywh", "masks", "has_masks", "keypoints", "areas")
"""The fields of a `DetectionTarget` that are tensors with a row for each object."""


@dataclass(frozen=True)
class KeypointInfo:
    """The K points that objects have: what they are called, joined by, exchanged with and measured by.

    Raises:
        ValueError: names are repeated, or something refers to a point that does not exist.
    """

    names: tuple[str, ...]
    skeleton: tuple[tuple[int, int], ...] = ()
    """Pairs of points, counted from 0, that are joined by a limb in drawings."""
    flip_pairs: tuple[tuple[int, int], ...] = ()
    """Pairs of points, counted from 0, that a mirrored image exchanges, such as the left and the right eye."""
    sigmas: tuple[float, ...] = ()
    """How exactly each point can be located, relative to the square root of the object's area, for OKS: the standard
    deviation between annotators; K values."""

    def __post_init__(self) -> None:
        count = len(self.names)
        if repeated := [name for k, name in enumerate(self.names) if name in self.names[:k]]:
            raise ValueError(f"two keypoints are called {repeated[0]!r}; expected different names.")
        for field in ("skeleton", "flip_pairs"):
            for pair in getattr(self, field):
                if len(pair) != 2 or not all(0 <= point < count for point in pair) or pair[0] == pair[1]:
                    raise ValueError(f"{field} has {list(pair)}; expected two different of the {count} keypoints.")
        ends = [point for pair in self.flip_pairs for point in pair]
        if repeated := [self.names[point] for k, point in enumerate(ends) if point in ends[:k]]:
            raise ValueError(f"flip_pairs has {repeated[0]!r} twice; expected pairs, each keypoint in at most one.")
        if len(self.sigmas) != count or not all(0 < sigma < math.inf for sigma in self.sigmas):
            raise ValueError(f"got {len(self.sigmas)} sigmas {list(self.sigmas)}; expected {count} numbers above 0.")

    @property
    def flip_order(self) -> list[int]:
        """For each point, the one whose place it takes in a mirrored image; itself, if it is in no pair."""
        order = list(range(len(self.names)))
        for a, b in self.flip_pairs:
            order[a], order[b] = b, a
        return order

    def take(self, names: Sequence[str]) -> "KeypointInfo":
        """Return the same points in the order of these names."""
        place = {self.names.index(name): k for k, name in enumerate(names)}
        skeleton, pairs = (tuple((place[a], place[b]) for a, b in x) for x in (self.skeleton, self.flip_pairs))
        return KeypointInfo(tuple(names), skeleton, pairs, tuple(self.sigmas[point] for point in place))

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values that JSON can hold."""
        pairs = {"skeleton": [*map(list, self.skeleton)], "flip_pairs": [*map(list, self.flip_pairs)]}
        return {"names": list(self.names), **pairs, "sigmas": list(self.sigmas)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "KeypointInfo":
        """Restore the points from the values that `to_json` returned.

        Raises:
            ValueError: the values do not have the form that `to_json` writes.
        """
        try:
            pairs = {name: tuple((int(a), int(b)) for a, b in values[name]) for name in ("skeleton", "flip_pairs")}
            return cls(names=tuple(map(str, values["names"])), sigmas=tuple(map(float, values["sigmas"])), **pairs)
        except (TypeError, KeyError) as error:
            raise ValueError(f"not keypoints: {str(values)[:100]}") from error


def describe_image(index: int, target: DetectionTarget) -> str:
    """Return "image INDEX of the batch", with the image's id if the target has it, for messages."""
    return f"image {index} of the batch" + (f" (image_id {target['image_id']})" if "image_id" in target else "")


ImageMatches = tuple[Tensor, Tensor]
"""The matches of one image: (query indices, target indices), int64 on the CPU."""

Matches = list[list[ImageMatches]]
"""The matches of each layer and each image. From a matcher: ascending query indices, `min(Q, N)` matches per image."""


class QuerySet(TypedDict, total=False):
    """One set of queries that a model has only in training, such as those of denoising.

    Training queries make it with `queries`; `outputs["training_outputs"]` is a list of sets with their predictions in
    place of these, `pred_logits`, and boxes or masks, which criteria loop over. Fields other than `name` have defaults.
    Sets with the same name have the same number of queries, and their losses are averaged; the name "" also includes
    the model's main queries.
    """

    name: str
    """Prefix of the losses: "" as for the main queries (Group DETR), "many" (H-DETR), "dn" (denoising), or "enc" (the
    first stage of a two-stage detector)."""
    queries: Any
    """`vitkit.nn.queries.Queries` before the decoder: content, boxes or positions, and masks to attend within."""
    matches: list[ImageMatches] | None
    """The matches of each image, the same in all layers. None, the default: the criterion matches the queries."""
    repeats: float
    """Number of queries that each target is matched with, on average; 1 by default. With `matches`, their target
    indices are those of the targets as they are, without repetition."""
    num_parts: int
    """Number of equal parts of the set that do not see each other; 1 by default."""
    sees_own: bool
    """Whether the queries see the head's own, which never see them; False by default."""
    class_agnostic: bool
    """Whether every target has class 0, an object (the first stage of two-stage Deformable DETR); False by default."""
    pred_logits: Tensor
    """(B, Q, C + 1) with "no object" as the last class, or (B, Q, C) with a sigmoid per class."""
    pred_boxes: Tensor
    """(B, Q, 4) cxcywh in 0..1 of the unpadded image."""
    pred_masks: Tensor
    """(B, Q, h, w) logits."""
    mask_embed: Tensor
    """(B, Q, channels), whose product with `mask_features` is the masks' logits; an alternative to `pred_masks`."""
    mask_features: Tensor
    """(B, channels, h, w)."""
    aux_outputs: "list[QuerySet]"
    """The predictions of the earlier decoder layers, first layer first; [] by default."""


class SegmentInfo(TypedDict, total=False):
    """One segment of a panoptic map. Predicted segments have a score, true ones say whether they are a crowd."""

    id: int
    """The value of the segment's pixels in the map, above 0."""
    label: int
    """Contiguous class index."""
    score: float
    """The predicted score, in 0..1."""
    iscrowd: bool
    """True if the segment covers a group of objects that are not counted one by one."""


class PanopticMap(NamedTuple):
    """A map in which each pixel of an image belongs to at most one segment."""

    panoptic: np.ndarray
    """(H, W) int32 segment ids; 0 is void."""
    segments_info: list[SegmentInfo]


class Detections(TypedDict):
    """Predicted boxes of one image, in any order (not necessarily by score)."""

    scores: Tensor
    """(N,) float32 in 0..1."""
    labels: Tensor
    """(N,) int64, contiguous class index."""
    boxes_xyxy: Tensor
    """(N, 4) float32 in pixels of the original image."""


class PhraseDetections(TypedDict):
    """Predicted boxes of one image, each with the words of the prompt that it shows, in place of a class."""

    scores: Tensor
    """(N,) float32 in 0..1."""
    phrases: list[str]
    """N texts."""
    boxes_xyxy: Tensor
    """(N, 4) float32 in pixels of the original image."""


class InstanceDetections(Detections):
    """Detections with masks."""

    masks: Tensor
    """(N, H, W) bool, at the size of the original image."""


class KeypointDetections(Detections):
    """Detections with keypoints."""

    keypoints: Tensor
    """(N, K, 3) float32: x and y in pixels of the original image, and the confidence in each point, in 0..1; 1 from a
    model that predicts none."""


class SemanticPrediction(TypedDict):
    """The predicted class of every pixel of one image."""

    semantic: Tensor
    """(H, W) int64 contiguous class index, at the size of the original image."""


class PanopticPrediction(TypedDict):
    """The predicted segments of one image."""

    panoptic: Tensor
    """(H, W) int32 segment ids, at the size of the original image; 0 is void."""
    segments_info: list[SegmentInfo]


class AttentionLayers(NamedTuple):
    """A model's attention modules by what attends to what, from the first layer to the last."""

    encoder: Sequence[nn.Module] = ()
    """Modules in which each location of a map of the image attends to all others."""
    decoder: Sequence[nn.Module] = ()
    keypoints: Sequence[nn.Module] = ()
    """Modules in which queries and their keypoints attend to the image: to every location, or to sampled points."""
    prompt: Sequence[nn.Module] = ()
    """Modules in which queries or locations attend to the words of the prompt."""
    fusion: Sequence[nn.Module] = ()
    """Modules in which the image and the words of the prompt attend to each other. A recorder gets two entries for each
    call: the weights of the locations of all of the neck's maps, fine to coarse, over the words, (B, heads, S, words),
    then those of the words over the locations."""
    level_names: Sequence[str] = ()
    """Names of the neck's maps that the decoder's modules attend to in turn; empty: only the coarsest."""
    masked: Sequence[nn.Module] = ()
    """The decoder's layers if they take `memory_bias`, (B, 1 or heads, Q, S), masking all outside queries' masks."""
    num_joint_queries: int = 0
    """Number of queries that come first among the tokens of the decoder's modules, if these are modules of the encoder
    in which queries and locations attend to each other; 0: queries and locations are separate."""
    rounds_padding: bool = True
    """See `QueryHead`."""


@dataclass(frozen=True)
class ScoreThresholds:
    """The lowest scores, overall and by class, at which predicted objects are shown."""

    overall: float = 0.5
    """Threshold of the classes without a threshold of their own, in 0..1."""
    by_class: tuple[float | None, ...] = ()
    """Threshold of each class; `overall` where it is None, or for all classes if the tuple is empty."""
    origin: str = "the default"
    """Where the thresholds come from, in words that messages show."""

    def of(self, labels: Tensor) -> Tensor:
        """Return the threshold of each label, (N,) float32."""
        by_label = [self.overall if value is None else value for value in self.by_class]
        if not by_label:
            return torch.full(labels.shape, self.overall, device=labels.device)
        return torch.tensor(by_label, device=labels.device)[labels]

    def to_json(self, classes: Sequence[str]) -> dict[str, Any]:
        """Return the thresholds as plain values that JSON can hold, with those of classes by class name."""
        by_class = {name: value for name, value in zip(classes, self.by_class) if value is not None}
        return {"overall": self.overall, "by_class": by_class, "origin": self.origin}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], classes: Sequence[str]) -> "ScoreThresholds":
        """Restore the thresholds from the values that `to_json` returned, for a model with these classes.

        Raises:
            ValueError: the values do not have the form that `to_json` writes.
        """
        try:
            overall, origin = float(values["overall"]), values["origin"]
            by_class = {name: float(value) for name, value in values["by_class"].items()}
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"not score thresholds: {str(values)[:100]}") from error
        if not all(0 <= number <= 1 for number in (overall, *by_class.values())):
            raise ValueError(f"score thresholds outside 0 to 1: {str(values)[:100]}")
        return cls(overall, tuple(by_class.get(name) for name in classes), str(origin))

    @property
    def interval(self) -> str:
        """The lowest and the highest threshold as text, or the only one if all are equal."""
        values = [self.overall, *(value for value in self.by_class if value is not None)]
        low, high = f"{min(values):.2f}", f"{max(values):.2f}"
        return low if low == high else f"{low} to {high}"

    def __str__(self) -> str:
        by_class = ", by class" if "to" in self.interval else ""
        return f"score {self.interval}{by_class} ({self.origin})"


@dataclass(frozen=True)
class ImageSizes:
    """The range of image sizes, in pixels, that a model received in an evaluation."""

    least_short: int
    median_short: int
    most_short: int
    """Largest length of a shorter side; `least_short` and `median_short` are the smallest and the median one."""
    most_long: int
    """Largest length of a longer side."""

    @classmethod
    def of(cls, sizes: Sequence[tuple[int, int]]) -> "ImageSizes":
        """Return the range of the given (height, width), of which there is at least one."""
        short = sorted(int(min(size)) for size in sizes)
        return cls(short[0], short[len(short) // 2], short[-1], max(int(max(size)) for size in sizes))

    def holds(self, height: int, width: int) -> bool:
        """Return whether an image's sides lie within the range."""
        return self.least_short <= min(height, width) <= self.most_short and max(height, width) <= self.most_long

    def __str__(self) -> str:
        shortest = f"{self.least_short} to " if self.least_short != self.most_short else ""
        return f"shorter side {shortest}{self.most_short}, longer side up to {self.most_long} pixels"

    def to_json(self) -> dict[str, int]:
        """Return the fields as plain values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ImageSizes":
        """Restore the sizes from the values that `to_json` returned.

        Raises:
            ValueError: the values do not have the form that `to_json` writes.
        """
        try:
            sizes = cls(**values)
        except TypeError as error:
            raise ValueError(f"not image sizes: {str(values)[:100]}") from error
        numbers = (sizes.least_short, sizes.median_short, sizes.most_short, sizes.most_long)
        if not all(type(number) is int and number > 0 for number in numbers) or list(numbers) != sorted(numbers):
            raise ValueError(f"not image sizes: {str(values)[:100]}")
        return sizes


class UncompiledTargets(Sequence[Any]):
    """Targets of a batch that torch.compile does not look into: it would recompile for other numbers of objects."""

    def __init__(self, targets: Sequence[Any]):
        self._targets = targets

    def __getitem__(self, index: Any) -> Any:
        return self._targets[index]

    def __len__(self) -> int:
        return len(self._targets)


class PromptTokens(NamedTuple):
    """The tokens of the prompts of a batch, padded to the longest.

    A prompt is a list of phrases, each of which ends with a separator: "[CLS] a cat . dog . [SEP]".
    """

    tokens: Tensor
    """(B, T) int64, of which `PAD` is padding."""
    phrase_ids: Tensor
    """(B, T) int64, the number of each token's phrase, counted from 0; -1 for tokens outside of phrases: the first and
    the last token, and padding. The separator belongs to its phrase."""
    is_word: Tensor
    """(B, T) bool, whether a token is one of its phrase's own, and not its separator."""

    @property
    def shape(self) -> torch.Size:
        """(B, T)."""
        return self.tokens.shape

    def to(self, device: torch.device | str) -> "PromptTokens":
        """Return the tokens on a device."""
        return PromptTokens(*(field.to(device, non_blocking=True) for field in self))


@dataclass
class Batch:
    """One step's input. `model(**batch.inputs)`, then `criterion(outputs, batch.targets)`.

    For images, `inputs` holds
        images: (B, 3, H, W) uint8 RGB, or (B, C, H, W) uint16, zero-padded at the right and bottom to a common size,
        padding_mask: (B, H, W) bool, True = padding,
        small_images: only with views of each image, (n * B, 3, h, w) uint8 RGB; `images` are then (2 * B, 3, H, W), the
            first large view of each image and then the second, and there is no mask,
        text: only for a text-prompted model, a list with what to look for in each image; or in its place, with
            `data.prompts`, prompt: its `PromptTokens`.
    For clips, which all have one size within a batch, `inputs` holds
        images: (B, 3, T, H, W) uint8 RGB. The views of a video are consecutive, each with the video's target.
    """

    inputs: dict[str, Any]
    targets: Sequence[Mapping[str, Any]]

    @classmethod
    def collate(cls, samples: Sequence[Sample]) -> "Batch":
        """Pad images with zeros at the right and bottom to the largest height and width among them; stack clips.

        Args:
            samples: at least one; images (C, H, W) uint8 or uint16, or clips of equal size, (3, T, H, W), or
                (views, 3, T, H, W), whose views become samples of the batch.
        """
        images = [sample["image"] for sample in samples]
        if images[0].ndim > 3:
            views = [image if image.ndim == 5 else image[None] for image in images]
            targets = [sample["target"] for sample, clips in zip(samples, views) for _ in clips]
            return cls({"images": torch.cat(views)}, targets)
        height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
        # NumPy copies rows of bytes several times faster than PyTorch, and zeros are written only outside the images.
        padded = np.empty((len(images), len(images[0]), height, width), images[0].numpy().dtype)
        padding_mask = np.ones((len(images), height, width), bool)
        for row, mask, image in zip(padded, padding_mask, images):
            _, image_height, image_width = image.shape
            row[:, :image_height, :image_width] = image.numpy()
            row[:, image_height:] = 0
            row[:, :image_height, image_width:] = 0
            mask[:image_height, :image_width] = False
        inputs = {"images": torch.from_numpy(padded), "padding_mask": torch.from_numpy(padding_mask)}
        return cls(inputs, [sample["target"] for sample in samples])

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch with its tensors on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """Return the batch with its tensors in pinned memory."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        def convert(value: Any) -> Any:
            if isinstance(value, PromptTokens):
                return PromptTokens(*map(function, value))
            return function(value) if isinstance(value, Tensor) else value

        def convert_all(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: convert(value) for name, value in values.items()}

        return Batch(convert_all(self.inputs), [convert_all(target) for target in self.targets])

    def __len__(self) -> int:
        return len(self.targets)
