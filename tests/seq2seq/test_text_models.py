"""The text models; decoding is tested in test_decoding.py."""

import pytest
import torch

from vitkit.errors import ConfigError, DataError
from vitkit.nn.activation_checkpointing import enable_activation_checkpointing
from vitkit.nn.additive_attention import SCORES
from vitkit.nn.attention import AttentionRecorder
from vitkit.registry import MODELS
from vitkit.seq2seq.language_models import prefix_mask
from vitkit.structures import BOS, EOS, PAD
from vitkit.text.vocabulary import Vocabulary

SIZE = 30
SIZES = dict(source_size=SIZE, target_size=SIZE)
SMALL = dict(num_layers=2, d_model=16, num_heads=2, d_ffn=32)
RNN = dict(d_embedding=8, d_hidden=12)
LSTM = dict(cell="lstm", num_layers=2)

make = MODELS.build
TRANSLATORS = {
    "transformer": lambda: make("Transformer", **SIZES, **SMALL),
    "transformer, pre-norm": lambda: make("Transformer", **SIZES, **SMALL, norm_first=True, positions="learned"),
    "rnn": lambda: make("RNNTranslator", **SIZES, **RNN, attention=None),
    "rnn, lstm": lambda: make("RNNTranslator", **SIZES, **RNN, attention=None, **LSTM, bidirectional=True),
    **{score: lambda score=score: make("RNNTranslator", **SIZES, **RNN, attention=score) for score in SCORES},
    "rnnsearch, lstm": lambda: make("RNNTranslator", **SIZES, **RNN, **LSTM),
    "prefix": lambda: make("PrefixLanguageModel", **SIZES, **SMALL),
}
LENGTHS = torch.tensor([7, 2, 5])


@pytest.fixture
def texts():
    torch.manual_seed(0)
    source, target_in = torch.randint(4, SIZE, (3, 7)), torch.randint(4, SIZE, (3, 6))
    padding = torch.arange(7) >= LENGTHS[:, None]
    return source.masked_fill(padding, PAD), padding, target_in


@pytest.mark.parametrize("name", TRANSLATORS)
def test_padding_and_later_tokens_change_nothing(name, texts):
    model = TRANSLATORS[name]().eval()
    source, padding, target_in = texts
    with torch.no_grad():
        logits = model(source, padding, target_in)["logits"]
        assert logits.shape == (3, 6, SIZE)
        other = model(source.masked_fill(padding, 17), padding, target_in)["logits"]
        torch.testing.assert_close(other, logits, atol=0, rtol=0)
        for row, length in enumerate(LENGTHS):
            alone = model(source[row : row + 1, :length], None, target_in[row : row + 1, :4])["logits"]
            torch.testing.assert_close(alone[0], logits[row, :4], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", TRANSLATORS)
def test_every_parameter_trains(name, texts):
    model = TRANSLATORS[name]()
    model(*texts)["logits"].square().mean().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not without


@pytest.mark.parametrize("name", [*SCORES, "transformer"])
def test_padding_never_receives_weight(name, texts):
    model = TRANSLATORS[name]().eval()
    source, padding, target_in = texts
    with torch.no_grad(), AttentionRecorder(model) as maps:
        model(source, padding, target_in)
    to_source = [w for key, weights in maps.items() for w in weights if key != "decoder" and w.shape[-1] == 7]
    assert len(to_source) == (4 if name == "transformer" else 6)  # encoder and decoder layers, or steps
    for weights in to_source:
        assert not weights.masked_select(padding[:, None, None].expand_as(weights)).any()
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_models_have_the_published_sizes():
    def count(name, **options):
        with torch.device("meta"):
            model = MODELS.build(dict(type=name, source_size=37000, target_size=37000, **options))
        return sum(p.numel() for p in model.parameters())

    # Table 3 says 65 and 213 million, for about 37000 tokens; final norms add their scales and biases.
    assert round(count("transformer_base") / 1e6) == 63
    assert round(count("transformer_big") / 1e6) == 214
    assert count("transformer_base", final_norm=True) - count("transformer_base") == 2 * 2 * 512


def test_embedding_tables_are_shared_as_configured():
    def tables(**options):
        names = make("Transformer", **SIZES, **SMALL, **options).state_dict()
        return {name for name in names if "embedding" in name or "output" in name}

    target = "decoder.embedding.weight"
    assert tables() == {target}
    assert tables(shared_embeddings=False) == {target, "source_embedding.weight"}
    assert tables(tied_output=False) == {target, "decoder.output.weight"}


def test_scaled_embeddings_are_initialized_with_unit_variance():
    model = make("Transformer", source_size=2000, target_size=2000, **{**SMALL, "d_model": 64})
    scaled = model.decoder.embedding(torch.arange(2000))
    assert scaled.std().item() == pytest.approx(1, abs=0.02)
    matrix = model.encoder.layers[0].ffn.linear1.weight
    assert matrix.abs().max().item() == pytest.approx((6 / (64 + 32)) ** 0.5, rel=0.01)


def test_activation_checkpointing_keeps_the_gradients(texts):
    model = make("Transformer", **SIZES, **SMALL, dropout=0.0)
    expected = torch.autograd.grad(model(*texts)["logits"].square().sum(), model.decoder.embedding.weight)
    assert enable_activation_checkpointing(model) == 4
    got = torch.autograd.grad(model(*texts)["logits"].square().sum(), model.decoder.embedding.weight)
    torch.testing.assert_close(got, expected)


def test_vocabulary_determines_the_model_size():
    vocabulary = Vocabulary("word", ["<pad>", "<unk>", "<s>", "</s>", "▁a", "▁b"])
    model = make("RNNTranslator", source_vocabulary=vocabulary, target_vocabulary=vocabulary, **RNN)
    assert model.decoder.output.out_features == 6
    with pytest.raises(ConfigError, match="source_size=7, but the source vocabulary has 6 tokens."):
        make("RNNTranslator", source_vocabulary=vocabulary, source_size=7, target_size=6, **RNN)
    with pytest.raises(ConfigError, match="target_size: not set; expected the number of tokens"):
        make("RNNTranslator", source_size=7, **RNN)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: make("Transformer", source_size=5, target_size=6, **SMALL),
            "the source has 5 tokens and the target 6",
        ),
        (lambda: make("Transformer", **SIZES, **SMALL, positions="rotary"), "positions='rotary': expected 'sine'"),
        (lambda: make("RNNTranslator", **SIZES, **RNN, attention="aditive"), "unknown score 'aditive'. Did you mean"),
        (
            lambda: make("Transformer", **SIZES, num_layers=1, d_model=9, num_heads=3, d_ffn=8),
            "d_model=9: expected an even number",
        ),
        (lambda: make("RNNTranslator", **SIZES, **RNN, cell="rnn"), "cell='rnn': expected 'gru' or 'lstm'."),
        (lambda: make("RNNTranslator", **SIZES, d_hidden=5, attention="dot"), "d_hidden=5: expected an even number"),
        (lambda: make("MaskedLanguageModel", target_size=9), "mask_id: the vocabulary has no mask token."),
        (lambda: make("MaskedLanguageModel", target_size=9, mask_id=4, mask_share=1.0), "mask_share=1.0: expected"),
    ],
)
def test_invalid_models_are_named(build, message):
    with pytest.raises(ConfigError) as error:
        build()
    assert message in str(error.value)


