"""Key names and token ids of fairseq's Transformers for translation (https://github.com/facebookresearch/fairseq).

The model is a `Transformer` with `positions="fairseq"`, and with `norm_first=True` if fairseq normalises before each
block. fairseq's ids are `<s> <pad> </s> <unk>` and its dictionary's tokens, and its decoder starts from `</s>`: the
rows of the embeddings are put in vitkit's order, with the row of `</s>` for both BOS and EOS. The row of `<s>`, which
fairseq never uses, is left out.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from vitkit.errors import DataError
from vitkit.model_zoo.converter import Converter, State

_PAD, _EOS, _UNK = 1, 2, 3
_ROWS = (_PAD, _UNK, _EOS, _EOS)
"""fairseq's ids for vitkit's PAD, UNK, BOS, EOS."""
_SPECIAL_TOKENS = ("<pad>", "<unk>", "<s>", "</s>")
"""A copy of `SPECIAL_TOKENS` of vitkit.seq2seq.vocabulary, which is not imported here."""
_UNUSED = ("version", "embed_positions._float_tensor")


def fairseq_dictionary(path: str | Path) -> list[str]:
    """Return the tokens of a fairseq dictionary (dict.LANGUAGE.txt) in the order of vitkit's ids, special ones first.

    Raises:
        DataError: a line is not a token, a space and a count.
    """
    tokens = list(_SPECIAL_TOKENS)
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        token, _, count = line.removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not token or not count.isdigit():
            raise DataError(f"{path}: line {number} is {line!r:.80}; expected a token, a space and its count.")
        tokens.append(token)
    return tokens


def _convert(state: State, model: nn.Module) -> State:
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
    return _pack_projections(state)


def _reorder(table: Tensor) -> Tensor:
    return torch.cat([table[list(_ROWS)], table[len(_ROWS) :]])


def _pack_projections(state: State) -> State:
    """Join each attention's projections to queries, keys and values, as in torch.nn.MultiheadAttention."""
    packed = {}
    for key, value in state.items():
        prefix, projection, kind = key.rpartition("_proj.")
        if not projection or prefix[-2:] not in (".q", ".k", ".v"):
            packed[key] = value
        elif prefix.endswith(".q"):
            parts = [state[f"{prefix[:-1]}{part}_proj.{kind}"] for part in "qkv"]
            packed[f"{prefix[:-1]}in_proj_{kind}"] = torch.cat(parts)
    return packed


CONVERTERS = [
    Converter(
        name="fairseq",
        marks=(
            "encoder.embed_tokens.weight",
            "encoder.layers.0.self_attn.q_proj.weight",
            "decoder.layers.0.encoder_attn.q_proj.weight",
        ),
        renames=(
            (r"^encoder\.embed_tokens\.", "source_embedding."),
            (r"^decoder\.embed_tokens\.", "decoder.embedding."),
            (r"^decoder\.output_projection\.", "decoder.output."),
            (r"^decoder\.layers\.", "decoder.stack.layers."),
            (r"^encoder\.layer_norm\.", "encoder.norm."),
            (r"^decoder\.layer_norm\.", "decoder.stack.norm."),
            (r"\.encoder_attn\.", ".cross_attn."),
            (r"\.self_attn_layer_norm\.", ".norm1."),
            (r"\.encoder_attn_layer_norm\.", ".norm2."),
            (r"^(encoder\..*)\.final_layer_norm\.", r"\1.norm2."),
            (r"^(decoder\..*)\.final_layer_norm\.", r"\1.norm3."),
            (r"\.fc([12])\.", r".ffn.linear\1."),
        ),
        transform=_convert,
    )
]
