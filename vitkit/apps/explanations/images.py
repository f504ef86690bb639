"""Attention of a model in an image: of locations and queries, with the prediction of each query."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.apps.explanations.drawing import (
    QueryAttention,
    QueryLayer,
    draw_decoder_attention,
    draw_encoder_attention,
    draw_sampling_points,
)
from vitkit.apps.explanations.regions import attention_ratio, box_region, sampling_ratio
from vitkit.apps.explanations.sampling import SamplingRecorder
from vitkit.apps.inference.predictor import Predictor
from vitkit.errors import ConfigError
from vitkit.io.channel_files import as_rgb
from vitkit.nn.attention import AttentionRecorder, MultiHeadAttention
from vitkit.nn.deformable_attention import MultiScaleDeformableAttention
from vitkit.ops.boxes import cxcywh_to_xyxy, scale_boxes
from vitkit.ops.images import resize_mask
from vitkit.ops.masks import boxes_around_masks, masks_of_queries
from vitkit.protocols.model import Model, child
from vitkit.structures import AttentionLayers, ScoreThresholds

Size = tuple[int, int]
"""(height, width)."""
Point = tuple[float, float]
"""(x, y) in pixels of the image."""


@dataclass(frozen=True)
class View:
    """A model's outputs for one image, and the records of its forward pass."""

    model: Model
    classes: Sequence[str]
    image: np.ndarray
    """(H, W, 3) uint8 RGB, the image."""
    outputs: dict[str, Any]
    records: dict[str, list]
    """Module name -> what the recorder kept of each of its calls."""
    feature_sizes: Mapping[str, Size]
    """Name -> (height, width) of each feature map of the neck, or of the backbone if there is no neck."""
    image_size: Size
    """(height, width) of the image as it was prepared for the model."""
    padded_size: Size
    """(height, width) of the backbone's input, which some models pad to a multiple of the stride."""

    @property
    def covered(self) -> tuple[float, float]:
        """Height and width of the backbone's input relative to those of the image in it; 1 without padding."""
        return self.padded_size[0] / self.image_size[0], self.padded_size[1] / self.image_size[1]

    def class_scores(self, layer: Mapping[str, Any] | None = None) -> Tensor:
        """Return the queries' class scores, (Q, classes) in 0..1, in the order of the queries.

        Args:
            layer: the outputs of an earlier layer; None: the model's own.
        """
        # What is the same in all layers, such as the prompt, stands only in the model's outputs.
        outputs = {**self.outputs, **(layer or {})}
        return self.model.query_scores(outputs, len(self.classes))[0].cpu()

    def crop(self, masks: Tensor) -> Tensor:
        """Crop maps (..., h, w) over the backbone's input to the image, in float32 on the CPU."""
        height, width = (math.ceil(n / factor) for n, factor in zip(masks.shape[-2:], self.covered))
        return masks[..., :height, :width].float().cpu()

    def compute_covered_at(self, feature: str) -> tuple[float, float]:
        """Return `covered` for a feature map of the neck, where the padding is rounded to the map's locations."""
        padding_mask = torch.ones(1, *self.padded_size, dtype=torch.bool)
        padding_mask[:, : self.image_size[0], : self.image_size[1]] = False
        return compute_covered(resize_mask(padding_mask, self.feature_sizes[feature]))


def compute_covered(padding_mask: Tensor) -> tuple[float, float]:
    """Return the height and width of a padding mask (1, H, W) relative to those of its image; 1 without padding."""
    image = ~padding_mask[0]
    return len(image) / int(image[:, 0].sum()), image.shape[1] / int(image[0].sum())


