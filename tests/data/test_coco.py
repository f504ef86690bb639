"""COCO files: what is read, and error messages for bad ones. Images are drawn into a temporary folder."""

import json
import logging
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.loading.splits import build_dataset
from vitkit.errors import ConfigError, DataError

BIG_ID = 908400223648


def draw_image(width=40, height=30, mode="RGB"):
    ramp = np.linspace(0, 255, width * height * 3).reshape(height, width, 3).astype(np.uint8)
    return Image.fromarray(ramp).convert(mode)


def content():
    """Two images of 40x30; the second has no object. Category ids have a gap and start at 0."""
    return {
        "images": [
            {"id": 7, "file_name": "a.png", "width": 40, "height": 30},
            {"id": 3, "file_name": "b.png", "width": 40, "height": 30},
        ],
        "annotations": [
            {
                "id": 17,
                "image_id": 7,
                "category_id": 5,
                "bbox": [10, 5, 20, 10],
                "area": 200,
                "iscrowd": 0,
                "segmentation": [[10, 5, 30, 5, 30, 15, 10, 15]],
            },
            {
                "id": BIG_ID,
                "image_id": 7,
                "category_id": 0,
                "bbox": [0, 0, 40, 30],
                "area": 1200,
                "iscrowd": 1,
                "segmentation": {"size": [30, 40], "counts": [0, 1200]},
            },
        ],
        "categories": [{"id": 5, "name": "dog"}, {"id": 0, "name": "cat"}],
    }


def write(folder, data, photos=None):
    for name, image in (photos or {"a.png": draw_image(), "b.png": draw_image()}).items():
        image.save(folder / name)
    (folder / "instances.json").write_text(data if isinstance(data, str) else json.dumps(data))


def load(folder, data=None, photos=None, **arguments):
    write(folder, content() if data is None else data, photos)
    return CocoDetection(images=str(folder), annotations=str(folder / "instances.json"), **arguments)


def test_sample_has_relative_boxes_and_contiguous_labels(tmp_path):
    dataset = load(tmp_path)
    sample = dataset[0]
    assert dataset.classes == ["cat", "dog"] and dataset.category_ids == [0, 5]
    assert sample["image"].shape == (3, 30, 40) and sample["image"].dtype == torch.uint8
    assert np.array_equal(sample["image"].permute(1, 2, 0), np.asarray(draw_image()))
    target = sample["target"]
    assert target["labels"].tolist() == [1] and target["labels"].dtype == torch.int64
    torch.testing.assert_close(target["boxes_cxcywh"], torch.tensor([[20 / 40, 10 / 30, 20 / 40, 10 / 30]]))
    assert (target["image_id"], target["image_size"], target["original_size"]) == (7, (30, 40), (30, 40))
    assert "masks" not in target


def test_image_without_annotations_is_kept(tmp_path):
    dataset = load(tmp_path, masks=True, transforms="DETRTrainTransforms")
    target = dataset[1]["target"]
    assert len(dataset) == 2 and dataset.image_ids.tolist() == [7, 3]
    assert target["boxes_cxcywh"].shape == (0, 4) and target["labels"].shape == (0,)
    assert target["masks"].shape == (0, *target["image_size"])


def test_negative_indices_count_from_the_end_and_larger_ones_raise(tmp_path):
    dataset = load(tmp_path)
    assert dataset[-1]["target"]["image_id"] == 3
    with pytest.raises(IndexError):
        dataset[2]


def test_crowd_is_left_out_of_samples_and_kept_for_evaluation(tmp_path):
    dataset = load(tmp_path)
    assert len(dataset[0]["target"]["labels"]) == 1
    assert [a["iscrowd"] for a in dataset.ground_truth()["annotations"]] == [0, 1]


def test_ids_may_exceed_32_bits(tmp_path):
    data = content()
    data["images"][0]["id"] = data["annotations"][0]["image_id"] = data["annotations"][1]["image_id"] = BIG_ID
    assert load(tmp_path, data)[0]["target"]["image_id"] == BIG_ID


