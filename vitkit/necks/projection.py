"""Projects feature maps to the width of a transformer."""

from collections.abc import Mapping

from torch import Tensor, nn

from vitkit.nn.detection import check_features
from vitkit.registry import NECKS
from vitkit.structures import FeatureInfo


@NECKS.register
class ChannelProjection(nn.Module):
    """A 1x1 convolution of the coarsest map (DETR), or of each of the named maps.

    Args:
        feature_info: description of the backbone's maps, fine to coarse.
        out_channels: channels of each output.
        in_features: names of the maps to project; None: only the coarsest.
        isolate_padding: accepted as by other necks; kernels of one pixel let no padding in.
    Raises:
        ConfigError: the backbone has no map of that name.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        out_channels: int,
        *,
        in_features: list[str] | None = None,
        isolate_padding: bool = False,
    ):
        super().__init__()
        names = list(feature_info)[-1:] if in_features is None else in_features
        check_features("ChannelProjection", names, feature_info)
        self.in_features = list(names)
        self.feature_info = {name: FeatureInfo(out_channels, feature_info[name].stride) for name in names}
        self.projections = nn.ModuleDict(
            {name: nn.Conv2d(feature_info[name].channels, out_channels, kernel_size=1) for name in names}
        )

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """name -> (B, channels, H, W) to name -> (B, out_channels, H, W)."""
        return {name: project(features[name]) for name, project in self.projections.items()}
