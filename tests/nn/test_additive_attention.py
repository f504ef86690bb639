import pytest
import torch
from torch import nn

from vitkit.errors import ConfigError
from vitkit.nn.additive_attention import SCORES, AlignmentAttention, needs_equal_sizes

ANY_SIZES = ("additive", "concat", "general", "location")


def by_hand(attention, query, key, position):
    """Compute the score of one query and one key (before `keys`) at a position, channel by channel."""
    score, name = attention.score, {kind: name for name, kind in SCORES.items()}[type(attention.score)]
    dot = sum(q * k for q, k in zip(query, key)) if len(query) == len(key) else None
    if name == "dot":
        return dot
    if name == "scaled_dot":
        return dot / len(query) ** 0.5
    if name == "plain_cosine":
        return dot / (query.norm() * key.norm())
    if name == "cosine":
        return score.strength * dot / (query.norm() * key.norm())
    if name == "location":
        return sum(w * q for w, q in zip(score.position_proj.weight[position], query))
    if name == "concat":
        return score.score_proj.weight[0] @ torch.tanh(score.proj.weight @ torch.cat([query, key]))
    if name == "general":
        return query @ score.key_proj.weight @ key
    hidden = torch.tanh(score.query_proj.weight @ query + score.key_proj.weight @ key + score.key_proj.bias)
    return score.score_proj.weight[0] @ hidden


@pytest.mark.parametrize(("name", "d_key"), [(name, 6) for name in SCORES] + [(name, 4) for name in ANY_SIZES])
def test_scores_equal_their_formulas(name, d_key):
    torch.manual_seed(0)
    attention = AlignmentAttention(name, 6, d_key=d_key)
    queries, keys = torch.randn(2, 3, 6), torch.randn(2, 5, d_key)
    scores = attention.score(queries, attention.score.keys(keys))
    assert scores.shape == (2, 3, 5)
    for b, i, j in ((0, 0, 0), (1, 2, 4), (0, 1, 3)):
        torch.testing.assert_close(scores[b, i, j], by_hand(attention, queries[b, i], keys[b, j], j))
    torch.testing.assert_close(attention.score(queries[:, 1], attention.score.keys(keys)), scores[:, 1])


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_never_receives_weight(name, size, dtype):
    torch.manual_seed(0)
    attention = AlignmentAttention(name, 8, d_key=8).to(dtype)
    queries, values = torch.randn(20, 4, 8, dtype=dtype) * size, torch.randn(20, 7, 8, dtype=dtype) * size
    padding = torch.rand(20, 7) < 0.6
    padding[:, 3] = False
    padding[0], padding[1] = False, torch.arange(7) != 3
    context, weights = attention(queries, attention.score.keys(values), values, padding_mask=padding)
    assert not weights.masked_select(padding[:, None].expand_as(weights)).any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(20, 4))
    torch.testing.assert_close(context[1], values[1, 3].expand(4, 8))

    changed = torch.where(padding[..., None], -values.flip(0) * 100, values)
    again = attention(queries, attention.score.keys(changed), changed, padding_mask=padding)
    torch.testing.assert_close(again, (context, weights), atol=0, rtol=0)


@pytest.mark.parametrize("name", SCORES)
def test_gradients_reach_queries_keys_and_weights(name):
    attention = AlignmentAttention(name, 4, d_key=4).double()
    queries, keys = (torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    padding = torch.tensor([[False, False, True], [False, False, False]])

    def run(queries, keys):
        return attention(queries, attention.score.keys(keys), keys, padding_mask=padding)[0]

    assert torch.autograd.gradcheck(run, (queries, keys), atol=1e-4, rtol=1e-3)
    run(queries, keys).sum().backward()
    assert all(isinstance(p, nn.Parameter) and p.grad is not None for p in attention.parameters())


def test_concat_equals_the_additive_score_without_a_bias():
    torch.manual_seed(0)
    concat, additive = (AlignmentAttention(name, 6, d_key=4).score for name in ("concat", "additive"))
    with torch.no_grad():
        additive.query_proj.weight.copy_(concat.proj.weight[:, :6])
        additive.key_proj.weight.copy_(concat.proj.weight[:, 6:])
        additive.key_proj.bias.zero_()
        additive.score_proj.weight.copy_(concat.score_proj.weight)
    queries, keys = torch.randn(2, 3, 6), torch.randn(2, 5, 4)
    scores = [score(queries, score.keys(keys)) for score in (concat, additive)]
    torch.testing.assert_close(*scores)


def test_location_depends_on_the_query_and_ignores_keys_after_its_last_position():
    torch.manual_seed(0)
    attention = AlignmentAttention("location", 6, d_key=4, max_keys=3)
    queries, values = torch.randn(2, 5, 6), torch.randn(2, 7, 4)
    padding = torch.tensor([[False] * 7, [False, True, True, True, True, True, True]])
    context, weights = attention(queries, attention.score.keys(values), values, padding_mask=padding)
    expected = torch.zeros(2, 5, 7)
    expected[0, :, :3] = (queries[0] @ attention.score.position_proj.weight.T).softmax(-1)
    expected[1, :, 0] = 1.0
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(context, expected @ values)
    # If the first three are padding, the weight goes to the later keys rather than to padding.
    padding = torch.tensor([[True, True, True, False, False, True, True]])
    weights = attention(queries[:1], values[:1], values[:1], padding_mask=padding)[1]
    torch.testing.assert_close(weights, torch.tensor([0, 0, 0, 0.5, 0.5, 0, 0]).expand(1, 5, 7))
    with pytest.raises(ConfigError, match="LocationScore: max_keys=0; expected at least 1"):
        AlignmentAttention("location", 6, d_key=4, max_keys=0)


@pytest.mark.parametrize("name", sorted({*SCORES} - {*ANY_SIZES}))
def test_incompatible_sizes_are_an_error(name):
    assert needs_equal_sizes(name) and not any(map(needs_equal_sizes, (*ANY_SIZES, None)))
    with pytest.raises(ConfigError, match="queries have 6 channels and keys 4; .* 'additive' or 'general'"):
        AlignmentAttention(name, 6, d_key=4)


def test_error_for_an_unknown_score_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown score 'cosin'. Did you mean 'cosine'"):
        AlignmentAttention("cosin", 6, d_key=6)
