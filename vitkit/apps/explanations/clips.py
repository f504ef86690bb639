"""Attention of models of clips over space and time: TimeSformer, MViT, and ResNets with non-local blocks."""

import math
from collections.abc import Mapping, Sequence
from functools import singledispatch
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitkit.apps.explanations.clip_drawing import draw_clip_arrows, draw_clip_attention
from vitkit.apps.explanations.explain_options import ExplainRequest, Explanation, check_layer, check_points
from vitkit.apps.explanations.html_page import PageLayer
from vitkit.apps.explanations.pages import MAX_ROWS
from vitkit.apps.inference.predictor import Predictor
from vitkit.apps.inference.videos import clip_of
from vitkit.backbones.timesformer import SCHEMES, Size, join_groups, split_groups
from vitkit.backbones.timesformer import Block as TimeSformerBlock
from vitkit.errors import ConfigError
from vitkit.nn.attention import AttentionRecorder
from vitkit.nn.non_local import NonLocalBlock
from vitkit.nn.pooling_attention import PoolingAttention
from vitkit.protocols.backbone import Backbone, with_defaults
from vitkit.protocols.model import child


class GroupedAttention(NamedTuple):
    """The attention in one block of TimeSformer, averaged over its heads."""

    class_token: Tensor
    """(h, w, T): the class token's attention in the block's last step, computed separately for each group of tokens."""
    steps: Sequence[tuple[str, Tensor]]
    """The name of each step, and its attention weights (G, S, S) within each of G groups, without the class token."""
    size: Size

    @property
    def key_size(self) -> Size:
        """(h, w, T) of the maps that `of_token` returns."""
        return self.size

    def of_token(self, row: int, column: int, frame: int) -> Tensor:
        """Return (h, w, T): how much a token attends to every token through all steps of the block.

        The weights of the steps are multiplied, beginning with the last step, which attends to the outputs of the
        earlier ones. Residual connections, by which a token keeps its own values, are left out.
        """
        weights = torch.zeros(1, *self.size, 1)
        weights[0, row, column, frame] = 1.0
        for step, attention in reversed(self.steps):
            seen = split_groups(weights, step)[0].transpose(1, 2) @ attention  # (G, 1, S)
            weights = join_groups(seen.transpose(1, 2)[None], step, self.size)
        return weights[0, ..., 0]


class FullAttention(NamedTuple):
    """The attention of a layer in which every token sees the full clip, as in a video MViT or a non-local block."""

    class_token: Tensor | None
    """(h', w', T'): the class token's attention; None if there is no such token."""
    weights: Tensor
    """(L, S) from L tokens to S keys, averaged over the heads; tokens are ordered by frame, row, column."""
    size: Size
    """(h, w, T) of the L tokens."""
    key_size: Size
    """(h', w', T') of the S keys, which pooling may have made fewer."""

    def of_token(self, row: int, column: int, frame: int) -> Tensor:
        """Return (h', w', T'): how much a token attends to every key."""
        height, width, _ = self.size
        return self._on_map(self.weights[(frame * height + row) * width + column])

    def sum_received(self) -> Tensor:
        """Return (h', w', T'): how much of all tokens' attention each key gets."""
        return self._on_map(self.weights.mean(0))

    def _on_map(self, weights: Tensor) -> Tensor:
        height, width, frames = self.key_size
        return weights.view(frames, height, width).permute(1, 2, 0)


ClipAttention = GroupedAttention | FullAttention


def clip_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model of clips whose attention can be drawn.

    Raises:
        ConfigError: its backbone has none.
    """
    backbone = child(model, "backbone")
    if backbone is not None and with_defaults(backbone, Backbone).num_frames is not None:
        layers = [module for module in backbone.modules() if _read.dispatch(type(module)) is not _read.dispatch(object)]
        if layers:
            return layers
    raise ConfigError(
        f"{type(backbone or model).__name__} has no attention over space and time: expected TimeSformer, an MViT for "
        "clips, or a ClipResNet with non-local blocks."
    )


@torch.no_grad()
def clip_attention(model: nn.Module, clip: Tensor, layer: int | None = None) -> ClipAttention:
    """Run a model on a clip and keep the attention of one layer.

    Args:
        model: a Classifier, in evaluation mode.
        clip: (1, 3, T, H, W) uint8, or float, normalized.
        layer: index into `clip_layers`; None: the last.
    Raises:
        ConfigError: the model has no such layer.
    """
    layers = clip_layers(model)
    module = layers[check_layer("encoder_layer", layer, len(layers))]
    inputs: list[tuple] = []
    hook = module.register_forward_pre_hook(lambda _, args: inputs.append(args))
    try:
        with AttentionRecorder(module) as maps:
            model(clip)
    finally:
        hook.remove()
    return _read(module, model.backbone, maps, inputs[0], clip.shape[2])


@singledispatch
def _read(
    layer: nn.Module, backbone: nn.Module, maps: Mapping[str, list[Tensor]], inputs: tuple, num_frames: int
) -> ClipAttention:
    """Return the attention of a layer; a layer of a new backbone is registered here.

    Args:
        maps: the recorded attention of its modules, by their names in the layer.
        inputs: the layer's inputs.
        num_frames: the number of the clip's frames.
    """
    raise NotImplementedError(type(layer).__name__)


@_read.register
def _(
    layer: TimeSformerBlock, backbone: nn.Module, maps: Mapping[str, list[Tensor]], inputs: tuple, num_frames: int
) -> GroupedAttention:
    steps = {name: calls[0] for name, calls in maps.items()}
    return _join(steps, backbone.attention, (*inputs[1][:2], num_frames))


@_read.register
def _(
    layer: NonLocalBlock, backbone: nn.Module, maps: Mapping[str, list[Tensor]], inputs: tuple, num_frames: int
) -> FullAttention:
    size = tuple(inputs[0].shape[2:])
    key_size = tuple(length // min(window, length) for window, length in zip(layer.pool or (1, 1, 1), size))
    return _full_attention(maps, size, key_size, num_tokens=0)


@_read.register
def _(
    layer: PoolingAttention, backbone: nn.Module, maps: Mapping[str, list[Tensor]], inputs: tuple, num_frames: int
) -> FullAttention:
    size, key_size = (
        tuple(math.ceil(length / stride) for length, stride in zip(inputs[1], strides))
        for strides in (layer.q_stride, layer.kv_stride)
    )
    return _full_attention(maps, size, key_size, num_tokens=int(layer.class_token))


def _full_attention(maps: Mapping[str, list[Tensor]], size: Size, key_size: Size, *, num_tokens: int) -> FullAttention:
    """Return the attention of a layer's only module; sizes are (T, h, w), and `num_tokens` 1 with a class token."""
    weights = maps[""][0][0].mean(dim=0).float().cpu()  # (L, S), with the class token
    of_token = weights[0, num_tokens:].view(key_size).permute(1, 2, 0) if num_tokens else None
    weights = weights[num_tokens:, num_tokens:]
    return FullAttention(of_token, weights, (*size[1:], size[0]), (*key_size[1:], key_size[0]))


