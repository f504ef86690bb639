"""Annotations in the formats of other tools, read, and written again by the tools on annotations."""

import base64
import copy
import csv
import io
import json
import math
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree

import cv2
import numpy as np
import yaml
from fuzz.annotations import check_boxes, odd_segmentation
from fuzz.formats import Format, write_data, write_options
from fuzz.guard import check_pages, guarded, run_tool
from fuzz.hostile import NAMES, NUMBERS, PATHS, TEXTS, VALUES, encoded, mutate_tokens, mutate_xml, pick, yaml_fragments
from fuzz.images import odd_image
from fuzz.isolation import LostError
from fuzz.mutate import mutate_json, mutate_value
from fuzz.world import HEIGHT, WIDTH, read_json

from vitkit.apps.datasets.fixing import FIXES
from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.formats import AnnotatedImages, read_annotations
from vitkit.data.formats.class_files import parse_class_file
from vitkit.errors import VitkitError
from vitkit.io.image_files import MAX_PIXELS
from vitkit.io.segmentations import decode_segmentation
from vitkit.tools.data import convert, merge, split, tile

_TREE_IMAGES = ["images/train/0.jpg", "images/train/1.jpg", "images/val/2.jpg"]
_FLAT_IMAGES = ["images/0.jpg", "images/1.jpg", "images/2.jpg"]
_KEPT = ("parts of boxes", "masks: VOC", "parts and holes", "labels of")
"""Starts of the kinds of loss that leave an object in place."""
_LOSS = re.compile(r"^  (?:lost|left out): (\d+) (.*)$", re.MULTILINE)
_BOXES = ([1e8, 1e8, 1e8, 1e8], [-9, -9, 1e7, 1e7], [0, 0, 1e300, 1])
_SEGMENTATIONS: tuple[Any, ...] = ([[0, 0, 3e9, 0, 0, 3e9]], {"size": [2**31, 2**31], "counts": [2**62]})
_SEGMENTATIONS += ({"size": [HEIGHT, WIDTH]}, [[1e8, 1e8, 2e8, 1e8, 2e8, 2e8]], [[-5, -5, 100, -5, 100, 100]])
_PERCENTAGES = (-5, 100, 101, 99.999, 1e-9, [[5, 5]], {"cat": 1}, [], ["cat", "dog"], 45, 720, "90")
_CLASS_LINES = ("cat:256,0,0", "cat:-1,0,0", "cat:0,0,0", "cat:1,2", ":1,2,3", "a:b:1,2,3::", f"cat:{'9' * 5000},1,1")


def _finish(rng: random.Random, folder: Path, world: Path, format: str, source: str, photos: list[str]) -> None:
    """Write what a case reads and what it does with it."""
    images = "images" if format in ("coco", "instance_maps", "semantic_maps") else None
    step = rng.choice(["read", "read", "coco", "yolo", "yolo", "voc", "voc", "odvg", "merge", "tile", "split", "fix"])
    arguments: list[str] = []
    if step in ("merge", "tile", "split", "fix"):
        arguments += ["--to", rng.choice(["coco", "yolo", "voc"])]
    if step == "tile":
        arguments += ["--tiles", str(rng.choice([16, 24, 64])), *rng.choice([[], ["--keep-empty"]])]
    elif step == "split":
        arguments += rng.choice([["--val", "0.34"], ["--val", "*2*"], ["--val", "0.3", "--test", "0.3"]])
    elif step == "fix":
        arguments += ["--fix", *rng.sample(list(FIXES), rng.choice([1, 1, 2]))]
    elif step == "merge":
        arguments += rng.choice([[], ["--map", "cat=dog"], ["--map", "cat="]])
    if rng.random() < 0.04:
        photo = rng.choice(photos)
        write_data(folder, photo, odd_image(world / "images" / Path(photo).name, rng))
    named = format in ("instance_maps", "semantic_maps") or rng.random() >= 0.5
    how = {"source": source, "images": images, "image_files": photos, "format": format if named else None}
    write_options(folder, **how, step=step, arguments=arguments, kind=format)


