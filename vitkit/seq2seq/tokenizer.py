"""Vocabularies of language models that others have trained: WordPiece, byte-level BPE, and whatever else a
`tokenizer.json` of the `tokenizers` library describes. The library is only needed for these."""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from importlib.util import find_spec

from vitkit.errors import CheckpointError
from vitkit.seq2seq.vocabulary import FORMAT, MASK_TOKEN, SPACE, SPECIAL_TOKENS, Vocabulary, normalize_text
from vitkit.structures import BOS, EOS, PAD, UNK


def has_tokenizers() -> bool:
    """Whether the `tokenizers` library is installed."""
    return find_spec("tokenizers") is not None


class TokenizerVocabulary(Vocabulary):
    """The tokens of a `tokenizer.json`, with vitkit's special tokens first and the others in their order.

    Texts are first normalised as for every vocabulary (`normalize_text`), so line breaks become spaces.

    Args:
        tokenizer: the content of the file.
        special: its numbers of SPECIAL_TOKENS and, if there is one, of MASK_TOKEN; a token may stand for several, as
            GPT-2's end of text does.

    Attributes:
        numbers: each token's number in the file.
    Raises:
        CheckpointError: the `tokenizers` library is not installed.
        ValueError: the file is damaged, or has no token with a number in `special`.
    """

    def __init__(self, tokenizer: str, special: Sequence[int]):
        if not has_tokenizers():
            raise CheckpointError(
                "the model's vocabulary needs the package tokenizers, which is not installed: pip install tokenizers."
            )
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_str(tokenizer)
        except Exception as error:  # the library raises only this class
            raise ValueError(f"tokenizer: not the content of a tokenizer.json ({error!s:.100}).") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        by_number = {number: token for token, number in self._tokenizer.get_vocab().items()}
        names = [*SPECIAL_TOKENS, MASK_TOKEN][: len(special)]
        missing = [f"{name} ({number})" for name, number in zip(names, special) if number not in by_number]
        if missing or len(special) not in (len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + 1):
            raise ValueError(f"tokenizer: has no token for {', '.join(missing) or 'all special tokens'}.")
        others = [n for n in sorted(by_number) if n not in special and by_number[n] not in names]
        self.special = list(special)
        self.numbers = [*special, *others]
        self._set_tokens("tokenizer", [*names, *(by_number[number] for number in others)])

    @cached_property
    def _word_prefix(self) -> str | None:
        """The beginning of tokens that continue a word, for WordPiece; None where tokens contain their spaces."""
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        return decoder.get("prefix") if decoder.get("type") == "WordPiece" else None

    def encode_all(self, texts: Iterable[str]) -> list[list[int]]:
        """Encode many texts."""
        texts = [normalize_text(text) for text in texts]
        encoded = []
        for text, result in zip(texts, self._tokenizer.encode_batch(texts, add_special_tokens=False)):
            ids = [self._ids.get(token, UNK) for token in result.tokens]
            self.unknown.update(text[slice(*span)] for index, span in zip(ids, result.offsets) if index == UNK)
            encoded.append(ids)
        return encoded

    def encode_masked(self, text: str) -> list[int]:
        """Encode a text in which MASK_TOKEN stands for each hidden token; ConfigError without a mask token."""
        self._check_has_mask()
        first, *others = self.encode_all(text.split(MASK_TOKEN))
        return [*first, *(index for ids in others for index in (self.mask_id, *ids))]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, without special tokens other than UNK."""
        special = {PAD, BOS, EOS, self.mask_id}
        return self._joined([self.tokens[index] for index in ids if index not in special]).strip()

    def token_texts(self, ids: Iterable[int]) -> list[str]:
        """Return each token as text: with SPACE where a word begins, special tokens by their names."""
        num_special = len(self.special)
        return [self.tokens[index] if index < num_special else self._text(self.tokens[index]) for index in ids]

    def _text(self, token: str) -> str:
        if self._word_prefix is None:
            return self._joined([token]).replace(" ", SPACE)
        return token.removeprefix(self._word_prefix) if token.startswith(self._word_prefix) else SPACE + token

    def _joined(self, tokens: list[str]) -> str:
        decoder = self._tokenizer.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(tokens)

    @property
    def content(self) -> str:
        """The content of the `tokenizer.json`."""
        return self._tokenizer.to_str()

    def to_json(self) -> str:
        """Return everything that `Vocabulary.from_json` needs."""
        content = {"format": FORMAT, "kind": self.kind, "special": self.special, "tokenizer": self.content}
        return json.dumps(content, ensure_ascii=False)
