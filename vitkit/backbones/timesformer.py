"""TimeSformer (Bertasius et al. 2021, https://arxiv.org/abs/2102.05095): a ViT for clips with five attention schemes.

Shapes: B clips, T frames of h x w patches, L = 1 + h * w * T tokens: the class token, then all frames of the first
patch, of the second, and so on; G groups of S tokens that attend to each other.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from vitkit.backbones.base import BackboneBase, check_at_least_1, drop_path_rates, init_linear
from vitkit.backbones.vit_blocks import Attention, PatchEmbedding, add, check_sizes, map_of_patches
from vitkit.errors import CheckpointError, ConfigError
from vitkit.nn.attention import padding_bias
from vitkit.nn.layers import Linear, TokenMLP
from vitkit.nn.vit_positions import resize_positions_2d
from vitkit.ops.images import check_images
from vitkit.registry import BACKBONES, nearest

logger = logging.getLogger("vitkit")

Size = tuple[int, int, int]
"""Numbers of rows, columns and frames, (h, w, T)."""

SCHEMES = {
    "space": ("joint",),  # applied to each frame separately
    "joint": ("joint",),
    "divided": ("temporal", "spatial"),
    "sparse": ("local", "global"),
    "axial": ("temporal", "width", "height"),
}
"""Attention steps of a block, in order, for each of the paper's schemes (section 3 and figure 2)."""

STEPS = {
    # of    rows      columns   frames
    "joint": ("one", "one", "one"),
    "temporal": ("each", "each", "one"),
    "spatial": ("one", "one", "each"),
    "width": ("each", "one", "each"),
    "height": ("one", "each", "each"),
    "local": ("halves", "halves", "one"),
    "global": ("every second", "every second", "every second"),
}
"""For each step, how tokens are grouped; tokens in the same group along all three axes attend to each other. Along an
axis, "one" puts all tokens in one group, "each" makes each index a group, "halves" splits the first from the second
half, and "every second" splits even from odd indices.

So "local" is the paper's "F x H/2 x W/2 neighboring patches", and "global" its "stride of 2 patches along the temporal
dimension and also the two spatial dimensions"; the paper gives no code for either.
"""

_BASE = dict(d_model=768, depth=12, num_heads=12)

TIMESFORMER_VARIANTS = {
    **{f"timesformer_{scheme}": dict(attention=scheme, **_BASE) for scheme in SCHEMES},
    "timesformer_hr": dict(num_frames=16, image_size=448, **_BASE),
    "timesformer_l": dict(num_frames=96, **_BASE),
}
"""The networks of the paper's table 1, and the HR and L forms of its section 4.3, with divided attention."""


def group_sizes(step: str, size: Size) -> tuple[list[int], list[int]]:
    """Return the number of groups along each axis, and the length of the longest group."""
    counts = [{"one": 1, "each": n}.get(kind, min(2, n)) for kind, n in zip(STEPS[step], size)]
    return counts, [math.ceil(n / count) for n, count in zip(size, counts)]


def split_groups(x: Tensor, step: str) -> Tensor:
    """Gather the tokens of each group; if groups are unequal, the shorter ones are padded with zeros.

    Args:
        x: (B, h, w, T, C).
        step: a key of `STEPS`.
    Returns:
        (B, G, S, C); groups and their tokens are ordered by row, column, frame.
    """
    size = tuple(x.shape[1:4])
    counts, lengths = group_sizes(step, size)
    margins = [count * length - n for n, count, length in zip(size, counts, lengths)]
    if any(margins):
        x = F.pad(x, (0, 0, *(end for margin in reversed(margins) for end in (0, margin))))
    # Each axis becomes two: (groups, tokens of a group), or (tokens, groups) if neighbors are in different groups.
    for axis, (kind, count) in enumerate(zip(STEPS[step], counts)):
        x = x.unflatten(1 + 2 * axis, (-1, count) if kind == "every second" else (count, -1))
    x = x.permute(0, *_group_axes(step), 7)  # (B, groups of rows, of columns, of frames, rows, columns, frames, C)
    return x.flatten(4, 6).flatten(1, 3)


