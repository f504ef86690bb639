import pytest
import torch

from vitkit.kernels import in_parts as module
from vitkit.nn.layers import TokenMLP


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 12, 13, 20])
def test_processing_tokens_in_chunks_equals_processing_all_at_once(monkeypatch, num_tokens):
    mlp = TokenMLP(8, 16, 4)
    x = torch.randn(2, num_tokens, 8)
    expected = mlp(x)  # with gradients: all at once
    calls = []
    mlp.fc1.register_forward_hook(lambda module, inputs, output: calls.append(len(inputs[0])))
    monkeypatch.setattr(module, "TOKENS", 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), expected)
    assert max(calls) - min(calls) <= 1
    assert len(calls) == max(1, round(2 * num_tokens / 8))
    calls.clear()
    monkeypatch.setenv("VITKIT_KERNELS", "plain")
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), expected)
    assert calls == [2]
