"""Keypoints from the file to the target: reading, their checks, and every geometric transform."""

import json
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.loading.batch_augmentation import CopyBlend, mix, squash
from vitkit.data.loading.splits import follow_keypoints, match_classes, match_record
from vitkit.data.synthetic.shapes import ShapesDetection
from vitkit.data.synthetic.world import THINGS, World
from vitkit.data.transforms.annotated_image import AnnotatedImage
from vitkit.data.transforms.grid_mosaic import GridMosaic
from vitkit.data.transforms.mosaic_mixup import MultiImageTransforms, Visibility, paste_objects
from vitkit.data.transforms.pipelines import ComposedTransforms, DETRTrainTransforms, EvalResize, LargeScaleJitter
from vitkit.errors import ConfigError, DataError
from vitkit.io.keypoints import COCO_SIGMAS, infer_flip_pairs
from vitkit.structures import KeypointInfo

NAMES = ["nose", "left_hand", "right_hand"]
BLOCK = 6
SPOTS = {"nose": (70.5, 20.5), "left_hand": (100.5, 60.5), "right_hand": (40.5, 50.5)}
"""Centers of blocks of pixels, each of a color of its own, on a black image: red, green and blue."""


def drawn(height=120, width=160):
    """Return an image with a colored block at each of three keypoints of one object."""
    image = np.zeros((height, width, 3), np.uint8)
    for channel, (x, y) in enumerate(SPOTS.values()):
        image[int(y) - BLOCK : int(y) + BLOCK + 1, int(x) - BLOCK : int(x) + BLOCK + 1, channel] = 255
    keypoints = np.array([[(*spot, 2) for spot in SPOTS.values()]], np.float32)
    box = np.array([[30, 10, 115, 75]], np.float32)
    return AnnotatedImage(
        image, box, np.array([0]), keypoints=keypoints, areas=np.array([1000], np.float32), flip_order=[0, 2, 1]
    )


def center_of(image, channel):
    """Return the (x, y) of the center of a color's pixels, from the corner; None if it shows at an edge, or not."""
    weights = image[..., channel].astype(np.float64)
    rows, columns = np.nonzero(weights > 40)
    height, width = weights.shape
    if not len(rows) or min(rows.min(), columns.min()) == 0 or rows.max() == height - 1 or columns.max() == width - 1:
        return None
    y, x = np.indices(weights.shape) + 0.5
    return np.array([(x * weights).sum(), (y * weights).sum()]) / weights.sum()


def check_points(sample, *, tolerance=0.3, colors=(0, 1, 2)):
    """Check that each keypoint lies at the center of its color's pixels; return how many were compared."""
    height, width = sample.image.shape[:2]
    compared = 0
    for object_points in sample.keypoints:
        for channel, (x, y, seen) in zip(colors, object_points.tolist()):
            center = center_of(sample.image, channel)
            if seen:
                assert 0 <= x <= width and 0 <= y <= height
            else:
                assert (x, y) == (0, 0)
            if center is not None:
                assert seen == 2
                np.testing.assert_allclose((x, y), center, atol=tolerance)
                compared += 1
    return compared


EXCHANGED = (0, 2, 1)
"""The colors of the points of a mirrored image: the left hand is what was the right one's pixels."""


def test_flip_exchanges_hands():
    flipped = ComposedTransforms(transforms=[dict(type="HorizontalFlip", p=1)])(drawn())
    np.testing.assert_allclose(flipped.keypoints[0, 1], (160 - SPOTS["right_hand"][0], SPOTS["right_hand"][1], 2))
    assert check_points(flipped, colors=EXCHANGED, tolerance=1e-3) == 3
    native = ComposedTransforms(transforms=[dict(type="VerticalFlip", p=1)])(drawn())
    assert check_points(native, colors=EXCHANGED, tolerance=1e-3) == 3
    turned = ComposedTransforms(transforms=[dict(type="VerticalFlip", p=1), dict(type="HorizontalFlip", p=1)])(drawn())
    assert check_points(turned, tolerance=1e-3) == 3  # half a turn, which exchanges nothing
    np.testing.assert_array_equal(turned.areas, [1000])


