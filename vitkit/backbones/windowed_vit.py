"""A DINOv2 whose blocks attend in a few large windows, each with a class token of its own (RF-DETR, Robinson et al.
2025, https://arxiv.org/abs/2511.09554).

Shapes: B batch, h x w patches; n x n windows of P patches; T = tokens per window, its class token and its patches.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.backbones.vit import Tokens, ViT
from vitkit.errors import ConfigError
from vitkit.nn.attention import padding_bias
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD, check_images, padding_to_multiple
from vitkit.registry import BACKBONES
from vitkit.structures import FeatureInfo


class WindowedTokens(NamedTuple):
    """The tokens between two blocks, window by window."""

    x: Tensor
    """(B * n * n, T, d_model); the windows of an image follow each other, row by row."""
    padding: Tensor | None
    """(n * n, T) bool, True for patches that complete the windows and that no token attends to; None without any."""


@BACKBONES.register
class WindowedViT(ViT):
    """ViT-S of DINOv2 in windows: the maps after several blocks, "block3", "block6" ..., all at the patch's stride and
    through the same norm. Loads DINOv2's weights.

    The patches are divided into `num_windows` x `num_windows` windows, whatever the image's size and shape. Each has a
    copy of the class token; in `global_blocks`, the tokens of all windows attend to each other.

    Args:
        patch_size, d_model, depth, num_heads, image_size: see `ViT`.
        num_windows: number of windows along each side; 1: every block is global.
        global_blocks: indices of the blocks with global attention.
        out_features: the names of the maps, by the number of blocks before them; None: the last block of each quarter.
        num_classes, frozen_stages, pretrained, pixel_mean, pixel_std, in_channels: see `BackboneBase`. A classifier
            reads the mean of the class tokens.
        drop_path: see `drop_path_rates`.
    Raises:
        ConfigError: there are no windows, or a global block does not exist; and see `ViT`.
    """

    def __init__(
        self,
        patch_size: int = 16,
        d_model: int = 384,
        *,
        depth: int = 12,
        num_heads: int = 6,
        image_size: int | tuple[int, int] = 384,
        num_windows: int = 2,
        global_blocks: Sequence[int] = (3, 6, 9),
        out_features: Sequence[str] | None = None,
        num_classes: int | None = None,
        frozen_stages: int = 0,
        drop_path: float = 0.0,
        pretrained: bool | str | None = False,
        pixel_mean: Sequence[float] = IMAGENET_MEAN,
        pixel_std: Sequence[float] = IMAGENET_STD,
        in_channels: int = 3,
    ):
        if num_windows < 1:
            raise ConfigError(f"num_windows={num_windows}: expected at least 1, the number along each side.")
        wrong = sorted(set(global_blocks) - set(range(depth)))
        if wrong:
            raise ConfigError(f"global_blocks={wrong}: expected indices of blocks, 0 to {depth - 1}.")
        if out_features is None and num_classes is None:
            out_features = [f"block{depth * quarter // 4}" for quarter in (1, 2, 3, 4) if depth * quarter >= 4]
        sizes = dict(depth=depth, num_heads=num_heads, image_size=image_size, drop_path=drop_path)
        outputs = dict(out_features=out_features, num_classes=num_classes, frozen_stages=frozen_stages)
        pixels = dict(pixel_mean=pixel_mean, pixel_std=pixel_std, in_channels=in_channels)
        super().__init__(
            patch_size, d_model, **sizes, blocks=dict(layer_scale=1.0), **outputs, pretrained=pretrained, **pixels
        )
        self.num_windows = num_windows
        self.global_blocks = frozenset(global_blocks)
        self.attends_globally = num_windows == 1
        if not self.is_classifier:
            self.drop_stages_after(list(self.feature_info)[-1])

    @staticmethod
    def maps(patch_size: int, d_model: int, depth: int) -> dict[str, FeatureInfo]:
        """Return the description of the map after each block."""
        return {f"block{i}": FeatureInfo(d_model, patch_size) for i in range(1, depth + 1)}

    @property
    def has_class_token(self) -> bool:
        """Whether there is a single class token; each window has its own."""
        return self.num_windows == 1

    def global_attention(self) -> list[nn.Module]:
        """Return all blocks' attention, or nothing if there are windows, whose tokens lie in another order."""
        return super().global_attention() if self.num_windows == 1 else []

    def drop_stages_after(self, feature: str) -> None:
        del self.blocks[int(feature.removeprefix("block")) :]

    def entries_to_leave_out(self, names: Sequence[str]) -> list[str]:
        """Also return those of the blocks after the last map, up to `depth`."""
        blocks = {name: re.match(r"blocks\.(\d+)\.", name) for name in names}
        unused = range(len(self.blocks), self.depth)
        deeper = [name for name, block in blocks.items() if block and int(block[1]) in unused]
        return [*super().entries_to_leave_out(names), *deeper]

    def forward(self, images: Tensor) -> dict[str, Tensor] | Tensor:
        """Compute the maps, or a classifier's logits, of images of at least one patch."""
        check_images("WindowedViT", images, min_size=self.patch_embed.patch_size, in_channels=self.in_channels)
        tokens = self.tokens(images)
        windows, maps = self.partition(tokens), {}
        for i, block in enumerate(self.blocks):
            windows = self.run_block(i, block, windows, tokens.size)
            name = f"block{i + 1}"
            if name in self.feature_info and not self.is_classifier:
                x = self.norm(self.patches(windows, tokens.size))
                maps[name] = x.permute(0, 3, 1, 2)
        if self.is_classifier:
            return self.classify(self.join(windows, tokens.size))
        return maps

    def partition(self, tokens: Tokens) -> WindowedTokens:
        """Divide the patches into windows and give each a copy of the other tokens."""
        (height, width), n = tokens.size, self.num_windows
        others, patches = tokens.x[:, : self.num_tokens], tokens.x[:, self.num_tokens :].unflatten(1, tokens.size)
        margins = (0, 0, 0, padding_to_multiple(width, n), 0, padding_to_multiple(height, n))
        padding = None
        # A graph that is exported for any size has no sizes to decide by.
        if any(isinstance(margin, torch.SymInt) or margin for margin in margins):
            added = F.pad(patches.new_zeros(1, height, width, 1), margins, value=1.0)
            padding = F.pad(self._windows(added).flatten(1), (self.num_tokens, 0)) > 0
            patches = F.pad(patches, margins)
        others = others.repeat_interleave(n * n, dim=0)
        return WindowedTokens(torch.cat((others, self._windows(patches)), dim=1), padding)

    def _windows(self, x: Tensor) -> Tensor:
        """Divide maps into windows: (B, h, w, C) -> (B * n * n, P, C)."""
        n = self.num_windows
        x = x.unflatten(2, (n, -1)).unflatten(1, (n, -1))  # (B, n, h / n, n, w / n, C)
        return x.transpose(2, 3).flatten(0, 2).flatten(1, 2)

    def run_block(self, index: int, block: nn.Module, windows: WindowedTokens, size: tuple[int, int]) -> WindowedTokens:
        """Run a block in each window, or over the tokens of all windows of an image together."""
        x, padding = windows
        count, shape = self.num_windows**2, x.shape[1:]
        if index in self.global_blocks:
            x = x.unflatten(0, (-1, count)).flatten(1, 2)
            padding = None if padding is None else padding.flatten()[None]
        bias = (
            None if padding is None else padding_bias(padding, x.dtype).repeat(x.shape[0] // padding.shape[0], 1, 1, 1)
        )
        # Norms and networks see single tokens, so dividing the tokens differently only changes the attention.
        return WindowedTokens(block(x, size, None, bias).reshape(-1, *shape), windows.padding)

    def patches(self, windows: WindowedTokens, size: tuple[int, int]) -> Tensor:
        """Put the patches of all windows together: (B, h, w, d_model)."""
        n, (height, width) = self.num_windows, size
        x = windows.x[:, self.num_tokens :].unflatten(1, ((height + n - 1) // n, (width + n - 1) // n))
        x = x.unflatten(0, (-1, n, n)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return x[:, :height, :width]

    def join(self, windows: WindowedTokens, size: tuple[int, int]) -> Tensor:
        """Return all tokens of an image, (B, L, d_model), with the mean of the windows' class tokens."""
        others = windows.x[:, : self.num_tokens].unflatten(0, (-1, self.num_windows**2)).mean(1)
        return torch.cat((others, self.patches(windows, size).flatten(1, 2)), dim=1)
