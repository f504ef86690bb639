"""Prompts of images: classes sampled or all, given phrases, spans, and the batches of a loader."""

import logging

import numpy as np
import pytest
import torch
from helpers.grounding_models import bert_tokenizer

from vitkit.data.loading.batch_augmentation import mix
from vitkit.data.loading.samplers import EvalBatches, TrainBatches
from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import match_classes
from vitkit.errors import ConfigError, DataError
from vitkit.protocols.dataset import Dataset
from vitkit.text.class_prompts import Prompts, PromptStep, choose_fitting
from vitkit.text.prompts import encode_phrases, join_prompts, spanned_tokens
from vitkit.text.vocabulary import TokenizerVocabulary, Vocabulary

NAMES = [f"{color}_{thing}" for color in ("red", "blue", "dark green") for thing in ("star", "ring", "tall cross", "x")]
PHRASES = [name.replace("_", " ") for name in NAMES]


class Boxes(Dataset):
    """Images of one pixel with the given labels, or with the given fields of a target."""

    annotations = ("objects",)

    def __init__(self, targets, classes=NAMES, num_phrases=None):
        self.targets, self.classes, self.texts = targets, classes, num_phrases
        self.prompts, self.has_vocabularies = Prompts(), True

    def __len__(self):
        return len(self.targets)

    def phrases(self):
        return self.texts

    def __getitem__(self, index):
        index, _ = index
        target = self.targets[index]
        target = dict(target if isinstance(target, dict) else {"labels": target})
        target["labels"] = torch.tensor(target["labels"], dtype=torch.int64)
        count = len(target["labels"])
        target["boxes_cxcywh"] = torch.arange(count)[:, None].expand(count, 4) / 100  # each box tells its object
        return {"image": torch.zeros(3, 1, 1, dtype=torch.uint8), "target": target | {"image_id": index}}


def make(targets, *, seeds=None, training=True, classes=NAMES, texts=None, vocabulary=None, **options):
    """Return the targets of one batch, and its prompt."""
    dataset = Boxes(targets, classes, texts)
    dataset.prompts = Prompts(**options)
    if vocabulary is not None:
        dataset.target_vocabulary = vocabulary
    step = PromptStep(dataset, training=training)
    samples = [dataset[index, 0] for index in range(len(dataset))]
    prompted, prompt = step(samples, range(len(samples)) if seeds is None else seeds)
    return [sample["target"] for sample in prompted], prompt


def read(prompt, row, vocabulary):
    """Return the phrases of a prompt as its tokens say them, without looking at the targets."""
    phrases = {}
    for token, phrase, is_word in zip(*(field[row].tolist() for field in prompt)):
        if is_word:
            phrases.setdefault(phrase, []).append(token)
    assert list(phrases) == list(range(len(phrases)))
    return [vocabulary.decode(tokens) for tokens in phrases.values()]


def random_labels(count, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(len(NAMES), size=random.integers(7)).tolist() for _ in range(count)]


@pytest.mark.parametrize("max_tokens", [256, 20, 9])
def test_random_prompts_name_what_the_image_shows_once_and_keep_to_the_limit(max_tokens):
    labels = random_labels(300)
    targets, prompt = make(labels, negatives=8, max_tokens=max_tokens)
    vocabulary = Boxes(labels).target_vocabulary
    sizes, left_out = [], 0
    for row, (before, target) in enumerate(zip(labels, targets)):
        phrases = target["phrases"]
        assert read(prompt, row, vocabulary) == phrases
        assert len(set(phrases)) == len(phrases) >= 1 and set(phrases) <= set(PHRASES)
        assert int((prompt.tokens[row] != 0).sum()) <= max_tokens
        kept = (target["boxes_cxcywh"][:, 0] * 100).round().long().tolist()
        assert [phrases[number] for number in target["labels"].tolist()] == [PHRASES[before[index]] for index in kept]
        missing = {before[index] for index in range(len(before)) if index not in kept}
        assert all(PHRASES[label] not in phrases for label in missing)  # not left out while it is named
        left_out += len(missing)
        sizes.append(len(phrases) - len(set(before) - missing))
        assert sizes[-1] <= 8
    assert (left_out > 0) == (max_tokens < 256)
    if max_tokens == 256:
        shown = np.array([len(set(each)) for each in labels])
        full = np.array(sizes) == np.minimum(8, len(NAMES) - shown)
        assert 0.4 < full.mean() < 0.8 and set(sizes) >= set(range(1, 8))
        # The classes that an image shows stand anywhere.
        first = [0 in target["labels"] for target, each in zip(targets, labels) if each]
        assert 0.1 < np.mean(first) < 0.7


