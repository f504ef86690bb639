import math

import pytest

from vitkit.evaluation.caption_metrics import bleu_counts, bleu_of_counts, cider_d, rouge_l, tokenize_caption


def bleu(candidates, references):
    return bleu_of_counts(bleu_counts(candidates, references).sum(axis=0)[None])[0].tolist()


def words(*texts):
    return [text.split() for text in texts]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("A man's dog doesn't bark .", "a man 's dog does n't bark"),
        ("Two black-and-white dogs, running!", "two black-and-white dogs running"),
        ('"Stop," (she said); it’s 10:30...', "stop she said it 's 10:30"),
        ("3,000 people & one T-shirt", "3,000 people & one t-shirt"),
        ("a dog,cat", "a dog cat"),
        ("He cannot sleep in the U.S. now", "he can not sleep in the u.s. now"),
        (" \n", ""),
    ],
)
def test_tokens_are_lower_case_words_with_separate_clitics(text, tokens):
    assert tokenize_caption(text) == tokens.split()


def test_bleu_of_a_corpus_by_hand():
    candidates = words("the the the cat", "a dog runs fast")
    references = [words("the cat sat on the mat", "a cat on the mat"), words("a dog runs very fast", "the dog is fast")]
    # Unigrams: 2 (the, clipped by the first reference) + 1 of 4; 4 of 4. Bigrams: "the cat" of 3; "a dog", "dog runs"
    # of 3. Trigrams: 0 of 2; "a dog runs" of 2. Four-grams: 0 of 2.
    precisions = [7 / 8, 3 / 6, 1 / 4, 0]
    # Lengths 4 + 4 against the nearest: 5, then 4.
    brevity = math.exp(1 - 9 / 8)
    expected = [brevity * math.prod(precisions[:n]) ** (1 / n) for n in (1, 2, 3, 4)]
    assert bleu(candidates, references) == pytest.approx(expected)


def test_bleu_is_one_for_a_reference_and_zero_for_an_empty_caption():
    references = [words("a red ring above a blue star", "another one")]
    assert bleu(references[0][:1], references) == pytest.approx([1, 1, 1, 1])
    assert bleu([[]], references) == [0, 0, 0, 0]


def test_bleu_uses_the_shorter_of_two_equally_close_references():
    # Nearest to 3 are 2 and 4; with 2 there is no penalty.
    assert bleu(words("a b c"), [words("a b", "a b c d")])[0] == pytest.approx(1.0)


def test_rouge_l_takes_precision_and_recall_each_from_its_best_reference():
    # Common subsequences: "a dog runs" (3 of 4 and of 6 words), "a dog" (2 of 4 and of 2).
    score = rouge_l(words("a dog fast runs"), [words("a big dog runs over there", "a dog")])[0]
    precision, recall = 3 / 4, 2 / 2
    assert score == pytest.approx((1 + 1.44) * precision * recall / (recall + 1.44 * precision))
    assert rouge_l([[], ["x"]], [words("a dog"), words("a dog")]) == [0, 0]


def test_cider_d_of_two_images_by_hand():
    candidates = words("a dog", "a cat")
    references = [words("a dog"), words("a cat sits")]
    # "a" is in both of two images and weighs log(2 / 2) = 0; everything else log 2. The first candidate repeats its
    # reference: unigrams and bigrams 1, no longer n-grams. The second: unigrams cat of cat, sits: 1 / sqrt 2; bigrams
    # "a cat" of "a cat", "cat sits": 1 / sqrt 2; one word shorter.
    damped = math.exp(-1 / 72) / math.sqrt(2)
    assert cider_d(candidates, references) == pytest.approx([10 * 2 / 4, 10 * 2 * damped / 4])


def test_cider_d_clips_repeated_words_and_averages_over_references():
    candidates = words("dog dog", "x")
    references = [words("dog", "cat"), words("y")]
    # Unigrams: vector 2 log 2 against log 2, clipped to it: log^2 2 / (2 log 2 * log 2) = 1 / 2; the other reference 0.
    expected = 10 * (0.5 / 4 * math.exp(-1 / 72) + 0) / 2
    assert cider_d(candidates, references) == pytest.approx([expected, 0.0])


def test_cider_d_of_a_single_image_is_zero():
    assert cider_d(words("a dog"), [words("a dog")]) == [0.0]


def test_candidate_equal_to_one_of_five_references_scores_two():
    references = [words("p q r s t", "b1", "b2", "b3", "b4"), words("other words")]
    assert cider_d([references[0][0], []], references)[0] == pytest.approx(2.0)
