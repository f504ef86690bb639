"""The order of samples on all ranks, from any position in an epoch on; batches by images and by tokens."""

from collections import Counter

import numpy as np
import pytest
import torch

from vitkit.data.loading import samplers
from vitkit.data.loading.samplers import WINDOW_BLOCKS, EvalBatches, TokenBatches, TrainBatches
from vitkit.errors import DataError


def batches_of(size, **arguments):
    return TrainBatches(size, **{"batch_size": 2, "seed": 0, **arguments})


def test_every_epoch_has_each_image_once_in_another_order():
    sampler = batches_of(10)
    first = list(sampler)
    assert sorted(index for batch in first for index, _ in batch) == list(range(10))
    sampler.set_position(1)
    second = list(sampler)
    assert [i for batch in first for i, _ in batch] != [i for batch in second for i, _ in batch]
    assert not {s for batch in first for _, s in batch} & {s for batch in second for _, s in batch}


def test_the_seed_of_the_run_decides_the_order():
    assert list(batches_of(10)) == list(batches_of(10))
    assert list(batches_of(10)) != list(batches_of(10, seed=1))


@pytest.mark.parametrize("size", [1, 3, 8, 13, 50])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_the_images_and_have_equally_many_batches(size, world_size):
    groups = (np.arange(size) % 3 == 0).astype(int)
    ranks = [batches_of(size, groups=groups, rank=rank, world_size=world_size) for rank in range(world_size)]
    taken = [list(sampler) for sampler in ranks]
    assert {len(batches) for batches in taken} == {len(ranks[0])}
    entries = [entry for batches in taken for batch in batches for entry in batch]
    assert {index for index, _ in entries} == set(range(size))
    assert len(set(entries)) == len(entries)  # an image that comes again does so with another seed
    assert len(entries) - size <= 2 * world_size + 2
    assert all(len({groups[index] for index, _ in batch}) == 1 for batches in taken for batch in batches)


def test_resuming_within_an_epoch_gives_the_same_samples():
    whole = batches_of(11, batch_size=3)
    whole.set_position(4)
    expected = list(whole)
    resumed = batches_of(11, batch_size=3)
    resumed.set_position(4, 2)
    assert list(resumed) == expected[2:] and len(resumed) == len(expected)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_evaluation_takes_each_image_once(world_size):
    counts = Counter()
    for rank in range(world_size):
        sampler = EvalBatches(7, batch_size=2, rank=rank, world_size=world_size)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        counts.update(index for batch in batches for index, _ in batch)
    assert counts == Counter(range(7))


# Batches by tokens.


def lengths(count=500, sides=2):
    return torch.randint(2, 40, (count, sides), generator=torch.Generator().manual_seed(0)).numpy()


def test_token_batches_have_every_sentence_within_the_token_limit():
    sizes = lengths()
    batches = list(TokenBatches(sizes, batch_tokens=200, training=True, seed=1))
    assert sorted(index for batch in batches for index, _ in batch) == list(range(500))
    for batch in batches:
        members = sizes[[index for index, _ in batch]]
        assert members.max() * len(batch) <= 200


def test_token_batches_depend_only_on_seed_and_epoch():
    batches = TokenBatches(lengths(), batch_tokens=200, training=True, seed=1)
    first = list(batches)
    assert list(batches) == first
    batches.set_position(1)
    second = list(batches)
    assert len(second) == len(first) == len(batches) and second != first
    # Sentences of one length are grouped differently, and every sentence has another seed.
    as_sets = [{frozenset(index for index, _ in batch) for batch in epoch} for epoch in (first, second)]
    assert as_sets[0] != as_sets[1]
    seeds = [{index: seed for batch in epoch for index, seed in batch} for epoch in (first, second)]
    assert seeds[0][3] != seeds[1][3]
    other = TokenBatches(lengths(), batch_tokens=200, training=True, seed=2)
    assert list(other) != first and len(other) == len(first)


def test_token_batches_resume_in_the_middle_of_an_epoch():
    batches = TokenBatches(lengths(), batch_tokens=200, training=True, seed=1)
    batches.set_position(4)
    whole = list(batches)
    batches.set_position(4, 7)
    assert list(batches) == whole[7:]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_have_equally_many_batches_and_together_all_sentences(world_size):
    options = dict(batch_tokens=200, training=True, seed=1, world_size=world_size)
    of_ranks = [list(TokenBatches(lengths(), rank=rank, **options)) for rank in range(world_size)]
    assert len({len(batches) for batches in of_ranks}) == 1
    assert {index for batches in of_ranks for batch in batches for index, _ in batch} == set(range(500))