def test_prompts_depend_on_the_sample_s_seed_only():
    labels = random_labels(20)
    targets, _ = make(labels, negatives=5)
    again, _ = make(labels[::-1], seeds=range(19, -1, -1), negatives=5)
    other, _ = make(labels, seeds=range(100, 120), negatives=5)
    phrases = [target["phrases"] for target in targets]
    assert phrases == [target["phrases"] for target in again[::-1]]
    assert phrases != [target["phrases"] for target in other]


@pytest.mark.parametrize(("training", "negatives"), [(False, 3), (True, None), (False, None)])
def test_all_classes_in_their_order_without_sampling(training, negatives):
    labels = random_labels(8)
    targets, prompt = make(labels, training=training, negatives=negatives)
    assert [target["labels"].tolist() for target in targets] == labels
    assert all(target["phrases"] == PHRASES for target in targets)
    assert (prompt.tokens == prompt.tokens[0]).all()


def test_evaluation_takes_any_number_of_tokens_and_training_on_all_classes_does_not():
    _, prompt = make([[0]], training=False, max_tokens=9)
    assert prompt.tokens.shape[1] == 45
    with pytest.raises(ConfigError, match="all 12 classes in every prompt, but they have 45 tokens together, and max_"):
        make([[0]], negatives=None, max_tokens=40)


def test_only_classes_that_an_image_surely_lacks_are_negatives():
    targets, _ = make([{"labels": [1, 1], "negative_labels": [4, 5]}] * 30 + [{"labels": [], "negative_labels": []}])
    for target in targets[:-1]:
        assert {PHRASES[1]} < set(target["phrases"]) <= {PHRASES[1], PHRASES[4], PHRASES[5]}
        assert "negative_labels" not in target
    assert len(targets[-1]["phrases"]) >= 1


def test_masks_and_boxes_of_objects_that_do_not_fit_are_left_out():
    target = {"labels": [3, 0, 3], "masks": torch.eye(3, dtype=torch.bool)[:, None]}
    seen = set()
    for seed in range(20):
        (result,), _ = make([target], seeds=[seed], max_tokens=6)
        rows = result["masks"].nonzero()[:, 2].tolist()
        assert rows in ([1], [0, 2]) and len(result["boxes_cxcywh"]) == len(result["labels"]) == len(rows)
        seen.add(len(rows))
    assert seen == {1, 2}


@pytest.mark.parametrize(
    ("classes", "options", "message"),
    [
        (["St. Bernard", "cat"], {}, "class 'St. Bernard': .*the phrase 'St. Bernard' has a '.'"),
        (["_"], {}, "class '_': .* has no phrase"),
        (["bow_tie", "Bow tie"], {}, "classes 'bow_tie' and 'Bow tie': both are 'Bow tie' in a prompt"),
        (["cat", "cat"], {}, "classes 'cat' and 'cat': both are 'cat'"),
        (["cat", "dog"], {"phrases": {"cat": "a DOG", "dog": "a dog"}}, "classes 'cat' and 'dog': both are 'a dog'"),
    ],
)
def test_classes_that_make_no_prompt_are_named(classes, options, message):
    with pytest.raises(DataError, match=rf"{message}.*Set data.prompts.phrases={{'.*': 'ANOTHER PHRASE'}}"):
        make([[0]], classes=classes, **options)


