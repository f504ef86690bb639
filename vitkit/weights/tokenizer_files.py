"""Tokens of the transformers library's BERT and GPT-2: a `tokenizer.json`, which the `tokenizers` library reads.

A language model's weights get rows in vitkit's order, in which its special tokens come first. Those of a text-prompted
detector keep the file's order, since other projects' files of them have no tokens beside them; it reads numbers of the
file. BERT's [CLS] and [SEP] are BOS and EOS. GPT-2's end of text is BOS and EOS, and also
PAD and UNK, which it lacks; a bias keeps the model from writing the copies.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.structures import EOS
from vitkit.text.vocabulary import TokenizerVocabulary, has_tokenizers
from vitkit.weights.download import fetch_file
from vitkit.weights.marian import Tokens

TOKENIZER = "tokenizer.json"
VOCABULARY = "vocab.txt"
LANGUAGE_MODELS = ("bert", "gpt2")
PROMPTED_MODELS = ("grounding-dino", "mm-grounding-dino")
KINDS = (*LANGUAGE_MODELS, *PROMPTED_MODELS)
"""The `model_type`s whose tokens are in this file."""
BERT = "bert-base-uncased"
"""The tokenizer of all published text-prompted detectors."""
_BERT_URL = "https://huggingface.co/google-bert/bert-base-uncased/resolve/main/vocab.txt"
_BERT_SHA256 = "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
_BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROWS = (
    *("word_embeddings.weight", "cls.predictions.bias", "cls.predictions.decoder.weight"),
    *("cls.predictions.decoder.bias", "wte.weight", "lm_head.weight"),
)
"""Endings of the names of weights with a row for each token."""
_BIAS = "lm_head.bias"
_BERT_SIZE = 30522
_NEVER = -1e4
"""Logit of tokens that are never written; also finite in half precision."""


def read_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, Tokens]:
    """Return the tokens as those of "target"; an empty dict without the file or the `tokenizers` library.

    Args:
        config: the folder's `config.json`.
    Raises:
        CheckpointError: the file is damaged, or does not fit the config.
    """
    path = folder / TOKENIZER
    if not path.is_file() or not has_tokenizers():
        return {}
    try:
        content = path.read_text(encoding="utf-8")
        vocabulary = TokenizerVocabulary(content, _special_numbers(content, config))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: does not have the model's tokens ({error!s:.150}). Get it again.") from error
    text = config.get("text_config")
    size = (text if isinstance(text, Mapping) else config).get("vocab_size", _BERT_SIZE)
    if type(size) is not int or max(vocabulary.numbers) >= size:
        raise CheckpointError(
            f"{path}: has tokens up to number {max(vocabulary.numbers)}, and the model {size}. Get the files again."
        )
    return {"target": Tokens(vocabulary, vocabulary.numbers)}


def find_tokenizer(source: str | Path) -> TokenizerVocabulary:
    """Find the tokenizer of prompts.

    Args:
        source: "bert-base-uncased", whose file of 232 kB is downloaded once; a file; or a folder with `tokenizer.json`
            or `vocab.txt`, one WordPiece token a line.
    Raises:
        CheckpointError: there is no such file, it is damaged, cannot be downloaded, or is of another kind; or the
            `tokenizers` library is not installed.
    """
    if source == BERT and not Path(source).exists():
        _require_tokenizers(source)
        try:
            path = fetch_file(_BERT_URL, checksum=f"sha256:{_BERT_SHA256}", name=f"{BERT}-{VOCABULARY}")
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} This is the tokenizer's file: without a network, set model.tokenizer to a folder with it "
                f"({VOCABULARY}, SHA-256 {_BERT_SHA256[:8]}…, or {TOKENIZER})."
            ) from error
    else:
        given = Path(source)
        names = [given / name for name in (TOKENIZER, VOCABULARY)] if given.is_dir() else [given]
        path = next((name for name in names if name.is_file()), None)
        if path is None:
            raise CheckpointError(
                f"tokenizer {str(source)!r}: there is no {' or '.join(map(str, names))}. Expected {BERT}, a "
                f"{TOKENIZER}, or a {VOCABULARY} such as {_BERT_URL} (SHA-256 {_BERT_SHA256[:8]}…)."
            )
        _require_tokenizers(source)
    try:
        content = path.read_text(encoding="utf-8")
        if path.suffix == ".txt":
            content = _wordpiece(content.splitlines())
        return TokenizerVocabulary(content, _special_numbers(content, {"model_type": "bert"}))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: is not a file of BERT's tokens ({error!s:.150}). Get it again.") from error


def _require_tokenizers(source: str | Path) -> None:
    if not has_tokenizers():
        raise CheckpointError(f"tokenizer {source}: needs the package tokenizers: pip install 'vitkit[text]'.")


def _wordpiece(tokens: Sequence[str]) -> str:
    """Return the content of the `tokenizer.json` of lower-case WordPiece tokens."""
    from tokenizers import BertWordPieceTokenizer

    missing = [name for name in _BERT_SPECIAL if name not in tokens]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}")
    return BertWordPieceTokenizer({token: number for number, token in enumerate(tokens)}, lowercase=True).to_str()


def _special_numbers(content: str, config: Mapping[str, Any]) -> list[int]:
    if config["model_type"] == "gpt2":
        end = config.get("eos_token_id")
        pad, begin = (end if config.get(key) is None else config[key] for key in ("pad_token_id", "bos_token_id"))
        return [pad, end, begin, end]
    values = json.loads(content)
    numbers = {**values["model"]["vocab"], **{token["content"]: token["id"] for token in values["added_tokens"]}}
    return [numbers[name] for name in _BERT_SPECIAL]


def renumber(state: Mapping[str, Tensor], vocabulary: TokenizerVocabulary) -> dict[str, Tensor]:
    """Return the weights with rows in the order of vitkit's tokens.

    Raises:
        CheckpointError: there are fewer rows than tokens.
    """
    numbers = torch.tensor(vocabulary.numbers)
    state = dict(state)
    for key in [key for key in state if key.endswith(ROWS)]:
        if len(state[key]) <= numbers.max():
            raise CheckpointError(f"{key}: {len(state[key])} rows for tokens up to {numbers.max()}. Get it again.")
        state[key] = state[key][numbers]
    copies = [index for index in range(EOS) if vocabulary.special[index] == vocabulary.special[EOS]]
    if copies:
        state[_BIAS] = torch.zeros(len(numbers))
        state[_BIAS][copies] = _NEVER
    return state
