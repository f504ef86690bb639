"""ViTDet (Li et al. 2022, https://arxiv.org/abs/2203.16527): a ViT for dense prediction, most of whose blocks attend
within windows of a fixed size, with decomposed relative positions.

Shapes: B batch, h x w patches, L = h * w tokens, row by row.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from vitkit.backbones.vit import VIT_SIZES, ClassifierOptions, ViT
from vitkit.backbones.vit_blocks import Attention
from vitkit.errors import ConfigError
from vitkit.kernels.windows import window_partition, window_reverse
from vitkit.nn.attention import attend
from vitkit.nn.relative_attention import attend_relative
from vitkit.nn.vit_positions import resize_positions_1d
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD
from vitkit.registry import BACKBONES

VITDET_VARIANTS = {
    f"vitdet_{name}": dict(**VIT_SIZES[name], drop_path=drop_path)
    for name, drop_path in (("base", 0.1), ("large", 0.4), ("huge", 0.5))
}
"""The variants of section 4 and appendix A.2."""


@BACKBONES.register
class ViTDet(ViT):
    """ViT without a class token and without a norm after the last block: one map at the patch's stride, "res4" for
    patches of 16 (res{log2 stride}). Loads ViT's weights.

    As in the original, position embeddings are resampled without antialiasing. For heads that need several levels, use
    the neck `SimpleFeaturePyramid`.

    Args:
        patch_size, d_model, depth, num_heads, mlp_ratio, image_size, classifier, drop_path: see `ViT`. A classifier
            has a norm, and reads the mean of the patches by default.
        positions: learned positions of patches ("patches"), or of their row and column ("axes"), or "none".
        window_size: side, in patches, of the windows in which all but a few blocks attend; None: no windows.
        global_blocks: indices of the blocks with global attention; None: the last one of each quarter.
        relative_positions: side, in patches, of the map that the relative positions of global blocks are made for
            (blocks with windows also get them); None: no relative positions.
        out_features, num_classes, frozen_stages, pretrained, pixel_mean, pixel_std, in_channels: see `BackboneBase`.
    Raises:
        ConfigError: a size is below 1, or a global block does not exist; and see `ViT`.
    """

    optional_weights = ("*.rel_pos_h", "*.rel_pos_w", "fc_norm.*")
    attends_globally = False
    antialias = False

    def __init__(
        self,
        patch_size: int = 16,
        d_model: int = 768,
        *,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        image_size: int | tuple[int, int] = 224,
        positions: Literal["patches", "axes", "none"] = "patches",
        window_size: int | None = 14,
        global_blocks: Sequence[int] | None = None,
        relative_positions: int | None = 64,
        classifier: ClassifierOptions | None = None,
        drop_path: float = 0.0,
        out_features: Sequence[str] | None = None,
        num_classes: int | None = None,
        frozen_stages: int = 0,
        pretrained: bool | str | None = False,
        pixel_mean: Sequence[float] = IMAGENET_MEAN,
        pixel_std: Sequence[float] = IMAGENET_STD,
        in_channels: int = 3,
    ):
        if positions not in ("patches", "axes", "none"):
            raise ConfigError(f"positions={positions!r}: expected 'patches', 'axes' or 'none'.")
        global_blocks = _choose_global_blocks(depth, window_size, global_blocks)
        super().__init__(
            patch_size,
            d_model,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            image_size=image_size,
            positions=positions,
            class_token=False,
            classifier=dict(pooling="mean") | dict(classifier or {}),
            drop_path=drop_path,
            out_features=out_features,
            num_classes=num_classes,
            frozen_stages=frozen_stages,
            pretrained=pretrained,
            pixel_mean=pixel_mean,
            pixel_std=pixel_std,
            in_channels=in_channels,
        )
        for i, block in enumerate(self.blocks):
            window = None if i in global_blocks else window_size
            table = None if relative_positions is None else window or relative_positions
            block.attn = WindowAttention(block.attn, window_size=window, relative_positions=table)
        if not self.is_classifier:
            self.norm = nn.Identity()
        self.freeze()  # the relative positions, too


class WindowAttention(Attention):
    """A self-attention whose layers attend within windows of patches, or by relative positions.

    Args:
        attention: the self-attention over all tokens whose layers it takes over.
        window_size: side of the windows, in patches; None: attend over all tokens.
        relative_positions: side, in patches, of the map that decomposed relative positions (section 3; Li et al. 2021,
            https://arxiv.org/abs/2112.01526, equation 4) are made for; None: no relative positions.
    """

    def __init__(self, attention: Attention, *, window_size: int | None, relative_positions: int | None):
        nn.Module.__init__(self)
        self.num_heads, self.qkv, self.proj = attention.num_heads, attention.qkv, attention.proj
        self.q_bias, self.v_bias = attention.q_bias, attention.v_bias
        self.window_size = window_size
        self.rel_pos_h = self.rel_pos_w = None
        if relative_positions is not None:
            shape = (2 * relative_positions - 1, self.proj.in_features // self.num_heads)
            self.rel_pos_h = nn.Parameter(torch.zeros(shape))
            self.rel_pos_w = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor, size: tuple[int, int], rotations: None = None, bias: None = None) -> Tensor:
        """Attend: (B, L, d_model) -> (B, L, d_model); `size` is (h, w), and there are no rotations and no bias."""
        if self.window_size is None:
            return self._attend(x, size)
        # As in the original, windows that extend beyond the border see zeros there, inserted after the norm.
        windows = window_partition(x.unflatten(1, size), self.window_size)
        windows = self._attend(windows, (self.window_size, self.window_size))
        return window_reverse(windows, self.window_size, size).flatten(1, 2)

    def _attend(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        q, k, v = self.project(x)
        if self.rel_pos_h is None:
            x = attend(q, k, v)
        else:
            x = attend_relative(q, k, v, (self.rel_pos_h, self.rel_pos_w), size, size)
        return self.proj(x.transpose(1, 2).flatten(2))

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Also resize relative positions for maps of another size."""
        super().adapt_state(state, prefix)
        for name in ("rel_pos_h", "rel_pos_w"):
            table, key = getattr(self, name), prefix + name
            if table is not None and key in state:
                state[key] = resize_positions_1d(state[key], len(table))


def _choose_global_blocks(depth: int, window_size: int | None, global_blocks: Sequence[int] | None) -> set[int]:
    """Return the indices of the blocks with global attention; see `ViTDet`. Raise a ConfigError if there are no
    windows, or an index is out of range."""
    if window_size is None:
        if global_blocks is not None:
            raise ConfigError("global_blocks: without window_size, all blocks are global. Leave it out.")
        return set(range(depth))
    if window_size < 1:
        raise ConfigError(f"window_size={window_size}: expected at least 1, or None for no windows.")
    if global_blocks is None:
        return {depth * quarter // 4 - 1 for quarter in (1, 2, 3, 4)} - {-1}
    wrong = sorted(set(global_blocks) - set(range(depth)))
    if wrong:
        raise ConfigError(f"global_blocks={wrong}: expected indices of blocks, 0 to {depth - 1}.")
    return set(global_blocks)


BACKBONES.register_variants(ViTDet, VITDET_VARIANTS)
