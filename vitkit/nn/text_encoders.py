"""Encoders of the prompts of text-prompted models, in which a phrase does not see the others.

They are built with `vocabulary_size` if the vocabulary is known, and have `d_model`, the channels of what they return.
"""

from torch import Tensor, nn

from vitkit.nn.attention import mask_bias
from vitkit.nn.layers import Activation
from vitkit.nn.text_layers import PositionEncoding, ScaledEmbedding, TextPositions, init_matrices, set_norm_eps
from vitkit.nn.transformer import TransformerEncoder
from vitkit.registry import TEXT_ENCODERS
from vitkit.text.prompt_tokens import prompt_layout


@TEXT_ENCODERS.register
class TransformerTextEncoder(nn.Module):
    """A small Transformer encoder, which can be trained from random weights.

    Args:
        vocabulary_size: number of tokens.
        frozen: whether its weights stay as they are, and its dropout off, in training.
        embedding_norm: whether embeddings and positions are normalized before the first layer.
        norm_eps: the number that all layer norms add to the variance.
        scale_embedding: whether token embeddings are multiplied by sqrt(d_model).
        The other arguments: see `vitkit.nn.transformer` and `vitkit.nn.text_layers`.
    """

    def __init__(
        self,
        vocabulary_size: int,
        *,
        num_layers: int = 3,
        d_model: int = 128,
        num_heads: int = 4,
        d_ffn: int = 512,
        dropout: float = 0.1,
        norm_first: bool = True,
        activation: Activation = "relu",
        norm_eps: float = 1e-5,
        scale_embedding: bool = True,
        embedding_norm: bool = False,
        positions: PositionEncoding = "sine",
        max_length: int = 256,
        frozen: bool = False,
    ):
        super().__init__()
        self.d_model, self.frozen = d_model, frozen
        self.embedding = ScaledEmbedding(vocabulary_size, d_model, scale=scale_embedding)
        self.positions = TextPositions(
            d_model, positions=positions, max_length=max_length, dropout=dropout, norm=embedding_norm
        )
        layers = dict(num_heads=num_heads, d_ffn=d_ffn, dropout=dropout, norm_first=norm_first, activation=activation)
        self.encoder = TransformerEncoder(num_layers, d_model, **layers)
        init_matrices(self)
        set_norm_eps(self, norm_eps)
        self.requires_grad_(not frozen)

    def train(self, mode: bool = True) -> "TransformerTextEncoder":
        """Set training mode; a frozen encoder stays in evaluation mode."""
        return super().train(mode and not self.frozen)

    def forward(self, tokens: Tensor, phrase_ids: Tensor) -> Tensor:
        """Encode prompts.

        Args:
            tokens: (B, T) int64.
            phrase_ids: (B, T) int64, the phrase of each token, see `PromptTokens`.
        Returns:
            (B, T, d_model).
        """
        masked, positions = prompt_layout(phrase_ids)
        x = self.positions(self.embedding(tokens), positions=positions)
        return self.encoder(x, bias=mask_bias(masked, x.dtype)[:, None])


@TEXT_ENCODERS.register
class BertEncoder(TransformerTextEncoder):
    """BERT (Devlin et al. 2019, https://arxiv.org/abs/1810.04805) without its pooler; by default the base model.

    Args: see `TransformerTextEncoder`.
    """

    def __init__(
        self,
        vocabulary_size: int = 30522,
        *,
        num_layers: int = 12,
        d_model: int = 768,
        num_heads: int = 12,
        d_ffn: int = 3072,
        dropout: float = 0.1,
        max_length: int = 512,
        frozen: bool = False,
    ):
        sizes = dict(num_layers=num_layers, d_model=d_model, num_heads=num_heads, d_ffn=d_ffn, max_length=max_length)
        form = dict(norm_first=False, activation="gelu", norm_eps=1e-12, scale_embedding=False, embedding_norm=True)
        super().__init__(vocabulary_size, **sizes, **form, positions="learned", dropout=dropout, frozen=frozen)
