"""Read settings, and the preparation of images, from folders of the transformers library."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

from vitkit.config.load import value_at
from vitkit.errors import ConfigError
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD
from vitkit.text_format import is_name

Section = dict[str, Any]

INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}
"""Pillow's number of a resampling filter -> its name."""

_LIMITS = {"layers": 128, "n_layer": 128, "depths": 128, "levels": 64, "vocab_size": 1 << 20, "queries": 1 << 16}
_LARGEST = 1 << 14
"""Upper limits of whole numbers by the end of their names, and of all others: a damaged file may have larger ones, and
building that model would exhaust memory and time."""


def _limit(name: str) -> int:
    return next((limit for end, limit in _LIMITS.items() if name.endswith(end)), _LARGEST)


class Settings:
    """The settings of a config of the library, read by name.

    Raises:
        ConfigError: a value is missing, or vitkit's model does not support it.
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

    def sub(self, name: str, *, number_as: Sequence[str] = ()) -> "Settings":
        """Return a section; a whole number in its place sets all settings of `number_as`."""
        value = self.get(name, {})
        if number_as and isinstance(value, int):
            value = dict.fromkeys(number_as, value)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.where}: {name} is a {type(value).__name__}; expected a section.")
        return Settings(value, f"{self.where}: {name}")

    def number(self, name: str, default: int | None = None) -> int:
        """Return a whole number above 0; without a default it is required."""
        value = self[name] if default is None else self.get(name, default)
        if type(value) is not int or not 0 < value <= _limit(name):
            raise ConfigError(
                f"{self.where}: {name}={value!r:.100}: expected a whole number above 0, at most {_limit(name)}."
            )
        return value

    def factor(self, name: str, default: float) -> float:
        """Return a number above 0."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not 0 < value <= _LARGEST:
            raise ConfigError(f"{self.where}: {name}={value!r:.100}: expected a number above 0, at most {_LARGEST}.")
        return value

    def numbers(self, name: str, default: Sequence[float] | None = None) -> list[float]:
        """Return a list of numbers; without a default it is required."""
        values = self[name] if default is None else self.get(name, default)
        if not isinstance(values, list | tuple) or not all(type(value) in (int, float) for value in values):
            raise ConfigError(f"{self.where}: {name}={values!r:.100}: expected a list of numbers.")
        if len(values) > _LIMITS["levels"] or any(not abs(value) <= _limit(name) for value in values):
            raise ConfigError(
                f"{self.where}: {name}={values!r:.100}: expected at most {_LIMITS['levels']} numbers up to "
                f"{_limit(name)}."
            )
        return list(values)

    def names(self, name: str) -> list[str]:
        """Return a list of names, each a line of text; empty without any."""
        values = self.get(name, [])
        if not isinstance(values, list | tuple) or not all(map(is_name, values)):
            raise ConfigError(f"{self.where}: {name}={values!r:.100}: expected a list of names.")
        return list(values)

    def expect(self, **values: Any) -> None:
        """Check that settings have the only values that vitkit's model supports; missing and null values pass."""
        for name, value in values.items():
            theirs = self.get(name, value)
            if theirs != value:
                raise ConfigError(f"{self.where}: {name}={theirs!r}: vitkit's model only has {value!r}.")


class Row(NamedTuple):
    """The names of one setting in the library and in vitkit."""

    theirs: str
    ours: str
    """The key in the model section, dotted."""
    read: Callable[[Settings, str, Any], Any] = Settings.number
    default: Any = None
    """The value if the setting is missing; None: it is required, unless `read` is `Settings.get`."""


def read_rows(settings: Settings, rows: Sequence[Row], section: Section) -> Section:
    """Add the library's settings to a model section, and return it.

    Raises:
        ConfigError: a value is wrong, or two settings that are a single one in vitkit differ.
    """
    names: dict[str, str] = {}
    for theirs, ours, read, default in rows:
        value = read(settings, theirs, default)
        *path, key = ours.split(".")
        place = reduce(dict.__getitem__, path, section)
        first = names.setdefault(ours, theirs)
        if place.setdefault(key, value) != value:
            raise ConfigError(
                f"{settings.where}: {first}={place[key]}, {theirs}={value}: vitkit's model has one number for both."
            )
    return section


