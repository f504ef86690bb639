"""CVAT's XML, and rotations that other formats lose."""

import pytest
from helpers.annotation_files import SQUARE, boxes, coco, draw, draw_images, named_boxes, write

from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.formats import read_annotations
from vitkit.errors import DataError
from vitkit.io.segmentations import decode_segmentation


def test_cvat_boxes_polygons_masks_and_subsets_are_read(tmp_path):
    draw_images(tmp_path, "images/a.jpg")
    write(
        tmp_path / "annotations.xml",
        "<annotations><meta><task><labels><label><name>cat</name></label></labels></task></meta>"
        '<image id="0" name="a.jpg" width="40" height="20" subset="Train">'
        '<box label="cat" occluded="1" xtl="1" ytl="2" xbr="11" ybr="5"/>'
        '<polygon label="cat" points="0,0;4,0;4,4"/>'
        '<mask label="cat" rle="1,2,1" left="10" top="3" width="2" height="2"/>'
        '<box label="cat" rotation="90" xtl="10" ytl="8" xbr="20" ybr="12"/>'
        '<points label="cat" points="1,1"/></image></annotations>',
    )
    data = read_annotations(tmp_path / "annotations.xml")
    found = [box for _, _, box in named_boxes(data)]
    assert found == [[1, 2, 10, 3], [0, 0, 4, 4], [10, 3, 2, 2], [13, 5, 4, 10]]
    mask = decode_segmentation(data.annotations[2]["segmentation"], 20, 40)
    assert mask[3:5, 10:12].tolist() == [[0, 1], [1, 0]] and mask.sum() == 2
    assert data.splits == {"train": [1]} and list(data.left_out) == ["shapes of type points"]


def test_images_of_a_cvat_project_have_a_folder_for_each_subset(tmp_path):
    draw_images(tmp_path, *(f"images/{name}" for name in ("Train/a.jpg", "Batch 2/a.jpg", "b.jpg")))
    listed = (("a.jpg", "Train", 1), ("a.jpg", "Batch 2", 2), ("b.jpg", "Train", 3))
    images = (
        f'<image id="{x}" name="{name}" width="40" height="20" subset="{subset}">'
        f'<box label="cat" xtl="{x}" ytl="2" xbr="11" ybr="5"/></image>'
        for name, subset, x in listed
    )
    labels = "<meta><task><labels><label><name>cat</name></label></labels></task></meta>"
    path = write(tmp_path / "annotations.xml", f"<annotations>{labels}{''.join(images)}</annotations>")
    data = read_annotations(path)
    assert [(image["file_name"], objects[0]["bbox"][0]) for image, objects in data.each_image()] == [
        ("Train/a.jpg", 1), ("Batch 2/a.jpg", 2), ("b.jpg", 3),
    ]  # fmt: skip
    assert data.splits == {"train": [1, 3]} and data.recordings == {2: "subset Batch 2"}


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


def test_repeated_images_of_cvat_are_one(tmp_path):
    draw(tmp_path / "a.png")
    image = '<image name="a.png" width="40" height="{}"><box label="cat" xtl="{}" ytl="1" xbr="30" ybr="9"/></image>'
    file = write(tmp_path / "a.xml", f"<annotations>{image.format(20, 2)}{image.format(20, 4)}</annotations>")
    data = read_annotations(file, tmp_path)
    assert len(data.images) == 1 and boxes(data) == [[2, 1, 28, 8], [4, 1, 26, 8]]
    file = write(tmp_path / "a.xml", f"<annotations>{image.format(20, 2)}{image.format(40, 4)}</annotations>")
    with pytest.raises(DataError, match="'a.png' is listed as 40x40 pixels and as 40x20"):
        read_annotations(file, tmp_path)


def test_images_of_one_name_in_two_tasks_are_noted(tmp_path):
    draw_images(tmp_path, "a.jpg")
    image = '<image name="a.jpg" task_id="{}" width="40" height="20"><box label="cat" xtl="1" ytl="1" xbr="9" ybr="9"/>'
    for tasks, is_noted in (((1, 2), True), ((1, 1), False)):
        images = "".join(f"{image.format(task)}</image>" for task in tasks)
        data = read_annotations(write(tmp_path / "a.xml", f"<annotations>{images}</annotations>"))
        assert any("1 image is of the name of another task's, such as a.jpg" in text for text in data.notes) == is_noted


@pytest.mark.parametrize("count", [1, 2])
def test_a_box_is_that_of_a_skeleton_if_its_group_has_one_of_each(tmp_path, count):
    draw_images(tmp_path, "a.jpg")
    box = '<box label="cat" group_id="3" xtl="0" ytl="0" xbr="30" ybr="18"/>'
    skeleton = '<skeleton label="cat" group_id="3"><points label="p" points="{0},5"/><points label="q" points="{0},9"/>'
    shapes = "".join(f"{box}{skeleton.format(5 + 10 * k)}</skeleton>" for k in range(count))
    text = f'<annotations><image name="a.jpg" width="40" height="20">{shapes}</image></annotations>'
    data = read_annotations(write(tmp_path / "a.xml", text))
    assert boxes(data) == ([[0, 0, 30, 18]] if count == 1 else [[5, 5, 1, 4], [15, 5, 1, 4]])
    reason = "boxes of a group of several skeletons or boxes of one label"
    assert data.left_out == ({} if count == 1 else {reason: ["a.jpg", "a.jpg"]})


def test_the_attribute_difficult_of_cvat_is_kept(tmp_path):
    draw_images(tmp_path, "a.jpg")
    box = '<box label="cat" xtl="1" ytl="1" xbr="9" ybr="9"><attribute name="difficult">{}</attribute></box>'
    shapes = box.format("true") + box.format("false")
    text = f'<annotations><image name="a.jpg" width="40" height="20">{shapes}</image></annotations>'
    data = read_annotations(write(tmp_path / "a.xml", text))
    assert [annotation.get("difficult", 0) for annotation in data.annotations] == [1, 0]
