import cv2
import numpy as np
import pytest
import torch
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

from vitkit.data.synthetic.shapes import ShapesDetection
from vitkit.data.synthetic.world import GROUNDS, THINGS, Scene, Shape, World, _render
from vitkit.data.transforms.annotated_image import AnnotatedImage
from vitkit.errors import ConfigError
from vitkit.registry import DATASETS

CROWDED = World(image_size=96, min_objects=5, max_objects=5, max_size=0.6)


def test_scene_depends_only_on_seed_split_and_index():
    world = World(image_size=64)
    first = world.scene(7)
    world.scene(8)
    assert np.array_equal(first.image, World(image_size=64).scene(7).image)
    for other in (world.scene(8), World(image_size=64, seed=1).scene(7), World(image_size=64, split="val").scene(7)):
        assert not np.array_equal(first.image, other.image)


def test_image_size_varies_within_its_range_and_is_known_without_drawing():
    world = World(image_size=48, max_image_size=80)
    sizes = [world.size(i) for i in range(30)]
    assert sizes == [world.scene(i).image.shape[:2] for i in range(30)]
    assert min(min(size) for size in sizes) >= 48
    assert max(max(size) for size in sizes) <= 80
    assert len(set(sizes)) > 20


def test_boxes_and_maps_agree_with_the_masks():
    for index in range(20):
        scene = CROWDED.scene(index)
        covered = scene.masks.any(axis=0)
        assert scene.masks.sum(axis=0).max() == 1
        for label, mask, (x0, y0, x1, y1) in zip(scene.labels, scene.masks, scene.boxes_xyxy):
            rows, columns = np.nonzero(mask)
            assert (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) == (x0, y0, x1, y1)
            assert (scene.semantic[mask] == label).all()
        assert (scene.semantic[~covered] == len(THINGS) + scene.ground).all()
        assert len(np.unique(scene.panoptic[~covered])) == 1


def test_segments_cover_the_whole_image():
    scene = CROWDED.scene(0)
    segments = scene.segments_info
    assert {s["id"] for s in segments} == set(np.unique(scene.panoptic).tolist())
    assert sum(s["area"] for s in segments) == scene.panoptic.size
    assert [s["category_id"] for s in segments] == [*(scene.labels + 1), len(THINGS) + scene.ground + 1]


def test_no_shape_is_mostly_hidden():
    for index in range(50):
        scene = CROWDED.scene(index)
        for shape, mask in zip(scene.shapes, scene.masks):
            assert mask.sum() >= 0.4 * shape.mask(96, 96)[1].sum()


def test_a_mask_covers_the_pixels_that_the_shape_changes():
    ground, backdrop, grain, shapes = World(image_size=96)._layout(1)
    scene, empty = _render(ground, backdrop, grain, shapes), _render(ground, backdrop, grain, [])
    changed = (scene.image != empty.image).any(axis=2)
    assert changed.sum() > 50
    # Soft edges reach one pixel further.
    assert not changed[cv2.dilate(scene.masks.any(axis=0).view(np.uint8), np.ones((3, 3))) == 0].any()


def test_all_classes_and_grounds_occur_about_equally():
    scenes = [World(image_size=32).scene(i) for i in range(400)]
    things = np.bincount(np.concatenate([scene.labels for scene in scenes]), minlength=len(THINGS))
    grounds = np.bincount([scene.ground for scene in scenes], minlength=len(GROUNDS))
    assert things.min() > 0.7 * things.mean()
    assert grounds.min() > 0.7 * grounds.mean()


def scene_of(shapes: list[Shape]) -> Scene:
    empty = np.zeros((4, 4), np.int32)
    return Scene(empty, empty, tuple(shapes), np.zeros((len(shapes), 4), np.float32), ground=1)


def test_caption_lists_shapes_from_left_to_right():
    def shape(label, color, x, y):
        return Shape(label=label, color=color, rgb=(0, 0, 0), x=x, y=y, radius=5, angle=0)

    ring, star, square = shape(4, "red", 60, 50), shape(3, "orange", 20, 20), shape(1, "blue", 30, 60)
    expected = "an orange star above a blue square left of a red ring on a striped ground"
    assert scene_of([ring, star, square]).caption == expected
    assert scene_of([ring]).caption == "a red ring on a striped ground"
    assert scene_of([]).caption == "a striped ground"