@torch.no_grad()
def record(predictor: Predictor, image: np.ndarray, recorder: AttentionRecorder | SamplingRecorder) -> View:
    """Run the model under a recorder on an image (H, W, 3), prepared like the validation data."""
    model = predictor.model
    batch = predictor.prepare([image]).to(predictor.device)
    padded_sizes: list[Size] = []
    maps: dict[str, Tensor] = {}
    # Some models call a ViT's patch embedding and blocks themselves, without the backbone's forward.
    watched = [model.backbone, child(model.backbone, "patch_embed")]
    hooks = [
        module.register_forward_pre_hook(lambda _, args: padded_sizes.append(tuple(args[0].shape[-2:])))
        for module in watched
        if module is not None
    ]
    owner = child(model, "neck") or model.backbone

    def keep_maps(_: nn.Module, args: tuple, output: Mapping[str, Tensor] | Tensor) -> None:
        maps.update(output if isinstance(output, Mapping) else {})  # a classifier's backbone returns logits

    hooks.append(owner.register_forward_hook(keep_maps))
    try:
        with recorder as records:
            outputs = model(**predictor.inputs_of(batch, model))
    finally:
        for hook in hooks:
            hook.remove()
    feature_sizes = {name: tuple(feature.shape[-2:]) for name, feature in maps.items()}
    outputs = outputs if isinstance(outputs, Mapping) else {}
    image_size = tuple(batch.inputs["images"].shape[-2:])
    sizes = feature_sizes, image_size, padded_sizes[0]
    return View(model, predictor.classes, as_rgb(image), dict(outputs), records, *sizes)


def attention_layers(model: nn.Module) -> AttentionLayers:
    """Return where a model says that its attention lies; nothing for a backbone."""
    return model.attention_layers() if isinstance(model, Model) else AttentionLayers()


def encoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the self-attention modules over a feature map, layer by layer; an empty list if the model has none."""
    return list(attention_layers(model).encoder)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules with which queries attend to the image, layer by layer; an empty list if there are none, or
    some whose weights cannot be recorded."""
    layers = attention_layers(model)
    if layers.num_joint_queries:
        return list(layers.decoder)
    for kind in (MultiHeadAttention, MultiScaleDeformableAttention):
        if all(isinstance(module, kind) for module in layers.decoder):
            return list(layers.decoder)
    return []


def samples_points(model: nn.Module) -> bool:
    """Whether queries attend to sampled points, as in Deformable DETR, rather than to every location, as in DETR.

    Raises:
        ConfigError: the model has no attention to the image that can be drawn.
    """
    decoder = decoder_layers(model)
    if not decoder and not encoder_layers(model):
        parts = [type(part).__name__ for part in (child(model, "backbone"), child(model, "head")) if part is not None]
        raise ConfigError(
            f"{' with '.join(parts) or type(model).__name__} has no attention in the image that can be drawn: expected "
            "queries that attend to the image (DETRHead, DeformableDETRHead, MaskFormerHead, Mask2FormerHead), an "
            "encoder of its locations, or a backbone with attention (ViT, Swin, SwinV2, MViT, LRNet, NonLocalResNet)."
        )
    return bool(decoder) and isinstance(decoder[0], MultiScaleDeformableAttention)


