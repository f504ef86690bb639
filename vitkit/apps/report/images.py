"""Draws and embeds the images of a page, as many as there is room for."""

import logging
from collections.abc import Iterable

import numpy as np

from vitkit.apps.report.html import jpeg_url
from vitkit.apps.report.sections import BoxOverlay, Image, Overlay, PanopticOverlay, PixelOverlay, SemanticOverlay
from vitkit.apps.visualization.boxes import draw_detections
from vitkit.apps.visualization.canvas import enlarge, to_pil
from vitkit.apps.visualization.masks import draw_panoptic, draw_semantic
from vitkit.errors import DataError
from vitkit.io.channel_files import as_rgb
from vitkit.protocols.dataset import Dataset

logger = logging.getLogger("vitkit")

LONG_SIDE = 640
QUALITY = 78
MIN_SIDE = 120
"""Shorter side, in pixels, to which smaller images are enlarged."""
_OVERLAY_SIDE = 320  # the same for overlays, as the functions of visualization do


class ImageBudget:
    """Embeds images until a page's budget for them is used up.

    Args:
        dataset: dataset of the images; it may have none.
        max_bytes: total size of all data URLs.
    """

    def __init__(self, dataset: Dataset, max_bytes: int):
        self._load = dataset.load_image if dataset.has_images else None
        self.left = max_bytes

    def embed(self, image: Image, *, long_side: int = LONG_SIDE) -> str | None:
        """Return the data URL of an image; None if it cannot be read, which is logged, or the page has no room."""
        if self.left <= 0:
            return None
        pixels = image.pixels
        if pixels is None:
            pixels = self._load_stored(image.index)
        if pixels is None:
            return None
        shown, _ = enlarge(pixels if image.overlay is None else draw_overlay(pixels, image.overlay), MIN_SIDE)
        shown.thumbnail((long_side, long_side))
        url = jpeg_url(np.asarray(shown), QUALITY)
        if len(url) > self.left:
            self.left = 0
            return None
        self.left -= len(url)
        return url

    def _load_stored(self, index: int | None) -> np.ndarray | None:
        if self._load is None or index is None:
            return None
        try:
            return np.ascontiguousarray(as_rgb(self._load(index)))
        except DataError as error:
            logger.warning("left out of the report: %s", error)
            return None

    def embed_stored(self, indices: Iterable[int]) -> dict[int, str]:
        """Return index -> data URL of images of the dataset, in the given order, until there is no more room."""
        urls: dict[int, str] = {}
        for index in dict.fromkeys(indices):
            if self._load is None or self.left <= 0:
                break
            if url := self.embed(Image(index, "")):
                urls[index] = url
        return urls


def draw_overlay(image: np.ndarray, overlay: Overlay) -> np.ndarray:
    """Return an (H, W, 3) uint8 image with an overlay; it may be larger."""
    match overlay:
        case SemanticOverlay(labels, class_names):
            return draw_semantic(image, labels, class_names)
        case PanopticOverlay(segments, class_names):
            return draw_panoptic(image, *segments, class_names)
        case BoxOverlay(boxes_xyxy, labels, scores, class_names):
            return draw_detections(image, boxes_xyxy, labels, class_names, scores)
        case PixelOverlay(chosen, hidden):
            return _highlight(image, chosen, hidden)
    raise TypeError(f"overlay: got {type(overlay).__name__}; expected one of vitkit.apps.report.sections.")


def _highlight(image: np.ndarray, chosen: np.ndarray, hidden: np.ndarray | None) -> np.ndarray:
    """Return an image in dimmed gray, with the chosen pixels in red and hidden ones in black."""
    gray = (0.7 * np.asarray(to_pil(image).convert("L")) + 40).clip(0, 255).astype(np.uint8)
    result = np.repeat(gray[:, :, None], 3, axis=2)
    result[chosen] = (0.4 * result[chosen] + 0.6 * np.array([230, 30, 40])).astype(np.uint8)
    if hidden is not None:
        result[hidden] = 0
    return np.asarray(enlarge(result, _OVERLAY_SIDE)[0])
