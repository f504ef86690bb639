"""Base classes of models for dense prediction: their construction, and the preparation of images for the backbone."""

import hashlib
import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.backbones.base import check_feature_info
from vitkit.errors import ConfigError, DataError
from vitkit.nn.attention import MultiHeadAttention
from vitkit.nn.queries import QueryHead, run_with_training_queries
from vitkit.ops.detections import BatchDetections, best_pairs, in_pixels, suppress_duplicates
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD, normalize_images, pad_to_multiple, pixel_statistics
from vitkit.protocols.backbone import Backbone, Neck, with_defaults
from vitkit.protocols.model import Model, child
from vitkit.registry import BACKBONES, HEADS, NECKS, Spec, nearest
from vitkit.structures import AttentionLayers, Detections, DetectionTarget

logger = logging.getLogger("vitkit")
Part = Spec | nn.Module
"""A part of a model: its spec, or the module."""


class ModelOnBackbone(Model):
    """Base of models with a backbone."""

    backbone: nn.Module

    def attention_layers(self) -> AttentionLayers:
        """Return the attention of a plain transformer as backbone."""
        return AttentionLayers(encoder=with_defaults(self.backbone, Backbone).global_attention())


class DensePredictionModel(ModelOnBackbone):
    """A model of backbone, neck and head.

    Images are (B, 3, H, W), uint8 RGB, zero-padded at the right and bottom; or float, already normalized by ImageNet's
    mean and standard deviation, even if the backbone's differ. For a backbone with other `in_channels` they have that
    many channels, uint16 or uint8, or float, already normalized by the backbone's. Their padding mask is (B, H, W)
    bool, True = padding; None if no image is padded. A DataError is raised for images with other channels, or smaller
    than one location of the coarsest map.

    Args:
        backbone, neck, head: spec or module.
        num_classes: number of classes, in the form that the head takes; None for a head without classes.
        num_queries: for heads with queries, their number.
        num_keypoints: for heads with keypoints, their number.
        training_queries: specs of queries that exist in training only, see `vitkit.training_queries`.
        isolate_padding: in the original models, padding leaks into an image through convolutions, norms and resizing,
            so that results depend on the other images in the batch; official metrics include this. True prevents it: an
            image's results are then the same, except for rounding, on its own and in any batch (but for DINO, whose
            queries' positions are those in the padded map).
    Raises:
        ConfigError: `isolate_padding` is set but the backbone or the neck does not support it, or the backbone's
            `feature_info` does not match its outputs.
    """

    needs_all_features = False
    """Whether the model itself reads maps of the backbone that the neck does not read."""
    size_divisibility = 1
    """Images are padded with zeros to a multiple of this; the padding counts as part of the image."""

    learned_queries = (
        *("head.query_embed.weight", "head.reference_boxes.weight", "head.query_feat.weight"),
        *("head.proposals.content.weight", "training_queries.groups.embed.weight"),
    )

    def __init__(
        self,
        backbone: Part,
        neck: Part,
        head: Part,
        *,
        num_classes: int | None,
        num_queries: int | None = None,
        num_keypoints: int | None = None,
        training_queries: Sequence[Spec] = (),
        isolate_padding: bool = False,
    ):
        super().__init__()
        self.backbone = BACKBONES.build(backbone)
        check_feature_info(self.backbone)
        if isolate_padding and "padding_mask" not in inspect.signature(self.backbone.forward).parameters:
            raise ConfigError(
                f"isolate_padding=True: backbone {type(self.backbone).__name__} does not accept a padding mask, so "
                "its kernels would carry padding into the image. Set model.isolate_padding=False or choose a ResNet."
            )
        isolated = {"isolate_padding": True} if isolate_padding else {}
        self.neck = NECKS.build(neck, feature_info=self.backbone.feature_info, **isolated)
        in_features = with_defaults(self.neck, Neck).in_features
        if in_features is not None and not self.needs_all_features:
            with_defaults(self.backbone, Backbone).keep_features(in_features)
        sizes = {"num_classes": num_classes, "num_queries": num_queries, "num_keypoints": num_keypoints}
        sizes = {name: size for name, size in sizes.items() if size is not None}
        self.head = HEADS.build(head, feature_info=self.neck.feature_info, **sizes)
        self.training_queries = None
        self.add_training_queries(training_queries, num_classes)
        self.isolate_padding = isolate_padding
        # If strides divide the size, an image's part of a map does not depend on the amount of padding.
        strides = [info.stride for info in self.neck.feature_info.values()]
        self.padding_multiple = max(strides) if isolate_padding else 1
        """Images are padded to multiples of this, in pixels."""

    def add_training_queries(self, specs: Sequence[Spec], num_classes: int | None) -> None:
        """Build the queries that exist in training only; `num_classes` is the number of their labels."""
        if specs:
            from vitkit.training_queries.build import build_training_queries  # models without them never import it

            self.training_queries = build_training_queries(specs, self.head, num_classes)

    @property
    def mask_multiple(self) -> int:
        """The multiple, in pixels, to which images are padded under masks."""
        return self.padding_multiple

    def attention_layers(self) -> AttentionLayers:
        """Return the self-attention of the head's or the neck's `encoder.layers`, or else of a plain transformer as
        backbone, and the cross-attention of the head's `decoder.layers`, or of its own `layers`."""
        encoders = (attention_in(child(part, "encoder"), "self_attn") for part in (self.head, self.neck))
        # Deformable encoders attend to sampled points, not to all locations.
        encoder = next((e for e in encoders if e and all(isinstance(m, MultiHeadAttention) for m in e)), None)
        decoder = child(self.head, "decoder") or self.head
        layers = AttentionLayers(encoder or super().attention_layers().encoder, attention_in(decoder, "cross_attn"))
        if not isinstance(self.head, QueryHead):
            return layers
        return layers._replace(
            level_names=self.head.level_names,
            masked=tuple(decoder.layers) if self.head.attends_in_masks else (),
            rounds_padding=self.head.rounds_padding,
        )

    def postprocess_settings(self) -> dict[str, Any]:
        """Return the tasks, and the multiple of pixels to which images are padded under masks."""
        return {"tasks": list(self.tasks), "mask_multiple": self.mask_multiple}

    @property
    def uses_targets(self) -> bool:
        """Whether `forward` needs the targets in training."""
        return self.training_queries is not None

    def prepare(self, images: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Normalize images and pad them as the model requires; if padding is isolated, a mask is always returned."""
        images = normalize_images(images, padding_mask, **pixel_statistics(self.backbone))
        stride = max(info.stride for info in self.neck.feature_info.values())
        height, width = images.shape[-2:]
        # An image that covers one location in at least one direction is unusual, but can be processed.
        if height < stride and width < stride:
            raise DataError(
                f"{type(self).__name__}: images of {height}x{width} pixels are smaller than one "
                f"location of the coarsest map (stride {stride}). Resize them, or leave coarse maps out "
                "(model.backbone.out_features, model.neck)."
            )
        if self.isolate_padding and padding_mask is None:
            padding_mask = images.new_zeros(images.shape[0], height, width, dtype=torch.bool)
        if self.padding_multiple > 1:
            images, padding_mask = pad_to_multiple(images, padding_mask, self.padding_multiple)
        if self.isolate_padding:
            padding_mask = without_divisibility_padding(padding_mask, self.size_divisibility)
        return images, padding_mask

    def backbone_maps(self, images: Tensor, padding_mask: Tensor | None) -> dict[str, Tensor]:
        """Return the backbone's maps of prepared images; it receives the padding mask only if padding is isolated."""
        return self.backbone(images, padding_mask) if self.isolate_padding else self.backbone(images)

    def run_head(
        self,
        features: Mapping[str, Tensor],
        padding_mask: Tensor | None,
        targets: Sequence[DetectionTarget] | None = None,
    ) -> dict[str, Any]:
        """Return the head's outputs; with targets, in training, also those of the training queries."""
        if targets is None:
            return self.head(features, padding_mask)
        kinds = self.training_queries.values()
        return run_with_training_queries(self.head, kinds, features, padding_mask, targets)

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Adapt weights that were trained with other training queries, or without any, in place: their entries are
        dropped, and the model's own keep their initial values."""
        start = f"{prefix}training_queries."
        # Layers whose first size is the number of classes are replaced elsewhere, if the classes differ.
        heads = tuple(prefix + head for head in self.class_head)
        initial = {} if self.training_queries is None else self.training_queries.state_dict(prefix=start)
        for part in {key.removeprefix(start).partition(".")[0] for key in (*initial, *state) if key.startswith(start)}:
            ours = {key: value for key, value in initial.items() if key.startswith(f"{start}{part}.")}
            theirs = [key for key in state if key.startswith(f"{start}{part}.")]
            shapes = [
                {key: value.shape[key.startswith(heads) :] for key, value in entries.items()}
                for entries in ({key: state[key] for key in theirs}, ours)
            ]
            if shapes[0] == shapes[1]:
                continue
            if ours:
                difference = "has another shape in the weights" if theirs else "is not in the weights"
                logger.info("%s%s is used only in training, and %s: it is newly initialized", start, part, difference)
            for key in theirs:
                del state[key]


class Detector(DensePredictionModel):
    """Base of models that predict class logits and a box per query."""

    returns = ("boxes_xyxy",)

    def forward(
        self, images: Tensor, padding_mask: Tensor | None = None, targets: Sequence[DetectionTarget] | None = None
    ) -> dict[str, Any]:
        """Predict a box and class logits per query.

        Args:
            targets: only in training, see `uses_targets`.
        Returns:
            the head's outputs:
            pred_logits: (B, Q, num_classes), a sigmoid per class; or (B, Q, num_classes + 1) for a softmax, the last
                class being "no object".
            pred_boxes: (B, Q, 4) cxcywh in 0..1 of the unpadded image.
            aux_outputs: the same two for each decoder layer but the last, first layer first.
            training_outputs: of a first stage and of training queries, if there are any: a list, see `QuerySet`.
        """
        images, padding_mask = self.prepare(images, padding_mask)
        features = self.neck(self.backbone_maps(images, padding_mask), padding_mask)
        return self.run_head(features, padding_mask, targets)

    def detections(self, outputs: Mapping[str, Tensor]) -> BatchDetections:
        """Return the detections of all images, relative to the unpadded image, without a threshold of their scores."""
        raise NotImplementedError

    def postprocess(self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[Detections]:
        """Return the detections of each image, in pixels of the original image."""
        return in_pixels(self.detections(outputs), image_sizes)


class QueryDetector(Detector):
    """Base of detectors with a sigmoid per class, whose detections are the best pairs of a query and a class; with a
    mask each if the head predicts masks (model.head.masks).

    Args:
        backbone, neck, head: spec or module.
        num_queries: number of boxes predicted per image.
        num_classes: number of classes; a run sets its dataset's.
        num_detections: number of detections per image.
        nms_iou: detections that overlap a better one of their class by more than this IoU get the score 0; None leaves
            them, as in the papers. It helps after short training, when queries still find objects twice; see
            configs/bccd/dino_r18.py.
        options: `num_keypoints`, `training_queries` and `isolate_padding`, see `DensePredictionModel`.
    Raises:
        ConfigError: a number is out of range; see `DensePredictionModel`.
    """

    class_head = ("head.class_embed.", "head.proposals.class_embed.", "training_queries.denoising.label_embed.")
    class_activation = "sigmoid"

    def __init__(
        self,
        backbone: Part,
        neck: Part,
        head: Part,
        *,
        num_queries: int = 300,
        num_classes: int = 80,
        num_detections: int = 300,
        nms_iou: float | None = None,
        **options: Any,
    ):
        super().__init__(backbone, neck, head, num_classes=num_classes, num_queries=num_queries, **options)
        check_detections(num_detections, nms_iou)
        self.num_detections, self.nms_iou = num_detections, nms_iou
        if self.mask_head is not None:
            self.returns, self.tasks = (*self.returns, "masks"), ("instance",)
            self.new_parts = (*self.new_parts, "head.mask_head.")  # training may start from a model without masks

    @property
    def mask_head(self) -> nn.Module | None:
        """What predicts the masks, see `QueryHead.add_masks`; None: there are no masks."""
        return child(self.head, "mask_head")

    @property
    def mask_multiple(self) -> int:
        """See `DensePredictionModel`: masks are made from the finest map."""
        finest = min(info.stride for info in self.neck.feature_info.values())
        return self.padding_multiple if self.mask_head is None else math.lcm(self.padding_multiple, finest)

    def forward(
        self, images: Tensor, padding_mask: Tensor | None = None, targets: Sequence[DetectionTarget] | None = None
    ) -> dict[str, Any]:
        """Predict a box and class logits per query, and the factors of a mask if the head predicts masks.

        Returns:
            those of `Detector`, and for masks
            mask_embed, mask_features: factors of the masks of all queries, (B, Q, C) and (B, C, h, w), see
                `QueryHead.with_masks`; also in aux_outputs and training_outputs.
            input_size: (height, width) that the masks cover.
            image_sizes: (B, 2) int64, height and width of each image without padding.
        """
        outputs = super().forward(images, padding_mask, targets)
        if self.mask_head is None:
            return outputs
        from vitkit.models.query_masks import mask_sizes  # detectors of boxes alone never import it

        return outputs | mask_sizes(images, padding_mask, self.mask_multiple)

    def postprocess(self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[Detections]:
        """Return the detections of each image, in pixels of the original image; masks are (N, H, W) bool."""
        if self.mask_head is None:
            return super().postprocess(outputs, image_sizes)
        return [{**found, "masks": found["masks"][:]} for found in self._with_masks(outputs, image_sizes)]  # type: ignore[typeddict-item]

    def postprocess_lazily(
        self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]
    ) -> Sequence[Mapping[str, Any]]:
        """See `Model`: masks are `QueryMasks`."""
        if self.mask_head is None or type(self).postprocess is not QueryDetector.postprocess:
            return self.postprocess(outputs, image_sizes)
        return self._with_masks(outputs, image_sizes)

    def _with_masks(self, outputs: Mapping[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        from vitkit.models.query_masks import with_masks  # detectors of boxes alone never import it

        return with_masks(self.detections(outputs), outputs, image_sizes, results=self.mask_head.results)

    def postprocess_settings(self) -> dict[str, Any]:
        """Return how masks are resized, in addition; see `DensePredictionModel`."""
        settings = super().postprocess_settings()
        return settings if self.mask_head is None else settings | {"masks": self.mask_head.results}

    def detections(self, outputs: Mapping[str, Tensor]) -> BatchDetections:
        """Return the best pairs of a query and a class, best first; a query may be returned with several classes."""
        best = best_pairs(outputs["pred_logits"], outputs["pred_boxes"], self.num_detections)
        return suppress_duplicates(best, self.nms_iou)


def network_key(backbone: nn.Module, feature: str) -> int:
    """Return a fingerprint of a backbone's weights and pixel statistics and of a map's name: 63 bits of a SHA-256."""
    digest = hashlib.sha256(f"{type(backbone).__name__} {feature}".encode())
    statistics = pixel_statistics(backbone)
    if statistics and statistics != dict(mean=IMAGENET_MEAN, std=IMAGENET_STD):
        digest.update(repr(statistics).encode())
    for name, value in sorted(backbone.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def attention_in(stack: nn.Module | None, name: str) -> list[nn.Module]:
    """Return the attention modules of this name in a stack's `layers`; an empty list unless every layer has one."""
    layers = None if stack is None else child(stack, "layers")
    modules = [child(layer, name) for layer in layers or ()]
    return modules if None not in modules else []


def statistics_owner(model: nn.Module) -> nn.Module:
    """Return the module that has the mean and standard deviation of a model's pixels: the model itself if it states
    them or has no backbone, or else its backbone."""
    backbone = child(model, "backbone")
    return model if backbone is None or hasattr(model, "pixel_mean") else backbone


def without_divisibility_padding(padding_mask: Tensor, size: int) -> Tensor:
    """Count the padding of each image to a multiple of `size` as part of it: (B, H, W) bool, True = padding."""
    if size == 1:
        return padding_mask
    free = F.max_pool2d((~padding_mask).float(), size)
    return free.repeat_interleave(size, 1).repeat_interleave(size, 2) == 0


def check_detections(num_detections: int, nms_iou: float | None) -> None:
    """Raise ConfigError if the arguments of `best_pairs` and `suppress_duplicates` are out of range."""
    if num_detections < 1:
        raise ConfigError(f"num_detections={num_detections}: expected at least 1.")
    if nms_iou is not None and not 0 < nms_iou < 1:
        raise ConfigError(f"nms_iou={nms_iou}: expected a number between 0 and 1, or None for no suppression.")


def check_tasks(tasks: Sequence[str], choices: Sequence[str]) -> None:
    """Raise ConfigError if a task is unknown."""
    for task in tasks:
        if task not in choices:
            raise ConfigError(f"tasks: unknown task {task!r}. {nearest(task, choices)}")