def write_yolo(rng: random.Random, folder: Path, world: Path) -> None:
    """Write label files and their YAML, one of which is changed."""
    polygons, keypoints = rng.random() < 0.3, rng.random() < 0.1
    boxes = [f"{box}{' 0.5 0.5 2' * 3 * keypoints}" for box in ("0 0.25 0.3 0.2 0.25", "1 0.6 0.6 0.3 0.3")]
    outlines = ["0 0.1 0.1 0.5 0.1 0.5 0.6", "1 0.2 0.2 0.7 0.2 0.7 0.9 0.2 0.9"]
    lines = [line.split() for line in (outlines if polygons else boxes)]
    settings: dict[str, Any] = {"path": ".", "train": "images/train", "val": "images/val", "names": ["cat", "dog"]}
    if keypoints:
        settings["kpt_shape"] = [3, 3]
    if rng.random() < 0.3:
        settings["names"] = {0: "cat", 1: "dog"}
    text = yaml.safe_dump(settings, sort_keys=False)
    what = rng.choice(["labels", "labels", "labels", "yaml", "yaml", "fragment", "list", "names"])
    if what == "yaml":
        changed = mutate_value(settings, rng, VALUES)
        try:
            text = yaml.safe_dump(changed, sort_keys=False, allow_unicode=rng.random() < 0.5)
        except (yaml.YAMLError, ValueError):
            text = repr(changed)
    elif what == "fragment":
        key = rng.choice(["names", "train", "path", "kpt_shape", "x"])
        others = {k: v for k, v in settings.items() if k != key}
        text = yaml.safe_dump(others, sort_keys=False) + f"{key}: {rng.choice(yaml_fragments())}\n"
    elif what == "list":
        settings["train"] = "train.txt"
        text = yaml.safe_dump(settings, sort_keys=False)
        listed = [*_TREE_IMAGES[:2], pick(rng, PATHS, NAMES), pick(rng, PATHS, NAMES)]
        rng.shuffle(listed)
        write_data(folder, "train.txt", encoded("\n".join(listed[: rng.choice([2, 3, 4])]), rng))
    for k, photo in enumerate(_TREE_IMAGES):
        changed = mutate_tokens(lines, rng) if what == "labels" and k != 1 else lines
        content = "\n".join(rng.choice([" ", " ", "\t"]).join(line) for line in changed)
        name = photo.replace("images", "labels").replace(".jpg", ".txt")
        write_data(folder, name, encoded(content, rng) if what == "labels" else content)
    source = "data.yaml"
    if what == "names" or rng.random() < 0.1:
        source = ""
        names = [pick(rng, NAMES, ("cat",)), "dog", *rng.choice([[], ["dog"], ["x"]])]
        name = rng.choice(["classes.txt", "obj.names", "labels/classes.txt"])
        write_data(folder, name, encoded("\n".join(names), rng))
    else:
        write_data(folder, source, encoded(text, rng) if what == "yaml" else text.encode(errors="replace"))
    _finish(rng, folder, world, "yolo", source, _TREE_IMAGES)


def write_voc(rng: random.Random, folder: Path, world: Path) -> None:
    """Write an XML file for each image, of which one or all are changed."""
    for k in range(3):
        objects = "".join(
            f"<object><name>{name}</name><difficult>0</difficult><truncated>{rng.choice([0, 1])}</truncated>"
            f"<bndbox><xmin>{x}</xmin><ymin>{y}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>"
            for name, x, y, right, bottom in (("cat", 4, 5, 15, 17), ("dog", 10, 8, 30, 30))
        )
        size = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height><depth>3</depth></size>"
        text = f"<annotation><folder>x</folder><filename>{k}.jpg</filename>{size}{objects}</annotation>"
        is_changed = k == 0 or (k == 2 and rng.random() < 0.2)
        data = mutate_xml(ElementTree.fromstring(text), rng) if is_changed else text
        write_data(folder, f"Annotations/{k}.xml", data)
    if rng.random() < 0.2:
        names = ["0", "1", pick(rng, PATHS, NAMES), "2"]
        for part in ("train", "val"):
            write_data(folder, f"ImageSets/Main/{part}.txt", encoded("\n".join(names), rng))
    if rng.random() < 0.2:
        write_data(folder, "classes.txt", encoded("\n".join(["dog", "cat", pick(rng, NAMES, PATHS)]), rng))
    _finish(rng, folder, world, "voc", "", [f"JPEGImages/{k}.jpg" for k in range(3)])


