"""Prediction in tiles: the ground truth is painted into the image, and an oracle reads it in each tile."""

import logging
from itertools import pairwise

import numpy as np
import pytest
import torch

from vitkit.apps.inference import merging
from vitkit.apps.inference.tiles import predict_tiles
from vitkit.apps.inference.tiling import Tile, TileResult, Tiling
from vitkit.errors import ConfigError
from vitkit.evaluation.panoptic import match_segments
from vitkit.structures import PanopticMap

SIZE = (230, 310)


def painted(*boxes):
    """An image whose objects, (x0, y0, x1, y1) each, have gray values 1, 2, …"""
    image = np.zeros((*SIZE, 3), np.uint8)
    for value, (x0, y0, x1, y1) in enumerate(boxes, start=1):
        image[y0:y1, x0:x1] = value
    return image


def objects(image, *, label=lambda value: 0, score=lambda value, box: 0.9, masks=False):
    """Return what a perfect detector predicts in an image: the visible part of each object."""
    values = [value for value in np.unique(image[..., 0]).tolist() if value]
    found = torch.stack([torch.from_numpy(image[..., 0] == v) for v in values]) if values else torch.zeros(0, 1, 1) > 0
    boxes = []
    for mask in found:
        rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
        boxes.append([float(columns[0]), float(rows[0]), float(columns[-1]) + 1, float(rows[-1]) + 1])
    fields = dict(
        scores=torch.tensor([score(v, b) for v, b in zip(values, boxes)]),
        labels=torch.tensor([label(v) for v in values], dtype=torch.int64),
        boxes_xyxy=torch.tensor(boxes).reshape(-1, 4),
    )
    return TileResult(fields | ({"masks": found} if masks else {}), None)


def detect(image, size=100, overlap=30, **options):
    def predict(images):
        return [objects(photo, **options) for photo in images]

    return predict_tiles(image, Tiling(size, overlap), predict, batch_size=3)


def boxes_of(result):
    return sorted(tuple(map(int, box)) for box in result["boxes_xyxy"].tolist())


@pytest.mark.parametrize(("height", "width"), [(230, 310), (100, 1000), (99, 40), (1001, 101)])
def test_tiles_cover_the_image_and_neighbors_share_at_least_the_overlap(height, width):
    tiles = Tiling(100, 30).tiles(height, width)
    covered = np.zeros((height, width), int)
    for tile in tiles:
        assert tile.bottom - tile.top == min(100, height) and tile.right - tile.left == min(100, width)
        covered[tile.rows, tile.columns] += 1
    assert covered.min() == 1
    for starts in (sorted({t.top for t in tiles}), sorted({t.left for t in tiles})):
        assert all(100 - (b - a) >= 30 for a, b in pairwise(starts))
    # Neighbors along the shorter side are consecutive, as their scores are kept until both are added.
    order = [t[:2] if width <= height else t[1::-1] for t in tiles]
    assert order == sorted(order)


def test_the_overlap_is_a_quarter_by_default():
    assert Tiling(800).shared == 200
    assert [tile.left for tile in Tiling(800).tiles(800, 1400)] == [0, 600]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((8,), "a size of 8 pixels; expected at least 16"), ((100, 60), "an overlap of 60 pixels; expected 0 to 50")],
)
def test_invalid_tiles_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Tiling(*arguments)


@pytest.mark.parametrize(
    "box",
    [
        (60, 10, 90, 40),  # completely in one tile, cut by the next
        (95, 95, 120, 118),  # on the corner of four tiles
        (65, 20, 155, 60),  # larger than the overlap: cut by every tile
        (5, 30, 300, 80),  # across the image
        (20, 20, 290, 215),  # larger than a tile in both directions
        (0, 0, 4, 4),
        (306, 226, 310, 230),
    ],
)
@pytest.mark.parametrize("masks", [False, True])
def test_object_across_tile_borders_is_found_once_and_complete(box, masks):
    result = detect(painted(box), masks=masks)
    assert boxes_of(result) == [box] and result["labels"].tolist() == [0]
    if masks:
        assert torch.equal(result["masks"][0], torch.from_numpy(painted(box)[..., 0] == 1))


@pytest.mark.parametrize("masks", [False, True])
def test_every_object_of_a_crowd_is_found_once(masks):
    boxes = [(x, y, x + 22, y + 18) for y in range(3, 210, 19) for x in range(2, 286, 23)]
    result = detect(painted(*boxes), masks=masks)
    assert boxes_of(result) == sorted(boxes)


