"""Annotation files of several formats, drawn images, and the boxes that are read of them."""

import json

import numpy as np
from PIL import Image

from vitkit.data.formats import AnnotatedImages
from vitkit.io.segmentations import decode_segmentation

CAT = [{"id": 1, "name": "cat"}]
SQUARE = [[4, 4, 24, 4, 24, 14, 4, 14]]


def draw_images(folder, *names, size=(40, 20)):
    """Images of one color."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (90, 120, 30)).save(path)


def named_boxes(data):
    """(file name, class, box) of each object."""
    files = {image["id"]: image["file_name"] for image in data.images}
    names = {category["id"]: category["name"] for category in data.categories}
    return [(files[a["image_id"]], names[a["category_id"]], a["bbox"]) for a in data.annotations]


VOC_OBJECT = (
    "<object><name>{}</name><difficult>1</difficult><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax>"
    "<ymax>{}</ymax></bndbox></object>"
)


def voc(folder, name, *objects):
    body = "".join(VOC_OBJECT.format(*obj) for obj in objects)
    size = "<size><width>40</width><height>20</height></size>"
    return write(folder / f"{name}.xml", f"<annotation><filename>{name}.jpg</filename>{size}{body}</annotation>")


def draw(path, size=(40, 20), seed=0, **options):
    """An image of noise, another one for each seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*size[::-1], 3), np.uint8)).save(path, **options)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def coco(folder, *annotations, size=(40, 20), name="a.png", **image):
    """A file of one image; each annotation has a box [4, 4, 20, 10] unless it says otherwise."""
    entries = [
        {"id": k, "image_id": 1, "category_id": 1, "bbox": [4, 4, 20, 10], "area": 200, "iscrowd": 0, **more}
        for k, more in enumerate(annotations, start=1)
    ]
    image = {"id": 1, "file_name": name, "width": size[0], "height": size[1], **image}
    return write(
        folder / "own.json", {"images": [image], "annotations": entries, "categories": [{"id": 1, "name": "cat"}]}
    )


def boxes(data):
    return [annotation["bbox"] for annotation in data.annotations]


def mask_of(annotation, size):
    return decode_segmentation(annotation["segmentation"], size[1], size[0])


def coco_with(folder, *boxes):
    """Boxes of an image in memory."""
    draw_images(folder, "a.png")
    data = AnnotatedImages("coco", folder / "a.json", folder)
    image_id = data.add_image("a.png", 40, 20)
    for bbox in boxes:
        data.add_object(image_id, "cat", bbox)
    return data


def yolo(folder, *lines):
    """A data.yaml with an image of these lines, without the class."""
    draw(folder / "images" / "a.png")
    write(folder / "data.yaml", "train: images\nval: images\nnames: [cat]\n")
    write(folder / "labels" / "a.txt", "".join(f"0 {line}\n" for line in lines))
    return folder / "data.yaml"
