"""The attention core: every mechanism of the toolbox computes its weights or its output here.

Shapes: B batch, L queries, S keys, d channels per head. Masks are bool with True = blocked.
"""

from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vitkit.errors import ConfigError
from vitkit.nn.kv_cache import KeyValueCache
from vitkit.nn.layers import draw_dropped
from vitkit.nn.linear import Linear, linear


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, dropout_p: float = 0.0, scale: float | None = None
) -> Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762) by the fused kernel.

    Args:
        q: (B, heads, L, d).
        k: (B, heads, S, d).
        v: (B, heads, S, d_v).
        bias: float, added to the scores; broadcastable to (B, heads, L, S). See `padding_bias`.
        dropout_p: share of the weights to drop; the caller passes 0 in evaluation.
        scale: factor of the scores; 1 / sqrt(d) if None.
    Returns:
        (B, heads, L, d_v).
    """
    if _recorder is not None:
        output, weights = attend_explicit(q, k, v, bias, dropout_p=dropout_p, scale=scale)
        _recorder.add(weights)
        return output
    if bias is not None and bias.requires_grad and q.device.type == "cpu" and not torch.compiler.is_compiling():
        # A CPU's fused kernel has no gradient for a bias; what it falls back to is slower than the plain products.
        return attend_explicit(q, k, v, bias, dropout_p=dropout_p, scale=scale)[0]
    if bias is not None:
        bias = bias.to(q.dtype)
    if dropout_p and _drops_on_cpu(q, k, v):
        return _AttendWithDropout.apply(q, k, v, bias, dropout_p, q.shape[-1] ** -0.5 if scale is None else scale)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p, scale=scale)


def _drops_on_cpu(q: Tensor, k: Tensor, v: Tensor) -> bool:
    plain = q.device.type == "cpu" and q.dtype == k.dtype == v.dtype in (torch.float32, torch.float64)
    return plain and torch.is_grad_enabled() and not _traced() and not torch.is_autocast_enabled("cpu")


class _AttendWithDropout(torch.autograd.Function):
    """Attention with dropout keeps one tensor of the weights' size, whose signs tell what was dropped. A CPU's fused
    kernel has no dropout; what PyTorch falls back to keeps three."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float, scale: float) -> Tensor:
        scores = (q * scale) @ k.mT
        if bias is not None:
            scores += bias
        weights = attention_weights(scores)
        weights = torch.where(draw_dropped(weights.shape, p), -weights, weights)
        ctx.save_for_backward(q, k, v, weights)
        ctx.scale, ctx.raised = scale, 1 / (1 - p) if p < 1 else 0.0
        return weights.clamp(min=0).mul_(ctx.raised) @ v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        kept = weights.clamp(min=0).mul_(ctx.raised)
        grad_v = kept.mT @ grad
        # Of the scores: each row's mean is taken off by all weights, those that were dropped, too.
        grad_scores = (grad @ v.mT).mul_(kept)
        grad_scores.addcmul_(weights.abs(), grad_scores.sum(-1, keepdim=True), value=-1).mul_(ctx.scale)
        return grad_scores @ k, grad_scores.mT @ q, grad_v, None, None, None