def write_rows(section: Section, rows: Sequence[Row]) -> Section:
    """Return the library's settings of a model section; a key that the section lacks gives None."""
    return {row.theirs: value_at(section, row.ours) for row in rows}


class Kind(NamedTuple):
    """A kind of the library's models that vitkit also has, and how settings are converted both ways."""

    name: str
    """The library's `model_type`."""
    architectures: Mapping[str, str]
    """vitkit's class of the model, or of a classifier's backbone -> the library's class."""
    read: Callable[[Settings, str], tuple[str, Section]]
    """Converts the library's settings, and the folder's name, to a base config and its model section."""
    write: Callable[[Section], Section]
    """Converts the resolved model section to the library's settings."""
    processor: str = "BitImageProcessor"
    """The library's class that prepares the images."""


def preprocess(config: Section, values: Settings) -> None:
    """Replace the config's preparation of images with the folder's where they differ."""
    model, val = config["model"], config["data"]["val"]
    # Only the processors of models that state their own statistics leave pixels in 0..1 if the folder says nothing.
    has_statistics = "pixel_mean" in model["backbone"]
    mean, std = values.numbers("image_mean", IMAGENET_MEAN), values.numbers("image_std", IMAGENET_STD)
    if len(mean) != 3 or len(std) != 3:
        raise ConfigError(f"{values.where}: image_mean={mean}, image_std={std}: expected three numbers each.")
    if not values.get("do_normalize", not has_statistics):
        mean, std = [0.0] * 3, [1.0] * 3
    usual = max(abs(a - b) for a, b in zip((*mean, *std), (*IMAGENET_MEAN, *IMAGENET_STD))) < 1e-3
    is_classifier = model["type"] == "Classifier"
    if is_classifier:
        model.update(pixel_mean=mean, pixel_std=std)
    elif not usual or has_statistics:
        model["backbone"].update(pixel_mean=mean, pixel_std=std)
    if not values.get("do_resize", True):
        if not is_classifier:
            val.pop("transforms", None)
        return
    size = values.sub("size", number_as=("height", "width") if is_classifier else ("shortest_edge",))
    if val["type"] == "VideoList":
        _resize_clips(val, size, values)
    elif is_classifier:
        _resize_for_classes(val, size, values)
    elif "shortest_edge" in size.values:
        longest, name = (size, "longest_edge") if "longest_edge" in size.values else (values, "max_size")
        long = longest.number(name) if longest.get(name) is not None else 1333
        val["transforms"] = dict(type="EvalResize", short_side=size.number("shortest_edge"), max_size=long)
    elif size.values:
        val["transforms"] = dict(type="EvalResize", size=[size.number("height"), size.number("width")])


def _resize_for_classes(val: Section, size: Settings, values: Settings) -> None:
    """Make the transforms of a classifier resize images to squares, with or without a crop."""
    transforms = dict(val["transforms"])
    crop_pct = values.get("crop_pct")
    if "shortest_edge" in size.values:
        side = size.number("shortest_edge")
        crop = values.sub("crop_size", number_as=("height", "width"))
        if crop_pct and side < 384:
            transforms.update(size=side, crop_pct=float(crop_pct))
        elif crop.values:
            transforms.update(size=crop.number("height"), crop_pct=min(1.0, crop.number("height") / side))
        else:
            transforms.update(size=side, crop_pct=1.0)
    elif size.values:
        transforms.update(size=size.number("height"), crop_pct=1.0, squash=True)
    if values.get("resample") in list(INTERPOLATIONS):  # a list, as a damaged file may have an unhashable value
        transforms["interpolation"] = INTERPOLATIONS[values.get("resample")]
    val["transforms"] = transforms


def _resize_clips(val: Section, size: Settings, values: Settings) -> None:
    if not size.values:
        return
    short = size.number("shortest_edge" if "shortest_edge" in size.values else "height")
    crop = values.sub("crop_size", number_as=("height", "width"))
    side = crop.number("height") if crop.values else short
    val["transforms"] = dict(val["transforms"], size=side, short_side=short)
