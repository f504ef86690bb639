"""What a convolution is, besides its weights."""

from typing import Literal, NamedTuple

Activation = Literal["silu"] | tuple[float | None, float | None] | None
"""A pair limits the values to at least the first number and at most the second; None is no limit."""
RELU = (0.0, None)


class Settings(NamedTuple):
    """A convolution's settings, as `F.conv2d` takes them, and the activation after it."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    activation: Activation = None
