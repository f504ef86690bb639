"""Settings of the transformers library's folders, and how their images are prepared."""

from collections.abc import Mapping
from typing import Any

from vitkit.errors import ConfigError
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD

Section = dict[str, Any]

_INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}
"""Pillow's numbers."""


class Settings:
    """A config of the library, whose values are asked for by name.

    Raises:
        ConfigError: a value is missing, or one that vitkit's model has not.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where

    def __getitem__(self, name: str) -> Any:
        if name not in self.values:
            raise ConfigError(f"{self.where}: {name} is missing. Get the file again.")
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def sub(self, name: str) -> "Settings":
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.where}: {name} is a {type(value).__name__}; expected a section.")
        return Settings(value, f"{self.where}: {name}")

    def expect(self, **values: Any) -> None:
        """Check values that vitkit's model has, and no others; None stands for the library's default, which it is."""
        for name, value in values.items():
            theirs = self.get(name, value)
            if theirs != value:
                raise ConfigError(f"{self.where}: {name}={theirs!r}: vitkit's model has {value!r} alone.")

    def same(self, first: str, second: str) -> Any:
        """Return the value that two settings have, which are one here."""
        if self[first] != self[second]:
            raise ConfigError(
                f"{self.where}: {first}={self[first]}, {second}={self[second]}: vitkit's model has one number for both."
            )
        return self[first]


def preprocess(config: Section, values: Settings) -> None:
    """Change how images are prepared where the folder says otherwise."""
    model, val = config["model"], config["data"]["val"]
    mean, std = (
        tuple(values.get(f"image_{name}", usual)) for name, usual in (("mean", IMAGENET_MEAN), ("std", IMAGENET_STD))
    )
    usual = max(abs(a - b) for a, b in zip((*mean, *std), (*IMAGENET_MEAN, *IMAGENET_STD))) < 1e-3
    is_classifier = model["type"] == "Classifier"
    if is_classifier:
        model.update(pixel_mean=list(mean), pixel_std=list(std))
    elif not usual:
        raise ConfigError(
            f"{values.where}: image_mean={list(mean)}, image_std={list(std)}: vitkit's dense models have ImageNet's."
        )
    if not values.get("do_resize", True):
        if not is_classifier:
            val.pop("transforms", None)
        return
    size = values.get("size", {})
    size = {"height": size, "width": size} if is_classifier and isinstance(size, int) else size
    size = {"shortest_edge": size} if isinstance(size, int) else size
    if val["type"] == "VideoList":
        _resize_clips(val, size, values)
    elif is_classifier:
        _resize_for_classes(val, size, values)
    elif size:
        short = size.get("shortest_edge") or min(size.get("height", 800), size.get("width", 800))
        longest = (
            size.get("longest_edge") or values.get("max_size") or max(size.get("height", 1333), size.get("width", 1333))
        )
        val["transforms"] = dict(type="EvalResize", short_side=int(short), max_size=int(longest))


def _resize_for_classes(val: Section, size: Mapping[str, int], values: Settings) -> None:
    """Images become squares, with or without a crop."""
    transforms = dict(val["transforms"])
    crop_pct = values.get("crop_pct")
    if "shortest_edge" in size:
        side = int(size["shortest_edge"])
        crop = values.sub("crop_size").get("height") if isinstance(values.get("crop_size"), Mapping) else None
        if crop_pct and side < 384:
            transforms.update(size=side, crop_pct=float(crop_pct))
        elif crop:
            transforms.update(size=int(crop), crop_pct=min(1.0, int(crop) / side))
        else:
            transforms.update(size=side, crop_pct=1.0)
    elif size:
        transforms.update(size=int(size["height"]), crop_pct=1.0, squash=True)
    if values.get("resample") in _INTERPOLATIONS:
        transforms["interpolation"] = _INTERPOLATIONS[values.get("resample")]
    val["transforms"] = transforms


def _resize_clips(val: Section, size: Mapping[str, int], values: Settings) -> None:
    crop = values.get("crop_size")
    side = crop.get("height") if isinstance(crop, Mapping) else crop
    short = size.get("shortest_edge") or size.get("height")
    if short:
        val["transforms"] = dict(val["transforms"], size=int(side or short), short_side=int(short))
