"""Small layers: linear ones, networks of two, and learned scales."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.kernels.linear import gelu_linear, linear, relu_dropout
from vitkit.nn.conv_norm import InferenceOnly, is_watched


def init_xavier(*modules: nn.Module) -> None:
    """Initialize all matrices and kernels, but not vectors, from Xavier's uniform distribution."""
    for module in modules:
        for parameter in module.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)


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
