"""Training of recurrent models with their own predictions (scheduled sampling) and with word vectors."""

from types import SimpleNamespace

import pytest
import torch

from vitkit.engine.hooks.sampling import ScheduledSampling
from vitkit.errors import ConfigError, DataError
from vitkit.registry import MODELS
from vitkit.seq2seq.word_vectors import load_word_vectors
from vitkit.structures import BOS
from vitkit.text.vocabulary import Vocabulary

SIZES = dict(source_size=9, target_size=9, d_embedding=4, d_hidden=8)


def translator(**arguments):
    torch.manual_seed(0)
    return MODELS.build(dict(type="RNNTranslator", **SIZES, **arguments))


@pytest.mark.parametrize("attention", ["additive", None])
def test_scheduled_sampling_feeds_target_words_or_predicted_ones(attention):
    source, target_in = torch.tensor([[4, 5, 3], [6, 7, 3]]), torch.tensor([[BOS, 4, 5, 6], [BOS, 7, 8, 4]])
    model = translator(attention=attention)
    forced = model.eval()(source, None, target_in)["logits"]
    model.set_sampling(1e-12)
    assert torch.allclose(model.train()(source, None, target_in)["logits"], forced, atol=1e-6)

    model.set_sampling(1.0)
    own = model(source, None, target_in)["logits"]
    assert torch.equal(own, model(source, None, target_in.flip(0))["logits"])
    tokens, state = torch.full((2,), BOS), model.start(source)
    for i in range(4):
        logits, state, _ = model.step(tokens, state)
        tokens = logits.argmax(-1)
        assert torch.allclose(own[:, i], logits, atol=1e-5)


def test_fraction_of_predicted_words_grows_over_the_epochs():
    model, parts = translator(), []
    hook = ScheduledSampling(end=0.5)
    run = SimpleNamespace(model=model, settings=SimpleNamespace(epochs=3), progress=SimpleNamespace(epoch=0))
    for run.progress.epoch in range(3):
        with hook.during_training(run):
            hook.before_epoch(run)
            parts.append(model.decoder.scheduled_sampling)
    assert parts == [0.0, 0.25, 0.5]
    run.model = torch.nn.Linear(1, 1)
    with (
        pytest.raises(ConfigError, match=r"ScheduledSampling: Linear has no recurrent decoder"),
        hook.during_training(run),
    ):
        pass
    with pytest.raises(ConfigError, match="ScheduledSampling: end=2"):
        ScheduledSampling(end=2)
    with pytest.raises(ConfigError, match=r"scheduled_sampling=-1"):
        translator(scheduled_sampling=-1)


def test_glove_and_word2vec_vectors_are_read(tmp_path):
    glove, word2vec = tmp_path / "glove.txt", tmp_path / "w2v.txt"
    lines = "the 1 2\nHouse 3 4\nhouse 5 6\n. . 9 9\nTHE 7 7\n"
    glove.write_text(lines)
    word2vec.write_text(f"5 2\n{lines}")
    tokens = ["<pad>", "\u2581the", "The", "House", "boat"]
    marked = tmp_path / "marked.txt"
    marked.write_text(lines, encoding="utf-8-sig")  # with a byte order mark
    for path in (glove, word2vec, marked):
        embedding = torch.nn.Embedding(5, 2)
        before = embedding.weight.detach().clone()
        assert load_word_vectors(embedding, tokens, path) == 3
        assert embedding.weight[1:4].tolist() == [[1, 2], [1, 2], [3, 4]]
        assert torch.equal(embedding.weight[[0, 4]], before[[0, 4]])
    with pytest.raises(DataError, match=r"glove\.txt', line 1: expected a word and 3 numbers, the model's d_embedding"):
        load_word_vectors(torch.nn.Embedding(5, 3), tokens, glove)
    with pytest.raises(DataError, match=r"line 1: expected a word and 1 numbers"):
        load_word_vectors(torch.nn.Embedding(5, 1), tokens, glove)
    with pytest.raises(DataError, match=r"none\.txt': cannot be read \(No such file"):
        load_word_vectors(torch.nn.Embedding(5, 3), tokens, tmp_path / "none.txt")
    glove.write_text("the 1 two\n")
    with pytest.raises(DataError, match=r"the vector of 'the' is not numeric"):
        load_word_vectors(torch.nn.Embedding(5, 2), tokens, glove)
    glove.write_text("the 1 nan\n")
    with pytest.raises(DataError, match=r"the vector of 'the' has a value that is not finite"):
        load_word_vectors(torch.nn.Embedding(5, 2), tokens, glove)


def test_a_translator_starts_from_the_vectors_of_its_source_words(tmp_path):
    (tmp_path / "v.txt").write_text("one 1 2 3 4\n")
    words = Vocabulary("word", ["<pad>", "<unk>", "<s>", "</s>", "one", "two"])
    sizes = dict(d_embedding=4, d_hidden=8, source_vocabulary=words, target_vocabulary=words)
    model = MODELS.build(dict(type="RNNTranslator", word_vectors=str(tmp_path / "v.txt")), **sizes)
    assert model.load_pretrained() == f"{tmp_path / 'v.txt'} (1 of 6 tokens)"
    assert model.encoder.embedding.weight[4].tolist() == [1, 2, 3, 4]
    assert MODELS.build(dict(type="RNNTranslator"), **sizes).load_pretrained() is None
    del sizes["source_vocabulary"]
    spec = dict(type="RNNTranslator", word_vectors="v.txt", source_size=6)
    with pytest.raises(ConfigError, match=r"word_vectors='v\.txt': needs a vocabulary"):
        MODELS.build(spec, **sizes).load_pretrained()


@pytest.mark.parametrize(
    ("name", "options", "is_of_target"),
    [
        ("Transformer", {}, True),
        ("Transformer", dict(shared_embeddings=False), False),
        ("CausalLanguageModel", {}, True),
        ("CausalLanguageModel", dict(scale_embedding=False), True),
        ("PrefixLanguageModel", {}, True),
        ("MaskedLanguageModel", dict(mask_id=4), True),
    ],
)
def test_models_of_text_start_from_word_vectors(name, options, is_of_target, tmp_path):
    (tmp_path / "v.txt").write_text("one 1 2 3 4\n")
    words = Vocabulary("word", ["<pad>", "<unk>", "<s>", "</s>", "one", "two"])
    names = ["source_vocabulary", "target_vocabulary"] if name.startswith(("Transformer", "Prefix")) else []
    sizes = dict(num_layers=1, d_model=4, num_heads=2, d_ffn=8) | dict.fromkeys(names or ["target_vocabulary"], words)
    model = MODELS.build(dict(type=name, word_vectors=str(tmp_path / "v.txt"), **options), **sizes)
    table = model.decoder.embedding if name == "Transformer" else model.embedding
    before = table(torch.tensor([4, 5]))
    assert model.load_pretrained() == f"{tmp_path / 'v.txt'} (1 of 6 tokens)"
    assert torch.equal(table(torch.tensor([5])), before[1:])
    if is_of_target:
        assert table(torch.tensor([4])).tolist() == [[1, 2, 3, 4]]
    else:  # only the source's words are in the file's language
        assert torch.equal(table(torch.tensor([4])), before[:1])
        assert model.source_embedding(torch.tensor([4])).tolist() == [[1, 2, 3, 4]]
    assert MODELS.build(dict(type=name, **options), **sizes).load_pretrained() is None
