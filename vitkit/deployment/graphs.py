"""Models as functions of tensors by name: what an exported file takes and returns.

Images come as uint8 RGB, padded with zeros at the right and bottom; the graph normalises them. It includes those parts
of post-processing whose results have one shape for all images of a batch, but not masks at each image's own size.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.models.base import DensePredictionModel
from vitkit.models.classifier import Classifier
from vitkit.models.detr import DETR
from vitkit.models.eomt import EoMT
from vitkit.models.mask_classification import MaskClassification
from vitkit.models.per_pixel import PerPixelClassification
from vitkit.ops.boxes import scale_boxes
from vitkit.ops.images import float_statistics, normalize_images

Axes = Mapping[str, tuple[str | None, ...]]
"""Name of a tensor -> the name of each of its axes; None where its length never changes."""

IMAGES: Axes = {"images": ("batch", None, "height", "width")}
PADDED_IMAGES: Axes = {**IMAGES, "padding_mask": ("batch", "height", "width")}
FROM_MODEL = ("logits", "pred_logits", "pred_boxes", "pred_masks", "pred_semantic")
"""The model outputs that `postprocess` reads."""


class ExportGraph(nn.Module):
    """A model, or a part of one, as a function of named tensors.

    `forward` takes the inputs that `axes` lists, in that order.
    """

    axes: Axes

    def finish(self, outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the results that are computed from the model's outputs."""
        return {}


class _ImageGraph(ExportGraph):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.dtype = next(model.parameters()).dtype

    def predict(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's outputs in float32, and the results that are computed from them."""
        images, padding_mask = inputs["images"], inputs.get("padding_mask")
        statistics = float_statistics(self.model if isinstance(self.model, Classifier) else self.model.backbone)
        outputs = self.model(normalize_images(images, padding_mask, **statistics).to(self.dtype), padding_mask)
        outputs = {name: outputs[name].float() for name in FROM_MODEL if name in outputs}
        return outputs | self.finish(outputs, inputs)


class ClassifierGraph(_ImageGraph):
    """Returns logits and class_scores, (B, C); scores sum to 1."""

    axes = IMAGES

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Predict classes of images (B, 3, H, W)."""
        return self.predict(dict(images=images))

    def finish(self, outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the probabilities."""
        return {"class_scores": outputs["logits"].softmax(-1)}


class DetectorGraph(_ImageGraph):
    """Returns scores, labels (B, N) and boxes_xyxy (B, N, 4) in pixels of the original images.

    It also returns the outputs that these are computed from, pred_logits and pred_boxes, and from models with masks
    pred_masks (B, Q, h, w).
    """

    axes = {**PADDED_IMAGES, "image_sizes": ("batch", None)}

    def forward(self, images: Tensor, padding_mask: Tensor, image_sizes: Tensor) -> dict[str, Tensor]:
        """Detect objects.

        Args:
            images: (B, 3, H, W).
            padding_mask: (B, H, W) bool, True = padding.
            image_sizes: (B, 2) int64, height and width of the original images.
        """
        return self.predict(dict(images=images, padding_mask=padding_mask, image_sizes=image_sizes))

    def finish(self, outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the detections of all images as the model's `postprocess` computes them."""
        detections = self.model.detections(outputs)
        return dict(detections, boxes_xyxy=scale_boxes(detections["boxes_xyxy"], inputs["image_sizes"]))


class SegmenterGraph(_ImageGraph):
    """Returns pred_logits (B, Q, C + 1) and pred_masks (B, Q, h, w), or pred_semantic (B, C, h, w).

    For semantic models it also returns semantic (B, H, W) int64, the class of every pixel of the input images.
    """

    axes = PADDED_IMAGES

    def forward(self, images: Tensor, padding_mask: Tensor) -> dict[str, Tensor]:
        """Segment images (B, 3, H, W); padding_mask is (B, H, W) bool, True = padding."""
        return self.predict(dict(images=images, padding_mask=padding_mask))

    def finish(self, outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the semantic map, if the model predicts one."""
        if "semantic" not in self.model.tasks:
            return {}
        height, width = inputs["images"].shape[-2:]
        multiple = mask_multiple(self.model)
        size = (height + -height % multiple, width + -width % multiple)
        maps = outputs["pred_masks"] if "pred_masks" in outputs else outputs["pred_semantic"]
        maps = F.interpolate(maps, size=size, mode="bilinear", align_corners=False)[..., :height, :width]
        if "pred_masks" in outputs:
            probabilities = outputs["pred_logits"].softmax(-1)[..., :-1]
            maps = torch.einsum("bqc,bqhw->bchw", probabilities, maps.sigmoid())
        return {"semantic": maps.argmax(1)}


def mask_multiple(model: DensePredictionModel | EoMT) -> int:
    """Return the number of pixels to a multiple of which masks pad the image's height and width."""
    if isinstance(model, EoMT):  # its files take images that already have the size that it pads to
        return 1
    stride = model.stride if isinstance(model, PerPixelClassification) else 1
    return math.lcm(model.padding_multiple, stride)


_GRAPHS = {
    Classifier: ClassifierGraph,
    DETR: DetectorGraph,
    MaskClassification: SegmenterGraph,
    EoMT: SegmenterGraph,
    PerPixelClassification: SegmenterGraph,
}


def image_graph(model: nn.Module) -> ExportGraph:
    """Return the graph of an image model.

    Raises:
        ConfigError: no graph is defined for this kind of model.
    """
    for kind, graph in _GRAPHS.items():
        if isinstance(model, kind):
            return graph(model)
    raise ConfigError(
        f"export: no graph is defined for {type(model).__name__}; expected one of "
        f"{', '.join(kind.__name__ for kind in _GRAPHS)}, a captioner or a translator."
    )
