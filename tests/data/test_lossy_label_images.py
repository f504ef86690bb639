"""Label images stored as JPEG, lossy WebP or TIFF with JPEG are an error that says so, in every reader."""

import json

import numpy as np
import pytest
from PIL import Image

from vitkit.apps.starter.own_data import read_own_data
from vitkit.data.datasets.panoptic import CocoPanoptic
from vitkit.data.datasets.semantic import SemanticFolder
from vitkit.data.formats import read_annotations
from vitkit.errors import DataError
from vitkit.evaluation.maps import read_ids
from vitkit.io.image_files import read_label_map

LOSSY = {
    "jpg": dict(format="JPEG"),
    "webp": dict(format="WEBP", quality=50),
    "tif": dict(format="TIFF", compression="jpeg"),
}


@pytest.fixture(params=[(suffix, mode) for suffix in LOSSY for mode in ("L", "RGB") if (suffix, mode) != ("webp", "L")])
def masks(request, tmp_path):
    """Folders of images and of two-valued masks in a lossy form; returns the masks' folder and suffix."""
    suffix, mode = request.param
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    mask = np.zeros((30, 40), np.uint8)
    mask[7:20, 9:31] = 255
    for k in range(4):
        Image.fromarray(np.roll(mask, k)).convert("RGB").save(tmp_path / "images" / f"{k}.png")
        Image.fromarray(np.roll(mask, k)).convert(mode).save(tmp_path / "masks" / f"{k}.{suffix}", **LOSSY[suffix])
    return tmp_path / "masks", f".{suffix}"


MESSAGE = r"a label image stored as (JPEG|lossy WebP), .*Export the label images again, as PNG"


@pytest.mark.parametrize("colored", [False, True])
def test_masks_of_classes(masks, colored):
    folder, suffix = masks
    images = folder.parent / "images"
    if colored:
        (folder.parent / "labelmap.txt").write_text("background:0,0,0::\nCat:255,255,255::\n")
    with pytest.raises(DataError, match=MESSAGE):
        read_own_data("semantic", images, folder, fraction=0.5, out=folder.parent / "out")
    classes = folder.parent / "labelmap.txt" if colored else ["background", "object"]
    dataset = SemanticFolder(images, folder, classes=classes, image_suffix=".png", label_suffix=suffix)
    with pytest.raises(DataError, match=MESSAGE):
        dataset.load_semantic(0)
    for form in (None, "semantic_maps", "instance_maps"):
        with pytest.raises(DataError, match=MESSAGE):
            read_annotations(folder, images, **({} if form is None else {"format": form}))


def test_masks_beside_the_folder_of_their_images(masks):
    folder, suffix = masks
    with pytest.raises(DataError, match=rf"masks/0{suffix}': {MESSAGE}"):
        read_annotations(folder.parent)
    for path in folder.iterdir():
        Image.open(path).convert("L").point(lambda value: value > 128).save(path.with_suffix(".png"))
        path.unlink()
    with pytest.raises(DataError, match="has label images in 'masks'. Give '.*/masks' as the annotations, and the"):
        read_annotations(folder.parent)


def test_maps_of_segments(masks):
    folder, suffix = masks
    content = {
        "images": [{"id": 1, "file_name": "0.png", "width": 40, "height": 30}],
        "annotations": [
            {"image_id": 1, "file_name": f"0{suffix}", "segments_info": [{"id": 255, "category_id": 1, "area": 9}]}
        ],
        "categories": [{"id": 1, "name": "cat", "isthing": 1}],
    }
    (folder.parent / "panoptic.json").write_text(json.dumps(content))
    dataset = CocoPanoptic(folder.parent / "images", folder, folder.parent / "panoptic.json")
    with pytest.raises(DataError, match=MESSAGE):
        dataset.load_panoptic(0)
    with pytest.raises(DataError, match=MESSAGE):
        read_ids(folder / f"0{suffix}")


@pytest.mark.parametrize("settings", [dict(format="WEBP", lossless=True), dict(format="TIFF", compression="tiff_lzw")])
def test_lossless_forms_are_read(tmp_path, settings):
    colors = np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8)
    colors[:, :, 1:] = 0
    Image.fromarray(colors).save(tmp_path / "a.img", **settings)
    assert (read_ids(tmp_path / "a.img") == colors[:, :, 0]).all()
    if settings["format"] == "TIFF":
        Image.fromarray(colors[:, :, 0]).save(tmp_path / "a.img", **settings)
        assert (read_label_map(tmp_path / "a.img") == colors[:, :, 0]).all()
