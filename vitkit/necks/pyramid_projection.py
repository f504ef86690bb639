"""Projects several feature maps to the width of a transformer, and derives coarser ones from the last."""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.necks.simple_pyramid import pyramid_override
from vitkit.nn.padding import group_norm, zero_padding
from vitkit.registry import NECKS, nearest
from vitkit.structures import FeatureInfo


@NECKS.register
class PyramidProjection(nn.Module):
    """Deformable DETR's levels (Zhu et al. 2021, section 4.1, https://arxiv.org/abs/2010.04159).

    A 1x1 convolution of each map; then, up to `num_levels`, 3x3 convolutions with stride 2, the first on the
    unprojected coarsest map, each of the others on the previous level. Every level has a group norm.

    Args:
        feature_info: description of the backbone's maps, fine to coarse.
        out_channels: channels of each level.
        in_features: names of the maps to use, fine to coarse; None: all.
        num_levels: number of levels, at least the number of maps; None: the number of maps.
        num_groups: number of groups in the group norms.
        isolate_padding: whether padding is kept from affecting convolutions and norms; False: it is treated like the
            image, as in the original. The model sets it.
    Raises:
        ConfigError: the backbone has no map of that name, there are more maps than levels, or the groups do not divide
            the channels.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        out_channels: int,
        *,
        in_features: list[str] | None = None,
        num_levels: int | None = None,
        num_groups: int = 32,
        isolate_padding: bool = False,
    ):
        super().__init__()
        self.isolate_padding = isolate_padding
        for name in in_features or ():
            if name not in feature_info:
                arguments = dict(in_features=in_features, out_channels=out_channels, num_levels=num_levels)
                if num_groups != 32:
                    arguments["num_groups"] = num_groups
                pyramid = pyramid_override(feature_info, "PyramidProjection", **arguments)
                raise ConfigError(
                    f"PyramidProjection: the backbone has no feature {name!r}. {nearest(name, feature_info)} "
                    f"Name other maps in model.neck.in_features; for a backbone with one map, make several: {pyramid}"
                )
        self.in_features = [name for name in feature_info if in_features is None or name in in_features]
        num_levels = len(self.in_features) if num_levels is None else num_levels
        if num_levels < len(self.in_features) or not self.in_features:
            raise ConfigError(
                f"PyramidProjection: num_levels={num_levels}, but there are {len(self.in_features)} maps "
                f"({', '.join(self.in_features)}). Set model.neck.num_levels to {len(self.in_features) or 1} or more, "
                "or name fewer maps in model.neck.in_features."
            )
        if out_channels % num_groups:
            raise ConfigError(
                f"PyramidProjection: num_groups={num_groups} must divide out_channels={out_channels}: "
                "set model.neck.num_groups."
            )
        self.feature_info = {name: FeatureInfo(out_channels, feature_info[name].stride) for name in self.in_features}
        channels = [feature_info[name].channels for name in self.in_features]
        convolutions = [nn.Conv2d(c, out_channels, kernel_size=1) for c in channels]
        stride = feature_info[self.in_features[-1]].stride
        for i in range(num_levels - len(channels)):
            stride *= 2
            self.feature_info[free_name(stride, self.feature_info)] = FeatureInfo(out_channels, stride)
            in_channels = channels[-1] if i == 0 else out_channels
            convolutions.append(nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=2, padding=1))
        for convolution in convolutions:
            nn.init.xavier_uniform_(convolution.weight)
            nn.init.zeros_(convolution.bias)
        self.levels = nn.ModuleList(nn.Sequential(c, nn.GroupNorm(num_groups, out_channels)) for c in convolutions)

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Return the levels.

        Args:
            features: name -> (B, channels, H, W).
            padding_mask: (B, H, W) bool at the size of the images, True = padding.
        Returns:
            name -> (B, out_channels, H, W), fine to coarse.
        """
        padding_mask = padding_mask if self.isolate_padding else None
        maps = [features[name] for name in self.in_features]
        coarsest = maps[-1]
        outputs = [self._level(level, x, padding_mask) for level, x in zip(self.levels, maps)]
        for i, level in enumerate(self.levels[len(maps) :]):
            outputs.append(self._level(level, coarsest if i == 0 else outputs[-1], padding_mask))
        return dict(zip(self.feature_info, outputs))

    def _level(self, level: nn.Sequential, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        convolution, norm = level
        return group_norm(convolution(zero_padding(x, padding_mask)), padding_mask, norm)


def free_name(stride: int, taken: Iterable[str]) -> str:
    """Return res{log2 stride}, or the next number that is not taken: a dilated res5 has the stride of res4."""
    number = stride.bit_length() - 1
    while f"res{number}" in taken:
        number += 1
    return f"res{number}"
