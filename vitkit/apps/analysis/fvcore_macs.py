"""Counts MACs by fvcore, as an independent check of `vitkit.apps.analysis.macs`."""

import logging
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.kernels import use_kernels


class FvcoreCount(NamedTuple):
    """MACs of one forward pass, counted by fvcore."""

    by_module: Counter[str]
    uncounted: Counter[str]
    """Number of calls of each operator that fvcore does not count."""

    @property
    def total(self) -> int:
        """MACs of the whole model."""
        return self.by_module[""]


def count_macs_by_fvcore(model: nn.Module, *inputs: Tensor) -> FvcoreCount:
    """Trace the model, in evaluation mode and with the plain definitions of its operators, and let fvcore count.

    Args:
        inputs: positional arguments of `forward`, on the model's device.
    Raises:
        ConfigError: torch.jit cannot trace the model.
    """
    was_training = model.training
    tracer = logging.getLogger("fvcore.nn.jit_analysis")
    level = tracer.level
    tracer.setLevel(logging.ERROR)  # it would list the uncounted operators and the unused modules
    # The tracer refuses outputs that are the same for all inputs, such as DINO's indices of levels.
    handle = model.register_forward_hook(lambda *arguments: collect_float_tensors(arguments[-1]))
    try:
        with warnings.catch_warnings(), torch.no_grad(), use_kernels("plain"):
            warnings.simplefilter("ignore")  # torch.jit is deprecated, and tracing warns of every fixed shape
            from fvcore.nn import FlopCountAnalysis

            analysis = FlopCountAnalysis(model.eval(), inputs)
            return FvcoreCount(Counter(analysis.by_module()), Counter(analysis.unsupported_ops()))
    except RuntimeError as error:
        raise ConfigError(
            f"fvcore: torch.jit cannot trace {type(model).__name__}. Leave --fvcore out; the other count needs none."
        ) from error
    finally:
        handle.remove()
        tracer.setLevel(level)
        model.train(was_training)


def collect_float_tensors(outputs: Any) -> list[Tensor]:
    """Return the floating-point tensors in nested dicts and sequences, in order."""
    if isinstance(outputs, Tensor):
        return [outputs] if outputs.is_floating_point() else []
    if isinstance(outputs, Mapping):
        outputs = outputs.values()
    elif not isinstance(outputs, list | tuple):
        return []
    return [tensor for output in outputs for tensor in collect_float_tensors(output)]
