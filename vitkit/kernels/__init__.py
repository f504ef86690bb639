"""Operators with fast paths: VITKIT_KERNELS=plain runs every model with only the plain definitions; the default,
"fast", uses the fastest path for the device.

`linear.py` and `attention.py` have the operators that torch defines, with what is faster than torch's functions on a
CPU. Operators that torch lacks have a folder each, whose `__init__` decides: there, `plain.py` is the definition, and
the other files are faster equivalents.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