@pytest.mark.parametrize(
    "spec",
    [
        dict(type="RandomZoomOut", side_range=(1.5, 3), p=1),
        dict(type="RandomIoUCrop", min_ious=(0.1, 1.0)),
        dict(type="MultiScaleCrop", scales=(100, 180), crop_scales=(90, 130), crop_range=(60, 120)),
        dict(type="Affine", rotate=(-60, 60), scale=(0.7, 1.2), p=1),
        dict(type="D4", p=1),
        dict(type="RandomRotate90", p=1),
        dict(type="Transpose", p=1),
        dict(type="RandomCrop", height=100, width=140),
        dict(type="PadIfNeeded", min_height=200, min_width=240),
    ],
    ids=lambda spec: spec["type"],
)
def test_points_follow_their_pixels(spec):
    compared = 0
    for seed in range(20):
        sample = ComposedTransforms(transforms=[spec], min_visible=0, min_box_side=0)(drawn(), seed=seed)
        if len(sample.keypoints):
            # The image is mirrored if the turn from the nose over one hand to the other one is.
            centers = [center_of(sample.image, channel) for channel in range(3)]
            mirrored = (
                all(c is not None for c in centers)
                and np.linalg.det([centers[1] - centers[0], centers[2] - centers[0]]) < 0
            )
            if not any(c is None for c in centers):
                compared += check_points(sample, colors=EXCHANGED if mirrored else (0, 1, 2), tolerance=0.6)
    assert compared >= 12


@pytest.mark.parametrize(
    "transforms",
    [
        DETRTrainTransforms(flip_probability=0),
        LargeScaleJitter(size=200, flip_probability=0),
        EvalResize(short_side=300),
    ],
)
def test_whole_pipelines_move_points(transforms):
    assert sum(check_points(transforms(drawn(), seed=seed), tolerance=1) for seed in range(10)) > 5


def test_areas_are_scaled_and_not_cropped():
    resized = EvalResize(size=(240, 160))(drawn())
    np.testing.assert_allclose(resized.areas, [2000])
    cropped = ComposedTransforms(transforms=[dict(type="Crop", x_min=60, y_min=0, x_max=160, y_max=80)])(drawn())
    np.testing.assert_allclose(cropped.areas, [1000])
    np.testing.assert_allclose(cropped.keypoints[0], [(10.5, 20.5, 2), (40.5, 60.5, 2), (0, 0, 0)])
    affine = ComposedTransforms(transforms=[dict(type="Affine", rotate=(30, 30), scale=(0.5, 0.5), p=1)])(drawn())
    np.testing.assert_allclose(affine.areas, [250], rtol=1e-4)


class Drawn:
    """An image source with one drawn image."""

    masks = False

    def training_indices(self):
        return [0]

    def load_annotated(self, index):
        return drawn()


def test_mosaics_move_points():
    first = drawn()._replace(image=drawn().image * 0 + 9)  # only the three others have colors
    compared = 0
    for seed in range(12):
        mosaic = MultiImageTransforms(mosaic=1).mix(drawn(), Drawn(), seed=seed)
        grid = GridMosaic(probability=1, tile=120).mix(first, Drawn(), seed=seed)
        for sample, tolerance in ((mosaic, 1.5), (grid, 2.5)):
            for points in sample.keypoints:
                for channel, (x, y, seen) in enumerate(points):
                    height, width = sample.image.shape[:2]
                    if seen and 2 < x < width - 2 and 2 < y < height - 2:
                        pixel = sample.image[int(y), int(x)]
                        if pixel.max() > 40:
                            assert pixel.argmax() == channel, tolerance
                            compared += 1
        assert len(mosaic.keypoints) == len(mosaic.areas) == len(mosaic.labels)
    assert compared > 60


