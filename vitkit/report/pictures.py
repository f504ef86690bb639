"""Pictures of the evaluated images inside a page, as many as it may hold."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from vitkit.errors import DataError
from vitkit.protocols import ImageDataset
from vitkit.visualization.canvas import enlarge
from vitkit.visualization.html import jpeg_url

logger = logging.getLogger("vitkit")

LONG_SIDE = 640
QUALITY = 78
MIN_SIDE = 120
"""Smaller pictures are enlarged to it."""


class PictureBudget:
    """Embeds pictures until a page's share for them is used up.

    Args:
        dataset: of the images; one without pictures gives none.
        max_bytes: of all addresses together.
    """

    def __init__(self, dataset: Any, max_bytes: int):
        self.load = dataset.load_image if isinstance(dataset, ImageDataset) else None
        self.left = max_bytes if self.load else 0

    def embed(self, picture: np.ndarray, *, long_side: int = LONG_SIDE) -> str | None:
        """Return the address of an (H, W, 3) uint8 RGB picture; None where the page has no room for it."""
        shown, _ = enlarge(picture, MIN_SIDE)
        shown.thumbnail((long_side, long_side))
        url = jpeg_url(np.asarray(shown), QUALITY)
        if len(url) > self.left:
            return None
        self.left -= len(url)
        return url

    def image(self, index: int) -> np.ndarray | None:
        """Return a stored image; None if there is none or its file cannot be read, which is logged."""
        if self.load is None:
            return None
        try:
            return np.ascontiguousarray(self.load(index))
        except DataError as error:
            logger.warning("left out of the report: %s", error)
            return None

    def embed_images(
        self, indices: Iterable[int], prepare: Callable[[np.ndarray], np.ndarray] | None = None
    ) -> dict[int, str]:
        """Return index -> address of images, the first ones first, until there is no room."""
        urls: dict[int, str] = {}
        for index in indices:
            if self.left <= 0:
                break
            if index in urls or (image := self.image(index)) is None:
                continue
            url = self.embed(image if prepare is None else prepare(image))
            if url is None:
                break
            urls[index] = url
        return urls
