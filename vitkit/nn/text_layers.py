"""Shared layers of text models: token embeddings, position encodings, and initial weights."""

from typing import Literal

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError, DataError
from vitkit.nn.position import fairseq_positions_1d, sine_positions_1d

PositionEncoding = Literal["sine", "fairseq", "learned"]
POSITION_CODES = {"sine": sine_positions_1d, "fairseq": fairseq_positions_1d}


class ScaledEmbedding(nn.Embedding):
    """Token embeddings times sqrt(d_model), initialized so that the products have variance 1 (section 3.4).

    Args:
        scale: False: without the factor, as in BERT and GPT-2, and with their initial standard deviation of 0.02.
    """

    def __init__(self, size: int, d_model: int, *, scale: bool = True):
        super().__init__(size, d_model)
        self.factor = d_model**0.5 if scale else 1.0
        nn.init.normal_(self.weight, std=d_model**-0.5 if scale else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens, times the factor: (...) int64 -> (..., d_model)."""
        return super().forward(tokens) * self.factor


class TextPositions(nn.Module):
    """Adds position encodings to embeddings, then applies dropout (section 5.4).

    Args:
        norm: whether to normalize the sums before the dropout, as BERT does.
    """

    def __init__(
        self,
        d_model: int,
        *,
        positions: PositionEncoding = "sine",
        max_length: int = 1024,
        dropout: float = 0.1,
        norm: bool = False,
    ):
        super().__init__()
        if positions not in (*POSITION_CODES, "learned"):
            raise ConfigError(f"positions={positions!r}: expected 'sine', 'fairseq' or 'learned'.")
        if positions in POSITION_CODES and d_model % 2:
            raise ConfigError(f"d_model={d_model}: expected an even number, as sines and cosines are pairs.")
        if positions in POSITION_CODES:
            self.register_buffer("codes", POSITION_CODES[positions](max_length, d_model), persistent=False)
        else:
            self.codes = nn.Parameter(torch.randn(max_length, d_model) * d_model**-0.5)
        self.norm = nn.LayerNorm(d_model) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, offset: int = 0, positions: Tensor | None = None) -> Tensor:
        """Add the encodings of the positions and apply dropout.

        Args:
            x: (B, L, d_model).
            offset: position of the first of the L tokens.
            positions: (B, L) int64, if they differ between rows; all below `offset` + L.
        Raises:
            DataError: a position has no encoding.
        """
        end = offset + x.shape[1]
        if end > len(self.codes):
            raise DataError(
                f"a text of {end} tokens or more, but the model has positions for {len(self.codes)}. Shorten the text "
                "(or decoding.max_length), or set the model's max_length."
            )
        return self.dropout(self.norm(x + (self.codes[offset:end] if positions is None else self.codes[positions])))


def init_matrices(module: nn.Module) -> None:
    """Initialize all matrices except embeddings by Xavier's uniform distribution, and biases of linear layers by 0."""
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            continue
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.ndim == 2 and name.endswith("weight"):
                nn.init.xavier_uniform_(parameter)
            elif isinstance(part, nn.Linear):
                nn.init.zeros_(parameter)


def set_norm_eps(model: nn.Module, eps: float) -> None:
    """Set the number that every layer norm of a model adds to the variance.

    Raises:
        ConfigError: it is not above 0.
    """
    if not eps > 0:
        raise ConfigError(f"norm_eps={eps}: expected above 0.")
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = eps