def test_a_text_without_a_token_is_an_error(texts):
    source, padding, target_in = texts
    padding[1] = True
    with pytest.raises(DataError, match="text 1 of the batch has no token; expected at least its EOS"):
        TRANSLATORS["additive"]()(source, padding, target_in)


def test_location_attends_to_the_first_tokens_of_a_longer_source(texts):
    model = make("RNNTranslator", **SIZES, **RNN, attention="location", max_source_length=3).eval()
    with torch.no_grad(), AttentionRecorder(model) as maps:
        model(*texts)
    for weights in maps["decoder.attention"]:
        assert weights.shape == (3, 1, 1, 7) and not weights[..., 3:].any()
        torch.testing.assert_close(weights.sum(-1), torch.ones(3, 1, 1))


def test_attention_of_a_model_without_attention_is_an_error(texts):
    model = make("RNNTranslator", **SIZES, **RNN, attention=None).eval()
    state = model.start(*texts[:2])
    with pytest.raises(ConfigError, match="a context of fixed length has no attention to show"):
        model.step(torch.full((3,), BOS), state, with_attention=True)
    model = make("CausalLanguageModel", target_size=SIZE, **SMALL).eval()
    with pytest.raises(ConfigError, match="CausalLanguageModel has no separate attention to a source"):
        model.step(torch.full((3,), BOS), model.start(texts[2]), with_attention=True)


