"""Panoptic maps: from segments to masks for each task, and error messages for maps and lists that do not match."""

import copy
import json
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.datasets.panoptic import CocoPanoptic
from vitkit.data.datasets.panoptic_segments import Task
from vitkit.data.synthetic.shapes import ShapesDetection, ShapesSegmentation
from vitkit.errors import ConfigError, DataError

CAT, SKY, PAIR = 70000, 258, 5
IDS = np.array([[CAT, CAT, SKY, SKY], [CAT, 0, SKY, PAIR], [0, 0, PAIR, PAIR]])
CONTENT = {
    "images": [
        {"id": 9, "file_name": "b.png", "width": 4, "height": 3},
        {"id": 4, "file_name": "a.png", "width": 4, "height": 3},
    ],
    "annotations": [
        {"image_id": 4, "file_name": "a_map.png", "segments_info": []},
        {
            "image_id": 9,
            "file_name": "b_map.png",
            "segments_info": [
                {"id": SKY, "category_id": 120, "iscrowd": 0},
                {"id": CAT, "category_id": 17, "iscrowd": 0},
                {"id": PAIR, "category_id": 17, "iscrowd": 1},
            ],
        },
    ],
    "categories": [
        {"id": 120, "name": "sky", "isthing": 0},
        {"id": 17, "name": "cat", "isthing": 1},
        {"id": 30, "name": "sea", "isthing": 0},
    ],
}


def save_map(path, ids):
    Image.fromarray(np.stack([ids & 255, ids >> 8 & 255, ids >> 16], axis=2).astype(np.uint8)).save(path)


def load(folder, content=CONTENT, ids=IDS, **arguments):
    for name, map_ids in (("a", np.zeros((3, 4), np.int64)), ("b", ids)):
        Image.new("RGB", (4, 3)).save(folder / f"{name}.png")
        save_map(folder / f"{name}_map.png", map_ids)
    (folder / "panoptic.json").write_text(json.dumps(content))
    return CocoPanoptic(str(folder), str(folder), str(folder / "panoptic.json"), **arguments)


def changed(change):
    content = copy.deepcopy(CONTENT)
    change(content)
    return content


def test_panoptic_samples_contain_every_segment_except_crowds(tmp_path):
    dataset = load(tmp_path)
    assert dataset.classes == ["cat", "sea", "sky"] and dataset.category_ids == [17, 30, 120]
    assert dataset.things == [True, False, False] and dataset.image_ids.tolist() == [9, 4]
    target = dataset[0]["target"]
    assert target["labels"].tolist() == [2, 0] and target["labels"].dtype == torch.int64
    assert torch.equal(target["masks"], torch.from_numpy(np.stack([IDS == SKY, IDS == CAT])))
    expected = torch.tensor([[0.75, 1 / 3, 0.5, 2 / 3], [0.25, 1 / 3, 0.5, 2 / 3]])
    torch.testing.assert_close(target["boxes_cxcywh"], expected)
    assert target["image_id"] == 9


def test_ground_truth_for_evaluation_contains_crowds(tmp_path):
    ids, segments = load(tmp_path).load_panoptic(0)
    assert np.array_equal(ids, IDS) and ids.dtype == np.int32
    assert segments == [
        {"id": SKY, "label": 2, "iscrowd": False},
        {"id": CAT, "label": 0, "iscrowd": False},
        {"id": PAIR, "label": 0, "iscrowd": True},
    ]


def test_an_image_without_segments_has_no_masks(tmp_path, caplog):
    with caplog.at_level("INFO", "vitkit"):
        dataset = load(tmp_path, transforms=dict(type="LargeScaleJitter", size=8))
    assert "2 segments of 3 classes for task 'panoptic'; 1 crowd segment, 1 image without a segment" in caplog.text
    assert dataset[1]["target"]["masks"].shape == (0, 8, 8)


def test_instance_samples_contain_only_things(tmp_path):
    dataset = load(tmp_path, task="instance")
    assert dataset.classes == ["cat"] and dataset.category_ids == [17]
    assert torch.equal(dataset[0]["target"]["masks"], torch.from_numpy((IDS == CAT)[None]))
    truth = dataset.ground_truth()["annotations"]
    assert [(a["category_id"], a["area"], a["bbox"], a["iscrowd"]) for a in truth] == [
        (17, 3, [0, 0, 2, 2], 0),
        (17, 3, [2, 1, 2, 2], 1),
    ]