def test_a_class_that_the_tokenizer_does_not_know_is_named():
    vocabulary = Vocabulary.train("word", ["cat ."])
    with pytest.raises(DataError, match="class 'okapi': .*knows no piece of the phrase 'okapi'.*data.prompts.phrases="):
        make([[0]], classes=["cat", "okapi"], vocabulary=vocabulary)
    (target,), _ = make([[1]], classes=["cat", "okapi"], vocabulary=vocabulary, phrases={"okapi": "cat okapi"})
    assert target["phrases"][target["labels"][0]] == "cat okapi"


@pytest.mark.parametrize("options", [{"negatives": 0}, {"max_tokens": 3}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=f"data.prompts.{next(iter(options))}: got {next(iter(options.values()))}"):
        DataSettings(prompts=options)


def test_a_class_renamed_by_a_typo_is_an_error_that_names_the_nearest():
    train, val = Boxes([[0]], ["cat", "dog"]), Boxes([[0]], ["cat", "okapi"])
    train.prompts = Prompts(phrases={"okapi": "striped horse"})
    match_classes(train, val)
    train.prompts = Prompts(phrases={"dogg": "puppy"})
    with pytest.raises(ConfigError, match="the data have no class 'dogg'. Did you mean 'dog'"):
        match_classes(train, val)


def test_validation_may_have_classes_that_training_has_not(caplog):
    train, val = Boxes([[0]], ["cat", "dog"]), Boxes([[0]], ["zebra", "cat"])
    with caplog.at_level(logging.INFO, logger="vitkit"):
        match_classes(train, val)
    assert val.classes == ["zebra", "cat"] and "1 class that data.train has not: zebra" in caplog.text


CAPTION = {"labels": [1, 0, 1], "phrases": ["a cat on a  mat", "two dogs play"]}


def test_given_phrases_are_encoded_by_the_same_step():
    vocabulary = Vocabulary.train("word", ["a cat on mat two dogs play ."])
    targets, prompt = make([CAPTION, [0]], classes=["cat"], vocabulary=vocabulary)
    assert targets[0]["labels"].tolist() == [1, 0, 1] and targets[0]["phrases"] == ["a cat on a mat", "two dogs play"]
    assert read(prompt, 0, vocabulary) == targets[0]["phrases"] and read(prompt, 1, vocabulary) == ["cat"]
    assert "positive_map" not in targets[0]


def test_spans_become_the_tokens_of_each_object():
    vocabulary = Vocabulary.train("word", ["a cat on mat two dogs play ."])
    spans = [[(0, 8)], [(0, 5), (11, 14)], [(4, 5)]]
    (target,), prompt = make([CAPTION | {"phrase_spans": spans}], vocabulary=vocabulary, classes=())
    words = ["<s>", "a", "cat", "on", "a", "mat", ".", "two", "dogs", "play", ".", "</s>"]
    assert vocabulary.token_texts(prompt.tokens[0].tolist())[4] == "▁a"
    named = [[words[index] for index in row.nonzero()[:, 0].tolist()] for row in target["positive_map"]]
    assert named == [["two", "dogs"], ["a", "cat", "mat"], ["dogs"]]
    assert "phrase_spans" not in target


def test_given_phrases_that_do_not_fit_lose_their_objects():
    vocabulary = Vocabulary.train("word", ["a cat on mat two dogs play ."])
    spans = [[(0, 8)], [(0, 5)], [(4, 5)]]
    targets = [CAPTION | {"phrase_spans": spans}]
    (target,), prompt = make(targets, vocabulary=vocabulary, classes=(), max_tokens=11)
    assert target["phrases"] == ["a cat on a mat"] and target["labels"].tolist() == [0]
    assert target["positive_map"].nonzero().tolist() == [[0, 1], [0, 2]] and prompt.tokens.shape[1] == 8
    (target,), _ = make(targets, vocabulary=vocabulary, classes=(), max_tokens=11, training=False)
    assert len(target["phrases"]) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [2, 0, 0]}, r"image 0 of the batch \(image_id 0\): labels 0 to 2 for 2 phrases"),
        ({"phrases": ["a cat.", "dogs"]}, r"image_id 0\): .*the phrase 'a cat\.' has a '\.'"),
        ({"phrases": ["zzz", "dogs"]}, "knows no piece of the phrase 'zzz'"),
        ({"phrase_spans": [[(0, 1)]]}, "phrase_spans of 1 objects; expected a list for each of 3"),
        (
            {"phrase_spans": [[(0, 1)], [(30, 40)], [(0, 1)]]},
            r"the spans \[\(30, 40\)\] hold no token of the phrase 'a",
        ),
        ({"phrases": ["a cat on a mat two dogs play", "cat"], "labels": []}, None),
        ({"phrases": ["cat two cat two cat two cat two"], "labels": []}, "has 11 tokens; data.prompts.max_tokens=8"),
    ],
)
def test_given_phrases_that_cannot_be_encoded_name_the_image(change, message):
    vocabulary = Vocabulary.train("word", ["a cat on mat two dogs play ."])
    if message is None:
        (target,), _ = make([CAPTION | change], classes=(), vocabulary=vocabulary, max_tokens=8)
        assert target["phrases"] == ["cat"]
        return
    with pytest.raises(DataError, match=message):
        limit = 8 if "max_tokens" in message else 256
        make([CAPTION | change], classes=(), vocabulary=vocabulary, max_tokens=limit)


