"""Masked attention that training phases out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vitkit.engine.run import TrainRun
from vitkit.engine.step import Step
from vitkit.errors import ConfigError
from vitkit.protocols.learning import Hook
from vitkit.registry import HOOKS


@HOOKS.register
class MaskAnnealing(Hook):
    """Mask fewer and fewer queries of a model with masked attention, one block after another (EoMT, Kerssies et al.
    2025, section 3.3, https://arxiv.org/abs/2503.19108).

    A block masks all queries until its start, then a fraction of (1 - progress) ** power, and none from its end on.

    The model has `num_blocks`, the number of its blocks with masked attention, and
    `set_mask_probabilities(probabilities)`, which sets the fraction of queries that each of them masks.

    Args:
        start_steps, end_steps: optimizer steps for each block, first to last. None: a sixth of the run each, spread
            evenly from a sixth to five sixths of it, as in the original's schedules.
    Raises:
        ConfigError: only one of the two is set, their lengths differ, an end is not after its start, or the power is
            not positive.
    """

    def __init__(
        self, *, start_steps: Sequence[int] | None = None, end_steps: Sequence[int] | None = None, power: float = 0.9
    ):
        if (start_steps is None) != (end_steps is None):
            raise ConfigError("MaskAnnealing: expected both start_steps and end_steps, or neither.")
        if start_steps is not None and end_steps is not None:
            fits = len(start_steps) == len(end_steps) and all(a < b for a, b in zip(start_steps, end_steps))
            if not fits:
                raise ConfigError(
                    f"MaskAnnealing: start_steps={list(start_steps)}, end_steps={list(end_steps)}: expected an end "
                    "after each start."
                )
        if not power > 0:
            raise ConfigError(f"MaskAnnealing: power={power}: expected a value above 0.")
        self.start_steps = start_steps
        self.end_steps = end_steps
        self.power = power

    @contextmanager
    def during_training(self, run: TrainRun) -> Iterator[None]:
        """See `Hook`.

        Raises:
            ConfigError: the model has no masked attention, or a different number of blocks.
        """
        model = run.model
        if not hasattr(model, "set_mask_probabilities"):
            raise ConfigError(
                f"train.hooks: MaskAnnealing: {type(model).__name__} has no masked attention to anneal; EoMT has."
            )
        if self.start_steps is not None and len(self.start_steps) != model.num_blocks:
            raise ConfigError(
                f"train.hooks: MaskAnnealing: start_steps and end_steps are for {len(self.start_steps)} blocks, but "
                f"model.num_blocks={model.num_blocks}. Expected one of each per block."
            )
        yield

    def before_epoch(self, run: TrainRun) -> None:
        """Set the mask probabilities for the first step."""
        self._set(run)

    def after_step(self, run: TrainRun, step: Step) -> None:
        """Set the mask probabilities for the next step."""
        self._set(run)

    def _set(self, run: TrainRun) -> None:
        steps = run.settings.epochs * run.settings.steps_per_epoch(len(run.loader))
        probabilities = self.probabilities(run.progress.step, steps, run.model.num_blocks)
        run.model.set_mask_probabilities(probabilities)
        if run.ema is not None:  # the average includes buffers, but this buffer is a setting
            average: Any = run.ema.module
            average.set_mask_probabilities(probabilities)

    def probabilities(self, step: int, total_steps: int, num_blocks: int) -> list[float]:
        """Return the fraction of queries that each block masks in the step after `step` steps."""
        if self.start_steps is None or self.end_steps is None:
            gap = total_steps / 2 / max(1, num_blocks - 1)
            starts = [total_steps / 6 + i * gap for i in range(num_blocks)]
            spans = [(start, start + total_steps / 6) for start in starts]
        else:
            spans = [(float(start), float(end)) for start, end in zip(self.start_steps, self.end_steps)]
        progress = [min(max((step - start) / (end - start), 0.0), 1.0) for start, end in spans]
        return [(1 - share) ** self.power for share in progress]
