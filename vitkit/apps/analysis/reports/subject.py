"""The model that is analyzed: a backbone by its name, or a model with a config."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitkit.apps.analysis.reports.published import read_published
from vitkit.apps.inference import find_model, is_config_only
from vitkit.apps.inference.load import FoundModel, read_sampling
from vitkit.backbones.base import check_at_least_1
from vitkit.config import Config, config_names, find_config
from vitkit.config.overrides import apply_override, split_override
from vitkit.data.transforms.annotated_image import AnnotatedImage
from vitkit.engine.build import build_model
from vitkit.engine.settings import require
from vitkit.errors import ConfigError
from vitkit.ops.images import in_channels
from vitkit.protocols.model import child
from vitkit.registry import BACKBONES, DATASETS, MODELS, TRANSFORMS, parameters_of, unknown
from vitkit.weights import classes_of

COMMON_SIZE = (480, 640)
"""Height and width of COCO's most frequent images."""


@dataclass(frozen=True)
class Subject:
    """A backbone, or a model with its config."""

    name: str
    found: FoundModel | None = None
    """The config and the weights of a model; None: a backbone."""
    overrides: Sequence[str] = ()
    """For a backbone, `key=value`."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The config; empty for a backbone."""
        return {} if self.found is None else self.found.config

    @property
    def takes_text(self) -> bool:
        """Whether the model reads or writes text, other than the prompt of a detector."""
        if self.found is None:
            return False
        constructor, _ = MODELS.resolve(self.config["model"], "model")
        return "target_vocabulary" in parameters_of(constructor)

    @property
    def classes(self) -> list[str] | None:
        """The classes that the checkpoint names; None if it names none or there is no checkpoint."""
        if self.found is None or self.found.weights is None:
            return None
        return classes_of(self.found.weights.metadata, str(self.found.weights))

    @property
    def default_classes(self) -> int | None:
        """The default number of classes of a model; None if its classes are known or it has none."""
        if self.found is None or self.classes is not None:
            return None
        constructor, arguments = MODELS.resolve(self.config["model"])
        parameter = parameters_of(constructor).get("num_classes")
        return None if parameter is None or "num_classes" in arguments else parameter.default

    def of_images(self, option: str) -> "Subject":
        """Return this subject if it takes images.

        Raises:
            ConfigError: it takes text; the message says that `option` does not apply.
        """
        if self.takes_text:
            raise ConfigError(f"{option}: for models of images. Models of text have --lengths.")
        return self

    def build(self, device: str) -> nn.Module:
        """Return the model in evaluation mode; raises like `build_backbone`."""
        if self.found is None:
            return build_backbone(self.name, self.overrides, device=device)
        with torch.device(device):
            return build_model(self.config["model"], classes=self.classes).eval()

    def input_shape(
        self, model: nn.Module, *, size: int | tuple[int, int] | None, frames: int | None, batch_size: int
    ) -> tuple[tuple[int, ...], str]:
        """Return the shape of the input, (N, C, [T,] H, W), and where its size comes from ("" if it is given).

        Without a size, it is that of a backbone's published figures. For a config, it is that of an image of 480 x 640
        pixels, COCO's most frequent size, after the validation transforms, or else the size that the dataset draws.
        A number is the side of a square. Without `frames`, clips have those of the published figures or of the
        validation data.

        Raises:
            ConfigError: a size, `frames` or `batch_size` is below 1.
        """
        _, *clip, height, width = read_published().get(self.name, {}).get("input", (3, 224, 224))
        backbone = model if self.found is None else child(model, "backbone")
        channels = 3 if backbone is None else in_channels(backbone)
        size_from = "as published" if self.name in read_published() else "the default"
        if self.found is not None:
            (height, width), size_from = validation_size(self.config) or ((height, width), "the default")
            sampling = read_sampling((self.config.get("data") or {}).get("val"))
            clip = [] if sampling is None else [sampling.num_frames]
        if size is not None:
            (height, width), size_from = (size, size) if isinstance(size, int) else size, ""
        clip = clip if frames is None else [frames]
        check_at_least_1(batch_size=batch_size, frames=min(clip, default=1), height=height, width=width)
        return (batch_size, channels, *clip, height, width), size_from


def find_subject(
    model: str | Path | Mapping[str, Any],
    weights: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    trust: bool = False,
) -> Subject:
    """Find a backbone or a model by its name.

    Raises:
        ConfigError: there is no such model; the message lists the known names, including backbones.
    """
    name = str(model.path if isinstance(model, Config) else "the config" if isinstance(model, Mapping) else model)
    if not isinstance(model, Mapping):
        if name in BACKBONES:
            return Subject(name, overrides=overrides)
        is_file = name.endswith((".py", ".json"))
        if is_config_only(name) and not is_file and find_config(name) is None:
            names = {*BACKBONES.names(), *config_names()}
            raise ConfigError(unknown(name, names, f"{name!r} is neither a backbone nor a model or a config"))
    found = find_model(model, weights, overrides=overrides, trust=trust)
    require(found.config, "model")
    return Subject(name, found)


def build_backbone(name: str, overrides: Sequence[str] = (), *, device: str) -> nn.Module:
    """Return a backbone in evaluation mode, with the classes of its published weights.

    Raises:
        ConfigError: there is no such backbone, or an override does not fit.
    """
    spec = {"type": name, "num_classes": read_published().get(name, {}).get("num_classes", 1000)}
    config = {"model": {"type": "Classifier", "backbone": spec}}
    for text in overrides:
        key, raw = split_override(text)
        apply_override(config, f"model.backbone.{key}", raw)
    with torch.device(device):
        return BACKBONES.build(config["model"]["backbone"]).eval()


def validation_size(config: Mapping[str, Any]) -> tuple[tuple[int, int], str] | None:
    """Return the height and width of a config's validation images and the key that sets them; None if none does."""
    val = (config.get("data") or {}).get("val")
    if val is None:
        return None
    constructor, arguments = DATASETS.resolve(val, "data.val")
    if (transforms := arguments.get("transforms")) is not None:
        image = AnnotatedImage(np.zeros((*COMMON_SIZE, 3), np.uint8))
        height, width = TRANSFORMS.build(transforms)(image, seed=0).image.shape[:2]
        return (height, width), f"data.val.transforms, of an image of {COMMON_SIZE[0]}x{COMMON_SIZE[1]}"
    parameter = parameters_of(constructor).get("image_size")
    side = arguments.get("image_size", None if parameter is None else parameter.default)
    return None if side is None else ((side, side), "data.val.image_size")
