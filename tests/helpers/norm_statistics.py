import torch
from torch import nn


def randomize_norms(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give norms, and HGNetV2's learned scales, values as after a training; among the scales are negative ones."""
    generator = torch.Generator().manual_seed(seed)

    def fill(tensor, low, high):
        tensor.data.copy_(torch.rand(tensor.shape, generator=generator) * (high - low) + low)

    for module in model.modules():
        if getattr(module, "running_var", None) is not None:
            fill(module.running_var, 0.5, 2.0)
            fill(module.running_mean, -0.3, 0.3)
            fill(module.weight, 0.5, 1.5)
            fill(module.bias, -0.3, 0.3)
        if type(module).__name__ == "LearnableAffineBlock":
            fill(module.scale, -0.5, 1.5)
            fill(module.bias, -0.5, 0.5)
    return model