def test_pasted_objects_hide_points():
    sample, other = drawn(), drawn()
    mask = np.zeros((1, 120, 160), np.uint8)
    mask[0, 40:70, 90:115] = 1  # over the left hand only
    whole = np.zeros((1, 120, 160), np.uint8)
    whole[0, 10:75, 30:115] = 1
    pasted = paste_objects(
        sample._replace(masks=whole), other._replace(masks=mask), np.array([True]), Visibility(0.1, 1.0)
    )
    assert pasted.keypoints[0, :, 2].tolist() == [2, 1, 2]
    assert pasted.keypoints[1, :, 2].tolist() == [2, 2, 2]


def test_batch_augmentation_moves_points():
    dataset = ShapesDetection(8, keypoints=True, min_objects=2)
    samples = [squash(dataset[index], 256) for index in range(4)]
    for index, sample in enumerate(samples):
        original = dataset[index]["target"]
        np.testing.assert_allclose(sample["target"]["keypoints"][..., :2], original["keypoints"][..., :2] * 2)
        np.testing.assert_allclose(sample["target"]["areas"], original["areas"] * 4)
    mixed = mix(samples[0], samples[1], 0.5)["target"]
    assert len(mixed["keypoints"]) == len(mixed["labels"]) == len(mixed["areas"])
    blended = CopyBlend(probability=1.0, num_objects=2)(samples, 0, np.random.default_rng(0))
    for sample, before in zip(blended, samples):
        target, start = sample["target"], len(before["target"]["labels"])
        assert len(target["keypoints"]) == len(target["labels"]) == start + 2
        boxes = target["boxes_cxcywh"][start:] * 256
        inside = (target["keypoints"][start:, :, :2] - boxes[:, None, :2]).abs() <= boxes[:, None, 2:] / 2 + 2.5
        assert (inside.all(-1) | (target["keypoints"][start:, :, 2] == 0)).all()


@pytest.mark.parametrize("lazy", [False, True])
def test_drawn_shapes_have_the_points_around_their_centers(lazy):
    transforms = dict(
        type="ComposedTransforms", transforms=[dict(type="HorizontalFlip", p=1)], min_visible=0.0, min_box_side=0.0
    )
    dataset = ShapesDetection(30, keypoints=True, transforms=transforms)
    dataset.square = 256 if lazy else None
    for index in range(30):
        scene, target = dataset.scene(index), dataset[index]["target"]
        size = target["image_size"][0]
        scale = size / 128
        centers = torch.tensor([(128 - shape.x - 0.5, shape.y + 0.5) for shape in scene.shapes])[:, None] * scale
        offsets = (target["keypoints"][..., :2] - centers) / torch.tensor([s.radius for s in scene.shapes])[
            :, None, None
        ]
        along = offsets / scale
        directions = torch.tensor([(0.0, -1.0), (1.0, 0.0), (0.0, 1.0), (-1.0, 0.0)])
        lengths = (along * directions).sum(-1)
        np.testing.assert_allclose(along, lengths[..., None] * directions, atol=0.02)
        for shape, length in zip(scene.shapes, lengths):
            # No outline is closer to its center than a star's notches or a cross's.
            if shape.label in (THINGS.index("circle"), THINGS.index("ring")):
                np.testing.assert_allclose(length, 1, atol=0.02)
            assert length.min() > 0.4 and length.max() < 1.02
        np.testing.assert_allclose(target["areas"], scene.masks.sum((1, 2)) * scale**2, rtol=1e-5)


