"""Weights, inputs and sums of outputs by a rule, for models with the official names of D-FINE and DEIMv2."""

import numpy as np
import torch
from golden.weights import normal_for


def drawn(name, shape):
    """Numbers that depend only on the name, normally distributed."""
    return torch.from_numpy(normal_for(name, shape)).double()


def weights(state):
    """Replace all floats of an official state dict, but what follows from the settings."""
    fixed = ("reg_scale", ".up", "num_points_scale", "num_batches_tracked")
    return {key: value if key.endswith(fixed) else _weight(key, tuple(value.shape)) for key, value in state.items()}


def _weight(key, shape):
    noise = drawn(key, shape)
    if key.endswith("running_var"):
        return 0.5 + noise.abs()
    if len(shape) > 1:
        return noise / np.prod(shape[1:]) ** 0.5
    is_scale = key.endswith("scale") or (key.endswith("weight") and ("norm" in key or "bn" in key))
    return 0.1 * noise + float(is_scale)


def weighted_sum(outputs):
    """The sum of all outputs (name -> tensor), weighted by drawn numbers."""
    return sum((drawn(f"grad {name}", x.shape) * x.double()).sum() for name, x in sorted(outputs.items()))


def projections(gradients):
    """The product of each gradient (name -> tensor) with drawn numbers, divided by the root of their count."""
    return {
        f"grad/{k}": (drawn(f"onto {k}", g.shape) * g.double().cpu()).sum() / g.numel() ** 0.5
        for k, g in gradients.items()
    }


def assert_close(values, golden, tolerance):
    for name, x in values.items():
        torch.testing.assert_close(
            x.double(), golden[name], atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
