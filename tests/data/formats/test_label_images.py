"""Objects and classes of label images."""

import json
from collections import Counter

import numpy as np
import pytest
from helpers.annotation_files import draw_images, named_boxes, write
from PIL import Image

from vitkit.data.datasets.semantic import SemanticFolder
from vitkit.data.formats import detect_format, read_annotations
from vitkit.errors import DataError


@pytest.mark.parametrize("value", [1, 255])
def test_objects_of_binary_masks_are_what_is_not_black(tmp_path, value):
    draw_images(tmp_path / "images", "a.jpg", "b.jpg")
    values = np.zeros((20, 40), np.uint8)
    (tmp_path / "masks").mkdir()
    Image.fromarray(values).save(tmp_path / "masks" / "b.png")
    values[2:6, 3:9], values[10:12, 20:30] = value, value
    Image.fromarray(values).save(tmp_path / "masks" / "a.png")
    data = read_annotations(tmp_path / "masks", tmp_path / "images", format="semantic_maps")
    assert named_boxes(data) == [
        ("a.jpg", f"class_{value}", [3, 2, 6, 4]),
        ("a.jpg", f"class_{value}", [20, 10, 10, 2]),
    ]
    assert len(data.images) == 2 and "0 is the background, without objects: 97.2% of the pixels" in data.notes
    assert any("255 is a class" in note and "44 pixels (2.8%)" in note for note in data.notes) == (value == 255)
    write(tmp_path / "masks" / "classes.json", json.dumps({"0": "ground", str(value): "cell"}))
    data = read_annotations(tmp_path / "masks", tmp_path / "images", format="semantic_maps")
    assert [name for _, name, _ in named_boxes(data)] == ["ground", "cell", "cell", "ground"]


@pytest.mark.parametrize("mode", ["LA", "RGB", "RGBA"])
def test_gray_in_several_channels_is_read_as_one(tmp_path, mode):
    draw_images(tmp_path / "images", "a.jpg", "b.jpg")
    values = np.zeros((20, 40), np.uint8)
    values[2:6, 3:9], values[10:12, 20:30] = 1, 2
    (tmp_path / "masks").mkdir()
    for name in "ab":
        Image.fromarray(values).convert(mode).save(tmp_path / "masks" / f"{name}.png")
    data = read_annotations(tmp_path / "masks", tmp_path / "images", format="semantic_maps")
    found = [("class_0", [0, 0, 40, 20]), ("class_1", [3, 2, 6, 4]), ("class_2", [20, 10, 10, 2])]
    assert [(name, box) for _, name, box in named_boxes(data)] == found * 2
    folders = {"images": tmp_path / "images", "labels": tmp_path / "masks"}
    dataset = SemanticFolder(**folders, classes=["ground", "road", "tree"])
    assert (dataset.load_semantic(0) == values).all()
    colored = np.asarray(Image.open(tmp_path / "masks" / "a.png").convert("RGB")).copy()
    colored[0, 0] = 1, 2, 3
    Image.fromarray(colored).save(tmp_path / "masks" / "a.png")
    with pytest.raises(DataError, match="mode RGB .* expected one channel"):
        dataset.load_semantic(0)
    data = read_annotations(tmp_path / "masks", tmp_path / "images", format="semantic_maps")  # one rule for all of them
    assert {name for file, name, _ in named_boxes(data) if file == "b.jpg"} == {
        "class_0",
        "class_65793",
        "class_131586",
    }


@pytest.mark.parametrize("gray", [0, 255])
def test_label_image_that_may_be_in_the_transparency_is_an_error(tmp_path, gray):
    draw_images(tmp_path / "images", "a.jpg")
    pixels = np.full((20, 40, 2), gray, np.uint8)
    pixels[..., 1] = 255
    pixels[2:6, 3:9, 1] = 0
    (tmp_path / "masks").mkdir()
    Image.fromarray(pixels, "LA").save(tmp_path / "masks" / "a.png")
    dataset = SemanticFolder(tmp_path / "images", tmp_path / "masks", classes=["ground", "road"])
    with pytest.raises(DataError, match="a gray image of mode LA that is transparent in parts: its classes may be its"):
        dataset.load_semantic(0)