def test_ground_truth_fills_what_pycocotools_needs(tmp_path):
    data = content()
    data["annotations"] = [{"image_id": 7, "category_id": 5, "bbox": [1, 2, 3, 4]}]
    annotation = load(tmp_path, data).ground_truth()["annotations"][0]
    assert (annotation["id"], annotation["area"], annotation["iscrowd"]) == (1, 12, 0)


def test_masks_of_polygons_and_both_run_lengths_agree(tmp_path):
    expected = np.zeros((30, 40), np.uint8)
    expected[5:15, 10:30] = 1
    compressed = coco_mask.encode(np.asfortranarray(expected))
    runs, flat = [0], expected.T.ravel()
    for previous, pixel in zip([0, *flat], flat):
        runs.append(0) if pixel != previous else None
        runs[-1] += 1
    forms = [
        [[10, 5, 30, 5, 30, 15, 10, 15]],
        {"size": [30, 40], "counts": compressed["counts"].decode()},
        {"size": [30, 40], "counts": runs},
    ]
    for form in forms:
        data = content()
        data["annotations"][0]["segmentation"] = form
        masks = load(tmp_path, data, masks=True)[0]["target"]["masks"]
        assert masks.dtype == torch.bool
        assert np.array_equal(masks[0].numpy(), expected.astype(bool))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "LA"])
def test_every_image_mode_becomes_rgb(tmp_path, mode):
    image = draw_image(mode=mode)
    name = "a.tif" if mode == "CMYK" else "a.png"
    data = content()
    data["images"] = [{**data["images"][0], "file_name": name}]
    loaded = load(tmp_path, data, {name: image}).load_image(0)
    assert loaded.shape == (30, 40, 3)
    assert np.abs(loaded.astype(int) - np.asarray(image.convert("RGB"))).max() <= 2


def test_cmyk_jpeg_looks_like_the_rgb_one(tmp_path):
    data = content()
    data["images"] = [{**data["images"][0], "file_name": "a.jpg"}]
    smooth = draw_image().resize((4, 3)).resize((40, 30))
    loaded = load(tmp_path, data, {"a.jpg": smooth.convert("CMYK")}).load_image(0)
    assert np.abs(loaded.astype(int) - np.asarray(smooth)).mean() < 8


def rotated(folder, image):
    exif = Image.Exif()
    exif[0x112] = 6  # to be displayed rotated by 90 degrees
    image.save(folder / "a.jpg", exif=exif, quality=95)


def test_exif_rotated_image_is_turned_upright(tmp_path):
    data = content()
    data["images"] = [{"id": 7, "file_name": "a.jpg", "width": 30, "height": 40}]
    data["annotations"] = []
    rotated(tmp_path, draw_image())
    assert load(tmp_path, data).load_image(0).shape == (40, 30, 3)


def test_size_annotated_before_the_exif_rotation_is_an_error(tmp_path):
    data = content()
    data["images"] = [{**data["images"][0], "file_name": "a.jpg"}]
    rotated(tmp_path, draw_image())
    with pytest.raises(DataError, match=r"a\.jpg' is 30x40 .* annotated as 40x30.*EXIF"):
        load(tmp_path, data)[0]


def test_boxes_beyond_the_image_are_clipped_and_counted(tmp_path, caplog):
    data = content()
    data["annotations"][0]["bbox"] = [-10, 20, 20, 30]
    with caplog.at_level(logging.INFO, logger="vitkit"):
        dataset = load(tmp_path, data)
    torch.testing.assert_close(
        dataset[0]["target"]["boxes_cxcywh"], torch.tensor([[5 / 40, 25 / 30, 10 / 40, 10 / 30]])
    )
    assert "1 box clipped" in caplog.text and "1 crowd region left out" in caplog.text
    assert dataset.ground_truth()["annotations"][0]["bbox"] == [-10, 20, 20, 30]


