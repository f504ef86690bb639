"""Annotations as people's tools write them: other sizes, rotations, repetitions, odd fields, related images."""

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask

from vitkit.apps.datasets.image_groups import photo_names, series_of
from vitkit.apps.datasets.merging import merge_datasets, tile_dataset
from vitkit.apps.datasets.splitting import split_dataset
from vitkit.apps.inference import Tiling
from vitkit.apps.starter import annotation_sheet
from vitkit.data.datasets.captions import CocoCaptions
from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.formats import AnnotatedImages, read_annotations
from vitkit.data.loading.settings import DataSettings
from vitkit.engine.build import build_datasets
from vitkit.errors import ConfigError, DataError
from vitkit.io.segmentations import decode_segmentation
from vitkit.tools.data import convert

CAT = [{"id": 1, "name": "cat"}]
SQUARE = [[4, 4, 24, 4, 24, 14, 4, 14]]


def draw(path, size=(40, 20), seed=0, **options):
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


# Sizes


def with_size(kind, folder, size):
    """Annotations of the box [4, 4, 20, 10] in an image of this size, at that size."""
    width, height = size
    x, y, w, h = (round(value * width / 40) for value in (4, 4, 20, 10))
    if kind == "coco":
        return coco(folder, {"bbox": [x, y, w, h]}, size=size)
    if kind == "csv":
        return write(
            folder / "own.csv",
            f"filename,width,height,class,xmin,ymin,xmax,ymax\na.png,{width},{height},cat,{x},{y},{x + w},{y + h}\n",
        )
    if kind == "voc":
        corners = f"<xmin>{x + 1}</xmin><ymin>{y + 1}</ymin><xmax>{x + w}</xmax><ymax>{y + h}</ymax>"
        sides = f"<size><width>{width}</width><height>{height}</height></size>"
        return write(
            folder / "a.xml",
            f"<annotation>{sides}<object><name>cat</name><bndbox>{corners}</bndbox></object></annotation>",
        )
    if kind == "labelme":
        shape = {"label": "cat", "points": [[x, y], [x + w, y + h]], "shape_type": "rectangle"}
        return write(folder / "a.json", {"shapes": [shape], "imageWidth": width, "imageHeight": height})
    shape = f'<box label="cat" xtl="{x}" ytl="{y}" xbr="{x + w}" ybr="{y + h}"/>'
    return write(
        folder / "a.xml",
        f'<annotations><image name="a.png" width="{width}" height="{height}">{shape}</image></annotations>',
    )


KINDS = ["coco", "csv", "voc", "labelme", "cvat"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(80, 40), (20, 10), (40, 20)])
def test_boxes_are_scaled_to_the_file_in_every_format(tmp_path, kind, size):
    draw(tmp_path / "a.png")
    data = read_annotations(with_size(kind, tmp_path, size), tmp_path, format=kind)
    assert boxes(data) == [[4, 4, 20, 10]] and (data.images[0]["width"], data.images[0]["height"]) == (40, 20)
    text = (
        f"1 image is listed with another size than the file's, such as 'a.png', {size[0]}x{size[1]} for a file of 40x20"
    )
    assert any(note.startswith(text) for note in data.notes) == (size != (40, 20))
    assert data.changed == ({1} if size != (40, 20) else set())
    dataset = CocoDetection(tmp_path, with_size(kind, tmp_path, size), format=kind)
    assert dataset.load_annotated(0).boxes_xyxy.tolist() == [[4, 4, 24, 14]]
    assert dataset.ground_truth()["annotations"][0]["bbox"] == [4, 4, 20, 10]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(80, 60), (41, 20), (100, 20)])
def test_other_sizes_are_an_error_in_every_format(tmp_path, kind, size):
    draw(tmp_path / "a.png")
    with pytest.raises(DataError, match=rf"'a.png' is 40x20 pixels .* annotated as {size[0]}x{size[1]}.*--fix sizes"):
        read_annotations(with_size(kind, tmp_path, size), tmp_path, format=kind)
    dataset = CocoDetection(tmp_path, with_size(kind, tmp_path, size), format=kind)
    with pytest.raises(DataError, match=rf"a.png' is 40x20 pixels .* annotated as {size[0]}x{size[1]}"):
        dataset[0]


def test_masks_and_keypoints_are_scaled(tmp_path):
    draw(tmp_path / "a.png")
    mask = np.zeros((40, 80), np.uint8, order="F")
    mask[8:28, 8:48] = 1
    compressed = coco_mask.encode(mask)
    runs = {"size": [40, 80], "counts": compressed["counts"].decode()}
    columns = mask.T.ravel()
    lengths = np.diff(np.flatnonzero(np.diff(columns)) + 1, prepend=0, append=len(columns)).tolist()
    assert sum(lengths) == 3200
    file = coco(
        tmp_path,
        {
            "bbox": [8, 8, 40, 20],
            "area": 800,
            "segmentation": [[2 * v for v in SQUARE[0]]],
            "keypoints": [10, 20, 2, 0, 0, 0],
        },
        {"bbox": [8, 8, 40, 20], "segmentation": runs},
        {
            "bbox": [8, 8, 40, 20],
            "segmentation": {"size": [40, 80], "counts": [0, *lengths] if columns[0] else lengths},
        },
        size=(80, 40),
    )
    data = read_annotations(file, tmp_path)
    expected = np.zeros((20, 40), np.uint8)
    expected[4:14, 4:24] = 1
    for annotation in data.annotations:
        assert annotation["bbox"] == [4, 4, 20, 10] and annotation["area"] == 200
        assert (mask_of(annotation, (40, 20)) == expected).all()
    assert data.annotations[0]["keypoints"] == [5, 10, 2, 0, 0, 0]
    assert CocoDetection(tmp_path, file, masks=True)[0]["target"]["masks"].sum() == 600