def test_label_images_give_instances_and_classes(tmp_path):
    draw_images(tmp_path / "images", "a.jpg", "b.jpg")
    values = np.zeros((20, 40), np.uint8)
    values[2:6, 3:9], values[10:12, 20:30] = 1, 2
    (tmp_path / "masks").mkdir()
    Image.fromarray(values).save(tmp_path / "masks" / "a_mask.png")
    with pytest.raises(DataError, match="format=semantic_maps or format=instance_maps"):
        detect_format(tmp_path / "masks", tmp_path / "images")
    data = read_annotations(tmp_path / "masks", tmp_path / "images", format="instance_maps")
    assert named_boxes(data) == [("a.jpg", "object", [3, 2, 6, 4]), ("a.jpg", "object", [20, 10, 10, 2])]
    assert data.left_out == {"images without a label image": ["b.jpg"]}
    data = read_annotations(tmp_path / "masks", tmp_path / "images", format="semantic_maps")
    assert [name for _, name, _ in named_boxes(data)] == ["class_0", "class_1", "class_2"]
    write(tmp_path / "masks" / "classes.txt", "\ufeffground\nroad\ntree\n")  # as Windows begins UTF-8
    data = read_annotations(tmp_path / "masks", tmp_path / "images")
    assert data.format == "semantic_maps" and [name for _, name, _ in named_boxes(data)] == ["ground", "road", "tree"]
    Image.fromarray(values.astype(np.uint16) * 1000 + values).save(tmp_path / "masks" / "a_mask.png")
    data = read_annotations(tmp_path / "masks", tmp_path / "images")
    assert [name for _, name, _ in named_boxes(data)] == ["road", "tree"]


def write_map(folder, name, values):
    """A label image and its photo."""
    draw_images(folder / "images", f"{name}.jpg", size=values.shape[1::-1])
    (folder / "maps").mkdir(exist_ok=True)
    Image.fromarray(values).save(folder / "maps" / f"{name}.png")


def test_numbers_of_more_than_999_instances_are_not_taken_for_classes(tmp_path):
    for name, count in (("a", 300), ("b", 1100)):
        values = np.zeros(2400, np.uint16)
        values[: 2 * count] = np.repeat(np.arange(1, count + 1), 2)
        write_map(tmp_path, name, values.reshape(40, 60))
    data = read_annotations(tmp_path / "maps", tmp_path / "images", format="instance_maps")
    assert Counter((file, name) for file, name, _ in named_boxes(data)) == {
        ("a.jpg", "object"): 300,
        ("b.jpg", "object"): 1100,
    }


def test_one_instance_with_a_class_decides_for_the_folder(tmp_path):
    values = np.full((20, 40), 7, np.uint16)
    write_map(tmp_path, "a", values)
    values[2:6, 3:9] = 26_000
    write_map(tmp_path, "b", values)
    (tmp_path / "maps" / "0.png").write_text("not an image")
    data = read_annotations(tmp_path / "maps", tmp_path / "images", format="instance_maps")
    assert named_boxes(data) == [("b.jpg", "class_26", [3, 2, 6, 4])]
    assert "values below 1000 are classes without instances, left out: 98.5% of the pixels" in data.notes


@pytest.mark.parametrize("colored", [False, True])
def test_class_file_is_not_used_for_instances_without_a_class(tmp_path, colored):
    values = np.zeros((20, 40, 3) if colored else (20, 40), np.uint8)
    values[2:6, 3:9], values[10:12, 20:30] = ((128, 0, 0), (0, 128, 0)) if colored else (1, 2)
    write_map(tmp_path, "a", values)
    path = write(tmp_path / "labelmap.txt", "background:0,0,0::\ncat:128,0,0::\n")
    data = read_annotations(tmp_path / "maps", tmp_path / "images", format="instance_maps")
    assert [category["name"] for category in data.categories] == ["object"] and len(data.annotations) == 2
    assert data.notes == [f"{path} is not used: values are objects without a class"]


@pytest.mark.parametrize(("others", "count"), [((1, 2), 2), ((253, 254), 3), ((85, 170), 3)])
def test_void_around_instances_is_not_an_object(tmp_path, others, count):
    values = np.zeros((20, 40), np.uint8)
    values[4:16, 9:31], values[5:15, 10:20], values[5:15, 20:30] = 255, *others
    write_map(tmp_path, "a", values)
    data = read_annotations(tmp_path / "maps", tmp_path / "images", format="instance_maps")
    assert len(data.annotations) == count
    assert ("255 is no object, left out: 8.0% of the pixels" in data.notes) == (count == 2)


