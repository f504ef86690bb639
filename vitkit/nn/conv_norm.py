"""Convolutions with the norm after them, and the base of layers that are prepared for inference."""

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from vitkit.errors import CheckpointError, ConfigError
from vitkit.kernels import plain_only


class InferenceOnly(nn.Module):
    """Base of a layer prepared for inference by `vitkit.protocols.model.Model.fuse`: it keeps its weights also in the
    processor's order, in `_cache`, and is neither trained nor saved."""

    _cache: dict[str, Any]

    def train(self, mode: bool = True) -> "InferenceOnly":
        """Refuse training mode, since norms and their weights are no longer there."""
        if mode:
            raise ConfigError("train: the module is fused (Model.fuse), for inference only. Train a model before it.")
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": {}}  # the processor's order is for this process

    def _apply(self, fn: Any, recurse: bool = True) -> "InferenceOnly":
        self._cache = {}
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, *_: Any) -> NoReturn:
        raise CheckpointError(
            "state_dict: the model is fused (Model.fuse), so its weights fit no other model. Save the model that was "
            "not fused (of a predictor, predictor.model), and fuse a copy: copy.deepcopy(model).fuse()."
        )

    def _load_from_state_dict(self, *_: Any) -> NoReturn:
        raise CheckpointError(
            "load_state_dict: the model is fused (Model.fuse), so it has no norms to load weights into. Load them "
            "into the model before fusing it."
        )


def is_watched(module: nn.Module) -> bool:
    """Return whether a module has hooks, which see its input, its output or their gradients, or a `forward` of its own
    in place of its class's."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in module.__dict__  # PyTorch 2.6 does not compile vars()


def conv_norm(x: Tensor, conv: nn.Conv2d, norm: nn.Module) -> Tensor:
    """Return `norm(conv(x))`; except on CUDA, a norm that is a fixed scale and shift is merged at almost no cost, if
    neither of the two is watched."""
    if isinstance(norm, nn.Identity):  # in a fused model the convolution has it
        return conv(x)
    if is_watched(conv) or is_watched(norm):
        return norm(conv(x))
    if torch.is_grad_enabled() and conv.weight.requires_grad:
        if not isinstance(norm, FrozenBatchNorm2d):
            return norm(conv(x))
        # Scaled weights would be stored for the backward pass, as many as the network has; so scale the output in
        # place.
        scale, shift = _scale_and_shift(norm)
        return conv(x).mul_(scale.view(1, -1, 1, 1)).add_(shift.view(1, -1, 1, 1))
    if not is_fixed(norm):
        return norm(conv(x))
    if x.is_cuda:  # one kernel, where merging has six that take longer to launch than to run
        return F.batch_norm(conv(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)
    return F.conv2d(x, *merge_norm(conv, norm), conv.stride, conv.padding, conv.dilation, conv.groups)


def is_fixed(norm: nn.Module) -> bool:
    """Return whether a norm is a fixed scale and shift: frozen, or a batch norm that uses its statistics."""
    uses_statistics = type(norm) is nn.BatchNorm2d and not norm.training
    return isinstance(norm, FrozenBatchNorm2d) or (uses_statistics and not plain_only())


def merge_norm(conv: nn.Conv2d, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the convolution followed by a norm that uses its statistics."""
    weight, bias = merge_norm_unrounded(conv, norm)
    return weight.type_as(conv.weight), bias.type_as(conv.weight)


def merge_norm_unrounded(conv: nn.Conv2d, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return weight and bias as `merge_norm` does, but in float32 if the convolution is in half precision."""
    scale, shift = _scale_and_shift(norm)
    bias = shift if conv.bias is None else shift + conv.bias * scale
    return conv.weight * scale.view(-1, 1, 1, 1), bias


def _scale_and_shift(norm: nn.Module) -> tuple[Tensor, Tensor]:
    # In half precision, scale and shift would be rounded several times over.
    mean, variance = (x.float() if x.dtype.itemsize < 4 else x for x in (norm.running_mean, norm.running_var))
    scale = (variance + norm.eps).rsqrt()
    if norm.weight is None:  # a batch norm without affine parameters
        return scale, -mean * scale
    scale = norm.weight * scale
    return scale, norm.bias - mean * scale
