"""What self-distillation does besides plain steps: it moves the teacher, and says when the features collapse."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vitkit.distributed import is_main
from vitkit.engine.hooks.base import Hook
from vitkit.engine.run import TrainRun
from vitkit.engine.step import Step
from vitkit.errors import ConfigError
from vitkit.protocols.learning import CentersTeacher, LearnsFromItself
from vitkit.registry import HOOKS

logger = logging.getLogger("vitkit")
_MIN_PROGRESS = 0.1
"""The fraction of a run after which a collapse is looked for; at first, all features are nearly equal anyway."""
_UNIFORM, _ONE, _EQUAL = 0.999, 0.02, 0.02
"""The entropy above which a teacher is uniform, and that of the mean below which all images have one prototype, as
fractions of ln K; and the spread below which features are equal."""


@HOOKS.register
class SelfDistillationSchedules(Hook):
    """Train a student and its teacher as DINO does (Caron et al. 2021, https://arxiv.org/abs/2104.14294).

    After each step the teacher's parameters move towards the student's by 1 - momentum, and the center of its outputs
    is updated. Momentum and weight decay follow half a cosine over the steps of the run, the teacher's temperature is
    one for each epoch. All depend only on the progress, so a resumed run continues as if it had not been interrupted.

    The model is a `vitkit.protocols.learning.LearnsFromItself` with a buffer `center`, and its criterion a
    `vitkit.protocols.learning.CentersTeacher`, as `SelfDistillation` and `SelfDistillationLoss` are.

    Args:
        momentum: the teacher's at the first step; 1 at the end. For batches smaller than 1024 images it is larger, such
            as 0.9995 for 256.
        teacher_temperature: from `warmup_epochs` on; above 0.07 it is unstable.
        warmup_teacher_temperature: in the first epoch, from which it rises linearly.
        warmup_epochs: number of epochs of that rise.
        final_weight_decay: the optimizer's at the end, in the groups that have any; None: it is constant.
        clip_parameter_norm: maximum norm of the gradient of each parameter by itself; None: no clipping.
        frozen_last_layer_epochs: number of epochs in which the last layer is not trained.
    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        momentum: float = 0.996,
        teacher_temperature: float = 0.04,
        warmup_teacher_temperature: float = 0.04,
        warmup_epochs: int = 0,
        final_weight_decay: float | None = 0.4,
        clip_parameter_norm: float | None = 3.0,
        frozen_last_layer_epochs: int = 1,
    ):
        ranges = (
            ("momentum", momentum, 0 <= momentum <= 1, "0 to 1"),
            ("teacher_temperature", teacher_temperature, teacher_temperature > 0, "above 0"),
            ("warmup_teacher_temperature", warmup_teacher_temperature, warmup_teacher_temperature > 0, "above 0"),
            ("warmup_epochs", warmup_epochs, warmup_epochs >= 0, "at least 0"),
            ("final_weight_decay", final_weight_decay, (final_weight_decay or 0) >= 0, "at least 0"),
            (
                "clip_parameter_norm",
                clip_parameter_norm,
                clip_parameter_norm is None or clip_parameter_norm > 0,
                "above 0",
            ),
            ("frozen_last_layer_epochs", frozen_last_layer_epochs, frozen_last_layer_epochs >= 0, "at least 0"),
        )
        for name, value, is_in_range, expected in ranges:
            if not is_in_range:
                raise ConfigError(f"SelfDistillationSchedules: {name}={value}: expected {expected}.")
        self.momentum = momentum
        self.teacher_temperature = teacher_temperature
        self.warmup_teacher_temperature = warmup_teacher_temperature
        self.warmup_epochs = warmup_epochs
        self.final_weight_decay = final_weight_decay
        self.clip_parameter_norm = clip_parameter_norm
        self.frozen_last_layer_epochs = frozen_last_layer_epochs
        self._has_collapsed = False

    @contextmanager
    def during_training(self, run: TrainRun) -> Iterator[None]:
        """See `Hook`.

        Raises:
            ConfigError: the model or its criterion has no teacher.
        """
        for part, contract in ((run.model, LearnsFromItself), (run.criterion, CentersTeacher)):
            if not isinstance(part, contract):
                raise ConfigError(
                    f"train.hooks: SelfDistillationSchedules: {type(part).__name__} has no teacher. It is for "
                    "model.type=SelfDistillation with criterion.type=SelfDistillationLoss."
                )
        for group in run.optimizer.param_groups:
            group.setdefault("initial_weight_decay", group["weight_decay"])  # checkpoints keep it
        handle = run.optimizer.register_step_pre_hook(lambda *_: self._change_gradients(run))
        try:
            yield
        finally:
            handle.remove()

    def before_epoch(self, run: TrainRun) -> None:
        """Set the epoch's temperature, and the weight decay of the first step."""
        criterion: Any = run.criterion
        criterion.teacher_temperature = self.temperature(run.progress.epoch)
        self._set_weight_decay(run)

    def after_step(self, run: TrainRun, step: Step) -> None:
        """Move the teacher and the center, and set the weight decay of the next step; not after a skipped one."""
        if step.decision.take:
            momentum = cosine(self.momentum, 1.0, run.progress.step - 1, total_steps(run))
            run.model.update_teacher(momentum)
            self._set_weight_decay(run)
        criterion: Any = run.criterion
        criterion.update_center(run.model.center, step_taken=step.decision.take)

    def after_epoch(self, run: TrainRun) -> None:
        """Say once if the features have collapsed."""
        values = {name: meter.compute(run.device)[0] for name, meter in run.meters.items()}
        is_early = run.progress.step < _MIN_PROGRESS * total_steps(run)
        message = None if is_early or self._has_collapsed else self.describe_collapse(values, run.model.center.numel())
        if message is not None:
            self._has_collapsed = True
            if is_main():
                logger.warning("%s", message)

    def temperature(self, epoch: int) -> float:
        """Return the teacher's temperature in an epoch, counted from 0."""
        if epoch >= self.warmup_epochs:
            return self.teacher_temperature
        fraction = epoch / max(1, self.warmup_epochs - 1)
        start = self.warmup_teacher_temperature
        return start + fraction * (self.teacher_temperature - start)

    def describe_collapse(self, values: dict[str, float], num_prototypes: int) -> str | None:
        """Return a line about a collapse, with a remedy; None if the epoch's meters show none.

        Args:
            values: the meters of `SelfDistillationLoss`; nan for what batches of one image do not tell.
        """
        largest = math.log(num_prototypes)
        entropy, mean_entropy, spread = (values[name] for name in ("teacher_entropy", "mean_entropy", "feature_spread"))
        if entropy > _UNIFORM * largest:
            what = f"the teacher's outputs are uniform (entropy {entropy:.4g} of at most ln K = {largest:.4g})"
            remedy = (
                "Set model.batch_norm=True, which keeps images apart in the head, lower the hook's "
                "teacher_temperature and warmup_teacher_temperature "
                f"(now {self.teacher_temperature:g} and {self.warmup_teacher_temperature:g}; published 0.04), or use "
                "fewer model.num_prototypes"
            )
        elif mean_entropy < _ONE * largest:
            what = f"the teacher gives all images the same prototype (entropy of the mean {mean_entropy:.2g})"
            remedy = (
                "Raise the hook's teacher_temperature, or lower criterion.center_momentum (published: 0.04 and 0.9)"
            )
        elif spread < _EQUAL:
            what = f"all images have nearly the same features (spread {spread:.2g}; 1 is even)"
            remedy = "Lower optimizer.lr, raise the hook's momentum, or train on more and more varied images"
        else:
            return None
        return f"self-distillation has collapsed: {what}, so nothing is learned. {remedy}, and start anew."

    def _set_weight_decay(self, run: TrainRun) -> None:
        if self.final_weight_decay is None:
            return
        for group in run.optimizer.param_groups:
            if group["initial_weight_decay"] > 0:
                start = group["initial_weight_decay"]
                group["weight_decay"] = cosine(start, self.final_weight_decay, run.progress.step, total_steps(run))

    def _change_gradients(self, run: TrainRun) -> None:
        """Clip the gradient of each parameter, and leave out those of the last layer while it is frozen."""
        if self.clip_parameter_norm is not None:
            gradients = [parameter.grad for parameter in run.parameters if parameter.grad is not None]
            norms = torch._foreach_norm(gradients)
            factors = [(self.clip_parameter_norm / (norm + 1e-6)).clamp(max=1.0) for norm in norms]
            torch._foreach_mul_(gradients, factors)
        if run.progress.epoch < self.frozen_last_layer_epochs:
            for parameter in run.model.last_layer():
                parameter.grad = None


def total_steps(run: TrainRun) -> int:
    """Return the number of optimizer steps of a whole run."""
    return run.settings.epochs * run.settings.steps_per_epoch(len(run.loader))


def cosine(start: float, end: float, step: int, steps: int) -> float:
    """Return the value after `step` of `steps` steps along half a cosine from `start` to `end`."""
    return end + (start - end) * (1 + math.cos(math.pi * step / steps)) / 2