@pytest.mark.parametrize("name", ["background", "_Background_"])
def test_class_called_background_has_no_objects(tmp_path, name):
    values = np.zeros((20, 40), np.uint8)
    values[2:6, 3:9] = 1
    write_map(tmp_path, "a", values)
    write(tmp_path / "maps" / "classes.txt", f"{name}\ncrack\nhole\n")
    data = read_annotations(tmp_path / "maps", tmp_path / "images")
    assert named_boxes(data) == [("a.jpg", "crack", [3, 2, 6, 4])]
    assert [category["name"] for category in data.categories] == ["crack", "hole"]
    assert "0 is the background, without objects: 97.0% of the pixels" in data.notes


@pytest.mark.parametrize("suffixes", [("_mask", "_mask_1"), ("_color", "_instanceIds", "_labelIds")])
def test_two_label_images_of_one_image_are_an_error(tmp_path, suffixes):
    draw_images(tmp_path / "images", "a.jpg")
    draw_images(tmp_path / "maps", *(f"a{suffix}.png" for suffix in suffixes))
    with pytest.raises(DataError, match=rf"a{suffixes[0]}\.png and a{suffixes[1]}\.png are both of the image a\.jpg"):
        read_annotations(tmp_path / "maps", tmp_path / "images", format="instance_maps")


def palette_image(path, values, colors):
    image = Image.fromarray(np.array(values, np.uint8), mode="P")
    image.putpalette([value for color in colors for value in color])
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


@pytest.mark.parametrize("colors", [[(0, 0, 0), (0, 255, 0), (255, 0, 0)], [(0, 0, 0), (9, 9, 9), (8, 8, 8)]])
def test_a_palette_of_the_class_file_s_colors_is_read_by_colors_and_another_one_by_numbers(tmp_path, colors):
    draw_images(tmp_path / "images", "a.jpg")
    values = np.zeros((20, 40), np.uint8)
    values[2:8, 2:8], values[2:8, 20:30], values[0] = 1, 2, 255
    palette_image(tmp_path / "masks/a.png", values, colors + [(224, 224, 192)] * 253)
    write(tmp_path / "masks/labelmap.txt", "background:0,0,0::\ncat:255,0,0::\ndog:0,255,0::\n")
    data = read_annotations(tmp_path / "masks", tmp_path / "images", format="semantic_maps")
    first = "dog" if colors[1] == (0, 255, 0) else "cat"
    assert {name: box for _, name, box in named_boxes(data)}[first] == [2, 2, 6, 6] and len(data.annotations) == 2
    files = {"images": tmp_path / "images", "labels": tmp_path / "masks"}
    dataset = SemanticFolder(**files, classes=tmp_path / "masks/labelmap.txt")
    labels = dataset.load_semantic(0)
    assert dataset.classes[labels[3, 3]] == first and labels[0, 0] == 255