def test_sizes_that_are_wrong_although_the_boxes_fit_the_file_are_corrected_only(tmp_path):
    draw(tmp_path / "a.png")
    data = read_annotations(coco(tmp_path, {"bbox": [20, 4, 20, 10]}, size=(20, 10)), tmp_path)
    assert boxes(data) == [[20, 4, 20, 10]] and "only the sizes are corrected" in data.notes[0]
    runs = {"size": [20, 40], "counts": [0, 800]}
    data = read_annotations(coco(tmp_path, {"segmentation": runs}, size=(80, 40)), tmp_path)
    assert boxes(data) == [[4, 4, 20, 10]] and data.annotations[0]["segmentation"] == runs
    fractions = [{"bbox": [0.1, 0.2, 0.5, 0.5]}] * 2
    assert boxes(read_annotations(coco(tmp_path, *fractions, size=(80, 40)), tmp_path)) == [[0.1, 0.2, 0.5, 0.5]] * 2


@pytest.mark.parametrize("extent, count", [(22, 1), (30, 40)])  # a little beyond, and far beyond but one of many
def test_a_box_beyond_its_listed_image_does_not_stop_the_others_from_being_scaled(tmp_path, extent, count):
    draw(tmp_path / "a.png")
    inexact = {"bbox": [10, 2, extent - 10, 5]}
    file = coco(tmp_path, *[{"bbox": [2, 2, 10, 5]}] * count, inexact, size=(20, 10))
    data = read_annotations(file, tmp_path)
    assert boxes(data) == [[4, 4, 20, 10]] * count + [[20, 4, 2 * extent - 20, 10]]
    assert "boxes, masks and keypoints are scaled" in data.notes[0]


def test_fix_sizes_leaves_no_box_at_a_wrong_place(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw(tmp_path / "a.png")
    arguments = ["own.json", "--images", ".", "--fix", "sizes", "--overwrite", "--out", "fixed.json"]
    coco(tmp_path, {"bbox": [8, 8, 40, 20]}, size=(80, 40))
    convert.main(arguments)
    assert boxes(read_annotations("fixed.json", ".")) == [[4, 4, 20, 10]]
    assert "boxes, masks and keypoints are scaled" in capsys.readouterr().out
    coco(tmp_path, {}, size=(80, 60))  # the box fits, so that only the size is taken to be wrong
    convert.main(arguments)
    assert boxes(read_annotations("fixed.json", ".")) == [[4, 4, 20, 10]]
    coco(tmp_path, {"bbox": [50, 4, 20, 10]}, size=(80, 60))
    with pytest.raises(SystemExit, match=r"'a.png' is 40x20 .* 80x60, and .* bbox \[50, 4, 20, 10\] does not lie in"):
        convert.main(arguments)


def test_objects_of_an_image_that_exif_turns_are_not_guessed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 6
    draw(tmp_path / "a.jpg", size=(20, 40), exif=exif)  # 40x20 upright
    arguments = ["own.json", "--images", ".", "--fix", "sizes", "--overwrite", "--out", "fixed.json"]
    coco(tmp_path, {"bbox": [4, 4, 10, 10]}, size=(20, 40), name="a.jpg")
    with pytest.raises(SystemExit, match="rotated by its EXIF tag, and its objects fit it both before and after"):
        convert.main(arguments)
    coco(tmp_path, {"bbox": [20, 4, 20, 10]}, size=(20, 40), name="a.jpg")
    convert.main(arguments)
    assert boxes(read_annotations("fixed.json", ".")) == [[20, 4, 20, 10]]


def test_sheet_shows_the_repaired_images(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    images, annotations = [], []
    for k in range(30):
        draw(tmp_path / f"{k:02}.png", seed=k)
        swapped = k in (17, 23)
        images.append(
            {"id": k, "file_name": f"{k:02}.png", "width": 20 if swapped else 40, "height": 40 if swapped else 20}
        )
        annotations.append({"id": k, "image_id": k, "category_id": 1, "bbox": [1, 1, 8, 8]})
    write(
        tmp_path / "own.json", {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "cat"}]}
    )
    shown = []
    monkeypatch.setattr(annotation_sheet, "save_grid", lambda panels, titles, path: shown.append(titles))
    convert.main(["own.json", "--images", ".", "--fix", "sizes", "--out", "fixed.json"])
    assert shown == [["17.png", "23.png"]]


# What is beside a box


