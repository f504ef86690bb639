"""Writes annotations as COCO, YOLO, Pascal VOC, CVAT, Label Studio or ODVG.

Images are linked into the folders of all but COCO and ODVG (by hard links, or copied if the disk does not support
them). What a format cannot hold is counted in `lost`.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, TextIO
from urllib.parse import quote
from xml.etree import ElementTree

import cv2
import numpy as np
import yaml
from pycocotools import mask as coco_mask

from vitkit.data.formats.annotated import AnnotatedImages, class_names
from vitkit.data.formats.exporters import UNSET
from vitkit.data.formats.grounding import GroundedImage
from vitkit.data.formats.label_studio import LOCAL_FILES
from vitkit.data.formats.odvg import LABEL_MAP
from vitkit.data.formats.sizes import check_size
from vitkit.errors import DataError
from vitkit.io.atomic import link_atomically
from vitkit.io.coco_schema import ANNOTATED_CLASSES
from vitkit.io.folders import SPLITS
from vitkit.io.image_files import path_inside, read_header, upright_size
from vitkit.io.keypoints import read_keypoint_info
from vitkit.io.output import check_links, unwritable, write_bytes, write_text, writing
from vitkit.io.parsing import check_distinct
from vitkit.io.segmentations import decode_segmentation, encode_segmentation, round_pixels, visible_box
from vitkit.structures import KeypointInfo
from vitkit.text_format import is_name

Lost = dict[str, list[str]]
"""Kind of information that is lost -> names of the images or objects that lost it."""
NUM_SHOWN = 3
"""The number of names in a line about items that were left out."""
_ALL = "all"
_NEGLIGIBLE = 0.01
"""Pixels; rounded numbers may lie as far outside of their image."""
_MIN_OVERLAP = 0.99
"""The smallest IoU of a written outline and its mask; below it, the outline follows the edges of the mask's pixels."""


def write_coco(data: AnnotatedImages, out: Path, lost: Lost) -> list[Path]:
    """Write one JSON file, or a folder with one instances_SPLIT.json per split; images stay where they are."""
    if out.suffix.lower() == ".json":
        parts = {out: data}
    elif data.splits:
        parts = {out / f"instances_{split}.json": data.split(split) for split in data.splits}
    else:
        parts = {out / "instances.json": data}
    for path, part in parts.items():
        write_text(path, json.dumps(part.content))
    return list(parts)


