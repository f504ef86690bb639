"""The request to `explain`, and the files that it wrote."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import nn

from vitkit.apps.explanations.html_page import PageLayer, write_explain_page
from vitkit.apps.explanations.images import Point
from vitkit.apps.explanations.prompt_attention import PromptAttention
from vitkit.apps.inference.predictor import Predictor
from vitkit.errors import ConfigError, DataError
from vitkit.io.channel_files import as_rgb
from vitkit.losses.mask_criterion import MaskCriterion


@dataclass(frozen=True)
class ExplainRequest:
    """The figures to draw; see `explain`."""

    points: Sequence[Point] = ()
    queries: Sequence[int] = ()
    frame: int | None = None
    encoder_layer: int | None = None
    decoder_layer: int | None = None
    threshold: float | None = None
    beams: int = 4
    html: bool = False
    words: bool = False
    criterion: nn.Module | MaskCriterion | None = None
    """The loss of a mask model, whose points are drawn; None: unknown."""


@dataclass
class Explanation:
    """The files that `explain` wrote, and what it measured."""

    folder: Path
    files: list[Path] = field(default_factory=list)
    """Figures (PNG) and pages (HTML), in the order in which they were written."""
    notes: list[str] = field(default_factory=list)
    """What is not drawn and why, a sentence each."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Measurements by name, such as a query's attention in its box relative to uniform attention."""
    prompt: PromptAttention | None = None
    """What queries read in the prompt, the probability of each of its words, and where they look; None without one."""
    stem: str = ""
    """The beginning of the names of the files that are written next."""

    def file(self, ending: str) -> Path:
        """Return the path of a new file whose name is the stem and this ending, and add it to `files`."""
        self.files.append(self.folder / f"{self.stem}_{ending}" if self.stem else self.folder / ending)
        return self.files[-1]

    def page(self, layers: Sequence[PageLayer], ending: str, *, title: str, image: np.ndarray | None = None) -> None:
        """Write an HTML page; see `write_explain_page`."""
        write_explain_page(layers, self.file(ending), title=title, image=image)


Draw = Callable[[Predictor, np.ndarray, ExplainRequest, Explanation], None]
"""Draws figures of a predictor's model for an image as from `Predictor.to_array`."""


def prepare_image_to_draw(predictor: Predictor, image: np.ndarray) -> np.ndarray:
    """Return an image as the model sees it after the validation transforms, for drawing: (H, W, 3) uint8 RGB."""
    return as_rgb(predictor.as_evaluated(image))


def check_points(points: Sequence[Point], width: int, height: int, what: str) -> None:
    """Raise a DataError if a point is outside an image or clip of this size in pixels."""
    for x, y in points:
        if not (0 <= x < width and 0 <= y < height):
            raise DataError(
                f"points: {x:g},{y:g} is outside {what}, which is {width}x{height} pixels (width x height)."
            )


def check_queries(queries: Sequence[int], num_queries: int) -> list[int]:
    """Return the queries; raise a ConfigError if the model does not have one of them."""
    for query in queries:
        if not 0 <= query < num_queries:
            raise ConfigError(f"queries: got {query}; the model's queries are 0 to {num_queries - 1}.")
    return list(queries)


def check_layer(option: str, number: int | None, count: int) -> int:
    """Return the requested layer out of `count`, the last by default; raise a ConfigError if there is no such layer."""
    if number is not None and not 0 <= number < count:
        what = f"the model's layers are 0 to {count - 1}" if count else "the model has no such layer"
        raise ConfigError(f"{option}: got {number}; {what}.")
    return count - 1 if number is None else number
