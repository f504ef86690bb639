"""Base of hybrid encoders: self-attention on the coarsest map, and the fusion of all maps, top-down and bottom-up."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.attention import padding_bias
from vitkit.nn.detection import check_features
from vitkit.nn.layers import Activation
from vitkit.nn.position import sine_positions_grid
from vitkit.nn.rep_blocks import ConvNorm
from vitkit.nn.transformer import TransformerEncoderLayer
from vitkit.ops.images import resize_mask
from vitkit.structures import FINER, FeatureInfo


class HybridEncoderBase(nn.Module):
    """Self-attention within the coarsest map (AIFI), then fusion of all maps, top-down and bottom-up (CCFF).

    A subclass builds its convolutions by `build_fusion`, and may override `projection` and `join`.

    Args:
        feature_info: description of the backbone's maps, fine to coarse.
        out_channels: channels of each output.
        in_features: names of the maps to use, fine to coarse, each of half the stride of the next; None: all.
        num_heads, d_ffn, dropout, activation: of the layer of self-attention, see `vitkit.nn.transformer`.
        finer: name of a map that is passed on as it is, besides the others, for masks (D-FINE-seg's N).
        isolate_padding: whether padding is kept from affecting convolutions; False: it is treated like the image, as
            in the originals. The self-attention never sees padding. The model sets it.
    Raises:
        ConfigError: the backbone has no map of that name, or strides do not double.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        out_channels: int,
        *,
        in_features: Sequence[str] | None = None,
        num_heads: int = 8,
        d_ffn: int = 1024,
        dropout: float = 0.0,
        activation: Activation = "gelu",
        finer: str | None = None,
        isolate_padding: bool = False,
    ):
        super().__init__()
        others = [name for name in feature_info if name != finer]
        self.encoded = others if in_features is None else list(in_features)
        self.finer = finer
        self.in_features = self.encoded if finer is None else [finer, *self.encoded]
        check_features(type(self).__name__, self.in_features, feature_info)
        infos = [feature_info[name] for name in self.encoded]
        strides = [info.stride for info in infos]
        if not strides or strides != [strides[0] * 2**i for i in range(len(strides))]:
            raise ConfigError(
                f"{type(self).__name__}: in_features {', '.join(self.encoded)} have strides "
                f"{', '.join(map(str, strides))}; expected each to be twice the previous one."
            )
        self.isolate_padding = isolate_padding
        self.feature_info = {name: FeatureInfo(out_channels, feature_info[name].stride) for name in self.encoded}
        if finer is not None:
            self.feature_info = {FINER: feature_info[finer], **self.feature_info}
        self.input_proj = nn.ModuleList(self.projection(info.channels, out_channels) for info in infos)
        self.encoder = TransformerEncoderLayer(
            out_channels, num_heads=num_heads, d_ffn=d_ffn, dropout=dropout, activation=activation
        )

    def projection(self, in_channels: int, out_channels: int) -> nn.Module:
        """Return the layer that brings a map to `out_channels`."""
        return ConvNorm(in_channels, out_channels, 1, silu=False)

    def join(self, resized: Tensor, x: Tensor) -> Tensor:
        """Return the input of a fusion block, from the resized result for the previous map and a map, both
        (B, out_channels, H, W)."""
        return torch.cat([resized, x], dim=1)

    def build_fusion(
        self, lateral: Callable[[], nn.Module], fuse: Callable[[], nn.Module], downsample: Callable[[], nn.Module]
    ) -> None:
        """Build the convolutions of the top-down and bottom-up paths.

        Args:
            lateral: returns the layer that a map passes before it is upsampled, (B, C, H, W) -> the same, C being
                `out_channels`.
            fuse: returns the layer that maps the result of `join` to (B, C, H, W); called with the padding mask.
            downsample: returns the layer that halves a map, (B, C, H, W) -> (B, C, ceil(H / 2), ceil(W / 2)); called
                with the padding mask.
        """
        steps = range(len(self.encoded) - 1)
        self.lateral_convs = nn.ModuleList(lateral() for _ in steps)
        self.fpn_blocks = nn.ModuleList(fuse() for _ in steps)
        self.downsample_convs = nn.ModuleList(downsample() for _ in steps)
        self.pan_blocks = nn.ModuleList(fuse() for _ in steps)

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Encode the maps.

        Args:
            features: name -> (B, channels, H, W).
            padding_mask: (B, H, W) bool at the size of the images, True = padding.
        Returns:
            name -> (B, out_channels, H, W), fine to coarse; before these "finer", a map as it is, if there is one.
        """
        isolated = padding_mask if self.isolate_padding else None
        maps = [project(features[name]) for project, name in zip(self.input_proj, self.encoded)]
        maps[-1] = self._attend(maps[-1], padding_mask)
        # Top-down: each coarser map, doubled in size, joins the next finer one.
        for i, (lateral, fuse) in enumerate(zip(self.lateral_convs, self.fpn_blocks)):
            coarse, fine = len(maps) - 1 - i, len(maps) - 2 - i
            maps[coarse] = lateral(maps[coarse])
            upsampled = F.interpolate(maps[coarse], size=maps[fine].shape[-2:], mode="nearest")
            maps[fine] = fuse(self.join(upsampled, maps[fine]), isolated)
        # Bottom-up.
        for i, (downsample, fuse) in enumerate(zip(self.downsample_convs, self.pan_blocks)):
            maps[i + 1] = fuse(self.join(downsample(maps[i], isolated), maps[i + 1]), isolated)
        finer = {} if self.finer is None else {FINER: features[self.finer]}
        return {**finer, **dict(zip(self.encoded, maps))}

    def _attend(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        """Apply self-attention to the locations of a map, (B, C, H, W)."""
        size = x.shape[-2:]
        positions = sine_positions_grid(tuple(size), x.shape[1], device=x.device).to(x.dtype)
        bias = None if padding_mask is None else padding_bias(resize_mask(padding_mask, size).flatten(1), x.dtype)
        tokens = self.encoder(x.flatten(2).transpose(1, 2), positions[None], bias=bias)
        return tokens.transpose(1, 2).unflatten(2, size)
