"""Operators with fast paths, one folder each: `plain.py` defines the operator, its siblings equal it and are faster.

Where torch has a function of its own for an operator, that is its definition, and one module holds the fast path.

Each folder's `__init__` chooses between them. VITKIT_KERNELS=plain runs every model on the definitions alone; the
default, "fast", takes the fastest path for the device.
"""

import os

import torch

from vitkit.errors import ConfigError

CHOICES = ("fast", "plain")


def plain_only() -> bool:
    """Whether the plain definitions must run: VITKIT_KERNELS=plain.

    Raises:
        ConfigError: VITKIT_KERNELS has another value than `CHOICES`.
    """
    choice = os.environ.get("VITKIT_KERNELS", "fast")
    if choice not in CHOICES:
        raise ConfigError(f"VITKIT_KERNELS={choice}: expected {' or '.join(CHOICES)}.")
    return choice == "plain"


def is_traced() -> bool:
    """Whether torch.compile or torch.jit.trace is reading the code, which knows torch's own operators best."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()
