"""Decoding against naive implementations without caches, source by source, and against all possible texts."""

import itertools
import math

import pytest
import torch

from vitkit.errors import ConfigError, DataError
from vitkit.registry import MODELS
from vitkit.seq2seq.decoding import DecodingSettings, State, decode
from vitkit.structures import BOS, EOS, PAD
from vitkit.text.vocabulary import Vocabulary

SIZE = 40
SMALL = dict(num_layers=2, d_model=32, num_heads=4, d_ffn=48)
SIZES = dict(source_size=SIZE, target_size=SIZE)

make = MODELS.build
BUILDERS = {
    "post-norm": lambda: make("Transformer", **SIZES, **SMALL),
    "pre-norm": lambda: make(
        "Transformer", **SIZES, **SMALL, norm_first=True, positions="learned", shared_embeddings=False
    ),
    "unequal": lambda: make(
        "Transformer", **SIZES, **{**SMALL, "num_layers": (1, 3)}, tied_output=False, final_norm=True
    ),
    "rnn": lambda: make("RNNTranslator", **SIZES, attention=None, d_embedding=16, d_hidden=24, cell="lstm"),
    "rnnsearch": lambda: make("RNNTranslator", **SIZES, d_embedding=16, d_hidden=24, num_layers=2),
    "prefix": lambda: make("PrefixLanguageModel", **SIZES, **SMALL),
}
LENGTHS = [9, 4, 1, 7, 6, 6]


@pytest.fixture(params=BUILDERS)
def model(request):
    torch.manual_seed(1)
    model = BUILDERS[request.param]().eval()
    # Sharper logits than random ones, so that no two continuations are equally good up to rounding.
    decoder = getattr(model, "decoder", model)
    output = getattr(decoder, "output", None)
    (decoder.embedding if output is None else output).weight.data.mul_(3)
    return model


@pytest.fixture
def sources():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, SIZE, (length,), generator=generator) for length in LENGTHS]


def batch(sources, margin=0):
    longest = max(map(len, sources)) + margin
    source = torch.full((len(sources), longest), PAD)
    for row, tokens in zip(source, sources):
        row[: len(tokens)] = tokens
    return {"source": source, "source_padding": source == PAD, "target_in": source}


@torch.no_grad()
def log_probs_after(model, source, tokens):
    """Return the log probabilities of the next token, by a full forward pass."""
    logits = model(source[None], None, torch.tensor([[BOS, *tokens]]))["logits"]
    log_probs = logits[0, -1].log_softmax(-1)
    log_probs[[PAD, BOS]] = -math.inf
    return log_probs


def naive_greedy(model, source, max_length):
    tokens = []
    for _ in range(max_length):
        token = log_probs_after(model, source, tokens).argmax().item()
        if token == EOS:
            break
        tokens.append(token)
    return tokens


def naive_beam_search(model, source, settings):
    """Search with one hypothesis after the other, in lists."""
    running, ended = [((), 0.0)], []
    for length in range(1, settings.max_length + 1):
        candidates = []
        for tokens, total in running:
            log_probs = log_probs_after(model, source, tokens)
            candidates += [((*tokens, i), total + p) for i, p in enumerate(log_probs.tolist()) if p > -math.inf]
        candidates = sorted(candidates, key=lambda candidate: -candidate[1])[: 2 * settings.beams]
        ended += [
            (tokens[:-1], total / settings.penalty(length))
            for tokens, total in candidates[: settings.beams]
            if tokens[-1] == EOS
        ]
        running = [candidate for candidate in candidates if candidate[0][-1] != EOS][: settings.beams]
        reachable = running[0][1] / settings.penalty(settings.max_length)
        if len(ended) >= settings.beams or sum(s >= reachable for _, s in ended) >= settings.n_best:
            break
    ended = sorted(ended, key=lambda hypothesis: -hypothesis[1])
    ended += [(tokens, total / settings.penalty(settings.max_length)) for tokens, total in running]
    return ended[: settings.n_best]


def all_tokens(decoded):
    return [[hypothesis.tokens for hypothesis in hypotheses] for hypotheses in decoded]


