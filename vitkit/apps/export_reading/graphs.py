"""Models as functions of named tensors: the inputs and outputs of an exported file.

Images come as uint8 RGB, padded with zeros at the right and bottom; the graph normalizes them. It includes those parts
of post-processing whose results have one shape for all images of a batch, but not masks at each image's own size.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.models.base import statistics_owner
from vitkit.ops.boxes import scale_boxes
from vitkit.ops.images import float_statistics, normalize_images, padding_to_multiple
from vitkit.ops.keypoints import keypoints_in_pixels
from vitkit.ops.masks import mask_logits
from vitkit.protocols.model import Model

Axes = Mapping[str, tuple[str | None, ...]]
"""Name of a tensor -> the name of each of its axes; None where its length never changes."""

IMAGES: Axes = {"images": ("batch", None, "height", "width")}
PADDED_IMAGES: Axes = {**IMAGES, "padding_mask": ("batch", "height", "width")}
FROM_MODEL = ("logits", "pred_logits", "pred_boxes", "pred_masks", "pred_keypoints", "keypoint_groups", "pred_semantic")
"""The model outputs that `postprocess` reads."""


@runtime_checkable
class OffersExportGraph(Protocol):
    """A model that defines the inputs and outputs of its exported file; see vitkit/apps/export_writing/README.md."""

    def export_graph(self) -> nn.Module:
        """Return an `ExportGraph` of the model, such as `ImageGraph(self)`."""


class ExportGraph(nn.Module):
    """A model, or a part of one, as a function of named tensors.

    `forward` takes the inputs that `axes` lists, as keywords, and returns a dict of float32 or integer tensors.
    """

    axes: Axes
    outputs: Sequence[str] = ()
    """Names of the outputs that the model's `postprocess` reads; empty: all."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    @property
    def dtype(self) -> torch.dtype:
        """The type that the model computes in."""
        return next(self.model.parameters()).dtype

    def finish(self, outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the results that are computed from the model's outputs."""
        return {}


class ImageGraph(ExportGraph):
    """A model of images, whose outputs are those that its `postprocess` reads.

    Args:
        model: takes images and padding masks, as `DensePredictionModel` does; its backbone, or the model itself, has
            the pixel statistics.
        outputs: names of the outputs to return. Those that the model lacks are ignored.
    """

    axes = PADDED_IMAGES

    def __init__(self, model: nn.Module, *, outputs: Sequence[str] = FROM_MODEL):
        super().__init__(model)
        self.outputs = tuple(outputs)

    def forward(
        self, images: Tensor, padding_mask: Tensor | None = None, image_sizes: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the model's outputs in float32, and the results that are computed from them.

        Args:
            images: (B, 3, H, W) uint8 RGB; with other channels, (B, C, H, W) uint16.
            padding_mask: (B, H, W) bool, True = padding.
            image_sizes: (B, 2) int64, height and width of the original images.
        """
        pixels = images  # which the model normalizes itself, in float32
        if self.dtype != torch.float32:
            statistics = float_statistics(statistics_owner(self.model))
            pixels = normalize_images(images, padding_mask, **statistics).to(self.dtype)
        masks = () if padding_mask is None else (padding_mask,)
        outputs = self.model(pixels, *masks)
        if "pred_masks" not in outputs and "mask_embed" in outputs:
            outputs["pred_masks"] = mask_logits(outputs["mask_embed"], outputs["mask_features"])
        outputs = {name: outputs[name].float() for name in self.outputs if name in outputs}
        return outputs | self.finish(outputs, dict(images=images, image_sizes=image_sizes))


class ClassifierGraph(ImageGraph):
    """A classifier, whose graph also returns class_scores (B, C), which sum to 1."""

    axes = IMAGES

    def finish(self, outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the probabilities."""
        return {"class_scores": outputs["logits"].softmax(-1)}


class DetectorGraph(ImageGraph):
    """A detector, whose graph also returns scores, labels (B, N) and boxes_xyxy (B, N, 4) in pixels of the original
    images.

    Models with masks, pred_masks (B, Q, h, w), also return queries (B, N), the query that each detection is from. With
    keypoints, these are (B, N, K, 3): x and y in pixels of the original images, and confidences.
    """

    axes = {**PADDED_IMAGES, "image_sizes": ("batch", None)}

    def finish(self, outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the detections of all images as the model's `postprocess` computes them."""
        best = self.model.detections(outputs)
        scores, labels, boxes_xyxy, queries = best
        detections = dict(scores=scores, labels=labels, boxes_xyxy=scale_boxes(boxes_xyxy, inputs["image_sizes"]))
        if self.model.keypoints is not None:
            detections["keypoints"] = keypoints_in_pixels(self.model.keypoints(outputs, best), inputs["image_sizes"])
        return detections | dict(queries=queries) if "pred_masks" in outputs else detections


class SegmenterGraph(ImageGraph):
    """A segmenter, whose graph returns pred_logits (B, Q, C + 1) and pred_masks (B, Q, h, w), or pred_semantic (B, C,
    h, w).

    For semantic models it also returns semantic (B, H, W) int64, the class of every pixel of the input images; for
    models of instances scores, labels and queries (B, N), of which `postprocess` makes the instances.
    """

    def finish(self, outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the semantic map and the candidates for instances, if the model predicts them."""
        results = {}
        if "instance" in self.model.tasks:
            probabilities = outputs["pred_logits"].softmax(-1)[..., :-1]
            pairs, num_classes = probabilities.flatten(1), probabilities.shape[-1]
            scores, best = pairs.topk(min(self.model.num_instances, pairs.shape[1]), dim=1)
            results = dict(scores=scores, labels=best % num_classes, queries=best // num_classes)
        if "semantic" in self.model.tasks:
            results["semantic"] = self._semantic(outputs, inputs["images"])
        return results

    def _semantic(self, outputs: Mapping[str, Tensor], images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        multiple = self.model.mask_multiple
        size = (height + padding_to_multiple(height, multiple), width + padding_to_multiple(width, multiple))
        maps = outputs["pred_masks"] if "pred_masks" in outputs else outputs["pred_semantic"]
        maps = F.interpolate(maps, size=size, mode="bilinear", align_corners=False)[..., :height, :width]
        if "pred_masks" in outputs:
            probabilities = outputs["pred_logits"].softmax(-1)[..., :-1]
            maps = torch.einsum("bqc,bqhw->bchw", probabilities, maps.sigmoid())
        return maps.argmax(1)


def image_graph(model: nn.Module) -> ExportGraph:
    """Return the graph of an image model: its own, if it has one, or the one that fits its outputs.

    Raises:
        ConfigError: the model offers no graph, and none is defined for what it takes and returns.
    """
    if isinstance(model, OffersExportGraph):
        return model.export_graph()
    if isinstance(model, Model) and set(model.takes) == {"images"}:
        if "class_scores" in model.returns:
            return ClassifierGraph(model)
        if model.detections is not None:
            return DetectorGraph(model)
        if model.classifies_masks or "semantic" in model.returns:
            return SegmenterGraph(model)
        if "features" in model.returns:
            raise ConfigError(
                f"export: {type(model).__name__} trains a backbone for other models. Train one of these with "
                "model.backbone.pretrained and the run's folder, and export that."
            )
    raise ConfigError(
        f"export: no graph is defined for {type(model).__name__}; expected a model of images that returns class "
        "scores, detections or masks of a fixed number of queries, or semantic maps, a captioner or a translator. Give "
        "the model a method export_graph, see vitkit/apps/export_writing/README.md."
    )
