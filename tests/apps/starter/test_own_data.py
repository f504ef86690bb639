"""A user's data as `vitkit start` reads it: classes of label images, existing splits."""

import numpy as np
import pytest
from PIL import Image

from vitkit.apps.datasets.writing import describe_left_out
from vitkit.apps.starter.own_data import read_own_data
from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.datasets.semantic import SemanticFolder
from vitkit.data.formats import read_annotations
from vitkit.errors import DataError


def images(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng([seed, len(folder.name)]).integers(0, 255, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).resize((64, 48)).save(folder / name)


def label_images(folder, values, count=6):
    folder.mkdir(parents=True)
    for k in range(count):
        labels = np.resize(np.array(values, np.uint8), (48, 64))
        Image.fromarray(labels).save(folder / f"{k}.png")


def settings_of(data, split):
    """Run the lines of the config; return the settings of a split."""
    cfg = {"data": {"train": {}, "val": {}}}
    exec("\n".join(data.config_lines), {"cfg": cfg})
    return cfg["data"][split]


def semantic(tmp_path, values, **options):
    images(tmp_path / "images", *(f"{k}.jpg" for k in range(6)))
    label_images(tmp_path / "masks", values)
    return read_own_data("semantic", tmp_path / "images", tmp_path / "masks", fraction=0.3, out=tmp_path / "out")


def test_masks_of_0_and_255_give_two_classes(tmp_path):
    settings = settings_of(semantic(tmp_path, [0, 255]), "train")
    assert settings["values"] == [0, 255] and settings["ignore"] == []
    labels = SemanticFolder(**settings).load_semantic(0)
    assert sorted(np.unique(labels)) == [0, 1]


def test_255_is_ignored_beside_two_other_values(tmp_path):
    settings = settings_of(semantic(tmp_path, [0, 3, 255]), "train")
    assert settings["values"] == [0, 3] and settings["ignore"] == [255]


@pytest.mark.parametrize(
    ("values", "classes", "said"),
    [
        (
            [0, 85, 170, 255],
            [0, 85, 170, 255],
            "255 is a class, as all values are gray levels (0, 85, 170, 255): 4608 pix",
        ),
        (
            [0, 0, 128, 255],
            [0, 128, 255],
            "255 is a class, as all values are gray levels (0, 128, 255): 4608 pixels (25.0%)",
        ),
        (
            [0, 1, 2, 255],
            [0, 1, 2],
            "255 is no class, and left out: 4608 pixels (25.0%). If it is one, name it in class",
        ),
        ([0, 1, 2, 3], [0, 1, 2, 3], None),
    ],
)
def test_255_is_a_class_beside_gray_levels_and_void_beside_class_numbers(tmp_path, values, classes, said, capsys):
    data = semantic(tmp_path, values)
    assert settings_of(data, "train")["values"] == classes
    printed = capsys.readouterr().out
    assert said in printed if said else "255" not in printed
    masks = read_annotations(tmp_path / "masks", tmp_path / "images", format="semantic_maps")
    with_objects = {a["category_id"] for a in masks.annotations}
    assert with_objects == {*classes} - ({0} if 255 in classes else set())
    assert said is None or any(said in note for note in masks.notes)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_masks_with_smooth_edges_are_an_error(tmp_path, mode):
    images(tmp_path / "images", *(f"{k}.jpg" for k in range(6)))
    label_images(tmp_path / "masks", [0])
    mask = np.zeros((48, 64), np.uint8)
    mask[10:30, 15:45] = 255
    for path in (tmp_path / "masks").iterdir():
        smooth = Image.fromarray(mask).resize((50, 37), Image.BILINEAR).resize((64, 48), Image.BILINEAR)
        smooth.convert(mode).save(path)
    with pytest.raises(DataError, match=r"of the pixels are 0 and 255, .* as at smooth edges .* without interpolation"):
        read_own_data("semantic", tmp_path / "images", tmp_path / "masks", fraction=0.3, out=tmp_path / "out")


def test_numbers_of_classes_beside_much_void_are_no_smooth_edges(tmp_path):
    data = semantic(tmp_path, [0] * 50 + [255] * 10 + [1, 2, 3, 4, 5, 99])
    assert settings_of(data, "train")["values"] == [0, 1, 2, 3, 4, 5, 99]


def test_one_folder_of_images_and_label_images_is_an_error(tmp_path):
    images(tmp_path / "train", *(f"{k}.jpg" for k in range(6)), *(f"{k}_mask.png" for k in range(6)))
    with pytest.raises(DataError, match=r"train' is given as the folder of the images and as .* folder of their own"):
        read_own_data("semantic", tmp_path / "train", tmp_path / "train", fraction=0.3, out=tmp_path / "out")


def test_values_missing_from_the_class_file_are_reported(tmp_path):
    (tmp_path / "classes.txt").write_text("sky\nroad\n")
    data = semantic(tmp_path, [0, 1, 7])
    assert "classes.txt, and ignored: values 7" in data.summary
    assert settings_of(data, "train")["ignore"] == [7, 255]


@pytest.mark.parametrize("void", [False, True])
def test_label_images_in_the_colors_of_the_class_file_are_read(tmp_path, void):
    (tmp_path / "labelmap.txt").write_text(
        "# label:color_rgb:parts:actions\nCat:48,112,32::\nbackground:0,0,0::\nDog:176,112,32::\n"
        + "void:9,9,9::\n" * void
    )
    images(tmp_path / "images", *(f"{k}.jpg" for k in range(6)))
    colors = np.zeros((48, 64, 3), np.uint8)
    colors[:10, :20], colors[20:25, :20] = (48, 112, 32), (176, 112, 32)
    colors[40, :5] = 9 if void else 0
    (tmp_path / "masks").mkdir()
    for k in range(6):
        Image.fromarray(colors).save(tmp_path / "masks" / f"{k}.png")
    data = read_own_data("semantic", tmp_path / "images", tmp_path / "masks", fraction=0.3, out=tmp_path / "out")
    settings = settings_of(data, "train")
    dataset = SemanticFolder(**settings)
    assert dataset.classes == ["Cat", "background", "Dog"] and "of 3 classes" in data.summary
    labels = dataset.load_semantic(0)
    assert [int((labels == k).sum()) for k in (0, 2, 255)] == [200, 100, 5 * void]
    assert settings["colors"] == str(tmp_path / "labelmap.txt")


def test_class_file_that_contradicts_the_values_is_an_error(tmp_path):
    (tmp_path / "classes.txt").write_text("background\nobject\n")
    with pytest.raises(DataError, match="values 0, 255, of which fewer than two are classes of .*classes.json"):
        semantic(tmp_path, [0, 255])


def test_images_with_another_extension_are_read(tmp_path):
    images(tmp_path / "images", "x.PNG", "y.jpeg")
    label_images(tmp_path / "masks", [0, 1])
    for name in "xy":
        (tmp_path / f"masks/{name}.png").write_bytes((tmp_path / "masks/0.png").read_bytes())
    images(tmp_path / "images", *(f"{k}.jpg" for k in range(6)))
    data = read_own_data("semantic", tmp_path / "images", tmp_path / "masks", fraction=0.3, out=tmp_path / "out")
    assert data.num_train + data.num_val == 8
    settings = settings_of(data, "train") | {"classes": ["a", "b"], "names": None}
    assert len(SemanticFolder(**settings)) == 8


def test_split_folders_are_not_taken_for_classes(tmp_path):
    names = [f"{split}/{name}/{k}.png" for split in ("train", "valid", "test") for name in "ab" for k in range(3)]
    images(tmp_path / "roboflow", *names)
    data = read_own_data("classification", tmp_path / "roboflow", None, fraction=0.2, out=tmp_path / "out")
    assert data.num_train == data.num_val == 6
    assert settings_of(data, "val")["folder"] == str(tmp_path / "roboflow/valid")
    assert data.has_test and settings_of(data, "test")["folder"] == str(tmp_path / "roboflow/test")
    assert data.summary.endswith("of 2 classes")


def test_images_that_cannot_be_read_are_reported(tmp_path, capsys):
    images(tmp_path / "flowers", *(f"{name}/{k}.png" for name in ("daisy", "tulip") for k in range(6)))
    broken = tmp_path / "flowers/daisy/0.png"
    broken.write_bytes(broken.read_bytes()[:500])
    data = read_own_data("classification", tmp_path / "flowers", None, fraction=0.2, out=tmp_path / "out")
    assert data.num_train + data.num_val == 11
    printed = capsys.readouterr().out
    assert "  left out: 1 " in printed and "flowers/daisy/0.png" in printed


def test_class_of_too_few_images_for_both_splits_is_named(tmp_path):
    images(tmp_path / "flowers", *(f"{name}/{k}.png" for name in ("daisy", "tulip") for k in range(6)), "rare/0.png")
    with pytest.raises(DataError, match="class folder '.*flowers/rare' gives no image to (val|train): it has too few"):
        read_own_data("classification", tmp_path / "flowers", None, fraction=0.2, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_test_images_are_neither_trained_nor_validated_on(tmp_path):
    names = [f"{split}/images/{k}.png" for split in ("train", "test") for k in range(6)]
    images(tmp_path / "cells", *names)
    for split in ("train", "test"):
        (tmp_path / "cells" / split / "labels").mkdir()
        for k in range(6):
            (tmp_path / "cells" / split / "labels" / f"{k}.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    (tmp_path / "cells/data.yaml").write_text("train: train/images\ntest: test/images\nnames: [cell]\n")
    data = read_own_data("detection", tmp_path / "cells/data.yaml", None, fraction=0.3, out=tmp_path / "out")
    assert data.num_train + data.num_val == 6
    assert '"test/' not in (tmp_path / "out/train.json").read_text() + (tmp_path / "out/val.json").read_text()
    assert data.has_test and data.summary.endswith(", and 6 test images")
    assert len(CocoDetection(**settings_of(data, "test"))) == 6
    (tmp_path / "cells/data.yaml").write_text("test: test/images\nnames: [cell]\n")
    with pytest.raises(DataError, match=r"data.yaml' has test images \(6\), but none to train on. Give"):
        read_own_data("detection", tmp_path / "cells/data.yaml", None, fraction=0.3, out=tmp_path / "out")


def test_train_and_val_of_the_same_images_are_split(tmp_path, capsys):
    images(tmp_path / "cells", *(f"images/all/{k}.png" for k in range(10)))
    (tmp_path / "cells/labels/all").mkdir(parents=True)
    for k in range(10):
        (tmp_path / f"cells/labels/all/{k}.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    (tmp_path / "cells/data.yaml").write_text("train: images/all\nval: images/all\nnames: [cell]\n")
    data = read_own_data("detection", tmp_path / "cells/data.yaml", None, fraction=0.2, out=tmp_path / "out")
    assert (data.num_train, data.num_val) == (8, 2)
    assert "train and val are the same images, which are therefore split" in capsys.readouterr().out


@pytest.mark.parametrize("layout", ["{split}/{name}", "trees/seg_{split}/seg_{split}/{name}"])
def test_class_folders_of_splits_of_any_name_and_depth_are_found(tmp_path, layout):
    names = [layout.format(split=split, name=name) for split in ("Train", "Val") for name in ("birch", "oak")]
    images(tmp_path / "data", *(f"{name}/{k}.png" for name in names for k in range(3)))
    data = read_own_data("classification", tmp_path / "data", None, fraction=0.5, out=tmp_path / "out")
    assert (data.num_train, data.num_val) == (6, 6) and data.summary.endswith("of 2 classes")
    assert settings_of(data, "val")["folder"] == str(tmp_path / "data" / names[2].rpartition("/")[0])


def test_folder_beside_those_of_the_splits_is_said_to_be_left_out(tmp_path, capsys):
    names = [f"{split}/{name}/{k}.png" for split in ("Train", "Val") for name in ("birch", "oak") for k in range(3)]
    images(tmp_path / "data", *names, "pred/0.png")
    data = read_own_data("classification", tmp_path / "data", None, fraction=0.5, out=tmp_path / "out")
    assert (data.num_train, data.num_val) == (6, 6)
    assert "left out: pred, beside the splits Train, Val" in capsys.readouterr().out


def test_splits_within_one_of_several_folders_are_named(tmp_path, capsys):
    names = [f"ds/{split}/{name}/{k}.png" for split in ("train", "val") for name in ("cat", "dog") for k in range(3)]
    images(tmp_path / "data", *names)
    (tmp_path / "data/__MACOSX/ds").mkdir(parents=True)
    data = read_own_data("classification", tmp_path / "data", None, fraction=0.5, out=tmp_path / "out")
    assert (data.num_train, data.num_val) == (6, 6)
    images(tmp_path / "data", "extra/0.png")
    with pytest.raises(DataError, match="ds' has the splits train, val, and extra beside it may not be a class"):
        read_own_data("classification", tmp_path / "data", None, fraction=0.5, out=tmp_path / "out")


def test_images_of_a_folder_beside_the_splits_and_the_class_file_are_named(tmp_path, capsys):
    names = [f"{split}/{k}" for split in ("train", "val", "extra") for k in range(3)]
    images(tmp_path / "ds/images", *(f"{name}.jpg" for name in names))
    for split in ("train", "val", "extra"):
        label_images(tmp_path / f"ds/masks/{split}", [0, 1], count=3)
    (tmp_path / "classes.txt").write_text("sky\nroad\n")
    data = read_own_data("semantic", tmp_path / "ds/images", tmp_path / "ds/masks", fraction=0.3, out=tmp_path / "out")
    printed = capsys.readouterr().out
    assert (data.num_train, data.num_val) == (3, 3) and data.classes == ["sky", "road"]
    assert "left out: 3 images that are in no split: extra/0" in printed
    assert f"classes from {tmp_path / 'classes.txt'}" in printed


def test_what_label_images_add_to_the_names_of_their_images_is_found(tmp_path):
    images(tmp_path / "images", *(f"{k}.jpg" for k in range(6)))
    label_images(tmp_path / "masks", [0, 1])
    for path in list((tmp_path / "masks").iterdir()):
        path.rename(path.with_name(f"{path.stem}_mask.png"))
    data = read_own_data("semantic", tmp_path / "images", tmp_path / "masks", fraction=0.3, out=tmp_path / "out")
    assert settings_of(data, "train")["label_suffix"] == "_mask.png" and data.num_train + data.num_val == 6


def test_two_folders_of_one_split_are_named(tmp_path):
    images(tmp_path / "data", *(f"{split}{part}/x/0.png" for split in ("train", "test") for part in (1, 2)))
    with pytest.raises(DataError, match="has two folders of test, test1 and test2"):
        read_own_data("classification", tmp_path / "data", None, fraction=0.5, out=tmp_path / "out")


def test_remedy_of_equal_errors_is_printed_once():
    lost = [f"cannot read '{k}.png' (No such file). Check the folder." for k in range(5)]
    (line,) = describe_left_out({"images": lost})
    assert line == (
        "5 images: cannot read '0.png' (No such file), cannot read '1.png' (No such file), "
        "cannot read '2.png' (No such file), and 2 more. Check the folder."
    )
    assert describe_left_out({"names": ["a. b.jpg", "c.jpg"]}) == ["2 names: a. b.jpg, c.jpg"]
