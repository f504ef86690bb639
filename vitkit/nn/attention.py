"""The attention core: every mechanism of the toolbox computes its weights or its output here.

Shapes: B batch, L queries, S keys, d channels per head. Masks are bool with True = blocked.
"""

from types import TracebackType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError


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
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p, scale=scale)


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
        out: where to write the weights, if no gradient is wanted.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return torch.softmax(scores if bias is None else scores + bias, dim=dim, out=out)


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
        self.out_proj = nn.Linear(d_model, d_model)
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
            part for group, weight, bias in projected for part in F.linear(group[0], weight, bias).chunk(len(group), -1)
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