BAD_BOXES = {
    "negative": ([10, 20, -3, 5], "no size negative"),
    "huge": ([10, 20, 3e9, 5], "below 2\\^31"),
    "many digits": ([10, 20, 10**400, 5], "below 2\\^31"),
    "true": ([10, 20, True, 5], "four finite numbers"),
    "nan": ([10, float("nan"), 3, 5], "finite"),
    "inf": ([10, 20, float("inf"), 5], "finite"),
    "three numbers": ([1, 2, 3], "four finite numbers"),
    "text": (["1", "2", "3", "4"], "four finite numbers"),
    "none": (None, "four finite numbers"),
}


@pytest.mark.parametrize(("bbox", "message"), BAD_BOXES.values(), ids=BAD_BOXES)
@pytest.mark.parametrize("bad_boxes", ["error", "drop"])
def test_malformed_box_is_an_error_that_names_annotation_and_image(tmp_path, bbox, message, bad_boxes):
    data = content()
    data["annotations"][0]["bbox"] = bbox
    with pytest.raises(DataError, match=rf"annotation 17 \(image 'a\.png'\) has bbox .*; expected .*{message}"):
        load(tmp_path, data, bad_boxes=bad_boxes)


@pytest.mark.parametrize(
    ("bbox", "message"),
    [([10, 20, 3, 0], "a height above 0"), ([41, 5, 3, 5], "a box inside the image of 40x30 pixels")],
)
def test_box_without_area_in_its_image_is_an_error_unless_it_is_dropped(tmp_path, bbox, message):
    data = content()
    data["annotations"][0]["bbox"] = bbox
    with pytest.raises(DataError, match=rf"annotation 17 \(image 'a\.png'\) .*expected {message}.*bad_boxes='drop'"):
        load(tmp_path, data)


@pytest.mark.parametrize("bbox", [[10, 20, 0, 5], [10, 20, 5, 0], [41, 5, 3, 5]])
def test_bad_box_is_dropped_and_counted_on_request(tmp_path, caplog, bbox):
    data = content()
    data["annotations"][0]["bbox"] = bbox
    with caplog.at_level(logging.INFO, logger="vitkit"):
        dataset = load(tmp_path, data, bad_boxes="drop")
    assert len(dataset[0]["target"]["labels"]) == 0
    assert "1 bad box dropped" in caplog.text
    assert len(dataset.ground_truth()["annotations"]) == 1


def test_bad_boxes_setting_is_checked(tmp_path):
    with pytest.raises(ConfigError, match="'error' or 'drop'"):
        load(tmp_path, bad_boxes="ignore")


def broken(change):
    data = content()
    change(data)
    return data


