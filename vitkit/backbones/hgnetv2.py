"""DEIMv2's smallest HGNetV2 networks (Huang et al. 2025, https://arxiv.org/abs/2509.20787), registered in timm."""

from typing import Any, Literal

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.hgnet import HighPerfGpuNet
from torch import Tensor

from vitkit.backbones.timm_adapter import TimmBackbone
from vitkit.errors import ConfigError
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD
from vitkit.registry import BACKBONES, nearest

# As in timm's table of HGNetV2: channels of the input, of layers and of the output, number of blocks, whether it
# downsamples, whether its convolutions are depthwise, kernel size, layers of a block. The other stages are B0's.
_THIRD_STAGES = {"atto": [256, 64, 256, 1, True, True, 3, 3], "femto": [256, 64, 512, 1, True, True, 5, 3]}
_SETTINGS = dict(
    num_classes=1000, input_size=(3, 224, 224), pool_size=(7, 7), crop_pct=0.965, interpolation="bicubic",
    mean=IMAGENET_MEAN, std=IMAGENET_STD, classifier="head.fc", first_conv="stem.stem1.conv",
)  # fmt: skip
default_cfgs = generate_default_cfgs({f"hgnetv2_{size}": _SETTINGS for size in _THIRD_STAGES})
"""timm reads these settings by this name."""


def _create(size: str, pretrained: bool, out_indices: tuple[int, ...] = (0, 1, 2, 3), **options: Any) -> HighPerfGpuNet:
    third = _THIRD_STAGES[size]
    stages = [[16, 16, 64, 1, False, False, 3, 3], [64, 32, 256, 1, True, False, 3, 3], third]
    stages.append([third[2], 128, 1024, 1, True, True, 5, 3])
    return build_model_with_cfg(
        HighPerfGpuNet,
        f"hgnetv2_{size}",
        pretrained,
        model_cfg=dict(stem_type="v2", stem_chs=[16, 16], **{f"stage{i}": s for i, s in enumerate(stages, start=1)}),
        feature_cfg=dict(flatten_sequential=True, out_indices=out_indices),
        use_lab=True,
        **options,
    )


@register_model
def hgnetv2_atto(pretrained: bool = False, **options: Any) -> HighPerfGpuNet:
    """Build Atto, for `timm.create_model`."""
    return _create("atto", pretrained, **options)


@register_model
def hgnetv2_femto(pretrained: bool = False, **options: Any) -> HighPerfGpuNet:
    """Build Femto, for `timm.create_model`."""
    return _create("femto", pretrained, **options)


@BACKBONES.register
class SmallHGNetV2(TimmBackbone):
    """HGNetV2 whose third stage is smaller than B0's. Loads B0's weights, of the third stage those that fit.

    DEIMv2's Pico is `TimmBackbone` with name="hgnetv2_b0" and out_features=["res4"].

    Args:
        size: "atto" or "femto".
        out_features, options: see `TimmBackbone`; DEIMv2 only uses "res4".
    Raises:
        ConfigError: the size is unknown; see `TimmBackbone`.
    """

    optional_weights = (*TimmBackbone.optional_weights, "net.stages_2.*")

    def __init__(self, size: Literal["atto", "femto"], *, out_features: list[str] | None = None, **options: Any):
        super().__init__(f"hgnetv2_{size}", out_features=out_features, **options)

    @staticmethod
    def check_arguments(name: str = "", *, size: str = "", **_: Any) -> None:
        """Check a config without building anything.

        Raises:
            ConfigError: the size is unknown.
        """
        size = size or name.removeprefix("hgnetv2_")
        if size not in _THIRD_STAGES:
            raise ConfigError(f"size={size!r}: unknown. {nearest(size, _THIRD_STAGES)}")

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Rename timm's keys, and drop weights of B0's third stage that have another shape or no counterpart."""
        super().adapt_state(state, prefix)
        expected, third = self.state_dict(), f"{prefix}net.stages_2."
        for name in [key.removeprefix(prefix) for key in state if key.startswith((third, f"{prefix}stages.2."))]:
            if name not in expected or state[prefix + name].shape != expected[name].shape:
                del state[prefix + name]
