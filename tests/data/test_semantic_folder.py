"""Folders of label images: which value is which class, and error messages for wrong ones."""

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.data.datasets.semantic import SemanticFolder
from vitkit.data.formats import read_annotations
from vitkit.errors import ConfigError, DataError
from vitkit.io.image_files import read_label_map

CLASSES = ["sky", "road", "car"]


def write(folder, labels, name="a", size=None, suffixes=(".jpg", ".png")):
    """An image and its label image from an array of values."""
    labels = np.asarray(labels)
    for kind in ("images", "labels"):
        (folder / kind / name).parent.mkdir(parents=True, exist_ok=True)
    height, width = size or labels.shape
    Image.new("RGB", (width, height), (10, 20, 30)).save(folder / "images" / f"{name}{suffixes[0]}")
    Image.fromarray(labels.astype(labels.dtype)).save(folder / "labels" / f"{name}{suffixes[1]}")


def load(folder, **arguments):
    return SemanticFolder(
        **{"images": str(folder / "images"), "labels": str(folder / "labels"), "classes": CLASSES, **arguments}
    )


def test_sample_has_a_mask_for_each_class_in_the_image(tmp_path):
    write(tmp_path, np.array([[2, 2, 255], [0, 0, 0]], np.uint8))
    dataset = load(tmp_path)
    target = dataset[0]["target"]
    assert target["labels"].tolist() == [0, 2] and target["labels"].dtype == torch.int64
    assert target["masks"].tolist() == [[[0, 0, 0], [1, 1, 1]], [[1, 1, 0], [0, 0, 0]]]
    assert target["masks"].dtype == torch.bool
    expected = torch.tensor([[0.5, 0.75, 1.0, 0.5], [1 / 3, 0.25, 2 / 3, 0.5]])
    torch.testing.assert_close(target["boxes_cxcywh"], expected)
    assert (target["image_id"], target["image_size"], target["original_size"]) == ("a", (2, 3), (2, 3))
    assert dataset.load_semantic(0).tolist() == [[2, 2, 255], [0, 0, 0]]
    assert dataset.category_ids == [0, 1, 2]


def test_zero_is_ignored_and_classes_begin_at_one(tmp_path):
    write(tmp_path, np.array([[0, 1], [3, 255]], np.uint8))
    dataset = load(tmp_path, zero_is_ignored=True)
    assert dataset.category_ids == [1, 2, 3]
    assert dataset.load_semantic(0).tolist() == [[255, 0], [2, 255]]


def test_values_and_ignored_values_can_be_chosen(tmp_path):
    write(tmp_path, np.array([[7, 26], [11, 4]], np.uint8))
    dataset = load(tmp_path, values=[11, 7, 26], ignore=[4, 5])
    assert dataset.load_semantic(0).tolist() == [[1, 2], [0, 255]]


def test_image_with_only_ignored_pixels_has_no_masks(tmp_path):
    write(tmp_path, np.full((4, 6), 255, np.uint8))
    target = load(tmp_path, transforms=dict(type="SemanticTrainTransforms", crop_size=[8, 8]))[0]["target"]
    assert target["masks"].shape == (0, 8, 8) and target["boxes_cxcywh"].shape == (0, 4)
    assert target["labels"].shape == (0,)


def test_images_and_maps_are_paired_across_folders_and_suffixes(tmp_path):
    for name in ("ulm/u_1", "bonn/b_2"):
        write(tmp_path, np.zeros((2, 2), np.uint8), name, suffixes=("_leftImg8bit.png", "_gtFine_labelIds.png"))
    write(tmp_path, np.zeros((2, 2), np.uint8), "bonn/other")
    dataset = load(tmp_path, image_suffix="_leftImg8bit.png", label_suffix="_gtFine_labelIds.png")
    assert dataset.image_ids == ["bonn/b_2", "ulm/u_1"]
    assert dataset[1]["target"]["image_id"] == "ulm/u_1"


