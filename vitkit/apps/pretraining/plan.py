"""The plan of `vitkit pretrain`: the request, the images and the chosen settings, and the config that they make."""

import json
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vitkit.apps.pretraining.methods import METHODS
from vitkit.apps.pretraining.photos import Photos
from vitkit.apps.starter.timed_run import CONFIG, TimedRequest, comment, derive_config
from vitkit.errors import ConfigError
from vitkit.io.json_files import read_json
from vitkit.io.output import write_text
from vitkit.text_format import pluralize

PLAN = "pretrain.json"
"""The file in the run's folder that a resumption reads."""
NUM_EVALUATIONS = 5
WARMUP_EPOCHS = 1
LABELED = {"type": "CombinedEvaluator", "evaluator": ["NearestNeighbors", "LinearProbe"]}


@dataclass(frozen=True)
class PretrainRequest(TimedRequest):
    """The user's request; see `pretrain`."""

    photos: Any
    method: str
    teacher: str | None
    backbone: str
    hours: float
    labeled: str | None
    overrides: Sequence[str]

    def command(self, folder: Path) -> str:
        """Return the command of this request."""
        options = {"method": self.method, "teacher": self.teacher, "backbone": self.backbone}
        options |= {"hours": f"{self.hours:g}", "labeled": self.labeled, "run-dir": str(folder)}
        words = [f"--{name}={value}" for name, value in options.items() if value is not None]
        photos = self.photos if isinstance(self.photos, str) else "PHOTOS"
        return shlex.join(["vitkit", "pretrain", photos, *words, *self.overrides])


@dataclass(frozen=True)
class PretrainChoice:
    """The chosen settings of the training."""

    size: int
    images: int
    """Number in a step."""
    epochs: int = 1000
    repeats: float = 1
    """How often each image occurs in an epoch."""
    step_minutes: float = 0.0
    batch: int = 0
    """Number of a step's images that are computed at once; 0: all."""

    def steps_per_epoch(self, photos: Photos) -> int:
        """Return the number of steps of an epoch."""
        return math.ceil(photos.count * self.repeats / self.images)

    def describe(self, photos: Photos) -> str:
        """Return the choices in words."""
        times = f", each with every image {self.repeats} times" if self.repeats > 1 else ""
        times = times or (f", each with {self.repeats:.2g} of the images" if self.repeats < 1 else "")
        steps = self.epochs * self.steps_per_epoch(photos)
        return (
            f"crops of {self.size} pixels, {self.images} images a step, {pluralize(self.epochs, 'epochs')}{times}: "
            f"{pluralize(steps, 'steps')} of {60 * self.step_minutes:.2f} s, {steps * self.step_minutes:.0f} min"
        )


@dataclass(frozen=True)
class Plan:
    """Everything that a resumption needs to know, stored in the run's folder."""

    request: PretrainRequest
    photos: Photos
    choice: PretrainChoice

    def write(self, folder: Path) -> None:
        """Write the plan and the config."""
        write_text(folder / PLAN, json.dumps(asdict(self), indent=2) + "\n")
        write_text(folder / CONFIG, config_text(self, folder))

    @classmethod
    def read(cls, folder: Path) -> "Plan":
        """Read the plan of a run.

        Raises:
            ConfigError: there is none.
        """
        file = folder / PLAN
        if not file.is_file():
            raise ConfigError(f"--resume {folder}: has no {PLAN}, as vitkit pretrain writes it. Start it anew.")
        content = read_json(file, key="--resume")
        try:
            return cls(
                PretrainRequest(**content["request"]), Photos(**content["photos"]), PretrainChoice(**content["choice"])
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"--resume {folder}: its {PLAN} is not what vitkit pretrain wrote. Start it anew."
            ) from error


def config_text(plan: Plan, folder: Path) -> str:
    """Return the config of a run, with the reason for each choice."""
    request, photos, choice = plan.request, plan.photos, plan.choice
    method = METHODS[request.method]
    arguments = {"backbone": request.backbone, "data": photos.source, method.size: choice.size}
    arguments |= {"epochs": choice.epochs, "images_per_step": choice.images}
    if request.teacher is not None:
        name, has_weights, weights = request.teacher.partition("=")
        is_spec = has_weights and not os.path.exists(request.teacher)
        arguments["teacher"] = dict(type=name, pretrained=weights) if is_spec else request.teacher
    called = ",\n".join(f"    {name}={value!r}" for name, value in arguments.items())
    about = [f"{photos.summary}; {'; '.join(photos.notes)}".removesuffix("; ")]
    about += [f"Written by: {request.command(folder)}"]
    lines = [
        comment(f"{request.method}: {method.text}"),
        *[comment(choice.describe(photos))] * (choice.step_minutes > 0),
        f"cfg = base(\n{called},\n)",
        f'cfg["data"].update(images_per_gpu={choice.batch or choice.images}, num_workers="auto", on_error="skip")',
    ]
    if choice.repeats != 1:
        few, many = "few: an epoch with each once would be over in seconds", "many: an epoch has a part of them"
        lines += [
            f"# The photos are {few if choice.repeats > 1 else many}.",
            f'cfg["data"]["train"]["repeats"] = {choice.repeats}',
        ]
    val, metric = make_shown_dataset(plan), ""
    if request.labeled is not None:
        val = dict(type="ImageFolder", folder=request.labeled, transforms=val["transforms"])
        metric = ', best_metric="knn/top1"'
    lines += [
        f'cfg["data"]["val"] = {val!r}',
        *[f'cfg["evaluator"] = {LABELED!r}'] * (request.labeled is not None),
        f'cfg["schedule"]["warmup_epochs"] = {min(WARMUP_EPOCHS, choice.epochs / 10):g}',
        *method.small,
        f'cfg["train"].update(epochs={choice.epochs}, precision="auto"{metric})',
        f'cfg["train"]["eval_every"] = {math.ceil(choice.epochs / NUM_EVALUATIONS)}',
    ]
    return derive_config(f"pretrain.{method.config}", about, lines, list(request.overrides))


def make_shown_dataset(plan: Plan) -> dict[str, Any]:
    """Return a dataset of images evenly spread over all, without labels."""
    transforms = dict(type="ClassificationEvalTransforms", size=plan.choice.size)
    return dict(type="UnlabeledImages", source=plan.photos.shown, transforms=transforms)
