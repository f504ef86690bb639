"""Readers and writers of annotations beside datumaro (MIT) and supervision (MIT): each reads what the other writes."""

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask

from vitkit.apps.datasets.writing import WRITERS
from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.formats import read_annotations
from vitkit.errors import DataError
from vitkit.io.segmentations import decode_segmentation

pytestmark = pytest.mark.peers

CLASSES = ["cat", "dog", "fire hydrant", "zebra"]


def random_objects(seed, *, whole=False, num_images=6):
    """Return file name -> size and objects (class, xyxy); some images are empty, some objects on the borders."""
    rng = np.random.default_rng(seed)
    images = {}
    for k in range(num_images):
        width, height = (int(v) for v in rng.integers(40, 120, 2))
        objects = []
        for _ in range(0 if k == 2 else rng.integers(1, 7)):
            low, high = np.sort(rng.uniform(0, 1, (2, 2)), axis=0) * [width, height]
            if rng.random() < 0.2:
                low[0], high[1] = 0, height
            box = np.concatenate([low, np.maximum(high, low + 2)])
            box = np.minimum(box, [width, height] * 2)
            objects.append((CLASSES[rng.integers(4)], np.round(box, 0 if whole else 2).tolist()))
        images[f"image_{k}.png"] = ((width, height), objects)
    return images


def write_images(folder, images):
    folder.mkdir(parents=True, exist_ok=True)
    for name, ((width, height), _) in images.items():
        Image.new("RGB", (width, height), (90, 120, 60)).save(folder / name)


def write_coco(path, images, *, first_id=1, categories=None, polygons=False):
    ids = {name: first_id + k for k, name in enumerate(CLASSES)}
    content = dict(images=[], annotations=[], categories=categories or [dict(id=i, name=n) for n, i in ids.items()])
    for image_id, (name, ((width, height), objects)) in enumerate(images.items()):
        content["images"].append(dict(id=image_id, file_name=name, width=width, height=height))
        for label, (x0, y0, x1, y1) in objects:
            area, middle = (x1 - x0) * (y1 - y0), (x0 + x1) / 2
            outline = [[x0, y1, middle, y0, x1, y1]] if polygons else []
            content["annotations"].append(
                dict(
                    id=len(content["annotations"]), image_id=image_id, category_id=ids[label], iscrowd=0, area=area,
                    bbox=[x0, y0, x1 - x0, y1 - y0], segmentation=outline,
                )
            )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def as_read(data):
    """Return file name -> sorted (class, xyxy) of annotations that vitkit has read."""
    names = {category["id"]: category["name"] for category in data.categories}
    return {
        Path(image["file_name"]).name: sorted(
            (names[a["category_id"]], [*a["bbox"][:2], a["bbox"][0] + a["bbox"][2], a["bbox"][1] + a["bbox"][3]])
            for a in objects
        )
        for image, objects in data.each_image()
    }


def assert_equal(got, expected, tolerance):
    assert {name: [label for label, _ in objects] for name, objects in got.items()} == {
        name: [label for label, _ in sorted(objects)] for name, objects in expected.items()
    }
    for name, objects in expected.items():
        boxes = np.array([box for _, box in sorted(objects)]).reshape(-1, 4)
        np.testing.assert_allclose(np.array([b for _, b in got[name]]).reshape(-1, 4), boxes, atol=tolerance)


def supervised(dataset):
    """Return file name -> sorted (class, xyxy) of a dataset of supervision."""
    return {
        Path(path).name: sorted((dataset.classes[k], box) for k, box in zip(found.class_id, found.xyxy.tolist()))
        for path, _, found in dataset
    }


