import pytest
import torch

from vitkit.kernels import use_kernels
from vitkit.nn import relative_attention
from vitkit.nn.relative_attention import attend_relative

SIZES = [((2, 4), (2, 2)), ((3, 5), (3, 5)), ((2, 4, 4), (2, 2, 1))]


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize(("q_size", "k_size"), SIZES)
def test_equals_biased_scores_computed_query_by_query(q_size, k_size, class_token, monkeypatch):
    torch.manual_seed(0)
    first, d = int(class_token), 6
    num_q, num_k = (first + torch.Size(size).numel() for size in (q_size, k_size))
    q, k, v = (torch.randn(2, 3, length, d) for length in (num_q, num_k, num_k))
    tables = [torch.randn(2 * max(a, b) - 1, d) for a, b in zip(q_size, k_size)]
    scores = q @ k.mT * d**-0.5
    for i in range(num_q - first):
        for j in range(num_k - first):
            at_q, at_k = torch.unravel_index(torch.tensor(i), q_size), torch.unravel_index(torch.tensor(j), k_size)
            for y, x, table, q_length, k_length in zip(at_q, at_k, tables, q_size, k_size):
                # Locations of the shorter axis are spread over the longer; the distance 0 is in the middle.
                distance = y * max(k_length // q_length, 1) - x * max(q_length // k_length, 1)
                row = table[distance + (k_length - 1) * max(q_length // k_length, 1)]
                scores[:, :, first + i, first + j] += q[:, :, first + i] @ row
    for kernels, max_bias in (("fast", 0), ("fast", 2**20), ("plain", 0)):
        monkeypatch.setattr(relative_attention, "MAX_BIAS", max_bias)
        with use_kernels(kernels):
            attended = attend_relative(q, k, v, tables, q_size, k_size, class_token=class_token)
        torch.testing.assert_close(attended, scores.softmax(-1) @ v, atol=1e-5, rtol=1e-5)


def test_gradients_equal_those_of_the_definition(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(relative_attention, "MAX_BIAS", 0)
    inputs = [torch.randn(1, 2, 13, 4, requires_grad=True) for _ in range(3)]
    tables = [torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)]
    grads = []
    for kernels in ("fast", "plain"):
        with use_kernels(kernels):
            loss = attend_relative(*inputs, tables, (3, 4), (3, 4), class_token=True).square().sum()
        grads.append(torch.autograd.grad(loss, (*inputs, *tables)))
    assert all(grad.any() for grad in grads[0])
    for found, expected in zip(*grads):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
