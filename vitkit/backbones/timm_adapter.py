"""timm's models as backbones (https://github.com/huggingface/pytorch-image-models)."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import takewhile
from typing import Any

import timm
import torch
from timm.layers import PatchEmbed, resample_abs_pos_embed, resample_patch_embed
from timm.models import adapt_input_conv, group_parameters
from timm.models.eva import EvaAttention
from timm.models.vision_transformer import Attention
from timm.utils.model import freeze_batch_norm_2d
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitkit.backbones.base import BackboneBase
from vitkit.backbones.timm_blocks import make_lean
from vitkit.errors import ConfigError, DataError
from vitkit.nn.activation_checkpointing import keep_statistics
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD, check_images, pad_to_multiple
from vitkit.protocols.model import child
from vitkit.registry import BACKBONES, nearest
from vitkit.structures import FeatureInfo

_NAME_FORMS = ("{0}", "net.{0}", "net.{1}", "net.model.{0}")
"""The names of timm's entries here, from timm's own and those with the first two parts joined."""
_ANY_SIZE = (dict(dynamic_img_size=True, dynamic_img_pad=True), dict(strict_img_size=False), {})
"""Options that make a model family accept images of any size; the first that a model supports is used."""


@BACKBONES.register
class TimmBackbone(BackboneBase):
    """Any timm model: `BACKBONES.build("timm/convnext_tiny")`, `model.backbone=timm/convnext_tiny`.

    Attention inside timm's models does not use vitkit's core. An AttentionRecorder sees that of the modules which timm
    can run without its fused kernel, such as those of ViT, DeiT, EVA and Swin.

    Args:
        name: timm's name of the model, optionally with the tag of its weights ("convnext_tiny.fb_in1k").
        out_features: maps to return, "res2" for stride 4 and so on (res{log2 stride}); None: all from stride 4 on. If
            several maps have the same stride, the name refers to the deepest.
        norm: "frozen_bn": a fixed scale and shift in place of batch norms, for training with few images per GPU; None:
            the model's own.
        frozen_stages: number of timm's parameter groups that are not trained, in addition to the stem.
        frozen_stem: whether the stem is not trained even if no stage is frozen.
        drop_path: timm's `drop_path_rate`; None: the model's default.
        patch_size: patch size of a plain ViT, in pixels; weights for another one, such as DINOv2's 14, are resampled
            when they are loaded (https://arxiv.org/abs/2212.08013). None: the model's default.
        pixel_mean, pixel_std: see `BackboneBase`; None: those of timm's weights.
        num_classes, options: the arguments of `BackboneBase`; pretrained=True means timm's weights of that name.
    Raises:
        ConfigError: timm has no model of that name, the model has no such maps, its patch size cannot be set, or
            another argument is invalid.
    """

    optional_weights = ("*num_batches_tracked",)
    renames_itself = True
    """timm's key names are meant for this class, even if they look like those of an official format."""

    def __init__(
        self,
        name: str,
        *,
        out_features: Sequence[str] | None = None,
        num_classes: int | None = None,
        norm: str | None = None,
        frozen_stem: bool = False,
        drop_path: float | None = None,
        patch_size: int | None = None,
        pixel_mean: Sequence[float] | None = None,
        pixel_std: Sequence[float] | None = None,
        **options: Any,
    ):
        self.check_arguments(name)
        if norm not in (None, "frozen_bn"):
            raise ConfigError(f"norm={norm!r}: expected 'frozen_bn', or None for the norms of timm's {name}.")
        indices, available = {}, {}
        if num_classes is None:
            indices, available = _features(name, {} if patch_size is None else {"patch_size": patch_size})
            if out_features is None:
                out_features = [feature for feature, info in available.items() if info.stride >= 4] or None
        cfg = timm.get_pretrained_cfg(name)
        mean, std = (IMAGENET_MEAN, IMAGENET_STD) if cfg is None else (cfg.mean, cfg.std)
        super().__init__(
            available,
            out_features=out_features,
            num_classes=num_classes,
            pixel_mean=mean if pixel_mean is None else pixel_mean,
            pixel_std=std if pixel_std is None else pixel_std,
            **options,
        )
        self.name = name
        self.norm = norm
        self.frozen_stem = frozen_stem
        self._activation_checkpointing = self._is_running = False
        first = () if cfg is None else cfg.first_conv or ()
        self.first_convolutions = (first,) if isinstance(first, str) else tuple(first)
        """timm's names of the layers that read the image."""
        in_chans = None if self.in_channels == 3 else self.in_channels
        arguments = dict(drop_path_rate=drop_path, patch_size=patch_size, in_chans=in_chans)
        arguments = {argument: value for argument, value in arguments.items() if value is not None}
        if self.is_classifier:
            self.net = self._with_norms(_create(name, num_classes=num_classes, **arguments))
            heads = self.net.pretrained_cfg.get("classifier") or ()
            self.class_head = tuple(f"net.{head}." for head in ((heads,) if isinstance(heads, str) else heads))
        else:
            self.indices, self.arguments = indices, arguments
            self.net = self._feature_net()
            self.channels_last = str(getattr(self.net, "output_fmt", "")).endswith("NHWC")
            self.total_stride = max(info.stride for info in available.values())
        if self._frozen():
            self.freeze()

    @property
    def patch_size(self) -> int | None:
        """See `Backbone`: that of timm's plain vision transformers."""
        patches = [module.patch_size[0] for module in self.net.modules() if isinstance(module, PatchEmbed)]
        is_plain = any(isinstance(module, Attention | EvaAttention) for module in self.net.modules())
        return patches[0] if len(patches) == 1 and is_plain else None

    @property
    def has_class_token(self) -> bool:
        """See `Backbone`."""
        names = (name.rpartition(".")[2] for name, _ in self.net.named_parameters())
        return self.patch_size is not None and "cls_token" in names

    def _feature_net(self) -> nn.Module:
        chosen = tuple(self.indices[feature] for feature in self.feature_info)
        return self._with_norms(_create(self.name, features_only=True, out_indices=chosen, **self.arguments))

    def _with_norms(self, net: nn.Module) -> nn.Module:
        return net if self.norm is None else freeze_batch_norm_2d(net)

    def keep_features(self, names: Iterable[str]) -> None:
        """Return only these maps from now on; timm's network is rebuilt without the parts that only the others need."""
        names = set(names)
        if names >= self.feature_info.keys():
            return
        super().keep_features(names)
        state = self.net.state_dict()
        self.net = self._feature_net().train(self.training)
        self.net.load_state_dict({key: state[key] for key in self.net.state_dict()})
        if self._frozen():
            self.freeze()

    def drop_stages_after(self, feature: str) -> None:
        """Do nothing: `keep_features` rebuilds timm's network."""

    @staticmethod
    def check_arguments(name: str, **_: Any) -> None:
        """Check a config without building anything.

        Raises:
            ConfigError: timm has no model of that name.
        """
        architecture, _, tag = name.partition(".")
        if not timm.is_model(architecture):
            raise ConfigError(
                f"timm {timm.__version__} has no model {architecture!r}. {nearest(architecture, timm.list_models())}"
            )
        pretrained_names = timm.list_pretrained(f"{architecture}.*")
        if tag and name not in pretrained_names:
            raise ConfigError(f"timm {timm.__version__} has no weights {name!r}. {nearest(name, pretrained_names)}")

    def forward(self, images: Tensor) -> dict[str, Tensor] | Tensor:
        """Compute the feature maps, or a classifier's logits.

        Args:
            images: (B, in_channels, H, W) float, normalized; zero-padded internally to a multiple of the total stride.
        Returns:
            the maps named by `out_features`, each (B, channels, ceil(H / stride), ceil(W / stride)), fine to
            coarse; a classifier returns (B, num_classes) logits.
        Raises:
            DataError: the images have other channels, or are smaller than the total stride, or not of the only size
                that timm's model takes.
        """
        min_size = 1 if self.is_classifier else self.total_stride
        check_images(self.name, images, min_size=min_size, in_channels=self.in_channels)
        if self.is_classifier:
            return self._run(images)
        height, width = images.shape[-2:]
        images, _ = pad_to_multiple(images, None, self.total_stride)
        maps = self._run(images)
        if self.channels_last:
            maps = [x.permute(0, 3, 1, 2) for x in maps]
        # torch.export cannot save math.ceil, and ONNX rounds the quotient of a negative number up.
        return {
            name: x[..., : (height + info.stride - 1) // info.stride, : (width + info.stride - 1) // info.stride]
            for (name, info), x in zip(self.feature_info.items(), maps)
        }

    def _run(self, images: Tensor) -> Any:
        self._is_running = True
        try:
            # Faster on a CPU: for D-FINE-S at 640x640, inference takes 0.92 of the time, and forward and backward pass
            # of a training step with batch 4 also 0.92, on one thread of an AMD EPYC with AVX-512, torch 2.14.1.
            return self.net(images.contiguous(memory_format=torch.channels_last))
        except (RuntimeError, AssertionError, IndexError) as error:
            # timm does not say reliably which models take only one size, so a size is refused once it has failed.
            cfg = timm.get_pretrained_cfg(self.name)
            size = None if cfg is None else tuple(cfg.input_size[-2:])
            other_type = images.dtype != next(self.net.parameters()).dtype
            if size in (None, tuple(images.shape[-2:])) or other_type or isinstance(error, torch.OutOfMemoryError):
                raise
            raise DataError(
                f"timm's {self.name} does not take images of {images.shape[-2]}x{images.shape[-1]} pixels (with "
                f"padding), as it is built for {size[0]}x{size[1]} only. Choose a backbone for any size, such as "
                "timm/convnext_tiny, or transforms that give this size."
            ) from error
        finally:
            self._is_running = False

    def fused(self) -> nn.Module:
        """See `vitkit.protocols.fusing`."""
        from vitkit.backbones.timm_fusion import fuse_timm  # read only when a model is fused

        fuse_timm(self.net)
        return self

    def stages(self) -> list[list[nn.Module | nn.Parameter]]:
        """Return timm's coarse parameter groups, without the parts that are not kept."""
        parameters = dict(self.named_parameters())
        stages = [
            [key for key in self._rename(names).values() if key in parameters] for names in self._groups(coarse=True)
        ]
        return [[self._layer_of(key) for key in keys] for keys in stages if keys]

    def _layer_of(self, key: str) -> nn.Module | nn.Parameter:
        """Return the layer of a parameter, with its running statistics; for a container's parameter, only itself."""
        module = self.get_submodule(key.rpartition(".")[0])
        return self.get_parameter(key) if any(True for _ in module.children()) else module

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Rename timm's keys for full models to those of the parts that are kept; adapt weights for RGB and for other
        patch sizes."""
        first = self._rename(f"{layer}.weight" for layer in self.first_convolutions).values()
        names = [key.removeprefix(prefix) for key in state if key.startswith(prefix)]
        expected = self.state_dict()
        for name, key in self._rename(names).items():
            value = state.pop(prefix + name)
            if key in first and key in expected and value.shape[1] != expected[key].shape[1]:
                value = adapt_input_conv(self.in_channels, value)
            state[prefix + key] = _resample(key, value, expected[key]) if key in expected else value

    def block_names(self) -> list[str]:
        """Return the names of timm's blocks that are kept, in order."""
        parameters = [name for name, _ in self.named_parameters()]
        blocks = []
        for names in self._groups(coarse=False)[1:]:  # after the stem
            kept = set(self._rename(names).values())
            keys = [name for name in parameters if name in kept]
            block = _find_shared_module(keys)
            if {name for name in parameters if name.startswith(f"{block}.")} > set(keys):
                # A downsampling and the block after it, or the last block and a norm: the block has most of the
                # parameters.
                depth = len(block.split(".")) + 1 if block else 1
                children = Counter(".".join(key.split(".")[:depth]) for key in keys)
                child_name = children.most_common(1)[0][0]
                block = _find_shared_module([key for key in keys if key.startswith(f"{child_name}.")])
            is_head = any(head.startswith(f"{block}.") or f"{block}.".startswith(head) for head in self.class_head)
            if block and not is_head:
                blocks.append(block)
        return blocks

    def _groups(self, *, coarse: bool) -> list[list[str]]:
        """Return the names of the parameters of each of timm's groups, the stem first; ConfigError if it has none."""
        with torch.device("meta"):
            full = timm.create_model(self.name)
        if not hasattr(full, "group_matcher"):
            raise ConfigError(
                f"timm does not divide {self.name} into groups of layers, by which stages are frozen and blocks get "
                "learning rates of their own. Leave these settings out, or choose another backbone."
            )
        return [names for _, names in sorted(group_parameters(full, full.group_matcher(coarse=coarse)).items())]

    def entries_to_leave_out(self, names: Sequence[str]) -> list[str]:
        """Return timm's entries that feature maps do not need, by timm's names or those here."""
        if self.is_classifier or not names:
            return []
        with torch.device("meta"):
            full = timm.create_model(self.name).state_dict().keys()
        known = {form.format(name, name.replace(".", "_", 1)) for name in full for form in _NAME_FORMS}
        return [name for name in names if name in known]

    def _rename(self, names: Iterable[str]) -> dict[str, str]:
        """Map timm's names to those here: timm wraps models that return features, or joins the first two parts."""
        keys = self.state_dict().keys()
        return {
            name: next((k for form in _NAME_FORMS if (k := form.format(name, name.replace(".", "_", 1))) in keys), name)
            for name in names
        }

    @property
    def activation_checkpointing(self) -> bool:
        """Whether timm's blocks recompute their activations in the backward pass."""
        return self._activation_checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, enabled: bool) -> None:
        """Turn activation checkpointing of timm's network on or off; ConfigError if it does not support it."""
        # timm wraps models that return features.
        model = next((m for m in (self.net, child(self.net, "model")) if hasattr(m, "set_grad_checkpointing")), None)
        try:
            model.set_grad_checkpointing(enabled)
        except (AttributeError, AssertionError) as error:  # it has no such method, or one that refuses
            raise ConfigError(f"timm's {self.name} cannot recompute its activations.") from error
        self._activation_checkpointing = enabled
        for norm in (module for module in self.net.modules() if isinstance(module, _BatchNorm)):
            if enabled:
                norm.forward = partial(self._normalize, norm)
            else:
                vars(norm).pop("forward", None)

    def _normalize(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Run a batch norm, whose statistics do not change if timm's checkpoints call it in the backward pass."""
        with nullcontext() if self._is_running else keep_statistics(norm):
            return type(norm).forward(norm, x)

    def _url(self) -> str:
        return f"timm/{self.name}"


def _create(name: str, **options: Any) -> nn.Module:
    """Build timm's model in the form that accepts the most image sizes."""
    for any_size in _ANY_SIZE:
        try:
            return make_lean(timm.create_model(name, **options, **any_size))
        except TypeError as error:
            if "unexpected keyword" not in str(error):
                raise
            reason = error
    raise ConfigError(f"timm's {name}: {reason}.")


def _features(name: str, options: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, FeatureInfo]]:
    """Return feature name -> timm's index, and feature name -> its info, fine to coarse, of a model with these options;
    raise a ConfigError if it has no feature maps."""
    try:
        with torch.device("meta"):
            info = _create(name, features_only=True, **options).feature_info
    except (RuntimeError, AttributeError, AssertionError) as error:
        raise ConfigError(
            f"timm's {name} has no feature maps ({str(error).splitlines()[0]}). timm.list_models(...) lists models; "
            "those with features_only do."
        ) from error
    rows = sorted(zip(info.reduction(), info.out_indices, info.channels()))
    indices = {f"res{round(math.log2(stride))}": index for stride, index, _ in rows}
    return indices, {f"res{round(math.log2(s))}": FeatureInfo(channels, s) for s, _, channels in rows}


def _find_shared_module(keys: Sequence[str]) -> str:
    """Return the name of the innermost module that contains all parameters with these names; "" if there is none."""
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*(key.split(".")[:-1] for key in keys)))
    return ".".join(parts[0] for parts in shared)


def _resample(key: str, value: Tensor, expected: Tensor) -> Tensor:
    """Return a ViT's patch projection, or its positions, resampled to the expected patch size."""
    if value.shape == expected.shape:
        return value
    if key.endswith("patch_embed.proj.weight") and value.shape[:2] == expected.shape[:2]:
        return resample_patch_embed(value, list(expected.shape[2:]))
    if key.endswith("pos_embed") and value.ndim == 3 and value.shape[2] == expected.shape[2]:
        old, new = (math.isqrt(x.shape[1]) for x in (value, expected))  # preceded by tokens that are not patches
        others = value.shape[1] - old**2
        if expected.shape[1] - new**2 == others:
            return resample_abs_pos_embed(value, [new, new], [old, old], num_prefix_tokens=others)
    return value


BACKBONES.register_prefix("timm/", TimmBackbone, argument="name")
