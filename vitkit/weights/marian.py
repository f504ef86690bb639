"""Tokenizers of the transformers library's Marian: the pieces of two SentencePiece models, numbered by `vocab.json`.

vitkit's special tokens come first. Its BOS is the token that Marian's decoder starts with, which is also Marian's
padding; so the vocabulary has one more token, and the rows of the weights that belong to tokens are put into its order.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.structures import BOS
from vitkit.text.vocabulary import SPECIAL_TOKENS, Vocabulary

TOKEN_FILES = ("source.spm", "target.spm", "vocab.json")
TARGET_NUMBERS = "target_vocab.json"
"""File with the numbers of the target's pieces, if they are numbered separately."""
_ROWS = {
    "source": ("model.encoder.embed_tokens.weight",),
    "target": ("model.shared.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"),
}
_BIAS = "final_logits_bias"
_UNK = "<unk>"

ReadObject = Callable[[Path], Mapping[str, Any]]
"""Function that reads a JSON file containing an object."""


class Tokens(NamedTuple):
    """A vocabulary, and the number of each of its tokens in the transformers library."""

    vocabulary: Vocabulary
    numbers: list[int]


def read_tokens(folder: Path, config: Mapping[str, Any], read: ReadObject) -> dict[str, Tokens]:
    """Return the tokens of the source and of the target; an empty dict if the folder has no token files.

    Args:
        config: the folder's `config.json`.
        read: function that reads `vocab.json`.
    Raises:
        CheckpointError: a file is damaged, or does not fit the config.
    """
    if config.get("model_type") != "marian" or not all((folder / name).is_file() for name in TOKEN_FILES):
        return {}
    has_own = (folder / TARGET_NUMBERS).is_file() and not config.get("share_encoder_decoder_embeddings", True)
    paths = {"source": folder / TOKEN_FILES[2], "target": folder / (TARGET_NUMBERS if has_own else TOKEN_FILES[2])}
    sizes = {"source": config.get("vocab_size"), "target": config.get("decoder_vocab_size") or config.get("vocab_size")}
    tokens = {}
    for side, path in paths.items():
        pieces = {number: piece for piece, number in read(path).items() if type(number) is int}
        if len(pieces) != sizes[side]:
            raise CheckpointError(
                f"{path}: has {len(pieces)} tokens, and the model {sizes[side]}. Get the files again."
            )
        tokens[side] = _number(pieces, config, folder / f"{side}.spm", path)
    return tokens


def _number(pieces: Mapping[int, str], config: Mapping[str, Any], model: Path, path: Path) -> Tokens:
    """Return the vocabulary with vitkit's special tokens before the others."""
    unknown = next((number for number, piece in pieces.items() if piece == _UNK), None)
    special = [config.get("pad_token_id"), unknown, config.get("decoder_start_token_id"), config.get("eos_token_id")]
    for name, number in zip(SPECIAL_TOKENS, special):
        if type(number) is not int or number not in pieces:
            raise CheckpointError(f"{path}: has no token for {name} (number {number}). Get the folder again.")
    others = [n for n, piece in sorted(pieces.items()) if n not in special and piece != SPECIAL_TOKENS[BOS]]
    try:
        vocabulary = Vocabulary(
            "unigram", [*SPECIAL_TOKENS, *(pieces[number] for number in others)], model=model.read_bytes()
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{model}: no SentencePiece model of these tokens ({error}). Get it again.") from error
    return Tokens(vocabulary, [*special, *others])


def renumber(state: Mapping[str, Tensor], tokens: Mapping[str, Tokens]) -> dict[str, Tensor]:
    """Return the weights with rows in the order of vitkit's tokens.

    Raises:
        CheckpointError: there are fewer rows than tokens.
    """
    state = dict(state)
    for side, keys in _ROWS.items():
        numbers = torch.tensor(tokens[side].numbers)
        for key in keys:
            if key in state:
                if len(state[key]) <= numbers.max():
                    raise CheckpointError(f"{key}: {len(state[key])} rows for {len(numbers) - 1} tokens. Get it again.")
                state[key] = state[key][numbers]
        if side == "target" and _BIAS in state:
            state[_BIAS] = state[_BIAS][:, numbers]
    return state
