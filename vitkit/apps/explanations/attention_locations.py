"""The attention of an image backbone with the locations of its tokens: windows, pooled maps, local kernels."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.models.eva import EvaAttention
from timm.models.vision_transformer import Attention as TimmAttention
from torch import Tensor, nn

from vitkit.backbones.swin import BaseWindowAttention
from vitkit.backbones.vit_blocks import Attention as ViTAttention
from vitkit.errors import ConfigError
from vitkit.kernels.local_relation import plain as local_relation
from vitkit.kernels.windows import window_partition
from vitkit.nn.attention import AttentionRecorder
from vitkit.nn.local_relation import LocalRelation
from vitkit.nn.non_local import NonLocalBlock
from vitkit.nn.pooling_attention import PoolingAttention
from vitkit.protocols.backbone import Backbone, with_defaults
from vitkit.protocols.model import child

Size = tuple[int, int]
_LABELS = (
    (r"layers\.(\d+)\.blocks\.(\d+)\.", lambda m: f"stage {int(m[1]) + 1} block {int(m[2]) + 1}"),
    (r"blocks\.(\d+)\.", lambda m: f"block {int(m[1]) + 1}"),
    (r"layers\.(res\d)\.(\d+)\.", lambda m: f"{m[1]} block {int(m[2]) + 1}"),
    (r"layer(\d)\.non_local(\d+)$", lambda m: f"res{int(m[1]) + 1} after block {int(m[2]) + 1}"),
    (r"\bstem\b", lambda m: "stem"),
)
"""Patterns of attention modules' names, and their labels, which count from 1 as the papers do."""


@dataclass(frozen=True)
class LocatedAttention:
    """The attention of one layer in one image, with the locations of its queries and keys.

    Tokens attend within each of G groups: all tokens are one group, or each window is one. T tokens without a position,
    such as the class token, come before the L queries and the S keys.
    """

    name: str
    """The name of the attention module in the model."""
    weights: Tensor
    """(G, heads, T + L, T + S) float32 attention weights."""
    queries: Tensor
    """(G, L, 2) xy of the queries' centers, in pixels of the model's input; nan for padding."""
    keys: Tensor
    """(G, S, 2) xy of the keys' centers, in pixels of the model's input; nan for padding."""
    cell: int
    """The side of the square that one key covers, in pixels."""
    image_size: Size
    """(height, width) of the model's input in pixels."""
    num_tokens: int = 0
    """T, the number of tokens without a position."""

    @property
    def label(self) -> str:
        """The layer's name in figures, such as "stage 3 block 2"; its module's name if no pattern matches it."""
        matches = ((re.search(pattern, self.name), label) for pattern, label in _LABELS)
        return next((label(match) for match, label in matches if match), self.name)

    @property
    def is_global(self) -> bool:
        """Whether every token attends to every other one."""
        return len(self.weights) == 1 and self.weights.shape[-2] == self.weights.shape[-1]

    @property
    def map_size(self) -> Size:
        """(height, width) of the maps, in cells of the keys."""
        return math.ceil(self.image_size[0] / self.cell), math.ceil(self.image_size[1] / self.cell)

    @property
    def covered(self) -> tuple[float, float]:
        """Height and width of the region that the maps cover, relative to those of the image."""
        (height, width), (rows, columns) = self.image_size, self.map_size
        return rows * self.cell / height, columns * self.cell / width

    def class_token(self) -> Tensor:
        """Return (heads, h, w), the attention of the class token; needs `num_tokens` above 0."""
        return self.on_map(0, self.weights[0, :, 0, self.num_tokens :])

    def at(self, point: tuple[float, float]) -> Tensor:
        """Return (heads, h, w), what the token nearest to (x, y), in pixels of the model's input, attends to."""
        far = (self.queries - torch.tensor(point)).square().sum(-1).nan_to_num(torch.inf)
        group, query = divmod(int(far.argmin()), far.shape[1])
        return self.on_map(group, self.weights[group, :, self.num_tokens + query, self.num_tokens :])

    def window_at(self, point: tuple[float, float]) -> tuple[int, int, int, int]:
        """Return the smallest box, xyxy in pixels, around everything that the token at a point attends to."""
        rows, columns = (self.at(point).sum(0) > 0).nonzero().T
        return tuple(int(n) * self.cell for n in (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1))

    def on_map(self, group: int, weights: Tensor) -> Tensor:
        """Scatter the weights (heads, S) of a group's keys to the map (heads, h, w)."""
        rows, columns = self.map_size
        real = ~self.keys[group].isnan().any(-1)
        column, row = (self.keys[group, real] // self.cell).long().T
        inside = (row < rows) & (column < columns)
        maps = weights.new_zeros(len(weights), rows, columns)
        maps[:, row[inside], column[inside]] = weights[:, real][:, inside]
        return maps


def spread(layers: Sequence[Any], count: int) -> list[Any]:
    """Return at most `count` layers, evenly spaced from the first to the last."""
    step = (len(layers) - 1) / max(1, min(count, len(layers)) - 1)
    return [layers[round(i * step)] for i in range(min(count, len(layers)))]


def attention_names(model: nn.Module) -> list[str]:
    """Return the names of a model's modules whose attention can be located, first to last."""
    return [name for name, module in model.named_modules() if isinstance(module, KINDS)]


@torch.no_grad()
def locate_attention(
    model: nn.Module, images: Tensor, *, names: Sequence[str] | None = None, **inputs: Any
) -> list[LocatedAttention]:
    """Run a model on one image, and return the attention of its backbone, layer by layer.

    Args:
        model: in evaluation mode, with a ViT (also timm's), Swin, SwinV2, MViT, LRNet or NonLocalResNet as backbone;
            others give an empty list.
        images: (1, 3, H, W).
        names: the layers to record, out of `attention_names`; None: all.
        inputs: the model's other inputs.
    """
    modules = {name: model.get_submodule(name) for name in (attention_names(model) if names is None else names)}
    if not modules or images.ndim != 4:
        return []
    patch, num_windows = backbone_of(model).patch_size, backbone_of(model).num_windows
    calls: list[tuple] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, args, name=name: calls.append((name, module, args)))
        for name, module in modules.items()
    ]
    # Some models pad the backbone's input.
    backbone = child(model, "backbone") or model
    sizes: list[Size] = []
    hooks.append(backbone.register_forward_pre_hook(lambda _, args: sizes.append(tuple(args[0].shape[-2:]))))
    try:
        # Names in a list have no dots, and its modules keep their order.
        with AttentionRecorder(nn.ModuleList(modules.values())) as maps:
            model(images, **inputs)
    finally:
        for hook in hooks:
            hook.remove()
    weights = {name: maps[str(i)][0].float().cpu() for i, name in enumerate(modules) if str(i) in maps}
    layers, size = [], tuple(images.shape[-2:])
    for name, module, args in calls:
        locate = next(locate for kind, locate in _LOCATE.items() if isinstance(module, kind))
        if num_windows == 1:
            located = locate(module, args, weights[name], sizes[0], patch)
        else:
            located = _locate_windowed_vit(args[1], weights[name], patch, num_windows)
        layers.append(LocatedAttention(name=name, image_size=size, **located))
    return layers