class TestSupervision:
    @pytest.fixture(autouse=True)
    def package(self):
        self.supervision = pytest.importorskip("supervision")

    @pytest.mark.parametrize("seed", [0, 1])
    @pytest.mark.parametrize("to", ["coco", "yolo", "voc"])
    def test_reads_what_vitkit_writes(self, to, seed, tmp_path):
        images = random_objects(seed, whole=to == "voc")
        write_images(tmp_path / "photos", images)
        data = read_annotations(write_coco(tmp_path / "photos" / "a.json", images, first_id=0), tmp_path / "photos")
        data.splits = {"train": [image["id"] for image in data.images]}
        out = tmp_path / "out"
        WRITERS[to](data, out, {})
        Dataset = self.supervision.DetectionDataset
        if to == "coco":
            dataset = Dataset.from_coco(str(tmp_path / "photos"), str(out / "instances_train.json"))
        elif to == "yolo":
            folders = out / "images/train", out / "labels/train", out / "data.yaml"
            dataset = Dataset.from_yolo(*map(str, folders))
        else:
            dataset = Dataset.from_pascal_voc(str(out / "JPEGImages"), str(out / "Annotations"))
        expected = {name: objects for name, (_, objects) in images.items()}
        assert_equal(supervised(dataset), expected, 0.01)

    @pytest.mark.parametrize("seed", [0, 1])
    @pytest.mark.parametrize("format", ["coco", "yolo", "voc"])
    def test_vitkit_reads_what_it_writes(self, format, seed, tmp_path):
        images = random_objects(seed, whole=format == "voc")
        write_images(tmp_path / "photos", images)
        path = write_coco(tmp_path / "photos" / "a.json", images)
        dataset = self.supervision.DetectionDataset.from_coco(str(tmp_path / "photos"), str(path))
        out = tmp_path / "out"
        photos = str(out / "images")
        if format == "coco":
            dataset.as_coco(photos, str(out / "a.json"))
        elif format == "yolo":
            dataset.as_yolo(photos, str(out / "labels"), str(out / "data.yaml"))
            with pytest.raises(DataError, match="data.yaml: has neither train nor val"):  # it names the classes only
                read_annotations(out / "data.yaml")
            (out / "data.yaml").write_text((out / "data.yaml").read_text() + "train: images\n")
        else:
            dataset.as_pascal_voc(photos, str(out / "Annotations"))
        source = {"coco": out / "a.json", "yolo": out / "data.yaml", "voc": out / "Annotations"}[format]
        data = read_annotations(source, None if format == "yolo" else out / "images")
        expected = {name: objects for name, (_, objects) in images.items()}
        assert_equal(as_read(data), expected, 0.01)

    def test_masks_are_those_that_it_reads(self, tmp_path):
        images = random_objects(3)
        write_images(tmp_path, images)
        path = write_coco(tmp_path / "a.json", images, polygons=True)
        dataset = self.supervision.DetectionDataset.from_coco(str(tmp_path), str(path), force_masks=True)
        data = read_annotations(path, tmp_path)
        by_name = {image["file_name"]: (image, objects) for image, objects in data.each_image()}
        total, different = 0, 0
        for file, _, found in dataset:
            image, objects = by_name[Path(file).name]
            for annotation, mask in zip(objects, found.mask if len(found) else []):
                ours = decode_segmentation(annotation["segmentation"], image["height"], image["width"])
                assert np.array_equal(ours, coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(
                    annotation["segmentation"], image["height"], image["width"]))))  # fmt: skip
                total += mask.sum()
                different += (mask != ours.astype(bool)).sum()
        # supervision fills polygons with OpenCV, after rounding their points, and on both sides of the outline; COCO's
        # code, which vitkit uses, counts the pixels whose centers lie inside.
        assert 0 < different < 0.25 * total

    def test_roboflows_supercategory_is_a_class_without_objects_in_both(self, tmp_path):
        images = random_objects(4)
        write_images(tmp_path / "train", images)
        categories = [dict(id=0, name="animals", supercategory="none")]
        categories += [dict(id=k, name=name, supercategory="animals") for k, name in enumerate(CLASSES, start=1)]
        path = write_coco(tmp_path / "train" / "_annotations.coco.json", images, categories=categories)
        dataset = self.supervision.DetectionDataset.from_coco(str(tmp_path / "train"), str(path))
        ours = CocoDetection(tmp_path / "train", path)
        assert ours.classes == dataset.classes == ["animals", *CLASSES]
        assert supervised(dataset).keys() == images.keys()
        counts = Counter(ours.classes[label] for label in ours.table.labels)
        expected = Counter(label for _, objects in images.values() for label, _ in objects)
        assert counts == expected == Counter(label for objects in supervised(dataset).values() for label, _ in objects)


