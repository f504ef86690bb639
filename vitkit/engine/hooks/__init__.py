"""Hooks, which report and protect a run: they are called at fixed points of the loop, and users can add their own."""

import inspect
from collections.abc import Sequence
from typing import Any

from vitkit.engine.hooks.log import ProgressLog, TensorBoard
from vitkit.engine.hooks.saving import BestMetric, EndAfter, FailedEvaluation, Interrupted, Signals
from vitkit.engine.settings import TrainSettings
from vitkit.errors import ConfigError
from vitkit.protocols.learning import Hook
from vitkit.registry import HOOKS, nearest

__all__ = ["EndAfter", "Hook", "Interrupted", "default_hooks"]

_CALLED = ("before_", "after_", "during_", "on_")
"""How the names of methods begin that a run calls."""
_HOOK = "See class Hook in vitkit/protocols/learning.py."


def default_hooks(settings: TrainSettings, added: Sequence[Hook] = ()) -> list[Hook]:
    """Return the hooks of a run, including the config's and those `added`, in the order in which they are called.

    Raises:
        ConfigError: one of the user's does not fit, see `check_hook`.
    """
    user_hooks = [*(HOOKS.build(spec) for spec in settings.hooks), *added]
    for hook in user_hooks:
        check_hook(hook)
    return [BestMetric(), ProgressLog(), TensorBoard(), *user_hooks, FailedEvaluation(), Signals()]


def check_hook(hook: Any) -> None:
    """Check that a hook derives from `Hook`, which has its methods, and that each takes the arguments of its calls.

    Raises:
        ConfigError: it does not.
    """
    name = f"hook {type(hook).__name__}"
    if not isinstance(hook, Hook):
        raise ConfigError(f"{name}: does not derive from Hook. Write: class {type(hook).__name__}(Hook). {_HOOK}")
    methods = dict(inspect.getmembers(Hook, inspect.isfunction))
    for method, _ in inspect.getmembers(type(hook), inspect.isfunction):
        if method.startswith(_CALLED) and method not in methods:
            raise ConfigError(f"{name}.{method}: is never called. {nearest(method, methods)} {_HOOK}")
    for method, base in methods.items():
        arguments = list(inspect.signature(base).parameters)[1:]
        try:
            inspect.signature(getattr(hook, method)).bind(*arguments)
        except TypeError as error:
            raise ConfigError(f"{name}.{method}: is called with ({', '.join(arguments)}): {error}. {_HOOK}") from error