def write_labelme(rng: random.Random, folder: Path, world: Path) -> None:
    """Write a JSON file for each image, of which two are changed."""
    _, png = cv2.imencode(".png", np.full((4, 5), 255, np.uint8))
    shapes = [
        {"label": "cat", "points": [[4, 5], [14, 17]], "shape_type": "rectangle", "group_id": None, "flags": {}},
        {"label": "dog", "points": [[1, 1], [20, 2], [10, 20.5]], "shape_type": "polygon", "group_id": None},
        {"label": "dog", "points": [[10, 10], [14, 10]], "shape_type": "circle", "group_id": rng.choice([None, 1])},
        {"label": "cat", "points": [[3, 3], [7, 6]], "shape_type": "mask", "mask": base64.b64encode(png).decode()},
    ]
    for k in range(3):
        content: Any = {"version": "5", "shapes": shapes, "imagePath": f"{k}.jpg", "imageData": None}
        content |= {"imageHeight": HEIGHT, "imageWidth": WIDTH}
        content = copy.deepcopy(content)
        action = "none"
        if k == 0 or (k == 2 and rng.random() < 0.2):
            action = "mask" if rng.random() < 0.15 else "numbers" if rng.random() < 0.3 else "json"
        if action == "mask":
            content["shapes"][3]["mask"] = base64.b64encode(odd_image(world / "maps" / "0.png", rng)).decode()
        elif action == "numbers":
            shape = rng.choice(content["shapes"])
            point = rng.choice(shape["points"])
            point[rng.randrange(2)] = rng.choice([9e18, -9e18, 1e300, 3e9, -5, 100, 40, 1e8, 0.1, 2**31])
            content["imageWidth"] = rng.choice([WIDTH, WIDTH, 2**31, 10**9, 1, 41])
        data = mutate_json(content, rng, VALUES) if action == "json" else json.dumps(content)
        write_data(folder, f"{k}.json", data)
    _finish(rng, folder, world, "labelme", "", [f"{k}.jpg" for k in range(3)])


def write_cvat(rng: random.Random, folder: Path, world: Path) -> None:
    """Write CVAT's XML file."""
    labels = "<label><name>cat</name></label><label><name>dog</name></label>"
    text = f"<annotations><version>1.1</version><meta><task><labels>{labels}</labels></task></meta>"
    for k in range(3):
        subset = f'subset="{rng.choice(["Train", "Validation"])}"' if rng.random() < 0.2 else ""
        rotated = 'rotation="30"' if rng.random() < 0.3 else ""
        text += (
            f'<image id="{k}" name="{k}.jpg" width="{WIDTH}" height="{HEIGHT}" {subset}>'
            f'<box label="cat" xtl="4" ytl="5" xbr="14.5" ybr="17" occluded="1" {rotated}/>'
            '<polygon label="dog" points="1,1;20,2;10,20.5"/><ellipse label="dog" cx="20" cy="16" rx="5" ry="4.5"/>'
            '<mask label="cat" rle="3,4,13" left="2" top="3" width="5" height="4"/></image>'
        )
    root = ElementTree.fromstring(f"{text}</annotations>")
    texts = (*TEXTS, "0," * 1000 + "20", "20", "-1,21", "1e3", "99999999999999", "1,1;2,2", "1,1;2", "1e300,1;2,2;3,3")
    write_data(folder, "annotations.xml", mutate_xml(root, rng, texts))
    _finish(rng, folder, world, "cvat", "annotations.xml", _FLAT_IMAGES)