def test_points_of_drawn_shapes_lie_on_their_outlines_and_move_with_them():
    shape = World().scene(3).shapes[0]
    for label in range(len(THINGS)):
        before = None
        for angle in np.linspace(0, 2 * np.pi, 721):
            turned = replace(shape, label=label, angle=angle)
            points = turned.keypoints()
            outline = (turned.contours()[0] / 16 + 0.5).astype(np.float32)
            distances = [cv2.pointPolygonTest(outline, tuple(map(float, point)), True) for point in points]
            np.testing.assert_allclose(distances, 0, atol=1e-3)
            assert before is None or np.abs(points - before).max() < 0.05 * shape.radius  # half a degree
            before = points


def test_occluded_points_are_hidden():
    dataset = ShapesDetection(60, keypoints=True, min_objects=4, max_objects=6)
    hidden = [dataset[index]["target"]["keypoints"] for index in range(60)]
    assert sum(int((points[..., 2] == 1).sum()) for points in hidden) > 20
    assert all((points[..., 2] > 0).all() for points in hidden)


def write_coco(folder, annotations, *, category=None, categories=None):
    (folder / "images").mkdir(exist_ok=True)
    Image.fromarray(drawn().image).save(folder / "images" / "a.png")
    category = {"id": 1, "name": "person", "keypoints": NAMES, "skeleton": [[1, 2], [1, 3]]} | (category or {})
    content = {
        "images": [{"id": 7, "file_name": "a.png", "width": 160, "height": 120}],
        "annotations": [
            {"id": k, "image_id": 7, "category_id": 1, "bbox": [30, 10, 85, 65], "iscrowd": 0, "area": 1234} | a
            for k, a in enumerate(annotations, 1)
        ],
        "categories": categories or [category],
    }
    (folder / "points.json").write_text(json.dumps(content))
    return folder / "images", folder / "points.json"


POINTS = [70.5, 20.5, 2, 100.5, 60.5, 1, 40, 50, 0]


def test_file_is_read(tmp_path):
    dataset = CocoDetection(*write_coco(tmp_path, [{"keypoints": POINTS, "num_keypoints": 2}, {}]), keypoints=True)
    target = dataset[0]["target"]
    np.testing.assert_allclose(target["keypoints"][0], [(70.5, 20.5, 2), (100.5, 60.5, 1), (0, 0, 0)])
    assert (target["keypoints"][1] == 0).all()
    assert target["areas"].tolist() == [1234, 85 * 65]  # that of the box, where nothing has an outline
    assert dataset.keypoints == KeypointInfo(
        tuple(NAMES), ((0, 1), (0, 2)), ((1, 2),), (COCO_SIGMAS["nose"], 0.05, 0.05)
    )
    assert KeypointInfo.from_json(json.loads(json.dumps(dataset.keypoints.to_json()))) == dataset.keypoints
    truth = dataset.ground_truth()["annotations"]
    assert [a["num_keypoints"] for a in truth] == [2, 0] and truth[1]["keypoints"] == [0] * 9


def test_images_with_few_labeled_points_are_left_out(tmp_path, caplog):
    caplog.set_level("INFO")
    images, file = write_coco(
        tmp_path,
        [{"image_id": 8}, {"keypoints": POINTS}, {"keypoints": [0] * 9}, {"image_id": 9, "keypoints": [0] * 9}]
        + [{"image_id": 11, "keypoints": POINTS, "bbox": [1, 2, 3, 4]}] * 2,
    )
    content = json.loads(file.read_text())
    content["images"] = [{**content["images"][0], "id": k, "file_name": f"{k}.png"} for k in (8, 7, 9, 10, 11)]
    file.write_text(json.dumps(content))
    for image in content["images"]:
        Image.fromarray(drawn().image).save(images / image["file_name"])
    assert CocoDetection(images, file, keypoints=True).image_ids.tolist() == [8, 7, 9, 10, 11]
    dataset = CocoDetection(images, file, keypoints=True, min_keypoints_per_image=1)
    assert "points.json: 3 of 5 images have fewer than 1 labeled keypoint: left out" in caplog.text
    assert dataset.image_ids.tolist() == [7, 11] and dataset.file_name(1) == "11.png"
    assert dataset.objects_per_image().tolist() == [2, 2]
    assert [(t["image_id"], len(t["keypoints"]), len(t["areas"])) for t in (s["target"] for s in dataset)] == [
        (7, 2, 2),
        (11, 2, 2),
    ]
    np.testing.assert_allclose(dataset[1]["target"]["boxes_cxcywh"][0], [2.5 / 160, 4 / 120, 3 / 160, 4 / 120])
    truth = dataset.ground_truth()
    assert [image["id"] for image in truth["images"]] == [7, 11]
    assert [a["image_id"] for a in truth["annotations"]] == [7, 7, 11, 11]
    assert CocoDetection(images, file, keypoints=True, min_keypoints_per_image=3).image_ids.tolist() == [11]
    with pytest.raises(DataError, match=r"points\.json: every image has fewer than 5 .*min_keypoints_per_image"):
        CocoDetection(images, file, keypoints=True, min_keypoints_per_image=5)
    with pytest.raises(ConfigError, match="min_keypoints_per_image is 1; .*keypoints=True"):
        CocoDetection(images, file, min_keypoints_per_image=1)


