"""What each part must provide: backbones, models, criteria, datasets, loaders and evaluators.

`Model`, `Criterion`, `Dataset` and `Evaluator` are base classes: a registered class derives from its base, which has
the defaults of all that it may leave out. The other contracts are structural: a class in a user's own file needs no
base class of vitkit. `isinstance` checks for the runtime-checkable ones, which only some parts follow; it does not see
submodules, which `nn.Module` keeps in tables of its own; see `child`.
"""

import copy
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitkit.errors import ConfigError, DataError
from vitkit.structures import Batch, FeatureInfo, PanopticMap, Sample, ScoreThresholds

logger = logging.getLogger("vitkit")


class Backbone(Protocol):
    """Feature maps of images; registered in BACKBONES.

    It may have
        pixel_mean, pixel_std: mean and standard deviation of R, G and B that its weights expect, with pixel values in
            0..1; without them, ImageNet's,
        keep_features(names): returns only these maps from now on, and removes the modules that only the others need,
        pretrained_source(): the name of its pretrained weights, None for random ones: a file, a folder of the
            transformers library, "hf:OWNER/NAME", "https://...#sha256=PREFIX" or "timm/NAME".
            `vitkit.weights.load_pretrained` loads them into it, where
        completing_state(): a context in which it takes weights that lack some of its entries,
        load_pretrained(): in place of `pretrained_source`, loads its weights in a way of its own; returns where they
            came from, or None if they stay random. A model without a backbone may have it, for its word vectors,
        entries_to_leave_out(names): those of a classifier's entries that a backbone of feature maps has no use for, so
            that it can take a classifier's weights,
        optional_weights: patterns ("*.rel_pos_h") of the entries that such weights may lack,
        hidden_settings: its arguments, by name, that weights do not show though they are wrong for another value,
        block_names(): the names of its blocks, first to last, if they are modules of another library,
        and what it says about itself, see `BackboneFacts`.
    `BackboneBase` has those that its subclasses need.
    """

    feature_info: Mapping[str, FeatureInfo]
    """Channels and stride of each map that `forward` returns, fine to coarse."""

    def __call__(self, images: Tensor) -> Mapping[str, Tensor]:
        """Return the maps, in the order of `feature_info`.

        A backbone for clips takes (B, 3, T, H, W); its maps also have an axis of frames, before the height.
        A backbone whose `forward` also takes `padding_mask`, (B, H, W) bool with True = padding, keeps padding from
        affecting an image's maps.

        Args:
            images: (B, 3, H, W) float, normalized; any H and W.
        Returns:
            name -> (B, channels, ceil(H / stride), ceil(W / stride)).
        """


class BackboneFacts:
    """What a backbone says about itself, with the defaults for one that says nothing; read by `backbone_fact`."""

    patch_size: int | None = None
    """Side, in pixels, of the patches that are the tokens of every block of a plain vision transformer; None for
    others, which merge or pool their tokens or have none."""
    has_class_token: bool = False
    """Whether the first token is a class token, the only one of the image."""
    num_windows: int = 1
    """Number of windows along each side of the image, each of which has its own class token before its patches."""
    window_depends_on_size: bool = False
    """Whether its windows shrink to small maps, so that a graph of it holds for one size of images."""
    num_frames: int | None = None
    """Number of frames of the clips that it is made for; None: it takes images."""

    def global_attention(self) -> Sequence[nn.Module]:
        """Return the modules in which every token of an image attends to every other one, first to last."""
        return ()


_UNSTATED = BackboneFacts()


def backbone_fact(backbone: nn.Module, name: str) -> Any:
    """Return an attribute of `BackboneFacts`: the backbone's, or the default if it says nothing."""
    return getattr(backbone, name, getattr(_UNSTATED, name))


