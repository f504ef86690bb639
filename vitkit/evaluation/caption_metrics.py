"""Metrics of captions against several references: BLEU, ROUGE-L, CIDEr-D, and what of METEOR needs no lexicon.

BLEU, ROUGE-L and CIDEr-D are defined as the COCO caption evaluation computes them
(Chen et al. 2015, https://arxiv.org/abs/1504.00325). They differ from it by the tokeniser alone; see
`tokenize_caption`.

Throughout, `candidates` are N captions and `references` N lists of one caption or more, all lists of tokens.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

Tokens = Sequence[str]
Counts = Counter[tuple[str, ...]]

MAX_N = 4
"""Longest n-gram of BLEU and CIDEr-D."""

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
    """Lower-case words without punctuation, after the rules of the Penn Treebank.

    Clitics stand alone (it 's, do n't), hyphenated words stay whole, as do numbers (3,000). Brackets, quotes, dashes
    and marks that end or divide a sentence are left out; symbols (&, %, $) are tokens. The COCO evaluation runs
    Stanford's tokeniser, which does the same but also knows abbreviations (the period of "st." stays there), emoticons
    and addresses.
    """
    text = text.lower().replace("’", "'").replace("‘", "'").replace("cannot", "can not")
    return [token for token in _TOKEN.findall(_CLITIC.sub(r" \1", text)) if token not in _PUNCTUATION]


def bleu(candidates: Sequence[Tokens], references: Sequence[Sequence[Tokens]]) -> list[float]:
    """BLEU-1 to BLEU-4 of a corpus (Papineni et al. 2002), in 0..1.

    An n-gram counts as often as the reference that has it most. Against the brevity penalty counts the reference
    nearest in length, the shorter of two. Nothing is smoothed: without a matching n-gram the score is 0.
    """
    matched, proposed = np.zeros(MAX_N), np.zeros(MAX_N)
    length = reference_length = 0
    for candidate, its_references in zip(candidates, references, strict=True):
        length += len(candidate)
        reference_length += min((abs(len(r) - len(candidate)), len(r)) for r in its_references)[1]
        most: Counts = Counter()
        for reference in its_references:
            most |= ngrams(reference)
        for ngram, count in ngrams(candidate).items():
            matched[len(ngram) - 1] += min(count, most[ngram])
            proposed[len(ngram) - 1] += count
    if not length:
        return [0.0] * MAX_N
    brevity = min(0.0, 1 - reference_length / length)
    precisions = np.divide(matched, proposed, out=np.zeros(MAX_N), where=proposed > 0)
    with np.errstate(divide="ignore"):
        logs = np.log(precisions).cumsum() / np.arange(1, MAX_N + 1)
    return np.exp(logs + brevity).tolist()


def ngrams(tokens: Tokens) -> Counts:
    """How often each n-gram of one to four tokens occurs."""
    return Counter(tuple(tokens[i : i + n]) for n in range(1, MAX_N + 1) for i in range(len(tokens) - n + 1))


def rouge_l(candidates: Sequence[Tokens], references: Sequence[Sequence[Tokens]], *, beta: float = 1.2) -> list[float]:
    """ROUGE-L of each candidate (Lin 2004), in 0..1: an F-measure of the longest common subsequence.

    Precision and recall are each the best over the references, which need not be the same one.

    Args:
        beta: how much more recall weighs than precision.
    """
    scores = []
    for candidate, its_references in zip(candidates, references, strict=True):
        common = [_longest_common(candidate, reference) for reference in its_references]
        precision = max(common) / max(len(candidate), 1)
        recall = max(c / max(len(reference), 1) for c, reference in zip(common, its_references))
        total = recall + beta**2 * precision
        scores.append((1 + beta**2) * precision * recall / total if total else 0.0)
    return scores


def _longest_common(a: Tokens, b: Tokens) -> int:
    """Length of the longest subsequence that both have."""
    row = [0] * (len(b) + 1)
    for word in a:
        before = 0
        for j, other in enumerate(b, start=1):
            before, row[j] = row[j], before + 1 if word == other else max(row[j], row[j - 1])
    return row[-1]


def cider_d(candidates: Sequence[Tokens], references: Sequence[Sequence[Tokens]], *, sigma: float = 6.0) -> list[float]:
    """CIDEr-D of each candidate (Vedantam et al. 2015, https://arxiv.org/abs/1411.5726), in 0..10.

    Cosine of the n-grams' TF-IDF vectors, clipped to the reference's and damped by the difference of the lengths, times
    10; the mean over the references and over n of one to four. An n-gram's document frequency is the number of images
    in `references` of which any reference has it, so a score holds within a set of images, and of one image it is 0.

    Means over images are what is reported: about 1.0 for good models on COCO. A candidate that repeats one of five
    references gets 2 from that one alone.

    Args:
        sigma: of the Gaussian of the lengths' difference, tokens.
    """
    counted = [[ngrams(reference) for reference in its_references] for its_references in references]
    frequency = Counter(ngram for of_image in counted for ngram in set().union(*of_image))
    log_images = math.log(max(len(references), 1))

    def vector(counts: Counts) -> dict[tuple[str, ...], float]:
        return {ngram: count * (log_images - math.log(max(frequency[ngram], 1))) for ngram, count in counts.items()}

    scores = []
    for candidate, its_references, of_image in zip(candidates, references, counted, strict=True):
        mine, total = vector(ngrams(candidate)), 0.0
        for reference, counts in zip(its_references, of_image):
            damping = math.exp(-((len(candidate) - len(reference)) ** 2) / (2 * sigma**2))
            total += damping * float(_clipped_cosines(mine, vector(counts)).mean())
        scores.append(10 * total / len(its_references))
    return scores


def _clipped_cosines(a: dict[tuple[str, ...], float], b: dict[tuple[str, ...], float]) -> np.ndarray:
    """(4,) of each length of n-grams; `a` counts no further than `b`."""
    products, norms_a, norms_b = np.zeros((3, MAX_N))
    for ngram, value in a.items():
        norms_a[len(ngram) - 1] += value**2
        products[len(ngram) - 1] += min(value, b.get(ngram, 0.0)) * b.get(ngram, 0.0)
    for ngram, value in b.items():
        norms_b[len(ngram) - 1] += value**2
    norms = np.sqrt(norms_a * norms_b)
    return np.divide(products, norms, out=np.zeros(MAX_N), where=norms > 0)


# Of METEOR 1.5 for English (Denkowski and Lavie 2014, table 3): how precision and recall are weighed, the fragmentation
# penalty's power and weight, content words against function words, and a stem's match against an exact one.
_ALPHA, _BETA, _GAMMA, _DELTA, _STEM_WEIGHT = 0.85, 0.2, 0.6, 0.75, 0.6
_BEAM = 40

_FUNCTION_WORDS = """
a an the this that these those some any each every no not n't and or but nor so if while as than then of in on at to
from by with for into onto over under up down out off near about through between behind before after around is are was
were be been being am has have had having do does did will would can could may might shall should must i you he she it
we they me him her us them my your his its our their who which what where when how there here 's 'm 'd 'll 're 've
"""
_IS_FUNCTION_WORD = frozenset(_FUNCTION_WORDS.split())


def exact_stem_f(candidates: Sequence[Tokens], references: Sequence[Sequence[Tokens]]) -> list[float]:
    """Aligned words in the manner of METEOR 1.5 (Denkowski and Lavie 2014), in 0..1; the best over the references.

    It is not METEOR: words match when they or their stems are equal, never as synonyms or paraphrases, which need
    WordNet and METEOR's tables; stems are those of `stem`, and the function words are a short list of this module's.
    Scores are lower than METEOR's and compare with each other alone. The formula and its constants are METEOR's: a
    weighted F-mean of matched words, less a penalty for the number of chunks in which they lie.
    """
    return [
        max(_aligned_f(candidate, reference) for reference in its_references)
        for candidate, its_references in zip(candidates, references, strict=True)
    ]


def _aligned_f(candidate: Tokens, reference: Tokens) -> float:
    pairs = align(candidate, reference)
    if not pairs:
        return 0.0
    weights = [1.0 if candidate[i] == reference[j] else _STEM_WEIGHT for i, j in pairs]
    precision = _weighted(weights, [candidate[i] for i, _ in pairs]) / _weighted([1.0] * len(candidate), candidate)
    recall = _weighted(weights, [reference[j] for _, j in pairs]) / _weighted([1.0] * len(reference), reference)
    f_mean = precision * recall / (_ALPHA * precision + (1 - _ALPHA) * recall)
    chunks = 1 + sum(after != (i + 1, j + 1) for (i, j), after in pairwise(pairs))
    whole = chunks == 1 and len(pairs) == len(candidate) == len(reference)
    penalty = 0.0 if whole else _GAMMA * (chunks / len(pairs)) ** _BETA
    return (1 - penalty) * f_mean


def _weighted(weights: Iterable[float], words: Tokens) -> float:
    return sum(
        w * (1 - _DELTA if word in _IS_FUNCTION_WORD else _DELTA) for w, word in zip(weights, words, strict=True)
    )


class _Alignment(NamedTuple):
    """Of the first words of a candidate. Fields in the order in which alignments are compared, less being better."""

    unmatched: int
    chunks: int
    distance: int
    """Sum of how far matched words lie apart."""
    inexact: int
    pairs: tuple[tuple[int, int], ...] = ()


def align(candidate: Tokens, reference: Tokens) -> tuple[tuple[int, int], ...]:
    """Pairs of positions of equal words or stems, each word in one pair at most, in the candidate's order.

    As many as can be; of those in as few chunks (runs that are adjacent on both sides) as can be; then as near to the
    diagonal as can be. The search keeps the best 40 alignments of the words so far.
    """
    stems, reference_stems = [stem(word) for word in candidate], [stem(word) for word in reference]
    beam = [_Alignment(0, 0, 0, 0)]
    for i, word in enumerate(candidate):
        places = [j for j, other in enumerate(reference_stems) if other == stems[i]]
        certain = len(places) == 1 and stems.count(stems[i]) == 1
        longer = [] if certain else [a._replace(unmatched=a.unmatched + 1) for a in beam]
        for a in beam:
            taken = {j for _, j in a.pairs}
            longer += [_extended(a, i, j, exact=reference[j] == word) for j in places if j not in taken]
        beam = sorted(longer)[:_BEAM]
    return beam[0].pairs


def _extended(a: _Alignment, i: int, j: int, *, exact: bool) -> _Alignment:
    goes_on = bool(a.pairs) and a.pairs[-1] == (i - 1, j - 1)
    return _Alignment(
        a.unmatched, a.chunks + (not goes_on), a.distance + abs(i - j), a.inexact + (not exact), (*a.pairs, (i, j))
    )


_VOWEL = re.compile(r"[aeiou]|(?<=[^aeiou])y")


def stem(word: str) -> str:
    """A word without its inflection: step 1 of Porter's algorithm (1980), which removes -s, -ed and -ing."""
    for suffix, replacement in (("sses", "ss"), ("ies", "i"), ("ss", "ss"), ("s", "")):
        if word.endswith(suffix) and len(word) > 2:
            word = word.removesuffix(suffix) + replacement
            break
    if word.endswith("eed"):
        word = word[:-1] if _measure(word[:-3]) else word
    else:
        for suffix in ("ed", "ing"):
            if word.endswith(suffix) and _VOWEL.search(word.removesuffix(suffix)):
                word = _mended(word.removesuffix(suffix))
                break
    if word.endswith("y") and _VOWEL.search(word[:-1]):
        word = word[:-1] + "i"
    return word


def _mended(word: str) -> str:
    """What is left of -ed and -ing, as the word is written without them: hopp to hop, hik to hike."""
    if word.endswith(("at", "bl", "iz")):
        return word + "e"
    shape = "".join("v" if _VOWEL.match(word, i) else "c" for i in range(len(word)))
    if shape.endswith("cc") and word[-1] == word[-2] and word[-1] not in "lsz":
        return word[:-1]
    short = _measure(word) == 1 and shape.endswith("cvc") and word[-1] not in "wxy"
    return word + "e" if short else word


def _measure(word: str) -> int:
    """How often a consonant follows a vowel."""
    shape = "".join("v" if _VOWEL.match(word, i) else "c" for i in range(len(word)))
    return shape.count("vc")
