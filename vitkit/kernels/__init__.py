"""Operators with fast paths, one folder each: `plain.py` defines the operator, the other files are faster equivalents.

If torch has a function for an operator, that is its definition, and a single module contains the fast path.

Each folder's `__init__` chooses between them. VITKIT_KERNELS=plain runs every model with only the definitions; the
default, "fast", uses the fastest path for the device.
"""

import os

import torch

from vitkit.errors import ConfigError

CHOICES = ("fast", "plain")


def plain_only() -> bool:
    """Whether only the plain definitions may run: VITKIT_KERNELS=plain.

    Raises:
        ConfigError: VITKIT_KERNELS has a value that is not in `CHOICES`.
    """
    choice = os.environ.get("VITKIT_KERNELS", "fast")
    if choice not in CHOICES:
        raise ConfigError(f"VITKIT_KERNELS={choice}: expected {' or '.join(CHOICES)}.")
    return choice == "plain"


def is_traced() -> bool:
    """Whether torch.compile or torch.jit.trace is reading the code; they handle torch's own operators best."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()