class Neck(Protocol):
    """Turns a backbone's maps into those that a head reads; registered in NECKS, built with `feature_info`.

    It may have `in_features`, the names of the backbone's maps that it reads. If its constructor has an argument
    `isolate_padding`, a model sets it to True where padding must not affect the image; the neck must do so otherwise.
    """

    feature_info: Mapping[str, FeatureInfo]

    def __call__(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> Mapping[str, Tensor]:
        """Return the neck's maps; `padding_mask` is (B, H, W) bool at the size of the images, True = padding."""


class Head(Protocol):
    """Predicts from a neck's maps; registered in HEADS, built with `feature_info` and `num_classes`, and with
    `num_queries` if its model has that argument.

    Maps are (B, channels, h, w). With a padding mask, (B, H, W) bool at the size of the images with True = padding, no
    query attends to padding. A head with queries derives from `vitkit.nn.queries.QueryHead`, so that a config can add
    queries in training. The example is configs/examples/conditional_detr/head.py.
    """

    def __call__(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Any]:
        """Return the outputs that the model's criterion and `postprocess` read."""


class AttentionLayers(NamedTuple):
    """Where a model's attention lies: its attention modules by what attends to what, first layer to last."""

    encoder: Sequence[nn.Module] = ()
    """Modules in which each location of a map of the image attends to all others."""
    decoder: Sequence[nn.Module] = ()
    """Modules in which queries attend to the image: to every location, or to sampled points."""
    prompt: Sequence[nn.Module] = ()
    """Modules in which queries or locations attend to the words of the prompt."""
    fusion: Sequence[nn.Module] = ()
    """Modules in which the image and the words of the prompt attend to each other. A recorder gets two entries for each
    call: the weights of the locations of all of the neck's maps, fine to coarse, over the words, (B, heads, S, words),
    then those of the words over the locations."""
    level_names: Sequence[str] = ()
    """Names of the neck's maps that the decoder's modules attend to in turn; empty: only the coarsest."""
    masked: Sequence[nn.Module] = ()
    """The decoder's layers if they are called with `memory_bias`, (B, 1 or heads, Q, S), which masks the locations
    outside each query's mask."""
    num_joint_queries: int = 0
    """Number of queries that come first among the tokens of the decoder's modules, if these are modules of the encoder
    in which queries and locations attend to each other; 0: queries and locations are separate."""
    rounds_padding: bool = True
    """Whether sampled points are relative to the padding rounded to each map's locations; False: in pixels."""


class Fuses(Protocol):
    """A module that takes less time once it no longer learns, see `Model.fuse`; `fuses` tells which ones are."""

    def fused(self) -> nn.Module:
        """Return a module that computes the same in inference and takes this one's place: another one, or itself, in
        which parts are replaced. Its remaining parts are asked next."""


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, which see its input, its output or their gradients."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def fuses(module: nn.Module) -> TypeGuard[Fuses]:
    """Return whether a module's class has the method of `Fuses`, for the `forward` that it runs: a subclass with
    another one may compute something else. An attribute or a submodule may have the method's name."""
    if "forward" in vars(module):
        return False
    owner = next((c for c in type(module).__mro__ if "fused" in vars(c) or "forward" in vars(c)), None)
    return owner is not None and callable(vars(owner).get("fused"))


class Model(nn.Module):
    """Base of the models in MODELS: `model(**batch.inputs)` returns outputs for a criterion, a dict by field name.

    An evaluated model is a `DenseModel` or a `GenerativeModel`, unless its evaluator `takes_outputs`. Nothing else asks
    for a model's class: it says by `takes` and `returns`, on the class or in the constructor, what kind it is.
    """

    takes: Sequence[Literal["images", "text", "source", "tokens"]] = ("images",)
    """The inputs that a prediction is made from, by their names in `batch.inputs`: "images"; "text", a list with
    what to look for in each image: a text, its phrases, or a `vitkit.text.prompts.Caption`; "source", the tokens of a
    text that another is written from; "tokens", those of a text that is continued or whose masks are filled."""
    returns: Sequence[
        Literal[
            "boxes_xyxy",
            "masks",
            "semantic",
            "panoptic",
            "class_scores",
            "phrases",
            "text",
            "masked_tokens",
            "features",
        ]
    ] = ()
    """What its predictions have, by their fields (vitkit/structures.py), "masked_tokens" for a model that fills masks,
    and "features" for one whose only output is a vector of each image; empty: it does not say, and is taken for a
    detector."""
    class_head: Sequence[str] = ()
    """Prefixes of the names of the parameters whose size depends on the number of classes."""
    class_activation: Literal["softmax", "sigmoid"] | None = None
    """How logits become the scores of classes: "softmax", whose last class is "no object", or "sigmoid", one for each
    class; None if only one kind of criterion fits the model."""
    tasks: Sequence[str] = ()
    """The tasks that a segmentation model is configured for, out of "semantic", "instance" and "panoptic"."""
    classifies_masks: bool = False
    """Whether its queries predict a class and a mask each, and no box (mask classification)."""
    score_threshold: float = 0.5
    """The lowest score of objects that are shown, where no evaluation has measured better ones."""
    vocabulary: Any = None
    """The `Vocabulary` that its text is read with; None for a model that reads no text, or only numbers of tokens."""
    image_size: tuple[int, int] | None = None
    """The (height, width) that it pads smaller images to, the only one that its exported file takes; None: any."""
    mask_multiple: int = 1
    """Its masks and maps cover the images of a batch padded to a multiple of this, in pixels."""
    has_fixed_features: bool = False
    """Whether a frozen network's features of an image never change, so that training may read them from a file; see
    `Captioner` and `FeatureDistillation`."""
    splits_with_features: Sequence[Literal["train", "val"]] = ("train", "val")
    """The splits for which these features are read."""
    training_parts: Sequence[str] = ()
    """The state dicts that a checkpoint of its original training holds side by side, such as student and teacher, if
    all are loaded."""
    new_parts: Sequence[str] = ()
    """Prefixes of parts that may be missing altogether from a checkpoint to start training from."""

    uses_targets: bool = False
    """Whether `forward` also takes `targets` in training, the same as the criterion's, for queries that are
    made from them."""

    is_fused: bool = False
    """Whether `fuse` has been called."""

    def fuse(self) -> "Model":
        """Prepare for inference, in place: fold norms and learned scales into the convolutions before them, merge
        branches, and keep weights in the order of the processor's kernels. Outputs are the same except for rounding,
        and the model can no longer be trained, or saved as a state dict; its parameters require no gradients. Weights
        that are changed in place after its first batch are not noticed.

        Modules that do not say how (`Fuses`), such as those of a user's own backbone, are left as they are, and so are
        those with hooks.

        Raises:
            ConfigError: the model or a part is in training mode, or it is fused already; it has weights that are not
                finite or without values, or variances below 0; or a module's `fused` returns no module, and the model
                is fused in part.
        """
        _check_fusible(self)
        backbone = child(self, "backbone")
        count = _count_norms(backbone)
        self.is_fused = True  # in part, also if a module's `fused` fails
        with torch.no_grad():
            _fuse_parts(self)
        self.eval().requires_grad_(False)  # new modules begin in training mode
        if backbone is not None and not fuses(backbone) and (left := _count_norms(backbone)):
            _warn_of_norms(type(backbone).__name__, left, count)
        return self

    def fused_copy(self) -> "Model":
        """Return a copy that is fused, see `fuse`, and shares with this model the memory of all tensors that folding
        does not change; its parameters require no gradients. A copy of a fused model is fused already."""
        # Parameters are objects of their own: converting the copy to another type or device must not change this model.
        parameters = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in self.parameters()}
        copied = copy.deepcopy(self, {**parameters, **{id(buffer): buffer for buffer in self.buffers()}})
        return copied if self.is_fused else copied.fuse()

    def train(self, mode: bool = True) -> "Model":
        """Set training mode, which a fused model refuses before any of its modules has changed.

        Raises:
            ConfigError: the model is fused.
        """
        if mode and self.is_fused:
            name = type(self).__name__
            raise ConfigError(f"train: {name} is fused (Model.fuse), for inference only. Train a model before it.")
        return super().train(mode)

    def after_pretrained(self) -> None:
        """Called when the pretrained weights of its backbone have been loaded, for other parts that start from them."""

    def variant_of(self, names: Iterable[str]) -> str:
        """Describe which variant a state dict's names belong to, if the variants' checkpoints are easily confused."""
        return ""

    def attention_layers(self) -> AttentionLayers:
        """Return where its attention lies; none by default, besides that of its backbone."""
        return AttentionLayers()

    def prompt_words(self, text: Any) -> list[str]:
        """Return the words of a text to look for as the model reads them: the columns of its `pred_logits`
        (B, Q, words), a sigmoid each, and of its attention to the prompt."""
        return str(text).split()

    def prompt_phrases(self, text: Any) -> list[str]:
        """Return what a text names, the classes of what is detected: its words, if the model has no phrases; nothing,
        if they differ from image to image, as for a caption.

        Raises:
            DataError: the model cannot read the text.
        """
        return self.prompt_words(text)

    def phrases_of_words(self, prompt: str) -> list[int]:
        """Return for each of a prompt's words the number of its phrase; -1 for one of none, such as a separator."""
        return list(range(len(self.prompt_words(prompt))))

    def example_prompts(self, batch_size: int) -> dict[str, Any]:
        """Return the inputs, besides images, with which the costs of a model that takes a prompt are counted."""
        return {"text": ["a person. a red car. a dog."] * batch_size}

    def query_scores(self, outputs: Mapping[str, Any], num_classes: int) -> Tensor:
        """Return the score of each class for each query, (B, Q, num_classes) float32 in 0..1.

        Queries are in the order of the outputs, which `postprocess` may sort. By default, logits with an extra column,
        for "no object", go through a softmax, and others through a sigmoid.
        """
        logits: Tensor = outputs["pred_logits"].float()
        return logits.softmax(-1)[..., :-1] if logits.shape[-1] > num_classes else logits.sigmoid()

    def postprocess_settings(self) -> dict[str, Any] | None:
        """Return the settings of the post-processing that an exported file leaves to its reader, as plain values; None
        if there is none."""
        return None

    def semantic_scores(
        self, outputs: Mapping[str, Any], index: int, original: tuple[int, int], *, within: range | None = None
    ) -> Iterator[tuple[range, Tensor]]:
        """Yield ranges of rows of the batch's image `index`, each with its scores (C, rows, W).

        See `MaskResults`; a ConfigError is raised by models that do not score the classes of each pixel.
        """
        raise ConfigError(
            f"{type(self).__name__} has no scores of each pixel's classes, which merging the maps of tiles needs. "
            "Predict without tiles."
        )