def attend_explicit(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, dropout_p: float = 0.0, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """What `attend` computes, with the weights; slower, and takes memory for all of them.

    Returns:
        output: (B, heads, L, d_v).
        weights: (B, heads, L, S) float32, before dropout; each row sums to 1.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if bias is not None and bias.shape == (*q.shape[:-1], k.shape[-2]):
        # The product is added to the bias in one pass over memory.
        q3, k3, bias3 = (x.flatten(0, 1) for x in (q, k, bias.to(q.dtype)))
        weights = attention_weights(torch.baddbmm(bias3, q3, k3.mT, alpha=scale).unflatten(0, q.shape[:2]))
    else:
        scores = (q * scale) @ k.mT
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if bias is not None:
            scores += bias  # in place: the scores of small windows are the largest tensors of a step
        weights = attention_weights(scores)
    return F.dropout(weights, dropout_p).to(v.dtype) @ v, weights


def attention_weights(
    scores: Tensor, bias: Tensor | None = None, *, dim: int = -1, out: Tensor | None = None
) -> Tensor:
    """Softmax of scores and bias over the keys, in float32 at least.

    Args:
        scores: any shape, the keys along `dim`.
        bias: broadcastable to `scores`.
        out: where to write the weights, if no gradient is wanted; may be `scores`.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores if bias is None else scores + bias
    if out is None and dim == -1 and 0 < scores.shape[-1] < FEW_KEYS and scores.device.type == "cpu" and not _traced():
        return _SoftmaxOfFew.apply(scores)
    return torch.softmax(scores, dim=dim, out=out)


FEW_KEYS = 16
"""A processor's widest vector: for shorter rows PyTorch's softmax takes five times as long as its separate steps."""


class _SoftmaxOfFew(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = (scores - scores.amax(-1, keepdim=True)).exp_()
        weights.div_(weights.sum(-1, keepdim=True))
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        grad = grad * weights
        return grad.addcmul_(weights, grad.sum(-1, keepdim=True), value=-1)


def _traced() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def padding_bias(padding_mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The bias that hides padded keys.

    Args:
        padding_mask: (B, S) bool, True = padding.
    Returns:
        (B, 1, 1, S).
    """
    return mask_bias(padding_mask[:, None, None, :], dtype)


def mask_bias(blocked: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The additive bias of a mask: 0 where a key is free, very negative where it is blocked.

    A row with every key blocked would softmax to nan, so it may attend everywhere.

    Args:
        blocked: (..., S) bool, True = blocked.
    """
    blocked = blocked & ~blocked.all(dim=-1, keepdim=True)
    # Finite, unlike -inf, and half the range, so that two such biases may be added and still give no nan.
    return torch.zeros_like(blocked, dtype=dtype).masked_fill_(blocked, torch.finfo(dtype).min / 2)


class MultiHeadAttention(nn.Module):
    """Attention of several heads between projections; batch first; state dicts of `nn.MultiheadAttention` load.

    Args:
        d_model: channels of queries, keys, values and output.
        num_heads: a divisor of `d_model`.
        dropout: share of attention weights dropped in training.
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

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        bias: Tensor | None = None,
        padding_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """
        Args:
            queries: (B, L, d_model).
            keys: (B, S, d_model).
            values: (B, S, d_model).
            bias: float, added to the scores; broadcastable to (B, heads, L, S). Layers that share a mask
                compute its `padding_bias` once and pass it here.
            padding_mask: (B, S) bool, True = padded key.
            attention_mask: bool, True = blocked; (L, S) or (B, heads, L, S).
        Returns:
            (B, L, d_model).
        """
        # Masks are joined before they become a bias: only together may they block a whole row.
        blocked = attention_mask
        if padding_mask is not None:
            padded = padding_mask[:, None, None, :]
            blocked = padded if blocked is None else padded | blocked
        if blocked is not None:
            masked = mask_bias(blocked, queries.dtype)
            bias = masked if bias is None else bias + masked

        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in self._project(queries, keys, values))
        output = attend(q, k, v, bias, dropout_p=self.dropout if self.training else 0.0)
        return self.out_proj(output.transpose(1, 2).flatten(2))

    def attend_on(self, x: Tensor, cache: KeyValueCache, *, bias: Tensor | None = None) -> Tensor:
        """Self-attention of the next places of a sequence, which see those in the cache and are added to it.

        Args:
            x: (B, L, d_model), the places that follow on the cached ones.
            bias: float, broadcastable to (B, heads, L, cached + L).
        Returns:
            (B, L, d_model).
        """
        projected = linear(x, self.in_proj_weight, self.in_proj_bias)
        q, keys_values = projected.split([x.shape[-1], 2 * x.shape[-1]], dim=-1)
        k, v = self._heads(cache.append(keys_values))
        return self._attend(q, k, v, bias)[0]

    def project_memory(self, memory: Tensor) -> Tensor:
        """(B, S, d_model) -> (2, B, heads, S, d), the keys and values of `attend_to`."""
        d_model = memory.shape[-1]
        keys_values = linear(memory, self.in_proj_weight[d_model:], self.in_proj_bias[d_model:])
        return self._heads(keys_values).contiguous()

    def attend_to(
        self, queries: Tensor, memory: Tensor, *, bias: Tensor | None = None, with_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attention to keys and values that are projected already.

        Args:
            queries: (B, L, d_model).
            memory: of `project_memory`.
            bias: float, broadcastable to (B, heads, L, S).
            with_weights: whether the second result is wanted.
        Returns:
            (B, L, d_model), and the weights (B, heads, L, S).
        """
        d_model = queries.shape[-1]
        q = linear(queries, self.in_proj_weight[:d_model], self.in_proj_bias[:d_model])
        return self._attend(q, *memory, bias, with_weights=with_weights)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, with_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Of projected queries (B, L, d_model), and keys and values (B, heads, S, d), as in evaluation."""
        q = q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        output, weights = attend_explicit(q, k, v, bias) if with_weights else (attend(q, k, v, bias), None)
        return self.out_proj(output.transpose(1, 2).flatten(2)), weights

    def _heads(self, keys_values: Tensor) -> Tensor:
        """(B, S, 2 * d_model) -> (2, B, heads, S, d)."""
        return keys_values.unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)

    def _project(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """q, k, v: (B, length, d_model); inputs that are the same tensor share one matrix product."""
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
    """Collects the attention weights of any model, unchanged, while the `with` block lasts.

        with AttentionRecorder(model) as maps:
            model(images, padding_mask)
        maps["head.decoder.layers.5.cross_attn"][0]  # (B, heads, L, S) float32

    `maps` has one list per calling module, under its dotted name, with one entry per call. Weights stay in the
    autograd graph. Compiled models run uncompiled meanwhile.
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

    def add(self, weights: Tensor) -> None:
        """Called by `attend`. Attention outside the recorded model has no running module and is left out."""
        if self._running:
            self.maps.setdefault(self._running[-1], []).append(weights)

    def _leave(self, *_: object) -> None:
        self._running.pop()


_recorder: AttentionRecorder | None = None


def recording() -> bool:
    """Whether an `AttentionRecorder` is at work."""
    return _recorder is not None


def record_weights(weights: Tensor) -> None:
    """Shows a running `AttentionRecorder` the weights of a mechanism that is none of `attend`'s.

    Args:
        weights: (B, heads, L, S).
    """
    if _recorder is not None:
        _recorder.add(weights)
