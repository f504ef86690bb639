"""timm's models as backbones (https://github.com/huggingface/pytorch-image-models)."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.models import group_parameters
from torch import Tensor, nn

from vitkit.backbones.base import Backbone, check_images, choose_features
from vitkit.errors import ConfigError
from vitkit.registry import BACKBONES, nearest
from vitkit.structures import FeatureInfo

_ANY_SIZE = (dict(dynamic_img_size=True, dynamic_img_pad=True), dict(strict_img_size=False), {})
"""What lets a family take images of any size; the first that a model knows is used."""


@BACKBONES.register
class TimmBackbone(Backbone):
    """Any timm model: `BACKBONES.build("timm/convnext_tiny")`, `model.backbone=timm/convnext_tiny`.

    Attention inside timm's models does not run through vitkit's core, so that AttentionRecorder does not see it.

    Args:
        name: timm's, also with the tag of its weights ("convnext_tiny.fb_in1k").
        out_features: maps to return, "res2" for stride 4 and so on (res{log2 stride}); all from stride 4 upwards if
            None. Of several maps with one stride the deepest is meant.
        num_classes: makes it a classifier.
        frozen_stages: how many of timm's parameter groups are not trained, beside the stem.
        drop_path: timm's `drop_path_rate`; None: the model's default.
        pretrained: as `Backbone` says; True: timm's weights of that name.
    Raises:
        ConfigError: timm has no model of that name, or it gives no such maps.
    """

    optional_weights = ("*num_batches_tracked",)
    renames_itself = True
    """timm's key names are meant for this class, also where they look like an official format's."""

    def __init__(
        self,
        name: str,
        *,
        out_features: Sequence[str] | None = None,
        num_classes: int | None = None,
        frozen_stages: int = 0,
        drop_path: float | None = None,
        pretrained: bool | str = False,
    ):
        self.check_arguments(name)
        super().__init__()
        self.name = name
        self.pretrained = pretrained
        self.frozen_stages = frozen_stages
        self.is_classifier = num_classes is not None
        options = {} if drop_path is None else {"drop_path_rate": drop_path}
        if self.is_classifier:
            self.feature_info = choose_features(name, {}, out_features, num_classes=num_classes)
            self.net = _create(name, num_classes=num_classes, **options)
            heads = self.net.pretrained_cfg.get("classifier") or ()
            self.class_head = tuple(f"net.{head}." for head in ((heads,) if isinstance(heads, str) else heads))
        else:
            self.indices, available = _features(name)
            if out_features is None:
                out_features = [feature for feature, info in available.items() if info.stride >= 4] or None
            self.feature_info = choose_features(name, available, out_features, num_classes=None)
            self.options = options
            self.net = self._feature_net()
            self.channels_last = str(getattr(self.net, "output_fmt", "")).endswith("NHWC")
            self.total_stride = max(info.stride for info in available.values())
        if frozen_stages:
            self.freeze()

    def _feature_net(self) -> nn.Module:
        chosen = tuple(self.indices[feature] for feature in self.feature_info)
        return _create(self.name, features_only=True, out_indices=chosen, **self.options)

    def keep_features(self, names: Iterable[str]) -> None:
        names = set(names)
        if names >= self.feature_info.keys():
            return
        super().keep_features(names)
        state = self.net.state_dict()
        self.net = self._feature_net().train(self.training)
        self.net.load_state_dict({key: state[key] for key in self.net.state_dict()})
        if self.frozen_stages:
            self.freeze()

    @staticmethod
    def check_arguments(name: str, **_: Any) -> None:
        """
        Raises:
            ConfigError: timm has no such model.
        """
        architecture, _, tag = name.partition(".")
        if not timm.is_model(architecture):
            raise ConfigError(
                f"timm {timm.__version__} has no model {architecture!r}. {nearest(architecture, timm.list_models())}"
            )
        known = timm.list_pretrained(f"{architecture}.*")
        if tag and name not in known:
            raise ConfigError(f"timm {timm.__version__} has no weights {name!r}. {nearest(name, known)}")

    def forward(self, images: Tensor) -> dict[str, Tensor] | Tensor:
        """
        Args:
            images: (B, 3, H, W) float, normalised; zero-padded inside to whole places of the coarsest map.
        Returns:
            the maps named by `out_features`, each (B, channels, ceil(H / stride), ceil(W / stride)), fine to
            coarse; a classifier returns (B, num_classes) logits.
        Raises:
            DataError: the images are not RGB, or smaller than the total stride.
        """
        check_images(self.name, images, least=1 if self.is_classifier else self.total_stride)
        if self.is_classifier:
            return self.net(images)
        height, width = images.shape[-2:]
        images = F.pad(images, (0, -width % self.total_stride, 0, -height % self.total_stride))
        maps = self.net(images)
        if self.channels_last:
            maps = [x.permute(0, 3, 1, 2) for x in maps]
        return {
            name: x[..., : math.ceil(height / info.stride), : math.ceil(width / info.stride)]
            for (name, info), x in zip(self.feature_info.items(), maps)
        }

    def stages(self) -> list[list[nn.Module | nn.Parameter]]:
        """timm's coarse parameter groups, as far as they are kept."""
        with torch.device("meta"):
            full = timm.create_model(self.name)
        groups = group_parameters(full, full.group_matcher(coarse=True))
        own = dict(self.named_parameters())
        kept = [[key for key in self._own_keys(names).values() if key in own] for _, names in sorted(groups.items())]
        return [[self._owner(key) for key in keys] for keys in kept if keys]

    def _owner(self, key: str) -> nn.Module | nn.Parameter:
        """The layer of a parameter, which may have statistics, too; the parameter itself if it is of a container."""
        module = self.get_submodule(key.rpartition(".")[0])
        return self.get_parameter(key) if any(True for _ in module.children()) else module

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Renames timm's keys, of whole models, to those of the part that is kept here."""
        names = [key.removeprefix(prefix) for key in state if key.startswith(prefix)]
        for name, own_key in self._own_keys(names).items():
            if own_key != name:
                state[prefix + own_key] = state.pop(prefix + name)

    def _own_keys(self, names: Iterable[str]) -> dict[str, str]:
        """timm's name -> the key here: timm wraps models that return features, or joins a name's first two parts."""
        own = self.state_dict().keys()
        forms = ("{0}", "net.{0}", "net.{1}", "net.model.{0}")
        return {
            name: next((k for form in forms if (k := form.format(name, name.replace(".", "_", 1))) in own), name)
            for name in names
        }

    @property
    def recompute(self) -> bool:
        """Whether timm's blocks recompute their activations in the backward pass."""
        return getattr(self, "_recompute", False)

    @recompute.setter
    def recompute(self, enabled: bool) -> None:
        model = self.net if hasattr(self.net, "set_grad_checkpointing") else getattr(self.net, "model", None)
        if not hasattr(model, "set_grad_checkpointing"):
            raise ConfigError(f"timm's {self.name} cannot recompute its activations.")
        model.set_grad_checkpointing(enabled)
        self._recompute = enabled

    def _address(self) -> str:
        return f"timm/{self.name}"