def _check_fusible(model: Model) -> None:
    """Raise the errors of `Model.fuse`, before anything has changed."""
    name = type(model).__name__
    for part, module in model.named_modules(prefix=name):
        if module.training:
            raise ConfigError(f"fuse: {part} is in training mode. Call eval() first.")
    if model.is_fused:
        raise ConfigError(f"fuse: {name} is fused already. Fuse a model once; a copy of it is fused as well.")
    # Some kernels of activations turn NaN into a number, which would hide that the weights are broken. Fixed norms have
    # buffers only; those of other modules may well be infinite, such as masks.
    norms = [part for part in model.named_modules() if getattr(part[1], "running_var", None) is not None]
    statistics = (item for prefix, norm in norms for item in norm.named_buffers(prefix, recurse=False))
    for weights, value in (*model.named_parameters(), *statistics):
        if value.is_meta:
            raise ConfigError(
                f"fuse: {name} has weights without values, in {weights} (device meta). Load its weights onto a "
                "device first."
            )
        if not value.isfinite().all():
            raise ConfigError(
                f"fuse: {name} has weights that are not finite, in {weights}. Load an earlier checkpoint."
            )
        if weights.endswith(".running_var") and (value < 0).any():
            raise ConfigError(f"fuse: {name} has variances below 0, in {weights}. Load an earlier checkpoint.")