def all_scores(decoded):
    return [hypothesis.score for hypotheses in decoded for hypothesis in hypotheses]


def test_greedy_decoding_with_caches_equals_full_passes(model, sources):
    decoded = decode(model, batch(sources), DecodingSettings(max_length=45))
    assert all_tokens(decoded) == [[naive_greedy(model, source, 45)] for source in sources]


@pytest.mark.parametrize(
    "options",
    [
        dict(beams=1),
        dict(beams=2, length_penalty=0.0),
        dict(beams=4, n_best=4),
        dict(beams=3, n_best=2, length_penalty=1.5, max_length=6),
    ],
)
def test_beam_search_equals_a_naive_implementation(model, sources, options):
    settings = DecodingSettings(**{"method": "beam", "max_length": 12, **options})
    decoded = decode(model, batch(sources), settings)
    expected = [naive_beam_search(model, source, settings) for source in sources]
    assert all_tokens(decoded) == [[list(tokens) for tokens, _ in found] for found in expected]
    assert all_scores(decoded) == pytest.approx([score for found in expected for _, score in found], abs=1e-4)


def test_beam_search_with_one_beam_is_greedy(model, sources):
    beam = decode(model, batch(sources), DecodingSettings(method="beam", beams=1, max_length=30))
    greedy = decode(model, batch(sources), DecodingSettings(max_length=30))
    assert all_tokens(beam) == all_tokens(greedy)
    assert all_scores(beam) == pytest.approx(all_scores(greedy), abs=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        DecodingSettings(max_length=40),
        DecodingSettings(method="beam", beams=3, n_best=3, max_length=40),
        DecodingSettings(method="beam", beams=5, length_penalty=0.0, max_length=10),
    ],
    ids=["greedy", "beam", "short beam"],
)
def test_output_does_not_depend_on_the_batch_or_the_padding(model, sources, settings):
    alone = [decode(model, batch([source]), settings)[0] for source in sources]
    for order, margin in (([0, 1, 2, 3, 4, 5], 0), ([5, 2, 3], 0), ([2, 2, 1, 0], 11), ([1], 3)):
        decoded = decode(model, batch([sources[i] for i in order], margin), settings)
        assert all_tokens(decoded) == all_tokens([alone[i] for i in order])
        assert all_scores(decoded) == pytest.approx(all_scores([alone[i] for i in order]), abs=1e-4)


def test_samples_of_a_row_do_not_depend_on_the_other_rows(model, sources):
    settings = DecodingSettings(method="sample", n_best=2, max_length=20, seed=3)
    decoded = decode(model, batch(sources), settings)
    changed = decode(model, batch([*sources[:2], sources[0][:3]], margin=2), settings)
    assert all_tokens(changed)[:2] == all_tokens(decoded)[:2]
    assert decoded[0][0].score >= decoded[0][1].score
    assert all_tokens(decode(model, batch(sources), settings)) == all_tokens(decoded)
    other = DecodingSettings(method="sample", n_best=2, max_length=20, seed=100)
    assert all_tokens(decode(model, batch(sources), other)) != all_tokens(decoded)


class TableState(State):
    def __init__(self, last):
        self.last = last

    def select(self, rows):
        return TableState(self.last[rows])


class TableModel:
    """A model whose next-token probabilities are looked up in a table by the last tokens."""

    def __init__(self, table):
        self.table = table

    def start(self, source):
        return TableState(torch.full((len(source),), BOS))

    def step(self, tokens, state, *, with_attention=False):
        # The state must have been reordered with the rows: it has the token before the last.
        logits = self.table[state.last, tokens]
        return logits.clone(), TableState(tokens), None


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_exhaustive_beam_finds_the_best_of_all_texts(seed, length_penalty):
    torch.manual_seed(seed)
    size, longest = 7, 4
    model = TableModel(2 * torch.randn(size, size, size))
    settings = DecodingSettings(method="beam", beams=200, n_best=20, max_length=longest, length_penalty=length_penalty)
    found = decode(model, {"source": torch.zeros(1, 1)}, settings)[0]

    scored = []
    for length in range(longest):
        for tokens in itertools.product((1, 4, 5, 6), repeat=length):
            total, before, last = 0.0, BOS, BOS
            for token in (*tokens, EOS):
                total += model.table[before, last].log_softmax(-1)[token].item()
                before, last = last, token
            scored.append((total / settings.penalty(length + 1), list(tokens)))
    scored.sort(reverse=True)
    assert [hypothesis.tokens for hypothesis in found] == [tokens for _, tokens in scored[:20]]
    assert [hypothesis.score for hypothesis in found] == pytest.approx([score for score, _ in scored[:20]], abs=1e-5)


