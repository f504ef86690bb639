"""Replaces parts of a model by faster ones once it no longer learns, see `Model.fuse`.

A module takes part if its class has a method

    def fused(self) -> nn.Module

that returns a module which computes the same in inference and takes this one's place: another one, or itself, in which
parts are replaced. Its remaining parts are asked next. `vitkit.nn.fusion` makes convolutions with the norm after them.
"""

import logging
from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitkit.errors import ConfigError

logger = logging.getLogger("vitkit")


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, which see its input, its output or their gradients."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def fuses(module: nn.Module) -> bool:
    """Return whether a module's class has the method `fused`, for the `forward` that it runs: a subclass with
    another one may compute something else. An attribute or a submodule may have the method's name."""
    if "forward" in vars(module):
        return False
    owner = next((c for c in type(module).__mro__ if "fused" in vars(c) or "forward" in vars(c)), None)
    return owner is not None and callable(vars(owner).get("fused"))


def check_fusible(model: nn.Module) -> None:
    """Raise the errors of `Model.fuse`, before anything has changed."""
    name = type(model).__name__
    for part, module in model.named_modules(prefix=name):
        if module.training:
            raise ConfigError(f"fuse: {part} is in training mode. Call eval() first.")
    if model.is_fused:
        raise ConfigError(f"fuse: {name} is fused already. Fuse a model once; a copy of it is fused as well.")
    # Some kernels of activations turn NaN into a number, which would hide that the weights are broken. Fixed norms have
    # buffers only; those of other modules may well be infinite, such as masks.
    norms = [part for part in model.named_modules() if getattr(part[1], "running_var", None) is not None]
    statistics = (item for prefix, norm in norms for item in norm.named_buffers(prefix, recurse=False))
    for weights, value in (*model.named_parameters(), *statistics):
        if value.is_meta:
            raise ConfigError(
                f"fuse: {name} has weights without values, in {weights} (device meta). Load its weights onto a "
                "device first."
            )
        if not value.isfinite().all():
            raise ConfigError(
                f"fuse: {name} has weights that are not finite, in {weights}. Load an earlier checkpoint."
            )
        if weights.endswith(".running_var") and (value < 0).any():
            raise ConfigError(f"fuse: {name} has variances below 0, in {weights}. Load an earlier checkpoint.")


def count_norms(backbone: nn.Module | None) -> int:
    """Return the number of a backbone's batch norms."""
    return sum(isinstance(module, _BatchNorm) for module in backbone.modules()) if backbone is not None else 0


@cache  # once a process, not for each copy of a model
def warn_of_norms(backbone: str, left: int, norms: int) -> None:
    """Warn that a user's backbone keeps norms, since it has no method `fused`."""
    what = f"is left as it is, with {left}" if left == norms else f"keeps {left} of its {norms}"
    logger.warning(
        f"fuse: the backbone {backbone} {what} batch norms. For faster inference, give it a method fused(), "
        "see vitkit.protocols.fusing."
    )


def fuse_parts(module: nn.Module) -> None:
    """Replace the parts of a module that can be fused, from the outside in.

    Raises:
        ConfigError: a module's `fused` returns something else than a module.
    """
    parts: list[tuple[str, Any]] = list(module.named_children())
    for name, part in parts:
        watched = has_hooks(part)
        if fuses(part):
            replacement = part if watched else part.fused()
            if not isinstance(replacement, nn.Module):
                raise ConfigError(
                    f"fuse: {type(part).__name__}.fused() returned {type(replacement).__name__}; expected a module, "
                    "such as self."
                )
            setattr(module, name, replacement)
            fuse_parts(replacement)
        elif not callable(getattr(type(part), "fused", None)):
            fuse_parts(part)
        # Otherwise its `forward` is not the one that `fused` is for, and may use its parts in another way.
