"""Folders: what is data in every reader, whatever its ending, and what is debris."""

import errno
import json
import os
from pathlib import Path

import pytest
from PIL import Image

from vitkit.apps.inference.inputs import find_files, find_images, find_videos
from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.datasets.image_folder import ImageFolder
from vitkit.data.datasets.semantic import SemanticFolder
from vitkit.data.datasets.video import VideoFolder
from vitkit.data.formats import read_annotations
from vitkit.errors import DataError
from vitkit.io.folders import IMAGE_SUFFIXES, data_files, declare_output, find_paths_like, split_folders, subfolders
from vitkit.io.image_files import FORMATS, read_image
from vitkit.io.video_files import open_video

ENDINGS = [".jpg", ".JPEG", ".jpe", ".jfif", ".png", ".bmp", ".dib", ".gif", ".pgm", ".ppm", ".webp", ".tif", ".TIFF"]
ENDINGS += [ending for name, ending in (("AVIF", ".avif"), ("JPEG2000", ".jp2"), ("HEIF", ".heic")) if name in FORMATS]
FORMAT_OF = {".dib": "BMP", ".jpe": "JPEG", ".jfif": "JPEG", ".pgm": "PPM"}
DEBRIS = ("._{}", ".ipynb_checkpoints/{}", "deep/.cache/deeper/{}")


def draw(path, size=(40, 20)):
    path.parent.mkdir(parents=True, exist_ok=True)
    color = "L" if path.suffix == ".pgm" else "RGB"
    Image.new("RGB", size, (90, 120, 30)).convert(color).save(path, FORMAT_OF.get(path.suffix))


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def photos(tmp_path):
    """One image of each ending, pictures of unknown formats, and other files."""
    for ending in ENDINGS:
        draw(tmp_path / "photos" / f"image_{ending[1:]}{ending}")
    for name in ("a.psd", "b.psd", "c.txt", "no_ending"):
        write(tmp_path / "photos" / name, "x")
    return tmp_path / "photos"


def test_images_of_every_ending_are_predicted_and_the_rest_is_counted(photos, caplog):
    assert {path.name for path, _ in find_files([str(photos)])[0]} == {f"image_{e[1:]}{e}" for e in ENDINGS}
    assert "left out files that are not read as images: 2 .psd, 1 .txt, 1 without an ending" in caplog.text
    assert len(find_images(photos).named) == len(ENDINGS)
    for name, path in find_images(photos).named:
        assert read_image(path).shape == (20, 40, 3), name


def test_images_of_every_ending_are_classified_and_the_rest_is_counted(photos, caplog):
    photos.rename(photos.parent / "cat")
    dataset = ImageFolder(photos.parent)
    assert len(dataset) == len(ENDINGS) and {dataset[k]["image"].shape for k in range(len(dataset))} == {(3, 20, 40)}
    assert "2 .psd" in caplog.text


def test_annotated_images_of_every_ending_are_found(photos, caplog):
    for ending in ENDINGS:
        write(photos.parent / "labels" / f"image_{ending[1:]}.txt", "0 0.5 0.5 0.5 0.5\n")
    data = read_annotations(photos.parent / "labels", photos)
    assert len(data.images) == len(data.annotations) == len(ENDINGS)
    assert "left out files that are not read as images: 2 .psd" in caplog.text


def test_label_images_fit_photos_of_several_endings(photos):
    for ending in ENDINGS:
        draw(photos.parent / "masks" / f"image_{ending[1:]}.png")
        Image.new("L", (40, 20), 1).save(photos.parent / "masks" / f"image_{ending[1:]}.png")
    dataset = SemanticFolder(photos, photos.parent / "masks", classes=["a", "b"], image_suffix=None)
    assert len(dataset) == len(ENDINGS) and dataset[0]["target"]["masks"].all()
    draw(photos / "image_png.png2.png")
    draw(photos / "image_png.jpg")
    with pytest.raises(DataError, match="has both 'image_png.jpg' and 'image_png.png'. Remove one, or set image_suff"):
        SemanticFolder(photos, photos.parent / "masks", classes=["a", "b"], image_suffix=None)