def backbone_of(model: nn.Module) -> Backbone:
    """Return a model's backbone, or a backbone itself, with the defaults of what it leaves out."""
    return with_defaults(child(model, "backbone") or model, Backbone)


def centers(size: Size, cell: int) -> Tensor:
    """Return the centers of a map's cells, (h, w, 2) xy in pixels."""
    rows, columns = torch.meshgrid(*(torch.arange(length) for length in size), indexing="ij")
    return (torch.stack((columns, rows), dim=-1) + 0.5) * cell


def _stride(size: Size, image_size: Size) -> int:
    """Return the stride, a power of two, of a map whose size is ceil(image_size / stride)."""
    return 2 ** max(math.ceil(math.log2(side / cells)) for side, cells in zip(image_size, size))


def _in_windows(positions: Tensor, window: int, shift: int = 0) -> Tensor:
    """Partition positions (h, w, 2) into windows: (windows, tokens, 2), nan for padding."""
    return window_partition(positions[None], window, shift=shift, padding_value=torch.full((2,), torch.nan))


def _locate_vit(module: ViTAttention, args: tuple, weights: Tensor, size: Size, patch: int) -> dict[str, Any]:
    positions = centers(args[1], patch)
    positions = positions.view(1, -1, 2) if module.window_size is None else _in_windows(positions, module.window_size)
    num_tokens = weights.shape[-1] - positions.shape[1]
    return dict(weights=weights, queries=positions, keys=positions, cell=patch, num_tokens=num_tokens)