def write_csv(rng: random.Random, folder: Path, world: Path) -> None:
    """Write a table of boxes."""
    columns = ["filename", *rng.choice([("xmin", "ymin", "xmax", "ymax"), ("x", "y", "w", "h")]), "class"]
    is_xyxy = "xmax" in columns
    size = rng.choice([(0.1, 0.2, 0.5, 0.6), (4, 5, 15, 17), (4.5, 5.5, 15, 17)])
    rows = [[f"{k % 3}.jpg", *map(str, size), ("cat", "dog")[k % 2]] for k in range(5)]
    if rng.random() < 0.3:
        columns.append("split")
        rows = [[*row, rng.choice(["train", "val", "test"])] for row in rows]
    rows.append([row if k == 0 else "" for k, row in enumerate(rows[-1])])
    what = rng.choice(["rows", "rows", "rows", "columns", "none", "delimiter"])
    if what == "columns":
        others = ("xmin", "label", "x", "width", "cx", "image", "é", "", "x1", "class")
        (columns,) = mutate_tokens([columns], rng, others)[:1] or [columns]
    else:
        texts = (*NUMBERS, "0.jpg", "1.jpg", *rng.sample(PATHS + NAMES, 30))
        rows = mutate_tokens(rows, rng, texts)
    file = io.StringIO()
    delimiter = rng.choice([";", "\t", "|", ","]) if what == "delimiter" else ","
    writer = csv.writer(file, delimiter=delimiter, quoting=rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
    if what != "none" or not is_xyxy:
        writer.writerow(columns)
    writer.writerows(rows)
    write_data(folder, "boxes.csv", encoded(file.getvalue(), rng))
    _finish(rng, folder, world, "csv", "boxes.csv", [f"{k}.jpg" for k in range(3)])


def write_label_studio(rng: random.Random, folder: Path, world: Path) -> None:
    """Write Label Studio's tasks, with annotations or predictions, which are changed."""
    known = {"original_width": WIDTH, "original_height": HEIGHT, "image_rotation": rng.choice([0, 0, 0, 90, 180, 270])}
    shapes = {
        "rectanglelabels": {"x": 10, "y": 20.5, "width": 30, "height": 25, "rotation": rng.choice([0, 0, 30])},
        "polygonlabels": {"points": [[5, 5], [50, 6], [25, 60.5]]},
        "ellipselabels": {"x": 50, "y": 50, "radiusX": 10, "radiusY": 12.5, "rotation": 0},
    }
    tasks: Any = []
    key = rng.choice(["annotations", "annotations", "predictions"])
    for k in range(3):
        results = [
            known | {"type": kind, "score": 0.5, "value": values | {kind: [rng.choice(["cat", "dog"])]}}
            for kind, values in shapes.items()
        ]
        image = rng.choice([f"{k}.jpg", f"/data/local-files/?d=images/{k}.jpg", f"/data/upload/1/0123abcd-{k}.jpg"])
        tasks.append({"id": k + 1, "data": {"image": image}, key: [{"result": results}]})
    if rng.random() < 0.2:
        task = rng.choice(tasks)
        task["data"]["image"] = pick(rng, PATHS, NAMES)
        data = json.dumps(tasks).encode("utf-8", "surrogatepass")
    else:
        data = mutate_json(tasks, rng, [*VALUES, *_PERCENTAGES])
    write_data(folder, "tasks.json", data)
    _finish(rng, folder, world, "label-studio", "tasks.json", _FLAT_IMAGES)


def write_via(rng: random.Random, folder: Path, world: Path) -> None:
    """Write VIA's regions as JSON, as a project or as a table, which are changed."""
    shapes: list[dict[str, Any]] = [
        {"name": "rect", "x": 4, "y": 5, "width": 10, "height": 12.5},
        {"name": "polygon", "all_points_x": [1, 20, 10], "all_points_y": [1, 2, 20.5]},
        {"name": "circle", "cx": 20, "cy": 16, "r": 5},
        {"name": "ellipse", "cx": 20, "cy": 16, "rx": 5, "ry": 4, "theta": 0.5},
        {"name": "point", "cx": 3, "cy": 3},
    ]
    attributes: list[dict[str, Any]] = [{"class": "cat"}, {"class": "dog"}, {"class": {"cat": True}}]
    if rng.random() < 0.3:
        rows = []
        for k in range(3):
            for shape in shapes[: rng.choice([1, 3, 5])]:
                changed = mutate_value(shape, rng, VALUES) if rng.random() < 0.1 else shape
                texts = [json.dumps(value) for value in (changed, rng.choice(attributes))]
                rows.append([f"{k}.jpg", *texts] if rng.random() < 0.95 else [pick(rng, PATHS, NAMES), *texts])
        file = io.StringIO()
        writer = csv.writer(file)
        writer.writerow(["#filename", "region_shape_attributes", "region_attributes"])
        writer.writerows(mutate_tokens(rows, rng, TEXTS) if rng.random() < 0.5 else rows)
        write_data(folder, "via.csv", encoded(file.getvalue(), rng))
        _finish(rng, folder, world, "csv", "via.csv", _FLAT_IMAGES)
        return
    content: Any = {
        f"{k}.jpg{100 * k}": {
            "filename": f"{k}.jpg",
            "size": 100 * k,
            "regions": [{"shape_attributes": s, "region_attributes": rng.choice(attributes)} for s in shapes],
        }
        for k in range(3)
    }
    if rng.random() < 0.3:
        content = {"_via_settings": {}, "_via_img_metadata": content}
    write_data(folder, "via.json", mutate_json(content, rng, VALUES))
    _finish(rng, folder, world, "via", "via.json", _FLAT_IMAGES)


def unusual(rng: random.Random) -> dict[str, Any]:
    """Return a valid COCO file with objects of all kinds: in parts, with holes, tiny, twice, crowds."""
    names = rng.sample(["cat", "a dog", "é", "한국어", "x" * 60, "a,b", "cat:1", "0", "null", "#", "-"], 3)
    categories = [{"id": number, "name": name} for number, name in zip(rng.sample(range(100), 3), names)]
    images = [
        {"id": number, "file_name": f"{k}.jpg", "width": WIDTH, "height": HEIGHT}
        for k, number in enumerate(rng.sample(range(1000), 3))
    ]
    annotations: list[dict[str, Any]] = []
    for number in range(rng.choice([0, 1, 6, 12])):
        x, y = rng.choice([0, 3, 3.123456, rng.uniform(0, 30), -2]), rng.choice([0, 5, rng.uniform(0, 25), 30])
        w, h = rng.choice([0.01, 1, 8, 8.5, 60]), rng.choice([0.01, 1, 8, 8.5, 60])
        part = [x, y, x + w, y, x + w, y + h, x, y + h]
        mask = np.zeros((HEIGHT, WIDTH), bool)
        mask[max(0, int(y)) : max(0, int(y)) + 9, max(0, int(x)) : max(0, int(x)) + 9] = True
        mask[12:15, 12:15] = rng.random() < 0.5
        flat = mask.T.ravel()
        edges = np.flatnonzero(np.diff(np.concatenate([[False], flat]).astype(int))).tolist()
        runs = np.diff([0, *edges, flat.size]).tolist()
        segmentation = rng.choice([[part], [part, [1, 1, 4, 1, 4, 4]], {"size": [HEIGHT, WIDTH], "counts": runs}])
        annotation = {"id": number * 3 + 1, "image_id": rng.choice(images)["id"], "bbox": [x, y, w, h], "area": w * h}
        annotation |= {"category_id": rng.choice(categories)["id"], "iscrowd": int(rng.random() < 0.1)}
        annotations.append(annotation | ({"segmentation": segmentation} if rng.random() < 0.7 else {}))
    if annotations and rng.random() < 0.3:
        annotations.append({**rng.choice(annotations), "id": 1000})
    return {"images": images, "annotations": annotations, "categories": categories}


def write_coco(rng: random.Random, folder: Path, world: Path) -> None:
    """Write COCO's file, with hostile names and numbers."""
    content = read_json(world / "instances.json")
    choice = rng.random()
    if rng.random() < 0.4:
        content = unusual(rng)
        choice = 0.6 if rng.random() < 0.2 else 1
    if choice < 0.3:
        annotation = rng.choice(content["annotations"])
        annotation["segmentation"] = rng.choice([odd_segmentation(rng), *_SEGMENTATIONS])
        annotation["bbox"] = rng.choice([annotation["bbox"], *_BOXES])
    elif choice < 0.55:
        image = rng.choice(content["images"])
        image["file_name"] = rng.choice([*PATHS, *NAMES, "0.jpg", "1.jpg", "0.png", "x/0.jpg"])
        if rng.random() < 0.3:
            content["images"][0]["width"] = rng.choice([2**31, 10**6, 1, 41, 30_000])
    elif choice < 0.7:
        for category in content["categories"]:
            category["name"] = rng.choice(NAMES)
    data = mutate_json(content, rng, VALUES) if 0.7 <= choice < 1 else json.dumps(content)
    write_data(folder, "own.json", data)
    _finish(rng, folder, world, "coco", "own.json", _FLAT_IMAGES)


def write_images(rng: random.Random, folder: Path, world: Path) -> None:
    """Write label images of instances or classes, and a file of classes."""
    format = rng.choice(["instance_maps", "semantic_maps"])
    colored = rng.random() < 0.3
    values = {"instance_maps": (0, 1, 2, 1001, 60_000), "semantic_maps": (0, 1, 2, 255)}[format]
    for k in range(3):
        ids = np.zeros((HEIGHT, WIDTH), np.uint16)
        for _ in range(3):
            y, x = rng.randrange(HEIGHT - 8), rng.randrange(WIDTH - 8)
            ids[y : y + rng.randrange(1, 9), x : x + rng.randrange(1, 9)] = rng.choice(values)
        if colored:
            colors = np.array([[0, 0, 0], [0, 0, 200], [0, 200, 0], [9, 9, 9]], np.uint8)
            photo = colors[np.minimum(ids, 3)]
        else:
            photo = ids if ids.max() > 255 else ids.astype(np.uint8)
        name = f"labels/{k}{rng.choice(['', '', '_mask'])}.png"
        path = write_data(folder, name, cv2.imencode(".png", photo)[1].tobytes())
        if k == 0 and rng.random() < 0.5:
            path.write_bytes(odd_image(path, rng))
    if rng.random() < 0.8:
        name, data = odd_classes(rng, colored=colored)
        write_data(folder, rng.choice(["", "labels/"]) + name, data)
    _finish(rng, folder, world, format, "labels", _FLAT_IMAGES)


def odd_classes(rng: random.Random, *, colored: bool) -> tuple[str, bytes]:
    """Return the name and the bytes of a file of classes, which is changed."""
    names, colors = ["background", "cat", "dog"], [[0, 0, 0], [200, 0, 0], [0, 200, 0]]
    entries: Any = [{"id": k, "name": name, "color": colors[k]} for k, name in enumerate(names)]
    if rng.random() < 0.5:
        lines = [[f"{name}:{','.join(map(str, colors[k]))}::"] if colored else [name] for k, name in enumerate(names)]
        lines = mutate_tokens(lines, rng, (*NAMES, *_CLASS_LINES, *names))
        text = "\n".join(" ".join(line) for line in lines)
        return rng.choice(["classes.txt", "labels.txt", "labelmap.txt"]), encoded(text, rng)
    if not colored:
        entries = rng.choice([names, {str(k): name for k, name in enumerate(names)}, entries])
    if rng.random() < 0.3:
        entries = {"classes": entries, "ignore_index": 255}
    return "classes.json", mutate_json(entries, rng, [*VALUES, -1, 65_535, 65_536, "abc", [300, 0, 0], [-1, 0, 0]])


def write_classes(rng: random.Random, folder: Path, world: Path) -> None:
    """Write a file of classes."""
    name, data = odd_classes(rng, colored=rng.random() < 0.5)
    write_data(folder, name, data)
    write_options(folder, source=name)


def check_classes(folder: Path, world: Path) -> None:
    """Check that names are text, and values and colors are in their ranges."""
    with guarded(folder, world) as options:
        names, colors, ignored = parse_class_file(folder / "data" / options["source"])
        assert names and all(isinstance(number, int) and number >= 0 for number in names), names
        assert all(isinstance(name, str) and name.strip() for name in names.values()), names
        assert all(0 <= color < 1 << 24 and value >= 0 for color, value in colors.items()), colors
        assert ignored is None or (isinstance(ignored, int) and not isinstance(ignored, bool)), ignored


def check(folder: Path, world: Path) -> None:
    """Check a dataset as it is read, as a training set, and as a tool writes it."""
    with guarded(folder, world) as options:
        source, images = Path("data") / options["source"], options["images"] and f"data/{options['images']}"
        data = read_annotations(source, images, format=options["format"])
        check_data(data)
        check_all_read(data, folder / "data", options["kind"])
        if options["step"] == "read":
            check_training(data, source, images)
        else:
            check_tool(data, source, images, options, world)
        check_pages(folder / "out")


def check_data(data: AnnotatedImages) -> None:
    """Check that every field of a dataset is what the documentation says."""
    image_ids, category_ids = ({entry["id"] for entry in part} for part in (data.images, data.categories))
    assert len(image_ids) == len(data.images) and len(category_ids) == len(data.categories)
    names = [category["name"] for category in data.categories]
    assert all(isinstance(name, str) and name for name in names), names
    assert data.format == "coco" or len(set(names)) == len(names), f"classes of one name: {names}"
    sizes = {}
    for image in data.images:
        name, (width, height) = image["file_name"], (image["width"], image["height"])
        path = PurePosixPath(name)
        assert isinstance(name, str) and name and not path.is_absolute() and ".." not in path.parts, name
        assert type(width) is int and type(height) is int and min(width, height) > 0
        assert data.format == "coco" or width * height <= MAX_PIXELS, (width, height)
        sizes[image["id"]] = height, width
    for annotation in data.annotations:
        box, area = annotation["bbox"], annotation.get("area", 0)
        assert annotation["image_id"] in sizes and annotation["category_id"] in category_ids
        assert len(box) == 4 and all(map(math.isfinite, box)) and min(box[2:]) >= 0, box
        assert math.isfinite(area) and area >= 0, area
        segmentation, size = annotation.get("segmentation"), sizes[annotation["image_id"]]
        if segmentation and math.prod(size) <= 1 << 24:
            assert decode_segmentation(segmentation, *size).shape == size
    assert {k for ids in data.splits.values() for k in ids} <= image_ids


def check_all_read(data: AnnotatedImages, folder: Path, kind: str) -> None:
    """Count a file's objects in another way, and compare, unless the reader says that something was left out."""
    count = _COUNTS.get(kind)
    if data.left_out or count is None or kind != data.format:
        return
    expected = count(data, folder)
    if expected is not None and expected != len(data.annotations):
        raise LostError(f"{expected} objects in the file, {len(data.annotations)} read, and nothing is said of it")


def _count_yolo(data: AnnotatedImages, folder: Path) -> int | None:
    names = [image["file_name"].removeprefix("images/") for image in data.images]
    try:
        texts = [(folder / "labels" / name).with_suffix(".txt").read_text("utf-8") for name in names]
    except (OSError, UnicodeDecodeError):
        return None
    return sum(len({tuple(line.split()) for line in text.splitlines() if line.strip()}) for text in texts)


def _count_xml(data: AnnotatedImages, folder: Path) -> int | None:
    """Count VOC's objects, or the children of CVAT's images."""
    try:
        roots = [ElementTree.parse(path).getroot() for path in folder.rglob("*.xml")]
    except (ElementTree.ParseError, LookupError, ValueError):
        return None
    return sum(len(root.findall(".//object" if data.format == "voc" else "image/*")) for root in roots)


def _count_labelme(data: AnnotatedImages, folder: Path) -> int | None:
    contents = [json.loads(path.read_bytes()) for path in folder.glob("*.json")]
    shapes = [shape for content in contents for shape in content["shapes"]]
    return len(shapes) if all(shape.get("group_id") is None for shape in shapes) else None


_COUNTS: dict[str, Callable[[AnnotatedImages, Path], int | None]]
_COUNTS = {"yolo": _count_yolo, "voc": _count_xml, "labelme": _count_labelme, "cvat": _count_xml}


def check_training(data: AnnotatedImages, source: Path, images: str | None) -> None:
    """Check the samples that a model would be trained on."""
    masks = bool(data.annotations) and all(annotation.get("segmentation") for annotation in data.annotations)
    dataset = CocoDetection(images or str(data.folder), str(source), masks=masks, bad_boxes="drop", split="all")
    for k in range(len(dataset)):
        check_boxes(dataset[k]["target"], len(dataset.classes))


def check_tool(data: AnnotatedImages, source: Path, images: str | None, options: dict[str, Any], world: Path) -> None:
    """Check that a tool writes every object, or counts it as lost."""
    step, arguments, out = options["step"], options["arguments"], "out/new"
    to = arguments[arguments.index("--to") + 1] if "--to" in arguments else step
    place = [*(["--images", images] if images else []), *(["--from", data.format] if options["format"] else [])]
    if step in ("coco", "yolo", "voc", "odvg"):
        text = run_tool(convert.main, [str(source), *place, "--to", step, "--out", out])
    elif step == "merge":
        shutil.copytree(world / "images", "tmp/sound/images")
        shutil.copy(world / "instances.json", "tmp/sound/instances.json")
        first = f"{source},{images}" if images else str(source)
        text = run_tool(merge.main, [first, "tmp/sound/instances.json", "--out", out, *arguments])
    elif step == "fix":
        text = run_tool(convert.main, [str(source), *place, "--out", out, *arguments])
    else:
        text = run_tool({"tile": tile.main, "split": split.main}[step], [str(source), *place, "--out", out, *arguments])
    if step == "split" and data.format == "semantic_maps":
        return
    written = sorted(Path(out).glob("*.json"))
    if to != "coco":
        written = [Path(out, "data.yaml" if to == "yolo" else "")]
    assert written, text
    place = data.folder if to in ("coco", "odvg") and step not in ("merge", "tile") else None
    results = [read_annotations(path, place) for path in written]
    for result in results:
        check_data(result)
    if step in ("coco", "yolo", "voc", "odvg", "split"):
        compare_objects(data, results, text)


def compare_objects(data: AnnotatedImages, results: list[AnnotatedImages], text: str) -> None:
    """Compare the objects of each class in each image before and after, apart from those that are counted as lost."""
    results = [_without_repeats(result) if result.format == "yolo" else result for result in results]
    before, after = Counter(_objects(data)), sum((Counter(_objects(result)) for result in results), Counter())
    kinds = [(int(count), kind) for count, kind in _LOSS.findall(text) if not kind.startswith(_KEPT)]
    lost = sum(len(data.annotations) if kind.startswith("images") else count for count, kind in kinds)
    missing, added = before - after, after - before
    listed = [image["file_name"] for image in data.images]
    in_splits = Counter(image_id for ids in data.splits.values() for image_id in ids)
    if max(in_splits.values(), default=0) > 1 or (data.format != "coco" and len(set(listed)) < len(listed)):
        missing = Counter(dict.fromkeys(before.keys() - after.keys(), 1))
        added = Counter(dict.fromkeys(after.keys() - before.keys(), 1))
    assert not added, f"objects that were not there: {list(added)[:3]}, lost {list(missing)[:3]}: {text[-600:]}"
    if missing.total() > lost:
        raise LostError(f"{missing.total()} objects missing, {lost} counted: {list(missing)[:3]}: {text[-600:]}")
    images = {name for name, *_ in _names(data)} - {name for result in results for name, *_ in _names(result)}
    if images and not lost:
        raise LostError(f"images missing: {sorted(images)[:3]}: {text[-600:]}")


def _without_repeats(data: AnnotatedImages) -> AnnotatedImages:
    """Return each image once: without splits, YOLO's train and val name the same images."""
    first = {image["file_name"]: image["id"] for image in reversed(data.images)}
    return data.select(first.values())


def _names(data: AnnotatedImages) -> list[tuple[str, int]]:
    return [(PurePosixPath(image["file_name"]).stem[-1:], image["id"]) for image in data.images]


def _objects(data: AnnotatedImages) -> list[tuple[str, str]]:
    """Return the image and the class of each object; images are known by the end of their name, whatever is before."""
    names = {number: name for name, number in _names(data)}
    classes = {category["id"]: category["name"] for category in data.categories}
    return [(names[a["image_id"]], classes[a["category_id"]]) for a in data.annotations]


FORMATS = [
    Format("yolo", write_yolo, check, VitkitError, 8),
    Format("voc", write_voc, check, VitkitError, 6),
    Format("labelme", write_labelme, check, VitkitError, 6),
    Format("cvat", write_cvat, check, VitkitError, 6),
    Format("csv", write_csv, check, VitkitError, 6),
    Format("label_studio", write_label_studio, check, VitkitError, 6),
    Format("via", write_via, check, VitkitError, 6),
    Format("coco_tools", write_coco, check, VitkitError, 8),
    Format("label_images", write_images, check, VitkitError, 5),
    Format("class_files", write_classes, check_classes, VitkitError, 3),
]
