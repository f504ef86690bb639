"""Small layers: linear ones, networks of two, learned scales, and convolutions with the norm after them."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from vitkit.errors import CheckpointError, ConfigError
from vitkit.kernels import plain_only
from vitkit.kernels.linear import gelu_linear, is_in_autocast, linear, relu_dropout


def init_xavier(*modules: nn.Module) -> None:
    """Initialize all matrices and kernels, but not vectors, from Xavier's uniform distribution."""
    for module in modules:
        for parameter in module.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)


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
        if not is_in_autocast(x):
            # Scaled weights would be stored for the backward pass; autocast stores converted ones in any case, and with
            # them a step of DETR-R50 (480x640, batch 2, bfloat16, one thread) takes 0.75 of the time.
            scale, shift = (value.view(1, -1, 1, 1) for value in _scale_and_shift(norm))
            return conv(x).mul_(scale).add_(shift)
    elif not is_fixed(norm):
        return norm(conv(x))
    elif x.is_cuda:  # one kernel, where merging has six that take longer to launch than to run
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


class Linear(nn.Linear):
    """`nn.Linear` with the processor's fastest matrix product."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        return linear(x, self.weight, self.bias)

    def fused(self) -> nn.Module:
        """See `vitkit.protocols.fusing`."""
        return FusedLinear(self) if type(self) is Linear and not is_watched(self) else self


class FusedLinear(InferenceOnly, Linear):
    """A linear layer that keeps its weight also in the processor's order, for inference only."""

    def __init__(self, layer: Linear):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self._cache = {}
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, cache=self._cache)


Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # GPT-2's
    "silu": F.silu,
}


def check_activation(activation: str) -> str:
    """Return the name of an activation if it is one of `ACTIVATIONS`, else raise ConfigError."""
    if activation not in ACTIVATIONS:
        raise ConfigError(f"activation: got {activation!r}; expected one of {', '.join(ACTIVATIONS)}.")
    return activation


class MLP(nn.Module):
    """Linear layers with an activation between them.

    Args:
        channels: sizes from input to output; (256, 256, 4) makes two layers.
        activation: one of `ACTIVATIONS`.
    Raises:
        ConfigError: the activation is unknown.
    """

    def __init__(self, channels: tuple[int, ...], activation: str = "relu"):
        super().__init__()
        self.activation = check_activation(activation)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(..., channels[0]) -> (..., channels[-1])."""
        for layer in self.layers[:-1]:
            x = F.relu_(layer(x)) if self.activation == "relu" else ACTIVATIONS[self.activation](layer(x))
        return self.layers[-1](x)


class FeedForward(nn.Module):
    """The two-layer network of a transformer layer, with an activation and dropout between the layers.

    Args:
        activation: "relu", as published; another of `ACTIVATIONS`, as in some later models.
    Raises:
        ConfigError: the activation is unknown.
    """

    def __init__(self, d_model: int, d_ffn: int, *, dropout: float = 0.0, activation: str = "relu"):
        super().__init__()
        self.activation = check_activation(activation)
        self.linear1 = Linear(d_model, d_ffn)
        self.linear2 = Linear(d_ffn, d_model)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., d_model)."""
        x = self.linear1(x)
        if self.activation == "relu" and self.training and self.dropout > 0:
            x = relu_dropout(x, self.dropout)
        else:
            x = F.dropout(ACTIVATIONS[self.activation](x), self.dropout, self.training)
        return self.linear2(x)


class TokenMLP(Mlp):
    """The two-layer network in a block of a vision transformer, with GELU between the layers.

    (..., d_model) -> (..., d_out), by default d_model.
    """

    def __init__(self, d_model: int, d_hidden: int, d_out: int | None = None):
        super().__init__(d_model, d_hidden, d_out)
        self.fc1, self.fc2 = Linear(d_model, d_hidden), Linear(d_hidden, d_out or d_model)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., d_out)."""
        if type(self.fc2) is Linear and not is_watched(self.fc2):  # whose weights may be used without calling it
            return gelu_linear(self.fc1(x), self.fc2.weight, self.fc2.bias)
        return super().forward(x)


class SwiGLU(nn.Module):
    """The gated two-layer network of large vision transformers (Shazeer 2020, https://arxiv.org/abs/2002.05202).

    `fc1` computes the gate, then the values. Loads the names of DINOv2 and DINOv3, and timm's
    separate layers.
    """

    def __init__(self, d_model: int, d_hidden: int):
        super().__init__()
        self.fc1, self.fc2 = Linear(d_model, 2 * d_hidden), Linear(d_hidden, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., d_model)."""
        gate, value = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * value)

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Concatenate gate and value, and rename the originals' entries."""
        for leaf in ("weight", "bias"):
            for gate, value in (("fc1_g", "fc1_x"), ("w1", "w2")):
                if f"{prefix}{gate}.{leaf}" in state:
                    parts = [state.pop(f"{prefix}{name}.{leaf}") for name in (gate, value)]
                    state[f"{prefix}fc1.{leaf}"] = torch.cat(parts)
            for theirs, ours in (("w12", "fc1"), ("w3", "fc2")):
                if f"{prefix}{theirs}.{leaf}" in state:
                    state[f"{prefix}{ours}.{leaf}"] = state.pop(f"{prefix}{theirs}.{leaf}")


class LayerScale(nn.Module):
    """A learned factor for each channel of a branch (Touvron et al. 2021, https://arxiv.org/abs/2103.17239)."""

    def __init__(self, d_model: int, initial: float):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((d_model,), float(initial)))

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., d_model)."""
        return x * self.gamma