def test_dataset_ground_truth_equals_its_samples():
    dataset = ShapesDetection(12, image_size=64, max_image_size=90, split="val", masks=True)
    truth = COCO()
    truth.dataset = dataset.ground_truth()
    truth.createIndex()
    assert [c["name"] for c in truth.loadCats(dataset.category_ids)] == dataset.classes
    for index, image_id in enumerate(dataset.image_ids):
        sample = dataset[index]
        target = sample["target"]
        height, width = sample["image"].shape[1:]
        annotations = truth.imgToAnns[image_id]
        assert target["image_id"] == image_id
        assert target["image_size"] == target["original_size"] == (height, width)
        assert (truth.imgs[image_id]["height"], truth.imgs[image_id]["width"]) == (height, width)
        assert [dataset.category_ids[label] for label in target["labels"]] == [a["category_id"] for a in annotations]
        for annotation, (cx, cy, w, h), mask in zip(annotations, target["boxes_cxcywh"].tolist(), target["masks"]):
            box = [(cx - w / 2) * width, (cy - h / 2) * height, w * width, h * height]
            assert annotation["bbox"] == pytest.approx(box, abs=1e-3)
            assert np.array_equal(truth.annToMask(annotation), mask.numpy())
            assert annotation["area"] == mask.sum()
            assert coco_mask.toBbox(truth.annToRLE(annotation)).tolist() == annotation["bbox"]
    assert dataset.aspect_ratios() == pytest.approx([i["width"] / i["height"] for i in truth.dataset["images"]])


def test_dataset_is_built_from_a_config_and_iteration_ends():
    dataset = DATASETS.build({"type": "ShapesDetection", "num_images": 3, "image_size": 32})
    assert len(list(dataset)) == len(dataset) == 3
    assert dataset[0]["image"].dtype == torch.uint8
    assert "masks" not in dataset[0]["target"]
    assert np.array_equal(dataset.load_image(1), dataset[1]["image"].permute(1, 2, 0).numpy())
    with pytest.raises(IndexError):
        dataset[3]


def test_dataset_passes_image_and_seed_to_its_transforms():
    def keep_first(sample, *, seed=None):
        assert seed == 11
        image, boxes_xyxy, labels, masks = sample[:4]
        return AnnotatedImage(image[:, ::2], boxes_xyxy[:1] * (0.5, 1, 0.5, 1), labels[:1], masks[:1, :, ::2])

    plain = ShapesDetection(4, image_size=64, min_objects=2, masks=True)
    dataset = ShapesDetection(4, image_size=64, min_objects=2, masks=True, transforms=keep_first)
    target, before = dataset[(2, 11)]["target"], plain[2]["target"]
    assert target["image_size"] == (64, 32)
    assert target["original_size"] == (64, 64)
    assert torch.allclose(target["boxes_cxcywh"], before["boxes_cxcywh"][:1])
    assert target["masks"].shape == (1, 64, 32)


def test_an_image_without_objects_has_empty_targets():
    dataset = ShapesDetection(2, image_size=32, min_objects=0, max_objects=0, masks=True)
    target = dataset[0]["target"]
    assert target["labels"].shape == (0,)
    assert target["boxes_cxcywh"].shape == (0, 4)
    assert target["masks"].shape == (0, 32, 32)
    assert dataset.ground_truth()["annotations"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_images": 0}, "num_images: got 0"),
        ({"num_images": 1, "split": "valid"}, "Did you mean 'val'"),
        ({"num_images": 1, "image_size": 8}, "image_size: got 8"),
        ({"num_images": 1, "image_size": 64, "max_image_size": 32}, "max_image_size 32"),
        ({"num_images": 1, "min_objects": 5}, "max_objects: got 4 with min_objects 5"),
        ({"num_images": 1, "min_size": 0.5}, "max_size: got 0.45 with min_size 0.5"),
    ],
)
def test_a_wrong_setting_is_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        DATASETS.build("ShapesDetection", **arguments)


def test_pairs_are_the_classes_and_absent_ones_are_in_no_image():
    pairs = ["red star", "blue ring", "red ring", "blue star"]
    dataset = ShapesDetection(60, image_size=32, pairs=pairs, absent=["red star"])
    assert dataset.classes == pairs
    drawn = set()
    for index in range(len(dataset)):
        labels = dataset.load_annotated(index).labels
        shapes = dataset.scene(index).shapes
        assert [pairs[label] for label in labels] == [f"{shape.color} {THINGS[shape.label]}" for shape in shapes]
        drawn |= {pairs[label] for label in labels}
    assert drawn == {"blue ring", "red ring", "blue star"}
    truth = dataset.ground_truth()
    assert [(c["id"], c["name"]) for c in truth["categories"]] == list(enumerate(pairs, 1))
    first = [a["category_id"] - 1 for a in truth["annotations"] if a["image_id"] == 1]
    assert first == dataset.load_annotated(0).labels.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": ["red stra"]}, "pairs: got 'red stra'. Did you mean 'red star'"),
        ({"pairs": ["red star"], "absent": ["blue ring"]}, "absent: 'blue ring' is not one of the pairs"),
        ({"absent": ["red star"]}, "absent: 'red star' is not one of the pairs"),
        ({"pairs": ["red star"], "absent": ["red star"]}, "pairs: none are left to draw"),
    ],
)
def test_pairs_that_cannot_be_drawn_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ShapesDetection(4, **options)