def test_rotation_of_cvat_beside_a_box_of_coco_or_voc_is_that_of_its_xml(tmp_path):
    draw(tmp_path / "pole.png", size=(200, 120))
    for degrees, expected in ((90.0, [90, 20, 20, 80]), (30.0, None), (0.0, [60, 50, 80, 20])):
        attributes = {"occluded": False, "rotation": degrees}
        turned = {"bbox": [60, 50, 80, 20], "segmentation": [], "attributes": attributes}
        data = read_annotations(coco(tmp_path, turned, size=(200, 120), name="pole.png"), tmp_path)
        shape = f'<box label="cat" xtl="60" ytl="50" xbr="140" ybr="70" rotation="{degrees}"/>'
        text = f'<annotations><image name="pole.png" width="200" height="120">{shape}</image></annotations>'
        xml = read_annotations(write(tmp_path / "a.xml", text), tmp_path)
        assert boxes(data) == boxes(xml) and expected in (None, boxes(data)[0])
        assert data.annotations[0]["segmentation"] == xml.annotations[0].get("segmentation", [])
        assert bool(degrees) == any("boxes turned by attributes.rotation" in note for note in data.notes)
        box = "<bndbox><xmin>61</xmin><ymin>51</ymin><xmax>140</xmax><ymax>70</ymax></bndbox>"
        rotation = f"<attributes><attribute><name>rotation</name><value>{degrees}</value></attribute></attributes>"
        text = f"<annotation><object><name>cat</name>{box}{rotation}</object></annotation>"
        voc = read_annotations(write(tmp_path / "pole.xml", text), tmp_path)
        assert (
            boxes(voc) == boxes(xml)
            and voc.annotations[0].get("segmentation", []) == data.annotations[0]["segmentation"]
        )
        assert bool(degrees) == any("boxes turned by" in note for note in voc.notes)
        # What is written must not be turned again.
        write(tmp_path / "again.json", data.content)
        assert boxes(read_annotations(tmp_path / "again.json", tmp_path)) == boxes(data)
    dataset = CocoDetection(
        tmp_path, coco(tmp_path, turned | {"attributes": {"rotation": 90}}, size=(200, 120), name="pole.png")
    )
    assert dataset.load_annotated(0).boxes_xyxy.tolist() == [[90, 20, 110, 100]]


def test_polygon_that_shows_the_object_is_not_turned(tmp_path):
    draw(tmp_path / "a.png")
    triangle = {"segmentation": [[4, 4, 24, 4, 24, 14]], "attributes": {"rotation": 90}}
    assert (
        read_annotations(coco(tmp_path, triangle), tmp_path).annotations[0]["segmentation"] == triangle["segmentation"]
    )
    outline = {"segmentation": SQUARE, "attributes": {"rotation": 90}}
    assert boxes(read_annotations(coco(tmp_path, outline), tmp_path)) == [[9, -1, 10, 20]]
    data = read_annotations(coco(tmp_path, {"angle": 12.5}), tmp_path)
    assert "objects with a field 'angle', which is not read although it may turn their boxes: 1" in data.notes


def yolo(folder, *lines):
    draw(folder / "images" / "a.png")
    write(folder / "data.yaml", "train: images\nval: images\nnames: [cat]\n")
    write(folder / "labels" / "a.txt", "".join(f"0 {line}\n" for line in lines))
    return folder / "data.yaml"


FLAGGED = "0.5 0.5 0.5 0.5 0.4 0.4 2 0 0 0 0.7 0.6 1 0.6 0.6 2"


@pytest.mark.parametrize(
    "lines",
    [
        [FLAGGED],  # 16 numbers, an even count
        ["0.5 0.5 0.5 0.5 0.4 0.4 2 0 0 0 0.7 0.6 1"],  # 13
        [
            "0.5 0.5 0.5 0.5 0.4 0.4 0.6 0.6 0.5 0.45",
            "0.4 0.4 0.2 0.2 0.4 0.4 0.45 0.45 0 0",
            "0.5 0.3 0.2 0.4 0.5 0.3 0.5 0.2 0.5 0.4",
        ],
    ],
)
def test_poses_without_kpt_shape_are_boxes(tmp_path, lines):
    data = read_annotations(yolo(tmp_path, *lines))
    expected = []
    for line in lines:
        x, y, w, h = map(float, line.split()[:4])
        expected.append([(x - w / 2) * 40, (y - h / 2) * 20, w * 40, h * 20])
    assert np.allclose(boxes(data), expected, atol=1e-3) and not any("segmentation" in a for a in data.annotations)
    reason = "poses, although no kpt_shape says so, of which only the box is read"
    assert len(data.left_out[reason]) == len(lines)


def test_poses_that_do_not_fit_kpt_shape_are_an_error(tmp_path):
    pose = ".5 .5 .4 .4 .4 .4 2 .6 .6 2 .5 .5 2 .45 .45 1"
    path = yolo(tmp_path, pose, ".5 .5 .4 .4", ".5 .5 .4 .4 0.9")
    path.write_text(path.read_text() + "kpt_shape: [4, 3]\n")
    assert boxes(read_annotations(path)) == [[12, 6, 16, 8]] * 3
    for line, count in ((".5 .5 .4 .4 .4 .4 .6 .6 .5 .5 .45 .45", 12), (f"{pose} 0.9", 17)):
        write(tmp_path / "labels" / "a.txt", f"0 {pose}\n0 {line}\n")
        with pytest.raises(DataError, match=rf"line 2: .*: got {count} numbers .*kpt_shape \[4, 3\] needs 16\."):
            read_annotations(path)


def test_polygons_are_not_taken_for_poses(tmp_path):
    corners = "0.9 0.9 0.95 0.9 0.95 0.95 0.9 0.95"  # a turned box near the far corner
    five = "0.1 0.1 0.5 0.1 0.6 0.3 0.5 0.5 0.1 0.5"
    for lines in ([corners] * 1, [five, five.replace("0.6", "0.7"), five.replace("0.6", "0.8")]):
        data = read_annotations(yolo(tmp_path, *lines))
        assert all(annotation["segmentation"] for annotation in data.annotations) and not data.left_out
    with pytest.raises(DataError, match=r"line 2.*13 numbers are not a polygon.*add kpt_shape to data.yaml if it is"):
        read_annotations(yolo(tmp_path, five, "0.5 0.5 0.5 0.5 0.4 0.4 2 0 0 0 0.7 0.6 1"))
    with pytest.raises(DataError, match="the fifth number 45 is not a confidence.*angle of a turned box"):
        read_annotations(yolo(tmp_path, "0.5 0.5 0.5 0.5 45"))


