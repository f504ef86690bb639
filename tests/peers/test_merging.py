"""Duplicates, tiles and their merging beside ensemble-boxes (MIT) and SAHI (MIT)."""

import numpy as np
import pytest
import torch

from vitkit.apps.inference.merging import ObjectMerger
from vitkit.apps.inference.tiling import TileResult, Tiling
from vitkit.ops.boxes import box_iou, duplicates

pytestmark = pytest.mark.peers


def random_boxes(seed, count, *, size=200.0, num_classes=3):
    """Return boxes (N, 4) xyxy of clusters, labels and scores without ties, best first."""
    rng = np.random.default_rng(seed)
    centers = rng.uniform(20, size - 20, (max(1, count // 4), 2))
    chosen = centers[rng.integers(len(centers), size=count)] + rng.normal(0, 4, (count, 2))
    sides = rng.uniform(10, 40, (count, 2))
    boxes = np.concatenate([chosen - sides / 2, chosen + sides / 2], axis=1).clip(0, size)
    scores = np.sort(rng.random(count))[::-1]
    return boxes, rng.integers(num_classes, size=count), scores


def sequential(package, boxes, labels, scores, iou):
    """Return the indices that a package's sequential NMS keeps."""
    if package == "ensemble_boxes":
        module = pytest.importorskip("ensemble_boxes")
        _, kept, _ = module.nms([boxes / 200], [scores], [labels], iou_thr=iou)
        return {int(np.abs(scores - score).argmin()) for score in kept}
    combine = pytest.importorskip("sahi.postprocess.combine")
    rows = np.column_stack([boxes, scores, labels])
    return set(combine.batched_nms(rows, match_metric="IOU", match_threshold=iou))


@pytest.mark.parametrize("package", ["ensemble_boxes", "sahi"])
@pytest.mark.parametrize("iou", [0.3, 0.5, 0.8])
@pytest.mark.parametrize(("seed", "count"), [(0, 0), (1, 1), (2, 40), (3, 200), (4, 200)])
def test_duplicates_are_those_of_sequential_nms_and_what_these_overlap(seed, count, iou, package):
    """Fast NMS lets a duplicate suppress others (Bolya et al. 2019, section 3.3); sequential NMS does not."""
    boxes, labels, scores = random_boxes(seed, count)
    if not count:
        assert duplicates(torch.zeros(1, 0, 4), torch.zeros(1, 0, dtype=torch.int64), iou=iou).shape == (1, 0)
        return
    tensor = torch.from_numpy(boxes)
    ours = duplicates(tensor[None], torch.from_numpy(labels)[None], iou=iou)[0].numpy()
    kept = sequential(package, boxes, labels, scores, iou)
    theirs = np.array([k not in kept for k in range(count)])
    assert not (theirs & ~ours).any()  # what sequential NMS suppresses is a duplicate
    overlaps = (box_iou(tensor[:, None], tensor[None]).numpy() > iou) & (labels[:, None] == labels)
    for k in np.flatnonzero(ours & ~theirs):  # the others overlap better boxes, all of which are suppressed themselves
        better = np.flatnonzero(overlaps[k, :k])
        assert len(better) and theirs[better].all()
    if count < 2:
        assert not ours.any()


@pytest.mark.parametrize(("height", "width"), [(200, 300), (512, 512), (517, 1200), (1500, 700)])
def test_there_are_as_many_tiles_as_sahis_slices(height, width):
    """SAHI moves the last slice of a row back to the border; vitkit spaces all evenly, so that no overlap is large."""
    slicing = pytest.importorskip("sahi.slicing")
    slices = slicing.get_slice_bboxes(
        height, width, slice_height=256, slice_width=256, overlap_height_ratio=0.25, overlap_width_ratio=0.25
    )
    tiles = Tiling(256, overlap=64).tiles(height, width)
    assert len(tiles) == len(slices)
    covered = np.zeros((height, width), bool)
    for tile in tiles:
        assert (tile.bottom - tile.top, tile.right - tile.left) == (min(256, height), min(256, width))
        covered[tile.rows, tile.columns] = True
    assert covered.all()
    starts = sorted({tile.left for tile in tiles})
    assert np.ptp(np.diff(starts)) <= 1 if len(starts) > 1 else starts == [0]
    assert min(x0 for x0, *_ in slices) == 0 and max(x1 for _, _, x1, _ in slices) == width


def merged_by_sahi(tiles, predictions):
    """Return the boxes, labels and scores that SAHI makes of the tiles' predictions by its default method."""
    combine = pytest.importorskip("sahi.postprocess.combine")
    from sahi.prediction import ObjectPrediction

    found = []
    for tile, fields in zip(tiles, predictions):
        for box, label, score in zip(fields["boxes_xyxy"], fields["labels"], fields["scores"]):
            moved = box + torch.tensor([tile.left, tile.top] * 2)
            category = dict(category_id=int(label), category_name=str(int(label)))
            found.append(ObjectPrediction(bbox=moved.tolist(), score=float(score), **category))
    merge = combine.GreedyNMMPostprocess(match_threshold=0.5, match_metric="IOS", class_agnostic=False)
    return sorted(([*p.bbox.to_xyxy()], p.category.id, p.score.value) for p in merge(found))


def predictions_of(tiles, boxes, labels, scores):
    """Return what a perfect detector predicts in each tile: the visible parts of the objects."""
    predictions = []
    for tile in tiles:
        edges = torch.tensor([tile.left, tile.top, tile.right, tile.bottom], dtype=torch.float32)
        visible = torch.cat([boxes[:, :2].maximum(edges[:2]), boxes[:, 2:].minimum(edges[2:])], dim=1)
        seen = ((visible[:, 2:] - visible[:, :2]) > 3).all(1)
        predictions.append(
            dict(boxes_xyxy=visible[seen] - edges[:2].repeat(2), labels=labels[seen], scores=scores[seen])
        )
    return predictions


def merged_by_vitkit(size, tiles, predictions):
    merger = ObjectMerger(size)
    for tile, fields in zip(tiles, predictions):
        merger.add(tile, TileResult(fields, None))
    result = merger.result()
    return sorted(zip(*(result[key].tolist() for key in ("boxes_xyxy", "labels", "scores"))))


@pytest.mark.parametrize("seed", range(6))
def test_objects_apart_are_merged_as_by_sahi(seed):
    rng = np.random.default_rng(seed)
    size, cell = (400, 600), 50
    places = [(x, y) for x in range(0, 600, cell) for y in range(0, 400, cell)]
    boxes = []
    for k in rng.permutation(len(places))[:40]:
        corner, sides = np.array(places[k]) + rng.uniform(0, 15, 2), rng.uniform(12, 34, 2)
        boxes.append([*corner, *(corner + sides)])
    boxes = torch.tensor(np.round(boxes), dtype=torch.float32)
    labels, scores = (
        torch.from_numpy(rng.integers(3, size=40)),
        torch.from_numpy(rng.permutation(40) / 50 + 0.1).float(),
    )
    tiles = Tiling(200, overlap=60).tiles(*size)
    predictions = predictions_of(tiles, boxes, labels, scores)
    ours, theirs = merged_by_vitkit(size, tiles, predictions), merged_by_sahi(tiles, predictions)
    expected = sorted(zip(boxes.tolist(), labels.tolist(), scores.tolist()))
    assert ours == expected
    for (box, label, score), (their_box, their_label, their_score) in zip(expected, theirs, strict=True):
        assert their_box == pytest.approx(box, abs=1) and their_label == label
        assert their_score == pytest.approx(score, abs=1e-6)


def test_two_objects_of_a_class_that_cover_each_other_stay_two():
    """SAHI merges whatever covers half of a smaller box, in the same tile as well: here a child before an adult."""
    boxes = torch.tensor([[40.0, 20.0, 100.0, 160.0], [60.0, 90.0, 90.0, 160.0]])
    labels, scores = torch.zeros(2, dtype=torch.int64), torch.tensor([0.9, 0.8])
    tiles = Tiling(200, overlap=60).tiles(200, 300)
    predictions = predictions_of(tiles, boxes, labels, scores)
    assert merged_by_vitkit((200, 300), tiles, predictions) == [
        ([40, 20, 100, 160], 0, pytest.approx(0.9)),
        ([60, 90, 90, 160], 0, pytest.approx(0.8)),
    ]
    assert merged_by_sahi(tiles, predictions) == [([40, 20, 100, 160], 0, pytest.approx(0.9))]
