import torch

from vitkit.seq2seq.incremental import KeyValueCache


def test_cache_keeps_appended_entries_through_growth_and_selection():
    torch.manual_seed(0)
    cache, expected = KeyValueCache(), torch.empty(3, 0, 2)
    cache.select(torch.tensor([2, 0, 1]))  # the cache is still empty
    for step in range(40):
        tokens = torch.randn(len(expected), 1 + step % 3, 2)
        expected = torch.cat([expected, tokens], dim=1)
        torch.testing.assert_close(cache.append(tokens), expected, atol=0, rtol=0)
        assert cache.length == expected.shape[1]
        if step % 2:
            # More rows, fewer, and the same number in another order.
            rows = torch.randint(len(expected), ([5, 2, 4, 4, 8][step % 5],))
            cache.select(rows)
            expected = expected[rows]
