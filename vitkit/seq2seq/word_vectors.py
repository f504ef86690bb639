"""Word vectors in text files: GloVe's (Pennington et al. 2014), and word2vec's (Mikolov et al. 2013,
https://arxiv.org/abs/1301.3781), which begin with a line of two numbers, the numbers of words and of dimensions."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from vitkit.errors import ConfigError, DataError
from vitkit.text.vocabulary import SPACE, Vocabulary


def init_embedding(
    embedding: nn.Embedding, vocabulary: Vocabulary | None, path: str | None, *, factor: float = 1.0
) -> str | None:
    """Initialize a model's embeddings with the vectors of a file, as its argument `word_vectors` says.

    Args:
        factor: see `load_word_vectors`.
    Returns:
        the path and how many tokens have a vector; None without a path.
    Raises:
        ConfigError: the model has no vocabulary to match rows to words.
        DataError: see `load_word_vectors`.
    """
    if path is None:
        return None
    if vocabulary is None:
        raise ConfigError(
            f"word_vectors={path!r}: needs a vocabulary, but the model only has a number of tokens. Train on a dataset "
            "of text, or leave the vectors out."
        )
    num_loaded = load_word_vectors(embedding, vocabulary.tokens, path, factor=factor)
    return f"{path} ({num_loaded} of {len(vocabulary)} tokens)"


@torch.no_grad()
def load_word_vectors(embedding: nn.Embedding, tokens: Sequence[str], path: str | Path, *, factor: float = 1.0) -> int:
    """Set the rows of tokens for which a file has vectors; a word is looked up as it is, or else in lower case.

    Args:
        tokens: the tokens of the rows, as in a vocabulary; word pieces are looked up like words.
        factor: what the embedding multiplies its rows by, as `ScaledEmbedding` does; the products are the vectors.
    Returns:
        the number of rows that were set.
    Raises:
        DataError: the file cannot be read, a line is not a word followed by finite numbers, or the dimension is wrong.
    """
    rows_of: dict[str, list[int]] = {}
    words = [token.removeprefix(SPACE) for token in tokens]
    for row, word in enumerate(words):
        for form in {word, word.lower()}:
            rows_of.setdefault(form, []).append(row)
    is_exact: dict[int, bool] = {}
    """Row -> whether its vector is for the word as it is, rather than in lower case."""
    for word, values in read_lines(path, embedding.embedding_dim):
        for row in rows_of.get(word, ()):
            if words[row] == word or not is_exact.get(row, False):
                try:
                    vector = torch.tensor([float(value) for value in values])
                except ValueError as error:
                    raise DataError(
                        f"word vectors '{path}': the vector of {word!r} is not numeric ({error})."
                    ) from error
                if not vector.isfinite().all():
                    raise DataError(f"word vectors '{path}': the vector of {word!r} has a value that is not finite.")
                embedding.weight[row] = vector / factor
                is_exact[row] = words[row] == word
    return len(is_exact)


def read_lines(path: str | Path, dimensions: int) -> Iterator[tuple[str, list[str]]]:
    """Yield each word of a file and its numbers as text; raises like `load_word_vectors`."""
    try:
        with Path(path).open(encoding="utf-8-sig", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                if number == 1 and len(line.split()) == 2:
                    continue  # word2vec's header
                word, *values = line.rstrip().rsplit(" ", dimensions)
                # A few of GloVe's words contain spaces; but not in the first lines, where superfluous numbers would
                # look the same.
                if len(values) != dimensions or (number <= 2 and " " in word):
                    raise DataError(
                        f"word vectors '{path}', line {number}: expected a word and {dimensions} numbers, "
                        f"the model's d_embedding or d_model, got {len(line.split())} values that begin {line[:30]!r}."
                    )
                yield word, values
    except OSError as error:
        raise DataError(f"word vectors '{path}': cannot be read ({error.strerror}).") from error
