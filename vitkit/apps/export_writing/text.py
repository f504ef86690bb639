"""Captioners and translators as two functions of tensors: the encoder, and one step of the decoder.

The encoder returns the state before the first token. A step takes each row's last token and the state, and returns the
logits of the next token and those parts of the state that have changed. The first axis of all tensors is the rows.
"""

from collections.abc import Mapping
from functools import singledispatch

import torch
from torch import Tensor, nn

from vitkit.apps.export_reading.graphs import PADDED_IMAGES, Axes, ExportGraph
from vitkit.apps.export_reading.loading import NEW
from vitkit.errors import ConfigError
from vitkit.ops.images import float_statistics, normalize_images
from vitkit.seq2seq.decoding import State
from vitkit.seq2seq.rnn import RNNTranslator
from vitkit.seq2seq.show_attend_tell import CaptionState, ShowAttendTell
from vitkit.seq2seq.transformer import TextState, Transformer
from vitkit.seq2seq.transformer_captioner import TransformerCaptioner


class _JoinedCache:
    """A layer's keys and values (N, T, C), concatenated anew at each step, as a graph has no buffer to write into."""

    def __init__(self, keys_values: Tensor):
        self.keys_values = keys_values

    @property
    def length(self) -> int:
        return self.keys_values.shape[1]

    def append(self, keys_values: Tensor) -> Tensor:
        """Append the keys and values of L tokens (N, L, C), and return those of all tokens."""
        self.keys_values = torch.cat([self.keys_values, keys_values], dim=1)
        return self.keys_values


class TextEncoderGraph(ExportGraph):
    """Encodes texts."""

    axes: Axes = {"source": ("batch", "length"), "source_padding": ("batch", "length")}

    def forward(self, source: Tensor, source_padding: Tensor) -> dict[str, Tensor]:
        """Encode token ids (B, S) int64 that end with EOS, then PAD; source_padding is bool, True = padding."""
        return in_float32(state_tensors(self.model.start(source, source_padding)))


class ImageEncoderGraph(ExportGraph):
    """Encodes images."""

    axes = PADDED_IMAGES

    def forward(self, images: Tensor, padding_mask: Tensor) -> dict[str, Tensor]:
        """Encode images (B, 3, H, W); padding_mask is (B, H, W) bool, True = padding."""
        images = normalize_images(images, padding_mask, **float_statistics(self.model.backbone)).to(self.dtype)
        return in_float32(state_tensors(self.model.start(images=images, padding_mask=padding_mask)))


class _StepGraph(ExportGraph):
    changing: tuple[str, ...]
    """The names of the state's tensors that a step changes and returns."""

    def advance(self, tokens: Tensor, state: State) -> dict[str, Tensor]:
        """Return the logits (N, V) and the changed parts of the state."""
        logits, state, _ = self.model.step(tokens, state)
        tensors = in_float32(state_tensors(state))
        return {"logits": logits.float()} | {f"{NEW}{name}": tensors[name] for name in self.changing}


class TransformerStepGraph(_StepGraph):
    """A step of a decoder that attends to the tokens that it has written."""

    axes: Axes = {
        "tokens": ("batch",),
        "cache": ("batch", None, "written", None),
        "memory": ("batch", None, None, None, "locations", None),
        "memory_bias": ("batch", None, None, "locations"),
    }
    changing = ("cache",)

    def forward(self, tokens: Tensor, cache: Tensor, memory: Tensor, memory_bias: Tensor) -> dict[str, Tensor]:
        """Advance by one token.

        Args:
            tokens: (N,) int64.
            cache: (N, layers, T, 2 * d_model), keys and values of the T previous tokens.
            memory: (N, layers, 2, heads, S, d), the projected memory.
            memory_bias: (N, 1, 1, S), added to the attention logits.
        """
        caches = [_JoinedCache(layer) for layer in cache.to(self.dtype).unbind(1)]
        memories = [layer.transpose(0, 1) for layer in memory.to(self.dtype).unbind(1)]
        return self.advance(tokens, TextState(caches, memories, memory_bias))


class AttendTellStepGraph(_StepGraph):
    """A step of an LSTM that attends to an image."""

    axes: Axes = {
        "tokens": ("batch",),
        "annotations": ("batch", "locations", None),
        "keys": ("batch", "locations", None),
        "bias": ("batch", None, "locations"),
        "hidden": ("batch", None),
        "cell": ("batch", None),
    }
    changing = ("hidden", "cell")

    def forward(
        self, tokens: Tensor, annotations: Tensor, keys: Tensor, bias: Tensor, hidden: Tensor, cell: Tensor
    ) -> dict[str, Tensor]:
        """Advance by one token, (N,) int64; the other arguments are the fields of `CaptionState`."""
        annotations, keys, hidden, cell = (x.to(self.dtype) for x in (annotations, keys, hidden, cell))
        return self.advance(tokens, CaptionState(annotations, keys, bias, hidden, cell))


@singledispatch
def state_tensors(state: State) -> dict[str, Tensor]:
    """Return a state's tensors by name, with the rows as first axis."""
    raise NotImplementedError(type(state).__name__)


@state_tensors.register
def _(state: CaptionState) -> dict[str, Tensor]:
    return {name: getattr(state, name) for name in ("annotations", "keys", "bias", "hidden", "cell")}


@state_tensors.register
def _(state: TextState) -> dict[str, Tensor]:
    memory = torch.stack([layer.transpose(0, 1) for layer in state.memory], dim=1)
    if isinstance(state.caches[0], _JoinedCache):
        cache = torch.stack([layer.keys_values for layer in state.caches], dim=1)
    else:  # nothing is written yet
        num_rows, num_layers, pair, heads, _, channels = memory.shape
        cache = memory.new_zeros(num_rows, num_layers, 0, pair * heads * channels)
    return {"cache": cache, "memory": memory, "memory_bias": state.memory_bias}


def in_float32(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in float32, the type of a file's inputs and outputs."""
    return {name: value.float() for name, value in tensors.items()}


@singledispatch
def text_graphs(model: nn.Module) -> tuple[ExportGraph, ExportGraph]:
    """Return the encoder and the step of a captioner or translator.

    Raises:
        ConfigError: no graph is defined for this kind of model.
    """
    raise _no_graph(model)


@text_graphs.register
def _(model: Transformer) -> tuple[ExportGraph, ExportGraph]:
    return TextEncoderGraph(model), TransformerStepGraph(model)


@text_graphs.register
def _(model: TransformerCaptioner) -> tuple[ExportGraph, ExportGraph]:
    return ImageEncoderGraph(model), TransformerStepGraph(model)


@text_graphs.register
def _(model: ShowAttendTell) -> tuple[ExportGraph, ExportGraph]:
    return ImageEncoderGraph(model), AttendTellStepGraph(model)


@text_graphs.register
def _(model: RNNTranslator) -> tuple[ExportGraph, ExportGraph]:
    raise _no_graph(model, ": no format carries the encoder's operation pack_padded_sequence for any lengths")


def _no_graph(model: nn.Module, reason: str = "") -> ConfigError:
    return ConfigError(f"export: no graph is defined for {type(model).__name__}{reason}. Choose a Transformer.")