BAD_FILES = {
    "malformed": ('{"images": [\n  {"id": 1,,}]}', r"line 2, column 12"),
    "not an object": ("[]", r"no list 'images' and no list 'annotations' and no list 'categories'"),
    "no categories key": (broken(lambda d: d.pop("categories")), r"no list 'categories'"),
    "no images": (broken(lambda d: d.update(images=[])), r"'images' .*is empty"),
    "no classes": (broken(lambda d: d.update(categories=[])), r"'categories' .*is empty"),
    "no file_name": (broken(lambda d: d["images"][1].pop("file_name")), r"image 3 has no 'file_name'"),
    "no bbox": (broken(lambda d: d["annotations"][0].pop("bbox")), r"annotation 17 .* has no 'bbox'"),
    "no width": (broken(lambda d: d["images"][0].update(width=0)), r"image 7 \('a\.png'\) has width 0"),
    "image twice": (
        broken(lambda d: d["images"][1].update(id=7)),
        r"image 7 \('b\.png'\) has id 7; expected an id that no earlier",
    ),
    "class twice": (
        broken(lambda d: d["categories"][1].update(id=5)),
        r"category 5 .* has id 5; expected an id that no earlier",
    ),
    "id is text": (broken(lambda d: d["images"][0].update(id="x")), r"has id 'x'; expected a whole number"),
    "unknown image": (
        broken(lambda d: d["annotations"][0].update(image_id=8)),
        r"annotation 17 .* has image_id 8; expected one of the 2 ids",
    ),
    "unknown class": (broken(lambda d: d["annotations"][0].update(category_id=1)), r"annotation 17 .* category_id 1"),
    "class is true": (broken(lambda d: d["annotations"][0].update(category_id=True)), r"has category_id True"),
    "no area": (broken(lambda d: d["annotations"][0].update(area=None)), r"annotation 17 .* has area None; expected"),
    "area is nan": (broken(lambda d: d["annotations"][0].update(area=float("nan"))), r"annotation 17 .* has area nan"),
    "area is text": (broken(lambda d: d["annotations"][0].update(area="9")), r"annotation 17 .* has area '9'"),
    "no crowd": (broken(lambda d: d["annotations"][0].update(iscrowd=None)), r"has iscrowd None; expected 0 or 1"),
    "crowd is text": (broken(lambda d: d["annotations"][0].update(iscrowd="0")), r"has iscrowd '0'; expected 0 or 1"),
    "name is not text": (broken(lambda d: d["categories"][0].update(name=3)), r"category 5 \(3\) has name 3"),
    "half a character": (broken(lambda d: d["images"][0].update(file_name="\ud800")), r"expected the name of a file"),
    "entry is a number": (broken(lambda d: d["images"].append(3)), r"entry 2 of 'images' is 3; expected an object"),
    "width is true": (broken(lambda d: d["images"][0].update(width=True)), r"image 7 .* has width True"),
    "several issues": (
        broken(lambda d: [a.update(area=-1, iscrowd="0") for a in d["annotations"]]),
        r"annotation 17 .* has area -1; .* And 3 more: 2 x iscrowd, 1 x area; vitkit doctor lists all",
    ),
    "nested deep": ("[" * 200_000, r"nests lists too deep"),
    "many digits": ('{"images": [{"id": ' + "7" * 5000 + "}]}", r"a number that is too long"),
}