class QueryPredictions(NamedTuple):
    """The predictions of all queries in one image, in the order of the queries."""

    scores: Tensor
    """(Q,) score of the most probable class."""
    labels: Tensor
    """(Q,) the most probable class."""
    boxes_xyxy: Tensor
    """(Q, 4) in pixels of the image; around the masks where the model predicts no boxes."""
    masks: Tensor | None
    """(Q, h, w) bool, over the full image at the masks' resolution; None if the model predicts no masks."""
    size: Size
    """(height, width) of the image in pixels."""

    @classmethod
    def of(cls, view: View) -> "QueryPredictions":
        """Read the queries' predictions from a model's outputs."""
        scores, labels = view.class_scores().max(dim=-1)
        size = view.image.shape[:2]
        masks = None
        if "pred_masks" in view.outputs or "mask_embed" in view.outputs:
            masks = view.crop(masks_of_queries(view.outputs, 0)) > 0
        if "pred_boxes" in view.outputs:
            boxes_xyxy = scale_boxes(cxcywh_to_xyxy(view.outputs["pred_boxes"][:1].float().cpu()), [size])[0]
        else:
            height, width = (side / n for side, n in zip(size, masks.shape[-2:]))
            boxes_xyxy = boxes_around_masks(masks) * torch.tensor([width, height, width, height])
        return cls(scores, labels, boxes_xyxy, masks, size)

    def region(self, query: int) -> Tensor:
        """Return the mask of a query, or the pixels of its box if the model predicts no masks: (H, W) bool."""
        if self.masks is not None and self.masks[query].any():
            return self.masks[query]
        return box_region(self.boxes_xyxy[query].tolist(), self.size)

    def at(self, point: Point, thresholds: ScoreThresholds) -> int | None:
        """Return the query whose mask, or box if there are no masks, covers a point of the image; None if none does.

        Among several that reach their score thresholds it is the one with the smallest box, as the larger objects
        usually lie behind it; if none reaches its threshold, the one with the highest score.
        """
        x, y = point
        if self.masks is not None:
            height, width = self.masks.shape[-2:]
            covering = self.masks[:, math.floor(y / self.size[0] * height), math.floor(x / self.size[1] * width)]
        else:
            x0, y0, x1, y1 = self.boxes_xyxy.T
            covering = (x0 <= x) & (x < x1) & (y0 <= y) & (y < y1)
        if not covering.any():
            return None
        confident = covering & (self.scores >= thresholds.of(self.labels))
        if not confident.any():
            return int(self.scores.where(covering, -1.0).argmax())
        sides = self.boxes_xyxy[:, 2:] - self.boxes_xyxy[:, :2]
        return int(sides.prod(dim=1).where(confident, torch.inf).argmin())


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer to a feature map of the image."""

    layer: int
    heads: Tensor
    """(heads, N, h, w) attention weights; the N sources are the map's h * w locations, row by row, or the queries."""
    covered: tuple[float, float]
    """Height and width of the region that the map covers, relative to those of the image."""
    gates: Tensor | None = None
    """(N, h, w) bool, True where each query may attend; None: everywhere."""

    @property
    def maps(self) -> Tensor:
        """(N, h, w) attention weights, averaged over the heads."""
        return self.heads.mean(dim=0)

    def ratios(self, source: int, region: Tensor) -> Tensor:
        """Return the attention of a source in a region, relative to uniform attention, (heads,); their mean is the
        ratio of the heads' mean. See `attention_ratio`.
        """
        return attention_ratio(self.heads[:, source], region, self.covered)


@dataclass(frozen=True)
class ImageAttention:
    """The attention of one encoder layer and one decoder layer to an image, with the queries' predictions."""

    image: np.ndarray
    classes: Sequence[str]
    encoder: LayerAttention | None
    """The attention of the chosen encoder layer; None if the model has none."""
    decoder: LayerAttention | None
    queries: QueryPredictions | None
    """The queries' final predictions; None without a decoder."""
    decoder_layers: Sequence[LayerAttention]
    """The attention of all decoder layers; for EoMT only that of the chosen one."""
    view: View

    def predictions(self, query: int) -> list[tuple[str, Tensor | None, Tensor | None]]:
        """Return what a query predicted after each decoder layer; an empty list if only the last layer predicts.

        Returns:
            for each layer: the class with its score; the box, xyxy in pixels of the image, or None; the mask, (h, w)
            bool over the image, or None.
        """
        outputs = self.view.outputs
        layers = [*outputs.get("aux_outputs", ()), outputs][-len(self.decoder_layers) :]
        if len(layers) < len(self.decoder_layers):
            return []
        predictions = []
        for layer in layers:
            score, label = self.view.class_scores(layer)[query].max(dim=-1)
            box = mask = None
            if "pred_boxes" in layer:
                box_xyxy = cxcywh_to_xyxy(layer["pred_boxes"][:1, query : query + 1].float().cpu())
                box = scale_boxes(box_xyxy, [self.image.shape[:2]])[0, 0]
            if "mask_embed" in layer:
                mask = self.view.crop(masks_of_queries(layer, 0, torch.tensor([query]))[0]) > 0
            predictions.append((f"{self.classes[label]} {score:.2f}", box, mask))
        return predictions

    def point_ratios(self, points: Sequence[Point], boxes_xyxy: Sequence[Sequence[float]]) -> Tensor:
        """Return how much points attend to a box for each, relative to uniform attention: (points, heads)."""
        size, layer = self.image.shape[:2], self.encoder
        cells = [cell_of(point, size, layer.maps.shape[-2:], layer.covered) for point in points]
        return torch.stack([layer.ratios(cell, box_region(box, size)) for cell, box in zip(cells, boxes_xyxy)])

    def query_ratios(self, queries: Sequence[int]) -> Tensor:
        """Return each decoder layer's attention of queries in their final masks, or in their boxes if there are no
        masks, relative to uniform attention: (layers, queries, heads).
        """
        regions = [self.queries.region(query) for query in queries]
        layers = [[x.ratios(query, region) for query, region in zip(queries, regions)] for x in self.decoder_layers]
        return torch.stack([torch.stack(of_queries) for of_queries in layers])

    def draw_points(
        self, points: Sequence[Point], path: str | Path, *, boxes_xyxy: Sequence[Sequence[float]] = ()
    ) -> None:
        """Save a PNG of what points of the image attend to in the encoder.

        Args:
            boxes_xyxy: a box for each point, which is drawn, with the point's attention in it; none: no boxes.
        """
        size, layer = self.image.shape[:2], self.encoder
        cells = [cell_of(point, size, layer.maps.shape[-2:], layer.covered) for point in points]
        title = f"Encoder self-attention, layer {layer.layer}, mean of heads (full color: maximum)"
        ratios = self.point_ratios(points, boxes_xyxy).mean(1).tolist() if len(boxes_xyxy) else ()
        boxes = list(zip(boxes_xyxy, ratios))
        draw_encoder_attention(
            self.image, points, layer.maps[cells], path, covered=layer.covered, boxes=boxes, title=title
        )

    def draw_query(self, query: int, path: str | Path) -> None:
        """Save a PNG of what one query attends to in the decoder."""
        self.draw_queries([query], path)

    def draw_queries(self, numbers: Sequence[int], path: str | Path) -> None:
        """Save a PNG of what queries attend to in the decoder."""
        scores, labels, boxes_xyxy, *_ = self.queries
        layer = self.decoder
        rows = [
            QueryAttention(
                k,
                boxes_xyxy[k],
                self.classes[labels[k]],
                float(scores[k]),
                layer.maps[k],
                float(layer.ratios(k, self.queries.region(k)).mean()),
            )
            for k in numbers
        ]
        title = f"Decoder cross-attention, layer {layer.layer}, mean of heads (full color: maximum)"
        draw_decoder_attention(self.image, rows, path, covered=layer.covered, title=title)


