"""Sequence to sequence: models that write text, and the decoding methods that they share."""

from vitkit.seq2seq.captioner import Captioner
from vitkit.seq2seq.decoding import Decodable, DecodingSettings, Hypothesis, State, TextGenerator, decode
from vitkit.seq2seq.language_models import CausalLanguageModel, MaskedLanguageModel, PrefixLanguageModel
from vitkit.seq2seq.rnn import RNNTranslator
from vitkit.seq2seq.show_attend_tell import ShowAttendTell
from vitkit.seq2seq.transformer import TextDecoder, Transformer
from vitkit.seq2seq.transformer_captioner import TransformerCaptioner

__all__ = [
    "Captioner",
    "CausalLanguageModel",
    "Decodable",
    "DecodingSettings",
    "Hypothesis",
    "MaskedLanguageModel",
    "PrefixLanguageModel",
    "RNNTranslator",
    "ShowAttendTell",
    "State",
    "TextDecoder",
    "TextGenerator",
    "Transformer",
    "TransformerCaptioner",
    "decode",
]
