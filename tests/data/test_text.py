import gzip

import pytest
import sacrebleu

from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import build_dataset, choose_fraction
from vitkit.data.text.datasets import TextLines, VocabularySettings
from vitkit.data.text.monolingual import MonolingualText
from vitkit.data.text.pairs import ParallelText, SacrebleuText
from vitkit.errors import ConfigError, DataError
from vitkit.structures import BOS, EOS, PAD
from vitkit.text.vocabulary import Vocabulary

WORDS = dict(kind="word", shared=False)


@pytest.fixture
def pair(tmp_path):
    """Writes two files, and builds the dataset of them."""

    def make(sources, targets, **arguments):
        for name, lines in (("a.en", sources), ("a.de", targets)):
            (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return ParallelText(str(tmp_path / "a.en"), str(tmp_path / "a.de"), **arguments)

    return make


def test_plain_and_gzip_files_are_read(tmp_path):
    content = "eins\r\nzwei\u2028drei\n\nvier".encode()
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + content + b"\n"))
    for name in ("a", "b.gz"):
        assert list(TextLines(tmp_path / name)) == ["eins", "zwei\u2028drei", "", "vier"]
    assert TextLines(tmp_path / "a")[-1] == "vier"
    with pytest.raises(IndexError):
        TextLines(tmp_path / "a")[4]


def test_bad_files_are_named(tmp_path):
    (tmp_path / "latin").write_bytes("eins\nzwei\nfünf\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin, line 3: byte 0xfc is not UTF-8"):
        TextLines(tmp_path / "latin")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(DataError, match=r"empty: the file is empty; expected a sentence in each line"):
        TextLines(tmp_path / "empty")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"eins\n" * 1000)[:-20])
    with pytest.raises(DataError, match=r"cut\.gz: a damaged gzip file"):
        TextLines(tmp_path / "cut.gz")
    with pytest.raises(DataError, match=r"no file '.*none'\. Correct its path; a dataset's begins at data\.root"):
        TextLines(tmp_path / "none")


def test_different_numbers_of_lines_are_an_error(pair):
    with pytest.raises(DataError, match=r"a\.en has 2 lines and .*a\.de has 3: expected the same number"):
        pair(["a", "b"], ["x", "y", "z"])


def test_samples_are_batched_with_padding(pair):
    dataset = pair(["a b", "b"], ["x", "y x z"], vocabulary=WORDS)
    assert dataset.source_vocabulary.tokens[4:] == ["▁b", "▁a"]
    assert dataset.target_vocabulary.tokens[4:] == ["▁x", "▁y", "▁z"]
    sample = dataset[(0, 17)]
    assert sample["source"].tolist() == [5, 4, EOS]
    target = sample["target"]
    assert target["tokens"].tolist() == [4, EOS]
    assert (target["source_text"], target["references"], target["index"]) == ("a b", ["x"], 0)

    batch = dataset.collate([dataset[0], dataset[1]])
    assert batch.inputs["source"].tolist() == [[5, 4, EOS], [4, EOS, PAD]]
    assert batch.inputs["source_padding"].tolist() == [[False] * 3, [False, False, True]]
    assert batch.inputs["target_in"].tolist() == [[BOS, 4, PAD, PAD], [BOS, 5, 4, 6]]
    assert [target["tokens"].tolist() for target in batch.targets] == [[4, EOS], [5, 4, 6, EOS]]


def test_a_shared_vocabulary_is_one_object(pair):
    dataset = pair(["a b"], ["b c"], vocabulary=dict(kind="word"))
    assert dataset.source_vocabulary is dataset.target_vocabulary
    assert dataset.source_vocabulary.tokens[4:] == ["▁b", "▁a", "▁c"]


def test_training_drops_empty_and_long_lines_and_counts_them(pair, caplog):
    dataset = pair(["a", "", "a b", "a b c d"], ["x", "y", " ", "x y"], vocabulary=WORDS, max_length=4)
    assert len(dataset) == 1 and dataset[0]["target"]["index"] == 0
    assert "3 of 4 sentences left out: 2 with an empty side, 1 of over 4 tokens" in caplog.text


def test_evaluation_keeps_every_line(pair, caplog):
    dataset = pair(["a", "", "a b a b"], ["x", "y", "x y"], max_length=4)
    assert len(dataset) == 3
    dataset.use_vocabularies_of(pair(["a b", "a"], ["x", "y"], vocabulary=WORDS))
    assert [dataset[i]["source"].tolist() for i in range(3)] == [[4, EOS], [EOS], [4, 5, 4, EOS]]
    assert dataset[2]["target"]["source_text"] == "a b a b"
    assert dataset.lengths().tolist() == [[2, 2], [1, 2], [4, 3]]
    assert "1 with an empty side, 1 of over 4 tokens" in caplog.text


