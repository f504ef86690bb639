"""Caption metrics beside pycocoevalcap's Python scorers, on tokenized captions."""

import contextlib
import io

import numpy as np
import pytest

from vitkit.evaluation.caption_metrics import bleu_counts, bleu_of_counts, cider_d, rouge_l

pytestmark = pytest.mark.peers

WORDS = (
    *("a", "an", "the", "dog", "cat", "man", "bench", "red", "blue", "ball"),
    *("runs", "sits", "on", "under", "with", "two", "fast", "park", "in", "of"),
)


def bleu(candidates, references):
    return bleu_of_counts(bleu_counts(candidates, references).sum(axis=0)[None])[0].tolist()


def random_captions(seed, *, num_images=30):
    """Return captions that share many words with their references; some are empty, repeated or a single word."""
    rng = np.random.default_rng(seed)
    candidates, references = [], []
    for _ in range(num_images):
        base = rng.choice(WORDS, rng.integers(2, 12)).tolist()
        image_references = []
        for _ in range(rng.integers(1, 6)):
            changed = [w if rng.random() < 0.7 else str(rng.choice(WORDS)) for w in base]
            image_references.append(changed[: rng.integers(1, len(changed) + 1)])
        kind = rng.random()
        candidate = image_references[0] if kind < 0.1 else base
        candidates.append(candidate[:1] if kind > 0.9 else candidate)
        references.append(image_references)
    return candidates, references


def as_theirs(candidates, references):
    texts = {i: [" ".join(candidate)] for i, candidate in enumerate(candidates)}
    return {i: [" ".join(r) for r in image_references] for i, image_references in enumerate(references)}, texts


@pytest.mark.parametrize("seed", range(5))
def test_bleu_rouge_l_and_cider_d_are_those_of_pycocoevalcap(seed):
    scorers = [pytest.importorskip(f"pycocoevalcap.{name}") for name in ("bleu.bleu", "rouge.rouge", "cider.cider")]
    candidates, references = random_captions(seed)
    truth, texts = as_theirs(candidates, references)
    with contextlib.redirect_stdout(io.StringIO()):
        expected_bleu, _ = scorers[0].Bleu(4).compute_score(truth, texts)
        expected_rouge, each_rouge = scorers[1].Rouge().compute_score(truth, texts)
        expected_cider, each_cider = scorers[2].Cider().compute_score(truth, texts)
    assert bleu(candidates, references) == pytest.approx(expected_bleu, abs=1e-6)
    assert rouge_l(candidates, references) == pytest.approx(each_rouge.tolist(), abs=1e-12)
    assert np.mean(rouge_l(candidates, references)) == pytest.approx(expected_rouge)
    assert cider_d(candidates, references) == pytest.approx(each_cider.tolist(), abs=1e-9)
    assert np.mean(cider_d(candidates, references)) == pytest.approx(expected_cider)
