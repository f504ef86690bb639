"""The flat arrays that readers return: frozen, shared with processes, stored, and with other classes."""

import multiprocessing
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from vitkit.data.datasets.annotation_table import AnnotationTable, image_columns
from vitkit.io.shared_memory import SharedArray, text_at


def make_table(**others):
    entries = [dict(id=7, file_name="é.png", height=3, width=4), dict(id=9, file_name="b.png", height=5, width=6)]
    boxes = np.arange(12, dtype=np.float32).reshape(3, 4)
    objects = dict(offsets=np.array([0, 2, 3]), labels=np.array([1, 0, 1]), boxes_xyxy=boxes)
    return AnnotationTable(**image_columns(entries), **objects, classes=["a", "b"], category_ids=[3, 8], **others)


def test_table_lists_images_and_cannot_be_changed():
    table = make_table()
    assert [text_at(table.file_names, table.name_offsets, k) for k in range(2)] == ["é.png", "b.png"]
    assert table.sizes.tolist() == [[3, 4], [5, 6]] and table.image_ids.dtype == table.sizes.dtype == np.int64
    with pytest.raises(FrozenInstanceError):
        table.labels = table.labels[:1]


def test_table_is_what_is_made_of_its_stored_fields():
    table = make_table(num_crowds=2)
    again = AnnotationTable(**table.to_dict())
    assert all(value is vars(again)[name] for name, value in vars(table).items()) and again.segmentations is None


def test_shared_arrays_are_shared_once():
    table = make_table().share()
    arrays = [value for value in vars(table).values() if isinstance(value, np.ndarray)]
    assert len(arrays) == 7 and all(isinstance(array, SharedArray) for array in arrays)
    assert table.share().boxes_xyxy is table.boxes_xyxy and np.array_equal(table.labels, make_table().labels)


def _sum(table, queue):
    queue.put((type(table.boxes_xyxy).__name__, float(table.boxes_xyxy[:].sum()), table.classes))


def test_started_process_maps_the_arrays_of_a_table():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_sum, args=(make_table().share(), queue))
    process.start()
    assert queue.get(timeout=60) == ("SharedArray", 66.0, ["a", "b"])
    process.join(60)


def test_objects_of_classes_that_are_left_out_leave_the_rows_of_the_others():
    spans = np.array([[0, 1], [1, 2], [2, 3]])
    table = make_table(segmentations=np.zeros(3, np.uint8), segmentation_spans=spans)
    chosen = table.with_classes(["b"], [5], np.array([-1, 0]))
    assert chosen.offsets.tolist() == [0, 1, 2] and chosen.labels.tolist() == [0, 0] and chosen.category_ids == [5]
    assert chosen.boxes_xyxy.tolist() == table.boxes_xyxy[[0, 2]].tolist()
    assert chosen.segmentation_spans.tolist() == [[0, 1], [2, 3]] and len(table.labels) == 3
    assert [column.tolist() for column in chosen.image_classes()] == [[0, 1], [0, 0]]
