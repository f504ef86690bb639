"""What holds for any small set of queries and targets, found by hypothesis."""

from itertools import permutations

import pytest
import torch

from vitkit.matchers.hungarian import HungarianMatcher

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

SETTINGS = hypothesis.settings(derandomize=True, deadline=None, max_examples=60, database=None)
COSTS = st.sampled_from([0.0, 0.5, 2.0, 5.0])


def case(seed, num_queries, counts, num_classes, ties):
    """Return outputs and targets of a batch; with ties, few different values."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape):
        x = torch.rand(*shape, generator=generator)
        return (x * 2).round() / 2 + 0.1 if ties else x

    outputs = dict(
        pred_logits=4 * values(len(counts), num_queries, num_classes) - 2,
        pred_boxes=values(len(counts), num_queries, 4),
    )
    targets = [
        dict(labels=torch.randint(num_classes - 1, (n,), generator=generator), boxes_cxcywh=values(n, 4))
        for n in counts
    ]
    return outputs, targets


@SETTINGS
@hypothesis.given(
    seed=st.integers(0, 2**31),
    num_queries=st.integers(1, 5),
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    costs=st.tuples(COSTS, COSTS, COSTS),
    activation=st.sampled_from(["softmax", "sigmoid"]),
    ties=st.booleans(),
)
def test_no_assignment_costs_less_than_the_matchers(seed, num_queries, counts, costs, activation, ties):
    matcher = HungarianMatcher(*costs, activation=activation)
    outputs, targets = case(seed, num_queries, counts, 4, ties)
    (layer,) = matcher([([outputs], targets)])[0]
    cost = matcher.costs([outputs], targets)[0][0].double()  # (all targets, queries)
    for (queries, objects), own in zip(layer, cost.split(counts)):
        assert queries.tolist() == sorted(set(queries.tolist())) and len(set(objects.tolist())) == len(objects)
        assert len(queries) == min(own.shape)
        rows, columns = (own, own.T)[own.shape[0] > own.shape[1]].shape
        small = own if own.shape[0] <= own.shape[1] else own.T
        least = min(sum(float(small[i, j]) for i, j in enumerate(p)) for p in permutations(range(columns), rows))
        assert float(own[objects, queries].sum()) == pytest.approx(least, abs=1e-5)


@SETTINGS
@hypothesis.given(seed=st.integers(0, 2**31), counts=st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_matches_of_an_image_do_not_depend_on_the_batch(seed, counts):
    matcher = HungarianMatcher(1.0, 5.0, 2.0)
    outputs, targets = case(seed, 5, counts, 4, ties=False)
    (layer,) = matcher([([outputs], targets)])[0]
    for i, matches in enumerate(layer):
        alone = {name: value[i : i + 1] for name, value in outputs.items()}
        ((expected,),) = matcher([([alone], targets[i : i + 1])])[0]
        assert all(torch.equal(a, b) for a, b in zip(matches, expected))