def _count_norms(backbone: nn.Module | None) -> int:
    return sum(isinstance(module, _BatchNorm) for module in backbone.modules()) if backbone is not None else 0


@cache  # once a process, not for each copy of a model
def _warn_of_norms(backbone: str, left: int, norms: int) -> None:
    what = f"is left as it is, with {left}" if left == norms else f"keeps {left} of its {norms}"
    logger.warning(
        "fuse: the backbone %s %s batch norms. For faster inference, give it a method fused(), "
        "see vitkit.protocols.Fuses.",
        backbone,
        what,
    )


def _fuse_parts(module: nn.Module) -> None:
    """Replace the parts of a module that can be fused, from the outside in.

    Raises:
        ConfigError: a module's `fused` returns something else than a module.
    """
    for name, part in list(module.named_children()):
        watched = has_hooks(part)
        if fuses(part):
            replacement = part if watched else part.fused()
            if not isinstance(replacement, nn.Module):
                raise ConfigError(
                    f"fuse: {type(part).__name__}.fused() returned {type(replacement).__name__}; expected a module, "
                    "such as self."
                )
            setattr(module, name, replacement)
            _fuse_parts(replacement)
        elif not callable(getattr(type(part), "fused", None)):
            _fuse_parts(part)
        # Otherwise its `forward` is not the one that `fused` is for, and may use its parts in another way.