def _join(maps: Mapping[str, Tensor], scheme: str, size: Size) -> GroupedAttention:
    # Attention within frames runs as joint attention over clips of one frame: the groups are the frames.
    names = ("spatial",) if scheme == "space" else SCHEMES[scheme]
    steps = []
    for step in names:
        attention = maps["attn" if step == names[-1] else f"{step}_attn"].mean(dim=1).float().cpu()  # (G, S, S)
        has_class_token = int(step != "temporal")
        steps.append((step, attention[:, has_class_token:, has_class_token:]))
    class_token = join_groups(attention[None, :, 0, 1:, None], names[-1], size)[0, ..., 0]
    return GroupedAttention(class_token, steps, size)


def explain_clip(predictor: Predictor, video: str | Path, request: ExplainRequest, result: Explanation) -> None:
    """Draw what points of a frame, and the class token, attend to in the clip from the middle of a video."""
    model, views = predictor.model, clip_of(predictor, video)
    clip = views[len(views) // 2]  # the crop in the middle
    _, num_frames, height, width = clip.shape
    frame = num_frames // 2 if request.frame is None else request.frame
    if not 0 <= frame < num_frames:
        raise ConfigError(f"frame: got {frame}; the clip's frames are 0 to {num_frames - 1}.")
    check_points(request.points, width, height, "the clip")
    attention = clip_attention(model, clip[None].to(predictor.device), request.encoder_layer)
    looked_at = attention.sum_received() if attention.class_token is None else attention.class_token
    of_frame = looked_at[..., frame * looked_at.shape[2] // num_frames]
    points = request.points or [brightest(of_frame, (height, width))]
    token_frame = frame * attention.size[2] // num_frames
    maps = []
    for x, y in points:
        row, column = int(y * attention.size[0] / height), int(x * attention.size[1] / width)
        maps.append(((frame, x, y), attention.of_token(row, column, token_frame)))
        own = maps[-1][1][..., frame * attention.key_size[2] // num_frames].clamp(min=0).sum()
        result.numbers[f"point {len(maps)}: share of its attention in its own frame"] = float(
            own / maps[-1][1].clamp(min=0).sum()
        )
    layers = clip_layers(model)
    number = len(layers) - 1 if request.encoder_layer is None else request.encoder_layer
    kind = f"{model.backbone.attention} attention" if isinstance(attention, GroupedAttention) else "Attention"
    title = f"{kind.capitalize()} over space and time, layer {number} (of 0 to {len(layers) - 1}), mean of the heads"
    if isinstance(layers[number], NonLocalBlock):
        title = f"Non-local block {number} (of 0 to {len(layers) - 1})"
        draw_clip_arrows(clip, maps, result.file("non_local.png"), title=title)
    draw_clip_attention(clip, attention.class_token, maps, result.file("attention.png"), title=title)
    if request.html:
        strip = clip.permute(2, 1, 3, 0).flatten(1, 2).cpu().numpy()  # frames side by side
        result.page(clip_page(attention), "attention.html", title=title, image=strip)


def brightest(weights: Tensor, size: tuple[int, int]) -> tuple[float, float]:
    """Return (x, y) of the center of a map's largest cell, in pixels of an image of size (height, width)."""
    row, column = divmod(int(weights.flatten().argmax()), weights.shape[1])
    return (column + 0.5) * size[1] / weights.shape[1], (row + 0.5) * size[0] / weights.shape[0]


def clip_page(attention: ClipAttention) -> list[PageLayer]:
    """Return what tokens, and the class token, attend to in a clip whose frames stand side by side."""
    height, width, frames = attention.size
    step = -(-max(height, width) // (MAX_ROWS // 2))
    tokens = [(i, j, t) for i in range(0, height, step) for t in range(frames) for j in range(0, width, step)]

    def strip(weights: Tensor) -> Tensor:  # (h, w, T) -> (1, h * T * w)
        return weights.clamp(min=0).permute(0, 2, 1).reshape(1, -1)

    key_height, key_width, key_frames = attention.key_size
    grid = (key_height, key_frames * key_width)
    rows = (len(range(0, height, step)), frames * len(range(0, width, step)))
    weights = torch.stack([strip(attention.of_token(*token)) for token in tokens], dim=1)
    page = [PageLayer("locations", weights, rows, grid)]
    if attention.class_token is not None:
        page.append(PageLayer("class token", strip(attention.class_token)[None], ["class token"], grid))
    return page