def test_unfit_lines_can_be_errors(pair):
    dataset = pair(["a", "a"], ["x", ""], vocabulary=WORDS, unfit_lines="error")
    with pytest.raises(DataError, match=r"a\.de, line 2: the line is empty; expected a sentence"):
        dataset.lengths()
    dataset = pair(["a", "a b c d"], ["x", "x"], vocabulary=WORDS, unfit_lines="error", max_length=3)
    with pytest.raises(DataError, match=r"a\.en, line 2: 5 tokens, counting the end; expected at most max_length=3"):
        dataset.lengths()


def test_dataset_without_remaining_lines_is_an_error(pair):
    with pytest.raises(DataError, match=r"none of the 1 sentences is left: 1 with an empty side"):
        len(pair([""], ["x"], vocabulary=dict(kind="word")))


def test_unknown_characters_are_reported(pair, caplog):
    train = pair(["aab", "b"], ["x", "y"], vocabulary=dict(kind="char"))
    val = pair(["abqq", "r"], ["x", "y"])
    val.use_vocabularies_of(train)
    val.lengths()
    assert "3 characters are not in the vocabulary: 'q' 2x, 'r' 1x" in caplog.text
    assert val.source_vocabulary.unknown.total() == 3


def test_dataset_without_vocabulary_is_an_error(pair):
    dataset = pair(["a"], ["x"])
    with pytest.raises(DataError, match=r"it takes its training dataset's or a checkpoint's"):
        dataset[0]


def test_vocabularies_can_be_set_one_by_one(pair):
    dataset, train = pair(["a"], ["x"]), pair(["b"], ["y"], vocabulary=WORDS)
    dataset.source_vocabulary, dataset.target_vocabulary = train.source_vocabulary, train.target_vocabulary
    assert dataset.source_vocabulary == train.source_vocabulary
    assert dataset.target_vocabulary == train.target_vocabulary


def test_vocabulary_settings_may_be_an_object(pair):
    dataset = pair(["a b", "b"], ["x", "x"], vocabulary=VocabularySettings(kind="word", size=5))
    assert dataset.source_vocabulary.tokens[4:] == ["▁b"]


def test_unknown_vocabulary_settings_are_refused(pair):
    with pytest.raises(ConfigError, match=r"vocabulary: unknown argument 'sise'\. Did you mean 'size'"):
        pair(["a"], ["x"], vocabulary=dict(kind="bpe", sise=3))
    with pytest.raises(ConfigError, match=r"vocabulary: got 'bpe'; expected a dict, such as dict\(kind='bpe'"):
        pair(["a"], ["x"], vocabulary="bpe")
    with pytest.raises(ConfigError, match=r"max_length: got 1; expected at least 2"):
        pair(["a"], ["x"], max_length=1)
    with pytest.raises(ConfigError, match=r"unfit_lines: got 'cut'; expected one of drop, keep, error"):
        pair(["a"], ["x"], unfit_lines="cut")


def test_monolingual_text_serves_both_objectives(tmp_path):
    (tmp_path / "a").write_text("b a\nb\n")
    causal = MonolingualText(str(tmp_path / "a"), vocabulary=dict(kind="word"))
    assert causal[0]["tokens"].tolist() == [BOS, 4, 5]
    assert causal[0]["target"]["tokens"].tolist() == [4, 5, EOS]
    batch = causal.collate([causal[0], causal[1]])
    assert batch.inputs["tokens"].tolist() == [[BOS, 4, 5], [BOS, 4, PAD]]
    assert batch.inputs["padding_mask"].tolist() == [[False] * 3, [False, False, True]]

    masked = MonolingualText(str(tmp_path / "a"), objective="masked", vocabulary=dict(kind="word"))
    assert masked.target_vocabulary.mask_id == 4
    assert masked[0]["tokens"].tolist() == masked[0]["target"]["tokens"].tolist() == [5, 6, EOS]
    with pytest.raises(ConfigError, match=r"objective: got 'mlm'; expected 'causal' or 'masked'"):
        MonolingualText(str(tmp_path / "a"), objective="mlm")
    with pytest.raises(ConfigError, match=r"the vocabulary has no <mask>"):
        masked.target_vocabulary = causal.target_vocabulary


def test_loaders_are_built_from_a_config(pair, tmp_path):
    dataset = pair([f"a {'b ' * (i % 5)}" for i in range(40)], ["x"] * 40, vocabulary=WORDS)
    settings = DataSettings(tokens_per_gpu=30, num_workers=0)
    loader = settings.train_loader(dataset, seed=3)
    seen = [target["index"] for batch in loader for target in batch.targets]
    assert sorted(seen) == list(range(40)) and settings.batch_size_per_gpu == 30
    assert all(batch.inputs["source"].numel() <= 30 for batch in settings.val_loader(dataset))
    by_count = DataSettings(images_per_gpu=8, num_workers=0).train_loader(dataset, seed=3)
    assert [len(batch) for batch in by_count] == [8] * 5