@runtime_checkable
class DenseModel(Protocol):
    """A model of images whose predictions are computed from its outputs in one step."""

    def postprocess(self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """Return each image's predictions in pixels of the original, whose (height, width) is in `image_sizes`."""


@runtime_checkable
class FixedDetections(Protocol):
    """A model whose detections have one shape for all images, so that an exported file can include them."""

    def detections(self, outputs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return scores and labels (B, N), boxes_xyxy (B, N, 4) in 0..1 of the unpadded image, and the query that each
        detection is from, (B, N) int64; see `vitkit.ops.detections.BatchDetections`."""


@runtime_checkable
class Reconstructs(Protocol):
    """A model that learns by reconstructing patches of images that it does not see."""

    mask_ratio: float
    """Fraction of the patches that are removed."""
    norm_pix: bool
    """Whether it predicts each patch relative to the patch's own mean and standard deviation."""

    def reconstruct(self, images: Tensor, *, noise: Tensor | None = None) -> Any:
        """Return what it makes of images, `vitkit.models.mae.Reconstruction`."""


@runtime_checkable
class GenerativeModel(Protocol):
    """A model that makes its predictions step by step, such as text."""

    def generate(self, inputs: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Return the prediction of each sample of `batch.inputs`."""


@runtime_checkable
class OffersExportGraph(Protocol):
    """A model that defines what its exported file takes and returns; see vitkit/apps/deployment/README.md."""

    def export_graph(self) -> nn.Module:
        """Return a `vitkit.apps.exported.graphs.ExportGraph` of the model, such as `ImageGraph(self)`."""


@runtime_checkable
class AdaptsState(Protocol):
    """A module that can convert a state dict of another form to its own.

    If it has `renames_itself`, and that is true, it converts all names of its weights, which are then not matched
    against the official formats.
    """

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Convert the entries whose names start with `prefix`, in place."""


@runtime_checkable
class LearnsFromTeacher(Protocol):
    """A model that in training learns from a frozen network, which is no part of it; see `vitkit.models.teacher`."""

    teacher: str | Mapping[str, Any] | None
    """The config's teacher, see `vitkit.weights.teachers.find_teacher`; None if a module was given."""

    def build_teacher(self, backbone: Mapping[str, Any]) -> nn.Module:
        """Return the network that is to teach, with random weights: the backbone, or a model of it."""

    def take_teacher(self, network: nn.Module) -> None:
        """Learn from this network, whose weights are loaded."""

    def teacher_key(self) -> int | None:
        """Return a fingerprint of the network's weights, which checkpoints have; None if there is no network."""

    def measure_teacher(self, batches: Iterable[Batch]) -> None:
        """Measure what training needs to know of the teacher, on some training batches of each rank before a run."""


@runtime_checkable
class LearnsFromItself(Protocol):
    """A model with a student, which is trained, and a teacher, which follows it and is what the run is for."""

    student_backbone: str
    """The name of the backbone that the optimizer changes; `backbone` is the teacher's."""

    def update_teacher(self, momentum: float) -> None:
        """Move the teacher's parameters towards the student's: by 1 - momentum."""

    def last_layer(self) -> Sequence[nn.Parameter]:
        """Return the parameters of the student's last layer, which is frozen at first."""


@runtime_checkable
class CentersTeacher(Protocol):
    """A criterion that compares a student with its teacher, whose outputs it centers and sharpens."""

    teacher_temperature: float | None
    """Temperature of the teacher's softmax, set before each epoch; None: nothing has set it."""

    def update_center(self, center: Tensor, *, step_taken: bool = True) -> None:
        """Move the center, in place, towards the mean of the teacher's outputs since the last call, if the optimizer
        took the step."""


class Criterion(nn.Module):
    """Base of the criteria in CRITERIA: `criterion(outputs, targets)` returns the weighted losses of a batch.

    `forward` takes the model's outputs and a target for each sample. It returns name -> loss; the sum of the losses is
    minimized. The names are the same whatever the targets, even without any.
    """

    class_activation: Literal["softmax", "sigmoid"] | None = None
    """The kind of class logits that it is for, see `Model`; None: any."""
    meters: Mapping[str, Any] = MappingProxyType({})
    """Measured quantities other than losses: name -> `vitkit.distributed.RatioMeter`."""
    training_only: bool = False
    """Whether it reads what its model returns only in training mode; evaluations then have no loss."""
    needs_outputs: Sequence[str] = ()
    """The fields of the model's outputs that it always reads, checked on the first batch, before training, unless it is
    `training_only`."""
    needs_targets: Sequence[str] = ()
    """The fields of each target that it always reads, checked likewise."""
    epoch: int = 0
    """The epoch of the training, counted from 0; a run sets it."""
    step_share: Tensor | None = None
    """In a run with `train.images_per_step`: the mean `count` of all batches of the step, divided by this batch's."""

    def count(self, targets: Sequence[Mapping[str, Any]]) -> float:
        """Return the number that its losses over these targets are divided by, such as that of objects or words."""
        return len(targets)


@runtime_checkable
class ChangesAtEpoch(Protocol):
    """A part of a criterion, such as a matcher, that computes something else from an epoch on; a run that ends before
    warns."""

    changes_at: int | None
    """That epoch, counted from 0; None: never."""


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
    things: Sequence[bool] | None = None
    """For each class, whether it has instances (things, not stuff)."""
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
    """How prompts for a text-prompted detector are made of its classes, `vitkit.data.text.prompts.Prompts`; None: it
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

    def training_indices(self) -> Sequence[int]:
        """Return the indices of the samples that are trained on."""
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
        see `vitkit.data.datasets.grounding.Located`."""
        self._lacks("regions that a text names")

    def references(self, index: int) -> Sequence[str]:
        """Return all captions of one image."""
        self._lacks("captions")

    def use_classes(self, classes: Sequence[str], category_ids: Sequence[int] | Sequence[str] | None = None) -> None:
        """Number the labels by these names, in this order, and leave out what has another class.

        Args:
            category_ids: the identifier of each class; None: the dataset's own, and new ones for classes it lacks.
        """
        self._lacks(f"classes that can be chosen, here {', '.join(classes)[:200]}")

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


def is_measured(value: float | None) -> bool:
    """Return whether a metric has a value: -1, nan, an infinity and None are those of data without what it measures."""
    return value is not None and math.isfinite(value) and value != -1


class Evaluator(ABC):
    """Base of the evaluators in EVALUATORS, which are built with `dataset`: computes metrics from predictions."""

    dataset: Dataset
    """The evaluated dataset, which the constructor sets."""
    takes_outputs: bool = False
    """Whether it reads each sample's raw outputs in place of predictions."""
    per_class_metric: str = "AP"
    """The metric that `per_class` returns."""
    lower_is_better: Sequence[str] = ()
    """The metrics of which a lower value is better."""
    extra_metrics: Sequence[str] = ()
    """The metrics that a subclass adds to those of its base in `_compute`: tables, reports and comparisons list them,
    without intervals if the statistics do not have them."""
    needs_dataset: Sequence[str] = ()
    """The attributes and methods of `Dataset` that it reads and that a dataset may lack, checked before training."""

    @abstractmethod
    def update(self, predictions: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> None:
        """Add one batch."""

    @abstractmethod
    def gather(self) -> None:
        """Gather the batches of all ranks on the main process."""

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Return the metrics on the main process, an empty dict elsewhere.

        Where the data have nothing that a metric measures, it is -1 or nan; see `is_measured`.
        """

    @abstractmethod
    def table(self) -> str:
        """Return the metrics as lines to print; to be called after `compute`."""

    @property
    def parts(self) -> Sequence["Evaluator"]:
        """The evaluators that this one consists of; usually only itself."""
        return (self,)

    def check_dataset(self) -> None:
        """Check, before training, what it will read of the dataset; by default that all of `needs_dataset` is there.

        Raises:
            VitkitError: something is missing or wrong.
        """
        require_parts(self, self.dataset)

    def measures(self, metric: str) -> bool:
        """Return, before training, whether the data have anything that a metric measures; True if it is not known."""
        return True

    # All of the following are to be called after `compute`, on the main process.

    def per_class(self) -> dict[str, float]:
        """Return class name -> metric; {} if there are no metrics by class."""
        return {}

    def score_thresholds(self) -> ScoreThresholds | None:
        """Return the best score thresholds for showing predictions; None if there are none."""
        return None

    def statistics(self) -> Any:
        """Return each sample's contribution to the metrics, a `vitkit.evaluation.bootstrap.SampleStatistics`.

        From it, reports and comparisons compute intervals.
        """
        raise ConfigError(
            f"{type(self).__name__} has no per-sample statistics, so its metrics cannot be resampled. Compare "
            "models by another evaluator."
        )

    def named_statistics(self) -> dict[str, Any]:
        """Return the statistics of everything that it evaluates; models are compared on what both have."""
        return {type(self).__name__: self.statistics()}

    def by_length(self) -> list[Any]:
        """Return the metrics of groups of texts by the length of their source, `vitkit.evaluation.text.LengthGroup`."""
        raise ConfigError(f"{type(self).__name__} has no metrics by the length of texts. Choose models that translate.")

    def write_results(self, path: str | Path) -> list[Path] | None:
        """Write the predictions; return the files, or None if `path` is the only one."""
        raise ConfigError(f"{path}: {type(self).__name__} does not write its predictions to files.")

    def load_results(self, path: str | Path) -> None:
        """Load what `write_results` wrote, in place of `update`."""
        raise ConfigError(f"{path}: {type(self).__name__} cannot read predictions from files. Evaluate the checkpoint.")


@runtime_checkable
class EvaluatesDetections(Protocol):
    """An evaluator of boxes or masks that has the details which `vitkit test` prints (--per-size, --thresholds ...)."""

    iou: float
    """Smallest IoU of a correct prediction, wherever predictions are counted at a score threshold."""
    iou_types: Sequence[str]
    """"bbox", "segm" or both; `named_statistics` has a `vitkit.evaluation.detection_statistics.DetectionStatistics` for
    each, which --thresholds reads."""

    def details(self) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        """Return the metrics of each class, and of each range of sizes, with the number of "objects" of each."""

    def results(self) -> list[dict[str, Any]]:
        """Return the predictions in the form of COCO's results files."""


@runtime_checkable
class ChecksArguments(Protocol):
    """A registered class that can check a config's arguments before it is built."""

    check_arguments: Callable[..., None]
    """Takes those of the config's arguments that it names as parameters; raises ConfigError."""


def require_base(kind: str, cls: type, base: type) -> None:
    """Check that a class of a user's derives from the base of its kind.

    Args:
        kind: what the class is, for the error ("dataset").
    Raises:
        ConfigError: it does not.
    """
    if not issubclass(cls, base):
        raise ConfigError(
            f"{kind} {cls.__name__} does not derive from vitkit.{base.__name__}, which has the defaults of what it may "
            f"leave out. Write: class {cls.__name__}(vitkit.{base.__name__})."
        )


def require_parts(evaluator: Evaluator, dataset: Dataset) -> None:
    """Check that a dataset has the attributes and methods that an evaluator needs.

    Raises:
        ConfigError: one of them is None, or the method of `Dataset` that only raises an error.
    """
    for name in evaluator.needs_dataset:
        value = getattr(dataset, name, None)
        if value is None or getattr(value, "__func__", value) is getattr(Dataset, name, None):
            part = f"{name}()" if callable(getattr(Dataset, name, None)) else name
            raise ConfigError(
                f"dataset {type(dataset).__name__} has no {part}, which evaluator {type(evaluator).__name__} needs. "
                "See class Dataset in vitkit/protocols.py."
            )


def child(module: nn.Module, name: str) -> nn.Module | None:
    """Return the submodule of that name, or None if the module has none."""
    return dict(module.named_children()).get(name)