def test_a_seed_decides_the_sample(tmp_path):
    rng = np.random.default_rng(0)
    write(tmp_path, rng.integers(0, 3, (40, 50)).astype(np.uint8))
    dataset = load(tmp_path, transforms=dict(type="SemanticTrainTransforms", crop_size=[16, 16]))
    first, again, other = dataset[(0, 3)], dataset[(0, 3)], dataset[(0, 4)]
    assert torch.equal(first["image"], again["image"]) and torch.equal(
        first["target"]["masks"], again["target"]["masks"]
    )
    assert not torch.equal(first["image"], other["image"])


@pytest.mark.parametrize("mode", ["L", "P", "1", "I;16"])
def test_gray_palette_and_16_bit_label_images_are_read(tmp_path, mode):
    values = np.array([[0, 1], [1, 0]], np.uint16 if mode == "I;16" else np.uint8)
    image = Image.fromarray(values if mode != "1" else values.astype(bool))
    if mode == "P":
        image.putpalette([255, 0, 0, 0, 255, 0])
    image.save(tmp_path / "labels.png")
    assert Image.open(tmp_path / "labels.png").mode == mode
    assert read_label_map(tmp_path / "labels.png").tolist() == values.tolist()


def test_a_value_outside_the_classes_names_file_value_and_count(tmp_path):
    write(tmp_path, np.array([[0, 9, 9], [9, 7, 255]], np.uint8))
    dataset = load(tmp_path)
    with pytest.raises(
        DataError,
        match=r"a.png': value 7 at 1 pixels is not one of the 3 classes \(0 to 2\) and not ignored \(255\), "
        r"nor are 1 more values",
    ):
        dataset[0]


def test_a_label_image_of_another_size_is_an_error(tmp_path):
    write(tmp_path, np.zeros((4, 6), np.uint8), size=(4, 5))
    with pytest.raises(DataError, match=r"a.png' has 6x4 pixels \(width x height\) and image '.*a.jpg' 5x4"):
        load(tmp_path)[0]


def test_a_colored_label_image_is_an_error(tmp_path):
    write(tmp_path, np.arange(72, dtype=np.uint8).reshape(4, 6, 3), size=(4, 6))
    with pytest.raises(DataError, match="mode RGB .* expected one channel"):
        load(tmp_path)[0]


def test_a_damaged_label_image_is_an_error(tmp_path):
    write(tmp_path, np.zeros((4, 6), np.uint8))
    (tmp_path / "labels" / "a.png").write_bytes(b"no image")
    with pytest.raises(
        DataError, match=r"cannot decode '.*a.png' \(8 bytes\): not an image of a known format \(JPEG, "
    ):
        load(tmp_path)[0]


def test_missing_files_are_errors_and_extra_files_are_counted(tmp_path, caplog):
    write(tmp_path, np.zeros((4, 6), np.uint8))
    write(tmp_path, np.zeros((4, 6), np.uint8), "b")
    (tmp_path / "images" / "b.jpg").unlink()
    assert len(load(tmp_path)) == 1
    assert "1 label images have no image" in caplog.text
    (tmp_path / "labels" / "a.png").unlink()
    with pytest.raises(DataError, match=r"1 of 1 images have no label image, such as .*a.jpg', which needs .*a.png"):
        load(tmp_path)
    with pytest.raises(DataError, match=r"contains no file that ends in '.tif'. Set image_suffix"):
        load(tmp_path, image_suffix=".tif")
    with pytest.raises(DataError, match="labels: no folder"):
        load(tmp_path, labels=str(tmp_path / "nowhere"))


def test_inconsistent_values_are_errors(tmp_path):
    write(tmp_path, np.zeros((4, 6), np.uint8))
    with pytest.raises(ConfigError, match=r"values \[1, 1, 2\] do not fit 3 classes"):
        load(tmp_path, values=[1, 1, 2])
    with pytest.raises(ConfigError, match=r"value 0 is class 'sky' and in ignore=\[0\]"):
        load(tmp_path, ignore=[0])
    with pytest.raises(ConfigError, match="classes: got 256; expected 1 to 255"):
        load(tmp_path, classes=[str(i) for i in range(256)])