def test_semantic_samples_hold_one_mask_per_class_with_crowds(tmp_path):
    dataset = load(tmp_path, task="semantic")
    assert dataset.load_semantic(0).tolist() == [[0, 0, 2, 2], [0, 255, 2, 0], [255, 255, 0, 0]]
    target = dataset[0]["target"]
    assert target["labels"].tolist() == [0, 2]
    assert target["masks"][0].sum() == 6


def test_segments_that_a_crop_cuts_off_are_not_in_the_sample(tmp_path):
    crop = dict(type="ComposedTransforms", transforms=[dict(type="Crop", x_min=2, y_min=0, x_max=4, y_max=2)])
    target = load(tmp_path, transforms=crop)[0]["target"]
    assert target["labels"].tolist() == [2] and target["masks"].flatten(1).any(1).all()


def test_more_than_255_segments_are_read(tmp_path):
    ids = np.arange(1, 401).reshape(20, 20)
    content = changed(lambda c: c["images"][0].update(width=20, height=20))
    content["annotations"][1]["segments_info"] = [{"id": i, "category_id": 17} for i in range(1, 401)]
    dataset = load(tmp_path, content, ids, transforms=dict(type="EvalResize", short_side=40, max_size=40))
    Image.new("RGB", (20, 20)).save(tmp_path / "b.png")
    target = dataset[0]["target"]
    assert target["masks"].shape == (400, 40, 40) and (target["masks"].flatten(1).sum(1) == 4).all()


def test_ids_of_the_map_and_of_the_list_must_be_the_same(tmp_path):
    ids = IDS.copy()
    ids[2, :2] = 77
    with pytest.raises(
        DataError, match=r"b_map.png': segment id 77 \(2 pixels\) is not in 'panoptic.json'\. The map belongs"
    ):
        load(tmp_path, ids=ids)[0]
    ids[ids == CAT] = ids[ids == SKY] = ids[ids == 77] = 0
    with pytest.raises(
        DataError, match=r"no pixel has segment id 258, which 'panoptic.json' lists for it, and 1 more such ids"
    ):
        load(tmp_path, ids=ids)[0]


def test_a_map_or_image_of_another_size_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"map '.*b_map.png' is 3x3 pixels \(width x height\) and image 9 is annotated"):
        load(tmp_path, ids=IDS[:, :3])[0]
    dataset = load(tmp_path)
    Image.new("RGB", (5, 3)).save(tmp_path / "b.png")
    with pytest.raises(DataError, match=r"image '.*b.png' is 5x3 pixels"):
        dataset[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("categories"), "no list 'categories'"),
        (lambda c: c["annotations"][0].pop("segments_info"), r"has no 'segments_info'; .* Is it a file of boxes"),
        (lambda c: c["annotations"].pop(0), "lacks an annotation for 1 of 2 images, such as image 4"),
        (
            lambda c: c["annotations"][0].update(image_id=5),
            "annotation 0 of image 5 has image_id 5; expected one of the 2 ids",
        ),
        (lambda c: c["annotations"][0].update(image_id=9), "image_id 9; expected an id that no earlier entry has"),
        (lambda c: c["annotations"][1]["segments_info"][0].update(category_id=1), "segment 258 has category_id 1"),
        (
            lambda c: c["annotations"][1]["segments_info"][0].update(id=CAT),
            "segment 70000 has id 70000; expected an id that no other",
        ),
        (lambda c: c["annotations"][1]["segments_info"][0].update(id=True), "segment True has id True; expected 1 to"),
        (lambda c: c["annotations"][1]["segments_info"][0].update(iscrowd=None), "segment 258 has iscrowd None"),
        (
            lambda c: c["annotations"][1]["segments_info"][0].update(area="9"),
            "segment 258 has area '9'; expected a fin",
        ),
        (lambda c: c["annotations"][1].update(segments_info=[7]), r"segments_info \[7\]; expected only objects"),
        (lambda c: c["categories"][0].update(isthing="0"), r"category 120 \('sky'\) has isthing '0'; expected 0 or 1"),
        (lambda c: c["annotations"][1]["segments_info"][0].update(id=0), "segment 0 has id 0; expected 1 to 16777215"),
    ],
)
def test_wrong_files_are_errors(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        load(tmp_path, changed(change))


def test_unknown_task_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="task: got 'stuff'; expected 'panoptic', 'instance', 'semantic'"):
        load(tmp_path, task="stuff")