def test_shapes_that_labelme_ignores_are_counted(tmp_path):
    draw(tmp_path / "a.png")
    corners = [[4, 4], [24, 4], [24, 14], [4, 14]]
    shapes = [("cat", "rotation"), ("__ignore__", "polygon"), ("_background_", "polygon"), ("cat", "cuboid")]
    content = [{"label": label, "points": corners, "shape_type": kind} for label, kind in shapes]
    data = read_annotations(write(tmp_path / "a.json", {"shapes": content}), tmp_path)
    assert boxes(data) == [[4, 4, 20, 10]] and [c["name"] for c in data.categories] == ["cat"]
    assert {*data.left_out} == {"shapes labeled __ignore__", "shapes labeled _background_", "shapes of type 'cuboid'"}


# Repeated elements


def test_every_box_of_an_object_of_voc_is_read(tmp_path):
    draw(tmp_path / "a.png")
    bndbox = "<bndbox><xmin>{}</xmin><ymin>3</ymin><xmax>12</xmax><ymax>12</ymax></bndbox>"
    text = "<annotation><object><name>cat</name>{}</object></annotation>"
    file = write(tmp_path / "a.xml", text.format("".join(map(bndbox.format, (1, 3, 5)))))
    assert boxes(read_annotations(file, tmp_path)) == [[0, 2, 12, 10], [2, 2, 10, 10], [4, 2, 8, 10]]
    for inside in (
        "<name>dog</name>" + bndbox.format(1),
        bndbox.format(1).replace("<ymin>3</ymin>", "<ymin>3</ymin><ymin>4</ymin>"),
        "<difficult>0</difficult><difficult>1</difficult>" + bndbox.format(1),
    ):
        with pytest.raises(DataError, match="a.xml': .* has 2 elements '.*'; expected one"):
            read_annotations(write(tmp_path / "a.xml", text.format(inside)), tmp_path)
    with pytest.raises(DataError, match="an object has no bndbox, but name, robndbox"):
        read_annotations(write(tmp_path / "a.xml", text.format("<robndbox/>")), tmp_path)
    polygon = "<polygon><x1>1</x1></polygon>" + bndbox.format(1)
    data = read_annotations(write(tmp_path / "a.xml", text.format(polygon)), tmp_path)
    assert data.left_out == {"shapes of type polygon beside a box": ["a.xml 'cat'"]}


def test_repeated_keys_are_an_error(tmp_path):
    draw(tmp_path / "a.png")
    text = coco(tmp_path, {}).read_text().replace('"area": 200', '"bbox": [1, 1, 2, 2]')
    with pytest.raises(DataError, match="own.json: an object has the key 'bbox' twice"):
        read_annotations(write(tmp_path / "own.json", text), tmp_path)
    text = '{"shapes": [], "shapes": [{"label": "cat", "points": [[4, 4], [9, 9]], "shape_type": "rectangle"}]}'
    with pytest.raises(DataError, match="the key 'shapes' twice"):
        read_annotations(write(tmp_path / "labelme" / "a.json", text), tmp_path, format="labelme")
    file = yolo(tmp_path, "0.5 0.5 0.5 0.5")
    with pytest.raises(DataError, match="data.yaml' line 2: the key 'train' occurs twice"):
        read_annotations(write(file, "train: images\ntrain: images\nnames: [cat]\n"))
    with pytest.raises(DataError, match="line 5: the key '0' occurs twice"):
        read_annotations(write(file, "train: images\nval: images\nnames:\n  0: cat\n  0: dog\n"))


def test_repeated_images_of_cvat_are_one(tmp_path):
    draw(tmp_path / "a.png")
    image = '<image name="a.png" width="40" height="{}"><box label="cat" xtl="{}" ytl="1" xbr="30" ybr="9"/></image>'
    file = write(tmp_path / "a.xml", f"<annotations>{image.format(20, 2)}{image.format(20, 4)}</annotations>")
    data = read_annotations(file, tmp_path)
    assert len(data.images) == 1 and boxes(data) == [[2, 1, 28, 8], [4, 1, 26, 8]]
    file = write(tmp_path / "a.xml", f"<annotations>{image.format(20, 2)}{image.format(40, 4)}</annotations>")
    with pytest.raises(DataError, match="'a.png' is listed as 40x40 pixels and as 40x20"):
        read_annotations(file, tmp_path)


# Every object twice


def test_image_in_both_splits_is_listed_once(tmp_path):
    first = read_annotations(yolo(tmp_path / "first", "0.5 0.5 0.5 0.5", "0.3 0.3 0.2 0.2"))
    assert len(first.images) == 1 and len(first.annotations) == 2 and first.splits == {"train": [1], "val": [1]}
    assert first.notes == ["1 image is in both train and val, such as images/a.png"]
    second = read_annotations(yolo(tmp_path / "second", "0.5 0.5 0.5 0.5"))
    merged = merge_datasets([first, second], {}, tmp_path / "merged")
    assert len(merged.images) == 2 and len(merged.annotations) == 3
    draw(tmp_path / "b.png")
    file = write(
        tmp_path / "b.csv", "file,class,xmin,ymin,xmax,ymax,split\nb.png,cat,1,1,9,9,train\nb.png,cat,2,2,9,9,val\n"
    )
    data = read_annotations(file, tmp_path)
    assert len(data.images) == 1 and len(data.annotations) == 2 and data.splits == {"train": [1], "val": [1]}