def _create(name: str, **options: Any) -> nn.Module:
    """timm's model in the form that takes the most image sizes."""
    for any_size in _ANY_SIZE:
        try:
            return timm.create_model(name, **options, **any_size)
        except TypeError as error:
            if "unexpected keyword" not in str(error):
                raise
            reason = error
    raise ConfigError(f"timm's {name}: {reason}.")


def _features(name: str) -> tuple[dict[str, int], dict[str, FeatureInfo]]:
    """Feature name -> timm's index, and what it is; fine to coarse.

    Raises:
        ConfigError: the model gives no maps.
    """
    try:
        with torch.device("meta"):
            info = _create(name, features_only=True).feature_info
    except (RuntimeError, AttributeError, AssertionError) as error:
        raise ConfigError(
            f"timm's {name} gives no feature maps ({str(error).splitlines()[0]}). timm.list_models(...) lists models; "
            "those with features_only do."
        ) from error
    rows = sorted(zip(info.reduction(), info.out_indices, info.channels()))
    indices = {f"res{round(math.log2(stride))}": index for stride, index, _ in rows}
    return indices, {f"res{round(math.log2(s))}": FeatureInfo(channels, s) for s, _, channels in rows}


BACKBONES.register_prefix("timm/", TimmBackbone, argument="name")
