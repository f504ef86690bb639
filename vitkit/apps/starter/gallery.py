"""Write a gallery of images as one HTML file, with the images embedded."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vitkit.apps.report.html import jpeg_url, render_page
from vitkit.io.output import write_text


@dataclass
class Card:
    """One image of a gallery."""

    title: str
    image: np.ndarray
    """(H, W, 3) uint8 RGB."""
    text: str = ""
    classes: list[str] = field(default_factory=list)
    """Names of the classes in the image, by which the gallery can be filtered."""


def write_gallery(cards: Sequence[Card], path: str | Path, *, title: str) -> None:
    """Write a gallery of images that can be filtered by class.

    Args:
        path: the HTML file's path; its folder is made.
        title: the gallery's title.
    Raises:
        ValueError: there are no cards.
    """
    if not cards:
        raise ValueError("cards: got none, expected at least one image.")
    names = sorted({name for card in cards for name in card.classes})
    shown = [(card, jpeg_url(card.image)) for card in cards]
    page = render_page(Path(__file__).with_suffix(".html"), title=title, classes=names, cards=shown)
    write_text(Path(path), page)