def test_files_that_stand_for_several_images_are_noted(tmp_path):
    for k in range(4):
        draw(tmp_path / "images" / f"frame_{k}.PNG")
    for split in ("Train", "Validation"):
        images = [{"id": k, "file_name": f"frame_{k}.PNG", "width": 40, "height": 20} for k in range(4)]
        content = {"images": images, "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
        write(tmp_path / "annotations" / f"instances_{split}.json", content)
    notes = read_annotations(tmp_path).notes
    assert any(note.startswith("4 files stand for 8 images, such as frame_0.PNG") for note in notes)


# Related images


def test_tiles_of_a_photo_stay_together(tmp_path):
    photos = AnnotatedImages("coco", tmp_path / "own.json", tmp_path)
    for k in range(8):
        draw(tmp_path / f"photo {k}.png", (96, 64), seed=k)
        photos.add_object(photos.add_image(f"photo {k}.png", 96, 64), "cat", [1, 1, 90, 60])
    tiled = tile_dataset(photos, Tiling(32, 0).tiles, tmp_path / "tiles", min_visible=0.01)
    assert len(tiled.images) == 48
    split_dataset(tiled, {"val": 0.25})
    parts = {name: {Path(i["file_name"]).name[:7] for i in tiled.split(name).images} for name in tiled.splits}
    assert len(parts["val"]) == 2 and not parts["train"] & parts["val"]
    assert "tiles of 8 photos by their file names: those of one stay together" in tiled.notes


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a_0_0", "a_512_0", "b_0_0", "b_0_600"], ["a", "a", "b", "b"]),
        (["a_0_0", "a_1_0", "b_0_0"], ["a", "a", "b"]),  # an image one pixel wider than a tile
        (["IMG_20231105_120000", "IMG_20231105_120003", "x_0_0"], None),
        ([f"cam_0_{k}" for k in range(9)], None),
        (["a_1_2", "a_1_3"], None),
        (["a_0_0", "a_512_0"], None),  # of a single photo, which must be divided
        (["rec_0007_0001", "b_00_01"], None),
    ],
)
def test_tiles_are_recognized_by_their_names(names, expected):
    found = [str(photo).removesuffix(".png") for photo in photo_names([f"{name}.png" for name in names])]
    assert found == (expected or names)


