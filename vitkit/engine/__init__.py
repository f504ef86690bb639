"""Training and evaluation loops."""

from vitkit.engine import optim, settings  # noqa: F401