@pytest.mark.parametrize(("data", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_annotation_file_is_an_error(tmp_path, data, message):
    with pytest.raises(DataError, match=rf"instances\.json: .*{message}"):
        load(tmp_path, data)


BAD_SEGMENTATIONS = {
    "missing": (None, "masks=True needs one"),
    "empty": ([], "masks=True needs one"),
    "two points": ([[1, 2, 3, 4]], "three finite points"),
    "nan": ([[1, 2, 3, 4, 5, float("nan")]], "finite coordinates"),
    "far": ([[1, 2, 3, 4, 5, 2147483648]], "at most 10 times the size of the image, 40x30"),
    "farther than a float": ([[1, 2, 3, 4, 5, 10**400]], "at most 10 times the size of the image"),
    "polygon of text": ([["1", "2", "3", "4", "5", "6"]], "three finite points"),
    "text": ("abc", "list of polygons"),
    "other size": ({"size": [40, 30], "counts": [1200]}, r"run lengths of the image's size \[30, 40\]"),
    "fractional size": ({"size": [30.0, 40], "counts": [1200]}, r"a size \[height, width\] of whole numbers"),
    "too short": ({"size": [30, 40], "counts": [10, 20]}, "fill the image's 1200 pixels; their sum is 30"),
    "fractional": ({"size": [30, 40], "counts": [0.5, 1199.5]}, "whole numbers above 0"),
    "negative": ({"size": [30, 40], "counts": [1300, -100]}, "whole numbers above 0"),
    "no runs": ({"size": [30, 40], "counts": ""}, "it is empty"),
    "not run lengths": ({"size": [30, 40], "counts": "zz"}, "a character is not between"),
    "endless number": ({"size": [30, 40], "counts": "o" * 100_000 + "0"}, "does not fit 32 bits"),
}


@pytest.mark.parametrize(("segmentation", "message"), BAD_SEGMENTATIONS.values(), ids=BAD_SEGMENTATIONS)
@pytest.mark.parametrize("crowd", [0, 1])
def test_bad_segmentation_is_an_error_if_masks_are_loaded(tmp_path, segmentation, message, crowd):
    data = content()
    data["annotations"][0] |= {"segmentation": segmentation, "iscrowd": crowd}
    with pytest.raises(DataError, match=rf"annotation 17 \(image 'a\.png'\) has segmentation .*{message}.*masks=False"):
        load(tmp_path, data, masks=True)


@pytest.mark.parametrize("segmentation", [case for case, _ in BAD_SEGMENTATIONS.values()], ids=BAD_SEGMENTATIONS)
def test_bad_segmentation_is_dropped_if_only_boxes_are_loaded(tmp_path, caplog, segmentation):
    data = content()
    data["annotations"][0]["segmentation"] = segmentation
    truth = load(tmp_path, data).ground_truth()["annotations"]
    assert not truth[0].get("segmentation") and truth[1]["segmentation"] == data["annotations"][1]["segmentation"]
    warned = "1 invalid masks are ignored, such as: annotation 17" in caplog.text
    assert warned == (segmentation not in (None, []))


EMPTY_MASKS = {
    "line": [[10, 5, 30, 15, 20, 10]],
    "points": [[10, 5, 10, 5, 10, 5], [12, 6, 12, 6, 12, 6]],
    "between pixels": [[10.1, 5.1, 10.4, 5.1, 10.4, 5.4]],
    "run lengths": {"size": [30, 40], "counts": [1200]},
    "compressed": {"size": [30, 40], "counts": "`U1"},
}


@pytest.mark.parametrize("segmentation", EMPTY_MASKS.values(), ids=EMPTY_MASKS)
def test_mask_without_a_pixel_is_counted_once_and_its_object_left_out(tmp_path, caplog, segmentation):
    data = content()
    whole = data["annotations"][0]
    thin = {**whole, "id": 19, "bbox": [10, 5, 1, 10], "segmentation": [[10, 5, 11, 5, 11, 15, 10, 15]]}
    data["annotations"] += [{**whole, "id": 18, "segmentation": segmentation}, thin]
    assert load(tmp_path, data, masks=True)[0]["target"]["masks"].flatten(1).sum(1).tolist() == [200, 10]
    (record,) = [record for record in caplog.records if "no pixel" in record.getMessage()]
    assert record.levelno == logging.WARNING and "1 mask has no pixel" in record.message
    assert "annotation 18 (image 'a.png')" in record.message and "2 masks" not in record.message
    caplog.clear()
    assert len(load(tmp_path, data)[0]["target"]["labels"]) == 3 and "no pixel" not in caplog.text


def test_missing_root_file_and_image_name_the_config_key_and_path(tmp_path):
    spec = {"type": "CocoDetection", "images": "{root}/x", "annotations": "{root}/instances.json"}
    with pytest.raises(DataError, match=r"data\.train: images: no folder 'nowhere/x'.*data\.root"):
        build_dataset(spec, "nowhere", key="data.train")
    (tmp_path / "x").mkdir()
    with pytest.raises(DataError, match=r"data\.val: annotations: no file '.*instances\.json'"):
        build_dataset(spec, str(tmp_path), key="data.val")
    write(tmp_path, content())
    with pytest.raises(DataError, match=r"lists 'a\.png', which is not in"):
        build_dataset(spec, str(tmp_path))
    draw_image().save(tmp_path / "x" / "a.png")
    with pytest.raises(DataError, match=r"cannot read '.*b\.png'"):
        build_dataset(spec, str(tmp_path))[1]


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_truncated_empty_and_non_image_files_are_named(tmp_path, suffix):
    name = f"a.{suffix}"
    data = content()
    data["images"] = [{**data["images"][0], "file_name": name}]
    dataset = load(tmp_path, data, {name: draw_image()})
    complete = (tmp_path / name).read_bytes()
    for damaged in (complete[: len(complete) // 2], b"", b"hello"):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(DataError, match=rf"cannot decode '.*{name}' \({len(damaged)} bytes\)"):
            dataset[0]


def test_index_consists_of_a_few_flat_arrays(tmp_path):
    """Ten times the objects may take only the memory of their numbers, not of more Python objects."""
    data = content()
    data["annotations"] = [{**data["annotations"][0], "id": number} for number in range(1000)]
    dataset = load(tmp_path, data, masks=True)
    held = [*vars(dataset).values(), *vars(dataset.table).values()]
    kept = [value for value in held if isinstance(value, list | dict | tuple)]
    assert max(map(len, kept)) <= len(dataset.classes)
    assert len(pickle.dumps(dataset)) < 150 * 1000


def test_coco_tiny_equals_pycocotools(shared_data):
    root = shared_data / "coco_tiny"
    annotations = root / "annotations" / "instances_train2017.json"
    dataset = CocoDetection(images=str(root / "train2017"), annotations=str(annotations), masks=True)
    reference = COCO(str(annotations))
    assert len(dataset) == 50 and len(dataset.classes) == 80
    assert dataset.category_ids[-1] == 90 and dataset.classes[-1] == "toothbrush"
    for index in range(0, 50, 5):
        target = dataset[index]["target"]
        height, width = target["original_size"]
        expected = reference.loadAnns(reference.getAnnIds(target["image_id"], iscrowd=False))
        boxes = np.array([a["bbox"] for a in expected]).reshape(-1, 4)
        boxes[:, :2] += boxes[:, 2:] / 2
        relative = boxes / [width, height, width, height]
        np.testing.assert_allclose(target["boxes_cxcywh"], relative, atol=1e-4)
        assert [dataset.category_ids[label] for label in target["labels"]] == [a["category_id"] for a in expected]
        for mask, annotation in zip(target["masks"].numpy(), expected):
            assert np.array_equal(mask, reference.annToMask(annotation).astype(bool))
    assert len(dataset.ground_truth()["annotations"]) == 470


def test_bccd_loads_with_its_one_pixel_boxes_and_without_segmentations(shared_data):
    root = shared_data / "bccd"
    arguments = {"images": str(root / "images"), "annotations": str(root / "annotations" / "instances_train.json")}
    dataset = CocoDetection(**arguments)
    assert dataset.classes == ["RBC", "WBC", "Platelets"] and len(dataset) == 205
    targets = [dataset[index]["target"] for index in range(len(dataset))]
    assert sum(len(target["labels"]) for target in targets) == 2805
    smallest = min(target["boxes_cxcywh"][:, 2:].min().item() for target in targets)
    assert smallest == pytest.approx(1 / 640)
    with pytest.raises(DataError, match="masks=True needs one"):
        CocoDetection(**arguments, masks=True)


def test_only_the_first_images_are_kept(tmp_path):
    dataset = load(tmp_path, first=1)
    assert dataset.image_ids.tolist() == [7] and dataset.num_objects == 1 and dataset.classes == ["cat", "dog"]
    truth = dataset.ground_truth()
    assert [image["id"] for image in truth["images"]] == [7] and len(truth["annotations"]) == 2
    assert len(load(tmp_path, first=5)) == 2
    with pytest.raises(ConfigError, match="first: got 0; expected at least 1"):
        load(tmp_path, first=0)


def test_split_of_a_file_without_splits_is_an_error(tmp_path):
    assert len(load(tmp_path, split="all")) == 2
    with pytest.raises(DataError, match="has no split 'val'; it has none. Leave split= out"):
        load(tmp_path, split="val")
