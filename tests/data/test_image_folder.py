"""Folders named after classes, and the synthetic world with one thing in each image."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitkit.data.datasets.image_folder import ImageFolder
from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import build_dataset, check_same_classes
from vitkit.data.synthetic.shapes import ShapesClassification
from vitkit.data.synthetic.world import THINGS
from vitkit.errors import ConfigError, DataError
from vitkit.registry import DATASETS


def write_images(folder: Path, counts: dict[str, int], *, size=(40, 30)) -> str:
    """Images of one color, by class; `size` is (width, height)."""
    for k, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", size, (10 * k, 20, i)).save(folder / name / f"{i}.png")
    return str(folder)


def test_classes_labels_and_ids_come_from_the_folders(tmp_path):
    folder = write_images(tmp_path / "train", {"dog": 2, "cat": 1})
    (tmp_path / "train" / "dog" / "deep").mkdir()
    Image.new("RGB", (40, 30)).save(tmp_path / "train" / "dog" / "deep" / "x.JPG")
    (tmp_path / "train" / "dog" / "notes.txt").write_text("no image")
    (tmp_path / "train" / ".cache").mkdir()
    dataset = ImageFolder(folder)
    assert dataset.classes == dataset.category_ids == ["cat", "dog"]
    assert dataset.image_ids == ["cat/0.png", "dog/0.png", "dog/1.png", "dog/deep/x.JPG"]
    assert [dataset[i]["target"]["label"] for i in range(4)] == [0, 1, 1, 1]
    sample = dataset[2]
    assert sample["target"] == {"label": 1, "image_id": "dog/1.png", "image_size": (30, 40), "original_size": (30, 40)}
    assert sample["image"].shape == (3, 30, 40) and sample["image"][:, 0, 0].tolist() == [0, 20, 1]
    assert np.array_equal(dataset.load_image(2)[0, 0], [0, 20, 1])
    assert dataset.aspect_ratios().tolist() == [1.0] * 4


def test_transforms_get_only_the_image_and_the_seed(tmp_path):
    folder = write_images(tmp_path, {"a": 2, "b": 2})
    spec = dict(type="ClassificationTrainTransforms", size=16, rand_augment="rand-m9-mstd0.5-inc1", mixup=0.8)
    dataset = build_dataset(dict(type="ImageFolder", folder="{root}", transforms=spec), folder)
    first, again, other = (dataset[(0, seed)]["image"] for seed in (3, 3, 4))
    assert first.shape == (3, 16, 16)
    assert (first == again).all() and (first != other).any()
    assert dataset[0]["target"]["original_size"] == (30, 40)
    assert dataset.batch_transforms is not None
    assert build_dataset(dict(type="ImageFolder", folder=folder)).batch_transforms is None


def test_albumentations_may_augment_classified_images_too(tmp_path):
    spec = dict(type="ComposedTransforms", transforms=[dict(type="HorizontalFlip", p=1.0)])
    dataset = DATASETS.build("ShapesClassification", num_images=2, image_size=32, transforms=spec)
    plain = DATASETS.build("ShapesClassification", num_images=2, image_size=32)
    assert (dataset[0]["image"] == plain[0]["image"].flip(2)).all()


def test_images_of_several_sizes_are_refused(tmp_path):
    folder = write_images(tmp_path, {"a": 1})
    write_images(tmp_path, {"b": 1}, size=(40, 31))
    dataset = ImageFolder(folder)
    dataset[0]
    with pytest.raises(DataError, match=r"'b/0.png' is 40x31 .* others are 40x30.*ClassificationEvalTransforms"):
        dataset[1]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (None, r"no folder '.*data'.*data\.root"),
        ({}, r"contains no folders.*CLASS/\*\.jpg"),
        ({"cat": 0, "dog": 0}, r"class folder '.*cat' contains no images \(JPEG.*nor do 1 others"),
        ({"test": 0, "train": 0}, r"contains the splits test, train, not classes. Give '.*train'"),
        ({"Testing/a": 1, "Training/a": 1}, r"contains the splits Testing, Training, not classes. Give '.*Training'"),
        ({"seg_pred/a": 1, "seg_test/a": 1, "seg_train/a": 1}, "contains the splits seg_test, seg_train, not classes"),
        ({"p/oak": 1, "p/elm": 1, "q/oak": 2, "q/elm": 1}, r"p, q contain only folders.*\(elm, oak\).*'.*p'"),
    ],
)
def test_a_wrong_folder_is_named(tmp_path, counts, message):
    folder = tmp_path / "data"
    if counts is not None:
        folder.mkdir()
        write_images(folder, counts)
    with pytest.raises(DataError, match=message):
        ImageFolder(str(folder))


def test_an_unreadable_image_is_named_by_the_loader(tmp_path):
    folder = write_images(tmp_path, {"a": 2})
    (tmp_path / "a" / "1.png").write_bytes(b"no image")
    loader = DataSettings(val_images_per_gpu=2, num_workers=0).val_loader(ImageFolder(folder))
    with pytest.raises(DataError, match=r"cannot decode '.*a/1\.png'"):
        next(iter(loader))


def test_class_folder_without_images_is_named_and_stays(tmp_path, caplog):
    assert ImageFolder(write_images(tmp_path, {"cat": 1, "dog": 0})).classes == ["cat", "dog"]
    assert f"class folder '{tmp_path / 'dog'}' contains no images" in caplog.text


def test_class_missing_from_one_split_is_named(tmp_path):
    train = ImageFolder(write_images(tmp_path / "train", {"cat": 1, "cow": 1, "dog": 1}))
    val = ImageFolder(write_images(tmp_path / "val", {"cat": 1, "dog": 1}))
    with pytest.raises(
        DataError, match=r"train has 3 classes and data.val has 2; they differ at id cow: 'cow' and None"
    ):
        check_same_classes(train, val)


def test_shapes_classification_images_have_one_object_and_its_class():
    dataset = DATASETS.build("ShapesClassification", num_images=60, image_size=32, split="val")
    labels = [dataset[i]["target"]["label"] for i in range(60)]
    assert dataset.classes == list(THINGS) and len(dataset) == 60
    assert set(labels) == set(range(len(THINGS)))
    scenes = [dataset.world.scene(i) for i in range(60)]
    assert labels == [scene.shapes[0].label for scene in scenes] and {len(s.shapes) for s in scenes} == {1}
    assert (dataset.load_image(5) == dataset[5]["image"].permute(1, 2, 0).numpy()).all()
    assert [sample["target"]["image_id"] for sample in list(dataset)] == list(range(1, 61))
    with pytest.raises(ConfigError, match="num_images: got 0"):
        ShapesClassification(0)
    with pytest.raises(ConfigError, match="max_objects: got 1 to 2 objects, expected 1"):
        DATASETS.build("ShapesClassification", num_images=2, max_objects=2)


def test_folders_that_share_folders_are_not_classes_and_images_beside_classes_are_counted(tmp_path, caplog):
    for name in ("entrenamiento/birch", "entrenamiento/oak", "entrenamiento/pine", "prueba/birch", "prueba/oak"):
        (tmp_path / "trees" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "trees" / name / "a.png")
    with pytest.raises(DataError, match=r"entrenamiento, prueba contain only folders, the same in each \(birch, oak\)"):
        ImageFolder(tmp_path / "trees")
    Image.new("RGB", (8, 8)).save(tmp_path / "trees/prueba/stray.png")
    assert len(ImageFolder(tmp_path / "trees/prueba")) == 2
    assert "left out images in no class folder: 1, such as 'stray.png'" in caplog.text
