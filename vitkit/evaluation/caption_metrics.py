"""Metrics of captions against several references: BLEU, ROUGE-L and CIDEr-D.

BLEU, ROUGE-L and CIDEr-D are defined as the COCO caption evaluation computes them
(Chen et al. 2015, https://arxiv.org/abs/1504.00325). Only the tokenizer differs from it; see
`tokenize_caption`.

Throughout, `candidates` are N captions and `references` N lists of one or more captions; a caption is a list of tokens.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

Tokens = Sequence[str]
Counts = Counter[tuple[str, ...]]

MAX_N = 4
"""Longest n-gram of BLEU and CIDEr-D."""
_ROUGE_BETA = 1.2
"""How much more recall weighs than precision in the F-measure."""
_CIDER_SIGMA = 6.0
"""Standard deviation, in tokens, of the Gaussian that damps differences in length."""

_CLITIC = re.compile(r"(?<=\w)(n't|'(?:s|m|d|ll|re|ve))\b")
_TOKEN = re.compile(
    r"n't\b|'(?:s|m|d|ll|re|ve)\b"
    r"|\d+(?:[.,:]\d+)+"  # 3,000 and 10:30
    r"|(?:[^\W\d]\.){2,}"  # u.s.
    r"|\w+(?:[-/'&]\w+)*"
    r"|[^\w\s]"
)
_PUNCTUATION = frozenset("'\"`.?!,:;-–—…()[]{}“”„")


def tokenize_caption(text: str) -> list[str]:
    """Split text into lower-case words without punctuation, following the rules of the Penn Treebank.

    Clitics become tokens (it 's, do n't); hyphenated words and numbers (3,000) are one token. Brackets, quotes, dashes
    and marks that end or divide a sentence are left out; symbols (&, %, $) are tokens. The COCO evaluation runs
    Stanford's tokenizer, which does the same but also recognizes abbreviations (it keeps the period of "st."),
    emoticons and addresses.
    """
    text = text.lower().replace("’", "'").replace("‘", "'").replace("cannot", "can not")
    return [token for token in _TOKEN.findall(_CLITIC.sub(r" \1", text)) if token not in _PUNCTUATION]


def bleu_counts(candidates: Sequence[Tokens], references: Sequence[Sequence[Tokens]]) -> np.ndarray:
    """Return the counts of each candidate, (N, 10): matching n-grams of 1 to 4 tokens, all such n-grams, tokens, and
    the tokens of the reference nearest in length, the shorter one of two.

    An n-gram counts at most as often as it occurs in the reference that has it most.
    """
    counts = np.zeros((len(candidates), 2 * MAX_N + 2))
    for row, candidate, image_references in zip(counts, candidates, references, strict=True):
        max_counts: Counts = Counter()
        for reference in image_references:
            max_counts |= ngrams(reference)
        for ngram, count in ngrams(candidate).items():
            row[len(ngram) - 1] += min(count, max_counts[ngram])
            row[MAX_N + len(ngram) - 1] += count
        row[-2] = len(candidate)
        row[-1] = min((abs(len(r) - len(candidate)), len(r)) for r in image_references)[1]
    return counts


def bleu_of_counts(counts: np.ndarray) -> np.ndarray:
    """Return BLEU-1 to BLEU-4 (Papineni et al. 2002), (R, 4) in 0..1, of corpora from the sums of their candidates'
    `bleu_counts`, (R, 10), without smoothing."""
    matched, proposed, (length, reference_length) = counts[:, :MAX_N], counts[:, MAX_N : 2 * MAX_N], counts[:, -2:].T
    brevity = np.minimum(0.0, 1 - reference_length / np.maximum(length, 1))
    precisions = np.divide(matched, proposed, out=np.zeros(matched.shape), where=proposed > 0)
    with np.errstate(divide="ignore"):
        logs = np.log(precisions).cumsum(axis=1) / np.arange(1, MAX_N + 1)
    return np.exp(logs + brevity[:, None]) * (length > 0)[:, None]


def ngrams(tokens: Tokens) -> Counts:
    """Count each n-gram of one to four tokens."""
    return Counter(tuple(tokens[i : i + n]) for n in range(1, MAX_N + 1) for i in range(len(tokens) - n + 1))


def rouge_l(candidates: Sequence[Tokens], references: Sequence[Sequence[Tokens]]) -> list[float]:
    """Return ROUGE-L of each candidate (Lin 2004), in 0..1: an F-measure of the longest common subsequence.

    Precision and recall are each the best over the references, not necessarily from the same one.
    """
    scores = []
    for candidate, image_references in zip(candidates, references, strict=True):
        common = [_longest_common(candidate, reference) for reference in image_references]
        precision = max(common) / max(len(candidate), 1)
        recall = max(c / max(len(reference), 1) for c, reference in zip(common, image_references))
        total = recall + _ROUGE_BETA**2 * precision
        scores.append((1 + _ROUGE_BETA**2) * precision * recall / total if total else 0.0)
    return scores


def _longest_common(a: Tokens, b: Tokens) -> int:
    """Return the length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for word in a:
        before = 0
        for j, other in enumerate(b, start=1):
            before, row[j] = row[j], before + 1 if word == other else max(row[j], row[j - 1])
    return row[-1]


def cider_d(candidates: Sequence[Tokens], references: Sequence[Sequence[Tokens]]) -> list[float]:
    """Return CIDEr-D of each candidate (Vedantam et al. 2015, https://arxiv.org/abs/1411.5726), in 0..10.

    Cosine of the n-grams' TF-IDF vectors, clipped to the reference's and damped by the difference of the lengths, times
    10; the mean over the references and over n of one to four. An n-gram's document frequency is the number of images
    in `references` with at least one reference that has it, so a score is only valid within a set of images, and is 0
    for a single image.

    What is reported is the mean over images: about 1.0 for good models on COCO. A candidate that repeats one of five
    references gets 2 from that one only.
    """
    counted = [[ngrams(reference) for reference in image_references] for image_references in references]
    frequency = Counter(ngram for image_counts in counted for ngram in set().union(*image_counts))
    log_images = math.log(max(len(references), 1))

    def vector(counts: Counts) -> dict[tuple[str, ...], float]:
        return {ngram: count * (log_images - math.log(max(frequency[ngram], 1))) for ngram, count in counts.items()}

    scores = []
    for candidate, image_references, image_counts in zip(candidates, references, counted, strict=True):
        mine, total = vector(ngrams(candidate)), 0.0
        for reference, counts in zip(image_references, image_counts):
            damping = math.exp(-((len(candidate) - len(reference)) ** 2) / (2 * _CIDER_SIGMA**2))
            total += damping * float(_compute_clipped_cosines(mine, vector(counts)).mean())
        scores.append(10 * total / len(image_references))
    return scores


def _compute_clipped_cosines(a: dict[tuple[str, ...], float], b: dict[tuple[str, ...], float]) -> np.ndarray:
    """Return the cosines for each n-gram length, (4,), with the counts of `a` clipped to those of `b`."""
    products, norms_a, norms_b = np.zeros((3, MAX_N))
    for ngram, value in a.items():
        norms_a[len(ngram) - 1] += value**2
        products[len(ngram) - 1] += min(value, b.get(ngram, 0.0)) * b.get(ngram, 0.0)
    for ngram, value in b.items():
        norms_b[len(ngram) - 1] += value**2
    norms = np.sqrt(norms_a * norms_b)
    return np.divide(products, norms, out=np.zeros(MAX_N), where=norms > 0)