def join_groups(x: Tensor, step: str, size: Size) -> Tensor:
    """Put the tokens of all groups back in their locations: (B, G, S, C) -> (B, h, w, T, C), the inverse of
    `split_groups`.
    """
    counts, lengths = group_sizes(step, size)
    x = x.unflatten(2, lengths).unflatten(1, counts)
    axes = (0, *_group_axes(step), 7)
    x = x.permute(sorted(range(8), key=axes.__getitem__))
    x = x.flatten(5, 6).flatten(3, 4).flatten(1, 2)
    return x[:, : size[0], : size[1], : size[2]]


def _group_axes(step: str) -> list[int]:
    """Return the axes of groups, then those of a group's tokens, where axes 1 to 3 have been split in two."""
    pairs = [
        (2 * axis + 2, 2 * axis + 1) if kind == "every second" else (2 * axis + 1, 2 * axis + 2)
        for axis, kind in enumerate(STEPS[step])
    ]
    return [group for group, _ in pairs] + [token for _, token in pairs]


class Block(nn.Module):
    """Pre-norm transformer layer with one attention for each step of the scheme.

    The last step uses the names of a ViT, `norm1` and `attn`; the others are named after the step
    (`temporal_norm1`, `temporal_attn`) and have a final layer (`temporal_fc`) that is initialized to zero, so that a
    new network starts as a ViT.

    As in the original, the class token takes no part in the temporal step. In the other steps every group includes it,
    and its outputs are averaged over the groups.
    """

    activation_checkpointing = False

    def __init__(self, d_model: int, num_heads: int, scheme: str, *, d_mlp: int, drop_path: float):
        super().__init__()
        self.steps = SCHEMES[scheme]
        for step in self.steps:
            prefix = self._prefix(step)
            self.add_module(f"{prefix}norm1", nn.LayerNorm(d_model, eps=1e-6))
            self.add_module(f"{prefix}attn", Attention(d_model, num_heads))
            if prefix:
                self.add_module(f"{prefix}fc", Linear(d_model, d_model))
        self.norm2 = nn.LayerNorm(d_model, eps=1e-6)
        self.mlp = TokenMLP(d_model, d_mlp)
        self.drop_path = StochasticDepth(drop_path, "row")

    def _prefix(self, step: str) -> str:
        return "" if step == self.steps[-1] else f"{step}_"

    def forward(self, x: Tensor, size: Size) -> Tensor:
        """(B, L, d_model) -> (B, L, d_model)."""
        for step in self.steps:
            x = self._attend(x, size, step)
        return add(self.drop_path(self.mlp(self.norm2(x))), x)

    def _attend(self, x: Tensor, size: Size, step: str) -> Tensor:
        """Add to each token the attention output within its group."""
        batch, prefix = x.shape[0], self._prefix(step)
        class_token, patches = x[:, :1], x[:, 1:]  # (B, 1, C), (B, h w T, C)
        groups = split_groups(patches.unflatten(1, size), step)  # (B, G, S, C)
        num_groups = groups.shape[1]
        has_class_token = step != "temporal"
        if has_class_token:
            copies = class_token[:, None].expand(-1, num_groups, -1, -1)  # (B, G, 1, C)
            groups = torch.cat((copies, groups), dim=2)  # (B, G, 1 + S, C)

        bias = self._padding_bias(x, size, step)
        normed = self.get_submodule(f"{prefix}norm1")(groups.flatten(0, 1))
        # As in the original, each group is dropped separately.
        seen = self.drop_path(self.get_submodule(f"{prefix}attn")(normed, bias=bias)).unflatten(0, (batch, num_groups))

        seen_by_patches = join_groups(seen[:, :, int(has_class_token) :], step, size).flatten(1, 3)  # (B, h w T, C)
        if has_class_token:
            seen = torch.cat((seen[:, :, 0].mean(dim=1, keepdim=True), seen_by_patches), dim=1)  # (B, L, C)
            return add(getattr(self, f"{prefix}fc")(seen) if prefix else seen, x)
        return torch.cat((class_token, add(self.temporal_fc(seen_by_patches), patches)), dim=1)

    @staticmethod
    def _padding_bias(x: Tensor, size: Size, step: str) -> Tensor | None:
        """Return the bias that masks the padding of unequal groups, (B * G, 1, 1, 1 + S); None without padding."""
        counts, lengths = group_sizes(step, size)
        if math.prod(counts) * math.prod(lengths) == math.prod(size):
            return None
        inside = split_groups(x.new_ones(1, *size, 1), step)[0, :, :, 0]  # (G, S)
        padding = F.pad(inside == 0, (1, 0))  # the class token is not padding
        return padding_bias(padding, x.dtype).repeat(x.shape[0], 1, 1, 1)