def _locate_timm_vit(_: nn.Module, __: tuple, weights: Tensor, size: Size, patch: int) -> dict[str, Any]:
    positions = centers(tuple(math.ceil(side / patch) for side in size), patch).view(1, -1, 2)
    num_tokens = weights.shape[-1] - positions.shape[1]
    if num_tokens < 0:
        raise ConfigError(f"timm's network attends over {weights.shape[-1]} tokens, not over patches of {patch}.")
    return dict(weights=weights, queries=positions, keys=positions, cell=patch, num_tokens=num_tokens)


def _locate_windowed_vit(size: Size, weights: Tensor, cell: int, num_windows: int) -> dict[str, Any]:
    """Locate the patches of a map in `num_windows` windows along each side, each of which has other tokens before its
    patches."""
    height, width = (math.ceil(side / num_windows) for side in size)
    positions = torch.full((num_windows * height, num_windows * width, 2), torch.nan)
    positions[: size[0], : size[1]] = centers(size, cell)
    positions = positions.view(num_windows, height, num_windows, width, 2).transpose(1, 2).flatten(2, 3).flatten(0, 1)
    count = 1 if len(weights) > 1 else num_windows**2  # windows that attend to each other
    num_others = weights.shape[-1] // count - height * width
    tokens = torch.arange(weights.shape[-1]).view(count, -1)
    order = torch.cat((tokens[:, :num_others].flatten(), tokens[:, num_others:].flatten()))
    positions = positions.view(len(weights), -1, 2)
    weights = weights[..., order, :][..., order]
    return dict(weights=weights, queries=positions, keys=positions, cell=cell, num_tokens=count * num_others)


def _locate_swin(
    module: BaseWindowAttention, args: tuple, weights: Tensor, size: Size, _: int | None
) -> dict[str, Any]:
    x, window, shift, _ = args
    cell = _stride(x.shape[1:3], size)
    positions = _in_windows(centers(x.shape[1:3], cell), window, shift)
    return dict(weights=weights, queries=positions, keys=positions, cell=cell)


def _locate_mvit(module: PoolingAttention, args: tuple, weights: Tensor, size: Size, _: int | None) -> dict[str, Any]:
    map_size = args[1]
    stride = _stride(map_size, size)
    positions = []
    for pooling, *_ in (module.q_stride, module.kv_stride):
        pooled = centers(tuple(math.ceil(n / pooling) for n in map_size), stride * pooling)
        window = module.window and module.window // pooling
        positions.append(_in_windows(pooled, window) if window else pooled.view(1, -1, 2))
    queries, keys = positions
    cell = stride * module.kv_stride[0]
    return dict(weights=weights, queries=queries, keys=keys, cell=cell, num_tokens=int(module.class_token))


def _locate_lrnet(module: LocalRelation, args: tuple, weights: Tensor, size: Size, _: int | None) -> dict[str, Any]:
    map_size = tuple(args[0].shape[-2:])
    cell = _stride(map_size, size)
    positions = centers(map_size, cell)
    settings = (math.isqrt(weights.shape[-1]), module.stride, module.dilation)
    windows = local_relation.unfold(positions.permute(2, 0, 1)[None], *settings)[0].permute(2, 1, 0)  # (L, k * k, 2)
    inside = local_relation.unfold(torch.ones(1, 1, *map_size), *settings)[0, 0].T > 0
    queries = positions[:: module.stride, :: module.stride].reshape(-1, 1, 2)
    keys = windows.where(inside[..., None], torch.nan)
    return dict(weights=weights[0].transpose(0, 1)[:, :, None], queries=queries, keys=keys, cell=cell)


def _locate_non_local(module: NonLocalBlock, args: tuple, weights: Tensor, size: Size, _: int | None) -> dict[str, Any]:
    map_size = tuple(args[0].shape[-2:])
    stride, pooling = _stride(map_size, size), module.pool[0] if module.pool else 1
    pooled = tuple(max(1, length // pooling) for length in map_size)
    cell = stride * pooling
    return dict(
        weights=weights,
        queries=centers(map_size, stride).view(1, -1, 2),
        keys=centers(pooled, cell).view(1, -1, 2),
        cell=cell,
    )


_LOCATE: dict[type[nn.Module], Callable[..., dict[str, Any]]] = {
    ViTAttention: _locate_vit,
    TimmAttention: _locate_timm_vit,
    EvaAttention: _locate_timm_vit,
    BaseWindowAttention: _locate_swin,
    PoolingAttention: _locate_mvit,
    LocalRelation: _locate_lrnet,
    NonLocalBlock: _locate_non_local,
}
KINDS = tuple(_LOCATE)
"""The classes of modules whose attention can be mapped to locations in the image."""