def test_data_without_boxes_have_no_prompts():
    dataset = Boxes([[0]])
    step = PromptStep(dataset, training=True)
    with pytest.raises(ConfigError, match=r"image_id 3\) has label, image_id; expected labels and boxes_cxcywh"):
        step([{"image": torch.zeros(3, 1, 1), "target": {"label": 1, "image_id": 3}}], [0])
    with pytest.raises(DataError, match="has no phrases, nor has its dataset classes"):
        make([[]], classes=(), vocabulary=Vocabulary.train("word", ["a ."]))


def test_the_vocabulary_is_learned_from_classes_and_phrases():
    dataset = Boxes([[0]], ["Cat", "dog_house"], ["A red Ball", "a cat"])
    assert dataset.target_vocabulary.tokens[4:] == ["▁.", "▁a", "▁cat", "▁ball", "▁dog", "▁house", "▁red"]
    other = Boxes([[0]])
    other.use_vocabularies_of(dataset)
    assert other.target_vocabulary is dataset.target_vocabulary


@pytest.mark.parametrize("kind", ["word", "char", "bpe", "tokenizer"])
def test_spans_of_tokens_are_those_of_the_text(kind):
    lines = ["a red dog", "hot dogs , red-hot", "Kos. a  cat"]
    if kind == "tokenizer":
        pytest.importorskip("tokenizers", reason="needs pip install 'vitkit[text]'")
        vocabulary = TokenizerVocabulary(bert_tokenizer(), [0, 100, 101, 102, 103])
    else:
        size = 30 if kind == "bpe" else None
        vocabulary = Vocabulary.train(kind, lines, size=size, lowercase=True)
    for line in lines:
        ids, spans = vocabulary.encode(line), vocabulary.token_spans(line)
        assert len(ids) == len(spans)
        text = " ".join(line.split())
        known = [(index, text[begin:end]) for index, (begin, end) in zip(ids, spans) if index != 1]
        for (index, part), token in zip(known, vocabulary.token_texts([index for index, _ in known])):
            assert token.replace("▁", "") == part.lower().replace(" ", ""), (line, index)
    assert any(spanned_tokens(vocabulary, "a  red dog", [(3, 6)]))
    named = spanned_tokens(vocabulary, "a  red dog", [(7, 10)])
    assert vocabulary.decode([index for index, x in zip(vocabulary.encode("a red dog"), named) if x]).strip() == "dog"