def test_batches_are_the_same_with_workers(pair):
    dataset = pair([f"a {'b ' * (i % 5)}" for i in range(40)], ["x"] * 40, vocabulary=dict(kind="bpe", size=8))
    alone, workers = (
        DataSettings(tokens_per_gpu=30, num_workers=count).train_loader(dataset, seed=3) for count in (0, 2)
    )
    for a, b in zip(alone, workers, strict=True):
        assert a.inputs["source"].equal(b.inputs["source"])


def test_tokens_per_gpu_requires_text():
    shapes = build_dataset(dict(type="ShapesClassification", num_images=4, image_size=32))
    with pytest.raises(ConfigError, match=r"data\.tokens_per_gpu: ShapesClassification has no text"):
        DataSettings(tokens_per_gpu=100).train_loader(shapes, seed=0)
    with pytest.raises(ConfigError, match=r"data\.tokens_per_gpu: got 0; expected at least 1"):
        DataSettings(tokens_per_gpu=0)


def test_batches_are_padded_with_the_padding_token():
    assert Vocabulary.train("word", ["a"]).tokens[PAD] == "<pad>"


def test_a_fraction_of_lines_is_trained_on_and_makes_the_vocabulary(tmp_path):
    empty = choose_fraction(40, 0.1)[0]
    (tmp_path / "a.en").write_text("\n".join("" if k == empty else f"word{k} word{k % 7}" for k in range(40)))
    (tmp_path / "a.de").write_text("\n".join(f"Wort{k}" for k in range(40)))
    pairs = dict(type="ParallelText", source="{root}/a.en", target="{root}/a.de", vocabulary=WORDS, max_length=8)
    trained = {}
    for fraction in (0.1, 0.5, 1.0):
        settings = DataSettings(train=dict(**pairs, fraction=fraction), root=str(tmp_path), tokens_per_gpu=20)
        dataset, chosen = settings.dataset("train"), choose_fraction(40, fraction)
        samples = [dataset[k] for k in range(len(dataset))]
        trained[fraction] = {sample["target"]["references"][0] for sample in samples}
        assert trained[fraction] == {f"Wort{k}" for k in chosen if k != empty}
        words = {token.removeprefix("\u2581") for token in dataset.target_vocabulary.tokens[4:]}
        assert words == {f"Wort{k}" for k in chosen}
        assert dataset.location(0, 2) == f"{tmp_path / 'a.en'}, line {chosen[2] + 1}"
    assert trained[0.1] < trained[0.5] < trained[1.0]
    assert len(settings.evaluation_dataset("train").sides[0]) == 40  # evaluation has all of them
    causal = dict(type="MonolingualText", file="{root}/a.de", vocabulary=dict(kind="char"), fraction=0.25)
    dataset = DataSettings(train=causal, root=str(tmp_path), tokens_per_gpu=20).dataset("train")
    assert [dataset[k]["target"]["text"] for k in range(10)] == [f"Wort{k}" for k in choose_fraction(40, 0.25)]


def test_published_test_sets_come_from_sacrebleu(tmp_path, monkeypatch):
    test_set = sacrebleu.dataset.DATASETS["wmt14/full"]
    monkeypatch.setattr(test_set, "_outdir", str(tmp_path))
    monkeypatch.setattr(test_set, "_rawdir", str(tmp_path / "raw"))
    monkeypatch.setattr("sacrebleu.dataset.base.download_file", _no_network)
    with pytest.raises(DataError, match=r"'wmt14/full' cannot be downloaded \(no network\)\. Go online"):
        SacrebleuText("wmt14/full", "en-fr")
    for field, text in {"src": "a\nb", "ref": "x\ny"}.items():
        (tmp_path / f"wmt14_full.en-fr.{field}").write_text(text)
    for field in test_set.fieldnames("en-fr")[2:]:
        (tmp_path / f"wmt14_full.en-fr.{field}").write_text("1\n2")
    dataset = SacrebleuText("wmt14/full", "en-fr")
    assert [list(side) for side in dataset.sides] == [["a", "b"], ["x", "y"]]
    with pytest.raises(ConfigError, match="sacrebleu has no such test set. Did you mean 'wmt14/full'"):
        SacrebleuText("wmt14/ful", "en-fr")
    with pytest.raises(ConfigError, match=r"languages='en-xx': wmt14/full is in .*en-fr"):
        SacrebleuText("wmt14/full", "en-xx")


def _no_network(*arguments, **options):
    raise OSError("no network")
