"""The input of the checks: a config, its data, and limits on how much of it they may load."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vitkit.apps.datasets.object_counts import model_argument
from vitkit.apps.doctor.images import ImageScan, scan_images
from vitkit.apps.doctor.issues import Issue
from vitkit.apps.doctor.statistics import DatasetStatistics, dataset_statistics
from vitkit.data.loading.settings import DataSettings
from vitkit.devices import resolve_precision
from vitkit.engine.build import build_model, check_prompts, use_tokenizer
from vitkit.engine.settings import TrainSettings
from vitkit.engine.teaching import add_teacher
from vitkit.errors import VitkitError
from vitkit.text.class_prompts import PromptStep
from vitkit.text.vocabulary import vocabularies_of
from vitkit.weights import load_pretrained, load_weights


@dataclass
class DoctorOptions:
    """The thoroughness of the checks, and the machine that they are for."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    gpus: int = 1
    """Number of training processes (GPUs)."""
    memory_gib: float | None = None
    """Memory of the device that will train, in GiB; None: that of `device`."""
    init: str | None = None
    """Weights to start from, in the form that vitkit train --init accepts."""
    max_images: int = 1000
    """Maximum number of images to load from each dataset."""
    overfit_steps: int = 200
    overfit_seconds: float = 120.0


class DoctorCase:
    """A config with its data, as the checks read it.

    Args:
        config: the result of `load_config`; missing sections are not checked.
        options: see `DoctorOptions`.
    """

    def __init__(self, config: Mapping[str, Any], options: DoctorOptions):
        self.config = config
        self.options = options
        self.data = DataSettings(**config.get("data", {}))
        self.settings = None
        if "train" in config:
            self.settings = TrainSettings(**config["train"]).for_processes(self.data, options.gpus)
            resolved = resolve_precision(self.settings.precision, options.device)
            self.settings = dataclasses.replace(self.settings, precision=resolved)
        self.statistics: dict[str, DatasetStatistics] = {}
        for split in ("train", "val", "test"):
            if getattr(self.data, split) is not None:
                train = self.train and self.train.dataset
                self.statistics[f"data.{split}"] = dataset_statistics(self.data, split, train)
        if self.data.prompts is not None:
            self._check_prompts()
        train, val = (split and split.dataset for split in (self.train, self.val))
        if train is not None and val is not None and val.has_vocabularies:
            val.use_vocabularies_of(train)

    def _check_prompts(self) -> None:
        """Make the prompts of each dataset's classes; without them, a dataset counts as one that cannot be built."""
        train = self.train.dataset if self.train else None
        for where, statistics in self.statistics.items():
            dataset = statistics.dataset
            try:
                if dataset is not None and not use_tokenizer(dataset, self.config.get("model")) and train is not None:
                    dataset.use_vocabularies_of(train)
                if dataset is not None:
                    PromptStep(dataset, training=dataset is train)
            except VitkitError as error:
                statistics.dataset = None
                statistics.issues.append(Issue("prompts", "fail", str(error), where))

    @property
    def train(self) -> DatasetStatistics | None:
        """Statistics of the training data; None without any."""
        return self.statistics.get("data.train")

    @property
    def val(self) -> DatasetStatistics | None:
        """Statistics of the validation data; None without any."""
        return self.statistics.get("data.val")

    @functools.cache  # noqa: B019 - a case lives as long as the program
    def scan(self, where: str) -> ImageScan:
        """Load the images of a dataset, or as many as the options allow; the result is cached."""
        return scan_images(self.statistics[where], self.options.max_images)

    @functools.cached_property
    def initial_model(self) -> tuple[nn.Module | None, list[Issue]]:
        """The model with the weights that a run would start from, if it can be built, and issues with either."""
        if "model" not in self.config or self.train is None or self.train.dataset is None:
            return None, []
        dataset, classes = self.train.dataset, self.train.classes or None
        try:
            check_prompts(self.config["model"], dataset)
            model = build_model(
                self.config["model"],
                classes=classes,
                things=dataset.things,
                keypoints=dataset.keypoints,
                vocabularies=vocabularies_of(dataset),
            )
            add_teacher(model, classes)
        except VitkitError as error:
            return None, [Issue("model", "fail", str(error))]
        try:
            if self.options.init:
                init, spec = self.options.init, self.config["model"]
                report = load_weights(model, init, classes=classes, new_class_head=True, spec=spec)
                issue = Issue("weights", "ok", str(report))
            else:
                source = load_pretrained(model)
                message = f"backbone from {source}" if source else "random weights throughout"
                issue = Issue("weights", "ok" if source else "note", message)
        except VitkitError as error:
            message = f"the run cannot start: {error} The checks below continue with random weights."
            issue = Issue("weights", "fail", message)
        return model.to(self.options.device), [issue]

    def model_argument(self, name: str) -> Any:
        """Return an argument of the model, from the config or its default; None if the model has no such argument."""
        if "model" not in self.config:
            return None
        return model_argument(self.config["model"], name)
