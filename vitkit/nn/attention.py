"""The core of attention: every mechanism in the toolbox computes its weights or its output here.

Shapes: B batch, L queries, S keys, d channels per head. Masks are bool with True = masked.
"""

import logging
from types import TracebackType

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.kernels.attention import attend_explicit, scaled_dot_product_attention
from vitkit.kernels.linear import linear
from vitkit.nn.layers import Linear

logger = logging.getLogger("vitkit")


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, dropout_p: float = 0.0, scale: float | None = None
) -> Tensor:
    """Compute scaled dot-product attention (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762) by the fastest
    kernel.

    Args:
        q: (B, heads, L, d).
        k: (B, heads, S, d).
        v: (B, heads, S, d_v).
        bias: float, added to the scores; broadcastable to (B, heads, L, S). A mask is an error, see `mask_bias`.
        dropout_p: fraction of the weights to drop; the caller passes 0 in evaluation.
        scale: factor on the scores; None: 1 / sqrt(d).
    Returns:
        (B, heads, L, d_v).
    """
    if bias is not None and not bias.is_floating_point():
        raise ConfigError(f"attend: bias is {bias.dtype}; expected float. Of a mask: bias=mask_bias(masked).")
    if _recorder is None:
        return scaled_dot_product_attention(q, k, v, bias, dropout_p=dropout_p, scale=scale)
    output, weights = attend_explicit(q, k, v, bias, dropout_p=dropout_p, scale=scale)
    _recorder.add(weights)
    return output


def attention_weights(scores: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the softmax of scores plus bias over the keys, in float32 or higher precision.

    Args:
        scores: (..., S).
        bias: broadcastable to `scores`.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return torch.softmax(scores if bias is None else scores + bias, dim=-1)


def padding_bias(padding_mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the additive bias that masks padded keys.

    Args:
        padding_mask: (B, S) bool, True = padding.
    Returns:
        (B, 1, 1, S).
    """
    return mask_bias(padding_mask[:, None, None, :], dtype)


def mask_bias(masked: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the additive bias for a mask: 0 where a key is visible, very negative where it is masked.

    A row with every key masked attends everywhere.

    Args:
        masked: (..., S) bool, True = masked.
    Returns:
        (..., S).
    """
    # A row with every key masked would softmax to nan.
    masked = masked & ~masked.all(dim=-1, keepdim=True)
    # Finite, unlike -inf, and half the range, so that adding two such biases still gives no nan.
    return torch.zeros_like(masked, dtype=dtype).masked_fill_(masked, torch.finfo(dtype).min / 2)


class MultiHeadAttention(nn.Module):
    """Multi-head attention between projections; batch first; loads state dicts of `nn.MultiheadAttention`.

    Args:
        d_model: channels of queries, keys, values and output.
        num_heads: number of heads, a divisor of `d_model`.
        dropout: fraction of attention weights dropped in training.
    Raises:
        ConfigError: `num_heads` does not divide `d_model`.
    """

    def __init__(self, d_model: int, num_heads: int, dropout: float = 0.0):
        super().__init__()
        if d_model % num_heads:
            raise ConfigError(f"MultiHeadAttention: num_heads={num_heads} must divide d_model={d_model}.")
        self.num_heads = num_heads
        self.dropout = dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * d_model, d_model))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * d_model))
        self.out_proj = Linear(d_model, d_model)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, *, bias: Tensor | None = None) -> Tensor:
        """Attend from queries to keys and values.

        Args:
            queries: (B, L, d_model).
            keys: (B, S, d_model).
            values: (B, S, d_model).
            bias: float, added to the scores; broadcastable to (B, heads, L, S). See `padding_bias` and `mask_bias`.
        Returns:
            (B, L, d_model).
        """
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in self._project(queries, keys, values))
        output = attend(q, k, v, bias, dropout_p=self.dropout if self.training else 0.0)
        return self.out_proj(output.transpose(1, 2).flatten(2))

    def _project(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """Project to q, k and v: (B, length, d_model); inputs that are the same tensor share one matrix product."""
        inputs = [queries, keys, values]
        groups = [[queries]]
        for x in inputs[1:]:
            if x is groups[-1][-1]:
                groups[-1].append(x)
            else:
                groups.append([x])
        rows = [len(group) * self.out_proj.in_features for group in groups]
        projected = zip(groups, self.in_proj_weight.split(rows), self.in_proj_bias.split(rows))
        return tuple(
            part for group, weight, bias in projected for part in linear(group[0], weight, bias).chunk(len(group), -1)
        )


class AttentionRecorder:
    """Records the attention weights of any model, leaving the model unchanged, inside a `with` block.

        with AttentionRecorder(model) as maps:
            model(images, padding_mask)
        maps["head.decoder.layers.5.cross_attn"][0]  # (B, heads, L, S) float32

    `maps` has one list per calling module, under its dotted name, with one entry per call. The weights stay in the
    autograd graph. Compiled models run uncompiled inside the block.

    It sees vitkit's own attention, and timm's in the modules that have a fused and an explicit path, of which the
    explicit one runs inside the block. If it sees none at all, it logs a warning.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.maps: dict[str, list[Tensor]] = {}

    def __enter__(self) -> dict[str, list[Tensor]]:
        global _recorder
        assert _recorder is None, "attention is already being recorded"
        self._running: list[str] = []
        self._handles = []
        for name, module in self.model.named_modules():
            self._handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name)))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        self._record_timm()
        self._eager = torch.compiler.set_stance("force_eager")
        self._eager.__enter__()
        _recorder = self
        return self.maps

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _recorder
        _recorder = None
        self._eager.__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()
        for module in self._fused:
            module.fused_attn = True
        if kind is None and not self.maps:
            logger.warning(
                "AttentionRecorder: 0 attention maps were recorded in %s: none of its modules ran attention through "
                "vitkit's core, or in timm's form with fused_attn and attn_drop.",
                type(self.model).__name__,
            )

    def _record_timm(self) -> None:
        """Record what timm's modules compute on their explicit path: the input of the dropout of the weights."""
        self._fused: list[nn.Module] = []
        for name, module in self.model.named_modules():
            is_fused, dropout = getattr(module, "fused_attn", None), getattr(module, "attn_drop", None)
            if not isinstance(is_fused, bool) or not isinstance(dropout, nn.Module):
                continue
            if is_fused:
                module.fused_attn = False
                self._fused.append(module)

            def keep(_: nn.Module, args: tuple[Tensor], name: str = name) -> None:
                self.maps.setdefault(name, []).append(args[0].float())

            self._handles.append(dropout.register_forward_pre_hook(keep))

    def add(self, weights: Tensor) -> None:
        """Add the weights of one call; attention outside the recorded model has no running module and is ignored."""
        if self._running:
            self.maps.setdefault(self._running[-1], []).append(weights)

    def _leave(self, *_: object) -> None:
        self._running.pop()


_recorder: AttentionRecorder | None = None


def is_recording() -> bool:
    """Return whether an `AttentionRecorder` is active."""
    return _recorder is not None


def record_weights(weights: Tensor) -> None:
    """Pass the weights of a mechanism that does not call `attend` to the active `AttentionRecorder`.

    Args:
        weights: (B, heads, L, S).
    """
    if _recorder is not None:
        _recorder.add(weights)
