"""What holds for any image and any tiling, found by hypothesis."""

import numpy as np
import pytest
import torch

from vitkit.apps.inference.tiles import TileResult, Tiling, predict_tiles

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

SETTINGS = hypothesis.settings(derandomize=True, deadline=None, max_examples=60, database=None)


@st.composite
def tilings(draw):
    size = draw(st.integers(16, 40))
    return Tiling(size, draw(st.integers(0, size // 2)))


SIDES = st.integers(1, 150)


@SETTINGS
@hypothesis.given(tilings(), SIDES, SIDES)
def test_an_object_no_larger_than_the_overlap_lies_in_a_tile(tiling, height, width):
    tiles = tiling.tiles(height, width)
    size = max(tiling.shared, 1)
    tops, lefts = {tile.top for tile in tiles}, {tile.left for tile in tiles}
    for length, starts in ((height, tops), (width, lefts)):
        for first in range(max(length - size + 1, 1)):
            last = min(first + size, length)
            assert any(start <= first and last <= start + tiling.size for start in starts)
    assert len(tiles) == len(tops) * len(lefts)


@SETTINGS
@hypothesis.given(tilings(), SIDES, SIDES, st.integers(0, 1000), st.integers(1, 4))
def test_a_map_from_tiles_is_that_of_the_whole_image(tiling, height, width, seed, batch_size):
    """If a tile's scores are those of the whole image, merging changes nothing."""
    scores = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (3, height, width)))
    image = scores.permute(1, 2, 0).to(torch.uint8).numpy()  # whose colors are the scores

    def predict(images):
        results = []
        for photo in images:
            tile_scores = torch.from_numpy(np.ascontiguousarray(photo)).permute(2, 0, 1).double()
            middle = tile_scores.shape[1] // 2
            rows = [range(middle), range(middle, tile_scores.shape[1])]
            parts = [(part, tile_scores[:, part.start : part.stop]) for part in rows if len(part)]
            results.append(TileResult({}, parts))
        return results

    merged = predict_tiles(image, tiling, predict, batch_size=batch_size)["semantic"]
    assert torch.equal(merged, scores.argmax(0))


@SETTINGS
@hypothesis.given(tilings(), st.integers(20, 150), st.integers(20, 150), st.integers(0, 1000))
def test_small_distant_objects_are_each_found_once(tiling, height, width, seed):
    """Objects within the overlap, far from each other: as many and the same as in the whole image."""
    rng = np.random.default_rng(seed)
    image, boxes = np.zeros((height, width, 3), np.uint8), []
    side = max(tiling.shared, 1)
    for value in range(1, 6):
        size = rng.integers(1, side + 1, 2)
        if (size >= (height, width)).any():
            continue
        top, left = rng.integers(0, height - size[0]), rng.integers(0, width - size[1])
        surroundings = image[max(top - 4, 0) : top + size[0] + 4, max(left - 4, 0) : left + size[1] + 4]
        if surroundings.any():
            continue
        image[top : top + size[0], left : left + size[1]] = value
        boxes.append((left, top, left + size[1], top + size[0]))

    def predict(images):
        return [whole_objects(photo) for photo in images]

    found = predict_tiles(image, tiling, predict)["boxes_xyxy"]
    assert sorted(map(tuple, found.int().tolist())) == sorted(boxes)


def whole_objects(photo):
    """Return what a perfect detector finds: the visible part of each object."""
    boxes = []
    for value in np.unique(photo[..., 0]):
        if value:
            rows, columns = np.nonzero(photo[..., 0] == value)
            boxes.append([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    boxes = torch.tensor(np.array(boxes, np.float32).reshape(-1, 4))
    labels = torch.zeros(len(boxes), dtype=torch.int64)
    return TileResult(dict(boxes_xyxy=boxes, scores=torch.full((len(boxes),), 0.9), labels=labels), None)
