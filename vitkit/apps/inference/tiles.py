"""Predict in tiles on images that are much larger than those a model was trained on."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vitkit.apps.inference.inputs import make_batches
from vitkit.apps.inference.merging import MapMerger, ObjectMerger, PanopticMerger
from vitkit.apps.inference.tiling import Tile, TileResult, Tiling
from vitkit.errors import ConfigError


def predict_tiles(
    image: np.ndarray,
    tiling: Tiling,
    predict: Callable[[list[np.ndarray]], Sequence[TileResult]],
    *,
    batch_size: int = 1,
) -> dict[str, Any]:
    """Predict on an image in tiles, and merge the predictions of all tiles.

    Boxes and masks that two tiles predict for one object become one (see `ObjectMerger`), the scores of pixels are
    averaged where tiles overlap (`MapMerger`), and segments that lie in several tiles are joined (`PanopticMerger`).
    Memory holds the merged result, `batch_size` tiles, and, for a semantic map, the scores of the pixels that are still
    to be averaged.

    Args:
        image: (H, W, 3) uint8 RGB.
        tiling: how to cut the image.
        predict: predicts on images (h, w, 3) of one size.
        batch_size: the number of tiles in a batch.
    Returns:
        what a model's `postprocess` returns, in pixels of the image.
    Raises:
        ConfigError: the model predicts neither boxes, nor masks, nor maps; or the batch size is below 1.
    """
    size = image.shape[:2]
    tiles = tiling.tiles(*size)
    mergers: list[ObjectMerger | MapMerger | PanopticMerger] = []
    for chosen in make_batches(tiles, batch_size):
        results = predict([image[tile.rows, tile.columns] for tile in chosen])
        for tile, result in zip(chosen, results):
            mergers = mergers or _mergers(result, tiles, size)
            for merger in mergers:
                merger.add(tile, result)
    return {name: value for merger in mergers for name, value in merger.result().items()}


def _mergers(result: TileResult, tiles: list[Tile], size: tuple[int, int]) -> list[Any]:
    """Return a merger for each kind of prediction in the result of a tile."""
    mergers = []
    if "boxes_xyxy" in result.fields:
        mergers.append(ObjectMerger(size))
    if result.class_scores is not None:
        mergers.append(MapMerger(size, tiles))
    if "panoptic" in result.fields:
        mergers.append(PanopticMerger(size))
    if not mergers:
        raise ConfigError(
            f"tiles: are for boxes, masks and maps, which can be merged; the model predicts {', '.join(result.fields)}."
        )
    return mergers