def test_official_sample_has_the_segments_of_its_annotations(shared_data):
    folder = shared_data / "panoptic_sample"
    listed = json.loads((folder / "annotations" / "panoptic_examples.json").read_text())
    dataset = CocoPanoptic(
        str(folder / "images"),
        str(folder / "annotations" / "panoptic_examples"),
        str(folder / "annotations" / "panoptic_examples.json"),
    )
    areas = {(a["image_id"], s["id"]): s["area"] for a in listed["annotations"] for s in a["segments_info"]}
    assert len(areas) == 50 and sum(dataset.things) == 80 and len(dataset.classes) == 133
    for index, image_id in enumerate(dataset.image_ids.tolist()):
        ids, segments = dataset.load_panoptic(index)
        assert {(image_id, s["id"]): int((ids == s["id"]).sum()) for s in segments} == {
            key: area for key, area in areas.items() if key[0] == image_id
        }


def test_instances_of_panoptic_maps_equal_the_instance_file(shared_data):
    folder = shared_data / "coco_panoptic"
    from_maps = CocoPanoptic(
        str(folder / "val2017"),
        str(folder / "annotations" / "panoptic_val2017"),
        str(folder / "annotations" / "panoptic_val2017.json"),
        task="instance",
    )
    from_file = CocoDetection(
        str(folder / "val2017"), str(folder / "annotations" / "instances_val2017.json"), masks=True
    )
    assert from_maps.classes == from_file.classes
    position = {image_id: k for k, image_id in enumerate(from_file.image_ids.tolist())}
    for index in range(4):
        ours = from_maps[index]["target"]
        theirs = from_file[position[ours["image_id"]]]["target"]
        keys = [
            sorted((int(label), mask.numpy().tobytes()) for label, mask in zip(t["labels"], t["masks"]))
            for t in (ours, theirs)
        ]
        assert keys[0] == keys[1]


@pytest.mark.parametrize("task", get_args(Task))
def test_synthetic_world_has_the_same_masks_for_every_task(task):
    dataset = ShapesSegmentation(6, image_size=48, task=task)
    detection = ShapesDetection(6, image_size=48, masks=True)
    for index in range(6):
        target, things = dataset[index]["target"], detection[index]["target"]
        assert target["masks"].sum(0).max() == 1 and target["image_id"] == index + 1
        is_thing = target["labels"] < 6
        if task == "instance":
            assert torch.equal(target["labels"], things["labels"]) and torch.equal(target["masks"], things["masks"])
            torch.testing.assert_close(target["boxes_cxcywh"], things["boxes_cxcywh"])
        else:
            assert target["masks"].any(0).all()  # the ground is the rest
            assert torch.equal(target["masks"][is_thing].any(0), things["masks"].any(0))
            assert (~is_thing).sum() == 1
        if task == "semantic":
            assert len(set(target["labels"].tolist())) == len(target["labels"])
            assert np.array_equal(dataset.load_semantic(index), dataset.world.scene(index).semantic)
    assert len(dataset.classes) == (6 if task == "instance" else 10)


def test_masks_that_a_resize_empties_are_left_out():
    shrink = dict(type="EvalResize", short_side=2, max_size=2)
    for dataset in (
        ShapesDetection(8, image_size=64, max_objects=4, masks=True, transforms=shrink),
        ShapesSegmentation(8, image_size=64, max_objects=4, transforms=shrink),
    ):
        targets = [dataset[index]["target"] for index in range(8)]
        assert all(target["masks"].flatten(1).any(1).all() for target in targets)
        assert all(len(t["labels"]) == len(t["masks"]) == len(t["boxes_cxcywh"]) for t in targets)
    assert sum(len(target["labels"]) for target in targets) < 8 * 3


def test_only_the_first_images_are_kept(tmp_path):
    dataset = load(tmp_path, first=1)
    assert dataset.image_ids.tolist() == [9] and dataset.num_objects == 2
    assert dataset[0]["target"]["image_id"] == 9 and [i["id"] for i in dataset.ground_truth()["images"]] == [9]