def test_causal_model_uses_only_earlier_tokens():
    torch.manual_seed(0)
    model = make("CausalLanguageModel", target_size=SIZE, **SMALL).eval()
    tokens = torch.randint(4, SIZE, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = 9
    with torch.no_grad():
        a, b = (model(t)["logits"] for t in (tokens, changed))
    torch.testing.assert_close(a[:, :5], b[:, :5])
    assert not torch.allclose(a[:, 5:], b[:, 5:])


class TestPrefixLanguageModel:
    def test_mask_is_full_in_the_prefix_and_causal_after_it(self):
        padding = torch.tensor([[False, False, False], [False, False, True]])
        expected = torch.tensor(
            [  # 1 = masked; three tokens of the source, then two of the target
                [[0, 0, 0, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]],
                [[0, 0, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 1, 0, 1], [0, 0, 1, 0, 0]],
            ]
        )
        assert torch.equal(prefix_mask(padding, 2), expected.bool())

    def test_prefix_tokens_attend_forward_and_no_token_to_masked_ones(self, texts):
        model = make("PrefixLanguageModel", **SIZES, **SMALL).eval()
        source, padding, target_in = texts
        with torch.no_grad(), AttentionRecorder(model) as maps:
            model(source, padding, target_in)
        assert len(maps) == 2
        hidden = prefix_mask(padding, 6)[:, None].expand(-1, 2, -1, -1)
        for (weights,) in maps.values():
            assert (weights[0, :, 0, 1:7] > 0).all()
            assert not weights.masked_select(hidden).any() and (weights.masked_select(~hidden) > 0).all()

    def test_later_source_words_affect_earlier_ones_but_later_target_words_do_not(self, texts):
        model = make("PrefixLanguageModel", **SIZES, **SMALL).eval()
        source, padding, target_in = texts
        encoded = []
        model.stack.layers[0].register_forward_hook(lambda module, args, out: encoded.append(out[0]))
        with torch.no_grad():
            for last, target in ((5, 6), (9, 6), (5, 9)):
                source[0, 6], target_in[0, 5] = last, target
                model(source, padding, target_in)
        assert not torch.allclose(encoded[0][0], encoded[1][0])
        torch.testing.assert_close(encoded[0][:-1], encoded[2][:-1])

    def test_prefix_model_needs_one_shared_vocabulary(self):
        a, b = (Vocabulary.train("word", [text]) for text in ("a b", "a c"))
        make("PrefixLanguageModel", source_vocabulary=a, target_vocabulary=a, **SMALL)
        for vocabularies in (
            dict(source_vocabulary=a, target_vocabulary=b),
            dict(source_size=SIZE, target_size=SIZE + 1),
        ):
            with pytest.raises(ConfigError, match="form one text; expected the same vocabulary for both"):
                make("PrefixLanguageModel", **vocabularies, **SMALL)


class TestMaskedLanguageModel:
    def test_evaluation_chooses_by_each_text_alone(self, model):
        model.eval()
        texts = [torch.randint(5, 200, (length,)) for length in (20, 7, 12)]
        _, joined = model.mask(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True))
        for text, chosen in zip(texts, joined):
            hidden, alone = model.mask(text[None])
            assert torch.equal(alone[0], chosen[: len(text)]) and torch.equal(hidden, model.mask(text[None])[0])
        assert joined.any()

    @pytest.fixture
    def model(self):
        torch.manual_seed(0)
        return make("MaskedLanguageModel", target_size=200, mask_id=4, **SMALL, dropout=0.0, max_length=600)

    def test_masking_follows_the_published_proportions(self, model):
        tokens = torch.randint(5, 200, (100, 500))
        tokens[:, 0], tokens[:, -2], tokens[:, -1] = BOS, EOS, PAD
        hidden, masked = model.mask(tokens)
        assert not masked[:, [0, -2, -1]].any()
        assert masked.float().mean().item() == pytest.approx(0.15 * 497 / 500, abs=0.005)
        torch.testing.assert_close(hidden[~masked], tokens[~masked])
        fates = hidden[masked], tokens[masked]
        assert (fates[0] == 4).float().mean().item() == pytest.approx(0.8, abs=0.015)
        assert (fates[0] == fates[1]).float().mean().item() == pytest.approx(0.1, abs=0.015)
        assert hidden.min() >= 0 and hidden.max() < 200 and (hidden > EOS).sum() == (tokens > EOS).sum()

    def test_masks_vary_in_training_and_are_fixed_in_evaluation(self, model):
        tokens = torch.randint(5, 200, (4, 50))
        assert not torch.equal(model.mask(tokens)[1], model.mask(tokens)[1])
        model.eval()
        assert torch.equal(model.mask(tokens)[0], model.mask(tokens)[0])

    def test_masked_model_uses_both_sides_but_no_padding(self, model):
        model.eval()
        tokens = torch.randint(5, 200, (1, 9))
        padded = torch.cat([tokens, torch.zeros(1, 3, dtype=torch.long)], dim=1)
        with torch.no_grad():
            logits = model.predict(tokens)
            torch.testing.assert_close(model.predict(padded, padded == PAD)[:, :9], logits, atol=1e-5, rtol=1e-5)
            changed = tokens.clone()
            changed[0, -1] = 7
            assert not torch.allclose(model.predict(changed)[0, 0], logits[0, 0])

    def test_outputs_have_the_promised_shapes_and_every_parameter_a_gradient(self, model):
        tokens = torch.randint(5, 200, (3, 20))
        outputs = model(tokens)
        assert outputs["logits"].shape == (3, 20, 200) and outputs["masked"].shape == (3, 20)
        outputs["logits"].square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())

    def test_masked_model_uses_the_mask_token_of_its_vocabulary(self):
        special = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
        model = make("MaskedLanguageModel", target_vocabulary=Vocabulary("word", [*special, "▁a"]), **SMALL)
        assert model.mask_id == 4 and len(model.output_bias) == 6
