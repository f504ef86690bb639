"""What tests say about the weights of a model."""

import torch
from torch import nn


def assert_same_weights(model: nn.Module, expected: nn.Module | dict[str, torch.Tensor]) -> None:
    """Assert that a model has all weights of another model, or of a state, which may be those of a part of it."""
    # A model lists its weights anew in each call.
    state, expected = model.state_dict(), expected.state_dict() if isinstance(expected, nn.Module) else expected
    assert not [key for key, value in expected.items() if not torch.equal(state[key], value)]
