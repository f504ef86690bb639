"""Key names and token ids of fairseq's Transformers for translation (https://github.com/facebookresearch/fairseq).

The model is a `Transformer` with `positions="fairseq"`, and with `norm_first=True` if fairseq normalizes before each
block. fairseq's ids are `<s> <pad> </s> <unk>` and its dictionary's tokens, and its decoder starts from `</s>`: the
rows of the embeddings are put in vitkit's order, with the row of `</s>` for both BOS and EOS. The row of `<s>`, which
fairseq never uses, is left out.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from vitkit.errors import DataError
from vitkit.model_zoo.converters.key_table import Custom, Format, KeyTable, Rename, State
from vitkit.model_zoo.converters.layers import DECODER_NORMS, ENCODER_NORMS, library_stack
from vitkit.text.vocabulary import SPECIAL_TOKENS

_PAD, _EOS, _UNK = 1, 2, 3
_ROWS = (_PAD, _UNK, _EOS, _EOS)
"""fairseq's ids for vitkit's PAD, UNK, BOS, EOS."""
_UNUSED = ("version", "embed_positions._float_tensor")


def fairseq_dictionary(path: str | Path) -> list[str]:
    """Return the tokens of a fairseq dictionary (dict.LANGUAGE.txt) in the order of vitkit's ids, special ones first.

    Raises:
        DataError: a line is not a token, a space and a count.
    """
    tokens = list(SPECIAL_TOKENS)
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        token, _, count = line.removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not token or not count.isdigit():
            raise DataError(f"{path}: line {number} is {line!r:.80}; expected a token, a space and its count.")
        tokens.append(token)
    return tokens


def _fit_tables(state: State, model: nn.Module) -> State:
    expected = model.state_dict()
    state = {key: value for key, value in state.items() if not key.endswith(_UNUSED)}
    embedding = state.get("decoder.embedding.weight")
    for key, same_as in (("source_embedding.weight", embedding), ("decoder.output.weight", embedding)):
        # Source, target and output may share one table, which fairseq saves under each of their names.
        if key in state and key not in expected and same_as is not None and torch.equal(state[key], same_as):
            del state[key]
    for key in ("source_embedding.weight", "decoder.embedding.weight", "decoder.output.weight"):
        if key in state:
            state[key] = _reorder(state[key])
    return state


def _reorder(table: Tensor) -> Tensor:
    return torch.cat([table[list(_ROWS)], table[len(_ROWS) :]])


TRANSFORMERS: list[Format] = []
OFFICIAL = [
    Format(
        "fairseq",
        KeyTable(
            [
                Rename("^encoder.embed_tokens.", "^source_embedding."),
                Rename("^decoder.embed_tokens.", "^decoder.embedding."),
                Rename("^decoder.output_projection.", "^decoder.output."),
                Rename("^encoder.layer_norm.", "^encoder.norm."),
                Rename("^decoder.layer_norm.", "^decoder.stack.norm."),
                *library_stack("encoder.", "encoder.", ENCODER_NORMS, joined=["self_attn"]),
                *library_stack("decoder.", "decoder.stack.", DECODER_NORMS, joined=["self_attn", "cross_attn"]),
                Custom(_fit_tables),
            ]
        ),
        marks=(
            "encoder.embed_tokens.weight",
            "encoder.layers.0.self_attn.q_proj.weight",
            "decoder.layers.0.encoder_attn.q_proj.weight",
        ),
    )
]
