"""Hooks, which report and protect a run: they are called at fixed points of the loop, and users can add their own."""

from collections.abc import Sequence

from vitkit.engine.hooks.annealing import MaskAnnealing
from vitkit.engine.hooks.base import Hook, check_hook
from vitkit.engine.hooks.log import ProgressLog, TensorBoard
from vitkit.engine.hooks.pausing import EndAfter
from vitkit.engine.hooks.profile import StepProfile
from vitkit.engine.hooks.sampling import ScheduledSampling
from vitkit.engine.hooks.saving import BestMetric, FailedEvaluation, Interrupted, Signals
from vitkit.engine.hooks.self_distillation import SelfDistillationSchedules
from vitkit.engine.settings import TrainSettings
from vitkit.registry import HOOKS

__all__ = [
    "EndAfter",
    "Hook",
    "Interrupted",
    "MaskAnnealing",
    "ScheduledSampling",
    "SelfDistillationSchedules",
    "StepProfile",
    "default_hooks",
]


def default_hooks(settings: TrainSettings, added: Sequence[Hook] = ()) -> list[Hook]:
    """Return the hooks of a run, including the config's and those `added`, in the order in which they are called.

    Raises:
        ConfigError: one of the user's does not fit, see `check_hook`.
    """
    user_hooks = [*(HOOKS.build(spec) for spec in settings.hooks), *added]
    for hook in user_hooks:
        check_hook(hook)
    return [BestMetric(), ProgressLog(), TensorBoard(), *user_hooks, FailedEvaluation(), Signals()]