@BACKBONES.register
class TimeSformer(BackboneBase):
    """TimeSformer: a classifier of clips, or one map of them, "res4" for patches of 16; loads official weights.

    `pretrained` may also be weights of an image ViT, or of a TimeSformer whose blocks lack the earlier steps. As in the
    original, the attention of these steps is then initialized as a copy of the ViT's, and their final layer as zeros.

    An `AttentionRecorder` gets, for each attention, (B * G, heads, S, S), or 1 + S with the class token, where groups
    and tokens are ordered by row, column and frame: temporal maps are (B * h * w, heads, T, T), spatial ones
    (B * T, heads, 1 + h * w, 1 + h * w).

    Args:
        attention: a key of `SCHEMES`: "space" (each frame separately, averaged at the end), "joint", "divided",
            "sparse" (local, then global) or "axial" (time, width, height).
        patch_size: side of the patches, in pixels.
        d_model: width of the tokens, a multiple of `num_heads`.
        depth: number of blocks.
        mlp_ratio: hidden width of each block's MLP, relative to `d_model`.
        image_size, num_frames: size of the clips, in pixels and frames, that the position tables are made for. For
            other clips, and for weights trained on others, the tables are resampled (nearest), which is logged. The
            original resamples a frame's flattened table when loading, vitkit its rows and columns.
        position_std: initial standard deviation of the class token and of both position tables. None: as in the
            original, 0.02, and zeros for frames, which suits weights of an image ViT; from random weights a small
            network takes thousands of steps to learn the order of frames, but hundreds with 0.4.
        drop_path: see `drop_path_rates`.
        options: the arguments of `BackboneBase`.
    Raises:
        ConfigError: an argument is invalid.
    """

    has_class_token = True
    class_head = ("head.",)
    input_weight = "patch_embed.proj.weight"

    def __init__(
        self,
        attention: str = "divided",
        *,
        patch_size: int = 16,
        d_model: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        image_size: int = 224,
        num_frames: int = 8,
        position_std: float | None = None,
        drop_path: float = 0.1,
        **options: Any,
    ):
        if attention not in SCHEMES:
            raise ConfigError(f"attention={attention!r}: unknown. {nearest(attention, SCHEMES)}")
        check_sizes(patch_size=patch_size, d_model=d_model, depth=depth, num_heads=num_heads)
        check_at_least_1(image_size=image_size, num_frames=num_frames)
        super().__init__(map_of_patches(patch_size, d_model), **options)
        self.attention = attention
        self.grid = (math.ceil(image_size / patch_size),) * 2
        self._completes_state = False
        self._logged_sizes: set[Size] = set()

        self.patch_embed = PatchEmbedding(patch_size, d_model, in_channels=self.in_channels)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, d_model))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + math.prod(self.grid), d_model))
        self.time_embed = None if attention == "space" else nn.Parameter(torch.zeros(1, num_frames, d_model))
        self.blocks = nn.ModuleList(
            Block(d_model, num_heads, attention, d_mlp=int(d_model * mlp_ratio), drop_path=rate)
            for rate in drop_path_rates(drop_path, depth)
        )
        self.norm = nn.LayerNorm(d_model, eps=1e-6)
        if self.is_classifier:
            self.head = nn.Linear(d_model, self.num_classes)
        self._initialize(position_std)
        self.freeze()

    def _initialize(self, position_std: float | None) -> None:
        self.apply(init_linear)
        for name, module in self.named_modules():
            if name.endswith("_fc"):
                # Also in the first block: the only module that the original's loop skips is the list of blocks itself.
                nn.init.zeros_(module.weight)
        for tokens in (self.pos_embed, self.cls_token):
            nn.init.trunc_normal_(tokens, std=0.02 if position_std is None else position_std)
        if position_std is not None and self.time_embed is not None:
            nn.init.trunc_normal_(self.time_embed, std=position_std)

    @property
    def num_frames(self) -> int:
        """See `Backbone`; without positions in time, the paper's 8."""
        return 8 if self.time_embed is None else self.time_embed.shape[1]

    def stages(self) -> list[list[nn.Module | nn.Parameter]]:
        """Return the embeddings, then each block."""
        tables = [self.cls_token, self.pos_embed, *([] if self.time_embed is None else [self.time_embed])]
        return [[self.patch_embed, *tables], *([block] for block in self.blocks)]

    def forward(self, clips: Tensor) -> dict[str, Tensor] | Tensor:
        """Compute the map, or a classifier's logits.

        Args:
            clips: (B, in_channels, T, H, W) float, normalized; any T, and any H and W from one patch.
        Returns:
            the map, (B, d_model, T, ceil(H / patch_size), ceil(W / patch_size)), under its name; a classifier returns
            (B, num_classes) logits.
        Raises:
            DataError: the clips are smaller than a patch, or not RGB.
        """
        check_images(
            "TimeSformer", clips, min_size=self.patch_embed.patch_size, clips=True, in_channels=self.in_channels
        )
        x, size = self.embed(clips)
        # Without attention over time, each frame is a separate clip.
        block_size = (*size[:2], 1) if self.time_embed is None else size
        for block in self.blocks:
            x = block(x, block_size)
        if self.is_classifier:
            x = x[:, 0]  # (B, C), or (B T, C) of frames
            if self.time_embed is None:
                x = x.unflatten(0, (len(clips), size[2])).mean(dim=1)
            return self.head(self.norm(x))
        return {name: self._map(self.norm(x[:, 1:]), size) for name in self.feature_info}

    def embed(self, clips: Tensor) -> tuple[Tensor, Size]:
        """Compute the tokens of clips, with positions.

        Args:
            clips: (B, in_channels, T, H, W).
        Returns:
            (B, L, C), or without attention over time (B * T, 1 + h * w, C); and the size of the map.
        """
        batch, _, num_frames = clips.shape[:3]
        maps = self.patch_embed(clips.transpose(1, 2).flatten(0, 1))  # (B T, C, h, w)
        size = (maps.shape[2], maps.shape[3], num_frames)
        self._log_resampling(size)
        class_token, positions = self.cls_token + self.pos_embed[:, :1], self.pos_embed[:, 1:]
        patches = maps.flatten(2).transpose(1, 2)  # (B T, h w, C)
        patches = patches + resize_positions_2d(positions, self.grid, size[:2], mode="nearest")
        if self.time_embed is not None:
            patches = patches.unflatten(0, (batch, num_frames)).transpose(1, 2)  # (B, h w, T, C)
            patches = (patches + _resize_frames(self.time_embed, num_frames)).flatten(1, 2)  # (B, h w T, C)
        return torch.cat((class_token.expand(patches.shape[0], -1, -1), patches), dim=1), size

    def _map(self, patches: Tensor, size: Size) -> Tensor:
        """Convert (B, h * w * T, C), or (B * T, h * w, C) for separate frames, to a map (B, C, T, h, w)."""
        if self.time_embed is None:
            maps = patches.unflatten(1, size[:2]).unflatten(0, (-1, size[2]))  # (B, T, h, w, C)
            return maps.permute(0, 4, 1, 2, 3)
        return patches.unflatten(1, size).permute(0, 4, 3, 1, 2)

    def _log_resampling(self, size: Size) -> None:
        """Log, once for each size, that the position tables are for another one."""
        frames = size[2] if self.time_embed is None else self.time_embed.shape[1]
        if torch.compiler.is_compiling() or size in self._logged_sizes or (*self.grid, frames) == size:
            return
        self._logged_sizes.add(size)
        logger.warning(
            "TimeSformer: positions for %d x %d patches, %d frames are resampled (nearest) for clips of %d x %d, %d.",
            *(*self.grid, frames, *size),
        )

    @contextmanager
    def completing_state(self) -> Iterator[None]:
        """Accept, within the context, weights of an image ViT or of a TimeSformer with fewer steps (see the class)."""
        self._completes_state = True
        try:
            yield
        finally:
            self._completes_state = False

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Resample position tables for other clips, and add steps that pretrained weights lack.

        Raises:
            CheckpointError: the weights are for another scheme.
        """
        super().adapt_state(state, prefix)
        if f"{prefix}blocks.0.attn.qkv.weight" not in state:
            return  # weights of another network, which `load_weights` reports
        scheme = scheme_of(state, prefix)
        if scheme != self.attention:
            if not self._completes_state or scheme not in ("space", "joint"):
                raise CheckpointError(_other_scheme(scheme, self.attention, self._completes_state))
            self._complete_state(state, prefix)
        table = state.get(f"{prefix}pos_embed")
        if table is not None and table.ndim == 3 and table.shape[1] != self.pos_embed.shape[1]:
            side = math.isqrt(table.shape[1] - 1)
            if side**2 + 1 == table.shape[1]:
                logger.info(
                    "TimeSformer: positions of %d x %d patches are resampled to %d x %d.", side, side, *self.grid
                )
                patches = resize_positions_2d(table[:, 1:], (side, side), self.grid, mode="nearest")
                state[f"{prefix}pos_embed"] = torch.cat((table[:, :1], patches), dim=1)
        table = state.get(f"{prefix}time_embed")
        if table is not None and self.time_embed is not None and table.shape != self.time_embed.shape:
            num_frames = self.time_embed.shape[1]
            logger.info("TimeSformer: positions of %d frames are resampled to %d.", table.shape[1], num_frames)
            state[f"{prefix}time_embed"] = _resize_frames(table, num_frames)

    def _complete_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Add entries that a ViT lacks: copies of its attention for earlier steps, zeros for final layers and time."""
        if self.time_embed is None:
            state.pop(f"{prefix}time_embed", None)
        else:
            state.setdefault(f"{prefix}time_embed", torch.zeros_like(self.time_embed))
        for name, parameter in self.named_parameters():
            for step in SCHEMES[self.attention][:-1]:
                if f".{step}_fc." in name:
                    state[prefix + name] = torch.zeros_like(parameter)
                elif f".{step}_" in name:
                    state[prefix + name] = state[prefix + name.replace(f"{step}_", "")]


