"""Images without annotations, from any source."""

import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitkit.data.datasets.unlabeled_images import UnlabeledImages
from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import build_dataset
from vitkit.errors import ConfigError, DataError
from vitkit.registry import DATASETS

CROP = dict(type="ClassificationTrainTransforms", size=16)


@pytest.fixture
def photos(tmp_path) -> Path:
    folder = tmp_path / "photos"
    (folder / "deep").mkdir(parents=True)
    for k, name in enumerate(("a.png", "b.jpg", "deep/c.png")):
        Image.new("RGB", (40, 30), (10 * k, 20, 30)).save(folder / name)
    (folder / "notes.md").write_text("not an image")
    return folder


def ids(source) -> list[str]:
    return UnlabeledImages(source).image_ids


def test_a_folder_a_pattern_a_list_and_a_text_file_give_the_same_images(photos):
    names = ["a.png", "b.jpg", "deep/c.png"]
    paths = [str(photos / name) for name in names]
    (photos / "names.txt").write_text("a.png\n\nb.jpg\ndeep/c.png\n")
    assert ids(photos) == ids(str(photos)) == ids(photos / "names.txt") == names
    assert ids(f"{photos}/**/*") == ids(paths) == paths
    first, *_, last = (UnlabeledImages(source) for source in (photos, photos / "names.txt", f"{photos}/**/*", paths))
    assert (first[2]["image"] == last[2]["image"]).all()


def test_a_sample_has_no_annotations_and_its_crop_depends_on_the_seed_only(photos):
    dataset = UnlabeledImages(photos, transforms=CROP)
    assert dataset.classes is None and dataset.annotations == () and dataset.aspect_ratios() is None
    sample = dataset[(2, 7)]
    assert sample["target"] == {"image_id": "deep/c.png", "image_size": (16, 16), "original_size": (30, 40)}
    assert sample["image"].shape == (3, 16, 16) and (sample["image"] == dataset[(2, 7)]["image"]).all()
    assert dataset.image_size(2) == (30, 40)


def test_the_images_of_another_dataset_come_without_its_targets_and_transforms():
    spec = dict(type="ShapesDetection", num_images=3, image_size=32, transforms=dict(type="EvalResize", size=64))
    dataset = build_dataset(dict(type="UnlabeledImages", source=spec, transforms=CROP))
    plain = DATASETS.build("ShapesDetection", num_images=3, image_size=32)
    assert len(dataset) == 3 and np.array_equal(dataset.load_image(1), plain.load_image(1))
    assert set(dataset[1]["target"]) == {"image_id", "image_size", "original_size"}
    assert dataset[1]["target"]["image_id"] == plain.image_ids[1] and dataset.classes is None
    assert dataset.image_path(1) is None and dataset.image_size(1) == plain.image_size(1)


def test_gray_cmyk_deep_tiny_and_animated_images_are_read_as_rgb(tmp_path, caplog):
    Image.new("L", (9, 8), 100).save(tmp_path / "gray.png")
    Image.new("CMYK", (9, 8), (0, 0, 0, 0)).save(tmp_path / "ink.jpg")
    Image.fromarray(np.full((8, 9), 100 << 8, np.uint16)).save(tmp_path / "deep.png")
    Image.new("RGB", (1, 1), (100,) * 3).save(tmp_path / "tiny.png")
    frames = [Image.new("RGB", (9, 8), (90 * k,) * 3) for k in range(2)]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    with caplog.at_level(logging.WARNING, "vitkit"):
        dataset = UnlabeledImages(tmp_path, transforms=CROP)
    assert "1 image has several pages or frames, such as 'moving.gif': the first is read" in caplog.text
    images = {name: dataset[(k, 0)]["image"] for k, name in enumerate(dataset.image_ids)}
    assert all(image.shape == (3, 16, 16) for image in images.values())
    assert {int(images[name].max()) for name in ("gray.png", "deep.png", "tiny.png")} == {100}
    assert int(images["ink.jpg"].min()) == 255


def test_images_occur_in_an_epoch_as_often_as_asked(photos):
    source = dict(type="UnlabeledImages", source=str(photos), transforms=CROP, repeats=4)
    settings = DataSettings(train=source, images_per_gpu=2, num_workers=0)
    dataset = settings.dataset("train")
    batches = list(settings.train_loader(dataset, seed=0))
    names = [target["image_id"] for batch in batches for target in batch.targets]
    assert len(batches) == 6 and {name: names.count(name) for name in names} == dict.fromkeys(dataset.image_ids, 4)
    data = DataSettings(train=dict(source, repeats=2 / 3), val=source, images_per_gpu=1, num_workers=0)
    loader = data.train_loader(data.dataset("train"), seed=0)
    seen = []
    for epoch in range(6):
        loader.set_position(epoch)
        seen.append({target["image_id"] for batch in loader for target in batch.targets})
    assert {*map(len, seen)} == {2} and len(set.union(*seen)) == 3
    with pytest.raises(ConfigError, match="repeats=0: expected above 0"):
        UnlabeledImages(photos, repeats=0)


def test_unreadable_files_are_left_to_the_loader(photos, caplog):
    (photos / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    source = dict(type="UnlabeledImages", source=str(photos), transforms=CROP)
    settings = DataSettings(train=source, images_per_gpu=4, num_workers=0)
    dataset = settings.dataset("train")
    with pytest.raises(DataError, match=r"cannot decode '.*broken\.png'"):
        list(settings.train_loader(dataset, seed=0))
    settings.on_error = "skip"
    (batch,) = settings.train_loader(dataset, seed=0)
    assert batch.inputs["images"].shape == (4, 3, 16, 16) and "broken.png" in caplog.text


def test_what_has_no_image_is_an_error_with_a_remedy(tmp_path):
    (tmp_path / "notes.md").write_text("x")
    for source, text in (
        (tmp_path, f"'{tmp_path}' has no image"),
        ([], "a list has no image"),
        (tmp_path / "none", "none' is neither a folder nor a text file of names. Give a folder, a pattern"),
        (tmp_path / "notes.md", "notes.md' is neither a folder nor a text file"),
        (f"{tmp_path}/*.jpg", "no file matches it as a pattern"),
    ):
        with pytest.raises(DataError, match=text.replace("*", r"\*")):
            UnlabeledImages(source)
    with pytest.raises(ConfigError, match="ShapesMotion is not a dataset of images"):
        UnlabeledImages(dict(type="ShapesMotion", num_videos=2))