def test_objects_of_other_classes_at_the_same_location_are_kept():
    def predict(images):
        results = []
        for photo in images:
            fields = objects(photo).fields
            twice = {name: torch.cat((value, value)) for name, value in fields.items()}
            twice["labels"] = torch.tensor([0] * len(fields["labels"]) + [1] * len(fields["labels"]))
            results.append(TileResult(twice, None))
        return results

    result = predict_tiles(painted((60, 10, 110, 40)), Tiling(100, 30), predict)
    assert result["labels"].tolist() == [0, 1] and boxes_of(result) == [(60, 10, 110, 40)] * 2


def test_duplicates_within_a_tile_are_kept():
    def predict(images):
        result = objects(images[0])
        return [TileResult({name: torch.cat((v, v)) for name, v in result.fields.items()}, None)]

    result = predict_tiles(painted((10, 10, 30, 30)), Tiling(100, 30), predict)
    assert boxes_of(result) == [(10, 10, 30, 30)] * 2


def test_part_of_an_object_in_a_tile_corner_is_not_a_second_object():
    # The second tile begins at 70 (the image is 170 wide): it sees 2 columns of the object, and predicts 5.
    image = painted((40, 20, 72, 50))[:100, :170]

    def predict(images):
        results = []
        for photo in images:
            result = objects(photo)
            boxes = result.fields["boxes_xyxy"]
            cut = (boxes[:, 0] == 0) & (boxes[:, 2] == 2)
            boxes[cut, 2] = 5
            results.append(result)
        return results

    result = predict_tiles(image, Tiling(100, 30), predict)
    assert boxes_of(result) == [(40, 20, 72, 50)]


def test_uncertain_box_of_another_tile_does_not_replace_a_confident_one():
    image = painted((65, 20, 155, 60))[:100]

    def predict(images):
        results = []
        for photo in images:
            fields = objects(photo).fields
            doubtful = fields["boxes_xyxy"] + torch.tensor([-1.0, 2.0, 1.0, -2.0])
            fields = {
                "scores": torch.cat((fields["scores"], fields["scores"] * 0.2)),
                "labels": torch.cat((fields["labels"], fields["labels"])),
                "boxes_xyxy": torch.cat((fields["boxes_xyxy"], doubtful)),
            }
            results.append(TileResult(fields, None))
        return results

    result = predict_tiles(image, Tiling(100, 30), predict)
    sure = result["boxes_xyxy"][result["scores"] > 0.5]
    assert sure.tolist() == [[65.0, 20.0, 155.0, 60.0]]


def test_best_score_and_best_complete_box_are_kept():
    # Tiles begin at 0, 70 and 140; the first two both contain the full object.
    seen = []

    def score(value, box):
        seen.append(box)
        return 0.6 if box[0] > 50 else 0.8

    result = detect(painted((75, 10, 95, 30))[:100, :240], score=score)
    assert len(seen) == 2 and result["scores"].tolist() == pytest.approx([0.8])


def test_masks_that_do_not_fit_in_memory_are_left_out_and_reported(monkeypatch, caplog):
    monkeypatch.setattr(merging, "MASK_BYTES", 2 * SIZE[0] * SIZE[1])
    boxes = [(10, 10, 20, 20), (50, 50, 60, 60), (200, 200, 220, 220)]
    with caplog.at_level(logging.WARNING, logger="vitkit"):
        result = detect(painted(*boxes), masks=True, score=lambda value, box: 0.2 * value)
    assert boxes_of(result) == boxes[1:]
    assert "of 3 objects the 2 with the highest scores are kept, down to 0.40" in caplog.text


def test_tiles_without_objects_give_no_objects():
    result = detect(painted(), masks=True)
    assert result["boxes_xyxy"].shape == (0, 4) and result["masks"].shape == (0, *SIZE)


@pytest.mark.parametrize("size", [SIZE, SIZE[::-1]])
def test_scores_of_pixels_are_averaged_over_tiles(size):
    random = np.random.default_rng(0)
    image = np.zeros((*size, 3), np.uint8)
    tiles = Tiling(100, 30).tiles(*size)
    scores = [torch.from_numpy(random.random((4, 100, 100), dtype=np.float32)) for _ in tiles]
    sums, counts = torch.zeros(4, *size), torch.zeros(size)
    for tile, part in zip(tiles, scores):
        sums[:, tile.rows, tile.columns] += part
        counts[tile.rows, tile.columns] += 1
    left = iter(scores)

    def predict(images):
        results = []
        for _ in images:
            part = next(left)
            bands = [(range(0, 41), part[:, :41]), (range(41, 100), part[:, 41:])]
            results.append(TileResult({}, bands))
        return results

    result = predict_tiles(image, Tiling(100, 30), predict)
    assert torch.equal(result["semantic"], (sums / counts).argmax(0))