def cell_of(point: Point, size: Size, map_size: Size, covered: tuple[float, float]) -> int:
    """Return the row-major index of the map cell that contains a point of the image.

    Args:
        size: (height, width) of the image in pixels.
        map_size: (height, width) of the map in cells.
        covered: see `LayerAttention`.
    """
    (x, y), (height, width) = point, size
    row = math.floor(y / (height * covered[0]) * map_size[0])
    column = math.floor(x / (width * covered[1]) * map_size[1])
    return row * map_size[1] + column


def image_attention(
    predictor: Predictor, image: np.ndarray, *, encoder_layer: int = -1, decoder_layer: int = -1
) -> ImageAttention:
    """Run a model whose queries attend to every location, or which has an encoder, on an image (H, W, 3) uint8 RGB.

    Args:
        encoder_layer: index into `encoder_layers`; the last by default.
        decoder_layer: index into `decoder_layers`; the last by default.
    Raises:
        ConfigError: the model takes the image in windows.
    """
    model = predictor.model
    encoder, decoder = encoder_layers(model), decoder_layers(model)
    encoder_layer, decoder_layer = encoder_layer % max(1, len(encoder)), decoder_layer % max(1, len(decoder))
    # One encoder layer only: for a large image, the maps between all pairs of locations in all encoder layers would
    # take gigabytes.
    joint_queries = attention_layers(model).num_joint_queries
    numbers = [decoder_layer] if joint_queries else range(len(decoder))
    recorded = {str(i): decoder[i] for i in numbers if decoder}
    if encoder:
        recorded["encoder"] = encoder[encoder_layer]
    with _gates(model) as gates:
        view = record(predictor, image, AttentionRecorder(nn.ModuleDict(recorded)))
    if "windows" in view.outputs:
        raise ConfigError(
            f"{type(model).__name__} takes an image of this size in windows, whose attention is not drawn. Give one "
            f"of at most {' x '.join(map(str, model.image_size))} pixels (height x width)."
        )

    def read_layer(name: str, number: int) -> LayerAttention:
        size, covered = _attended_map(model, view, recorded[name], number)
        # One module may be both encoder and decoder layer; it is then recorded under one name only.
        weights = next(view.records[key] for key in (name, "encoder", str(decoder_layer)) if key in view.records)
        num_locations = math.prod(size)
        weights = weights[0][0][..., -num_locations:].float().cpu()  # after a ViT's class token and registers
        if name == "encoder":
            return LayerAttention(number, weights[:, -num_locations:].unflatten(-1, size), covered)
        if joint_queries:  # the queries come first in the sequence
            weights = weights[:, :joint_queries]
        gate = gates[number].unflatten(-1, size) if gates else None
        return LayerAttention(number, weights.unflatten(-1, size), covered, gate)

    layers = [read_layer(str(i), i) for i in numbers if decoder]
    return ImageAttention(
        view.image,
        predictor.classes,
        read_layer("encoder", encoder_layer) if encoder else None,
        next((layer for layer in layers if layer.layer == decoder_layer), None),
        QueryPredictions.of(view) if layers else None,
        layers,
        view,
    )