def test_frames_of_a_video_of_cvat_are_cut_into_blocks(tmp_path):
    names = [f"frame_{k:06}.png" for k in range(40)]
    assert series_of(names) == ["frame_"] * 40 and series_of([f"IMG_{k:04}.png" for k in range(40)]) is None
    data = AnnotatedImages("coco", tmp_path / "own.json", tmp_path)
    for k, name in enumerate(names):
        draw(tmp_path / name, seed=k)
        data.add_object(data.add_image(name, 40, 20), "cat", [1, 1, 9, 9])
    split_dataset(data, {"val": 0.2})
    assert {(image_id - 1) // 4 for image_id in data.splits["val"]} == {(k - 1) // 4 for k in data.splits["val"]}
    assert len({(image_id - 1) // 4 for image_id in data.splits["val"]}) == 2


@pytest.mark.parametrize("kind", ["cvat tasks", "cvat subsets", "coco subsets", "yolo subsets"])
def test_tasks_and_subsets_of_cvat_stay_together(tmp_path, kind):
    names = [f"{part}_{k}.png" for part in ("one", "two", "six", "ten") for k in "abcde"]
    for k, name in enumerate(names):
        draw(tmp_path / "images" / name, seed=k)
    if kind.startswith("cvat"):
        shape = '<box label="cat" xtl="1" ytl="1" xbr="9" ybr="9"/>'
        part = 'subset="{}"' if kind == "cvat subsets" else 'task_id="{}"'
        images = [f'<image name="{n}" width="40" height="20" {part.format(n[:3])}>{shape}</image>' for n in names]
        source = write(tmp_path / "a.xml", f"<annotations>{''.join(images)}</annotations>")
    elif kind.startswith("coco"):
        source = tmp_path / "annotations"
        for part in ("one", "two", "six", "ten"):
            images = [
                {"id": k, "file_name": n, "width": 40, "height": 20} for k, n in enumerate(names) if n[:3] == part
            ]
            content = {"images": images, "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
            write(source / f"instances_{part}.json", content)
    else:
        write(tmp_path / "obj.names", "cat\n")
        write(
            tmp_path / "obj.data",
            "classes = 1\nnames = data/obj.names\n"
            + "".join(f"{p} = data/{p}.txt\n" for p in ("one", "two", "six", "ten")),
        )
        for part in ("one", "two", "six", "ten"):
            write(tmp_path / f"{part}.txt", "".join(f"data/images/{n}\n" for n in names if n[:3] == part))
        for name in names:
            write(tmp_path / "images" / f"{name[:-4]}.txt", "0 0.5 0.5 0.5 0.5\n")
        source = tmp_path / "obj.data"
    data = read_annotations(source, None if kind.startswith("yolo") else tmp_path / "images")
    split_dataset(data, {"val": 0.25})
    parts = {name: {Path(i["file_name"]).name[:3] for i in data.split(name).images} for name in data.splits}
    assert (
        len(parts["val"]) == 1
        and len(parts["train"]) == 3
        and "4 tasks or subsets: each stays in one split" in data.notes
    )


# What exporters write otherwise


def test_subsets_of_cvats_yolo_are_splits(tmp_path):
    for subset, count in (("Train", 4), ("Validation", 2)):
        for k in range(count):
            draw(tmp_path / f"obj_{subset}_data/{subset}{k}.png")
            write(tmp_path / f"obj_{subset}_data/{subset}{k}.txt", "0 0.375 0.5 0.25 0.5\n")
        listed = [f"data/obj_{subset}_data/{subset}{k}.png\n" for k in range(count)]
        write(tmp_path / f"{subset}.txt", "".join(listed))
    write(tmp_path / "obj.names", "box\n")
    lines = [
        "classes = 1",
        "Train = data/Train.txt",
        "Validation = data/Validation.txt",
        "names = data/obj.names",
        "backup = backup/",
    ]
    write(tmp_path / "obj.data", "\n".join(lines))
    for source in (tmp_path, tmp_path / "obj.data"):
        data = read_annotations(source)
        assert {name: len(ids) for name, ids in data.splits.items()} == {"train": 4, "val": 2}
        assert boxes(data) == [[10, 5, 10, 10]] * 6 and not data.left_out and data.categories[0]["name"] == "box"


@pytest.mark.parametrize(
    "names", [["images\\0.png", "images\\1.png"], ["0.png", "..\\images\\1.png"], ["C:\\x\\images\\0.png", "1.png"]]
)
def test_backslashes_separate_folders(tmp_path, names):
    images = []
    for k, name in enumerate(names):
        draw(tmp_path / "images" / f"{k}.png")
        images.append({"id": k, "file_name": name, "width": 40, "height": 20})
    annotations = [{"id": k, "image_id": k, "category_id": 1, "bbox": [k, 1, 9, 9]} for k in range(2)]
    content = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "cat"}]}
    file = write(tmp_path / "own.json", content)
    data = read_annotations(file, tmp_path / "images")
    assert [image["file_name"] for image in data.images] == ["0.png", "1.png"]
    assert any("backslashes" in note for note in data.notes)
    assert len(CocoDetection(tmp_path / "images", file)[1]["target"]["labels"]) == 1
    captions = [{"image_id": k, "caption": "a cat"} for k in range(2)]
    file = write(tmp_path / "captions.json", {"images": images, "annotations": captions})
    assert CocoCaptions(tmp_path / "images", file, min_count=1).image_path(1).name == "1.png"


COMPOSED, SEPARATE = (unicodedata.normalize(form, "Müller é") for form in ("NFC", "NFD"))


@pytest.mark.parametrize(("listed", "stored"), [(COMPOSED, SEPARATE), (SEPARATE, COMPOSED)])
def test_names_in_another_unicode_form_are_found_in_every_format(tmp_path, listed, stored):
    draw(tmp_path / "images" / f"{stored}.png")
    file = coco(tmp_path, {}, name=f"{listed}.png")
    assert read_annotations(file, tmp_path / "images").images[0]["file_name"] == f"{stored}.png"
    assert len(CocoDetection(tmp_path / "images", file)[0]["target"]["labels"]) == 1
    write(tmp_path / "labels" / f"{listed}.txt", "0 0.5 0.5 0.5 0.5\n")
    assert len(read_annotations(tmp_path / "labels").annotations) == 1
    box = "<bndbox><xmin>3</xmin><ymin>3</ymin><xmax>12</xmax><ymax>12</ymax></bndbox>"
    text = f"<annotation><object><name>cat</name>{box}</object></annotation>"
    write(tmp_path / "Annotations" / f"{listed}.xml", text)
    write(tmp_path / "ImageSets" / "Main" / "val.txt", f"{listed}\n")
    data = read_annotations(tmp_path / "Annotations", tmp_path / "images")
    assert len(data.annotations) == 1 and data.splits == {"val": [1]}
    shape = {"label": "cat", "points": [[4, 4], [9, 9]], "shape_type": "rectangle"}
    write(tmp_path / "labelme" / f"{listed}.json", {"shapes": [shape]})
    assert len(read_annotations(tmp_path / "labelme", tmp_path / "images").annotations) == 1
    write(tmp_path / "own.csv", f"file,class,xmin,ymin,xmax,ymax\n{listed}.png,cat,1,1,9,9\n")
    assert len(read_annotations(tmp_path / "own.csv", tmp_path / "images").annotations) == 1
    text = f'<annotations><image name="{listed}.png" width="40" height="20"/></annotations>'
    assert len(read_annotations(write(tmp_path / "cvat.xml", text), tmp_path / "images").images) == 1


def test_texts_as_ids_are_numbered(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw(tmp_path / "a.png")
    coco(tmp_path, {"id": "5f82c2d9-cfeb"}, {"id": "b8e8cd4e-a93d", "bbox": [1, 1, 9, 9]})
    convert.main(["own.json", "--images", ".", "--fix", "ids", "--out", "fixed.json"])
    assert [a["id"] for a in json.loads(Path("fixed.json").read_text())["annotations"]] == [1, 2]
    assert "annotations with texts as ids, numbered from 1: 2" in capsys.readouterr().out
    assert CocoDetection(tmp_path, "own.json").num_objects == 2


def test_vias_coco_file_is_read_or_named(tmp_path):
    draw(tmp_path / "a.png")
    file = coco(tmp_path, {"image_id": "1", "segmentation": SQUARE[0]})
    data = read_annotations(file, tmp_path)
    assert data.annotations[0]["segmentation"] == SQUARE and data.annotations[0]["image_id"] == 1
    assert CocoDetection(tmp_path, file, masks=True)[0]["target"]["masks"].sum() == 200
    file = coco(tmp_path, {"category_id": None, "segmentation": SQUARE[0]})
    for read in (read_annotations, lambda source, images: CocoDetection(images, source)):
        with pytest.raises(DataError, match="own.json: 1 annotation has category_id null: VIA writes so.*CSV or JSON"):
            read(file, tmp_path)


SHAPES = {
    "rect": {"name": "rect", "x": 4, "y": 4, "width": 20, "height": 10},
    "polygon": {"name": "polygon", "all_points_x": [4, 24, 24, 4], "all_points_y": [4, 4, 14, 14]},
    "circle": {"name": "circle", "cx": 10, "cy": 10, "r": 5},
    "ellipse": {"name": "ellipse", "cx": 10, "cy": 10, "rx": 8, "ry": 4, "theta": np.pi / 2},
}
BOXES = {"rect": [4, 4, 20, 10], "polygon": [4, 4, 20, 10], "circle": [5, 5, 10, 10], "ellipse": [6, 2, 8, 16]}


def via_csv(folder, regions, *, names=("a.png",)):
    header = "filename,file_size,file_attributes,region_count,region_id,region_shape_attributes,region_attributes\n"
    rows = [header]
    for name in names:
        rows += [
            f'{name},1,"{{}}",{len(regions)},{k},"{_quoted(shape)}","{_quoted(attributes)}"\n'
            for k, (shape, attributes) in enumerate(regions)
        ]
    return write(folder / "via.csv", "".join([*rows, 'empty.png,1,"{}",0,0,"{}","{}"\n']))


def _quoted(value):
    return json.dumps(value).replace('"', '""')


@pytest.mark.parametrize("kind", SHAPES)
def test_vias_regions_are_read(tmp_path, kind):
    draw(tmp_path / "a.png")
    draw(tmp_path / "empty.png")
    regions = [(SHAPES[kind], {"class": "cat"}), ({"name": "point", "cx": 1, "cy": 1}, {"class": "dog"})]
    entries = [{"shape_attributes": shape, "region_attributes": attributes} for shape, attributes in regions]
    project = {
        "_via_settings": {},
        "_via_img_metadata": {
            "a.png1": {"filename": "a.png", "regions": entries},
            "empty.png1": {"filename": "empty.png", "regions": []},
        },
    }
    write(tmp_path / "json" / "project.json", project)
    for source in (via_csv(tmp_path, regions), tmp_path / "json" / "project.json"):
        data = read_annotations(source, tmp_path)
        assert np.allclose(boxes(data), [BOXES[kind]], atol=1e-3) and [c["name"] for c in data.categories] == ["cat"]
        assert len(data.images) == 2 and {*data.left_out} == {"regions of the shape 'point'"}


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_images_of_one_name_in_via_are_told_apart_by_their_sizes(tmp_path, kind):
    draw(tmp_path / "a.png")
    size = (tmp_path / "a.png").stat().st_size
    regions = [(number, {**SHAPES["rect"], "x": number % 7}, {"class": "cat"}) for number in (size + 1, size)]
    if kind == "json":
        project = {
            f"a.png{number}": {
                "filename": "a.png",
                "size": number,
                "regions": [{"shape_attributes": shape, "region_attributes": attributes}],
            }
            for number, shape, attributes in regions
        }
        source = write(tmp_path / "via.json", project)
    else:
        rows = [f'a.png,{n},"{_quoted(shape)}","{_quoted(attributes)}"\n' for n, shape, attributes in regions]
        header = "filename,file_size,region_shape_attributes,region_attributes\n"
        source = write(tmp_path / "via.csv", "".join([header, *rows]))
    data = read_annotations(source, tmp_path)
    assert boxes(data) == [[size % 7, 4, 20, 10]]
    assert data.left_out == {"images that the file lists but the folder does not have": ["a.png"]}


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"species": "cat"}, "cat"),
        ({"species": {"cat": True}}, "cat"),
        ({"species": "cat", "label": "dog"}, "dog"),
        ({"species": "cat", "color": "red"}, "attributes 'species, color'; expected one, or one called class"),
        ({}, "no region has attributes"),
        ({"species": ""}, "attribute 'species' is ''"),
    ],
)
def test_class_of_vias_regions_is_chosen_or_an_error(tmp_path, attributes, expected):
    draw(tmp_path / "a.png")
    file = via_csv(tmp_path, [(SHAPES["rect"], attributes)])
    if " " in expected:
        with pytest.raises(DataError, match=expected):
            read_annotations(file, tmp_path)
    else:
        assert read_annotations(file, tmp_path).categories[0]["name"] == expected