@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_takes_each_sentence_once_over_all_ranks(world_size):
    options = dict(batch_tokens=200, training=False, world_size=world_size)
    of_ranks = [TokenBatches(lengths(), rank=rank, **options) for rank in range(world_size)]
    assert all(len(list(batches)) == len(batches) for batches in of_ranks)
    assert sorted(index for batches in of_ranks for batch in batches for index, _ in batch) == list(range(500))


def test_sentence_longer_than_a_batch_is_an_error():
    with pytest.raises(DataError, match="tokens_per_gpu=30: a sentence has 39 tokens, which do not fit in a batch"):
        TokenBatches(lengths(), batch_tokens=30, training=True)


def test_batches_have_little_padding():
    # Lengths are distributed as in real text: most near the middle, similar for source and target.
    random = torch.Generator().manual_seed(0)
    source = (torch.randn(20000, generator=random) * 5 + 15).clamp(4, 50).round()
    sizes = (
        torch.stack([source, (source + torch.randn(20000, generator=random)).clamp(3, 50).round()], 1).long().numpy()
    )
    padded = real = 0
    for batch in TokenBatches(sizes, batch_tokens=4096, training=True, seed=0):
        members = sizes[[index for index, _ in batch]]
        padded += members.max(axis=0).sum() * len(members)
        real += members.sum()
    assert 1 - real / padded < 0.10


def test_a_few_images_of_another_shape_and_small_weight_are_drawn():
    groups, weights = np.array([0] * 36 + [1] * 4), np.full(40, 0.1)
    assert {
        groups[index]
        for index, _ in (pair for batch in batches_of(40, groups=groups, weights=weights) for pair in batch)
    } == {0, 1}


def test_images_of_one_window_of_blocks_have_the_order_of_files():
    groups, weights = np.arange(50) % 3 % 2, np.linspace(0.2, 2, 50)
    for options in ({}, {"groups": groups}, {"groups": groups, "weights": weights}):
        blocks = np.random.default_rng(0).integers(0, WINDOW_BLOCKS, 50)
        assert list(batches_of(50, blocks=blocks, **options)) == list(batches_of(50, **options))


@pytest.mark.parametrize("weighted", [False, True])
def test_an_epoch_reads_a_window_of_blocks_after_the_other(monkeypatch, weighted):
    monkeypatch.setattr(samplers, "WINDOW_BLOCKS", 4)
    blocks = np.arange(600) // 10 * 7  # 60 blocks of ten images; their numbers have gaps
    groups = np.arange(600) % 3 % 2
    weights = np.random.default_rng(0).uniform(0.5, 2, 600) if weighted else None
    orders = []
    for epoch in range(2):
        sampler = batches_of(600, batch_size=4, groups=groups, blocks=blocks, weights=weights)
        sampler.set_position(epoch)
        batches = list(sampler)
        assert all(len({groups[index] for index, _ in batch}) == 1 for batch in batches)
        images = [index for batch in batches for index, _ in batch]
        assert weighted or sorted(set(images)) == list(range(600))
        used = blocks[images]
        # Of three windows of four blocks, as a batch may have images of two; repeated images fill the last batches.
        num_blocks = [len({*used[start : start + 40].tolist()}) for start in range(len(used) - 40)]
        assert np.quantile(num_blocks, 0.95) <= 12 and max(num_blocks) <= 16  # of 60
        assert np.median(np.abs(np.diff(images))) > 10  # shuffled within a window
        orders.append(images)
        resumed = batches_of(600, batch_size=4, groups=groups, blocks=blocks, weights=weights)
        resumed.set_position(epoch, 17)
        assert list(resumed) == batches[17:]
    assert orders[0] != orders[1]


def test_ranks_read_the_same_windows_of_blocks_at_a_time(monkeypatch):
    monkeypatch.setattr(samplers, "WINDOW_BLOCKS", 2)
    blocks = np.arange(240) // 10
    one = list(batches_of(240, blocks=blocks))
    ranks = [list(batches_of(240, blocks=blocks, rank=rank, world_size=3)) for rank in range(3)]
    assert [batch for step in zip(*ranks) for batch in step] == one


def test_repeated_augmentation_has_each_image_three_times_in_a_batch_and_epochs_of_the_same_length():
    plain, repeated = batches_of(12, batch_size=6), batches_of(12, batch_size=6, repeats=3)
    batches = list(repeated)
    assert len(batches) == len(repeated) == len(plain) == 2
    for batch in batches:
        assert sorted(Counter(index for index, _ in batch).values()) == [3, 3]
        assert len(set(batch)) == 6  # each time with another seed
    repeated.set_position(1)
    assert {i for batch in batches for i, _ in batch} != {i for batch in repeated for i, _ in batch}