@contextmanager
def _gates(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the attention masks of queries with masked attention: (Q, S) bool for the first image, by layer."""
    gates: list[Tensor] = []

    def keep(_: nn.Module, args: tuple, inputs: dict[str, Tensor]) -> None:
        gates.append((inputs["memory_bias"][0, 0] > -1).cpu())

    layers = attention_layers(model).masked
    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    try:
        yield gates
    finally:
        for hook in hooks:
            hook.remove()


def _attended_map(model: nn.Module, view: View, layer: nn.Module, number: int) -> tuple[Size, tuple[float, float]]:
    """Return the size of the map that a layer attends to, and `covered` of `LayerAttention`."""
    if not isinstance(layer, MultiHeadAttention):  # a layer of a ViT, which pads its input to full patches
        patch = model.backbone.patch_size
        height, width = (math.ceil(side / patch) for side in view.padded_size)
        return (height, width), (height * patch / view.image_size[0], width * patch / view.image_size[1])
    levels = attention_layers(model).level_names or list(view.feature_sizes)[-1:]
    return view.feature_sizes[levels[number % len(levels)]], view.covered


@dataclass(frozen=True)
class ImageSampling:
    """Sampling points of queries with deformable attention in an image, in all decoder layers (Deformable DETR)."""

    image: np.ndarray
    classes: Sequence[str]
    queries: QueryPredictions
    """The predictions after the last decoder layer."""
    strides: Sequence[int]
    """The stride of each feature level in pixels."""
    levels: Sequence[list[int]]
    """For each decoder layer, the feature level of each of its groups of points."""
    covered: Sequence[tuple[float, float]]
    """For each level, the height and width of the map relative to those of the image in it; 1 without padding."""
    view: View
    point_names: Sequence[str] = ()
    """Names of the keypoints; empty if the model predicts none."""

    def layers(self, query: int) -> list[QueryLayer]:
        """Return what one query sampled and predicted, by layer."""
        covered = torch.tensor([sides[::-1] for sides in self.covered])  # (levels, 2)
        layers = []
        # Some models predict boxes a second time after the first layer, which precede the layers' own.
        outputs = [*self.view.outputs["aux_outputs"], self.view.outputs][-len(self.levels) :]
        for i, output in enumerate(outputs):
            locations, weights = self._samples(i, query)
            score, label = self.view.class_scores(output)[query].max(dim=-1)
            layers.append(
                QueryLayer(
                    locations=locations * covered[self.levels[i]][:, None],
                    weights=weights,
                    reference=output["reference_points"][0, query].float().cpu(),
                    box_cxcywh=output["pred_boxes"][0, query].float().cpu(),
                    name=self.classes[label],
                    score=float(score),
                    levels=self.levels[i],
                )
            )
        return layers

    def _samples(self, layer: int, query: int) -> tuple[Tensor, Tensor]:
        """Return locations (heads, groups, points, 2) and weights (heads, groups, points) of a query's samples, those
        of all its tokens if it has several, such as one for each keypoint."""
        num_queries = self.view.outputs["pred_boxes"].shape[1]
        locations, weights = (
            x[0].unflatten(0, (num_queries, -1))[query].float().cpu()  # (tokens, heads, groups, points, ...)
            for x in self.view.records[f"decoder.{layer}"][0]
        )
        return locations.permute(1, 2, 0, 3, 4).flatten(2, 3), weights.permute(1, 2, 0, 3).flatten(2) / len(weights)

    def keypoints(self, query: int) -> list[QueryLayer]:
        """Return what each keypoint of a query sampled in the last layer, and where it was found; an empty list if the
        label of the query has no keypoints."""
        (*_, layer), outputs, last = self.layers(query), self.view.outputs, len(self.levels) - 1
        predicted, num_queries = outputs["pred_keypoints"][0, query].float().cpu(), len(self.queries.labels)
        if "keypoint_groups" in outputs:
            group = int(outputs["keypoint_groups"][self.queries.labels[query]])
            recorded = self.view.records[f"keypoints.{last}"][0]
            locations, weights = (
                x[0].unflatten(0, (num_queries, *predicted.shape[:2]))[query, group] for x in recorded
            )
            predicted = predicted[group] if group >= 0 else predicted[0, :0]  # (K, 7)
            references = layer.reference.expand(len(predicted), -1)
        else:  # a token for the query itself, and then one for each keypoint, around where it was found before
            before = outputs["aux_outputs"][-1] if last else outputs["training_outputs"][0]
            references = before["pred_keypoints"][0, query].float().cpu()
            recorded = self.view.records[f"decoder.{last}"][0]
            locations, weights = (x[0].unflatten(0, (num_queries, -1))[query, 1:] for x in recorded)
        covered = torch.tensor([sides[::-1] for sides in self.covered])[self.levels[-1]][:, None]
        return [
            layer._replace(
                locations=locations[k].float().cpu() * covered,
                weights=weights[k].float().cpu(),
                reference=references[k],
                name=self.point_names[k],
                score=float(point[2].sigmoid()) if len(point) > 2 else None,
                keypoint=point[:2],
            )
            for k, point in enumerate(predicted)
        ]

    def query_ratios(self, queries: Sequence[int]) -> Tensor:
        """Return the weight of the points that each decoder layer samples in the queries' final boxes, relative to the
        boxes' fractions of the image: (layers, queries, heads). See `sampling_ratio`.
        """
        of_queries = []
        for query in queries:
            layers = self.layers(query)
            of_queries.append(torch.stack([sampling_ratio(*layer[:2], layers[-1].box_cxcywh) for layer in layers]))
        return torch.stack(of_queries, dim=1)

    def draw_query(self, query: int, path: str | Path) -> None:
        """Save a PNG of what one query sampled, layer by layer."""
        title = f"Query {query}: reference, sampling points of all heads, and box, by decoder layer"
        draw_sampling_points(self.image, self.layers(query), path, strides=self.strides, title=title)

    def draw_keypoints(self, query: int, path: str | Path) -> None:
        """Save a PNG of what the keypoints of a query sampled in the last layer."""
        title = f"Keypoints of query {query}: sampling points of all heads in the last decoder layer, by keypoint"
        draw_sampling_points(self.image, self.keypoints(query), path, strides=self.strides, title=title)


def image_sampling(predictor: Predictor, image: np.ndarray) -> ImageSampling:
    """Run a model whose queries attend to sampled points on an image (H, W, 3) uint8 RGB."""
    model = predictor.model
    decoder, keypoints = decoder_layers(model), attention_layers(model).keypoints
    recorded = dict(decoder=nn.ModuleList(decoder), keypoints=nn.ModuleList(keypoints))
    view = record(predictor, image, SamplingRecorder(nn.ModuleDict(recorded)))
    levels = [attention.levels for attention in decoder]
    # Maps after the last level are not for queries.
    strides = [info.stride for info in model.neck.feature_info.values()][: 1 + max(max(numbers) for numbers in levels)]
    rounds = attention_layers(model).rounds_padding
    covered = [
        view.compute_covered_at(name)
        if rounds
        else tuple(n * info.stride / side for n, side in zip(size, view.image_size))
        for (name, size), info in zip(view.feature_sizes.items(), model.neck.feature_info.values())
    ]
    queries = QueryPredictions.of(view)
    names = (
        [f"point {k}" for k in range(view.outputs["pred_keypoints"].shape[-2])]
        if "pred_keypoints" in view.outputs
        else []
    )
    if names and predictor.keypoint_info is not None:
        names = list(predictor.keypoint_info.names)
    return ImageSampling(view.image, predictor.classes, queries, strides, levels, covered, view, names)
