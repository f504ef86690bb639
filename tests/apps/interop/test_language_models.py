"""Folders of the transformers library's BERT and GPT-2 with their tokens: equal ids, logits, fillings and texts."""

import json

import pytest
import torch

from vitkit import CheckpointError, ConfigError, convert, load, load_weights
from vitkit.apps.explanations.text import text_attention
from vitkit.apps.inference import find_model
from vitkit.apps.inference.language import MaskFiller, TextContinuer
from vitkit.engine.build import build_model
from vitkit.structures import BOS, EOS, PAD, UNK
from vitkit.text.vocabulary import TokenizerVocabulary, Vocabulary
from vitkit.weights.transformers_folder import read_tokens_in

tokenizers = pytest.importorskip("tokenizers", reason="the comparison needs pip install 'vitkit[text]'")
transformers = pytest.importorskip("transformers", reason="the comparison needs pip install -e '.[benchmark]'")
transformers.utils.logging.disable_progress_bar()

LINES = ["a dog runs over the field", "two cats sleep, and a dog barks.", "the children play with a red ball"] * 4
TEXTS = ["a dog sleeps.", "Two  red cats \u2014 \ufb01eld", "the ball \u7403", "", "unbelievable dogs"]


def random_values(model):
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        is_scale = ("norm" in name.lower() or "ln_" in name) and "weight" in name
        torch.nn.init.normal_(parameter, mean=float(is_scale), std=0.3)
    return model.eval()


@pytest.fixture
def bert(tmp_path):
    """A folder of BERT, the model, and its tokenizer."""
    pieces = tokenizers.BertWordPieceTokenizer(lowercase=True)
    pieces.train_from_iterator(LINES, vocab_size=70, show_progress=False)
    # Its special tokens are not at the beginning, as in the published vocabularies.
    names = sorted(pieces.get_vocab(), key=lambda name: (name.startswith("[") and len(name) > 1, name))
    vocabulary = {name: number for number, name in enumerate(names)}
    their_tokenizer = transformers.BertTokenizer(vocab=vocabulary, do_lower_case=True)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary) + 2, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=24, pad_token_id=vocabulary["[PAD]"],
    )  # fmt: skip
    theirs = random_values(transformers.BertForMaskedLM(config))
    theirs.save_pretrained(tmp_path / "bert")
    their_tokenizer.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert", theirs, their_tokenizer


@pytest.fixture
def gpt2(tmp_path):
    """A folder of GPT-2, the model, and its tokenizer."""
    pieces = tokenizers.ByteLevelBPETokenizer()
    pieces.train_from_iterator(LINES, vocab_size=300, show_progress=False, special_tokens=["<|endoftext|>"])
    (tmp_path / "parts").mkdir()
    pieces.save_model(str(tmp_path / "parts"))
    vocabulary = json.loads((tmp_path / "parts" / "vocab.json").read_text())
    merges = [tuple(line.split()) for line in (tmp_path / "parts" / "merges.txt").read_text().splitlines()[1:]]
    their_tokenizer = transformers.GPT2Tokenizer(vocab=vocabulary, merges=merges)
    end = vocabulary["<|endoftext|>"]
    config = transformers.GPT2Config(
        vocab_size=len(vocabulary), n_embd=16, n_layer=2, n_head=2, n_positions=40, bos_token_id=end, eos_token_id=end
    )
    theirs = random_values(transformers.GPT2LMHeadModel(config))
    theirs.save_pretrained(tmp_path / "gpt2")
    their_tokenizer.save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2", theirs, their_tokenizer


def assert_same_ids(ours, theirs, unknown):
    for text in TEXTS:
        ids = ours.encode(text)
        normalized = " ".join(text.split())
        assert [unknown if i == UNK else ours.numbers[i] for i in ids] == theirs(
            normalized, add_special_tokens=False
        ).input_ids
    again = Vocabulary.from_json(ours.to_json())
    assert isinstance(again, TokenizerVocabulary) and again == ours and again.encode(TEXTS[1]) == ours.encode(TEXTS[1])