class TestDatumaro:
    @pytest.fixture(autouse=True)
    def package(self):
        pytest.importorskip("datumaro")
        from datumaro.components.annotation import Bbox, Polygon
        from datumaro.components.dataset import Dataset
        from datumaro.components.dataset_base import DatasetItem
        from datumaro.components.media import Image as Media

        self.Bbox, self.Polygon, self.Dataset, self.Item, self.Media = Bbox, Polygon, Dataset, DatasetItem, Media

    def dataset(self, images, *, polygons=False):
        items = []
        for name, ((width, height), objects) in images.items():
            annotations = []
            for number, (label, (x0, y0, x1, y1)) in enumerate(objects, start=1):
                about = dict(label=CLASSES.index(label), id=number, group=number)
                if polygons:
                    annotations.append(self.Polygon([x0, y1, (x0 + x1) / 2, y0, x1, y1], **about))
                else:
                    annotations.append(self.Bbox(x0, y0, x1 - x0, y1 - y0, **about))
            media = self.Media.from_numpy(np.full((height, width, 3), 90, np.uint8), ext=".png")
            items.append(self.Item(id=Path(name).stem, subset="train", media=media, annotations=annotations))
        return self.Dataset.from_iterable(items, categories=CLASSES)

    def read(self, dataset):
        names = [category.name for category in dataset.categories()[next(iter(dataset.categories()))].items]
        boxes = {}
        for item in dataset:
            found = [
                (names[a.label], a.get_bbox()) for a in item.annotations if type(a).__name__ in ("Bbox", "Polygon")
            ]
            name = f"{Path(item.id).name}.png"
            boxes[name] = sorted((label, [x, y, x + w, y + h]) for label, (x, y, w, h) in found)
        return boxes

    @pytest.mark.parametrize(
        ("format", "polygons"),
        [
            *((format, False) for format in ("coco_instances", "yolo", "voc_detection", "cvat")),
            *((format, True) for format in ("coco_instances", "cvat")),
        ],
    )
    @pytest.mark.parametrize("seed", [0, 1])
    def test_vitkit_reads_what_it_writes(self, format, seed, polygons, tmp_path):
        images = random_objects(seed)
        self.dataset(images, polygons=polygons).export(str(tmp_path), format, save_media=True)
        data = read_annotations(tmp_path)
        expected = {name: objects for name, (_, objects) in images.items()}
        if format == "voc_detection":
            # It writes no XML for an image without objects. VOC has one, so vitkit does not take the image for empty.
            expected = {name: objects for name, objects in expected.items() if objects}
        assert_equal(as_read(data), expected, 0.02)

    @pytest.mark.parametrize("seed", [0, 1])
    @pytest.mark.parametrize("to", ["coco", "yolo", "voc", "cvat"])
    def test_reads_what_vitkit_writes(self, to, seed, tmp_path):
        images = random_objects(seed, whole=to == "voc")
        write_images(tmp_path / "photos", images)
        data = read_annotations(write_coco(tmp_path / "photos" / "a.json", images), tmp_path / "photos")
        if to != "cvat":  # of which datumaro reads only the objects in the subset that the file is named after
            data.splits = {part: [i["id"] for i in data.images[k::2]] for k, part in enumerate(("train", "val"))}
        out = tmp_path / "out"
        WRITERS[to](data, out / "annotations" if to == "coco" else out, {})
        if to == "coco":
            write_images(out / "images/train", images)
            write_images(out / "images/val", images)
        if to == "voc":  # datumaro's own file of classes, without which it expects VOC's twenty
            (out / "labelmap.txt").write_text("".join(f"{name}:::\n" for name in ["background", *CLASSES]))
        format = {"coco": "coco_instances", "yolo": "yolo", "voc": "voc_detection", "cvat": "cvat"}[to]
        expected = {name: objects for name, (_, objects) in images.items()}
        if to == "voc":  # whose first pixel is 1, of which datumaro takes no account; vitkit and supervision do
            expected = {
                name: [(label, [x0 + 1, y0 + 1, x1, y1]) for label, (x0, y0, x1, y1) in objects]
                for name, objects in expected.items()
            }
        assert_equal(self.read(self.Dataset.import_from(str(out), format)), expected, 0.02)

    def test_a_class_with_id_0_is_a_class(self, tmp_path):
        """Roboflow and others count from 0. datumaro takes objects of class 0 for such without a class."""
        images = random_objects(0)
        write_images(tmp_path / "images" / "train", images)
        path = write_coco(tmp_path / "annotations" / "instances_train.json", images, first_id=0)
        expected = Counter(label for _, objects in images.values() for label, _ in objects)
        ours = CocoDetection(tmp_path / "images" / "train", path)
        assert Counter(ours.classes[label] for label in ours.table.labels) == expected
        dataset = self.Dataset.import_from(str(tmp_path), "coco_instances")
        assert Counter(a.label for item in dataset for a in item.annotations)[None] == expected[CLASSES[0]] > 0

    @pytest.mark.parametrize(
        ("path", "format", "kinds"),
        [
            ("coco_dataset/coco_instances", "coco_instances", ["Bbox"]),
            ("coco_dataset/coco_person_keypoints", "coco_person_keypoints", ["Bbox"]),
            ("coco_dataset/coco_roboflow", "roboflow_coco", ["Bbox"]),
            ("coco_dataset/mmdet_coco", "mmdet_coco", ["Bbox"]),
            ("cvat_dataset/for_images/export_project", "cvat", ["Bbox", "Polygon"]),
            ("roboflow_dataset/coco", "roboflow_coco", ["Bbox"]),
            ("roboflow_dataset/yolo", "roboflow_yolo", ["Bbox"]),
            ("voc_dataset/voc_dataset1", "voc_detection", ["Bbox"]),
            ("voc_dataset/voc_dataset3", "voc_detection", ["Bbox"]),
            ("yolo_dataset/labels", "yolo", ["Bbox"]),
            ("yolo_dataset/strict", "yolo", ["Bbox"]),
        ],
    )
    def test_objects_of_its_fixtures_are_those_that_it_reads(self, path, format, kinds):
        """What vitkit does not read there, and says so: LabelMe's XML, CreateML, TFRecord, a class for each image,
        boxes with angles, an XML of CVAT with shapes without a label, VOC without images."""
        folder = Path(os.environ.get("VITKIT_DATUMARO", ""), path)
        if not folder.is_dir() or "VITKIT_DATUMARO" not in os.environ:
            pytest.skip("set VITKIT_DATUMARO to tests/assets in a checkout of github.com/openvinotoolkit/datumaro")
        dataset = self.Dataset.import_from(str(folder), format)
        (categories,) = [c for kind, c in dataset.categories().items() if kind.name == "label"]
        expected = Counter()
        for item in dataset:
            for a in item.annotations:
                if type(a).__name__ in kinds:
                    expected[Path(item.id).name, categories[a.label].name, round(a.w if "w" in dir(a) else 0)] += 1
        ours = Counter()
        data = read_annotations(folder)
        names = {category["id"]: category["name"] for category in data.categories}
        for image, objects in data.each_image():
            for a in objects:
                # datumaro has no width of a polygon, and takes no account of VOC's first pixel, which is 1.
                width = (
                    a["bbox"][2] - (format == "voc_detection") if len(kinds) == 1 or not a.get("segmentation") else 0
                )
                ours[Path(image["file_name"]).stem, names[a["category_id"]], round(width)] += 1
        assert ours == expected and ours
