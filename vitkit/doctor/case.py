"""What the checks look at: a config, its data, and how much of it they may take."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vitkit.checkpoint import load_weights
from vitkit.data.loader import DataSettings
from vitkit.doctor.findings import Finding
from vitkit.doctor.pictures import Pictures, look_at
from vitkit.doctor.surveys import Survey, survey
from vitkit.engine.settings import TrainSettings
from vitkit.errors import VitkitError
from vitkit.models import build_model
from vitkit.registry import MODELS, parameters_of
from vitkit.vocabulary import vocabularies_of


@dataclass
class Options:
    """How thorough, and for which machine."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    gpus: int = 1
    """Processes that train."""
    memory_gib: float | None = None
    """Of the device that will train; None: of `device`."""
    init: str | None = None
    """The weights that the run starts from, as tools/train.py --init takes them."""
    max_images: int = 1000
    """Images of each dataset that are loaded."""
    overfit_steps: int = 200
    overfit_seconds: float = 120.0


class Case:
    """One config with its data.

    Args:
        config: as `load_config` returns it; what it lacks is not checked.
        options: see there.
    """

    def __init__(self, config: Mapping[str, Any], options: Options):
        self.config = config
        self.options = options
        self.data = DataSettings(**config.get("data", {}))
        self.settings = TrainSettings(**config["train"]) if "train" in config else None
        self.surveys = {
            f"data.{name}": survey(spec, self.data.root, f"data.{name}")
            for name, spec in (("train", self.data.train), ("val", self.data.val))
            if spec is not None
        }
        if self.train and self.val and hasattr(self.val.dataset, "use_vocabularies_of") and self.train.dataset:
            self.val.dataset.use_vocabularies_of(self.train.dataset)

    @property
    def train(self) -> Survey | None:
        return self.surveys.get("data.train")

    @property
    def val(self) -> Survey | None:
        return self.surveys.get("data.val")

    @functools.cache  # noqa: B019 - a case lives as long as the program
    def pictures(self, where: str) -> Pictures:
        """The images of a dataset, or as many of them as are to be loaded."""
        return look_at(self.surveys[where], self.options.max_images)

    @functools.cached_property
    def start(self) -> tuple[nn.Module | None, list[Finding]]:
        """The model with the weights that a run would start from, and what is wrong with them; no model: no start."""
        if "model" not in self.config or self.train is None or self.train.dataset is None:
            return None, []
        dataset, findings = self.train.dataset, []
        try:
            model = build_model(
                self.config["model"],
                classes=self.train.classes or None,
                things=getattr(dataset, "things", None),
                vocabularies=vocabularies_of(dataset),
            )
        except VitkitError as error:
            return None, [Finding("model", "fail", str(error))]
        try:
            if self.options.init:
                report = load_weights(model, self.options.init, classes=self.train.classes or None, new_class_head=True)
                findings.append(Finding("weights", "ok", str(report)))
            else:
                source = model.load_pretrained() if hasattr(model, "load_pretrained") else None
                message = f"backbone from {source}" if source else "random weights throughout"
                findings.append(Finding("weights", "ok" if source else "note", message))
        except VitkitError as error:
            message = f"the run cannot start: {error} The checks below go on with random weights."
            findings.append(Finding("weights", "fail", message))
        return model.to(self.options.device), findings

    def model_argument(self, name: str) -> Any:
        """What the config, or the model's default, says of an argument; None if the model has no such."""
        if "model" not in self.config:
            return None
        constructor, given = MODELS.resolve(self.config["model"])
        parameter = parameters_of(constructor).get(name)
        return given.get(name, None if parameter is None else parameter.default)