def test_frames_of_a_video_have_any_ending(photos):
    with open_video(photos) as video:
        assert len(video.times) == len(ENDINGS)


def test_further_pages_are_counted(tmp_path, caplog):
    page = Image.new("RGB", (8, 8))
    page.save(tmp_path / "scan.tif", save_all=True, append_images=[Image.new("RGB", (8, 8), "red")] * 2)
    draw(tmp_path / "one.tif")
    find_files([str(tmp_path)])
    assert "1 image has several pages or frames, such as 'scan.tif': the first is read" in caplog.text


READERS = {
    "yolo": [("images/{}.png", None), ("labels/{}.txt", "0 0.5 0.5 0.5 0.5\n"), ("labels/classes.txt", "cat\n")],
    "voc": [
        ("JPEGImages/{}.png", None),
        ("Annotations/{}.xml", "<annotation><object><name>cat</name><bndbox><xmin>2</xmin><ymin>2</ymin><xmax>9</xmax>"
         "<ymax>9</ymax></bndbox></object></annotation>"),
    ],
    "labelme": [
        ("{}.png", None),
        ("{}.json", {"shapes": [{"label": "cat", "points": [[1, 1], [9, 9]], "shape_type": "rectangle"}]}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", READERS)
def test_names_that_begin_with_a_dot_are_not_data(tmp_path, kind):
    for pattern, content in READERS[kind]:
        for name in ("a", "b"):
            path = Path(tmp_path, pattern.format(name))
            draw(path) if content is None else write(path, content)
        for debris in DEBRIS:
            path = Path(tmp_path, pattern.format("a"))
            hidden = path.parent / debris.format(path.name)
            draw(hidden) if content is None else write(hidden, content)
            write(path.parent / f"._{path.name}", "\0\5\26\7 AppleDouble")
    data = read_annotations(tmp_path)
    assert sorted(Path(image["file_name"]).stem for image in data.images) == ["a", "b"]
    assert data.format == kind and len(data.annotations) == 2 and not data.left_out


def test_debris_of_label_images_csv_and_coco_is_not_data(tmp_path):
    for name in ("a", *(d.format("a") for d in DEBRIS)):
        draw(tmp_path / "images" / f"{name}.png")
        path = tmp_path / "masks" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (40, 20), 1).save(path)
    assert len(read_annotations(tmp_path / "masks", tmp_path / "images", format="semantic_maps").images) == 1
    suffixes = dict(image_suffix=".png", label_suffix=".png")
    assert len(SemanticFolder(tmp_path / "images", tmp_path / "masks", classes=["a", "b"], **suffixes)) == 1
    write(tmp_path / "tables" / "boxes.csv", "file,class,xmin,ymin,xmax,ymax\na.png,cat,1,1,9,9\n._a.png,cat,1,1,9,9\n")
    write(tmp_path / "tables" / "._boxes.csv", "\0\5\26\7 AppleDouble")
    data = read_annotations(tmp_path / "tables", tmp_path / "images")
    assert len(data.images) == len(data.annotations) == 1
    assert data.left_out == {"lines without an image": ["line 3 (._a.png)"]}
    coco = {
        "images": [{"id": 1, "file_name": "a.png", "width": 40, "height": 20}],
        "annotations": [],
        "categories": [{"id": 1, "name": "cat"}],
    }
    listed = coco["images"] + [
        {"id": 2, "file_name": "._a.png", "width": 40, "height": 20},
        {"id": 3, "file_name": ".ipynb_checkpoints/a-checkpoint.png", "width": 40, "height": 20},
    ]
    annotations = [{"image_id": k, "category_id": 1, "bbox": [1, 1, 5, 5]} for k in (1, 2)]
    write(tmp_path / "own.json", coco | {"images": listed, "annotations": annotations})
    data = read_annotations(tmp_path / "own.json", tmp_path / "images")
    assert (
        len(data.images) == len(data.annotations) == len(CocoDetection(tmp_path / "images", tmp_path / "own.json")) == 1
    )
    assert data.notes == ["images whose names begin with a dot, left out: 2"]
    write(tmp_path / "coco" / "train.json", coco)
    write(tmp_path / "coco" / "._train.json", "\0\5\26\7 images annotations categories")
    write(tmp_path / "coco" / ".ipynb_checkpoints" / "train-checkpoint.json", coco)
    assert len(read_annotations(tmp_path / "coco", tmp_path / "images").images) == 1


RECTANGLE = {"x": 5, "y": 5, "width": 9, "height": 9}
RESULT = {"type": "rectanglelabels", "value": RECTANGLE | {"rectanglelabels": ["cat"]}}
REGION = {"shape_attributes": RECTANGLE | {"name": "rect"}, "region_attributes": {"class": "cat"}}
SINGLE_FILES = {
    "own.xml": '<annotations><image name="a.png" width="40" height="20"><box label="cat" xtl="1" ytl="1" xbr="9" '
    'ybr="9"/></image></annotations>',
    "own.json": [{"data": {"image": "a.png"}, "annotations": [{"result": [RESULT]}]}],
    "via.json": {"a.png": {"filename": "a.png", "regions": [REGION]}},
}


@pytest.mark.parametrize("name", SINGLE_FILES)
def test_debris_beside_the_only_file_of_a_format_is_not_data(tmp_path, name):
    for image in ("a", *(d.format("a") for d in DEBRIS)):
        draw(tmp_path / f"{image}.png")
    write(tmp_path / name, SINGLE_FILES[name])
    write(tmp_path / f"._{name}", SINGLE_FILES[name])
    write(tmp_path / ".ipynb_checkpoints" / name, SINGLE_FILES[name])
    data = read_annotations(tmp_path)
    assert len(data.images) == len(data.annotations) == 1 and not data.left_out


def test_debris_of_classes_and_videos_is_not_data(tmp_path):
    for name in ("a.png", *(d.format("b.png") for d in DEBRIS)):
        draw(tmp_path / "classes" / "cat" / name)
        draw(tmp_path / "videos" / "cat" / "run" / name)
    draw(tmp_path / "classes" / ".ipynb_checkpoints" / "a.png")
    draw(tmp_path / "videos" / "cat" / ".ipynb_checkpoints" / "a.png")
    write(tmp_path / "videos" / "cat" / "._run.mp4", "AppleDouble")
    dataset = ImageFolder(tmp_path / "classes")
    assert dataset.classes == ["cat"] and dataset.image_ids == ["cat/a.png"]
    assert VideoFolder(tmp_path / "videos").image_ids == ["cat/run"]
    with open_video(tmp_path / "videos" / "cat" / "run") as video:
        assert len(video.times) == 1
    write(tmp_path / "clips" / "._a.mp4", "AppleDouble")
    write(tmp_path / "clips" / "a.mp4", "video")
    assert [Path(name).name for name, _ in find_videos(tmp_path / "clips").named] == ["a.mp4"]


@pytest.mark.parametrize("kind", READERS)
def test_what_vitkit_has_written_is_not_data(tmp_path, kind, caplog):
    for pattern, content in READERS[kind]:
        folder = Path(tmp_path, pattern.format("runs/start/a")).parent
        folder.mkdir(parents=True, exist_ok=True)
        declare_output(folder, Path(tmp_path, pattern.format("a_sheet")))
        for name in ("a", "b", "a_sheet", "runs/start/a", "runs/start/run/val"):
            path = Path(tmp_path, pattern.format(name))
            draw(path) if content is None else write(path, content)
    data = read_annotations(tmp_path)
    assert sorted(Path(image["file_name"]).stem for image in data.images) == ["a", "b"]
    assert len(data.annotations) == 2 and "left out what vitkit has written: " in caplog.text


def test_folder_that_vitkit_has_made_can_be_named_but_its_drawings_are_not_data(tmp_path):
    out = tmp_path / "photos" / "out"
    out.mkdir(parents=True)
    declare_output(out)
    for name in ("photos/a.png", "photos/out/a.png", "photos/out/deep/a_semantic.png"):
        draw(tmp_path / name)
    declare_output(out / "a.png", tmp_path / "photos" / "later.png")
    maps = [out / "deep" / "a_semantic.png"]
    assert data_files(tmp_path) == data_files(tmp_path / "photos") == [tmp_path / "photos" / "a.png"]
    assert data_files(out) == maps and subfolders(tmp_path) == ["photos"] and subfolders(tmp_path / "photos") == []
    assert find_paths_like(f"{tmp_path}/**/*.png") == [tmp_path / "photos" / "a.png"]
    assert find_paths_like(f"{out}/**/*.png") == maps
    declare_output(tmp_path / "photos")  # has data
    assert data_files(tmp_path) == [tmp_path / "photos" / "a.png"]


def test_folder_with_nothing_but_runs_is_not_a_class(tmp_path):
    for name in ("daisy/a.png", "rose/a.png", "runs/start/figure.png"):
        draw(tmp_path / name)
    assert ImageFolder(tmp_path).classes == ["daisy", "rose", "runs"]
    (tmp_path / "runs/start/figure.png").unlink()
    declare_output(tmp_path / "runs/start")
    draw(tmp_path / "runs/start/data/train/daisy/a.png")
    assert ImageFolder(tmp_path).classes == ["daisy", "rose"]
    assert ImageFolder(tmp_path / "runs/start/data/train").classes == ["daisy"]


def test_hidden_folder_may_be_given_and_links_are_followed(tmp_path):
    draw(tmp_path / ".data" / "a.png")
    (tmp_path / ".data" / "self").symlink_to(tmp_path / ".data", target_is_directory=True)
    draw(tmp_path / "elsewhere" / "b.png")
    draw(tmp_path / ".data" / "part" / "c.png")
    (tmp_path / ".data" / "latest").symlink_to(tmp_path / ".data" / "part", target_is_directory=True)
    (tmp_path / ".data" / "more").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert [path.name for path in data_files(tmp_path / ".data")] == ["a.png", "b.png", "c.png"]
    assert ".png" in IMAGE_SUFFIXES


def test_folder_that_cannot_be_read_is_said(photos, caplog, monkeypatch):
    scandir = os.scandir

    def deny(path):
        if Path(path).name == "locked":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    (photos / "locked").mkdir()
    expected = data_files(photos)
    monkeypatch.setattr(os, "scandir", deny)
    assert data_files(photos) == expected
    assert f"'{photos / 'locked'}': left out, as it cannot be read (Permission denied)" in caplog.text


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["Training", "Testing"], ["train", "test"]),
        (["TRAIN", "Val2017", "test_set"], ["train", "val", "test"]),
        (["seg_train", "seg_test", "seg_pred"], ["train", "test", None]),
        (["birdsTrain", "birdsDev"], ["train", "val"]),
        (["trainset", "validset"], ["train", "val"]),
        (["train", "val", "runs"], ["train", "val", None]),
        (["train"], ["train"]),
        (["train", "bus", "car"], [None, None, None]),
        (["train_station", "test_tube"], [None, None]),
        (["Train", "freight_train"], [None, None]),
        (["latest", "constraint"], [None, None]),
    ],
)
def test_folders_are_splits_by_a_word_of_their_names_in_any_case(names, splits):
    expected = {name: split for name, split in zip(names, splits) if split}
    assert split_folders(names) == expected


@pytest.mark.parametrize("kind", ["yolo", "voc", "csv"])
def test_every_reader_knows_the_same_names_of_splits(tmp_path, kind):
    for name, split in (("a", "Training"), ("b", "Testing")):
        if kind == "csv":
            draw(tmp_path / f"{name}.png")
            continue
        for pattern, content in READERS[kind]:
            path = Path(tmp_path, pattern.format(name))
            path = path if path.name == "classes.txt" else path.parent / split / path.name
            draw(path) if content is None else write(path, content)
    if kind == "csv":
        write(tmp_path / "x.csv", "file,class,split,x0,y0,x1,y1\na.png,c,TRAINING,1,1,9,9\nb.png,c,Test set,1,1,9,9\n")
    assert {split: len(ids) for split, ids in read_annotations(tmp_path).splits.items()} == {"train": 1, "test": 1}