def test_camvid_and_ade20k_are_read(shared_data):
    from vitkit.configs.parts.ade20k import CLASSES as ADE20K
    from vitkit.configs.parts.camvid import camvid
    from vitkit.data.loading.splits import build_dataset

    data = camvid(root=str(shared_data / "camvid"))
    train = build_dataset(data["train"], data["root"])
    assert len(train) == 367 and len(build_dataset(data["val"], data["root"])) == 101
    assert train[(0, 0)]["target"]["masks"].shape[1:] == (352, 352)
    assert np.allclose(train.aspect_ratios(), 480 / 360)
    folder = shared_data / "ade20k_sample"
    ade20k = load(folder, labels=str(folder / "annotations"), classes=ADE20K, zero_is_ignored=True)
    assert [ade20k[i]["target"]["original_size"] for i in range(3)] == [(512, 683), (364, 500), (300, 400)]
    assert {ADE20K[label] for label in ade20k[0]["target"]["labels"]} == {
        "wall",
        "building",
        "sky",
        "tree",
        "road",
        "grass",
        "plant",
    }


def test_names_select_images(tmp_path):
    for name in ("one/a_1", "one/a_2", "two/b_1"):
        write(tmp_path, np.zeros((2, 2), np.uint8), name)
    assert load(tmp_path, names=["one/*_2", "two/*"]).image_ids == ["one/a_2", "two/b_1"]
    with pytest.raises(DataError, match=r"images: no file of '.*images' matches any of names=\['three'\]"):
        load(tmp_path, names=["three"])
    (tmp_path / "val.txt").write_text("\n")
    with pytest.raises(DataError, match=r"names: '.*val\.txt' lists no image"):
        load(tmp_path, names=tmp_path / "val.txt")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("labelmap.txt", "# label:color_rgb:parts:actions\nvoid:0,0,0::\nsky:128,128,128::\nroad:128,64,128::\n"),
        (
            "classes.json",
            '{"ignore_index": 0, "classes": [{"id": 0, "name": "void", "color": [0, 0, 0]}, {"id": 1, "name": "sky", '
            '"color": [128, 128, 128]}, {"id": 2, "name": "road", "color": [128, 64, 128]}]}',
        ),
    ],
)
def test_label_images_in_the_colors_of_a_class_file(tmp_path, name, text):
    for part in ("images", "labels"):
        (tmp_path / part).mkdir()
    (tmp_path / name).write_text(text)
    Image.new("RGB", (8, 6)).save(tmp_path / "images" / "a.png")
    colors = np.zeros((6, 8, 3), np.uint8)
    colors[2:4], colors[4:] = (128, 128, 128), (128, 64, 128)
    Image.fromarray(colors).save(tmp_path / "labels" / "a.png")
    arguments = dict(images=tmp_path / "images", labels=tmp_path / "labels", image_suffix=".png")
    dataset = SemanticFolder(**arguments, classes=tmp_path / name)
    has_void = name == "labelmap.txt"
    assert dataset.classes == ["void", "sky", "road"][not has_void :]
    assert dataset.load_semantic(0)[:, 0].tolist() == ([0, 0, 1, 1, 2, 2] if has_void else [255, 255, 0, 0, 1, 1])
    without_void = SemanticFolder(**arguments, classes=tmp_path / name, zero_is_ignored=True)
    assert without_void.classes == ["sky", "road"] and without_void.category_ids == [1, 2]
    assert without_void.load_semantic(0)[:, 0].tolist() == [255, 255, 0, 0, 1, 1]
    data = read_annotations(tmp_path / "labels", tmp_path / "images")
    assert data.format == "semantic_maps" and len(data.annotations) == len(dataset.classes)
    colors[0, 0] = 7
    Image.fromarray(colors).save(tmp_path / "labels" / "a.png")
    with pytest.raises(DataError, match=r"color \(7, 7, 7\) at 1 pixels is not one of the 3 in the class file"):
        dataset.load_semantic(0)
