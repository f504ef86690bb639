import pytest

from vitkit.data.synthetic.number_words import (
    Counting,
    NumberTasks,
    NumberWords,
    english_number,
    german_number,
    is_training_number,
)
from vitkit.errors import ConfigError
from vitkit.structures import UNK

NUMBERS = {
    0: ("zero", "null"),
    1: ("one", "eins"),
    12: ("twelve", "zwölf"),
    16: ("sixteen", "sechzehn"),
    17: ("seventeen", "siebzehn"),
    21: ("twenty-one", "einundzwanzig"),
    30: ("thirty", "dreißig"),
    66: ("sixty-six", "sechsundsechzig"),
    77: ("seventy-seven", "siebenundsiebzig"),
    100: ("one hundred", "einhundert"),
    101: ("one hundred one", "einhunderteins"),
    345: ("three hundred forty-five", "dreihundertfünfundvierzig"),
    1000: ("one thousand", "eintausend"),
    1001: ("one thousand one", "eintausendeins"),
    21_000: ("twenty-one thousand", "einundzwanzigtausend"),
    101_101: ("one hundred one thousand one hundred one", "einhunderteintausendeinhunderteins"),
    999_999: (
        "nine hundred ninety-nine thousand nine hundred ninety-nine",
        "neunhundertneunundneunzigtausendneunhundertneunundneunzig",
    ),
}


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_are_written_in_words(number):
    assert (english_number(number), german_number(number)) == NUMBERS[number]


def test_parts_of_compounds_may_be_words():
    assert english_number(45_321, compound=False) == "forty five thousand three hundred twenty one"
    assert german_number(45_321, compound=False) == "fünf und vierzig tausend drei hundert ein und zwanzig"
    assert (english_number(0, compound=False), german_number(101_001, compound=False)) == (
        "zero",
        "ein hundert ein tausend eins",
    )
    for number in NUMBERS:
        assert german_number(number, compound=False).replace(" ", "") == german_number(number)
    pairs = NumberWords(20, compound=False)
    assert list(pairs.sides[1]) == [german_number(number, compound=False) for number in pairs.numbers.tolist()]


def test_no_two_numbers_have_the_same_words():
    numbers = [*range(2000), *range(99_000, 102_000)]
    for write in (english_number, german_number):
        assert len({write(number) for number in numbers}) == len(numbers)


@pytest.mark.parametrize("number", [-1, 10**6])
def test_other_numbers_are_refused(number):
    with pytest.raises(ValueError, match=rf"number: got {number}; expected 0 to 999999"):
        english_number(number)


def test_validation_numbers_are_not_in_training():
    train, val = NumberWords(5000), NumberWords(1000, split="val")
    assert not set(train.numbers.tolist()) & set(val.numbers.tolist())
    assert len(set(val.numbers.tolist())) == 1000
    assert all(is_training_number(n) for n in train.numbers.tolist())
    assert all(is_training_number(n) for n in range(100))
    # Numbers with one digit are as frequent as those with six.
    assert 0.12 < (train.numbers < 10).mean() < 0.25 and 0.1 < (train.numbers > 99_999).mean() < 0.25


def test_numbers_depend_only_on_their_index():
    assert NumberWords(50).numbers.tolist() == NumberWords(5000).numbers[:50].tolist()


def test_sample_has_the_number_in_both_languages():
    dataset = NumberWords(20, vocabulary=dict(kind="char"))
    target = dataset[0]["target"]
    number = int(dataset.numbers[0])
    assert target["source_text"] == english_number(number) and target["references"] == [german_number(number)]
    assert dataset.noun == "numbers"
    assert dataset.target_vocabulary.decode(target["tokens"].tolist()) == german_number(number)


def test_too_many_numbers_are_refused():
    with pytest.raises(ConfigError, match=r"num_pairs: got 60000; expected 1 to 50000"):
        NumberWords(60000)
    with pytest.raises(ConfigError, match=r"split: got 'test'; expected 'train' or 'val'"):
        NumberWords(5, split="test")


def test_both_directions_are_tasks_named_in_the_source():
    dataset = NumberTasks(4, split="val", vocabulary=dict(kind="char"))
    assert list(dataset.numbers) == list(NumberWords(4, split="val").numbers)
    for index, number in enumerate(dataset.numbers.tolist()):
        target = dataset[index]["target"]
        english, german = english_number(number), german_number(number)
        if index % 2:
            expected = f"translate German to English: {german}", [english]
        else:
            expected = f"translate English to German: {english}", [german]
        assert (target["source_text"], target["references"]) == expected


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_lines_count_from_numbers_that_the_other_split_does_not_begin_with(objective):
    train = Counting(2000, objective=objective, vocabulary=dict(kind="word"))
    val = Counting(300, split="val", objective=objective)
    val.use_vocabularies_of(train)
    assert not set(train.numbers.tolist()) & set(val.numbers.tolist())
    for dataset in (train, val):
        sample = dataset[7]
        first = int(dataset.numbers[7])
        text = ", ".join(english_number(first + k) for k in range(3))
        assert sample["target"]["text"] == text
        assert train.target_vocabulary.decode(sample["target"]["tokens"].tolist()) == text
        assert not (sample["tokens"] == UNK).any()
    assert (train.target_vocabulary.mask_id is None) == (objective == "causal")
    with pytest.raises(ConfigError, match="num_lines: got 0; expected 1 to 50000"):
        Counting(0)