def write_yolo(data: AnnotatedImages, out: Path, lost: Lost) -> list[Path]:
    """Write images/SPLIT, labels/SPLIT and data.yaml, as Ultralytics reads them.

    Classes are numbered from 0 in the order of their ids. Objects with masks become polygons; masks in several parts or
    with holes become one outline with seams. With keypoints, all lines are poses: a box and points. data.yaml names
    only splits that there are, without splits all images as train; `notes` say if it lacks one that trainers require.
    """
    ids = sorted(category["id"] for category in data.categories)
    number = {category_id: k for k, category_id in enumerate(ids)}
    keypoints = _keypoints_of(data)
    with_masks = keypoints is None and data.any_object_has("segmentation")
    check_names(data)
    check_images(data)
    names_in_splits = _names_in_splits(data)
    for image, annotations in _by_image(data, lost):
        lines: dict[str, None] = {}
        for annotation in annotations:
            values = _yolo_values(annotation, image, with_masks, lost)
            if keypoints is not None:
                values += _yolo_points(annotation, image, len(keypoints.names), lost)
            numbers = " ".join(f"{value:.10g}" for value in values)
            line = f"{number[annotation['category_id']]} {numbers}"
            if line in lines:  # which readers take for a mistake
                lost.setdefault("duplicate objects", []).append(str(annotation.get("id")))
            lines[line] = None
        for target in names_in_splits(image):
            link_image(image_file(data, image), out, f"images/{target}")
            label_file = (out / "labels" / target).with_suffix(".txt")
            write_text(label_file, "".join(f"{line}\n" for line in lines), below=out)
    for split in data.splits.keys() - {*SPLITS}:
        listed = {*data.splits[split]}
        names_of = [image["file_name"] for image in data.images if image["id"] in listed]
        lost.setdefault(f"images of the split {split!r}, as YOLO reads train, val and test", []).extend(names_of)
    names = class_names(data.content)
    folders = {split: f"images/{split}" for split in data.splits} or {"train": f"images/{_ALL}"}
    settings = folders | {"names": [names[i] for i in ids]}
    if keypoints is not None:
        points = {"kpt_shape": [len(keypoints.names), 3], "flip_idx": keypoints.flip_order}
        settings |= points | {"kpt_names": {k: list(keypoints.names) for k in range(len(ids))}}
    if lacking := [split for split in ("train", "val") if split not in folders]:
        # Not the same folder twice: a trainer would validate on what it has learned.
        data.notes.append(f"data.yaml has no {' and no '.join(lacking)}: add it before training, or split the images")
    write_text(out / "data.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    return [out / "data.yaml", out / "labels"]


def _keypoints_of(data: AnnotatedImages) -> KeypointInfo | None:
    """Return the keypoints of the categories, None if they have none; raises like `read_keypoint_info`."""
    if not any(category.get("keypoints") for category in data.categories):
        return None
    return read_keypoint_info(data.categories, data.source.name)[0]


def _yolo_points(annotation: Mapping[str, Any], image: Mapping[str, Any], count: int, lost: Lost) -> list[float]:
    """Return the numbers of a pose after its box: x and y in fractions of the image, and visibility."""
    if annotation.get("segmentation"):
        lost.setdefault("masks: YOLO's poses have boxes and points only", []).append(str(annotation.get("id")))
    points = annotation.get("keypoints") or [0] * (3 * count)
    triples = zip(points[::3], points[1::3], points[2::3])
    scale = image["width"], image["height"]
    return [v for x, y, seen in triples for v in ((x / scale[0], y / scale[1], seen) if seen else (0, 0, 0))]


def write_voc(data: AnnotatedImages, out: Path, lost: Lost) -> list[Path]:
    """Write JPEGImages, Annotations, ImageSets/Main/SPLIT.txt, and classes.txt with the order of the classes."""
    names = class_names(data.content)
    check_names(data, stripped=True)
    check_images(data)
    flat_name = _flat_names(data)
    for image, annotations in _by_image(data, lost):
        name = flat_name(image)
        link_image(image_file(data, image), out, f"JPEGImages/{name}")
        root = ElementTree.Element("annotation")
        _add_text(root, filename=name)
        size = ElementTree.SubElement(root, "size")
        _add_text(size, width=image["width"], height=image["height"], depth=3)
        for annotation in annotations:
            if annotation.get("num_keypoints"):
                lost.setdefault("keypoints: VOC's XML has boxes only", []).append(str(annotation.get("id")))
            if annotation.get("segmentation"):
                lost.setdefault("masks: VOC's XML has boxes only", []).append(str(annotation.get("id")))
            x, y, width, height = _clip(annotation, image, lost)
            obj = ElementTree.SubElement(root, "object")
            # Other tools' JSON may have true and false or degrees, which are not VOC's 0 and 1.
            flags = {flag: int(annotation.get(flag) not in UNSET) for flag in ("truncated", "occluded", "difficult")}
            _add_text(obj, name=names[annotation["category_id"]], **flags)
            box = ElementTree.SubElement(obj, "bndbox")
            _add_text(
                box,
                xmin=round_pixels(x + 1),
                ymin=round_pixels(y + 1),
                xmax=round_pixels(x + width),
                ymax=round_pixels(y + height),
            )
        ElementTree.indent(root)
        path = out / "Annotations" / f"{PurePosixPath(name).stem}.xml"
        write_bytes(path, ElementTree.tostring(root, encoding="utf-8"), below=out)
    stems = {image["id"]: PurePosixPath(flat_name(image)).stem for image in data.images} if data.splits else {}
    for split, image_ids in data.splits.items():
        path = path_inside(out / "ImageSets" / "Main", f"{split}.txt", f"split {split!r}")
        write_text(path, "".join(f"{stems[image_id]}\n" for image_id in image_ids), below=out)
    ordered = sorted(names)
    write_text(out / "classes.txt", "".join(f"{names[i]}\n" for i in ordered))
    return [out / "Annotations", out / "classes.txt"]


def write_cvat(data: AnnotatedImages, out: Path, lost: Lost) -> list[Path]:
    """Write annotations.xml, as "CVAT for images 1.1", and images/.

    Masks become CVAT's masks, polygons of one part stay polygons. A score is written as an attribute of that name,
    which CVAT shows if the labels of the task have it.
    """
    names = class_names(data.content)
    check_names(data, stripped=True)
    check_images(data)
    subsets = {image_id: split for split, ids in data.splits.items() for image_id in ids}
    root = ElementTree.Element("annotations")
    _add_text(root, version="1.1")
    labels = ElementTree.SubElement(ElementTree.SubElement(ElementTree.SubElement(root, "meta"), "task"), "labels")
    for name in (names[i] for i in sorted(names)):
        label = ElementTree.SubElement(labels, "label")
        _add_text(label, name=name)
        attribute = ElementTree.SubElement(ElementTree.SubElement(label, "attributes"), "attribute")
        _add_text(attribute, name="score", mutable=False, input_type="number", default_value=0, values="0;1;0.001")
    points = {category["id"]: category["keypoints"] for category in data.categories if category.get("keypoints")}
    limbs = {category["id"]: category.get("skeleton") or () for category in data.categories}
    by_name = {label.findtext("name"): label for label in labels}
    for category_id in sorted(points):
        ElementTree.SubElement(by_name[names[category_id]], "type").text = "skeleton"
        ElementTree.SubElement(by_name[names[category_id]], "svg").text = _skeleton_svg(
            points[category_id], limbs[category_id]
        )
        for point in points[category_id]:
            label = ElementTree.SubElement(labels, "label")
            _add_text(label, name=point, type="points")
            ElementTree.SubElement(label, "parent").text = names[category_id]
    ElementTree.indent(root)
    path = out / "annotations.xml"
    head, end = ElementTree.tostring(root, encoding="unicode").rsplit("\n", 1)
    with writing_text(path, below=out) as file:
        file.write(f"<?xml version='1.0' encoding='utf-8'?>\n{head}\n")
        for number, (image, annotations) in enumerate(_by_image(data, lost)):
            link_image(image_file(data, image), out, f"images/{image['file_name']}")
            element = _cvat_image(image, annotations, names, points, lost)
            element.attrib = {"id": str(number)} | element.attrib
            if image["id"] in subsets:
                element.set("subset", subsets[image["id"]])
            ElementTree.indent(element, level=1)
            file.write(f"  {ElementTree.tostring(element, encoding='unicode')}\n")
        file.write(end)
    return [path]


def _skeleton_svg(names: Sequence[str], limbs: Sequence[Sequence[int]]) -> str:
    """Return the drawing of a skeleton in CVAT's constructor: its points on a circle, and lines for its limbs."""
    drawing = ElementTree.Element("svg")
    angles = [2 * math.pi * k / len(names) for k in range(len(names))]
    at = [(f"{50 - 40 * math.sin(angle):.2f}", f"{50 - 40 * math.cos(angle):.2f}") for angle in angles]
    for a, b in limbs:
        ends = dict(zip(("x1", "y1", "x2", "y2"), (*at[a - 1], *at[b - 1])))
        nodes = {"data-type": "edge", "data-node-from": str(a), "data-node-to": str(b)}
        ElementTree.SubElement(drawing, "line", ends | {"stroke": "black", "stroke-width": "0.5"} | nodes)
    for number, (name, (x, y)) in enumerate(zip(names, at), 1):
        nodes = {"data-type": "element node", "data-element-id": str(number), "data-node-id": str(number)}
        circle = {"r": "1.5", "cx": x, "cy": y, "stroke": "black", "fill": "#b3b3b3", "stroke-width": "0.1"}
        ElementTree.SubElement(drawing, "circle", circle | nodes | {"data-label-name": name})
    return "".join(ElementTree.tostring(element, encoding="unicode") for element in drawing)


def _cvat_image(
    image: Mapping[str, Any],
    annotations: list[dict[str, Any]],
    names: Mapping[int, str],
    points: Mapping[int, Sequence[str]],
    lost: Lost,
) -> ElementTree.Element:
    """Return the element of an image with its objects, without its number.

    An object with labeled points is a skeleton, and its box one of the same group.
    """
    described = {"name": image["file_name"], "width": str(image["width"]), "height": str(image["height"])}
    element = ElementTree.Element("image", described)
    for number, annotation in enumerate(annotations, 1):
        kind, fields = _cvat_shape(annotation, image, lost)
        has_points = any((annotation.get("keypoints") or ())[2::3])
        if has_points and kind != "box":
            lost.setdefault("masks of skeletons", []).append(str(annotation.get("id")))
            kind, fields = _cvat_shape({**annotation, "segmentation": None}, image, lost)
        fields |= {"group_id": number} if has_points else {}
        flags = {"occluded": int(annotation.get("occluded") not in UNSET), "z_order": 0}
        known = {"label": names[annotation["category_id"]], "source": "auto" if "score" in annotation else "file"}
        shape = ElementTree.SubElement(
            element, kind, {key: str(value) for key, value in (known | fields | flags).items()}
        )
        if has_points:
            shape = ElementTree.SubElement(element, "skeleton", {
                "label": known["label"], "source": known["source"], "group_id": str(number), "z_order": "0"
            })  # fmt: skip
            values = annotation["keypoints"]
            for name, x, y, seen in zip(
                points[annotation["category_id"]], values[::3], values[1::3], values[2::3], strict=True
            ):
                ElementTree.SubElement(shape, "points", {
                    "label": name, "outside": str(int(not seen)), "occluded": str(int(seen == 1)),
                    "points": f"{round_pixels(x)},{round_pixels(y)}",
                })  # fmt: skip
        if "score" in annotation:
            ElementTree.SubElement(shape, "attribute", name="score").text = f"{annotation['score']:.3f}"
    return element


def _cvat_shape(annotation: Mapping[str, Any], image: Mapping[str, Any], lost: Lost) -> tuple[str, dict[str, Any]]:
    """Return the element and its attributes: a polygon, a mask or, for an empty mask as well, a box."""
    segmentation = annotation.get("segmentation")
    if not (polygons := visible_outlines(segmentation, image["height"], image["width"])):
        x, y, width, height = _clip(annotation, image, lost)
        box = {"xtl": x, "ytl": y, "xbr": x + width, "ybr": y + height}
        return "box", {key: round_pixels(value) for key, value in box.items()}
    if isinstance(segmentation, list) and len(segmentation) == len(polygons) == 1:
        pairs = zip(polygons[0][::2], polygons[0][1::2])
        return "polygon", {"points": ";".join(f"{round_pixels(x)},{round_pixels(y)}" for x, y in pairs)}
    mask = decode_segmentation(segmentation, image["height"], image["width"])
    x, y, width, height = cv2.boundingRect(mask)
    part = mask[y : y + height, x : x + width].ravel()
    edges = [0, *(np.flatnonzero(np.diff(part)) + 1), part.size]
    runs = np.diff(edges).tolist()
    rle = ", ".join(map(str, [0, *runs] if part[0] else runs))  # the first run is background
    return "mask", {"rle": rle, "left": x, "top": y, "width": width, "height": height}


def write_label_studio(data: AnnotatedImages, out: Path, lost: Lost) -> list[Path]:
    """Write tasks.json to import, labels.xml with the labeling interface, and images/.

    Objects with scores become predictions, which a person accepts or corrects, others annotations. Label Studio finds
    the images if its folder of local files is `out` (LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT).
    """
    names = class_names(data.content)
    check_names(data)
    check_images(data)
    split_of = {image_id: split for split, ids in data.splits.items() for image_id in ids}
    key = "predictions" if data.any_object_has("score") else "annotations"
    interface = ElementTree.Element("View")
    ElementTree.SubElement(interface, "Image", name="image", value="$image")
    for kind in ("RectangleLabels", "PolygonLabels"):
        tag = ElementTree.SubElement(interface, kind, name=kind, toName="image")
        for name in (names[i] for i in sorted(names)):
            ElementTree.SubElement(tag, "Label", value=name)
    ElementTree.indent(interface)
    with writing_text(out / "tasks.json", below=out) as file:
        file.write("[")
        for number, (image, annotations) in enumerate(_by_image(data, lost)):
            link_image(image_file(data, image), out, f"images/{image['file_name']}")
            results = [
                result
                for annotation in annotations
                for result in _label_studio_results(annotation, names[annotation["category_id"]], image, lost)
            ]
            scores = [annotation["score"] for annotation in annotations if "score" in annotation]
            entry = {"result": results} | ({"score": min(scores), "model_version": "vitkit"} if scores else {})
            known = {"split": split_of[image["id"]]} if image["id"] in split_of else {}
            address = f"{LOCAL_FILES}images/{quote(image['file_name'])}"
            task = {"data": {"image": address} | known, key: [entry]}
            file.write(f"{', ' if number else ''}{json.dumps(task, ensure_ascii=False)}")
        file.write("]")
    write_bytes(out / "labels.xml", ElementTree.tostring(interface, encoding="utf-8"), below=out)
    return [out / "tasks.json", out / "labels.xml"]


def _label_studio_results(
    annotation: Mapping[str, Any], name: str, image: Mapping[str, Any], lost: Lost
) -> list[dict[str, Any]]:
    """Return an object's results: a polygon for each part of its mask, or a box."""
    if annotation.get("num_keypoints"):
        lost.setdefault("keypoints: they are written to no label of Label Studio", []).append(str(annotation.get("id")))
    width, height = image["width"], image["height"]
    segmentation = annotation.get("segmentation")
    if polygons := visible_outlines(segmentation, height, width):
        kind = "PolygonLabels"
        if len(polygons) > 1:
            lost.setdefault("parts and holes, which become separate objects", []).append(str(annotation.get("id")))
        values = [{"points": [[100 * x / width, 100 * y / height] for x, y in zip(p[::2], p[1::2])]} for p in polygons]
    else:
        kind, (x, y, w, h) = "RectangleLabels", _clip(annotation, image, lost)
        values = [{"x": 100 * x / width, "y": 100 * y / height, "width": 100 * w / width, "height": 100 * h / height}]
    known = {"type": kind.lower(), "from_name": kind, "to_name": "image"}
    known |= {"original_width": width, "original_height": height, "image_rotation": 0}
    known |= {"score": annotation["score"]} if "score" in annotation else {}
    return [known | {"value": value | {"rotation": 0, kind.lower(): [name]}} for value in values]


def write_odvg(data: AnnotatedImages, out: Path, lost: Lost) -> list[Path]:
    """Write a line for each image to SPLIT.jsonl or annotations.jsonl, and label_map.json; images stay in place."""
    names = class_names(data.content)
    check_names(data)
    label_of = {category_id: label for label, category_id in enumerate(sorted(names))}
    splits = {name: {*ids} for name, ids in data.splits.items()} or {"annotations": None}
    with ExitStack() as stack:
        files = {}
        for split in splits:
            path = path_inside(out, f"{split}.jsonl", f"split {split!r}")
            files[split] = stack.enter_context(writing_text(path, below=out))
        for image, annotations in _by_image(data, lost):
            line = json.dumps(_odvg_entry(image, annotations, names, label_of, lost)) + "\n"
            for split, ids in splits.items():
                if ids is None or image["id"] in ids:
                    files[split].write(line)
    write_text(out / LABEL_MAP, json.dumps({label_of[i]: names[i] for i in sorted(names)}), below=out)
    return [out]


def _odvg_entry(
    image: Mapping[str, Any],
    annotations: list[dict[str, Any]],
    names: Mapping[int, str],
    label_of: Mapping[int, int],
    lost: Lost,
) -> dict[str, Any]:
    """Return an image's line."""
    instances = []
    for annotation in annotations:
        if annotation.get("segmentation"):
            lost.setdefault("masks: ODVG has boxes only", []).append(str(annotation.get("id")))
        x, y, width, height = _clip(annotation, image, lost)
        category_id = annotation["category_id"]
        bbox = [round_pixels(value) for value in (x, y, x + width, y + height)]
        instances.append({"bbox": bbox, "label": label_of[category_id], "category": names[category_id]})
    if ANNOTATED_CLASSES[0] in image:
        lost.setdefault("lists of the classes that an image is annotated for", []).append(image["file_name"])
    described = {"filename": image["file_name"], "height": image["height"], "width": image["width"]}
    return described | {"detection": {"instances": instances}}


def write_odvg_captions(images: Iterable[GroundedImage], path: Path) -> None:
    """Write images with captions as ODVG's JSON lines."""
    lines = []
    for image in images:
        regions = [
            {
                "bbox": region.boxes_xyxy[0] if len(region.boxes_xyxy) == 1 else region.boxes_xyxy,
                "phrase": region.name,
                "tokens_positive": region.spans,
            }
            for region in image.regions
        ]
        content = {"filename": image.file_name, "height": image.height, "width": image.width}
        lines.append(json.dumps(content | {"grounding": {"caption": image.caption, "regions": regions}}) + "\n")
    write_text(path, "".join(lines))


STAYING = ("coco", "odvg")
"""The formats whose images stay where they are."""
WRITERS: dict[str, Callable[[AnnotatedImages, Path, Lost], list[Path]]] = {
    "coco": write_coco,
    "yolo": write_yolo,
    "voc": write_voc,
    "cvat": write_cvat,
    "label-studio": write_label_studio,
    "odvg": write_odvg,
}


def image_file(data: AnnotatedImages, image: Mapping[str, Any]) -> Path:
    """Return an image's file.

    Raises:
        DataError: it lies outside the dataset's folder.
    """
    return path_inside(data.folder, image["file_name"], data.source.name)


def check_images(data: AnnotatedImages) -> None:
    """Check the files of all images, before anything is written.

    Raises:
        DataError: a file lies outside the dataset's folder, cannot be read, or has another size than annotated.
    """
    for image in data.images:
        check_size(image, upright_size(image_file(data, image)))


def check_names(data: AnnotatedImages, *, stripped: bool = False) -> None:
    """Check that names can be written as lines of text, before anything is written.

    Args:
        stripped: whether blanks around a name are lost when the format is read.
    Raises:
        DataError: a name cannot, or two classes have the same.
    """
    check_distinct(class_names(data.content).values(), data.source.name)
    for name in chain(class_names(data.content).values(), data.splits, (image["file_name"] for image in data.images)):
        if not is_name(name) or name.isspace() or (stripped and name != name.strip()):
            raise DataError(
                f"{data.source.name}: the name {name!r:.200} cannot be written in this format; expected a line of "
                f"text{' without blanks around it' if stripped else ''}. Rename it, or write COCO's format."
            )


def _by_image(data: AnnotatedImages, lost: Lost) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield each image with its objects, leaving out those that neither YOLO nor VOC can hold."""
    for image, annotations in data.each_image():
        kept = []
        for annotation in annotations:
            x, y, width, height = annotation["bbox"]
            if annotation.get("iscrowd"):
                reason = "crowd regions"
            elif min(width, height) <= 0:
                reason = "boxes without an area"
            elif x >= image["width"] or y >= image["height"] or x + width <= 0 or y + height <= 0:
                reason = "boxes outside their image"
            elif _is_hidden(annotation, image["height"], image["width"]):
                reason = "masks outside their image"
            else:
                kept.append(annotation)
                continue
            lost.setdefault(reason, []).append(str(annotation.get("id")))
        yield image, kept


def _is_hidden(annotation: Mapping[str, Any], height: int, width: int) -> bool:
    """Whether an object has polygons of which no part lies in the image, although their box does."""
    polygons, (x, y, box_width, box_height) = annotation.get("segmentation"), annotation["bbox"]
    if not isinstance(polygons, list) or not polygons:
        return False
    is_inside = x >= 0 and y >= 0 and x + box_width <= width and y + box_height <= height
    return not is_inside and not any(cut_polygon(polygon, height, width) for polygon in polygons)


def _clip(annotation: Mapping[str, Any], image: Mapping[str, Any], lost: Lost) -> list[float]:
    """Return the box, xywh, of an object's part in its image.

    VOC's readers take coordinates below 1 for another origin, and trainers leave out YOLO's boxes that extend beyond.
    """
    x, y, width, height = annotation["bbox"]
    if max(-x, -y, x + width - image["width"], y + height - image["height"]) > _NEGLIGIBLE:
        lost.setdefault("parts of boxes outside their image", []).append(str(annotation.get("id")))
    return visible_box(annotation, image["height"], image["width"])


def _flat_names(data: AnnotatedImages) -> Callable[[Mapping[str, Any]], str]:
    """Return a function from an image to a unique file name without folders."""
    stems = Counter(PurePosixPath(image["file_name"]).stem for image in data.images)
    is_repeated = max(stems.values(), default=0) > 1

    def flat_name(image: Mapping[str, Any]) -> str:
        path = PurePosixPath(image["file_name"])
        return str(path).replace("/", "_") if is_repeated else path.name

    if is_repeated:
        taken: dict[str, str] = {}
        for image in data.images:
            stem, name = PurePosixPath(flat_name(image)).stem, image["file_name"]
            if stem in taken:
                other = taken[stem]
                which = f"'{name}' and '{other}'" if other != name else f"two images are called '{name}' and"
                raise DataError(f"{which} would have one label file. Give each image a unique name.")
            taken[stem] = name
    return flat_name


def _names_in_splits(data: AnnotatedImages) -> Callable[[Mapping[str, Any]], list[PurePosixPath]]:
    """Return a function from an image to the names that it is written to: one in the folder of each split that it is
    in."""
    flat_name = _flat_names(data)
    splits: dict[int, dict[str, None]] = {}
    for split, image_ids in data.splits.items():
        for image_id in image_ids:
            splits.setdefault(image_id, {})[split] = None

    def names_in_splits(image: Mapping[str, Any]) -> list[PurePosixPath]:
        of_image = splits.get(image["id"], ()) if data.splits else (_ALL,)
        return [PurePosixPath(split, flat_name(image)) for split in of_image]

    return names_in_splits


def _yolo_values(annotation: Mapping[str, Any], image: Mapping[str, Any], with_masks: bool, lost: Lost) -> list[float]:
    """Return the numbers after the class: a box's center and size, or a polygon, in fractions of the image."""
    width, height = image["width"], image["height"]
    x, y, box_width, box_height = _clip(annotation, image, lost)
    if not with_masks:
        return [(x + box_width / 2) / width, (y + box_height / 2) / height, box_width / width, box_height / height]
    segmentation = annotation.get("segmentation")
    polygons = outlines(segmentation, height, width) if segmentation else []
    if not polygons:
        polygons = [[x, y, x + box_width, y, x + box_width, y + box_height, x, y + box_height]]
    visible = [part for polygon in polygons if (part := cut_polygon(polygon, height, width))]
    outline = join_polygons(visible)
    # Of parts that overlap, the outline would leave out what they share; and rounding shows in tiny polygons.
    is_changed = len(polygons) > 1 or visible != polygons
    if is_changed and isinstance(segmentation, list) and overlap([outline], segmentation, height, width) < _MIN_OVERLAP:
        # Of a polygon that contains no pixel's center, the mask is empty.
        visible = outlines(encode_segmentation(segmentation, height, width), height, width) or visible
        outline = join_polygons(visible)
    if len(visible) > 1:
        lost.setdefault("parts and holes, which are joined by seams to one outline", []).append(
            str(annotation.get("id"))
        )
    return [value / (height if k % 2 else width) for k, value in enumerate(outline)]


def outlines(segmentation: Any, height: int, width: int) -> list[list[float]]:
    """Return the outlines of a mask and its holes as flat polygons; those of run lengths follow the pixels' edges."""
    if isinstance(segmentation, list):
        return [polygon for polygon in segmentation if len(polygon) >= 6]
    mask = decode_segmentation(segmentation, height, width)
    x, y, part_width, part_height = cv2.boundingRect(mask)
    # With pixels doubled, the contour shows on which side of a pixel it runs, and so follows the pixels' edges.
    doubled = mask[y : y + part_height, x : x + part_width].repeat(2, axis=0).repeat(2, axis=1)
    contours, _ = cv2.findContours(doubled, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    return [((contour.reshape(-1, 2) + 1) // 2 + (x, y)).ravel().astype(float).tolist() for contour in contours]


def visible_outlines(segmentation: Any, height: int, width: int) -> list[list[float]]:
    """Return `outlines` cut at the image's border, or along the mask's pixels where cutting would change the mask.

    One polygon stays one, of the parts of its mask joined by seams. Empty if there is no mask, or nothing of it shows.
    """
    polygons = outlines(segmentation, height, width) if segmentation else []
    visible = [part for polygon in polygons if (part := cut_polygon(polygon, height, width))]
    if visible != polygons and visible and overlap(visible, segmentation, height, width) < _MIN_OVERLAP:
        parts = outlines(encode_segmentation(segmentation, height, width), height, width) or visible
        return [join_polygons(parts)] if len(visible) == 1 else parts
    return visible


def join_polygons(polygons: list[list[float]]) -> list[float]:
    """Join polygons into one, by zero-width seams between the nearest points of each polygon and those before it."""
    path = np.array(polygons[0], float).reshape(-1, 2)
    for polygon in polygons[1:]:
        points = np.array(polygon, float).reshape(-1, 2)
        distances = ((path[:, None] - points) ** 2).sum(axis=2)
        i, j = np.unravel_index(distances.argmin(), distances.shape)
        loop = np.concatenate([points[j:], points[: j + 1]])
        path = np.concatenate([path[: i + 1], loop, path[i:]])
    return path.ravel().tolist()


def _add_text(parent: ElementTree.Element, **texts: Any) -> None:
    for tag, text in texts.items():
        ElementTree.SubElement(parent, tag).text = str(text)


def link_image(source: Path, out: Path, name: str) -> Path:
    """Link an image into a folder, or copy it if the file system has no links.

    Args:
        out, name: the folder, which the file must not leave through a symbolic link, and the file below it.
    Returns:
        the file.
    Raises:
        DataError: the source is not an image, or the name leads out of the folder.
    """
    target = path_inside(out, name, f"'{source}'")
    # Only what is an image is linked, and no array: annotations could name any file.
    (read_header if source.suffix.lower() == ".npy" else upright_size)(source)
    try:
        if target.exists() and target.samefile(source):
            return target
        check_links(target, out)
        link_atomically(source, target, sync=False)
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise unwritable(target, error) from error
    return target


def cut_polygon(polygon: list[float], height: int, width: int) -> list[float]:
    """Return the part of a flat polygon that lies in the image; empty if there is none.

    Parts of a concave polygon are joined along the image's border (Sutherland and Hodgman 1974,
    https://doi.org/10.1145/360767.360802).
    """
    points = [tuple(polygon[k : k + 2]) for k in range(0, len(polygon), 2)]
    for axis, side, sign in ((0, 0, 1), (0, width, -1), (1, 0, 1), (1, height, -1)):
        kept = []
        for before, point in zip(points[-1:] + points, points):
            if sign * (before[axis] - side) < 0 < sign * (point[axis] - side) or (
                sign * (point[axis] - side) < 0 < sign * (before[axis] - side)
            ):
                fraction = (side - before[axis]) / (point[axis] - before[axis])
                other = before[1 - axis] + fraction * (point[1 - axis] - before[1 - axis])
                kept.append((side, other) if axis == 0 else (other, side))
            if sign * (point[axis] - side) >= 0:
                kept.append(point)
        points = kept
    return [value for point in points for value in point] if len(points) > 2 else []


@contextmanager
def writing_text(path: Path, *, below: Path) -> Iterator[TextIO]:
    """Yield a UTF-8 file to write to part by part; see `write_bytes`."""
    with writing(path) as temporary:
        check_links(path, below)
        with temporary.open("x", encoding="utf-8") as file:
            yield file


def describe_left_out(left_out: Mapping[str, Sequence[str]]) -> list[str]:
    """Describe what was left out: for each reason the number, the first names, or errors and their remedy."""
    lines = []
    for reason, names in left_out.items():
        more = f", and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
        shown, remedy = names[:NUM_SHOWN], ""
        if len({name.partition(". ")[2] for name in shown}) == 1:
            shown, remedy = [name.partition(". ")[0] for name in shown], shown[0].partition(". ")[2]
        lines.append(f"{len(names)} {reason}: {', '.join(shown)}{more}" + (f". {remedy}" if remedy else ""))
    return lines


def overlap(a: Any, b: Any, height: int, width: int) -> float:
    """Return the intersection over union of two masks, in any of COCO's forms, in an image; 1 if both are empty."""
    a, b = (encode_segmentation(segmentation, height, width) for segmentation in (a, b))
    union = float(coco_mask.area(coco_mask.merge([a, b])))
    return float(coco_mask.area(coco_mask.merge([a, b], intersect=True))) / union if union else 1.0