def test_joined_prompts_equal_those_of_all_phrases():
    vocabulary = Vocabulary.train("word", ["a cat on mat two dogs play ."])
    parts = [["a cat", "mat"], ["dogs"], ["two mat", "play"]]
    joined = join_prompts([encode_phrases(vocabulary, part) for part in parts])
    assert joined == encode_phrases(vocabulary, [phrase for part in parts for phrase in part])


def test_what_does_not_fit_makes_room_for_what_follows():
    assert choose_fitting(np.array([5, 4, 2, 3]), 8).tolist() == [True, False, True, False]


def loaded(dataset, *, workers, rank=0, world_size=1, skip=0):
    settings = DataSettings(num_workers=workers, prompts={}, pin_memory=False)
    batches = TrainBatches(len(dataset), batch_size=4, seed=3, rank=rank, world_size=world_size)
    loader = settings.loader(dataset, batches, training=True)
    loader.set_position(1, skip)
    return [
        (batch.inputs["prompt"].tokens.tolist(), [t["phrases"] for t in batch.targets], len(batch)) for batch in loader
    ]


def test_workers_ranks_and_resumption_do_not_change_prompts():
    dataset = Boxes(random_labels(16))
    dataset.prompts = Prompts(negatives=4)
    batches = loaded(dataset, workers=0)
    assert len(batches) == 4 and batches == loaded(dataset, workers=2)
    assert loaded(dataset, workers=0, skip=3) == batches[3:]
    ranks = [loaded(dataset, workers=0, rank=rank, world_size=2) for rank in (0, 1)]
    assert [batch for pair in zip(*ranks) for batch in pair] == batches


def test_evaluation_batches_have_all_classes_and_the_boxes_of_each_class():
    dataset = Boxes(random_labels(5))
    loader = DataSettings(num_workers=0).loader(dataset, EvalBatches(5, batch_size=2), training=False)
    for batch in loader:
        assert all(target["phrases"] == PHRASES for target in batch.targets)
        assert batch.inputs.keys() == {"images", "padding_mask", "prompt"}


def test_samples_whose_phrases_cannot_be_encoded_are_replaced_and_named(caplog):
    dataset = Boxes([CAPTION, CAPTION | {"phrases": ["zzz", "dogs"]}], classes=())
    dataset.target_vocabulary = Vocabulary.train("word", ["a cat on mat two dogs play ."])
    batches = TrainBatches(2, batch_size=2, seed=0)
    with pytest.raises(DataError, match="knows no piece of the phrase 'zzz'"):
        list(DataSettings(num_workers=0).loader(dataset, batches, training=True))
    with caplog.at_level(logging.ERROR, logger="vitkit"):
        (batch,) = DataSettings(num_workers=0, on_error="skip").loader(dataset, batches, training=True)
    assert [target["image_id"] for target in batch.targets] == [0, 0] and "the phrase 'zzz'" in caplog.text
    with pytest.raises(ConfigError, match="data.mixup: mixes images whose labels are classes, and these have phrases"):
        mix(dataset[0, 0], dataset[0, 0], 0.5)


def test_a_mixed_image_surely_lacks_what_both_lack():
    dataset = Boxes([{"labels": [0], "negative_labels": [1, 2, 3]}, {"labels": [4], "negative_labels": [2, 3, 5]}, [6]])
    mixed = mix(dataset[0, 0], dataset[1, 0], 0.5)["target"]
    assert mixed["negative_labels"] == [2, 3] and mixed["labels"].tolist() == [0, 4]
    assert mix(dataset[2, 0], dataset[1, 0], 0.5)["target"]["negative_labels"] == [2, 3, 5]