def test_masks_that_are_all_crowds_are_named_with_a_repair(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw(tmp_path / "a.png")
    file = coco(tmp_path, {"iscrowd": 1, "segmentation": SQUARE}, {"iscrowd": 1, "segmentation": SQUARE})
    spec = {"type": "CocoDetection", "images": ".", "annotations": file.name, "masks": True}
    with pytest.raises(DataError, match=r"nothing to learn: all 2 are crowd regions \(iscrowd: 1\).*--fix crowds"):
        build_datasets(DataSettings(train=spec, val=spec))
    convert.main(["own.json", "--out", "copy.json"])
    assert "all 2 objects are crowd regions (iscrowd: 1), which are not trained on" in capsys.readouterr().out
    convert.main(["own.json", "--images", ".", "--fix", "crowds", "--out", "fixed.json"])
    assert CocoDetection(".", "fixed.json", masks=True).num_objects == 2


def test_whole_numbers_that_were_written_as_floats_are_read(tmp_path):
    draw(tmp_path / "a.png")
    floats = {"id": 1.0, "image_id": 7.0, "category_id": 1.0, "iscrowd": 0.0}
    file = coco(tmp_path, floats, floats | {"id": 2.0}, id=7.0, width=40.0)
    data = read_annotations(file, tmp_path)
    assert [(a["id"], a["image_id"], type(a["category_id"])) for a in data.annotations] == [(1, 7, int), (2, 7, int)]
    assert data.notes == ["whole numbers written as 1.0, such as ids: 10"] and data.images[0]["width"] == 40
    assert CocoDetection(tmp_path, file).num_objects == 2
    with pytest.raises(DataError, match="annotation 1.5 .*has id 1.5; expected a whole number"):
        read_annotations(coco(tmp_path, {"id": 1.5}), tmp_path)


def test_a_sheet_beside_the_file_is_not_taken_for_its_images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    draw(tmp_path / "images/a.png")
    file = coco(tmp_path, {"bbox": [4, 4, 20, 10]})
    for out in ("one.json", "two.json"):
        convert.main([file.name, "--out", out])
        assert (tmp_path / out.replace(".json", "_sheet.png")).is_file()


def test_line_of_a_table_that_differs_is_the_one_named(tmp_path):
    for k in range(3):
        draw(tmp_path / f"{k}.png")
    header, fractions = "file,class,xmin,ymin,xmax,ymax\n", "cat,0.75,0.25,1.0,0.75\n"
    text = header + "0.png,cat,{},0.25,{},0.75\n" + f"1.png,{fractions}2.png,{fractions}"
    data = read_annotations(write(tmp_path / "own.csv", text.format(0.75, 1.0003)), tmp_path)
    assert boxes(data) == [[30, 5, 10, 10]] * 3
    with pytest.raises(
        DataError, match=r"own.csv line 2: \[30.0, 0.25, 40.0, 0.75\] are pixels, most other lines have fr"
    ):
        read_annotations(write(tmp_path / "own.csv", text.format(30, 40)), tmp_path)
    pixels = f"{header}0.png,cat,1,1,9,9\n1.png,cat,0.1,0.1,0.5,0.5\n2.png,cat,1,1,9,9\n"
    with pytest.raises(DataError, match="own.csv line 3: .* are fractions, most other lines have pixels"):
        read_annotations(write(tmp_path / "own.csv", pixels), tmp_path)
    sizes = "filename,width,height,class,xmin,ymin,xmax,ymax\n0.png,40,20,cat,1,1,9,9\n0.png,{},20,cat,1,1,9,9\n"
    for width, message in (
        (80, "line 3: '0.png' is 80x20 pixels here and 40x20 in an earlier line"),
        ("x", "line 3: the image's size is 'x'"),
    ):
        with pytest.raises(DataError, match=message):
            read_annotations(write(tmp_path / "own.csv", sizes.format(width)), tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            [{"image": "a.jpg", "label": [{"x": 1, "rectanglelabels": ["cat"], "original_width": 8}]}],
            "is Label Studio's JSON-MIN: export it as JSON",
        ),
        ({"objects": [{"classTitle": "cat"}]}, "is Supervisely's JSON: export it as COCO"),
        ({"item": {"name": "a.png", "slots": []}, "annotations": []}, "is Darwin JSON of V7: export it as COCO"),
        ({"project": {}, "file": {"1": {"fid": 1}}, "view": {"1": {"fid_list": [1]}}}, "is VIA 3's JSON"),
        (
            [{"image": "a.png", "annotations": [{"label": "cat", "coordinates": {"x": 9, "y": 9, "width": 4}}]}],
            "is Create ML's JSON",
        ),
    ],
)
def test_json_of_other_tools_is_named(tmp_path, content, message):
    draw(tmp_path / "a.png")
    file = write(tmp_path / "own.json", content)
    for annotations in (file, tmp_path):
        with pytest.raises(DataError, match=rf"own\.json' {message}"):
            read_annotations(annotations, tmp_path)


