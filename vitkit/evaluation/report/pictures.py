"""Embeds evaluated images in a page, as many as there is room for."""

import logging
from collections.abc import Iterable

import numpy as np

from vitkit.data.io.channel_files import as_rgb
from vitkit.errors import DataError
from vitkit.protocols import Dataset
from vitkit.visualization.canvas import enlarge
from vitkit.visualization.html import jpeg_url

logger = logging.getLogger("vitkit")

LONG_SIDE = 640
QUALITY = 78
MIN_SIDE = 120
"""Shorter side, in pixels, to which smaller images are enlarged."""


class PictureBudget:
    """Embeds images until a page's budget for them is used up.

    Args:
        dataset: dataset of the images; nothing is embedded if it has no images.
        max_bytes: total size of all data URLs.
    """

    def __init__(self, dataset: Dataset, max_bytes: int):
        self.load = dataset.load_image if dataset.has_images else None
        self.left = max_bytes if self.load else 0

    def embed(self, picture: np.ndarray, *, long_side: int = LONG_SIDE) -> str | None:
        """Return the data URL of an (H, W, 3) uint8 RGB image; None if the page has no room for it."""
        shown, _ = enlarge(picture, MIN_SIDE)
        shown.thumbnail((long_side, long_side))
        url = jpeg_url(np.asarray(shown), QUALITY)
        if len(url) > self.left:
            return None
        self.left -= len(url)
        return url

    def image(self, index: int) -> np.ndarray | None:
        """Return a stored image; None if there is none, or if its file cannot be read, which is logged."""
        if self.load is None:
            return None
        try:
            return np.ascontiguousarray(as_rgb(self.load(index)))
        except DataError as error:
            logger.warning("left out of the report: %s", error)
            return None

    def embed_images(self, indices: Iterable[int]) -> dict[int, str]:
        """Return index -> data URL of images, in the given order, until there is no more room."""
        urls: dict[int, str] = {}
        for index in indices:
            if self.left <= 0:
                break
            if index in urls or (image := self.image(index)) is None:
                continue
            url = self.embed(image)
            if url is None:
                break
            urls[index] = url
        return urls