@pytest.mark.parametrize("palette", [[0, 0, 0, 255, 0, 0], [0] * 768, [k // 3 for k in range(768)]])
def test_a_palette_that_repeats_colors_is_no_other_one(tmp_path, palette):
    draw_images(tmp_path / "images", "a.png", "b.png")
    (tmp_path / "masks").mkdir()
    for name, numbers in (("a", [0, 1, 2]), ("b", [2, 1, 255])):
        image = Image.fromarray(np.repeat(np.resize(np.array(numbers, np.uint8), (20, 3)), [10, 20, 10], axis=1), "P")
        image.putpalette(palette + [0] * (768 - len(palette)))
        image.save(tmp_path / "masks" / f"{name}.png")
    read_annotations(tmp_path / "masks", tmp_path / "images", format="semantic_maps")


def test_palettes_that_order_their_colors_otherwise_are_an_error(tmp_path):
    draw_images(tmp_path / "images", "a.png", "b.png")
    (tmp_path / "masks").mkdir()
    colors = {"black": [0, 0, 0], "red": [255, 0, 0], "green": [0, 255, 0]}
    for name, order in (("a", ("black", "red", "green")), ("b", ("black", "green", "red"))):
        numbers = np.zeros((20, 40), np.uint8)
        numbers[:, :10], numbers[:, 30:] = order.index("red"), order.index("green")
        image = Image.fromarray(numbers, "P")
        image.putpalette([value for color in order for value in colors[color]])
        image.save(tmp_path / "masks" / f"{name}.png")
    with pytest.raises(DataError, match=r"b.png': the color \(0, 255, 0\) has the number 1, in 'a.png' 2"):
        read_annotations(tmp_path / "masks", tmp_path / "images", format="semantic_maps")
    entries = [{"id": k, "name": name, "color": color} for k, (name, color) in enumerate(colors.items())]
    write(tmp_path / "masks/classes.json", json.dumps(entries))
    data = read_annotations(tmp_path / "masks", tmp_path / "images", format="semantic_maps")
    red = [box for _, name, box in named_boxes(data) if name == "red"]
    assert red == [[0, 0, 10, 20]] * 2


def test_colors_of_classes_are_those_of_their_names_although_the_file_s_order_changed(tmp_path):
    draw_images(tmp_path / "images", "a.jpg")
    values = np.zeros((20, 40, 3), np.uint8)
    values[2:8, 2:8], values[2:8, 20:30], values[0] = (255, 0, 0), (0, 255, 0), (9, 9, 9)
    (tmp_path / "masks").mkdir()
    Image.fromarray(values).save(tmp_path / "masks/a.png")
    lines = ["background:0,0,0", "cat:255,0,0", "dog:0,255,0", "void:9,9,9"]
    for order in ([0, 1, 2, 3], [3, 0, 2, 1]):
        colors = write(tmp_path / "labelmap.txt", "\n".join(lines[k] for k in order))
        files = {"images": tmp_path / "images", "labels": tmp_path / "masks", "colors": colors}
        labels = SemanticFolder(**files, classes=["background", "cat", "dog"]).load_semantic(0)
        assert [labels[3, 3], labels[3, 22], labels[10, 10], labels[0, 0]] == [1, 2, 0, 255]
    with pytest.raises(DataError, match=r"labelmap.txt' has no 'cow'. Known: background, cat"):
        SemanticFolder(**files, classes=["background", "cow"])


def test_red_is_a_class_and_not_void(tmp_path):
    draw_images(tmp_path / "images", "a.jpg")
    values = np.zeros((20, 40, 3), np.uint8)
    values[2:8, 2:8], values[2:8, 20:30] = (255, 0, 0), (0, 255, 0)
    (tmp_path / "masks").mkdir()
    Image.fromarray(values).save(tmp_path / "masks/a.png")
    data = read_annotations(tmp_path / "masks", tmp_path / "images", format="semantic_maps")
    assert sorted(name for _, name, _ in named_boxes(data)) == ["class_0", "class_255", "class_65280"]
    assert not any("255 is" in note for note in data.notes)


def test_a_number_behind_an_underscore_is_not_the_suffix_of_label_images(tmp_path):
    draw_images(tmp_path / "images", "s.jpg", "s_1.jpg", "t.jpg")
    values = np.zeros((20, 40), np.uint8)
    values[2:8, 2:8] = 1
    (tmp_path / "masks").mkdir()
    for name in ("s_1", "s_2", "t_mask_3"):
        Image.fromarray(values).save(tmp_path / f"masks/{name}.png")
    data = read_annotations(tmp_path / "masks", tmp_path / "images", format="instance_maps")
    assert [image["file_name"] for image in data.images] == ["s_1.jpg", "t.jpg"]
    assert data.left_out["label images without an image"] == ["s_2.png"]


def test_photos_are_not_their_own_label_images(tmp_path):
    draw_images(tmp_path, "a.jpg", "b.png")
    with pytest.raises(DataError, match="also need the folder of their photos"):
        read_annotations(tmp_path, tmp_path, format="instance_maps")


def test_a_color_outside_the_class_file_is_named_where_all_label_images_have_one(tmp_path):
    draw_images(tmp_path / "images", "a.jpg")
    (tmp_path / "masks").mkdir()
    Image.fromarray(np.full((20, 40, 3), 7, np.uint8)).save(tmp_path / "masks/a.png")
    write(tmp_path / "masks/labelmap.txt", "background:0,0,0\ncat:255,0,0\n")
    with pytest.raises(DataError, match=r"a.png': color \(7, 7, 7\) at 800 pixels is not one of the 2"):
        read_annotations(tmp_path / "masks", tmp_path / "images", format="semantic_maps")