@torch.no_grad()
def test_bert_fills_masks_as_in_the_library(bert):
    folder, theirs, their_tokenizer = bert
    filler = load(folder)
    assert isinstance(filler, MaskFiller)
    vocabulary = filler.vocabulary
    assert_same_ids(vocabulary, their_tokenizer, their_tokenizer.unk_token_id)
    assert vocabulary.unknown["\u7403"] and vocabulary.decode(vocabulary.encode("a dog runs")) == "a dog runs"
    assert vocabulary.tokens[:5] == ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
    theirs_in = their_tokenizer("a dog [MASK] over the [MASK].", return_tensors="pt")
    ids = [*vocabulary.encode_masked("a dog <mask> over the <mask>."), EOS]
    assert [vocabulary.numbers[i] for i in (BOS, *ids)] == theirs_in.input_ids[0].tolist()
    expected = theirs(**theirs_in).logits[0, 1:, vocabulary.numbers]
    logits = filler.model.predict(torch.tensor([ids]))[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    # Candidates are ordered as in the library, without the special tokens.
    mask = theirs_in.input_ids[0].tolist().index(their_tokenizer.mask_token_id)
    order = theirs(**theirs_in).logits[0, mask, : len(their_tokenizer)].argsort(descending=True).tolist()
    best = [their_tokenizer.convert_ids_to_tokens(i) for i in order if i not in their_tokenizer.all_special_ids][:3]
    fillings = filler("a dog <mask> over the <mask>.", n_best=3)
    assert [filling.token for filling in fillings[0]] == [token.removeprefix("##") for token in best]
    layers = text_attention(filler.model, filler.vocabularies, "a dog <mask>").layers
    assert layers[0].rows == layers[0].columns == ["<s>", "\u2581a", "\u2581dog", "<mask>", "</s>"]
    assert layers[0].weights.shape == (2, 5, 5)


@torch.no_grad()
def test_gpt2_continues_text_as_in_the_library(gpt2):
    folder, theirs, their_tokenizer = gpt2
    continuer = load(folder, overrides=["model.decoding={'method': 'greedy', 'max_length': 12}"])
    assert isinstance(continuer, TextContinuer)
    vocabulary, end = continuer.vocabulary, their_tokenizer.eos_token_id
    assert_same_ids(vocabulary, their_tokenizer, end)
    for text in TEXTS:
        assert vocabulary.decode(vocabulary.encode(text)) == " ".join(text.split())
    assert vocabulary.token_texts(vocabulary.encode("a dog")) == ["a", "\u2581dog"]
    ids = [BOS, *vocabulary.encode("the children play")]
    theirs_in = torch.tensor([[vocabulary.numbers[i] for i in ids]])
    expected = theirs(theirs_in).logits[0]
    logits = continuer.model(torch.tensor([ids]))["logits"][0]
    torch.testing.assert_close(logits[:, EOS:], expected[:, vocabulary.numbers[EOS:]], atol=1e-4, rtol=1e-4)
    # The copies of the end of text take no probability from the other tokens.
    torch.testing.assert_close(logits.softmax(-1)[:, EOS], expected.softmax(-1)[:, end], atol=1e-6, rtol=1e-3)
    assert not logits.softmax(-1)[:, [PAD, UNK, BOS]].any()
    written = theirs.generate(theirs_in, max_new_tokens=12, do_sample=False)[0].tolist()
    for settings in ({}, dict(method="beam", beams=1)):
        text = continuer("the children play", decoding=settings)[0].text
        assert text == their_tokenizer.decode(written, skip_special_tokens=True).rstrip()


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_folders_are_written_back_with_the_numbers_of_their_tokens(name, request, tmp_path):
    folder, theirs, their_tokenizer = request.getfixturevalue(name)
    convert(folder, tmp_path / "ours.pth")  # with its vocabulary
    convert(tmp_path / "ours.pth", tmp_path / "written", to="transformers")
    read = type(theirs).from_pretrained(tmp_path / "written").eval()
    tokens = torch.arange(len(their_tokenizer))[None, -20:]
    with torch.no_grad():
        logits, expected = (model(tokens).logits[..., : len(their_tokenizer)] for model in (read, theirs))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    own = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "written" / "tokenizer.json"))
    ids = their_tokenizer("two cats", add_special_tokens=False).input_ids
    assert own("two cats", add_special_tokens=False).input_ids == ids
    again = load(tmp_path / "written").model.state_dict()
    for key, value in load(folder).model.state_dict().items():
        assert torch.equal(again[key], value), key


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_without_the_tokenizers_library_there_are_only_token_ids(name, request, monkeypatch):
    folder, theirs, their_tokenizer = request.getfixturevalue(name)
    saved = load(folder).vocabulary.to_json()
    monkeypatch.setattr("vitkit.text.vocabulary.has_tokenizers", lambda: False)
    monkeypatch.setattr("vitkit.weights.tokenizer_files.has_tokenizers", lambda: False)
    with pytest.raises(
        CheckpointError, match=r"or tokenizer\.json \(BERT, GPT-2; needs pip install 'vitkit\[text\]'\)"
    ):
        load(folder)
    with pytest.raises(CheckpointError, match="needs the package tokenizers, which is not installed"):
        Vocabulary.from_json(saved)
    model = build_model(find_model(folder).config["model"]).eval()
    load_weights(model, folder)
    tokens = torch.tensor([their_tokenizer("two cats", add_special_tokens=False).input_ids])
    assert len(model.embedding.weight) == theirs.config.vocab_size
    with torch.no_grad():
        if name == "gpt2":
            return torch.testing.assert_close(model(tokens)["logits"], theirs(tokens).logits, atol=1e-4, rtol=1e-4)
        model.class_token = False  # its number is another one there
        torch.testing.assert_close(model.predict(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


def test_damaged_files_and_unsupported_models_are_named(bert, gpt2):
    folder, _, _ = bert
    (folder / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: does not have the model's tokens"):
        read_tokens_in(folder)
    folder, _, _ = gpt2
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"vocab_size": 9}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: has tokens up to number \d+, and the model 9"):
        load(folder)
    for change, message in (
        ({"activation_function": "tanh"}, "activation_function='tanh': expected one of gelu_new"),
        ({"architectures": ["GPT2ForSequenceClassification"]}, "expected GPT2LMHeadModel"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True: vitkit's model only has"),
    ):
        path.write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match=message):
            find_model(folder)
