"""Operators with fast paths: VITKIT_KERNELS=plain runs every model with only the plain definitions; the default,
"fast", uses the fastest path for the device.

`linear.py` and `attention.py` have the operators that torch defines, with what is faster than torch's functions on a
CPU. Operators that torch lacks have a folder each, whose `__init__` decides: there, `plain.py` is the definition, and
the other files are faster equivalents.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from vitkit.errors import ConfigError

CHOICES = ("fast", "plain")


# Read only once: operators ask at every call, and a look into the environment takes microseconds.
_choice = os.environ.get("VITKIT_KERNELS", "fast")


def plain_only() -> bool:
    """Return whether only the plain definitions may run: VITKIT_KERNELS=plain, or inside `use_kernels("plain")`.

    Raises:
        ConfigError: VITKIT_KERNELS has a value that is not in `CHOICES`.
    """
    if _choice not in CHOICES:
        raise ConfigError(f"VITKIT_KERNELS={_choice}: expected {' or '.join(CHOICES)}.")
    return _choice == "plain"


@contextmanager
def use_kernels(choice: str) -> Iterator[None]:
    """Run "plain" definitions or "fast" paths inside a `with` block, whatever the value of VITKIT_KERNELS."""
    global _choice
    assert choice in CHOICES
    before, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = before


def is_traced() -> bool:
    """Return whether torch.compile or torch.jit.trace is reading the code; they handle torch's own operators best."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


# The compilers of some versions take `torch.compiler.is_exporting` to be true wherever they trace it themselves.
@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """Return whether a graph is being recorded for another program, which only knows PyTorch's operators."""
    if torch.jit.is_tracing() or torch.onnx.is_in_onnx_export():
        return True
    if hasattr(torch.compiler, "is_exporting"):  # since PyTorch 2.7
        return torch.compiler.is_exporting()
    return torch.compiler.is_compiling()


def convolution_layout(images: Tensor) -> torch.memory_format:
    """Return the layout of a network of 3x3 convolutions, whose maps all have that of its input.

    Channels last makes DETR 5 to 10 % faster on a CPU, and is the layout that tensor cores work in. But on CPUs without
    AVX-512, oneDNN computes the gradients of weights in it at a third of the speed: with contiguous maps, a training
    step of RT-DETR-R18 (640x640, batch 2) takes 0.81 of the time, one of RT-DETR-R50 (320x320) 0.93, on one thread of
    an AMD EPYC limited to AVX2, torch 2.14.1. That of D-FINE-S, with few 3x3 convolutions, takes 1.02.
    """
    is_trained = images.device.type == "cpu" and torch.is_grad_enabled() and not is_traced()
    return torch.contiguous_format if is_trained and _has_only_avx2() else torch.channels_last


@functools.cache
def _has_only_avx2() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX2"