def test_splits_of_karpathy_are_read(tmp_path):
    for k in range(4):
        draw(tmp_path / "val2014" / f"{k}.png")
    splits = ["train", "restval", "val", "test"]
    images = [
        {"filename": f"{k}.png", "filepath": "val2014", "split": split, "cocoid": 10 + k, "imgid": k,
         "sentences": [{"raw": f"a cat {n}", "tokens": ["a", "cat"]} for n in range(5)]}
        for k, split in enumerate(splits)
    ]  # fmt: skip
    file = write(tmp_path / "dataset.json", {"dataset": "coco", "images": images})
    train = CocoCaptions(tmp_path, file, split="train", min_count=1)
    assert (
        train.image_ids.tolist() == [10, 11] and train.references(0)[0] == "a cat 0" and len(train.references(1)) == 5
    )
    assert CocoCaptions(tmp_path / "val2014", file, split="val").image_path(0) == tmp_path / "val2014" / "2.png"
    with pytest.raises(DataError, match=r"split is None; it has train \(2 images\), val \(1 image\), test \(1 image\)"):
        CocoCaptions(tmp_path, file)
    captions = {"images": [{"id": 1, "file_name": "val2014/0.png"}], "annotations": [{"image_id": 1, "caption": "a"}]}
    with pytest.raises(ConfigError, match="COCO's format, which has no splits"):
        CocoCaptions(tmp_path, write(tmp_path / "captions.json", captions), split="train")
