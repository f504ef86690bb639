"""The loss of self-distillation, DINO (Caron et al. 2021, equations 1 to 4, https://arxiv.org/abs/2104.14294)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.distributed import RatioMeter, all_reduce_mean
from vitkit.errors import ConfigError
from vitkit.protocols.criterion import Criterion
from vitkit.registry import CRITERIA


@CRITERIA.register
class SelfDistillationLoss(Criterion):
    """Cross entropy of the student's prediction from one view with the teacher's from another one of the same image.

    The teacher's outputs are centered, so that no prototype wins everywhere, and sharpened by a low temperature, so
    that they do not all become equal; without either, the features collapse. Their entropy, and that of their mean over
    the batch, are between 0 and ln K for K prototypes.

    `meters`: `teacher_entropy`; `mean_entropy`, that of the mean over a batch's images; and `feature_spread`, the
    standard deviation of the teacher's L2-normalized features over the batch, times the square root of their number: 0
    if all are equal, 1 if they are evenly spread. A batch of one image has only the first.

    Args:
        student_temperature: temperature of the student's softmax; the hook `SelfDistillationSchedules` sets the
            teacher's.
        center_momentum: weight of the previous center in the next one.
    Raises:
        ConfigError: an argument is out of range.
    """

    training_only = True
    needs_outputs = ("student_logits", "teacher_logits", "teacher_features", "center")
    teacher_temperature: float | None = None

    def __init__(self, *, student_temperature: float = 0.1, center_momentum: float = 0.9):
        super().__init__()
        if student_temperature <= 0:
            raise ConfigError(f"student_temperature={student_temperature}: expected above 0.")
        if not 0 <= center_momentum <= 1:
            raise ConfigError(f"center_momentum={center_momentum}: expected 0 to 1, where 1 means no centering.")
        self.student_temperature = student_temperature
        self.center_momentum = center_momentum
        self.meters = {name: RatioMeter() for name in ("teacher_entropy", "mean_entropy", "feature_spread")}
        self._batch_means: list[Tensor] = []

    def forward(self, outputs: Mapping[str, Tensor], targets: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Compute the loss.

        Args:
            outputs: outputs of `SelfDistillation` in training.
            targets: a target for each of the B images; only their number is used.
        Returns:
            distillation: the mean over images and pairs of a large view and another view.
        Raises:
            ConfigError: the outputs are not those of several views, or no hook sets the teacher's temperature.
        """
        self._check(outputs, len(targets))
        with torch.autocast(outputs["student_logits"].device.type, enabled=False):
            teacher_logits = outputs["teacher_logits"].detach().float()
            teacher = ((teacher_logits - outputs["center"]) / self.teacher_temperature).softmax(-1)
            student = (outputs["student_logits"].float() / self.student_temperature).log_softmax(-1)
            teacher, student = (x.unflatten(0, (-1, len(targets))) for x in (teacher, student))  # (views, B, K)
            # (2, views), summed over the images.
            cross_entropy = -torch.einsum("tbk,sbk->ts", teacher, student)
            others = cross_entropy.sum() - cross_entropy.diagonal().sum()
            loss = others / (len(targets) * (cross_entropy.numel() - len(teacher)))
        self._batch_means.append(teacher_logits.mean(0, keepdim=True))
        self._measure(teacher, outputs["teacher_features"].detach().float())
        return {"distillation": loss}

    def update_center(self, center: Tensor, *, step_taken: bool = True) -> None:
        """See `vitkit.protocols.learning.CentersTeacher`; the mean is over the step's batches of all ranks."""
        if step_taken and self._batch_means:
            # All batches have the same size, so the mean of their means is that of all images.
            mean = all_reduce_mean(torch.stack(self._batch_means).mean(0))
            center.mul_(self.center_momentum).add_(mean, alpha=1 - self.center_momentum)
        self._batch_means.clear()

    def _check(self, outputs: Mapping[str, Tensor], num_images: int) -> None:
        missing = [name for name in self.needs_outputs if name not in outputs]
        if missing:
            raise ConfigError(
                f"SelfDistillationLoss: the model returns no {missing[0]!r}. It is for model.type=SelfDistillation."
            )
        if self.teacher_temperature is None:
            raise ConfigError(
                "SelfDistillationLoss: nothing moves the teacher. Add dict(type='SelfDistillationSchedules') to "
                "train.hooks."
            )
        teacher, student = len(outputs["teacher_logits"]), len(outputs["student_logits"])
        if teacher != 2 * num_images or student % num_images:
            raise ConfigError(
                f"SelfDistillationLoss: got {teacher} large and {student - teacher} small views of {num_images} "
                "images; expected two large views of each image and the same number of small ones. Set "
                "data.train.transforms=dict(type='MultiCrop')."
            )

    def _measure(self, teacher: Tensor, features: Tensor) -> None:
        count = torch.tensor(float(len(features)), device=teacher.device)
        values = {"teacher_entropy": entropy(teacher).mean()}
        if teacher.shape[1] > 1:  # two views of one image are alike, which is no collapse
            values["mean_entropy"] = entropy(teacher.mean((0, 1)))
            values["feature_spread"] = F.normalize(features, dim=-1).std(0).mean() * math.sqrt(features.shape[-1])
        for name, value in values.items():
            self.meters[name].add(value * count, count)


def entropy(probabilities: Tensor) -> Tensor:
    """Return the entropy in nats over the last axis."""
    return torch.special.entr(probabilities).sum(-1)