def test_options_replace_what_the_file_says(tmp_path):
    paths = write_coco(tmp_path, [{"keypoints": POINTS}], category={"sigmas": [0.1, 0.2, 0.3], "flip_pairs": [[1, 2]]})
    assert CocoDetection(*paths, keypoints=True).keypoints.sigmas == (0.1, 0.2, 0.3)
    assert CocoDetection(*paths, keypoints=True).keypoints.flip_pairs == ((0, 1),)
    options = dict(flip_pairs=[["left_hand", "right_hand"]], sigmas={"nose": 0.5}, skeleton=[["nose", "left_hand"]])
    info = CocoDetection(*paths, keypoints=options).keypoints
    assert info == KeypointInfo(tuple(NAMES), ((0, 1),), ((1, 2),), (0.5, 0.05, 0.05))
    with pytest.raises(ConfigError, match="keypoints.sigmas: no keypoint is called 'tail'"):
        CocoDetection(*paths, keypoints=dict(sigmas={"tail": 1.0}))


@pytest.mark.parametrize(
    ("annotation", "category", "message"),
    [
        ({"keypoints": POINTS[:6]}, {}, "3 x 3 numbers, x, y and visibility of each of its category's"),
        ({"keypoints": [float("nan"), *POINTS[1:]]}, {}, "expected finite numbers only"),
        ({"keypoints": [*POINTS[:2], 3, *POINTS[3:]]}, {}, "visibilities of 0 (not labeled), 1 (hidden) or 2"),
        ({"keypoints": [200, *POINTS[1:]]}, {}, "points inside the image of 160x120 pixels, not 1 at (200, 20.5)"),
        ({"keypoints": POINTS, "num_keypoints": 3}, {}, "its num_keypoints 3, not 2"),
        ({"keypoints": POINTS}, {"skeleton": [[1, 4]]}, "skeleton [[1, 4]]; expected pairs of its 3 keypoints"),
        ({"keypoints": POINTS}, {"flip_pairs": [[1, 2], [2, 3]]}, "flip_pairs has 'left_hand' twice; expected pairs"),
        ({"keypoints": POINTS}, {"sigmas": [0.1, 0.1]}, "got 2 sigmas [0.1, 0.1]; expected 3 numbers above 0"),
        ({"keypoints": POINTS}, {"keypoints": ["a", "a", "b"]}, "two keypoints are called 'a'"),
        ({"keypoints": POINTS}, {"keypoints": ["a", "left", "b"]}, "'left' has no partner 'right'"),
        ({}, {"keypoints": []}, "none of its 1 categories has a list 'keypoints' of names"),
    ],
)  # fmt: skip
def test_wrong_keypoints_are_named(tmp_path, annotation, category, message):
    paths = write_coco(tmp_path, [annotation], category=category)
    with pytest.raises(DataError) as error:
        CocoDetection(*paths, keypoints=True)
    text = str(error.value)
    assert message in text and "points.json" in text and "\n" not in text
    if "annotation" in text:
        assert "image 'a.png'" in text
    assert CocoDetection(*paths).keypoints is None  # boxes do not need them