def test_truncated_texts_are_returned_only_if_too_few_have_ended():
    table = torch.full((6, 6, 6), -20.0)
    table[..., EOS] = -40.0
    table[..., 4] = 5.0  # 4 4 4 ...
    model, inputs = TableModel(table), {"source": torch.zeros(2, 1)}
    for method in ("greedy", "beam"):
        decoded = decode(model, inputs, DecodingSettings(method=method, beams=2, max_length=3))
        assert all_tokens(decoded) == [[[4, 4, 4]]] * 2
    table[BOS, BOS, EOS] = 4.0  # ends at once, or never
    decoded = decode(model, inputs, DecodingSettings(method="beam", beams=2, n_best=2, max_length=3))
    assert all_tokens(decoded) == [[[], [4, 4, 4]]] * 2


@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
def test_no_text_ends_before_the_minimum_length(method):
    table = torch.zeros(6, 6, 6)
    table[..., EOS] = 9.0
    settings = DecodingSettings(method=method, min_length=3, max_length=9)
    decoded = decode(TableModel(table), {"source": torch.zeros(2, 1)}, settings)
    assert [len(hypotheses[0].tokens) for hypotheses in decoded] == [3, 3]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(), [0.5, 0.3, 0.15, 0.05]),
        (dict(top_k=2), [0.625, 0.375, 0, 0]),
        (dict(top_p=0.75), [0.625, 0.375, 0, 0]),
        (dict(top_p=0.81), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (dict(temperature=0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
    ],
    ids=str,
)
def test_samples_follow_their_probabilities(options, expected):
    table = torch.full((8, 8, 8), -30.0)
    table[..., 4:] = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    settings = DecodingSettings(method="sample", max_length=200, min_length=199, **options)
    decoded = decode(TableModel(table), {"source": torch.zeros(20, 1)}, settings)
    tokens = torch.tensor([hypotheses[0].tokens for hypotheses in decoded])
    shares = torch.bincount(tokens.flatten(), minlength=8)[4:] / tokens.numel()
    assert shares.tolist() == pytest.approx(expected, abs=0.025)
    assert [bool(share) for share in shares] == [bool(share) for share in expected]
    # The score is the model's probability, not that of the truncated distribution that was sampled from.
    total = table[0, 0].log_softmax(-1)[tokens[0]].sum().item()
    assert decoded[0][0].score == pytest.approx(total / settings.penalty(200), abs=1e-3)


@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
@pytest.mark.parametrize("name", ["post-norm", "unequal", "rnnsearch"])
def test_attention_belongs_to_its_tokens_and_never_falls_on_padding(name, method, sources):
    torch.manual_seed(0)
    model = BUILDERS[name]().eval()
    settings = DecodingSettings(method=method, beams=3, n_best=1, max_length=12)
    decoded = decode(model, batch(sources), settings, return_attention=True)
    for source, hypotheses in zip(sources, decoded):
        for hypothesis in hypotheses:
            attention = hypothesis.attention
            assert attention.shape == (len(hypothesis.tokens), max(LENGTHS))
            assert not attention[:, len(source) :].any()
            torch.testing.assert_close(attention.sum(-1), torch.ones(len(attention)))
            if name == "rnnsearch":
                expected = rnn_attention(model, source, hypothesis.tokens)
                torch.testing.assert_close(attention[:, : len(source)], expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def rnn_attention(model, source, tokens):
    """Return the attention to one source for given target tokens."""
    state, rows = model.start(source[None]), []
    for token in [BOS, *tokens][: len(tokens)]:
        _, state, weights = model.step(torch.tensor([token]), state)
        rows.append(weights)
    return torch.cat(rows) if rows else torch.zeros(0, len(source))


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_prompts_of_any_lengths_are_continued_as_in_full_passes(method):
    torch.manual_seed(0)
    model = make("CausalLanguageModel", target_size=SIZE, **SMALL).eval()
    prompts = [[BOS], [BOS, 7, 9, 11, 30], [BOS, 5, 6]]
    tokens = torch.tensor([prompt + [PAD] * (5 - len(prompt)) for prompt in prompts])
    settings = DecodingSettings(method=method, beams=3, max_length=12)
    decoded = decode(model, {"tokens": tokens, "padding_mask": tokens == PAD}, settings)
    for prompt, hypotheses in zip(prompts, decoded):
        alone = decode(model, {"tokens": torch.tensor([prompt])}, settings)[0]
        assert alone[0].tokens == hypotheses[0].tokens
        written = hypotheses[0].tokens + [EOS] * (len(hypotheses[0].tokens) < 12)
        with torch.no_grad():
            log_probs = model(torch.tensor([prompt + written]))["logits"][0].log_softmax(-1)
        total = log_probs[len(prompt) - 1 :][range(len(written)), written].sum().item()
        assert hypotheses[0].score == pytest.approx(total / settings.penalty(len(written)), abs=1e-4)


def test_generate_gives_the_text_and_the_best_hypotheses(sources):
    vocabulary = Vocabulary("word", ["<pad>", "<unk>", "<s>", "</s>", *(f"▁w{i}" for i in range(36))])
    decoding = dict(method="beam", beams=3, n_best=2, max_length=5)
    model = make(
        "Transformer", source_vocabulary=vocabulary, target_vocabulary=vocabulary, **SMALL, decoding=decoding
    ).eval()
    results = model.generate(batch(sources))
    assert len(results) == len(sources)
    for result in results:
        assert result["n_best"][0] == {key: result[key] for key in ("tokens", "score", "text")}
        assert len(result["n_best"]) == 2
        assert result["text"] == vocabulary.decode(result["tokens"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(method="beams"), "decoding.method: got 'beams'; expected one of greedy, beam, sample."),
        (dict(beams=0), "decoding.beams: got 0; expected at least 1."),
        (dict(method="beam", n_best=5), "decoding.n_best: got 5; expected 1 to 4."),
        (dict(n_best=2), "decoding.n_best: got 2; expected 1 to 1."),
        (dict(length_penalty=-1.0), "decoding.length_penalty: got -1.0; expected at least 0."),
        (dict(temperature=0.0), "decoding.temperature: got 0.0; expected above 0"),
        (dict(top_p=0.0), "decoding.top_p: got 0.0; expected above 0, at most 1."),
        (dict(min_length=7, max_length=7), "decoding.min_length: got 7; expected at least 0, below max_length."),
        (dict(beam=2), "decoding: unknown argument 'beam'. Did you mean 'beams'"),
    ],
    ids=str,
)
def test_invalid_settings_are_named(options, message):
    with pytest.raises(ConfigError) as error:
        make("Transformer", **SIZES, **SMALL, decoding=options)
    assert message in str(error.value)


def test_a_text_longer_than_the_positions_is_an_error(sources):
    model = make("Transformer", **SIZES, **SMALL, max_length=12).eval()
    with pytest.raises(DataError, match="a text of 13 tokens or more, but the model has positions for 12"):
        decode(model, batch(sources), DecodingSettings(max_length=20, min_length=19))


@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
def test_diverged_model_still_gives_every_source_a_text(method):
    model = TableModel(torch.full((6, 6, 6), math.nan))
    decoded = decode(model, {"source": torch.zeros(3, 1)}, DecodingSettings(method=method, max_length=4))
    assert [len(hypotheses) for hypotheses in decoded] == [1, 1, 1]
    assert not any(math.isfinite(hypotheses[0].score) for hypotheses in decoded)
