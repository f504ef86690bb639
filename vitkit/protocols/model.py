"""The interfaces of models and of the heads that they predict with."""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.structures import AttentionLayers

logger = logging.getLogger("vitkit")


ObjectField = Literal["boxes_xyxy", "masks", "keypoints", "phrases"]
ImageField = Literal["class_scores", "semantic", "panoptic", "features"]
"""Fields of predictions, of each object and of the image as a whole."""


class Head(Protocol):
    """Predicts from a neck's maps; registered in HEADS, built with `feature_info` and `num_classes`, and with
    `num_queries` if its model has that argument.

    Maps are (B, channels, h, w). With a padding mask, (B, H, W) bool at the size of the images with True = padding, no
    query attends to padding. A head with queries derives from `vitkit.nn.queries.QueryHead`, so that a config can add
    queries in training. The example is configs/examples/conditional_detr/head.py.
    """

    def __call__(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Any]:
        """Return the outputs that the model's criterion and `postprocess` read."""


class Model(nn.Module):
    """Base of the models in MODELS: `model(**batch.inputs)` returns outputs for a criterion, a dict by field name.

    An evaluated model is a `DenseModel` or a `GenerativeModel`, unless its evaluator `takes_outputs`. Nothing else asks
    for a model's class: it says by `takes` and `returns`, on the class or in the constructor, what kind it is.
    """

    takes: Sequence[Literal["images", "text", "source", "tokens"]] = ("images",)
    """The inputs that a prediction is made from, by their names in `batch.inputs`: "images"; "text", a list with
    what to look for in each image: a text, its phrases, or a `vitkit.text.prompts.Caption` (such a model is also a
    `vitkit.models.text_prompted.TextPrompted`); "source", the tokens of a text that another is written from; "tokens",
    those of a text that is continued or whose masks are filled."""
    returns: Sequence[ObjectField | ImageField | Literal["text", "masked_tokens"]] = ()
    """What its predictions have, by their fields (vitkit/structures.py), "masked_tokens" for a model that fills masks,
    and "features" for one whose only output is a vector of each image; empty: it does not say, and is taken for a
    detector."""
    class_head: Sequence[str] = ()
    """Prefixes of the names of the parameters whose size depends on the number of classes."""
    learned_queries: Sequence[str] = ()
    """Names of the parameters with a row for each query; those of training queries, for each query of each group."""
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
    mask_ratio: float | None = None
    """Fraction of an image's patches that it removes and reconstructs, for a model that learns by this: it has
    `norm_pix` and `reconstruct`, see `vitkit.models.mae.MAE`."""
    detections: Callable[[Mapping[str, Any]], tuple[Tensor, Tensor, Tensor, Tensor]] | None = None
    """Takes the outputs and returns detections of one shape for all images, so that an exported file can include them:
    scores and labels (B, N), boxes_xyxy (B, N, 4) in 0..1 of the unpadded image, and the query that each detection is
    from, (B, N) int64; see `vitkit.ops.detections.BatchDetections`. None: it has none."""
    keypoints: Callable[[Mapping[str, Any], Any], Tensor] | None = None
    """Takes outputs and detections; returns their keypoints (B, N, K, 3), x and y in 0..1, and confidence; or None."""
    freeze_backbone: bool = False
    """Whether its backbone is not trained."""
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

    trained_backbone: nn.Module | None = None
    """The backbone that a run without labels trains for other models, whose weights it writes; None: it trains all."""
    student_backbone: str | None = None
    """The name of the backbone that the optimizer changes, if `backbone` is a teacher that follows it; None: that is
    `backbone`."""

    uses_targets: bool = False
    """Whether `forward` also takes `targets` in training, the same as the criterion's, for queries that are
    made from them."""

    def encode_shared(self, inputs: Mapping[str, Any], kept: dict[str, Any]) -> Mapping[str, Any]:
        """Return the inputs of a batch with what batches of an evaluation share encoded once; it stays in `kept`, which
        is empty for the first batch."""
        return inputs

    is_fused: bool = False
    """Whether `fuse` has been called."""

    def fuse(self) -> "Model":
        """Prepare for inference, in place: fold norms and learned scales into the convolutions before them, merge
        branches, and keep weights in the order of the processor's kernels. Outputs are the same except for rounding,
        and the model can no longer be trained, or saved as a state dict; its parameters require no gradients. Weights
        that are changed in place after its first batch are not noticed.

        Modules without a method `fused`, such as those of a user's own backbone, are left as they are, and so are those
        with hooks; see `vitkit.protocols.fusing`.

        Raises:
            ConfigError: the model or a part is in training mode, or it is fused already; it has weights that are not
                finite or without values, or variances below 0; or a module's `fused` returns no module, and the model
                is fused in part.
        """
        from vitkit.protocols import fusing  # read only when a model is fused

        fusing.check_fusible(self)
        backbone = child(self, "backbone")
        count = fusing.count_norms(backbone)
        self.is_fused = True  # in part, also if a module's `fused` fails
        with torch.no_grad():
            fusing.fuse_parts(self)
        self.eval().requires_grad_(False)  # new modules begin in training mode
        if backbone is not None and not fusing.fuses(backbone) and (left := fusing.count_norms(backbone)):
            fusing.warn_of_norms(type(backbone).__name__, left, count)
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
        """Return its attention layers; none by default, besides those of its backbone."""
        return AttentionLayers()

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

    def postprocess_lazily(
        self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]
    ) -> Sequence[Mapping[str, Any]]:
        """Return a `DenseModel`'s predictions, whose masks may be made only when they are asked for by index."""
        assert isinstance(self, DenseModel)
        return self.postprocess(outputs, image_sizes)

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


@runtime_checkable
class DenseModel(Protocol):
    """A model of images whose predictions are computed from its outputs in one step."""

    def postprocess(self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """Return each image's predictions in pixels of the original, whose (height, width) is in `image_sizes`."""


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


def child(module: nn.Module, name: str) -> nn.Module | None:
    """Return the submodule of that name, or None if the module has none."""
    return dict(module.named_children()).get(name)
