"""Random weights under which the parts of a model differ."""

import torch


def randomize(model):
    """Draw weights with which locations, queries and layers differ; norms have their own statistics."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 1.5)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.kaiming_normal_(parameter, nonlinearity="linear")
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
