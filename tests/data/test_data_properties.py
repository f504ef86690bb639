"""What holds for any masks, annotations and images, found by hypothesis."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco_mask

from vitkit.apps.datasets.writing import WRITERS, join_polygons, outlines
from vitkit.data.formats import read_annotations
from vitkit.data.formats.annotated import AnnotatedImages
from vitkit.data.loading.samplers import TrainBatches
from vitkit.evaluation.coco import masks_to_rle
from vitkit.io.segmentations import decode_segmentation, describe_wrong_segmentation, encode_segmentation
from vitkit.ops.masks import boxes_around_masks
from vitkit.structures import Batch

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


def some(max_examples):
    return hypothesis.settings(derandomize=True, deadline=None, max_examples=max_examples, database=None)


@st.composite
def masks(draw):
    """Blocks of random pixels, of which hypothesis also finds empty, full and single-pixel ones."""
    height, width = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    bits = draw(st.lists(st.booleans(), min_size=height * width, max_size=height * width))
    return np.array(bits, np.uint8).reshape(height, width)


def runs_of(mask):
    flat = mask.T.ravel()
    changes = np.flatnonzero(np.diff(flat)) + 1
    counts = np.diff([0, *changes, flat.size]).tolist()
    return {"size": list(mask.shape), "counts": [0, *counts] if flat[0] else counts}


@some(150)
@hypothesis.given(masks())
def test_masks_survive_run_lengths(mask):
    height, width = mask.shape
    (compressed,) = masks_to_rle(torch.from_numpy(mask.astype(bool))[None])
    for segmentation in (runs_of(mask), compressed):
        assert describe_wrong_segmentation(segmentation, height, width) is None
        assert np.array_equal(decode_segmentation(segmentation, height, width), mask)
    assert encode_segmentation(runs_of(mask), height, width)["counts"].decode() == compressed["counts"]
    x, y, box_width, box_height = coco_mask.toBbox(compressed).tolist()
    box = boxes_around_masks(torch.from_numpy(mask.astype(bool))[None])[0].tolist()
    if mask.any():
        assert box == [x, y, x + box_width, y + box_height]
    else:
        assert box == [0, 0, 0, 0]


@some(150)
@hypothesis.given(masks())
def test_masks_survive_outlines(mask):
    hypothesis.assume(mask.any())
    height, width = mask.shape
    again = decode_segmentation([join_polygons(outlines(runs_of(mask), height, width))], height, width)
    assert np.array_equal(again, mask)


@st.composite
def datasets(draw):
    """Rows of (image, class, box) with edges on whole or half pixels, and which images are for validation."""
    num_images = draw(st.integers(1, 4))
    classes = draw(st.lists(st.sampled_from(["cat", "dog", "a b", "é", "7"]), min_size=1, max_size=3, unique=True))
    box = st.tuples(st.integers(0, 60), st.integers(0, 40), st.integers(2, 60), st.integers(2, 40))
    row = st.tuples(st.integers(0, num_images - 1), st.sampled_from(classes), box)
    rows = draw(st.lists(row, min_size=1, max_size=8, unique=True))
    is_val = draw(st.lists(st.booleans(), min_size=num_images, max_size=num_images))
    return num_images, rows, is_val


@some(12)
@hypothesis.given(datasets(), st.permutations(sorted(WRITERS.keys() - {"odvg"})))  # ODVG names no splits
def test_boxes_survive_a_detour_via_every_format_in_any_order(dataset, order):
    num_images, rows, is_val = dataset
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "images").mkdir()
        data = AnnotatedImages("coco", root, root / "images")
        for i in range(num_images):
            Image.new("RGB", (70, 50)).save(root / "images" / f"{i}.png")
            data.add_image(f"{i}.png", 70, 50, "val" if is_val[i] else "train")
        for i, name, (x, y, width, height) in rows:
            x, y = x / 2, y / 2
            data.add_object(i + 1, name, [x, y, width / 2, height / 2])
        expected = described(data)
        for step, to in enumerate(order):
            lost = {}
            WRITERS[to](data, root / f"{step}", lost)
            assert lost == {}
            data = read_annotations(root / f"{step}", data.folder if to == "coco" else None, format=to)
            assert described(data) == expected, to


def described(data):
    """Return each split's objects by the image's stem, class and box."""
    images = {image["id"]: Path(image["file_name"]).stem for image in data.images}
    names = {category["id"]: category["name"] for category in data.categories}
    split_of = {image_id: split for split, ids in data.splits.items() for image_id in ids}
    return sorted(
        (split_of[a["image_id"]], images[a["image_id"]], names[a["category_id"]], tuple(a["bbox"]))
        for a in data.annotations
    )


@some(40)
@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
    st.sampled_from([(3, torch.uint8), (1, torch.uint16), (6, torch.uint16)]),
)
def test_images_survive_collation(sizes, kind):
    channels, dtype = kind
    images = [torch.full((channels, *size), k + 1).to(dtype) for k, size in enumerate(sizes)]
    batch = Batch.collate([{"image": image, "target": {"k": k}} for k, image in enumerate(images)])
    padding = batch.inputs["padding_mask"]
    for k, (image, size) in enumerate(zip(images, sizes)):
        row = batch.inputs["images"][k]
        assert torch.equal(row[:, : size[0], : size[1]], image) and batch.targets[k] == {"k": k}
        inside = torch.zeros(padding.shape[1:], dtype=torch.bool)
        inside[: size[0], : size[1]] = True
        assert torch.equal(padding[k], ~inside)
        assert not row.long()[:, ~inside].any()


@some(60)
@hypothesis.given(data=st.data())
def test_training_batches_resume_at_any_batch_on_any_rank(data):
    num_images, batch_size = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 5))
    world_size, epoch = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))
    groups = np.array(data.draw(st.lists(st.integers(0, 1), min_size=num_images, max_size=num_images)))
    seen = []
    for rank in range(world_size):
        options = dict(batch_size=batch_size, seed=7, groups=groups, rank=rank, world_size=world_size)
        whole = TrainBatches(num_images, **options)
        whole.set_position(epoch)
        expected = list(whole)
        start = data.draw(st.integers(0, len(whole)))
        resumed = TrainBatches(num_images, **options)
        resumed.set_position(epoch, start)
        assert list(resumed) == expected[start:] and len(expected) == len(whole)
        for batch in expected:
            assert len({int(groups[index]) for index, _ in batch}) == 1 and len(batch) == batch_size
            seen += batch
    assert {index for index, _ in seen} == set(range(num_images))
    assert len(set(seen)) == len(seen)  # a repeated image has other random numbers