def test_scores_are_kept_only_where_tiles_still_overlap():
    tiles = Tiling(100, 30).tiles(2000, 100)
    merger = merging.MapMerger((2000, 100), tiles)
    most = 0
    for tile in tiles:
        merger.add(tile, TileResult({}, [(range(100), torch.ones(4, 100, 100))]))
        most = max(most, sum(part.numel() for part in merger.sums.values()))
    assert most == 4 * 33 * 100 and not merger.sums  # 29 tiles, spread evenly, share 32 or 33 rows


def panoptic_oracle(truth, labels, things):
    """Return a function that reads segments in a tile, with different ids in each tile."""
    random = np.random.default_rng(0)

    def predict(images):
        results = []
        for photo in images:
            values = np.unique(photo[..., 0])
            numbers = random.permutation(len(values)) + 1
            ids = numbers[np.searchsorted(values, photo[..., 0])].astype(np.int32)
            segments = [
                dict(id=int(n), label=labels[v], score=0.5 + v / 100, is_thing=things[labels[v]])
                for n, v in zip(numbers, values.tolist())
            ]
            results.append(TileResult(dict(panoptic=torch.from_numpy(ids), segments_info=segments), None))
        return results

    return predict_tiles(truth, Tiling(100, 30), predict)


def test_things_and_stuff_of_panoptic_maps_are_merged_across_borders():
    image = painted((60, 10, 130, 90), (135, 10, 160, 60), (20, 120, 300, 200), (0, 215, 310, 230))
    labels, things = {0: 2, 1: 0, 2: 0, 3: 1, 4: 3}, [True, True, False, False]
    result = panoptic_oracle(image, labels, things)
    segments = result["segments_info"]
    assert sorted(s["label"] for s in segments) == [0, 0, 1, 2, 3]
    assert [s["id"] for s in segments] == [1, 2, 3, 4, 5]
    truth = PanopticMap(
        image[..., 0].astype(np.int32) + 1, [dict(id=v + 1, label=label, iscrowd=False) for v, label in labels.items()]
    )
    matches = match_segments(truth, PanopticMap(result["panoptic"].numpy(), segments), 4)
    assert matches[:, 0].tolist() == [2.0, 1.0, 1.0, 1.0]  # the sum of the IoU: each segment is exact
    by_score = {s["label"]: s["score"] for s in segments}
    assert by_score[1] == pytest.approx(0.53)


def test_a_thing_where_four_tiles_meet_is_one_segment():
    tiles = [Tile(y, x, y + 64, x + 64) for y in (0, 40) for x in (0, 40)]
    for x in range(40, 52, 2):
        merger = merging.PanopticMerger((104, 104))
        for tile in tiles:
            ids = torch.zeros(104, 104, dtype=torch.int32)
            ids[44:62, x : x + 12] = 1
            segment = [dict(id=1, label=0, score=0.9, is_thing=True)]
            merger.add(tile, TileResult(dict(panoptic=ids[tile.rows, tile.columns], segments_info=segment), None))
        assert len(merger.result()["segments_info"]) == 1


def test_void_is_filled_by_a_segment_of_the_other_tile():
    merger = merging.PanopticMerger((50, 150))
    left, right = Tile(0, 0, 50, 100), Tile(0, 50, 50, 150)
    segment = [dict(id=1, label=0, score=0.9, is_thing=True)]
    ids = torch.zeros(50, 100, dtype=torch.int32)
    ids[10:20, 60:90] = 1
    merger.add(left, TileResult(dict(panoptic=ids, segments_info=segment), None))
    merger.add(right, TileResult(dict(panoptic=torch.zeros(50, 100, dtype=torch.int32), segments_info=[]), None))
    assert int((merger.result()["panoptic"] == 1).sum()) == 300


def test_predictions_that_cannot_be_merged_are_an_error():
    with pytest.raises(ConfigError, match="tiles: are for boxes, masks and maps, .* the model predicts class_scores"):
        predict_tiles(painted(), Tiling(100), lambda images: [TileResult({"class_scores": torch.ones(3)}, None)])


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_without_tiles_is_an_error(batch_size):
    with pytest.raises(ConfigError, match=f"batch_size={batch_size}: expected at least 1"):
        predict_tiles(painted(), Tiling(100), lambda images: [], batch_size=batch_size)