def _resize_frames(table: Tensor, num_frames: int) -> Tensor:
    """Resample (1, T, C) to (1, num_frames, C) by nearest neighbor."""
    if table.shape[1] == num_frames:
        return table
    return F.interpolate(table.mT, size=num_frames, mode="nearest").mT


def scheme_of(names: Iterable[str], prefix: str = "") -> str:
    """Return the attention scheme of a state dict; an image ViT's names are the same as for "space"."""
    names = set(names)
    block = f"{prefix}blocks.0."
    earlier = {step for step in STEPS if f"{block}{step}_attn.qkv.weight" in names}
    if not earlier:
        return "joint" if f"{prefix}time_embed" in names else "space"
    return next(
        (scheme for scheme, steps in SCHEMES.items() if {*steps[:-1]} == earlier), " and ".join(sorted(earlier))
    )


def _other_scheme(theirs: str, ours: str, is_pretrained: bool) -> str:
    also = " or of an image ViT" if theirs == "space" else ""
    remedy = f"Build the model with attention={theirs!r} (backbone timesformer_{theirs})"
    if theirs in ("space", "joint") and not is_pretrained:
        remedy += ", or, to start training from it, set model.backbone.pretrained=FILE"
    return f"the weights are those of a TimeSformer with attention={theirs!r}{also}; this model has {ours!r}. {remedy}."


BACKBONES.register_variants(TimeSformer, TIMESFORMER_VARIANTS)