def test_categories_with_other_keypoints_are_refused(tmp_path):
    categories = [{"id": 1, "name": "person", "keypoints": NAMES}, {"id": 2, "name": "hand", "keypoints": ["thumb"]}]
    paths = write_coco(tmp_path, [{"keypoints": POINTS}], categories=categories)
    with pytest.raises(DataError, match="'person' has the keypoints .* and 'hand' .*; expected the same names"):
        CocoDetection(*paths, keypoints=True)


def test_pairs_are_inferred_from_names():
    assert infer_flip_pairs(list(COCO_SIGMAS), "x") == [(k, k + 1) for k in range(1, 17, 2)]
    assert infer_flip_pairs(["Left Eye", "tail", "Right Eye", "l-paw", "r-paw"], "x") == [(0, 2), (3, 4)]
    assert infer_flip_pairs(["tail", "leg1"], "x") == []
    assert infer_flip_pairs(["earL", "snout", "earR", "LEye", "REye"], "x") == [(0, 2), (3, 4)]
    assert infer_flip_pairs(["Lhip", "rknee", "Rhip", "lknee", "lip", "root"], "x") == [(0, 2), (1, 3)]
    assert infer_flip_pairs(["LFPaw", "RFPaw", "Leg", "Rib", "TOTAL", "tailBase", "pawLong"], "x") == [(0, 1)]


def test_order_of_names_is_that_of_the_checkpoint(tmp_path):
    dataset = CocoDetection(*write_coco(tmp_path, [{"keypoints": POINTS}]), keypoints=True)
    record = {"keypoints": dataset.keypoints.take(["right_hand", "nose", "left_hand"]).to_json()}
    match_record(dataset, record)
    assert dataset.keypoints.names == ("right_hand", "nose", "left_hand")
    assert dataset.keypoints.flip_pairs == ((2, 0),) and dataset.keypoints.skeleton == ((1, 2), (1, 0))
    np.testing.assert_allclose(dataset[0]["target"]["keypoints"][0, 1:], [(70.5, 20.5, 2), (100.5, 60.5, 1)])
    truth = dataset.ground_truth()
    assert truth["annotations"][0]["keypoints"] == [40, 50, 0, *POINTS[:6]]
    assert truth["categories"][0]["keypoints"] == ["right_hand", "nose", "left_hand"]
    val = CocoDetection(*write_coco(tmp_path, [{"keypoints": POINTS}]), keypoints=True)
    match_classes(dataset, val)
    assert val.keypoints == dataset.keypoints
    record["keypoints"]["names"][0] = "tail"
    with pytest.raises(DataError, match=r"run.pth: its run has .*lacks tail and has right_hand.*--init run.pth"):
        match_record(dataset, record, resumed="run.pth")


def test_a_new_run_orders_keypoints_as_its_weights_do_or_says_whose_rows_they_get(tmp_path, caplog):
    dataset = CocoDetection(*write_coco(tmp_path, [{"keypoints": POINTS}]), keypoints=True)
    record = {"keypoints": dataset.keypoints.take(["right_hand", "nose", "left_hand"]).to_json()}
    follow_keypoints(dataset, record)
    assert dataset.keypoints.names == ("right_hand", "nose", "left_hand") and not caplog.records
    record["keypoints"]["names"][1] = "tip"
    follow_keypoints(dataset, record)
    assert "whose rows they get by number: nose from tip" in caplog.text
    follow_keypoints(dataset, {})  # weights of boxes
    assert dataset.keypoints.names == ("right_hand", "nose", "left_hand")
