import json

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.synthetic.shapes import ShapesDetection
from vitkit.data.synthetic.world import World
from vitkit.tools.data.make_shapes import main

SIZE = ["--image-size", "48", "--max-image-size", "64"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("world") / "shapes"
    main(["--out", str(out), "--num-train", "5", "--num-val", "3", *SIZE])
    return out


@pytest.mark.parametrize(("split", "count"), [("train", 5), ("val", 3)])
def test_coco_detection_reads_back_the_drawn_world(written, split, count):
    drawn = ShapesDetection(count, image_size=48, max_image_size=64, split=split, masks=True)
    stored = CocoDetection(
        str(written / f"{split}2017"), str(written / "annotations" / f"instances_{split}2017.json"), masks=True
    )
    assert len(stored) == count
    assert stored.classes == drawn.classes
    assert stored.category_ids == drawn.category_ids
    for index in range(count):
        a, b = drawn[index], stored[index]
        assert a["image"].equal(b["image"])
        for name in ("labels", "masks"):
            assert a["target"][name].equal(b["target"][name])
        assert np.allclose(a["target"]["boxes_cxcywh"], b["target"]["boxes_cxcywh"], atol=1e-6)
        assert a["target"]["image_id"] == b["target"]["image_id"]


def test_numbers_and_sizes_of_shapes_can_be_chosen(tmp_path):
    sizes = {"max_objects": 2, "min_size": 0.5, "max_size": 0.6}
    options = [part for name, value in sizes.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    main(["--out", str(tmp_path / "large"), "--num-train", "1", "--num-val", "3", "--image-size", "48", *options])
    world = World(image_size=48, split="val", **sizes)
    for index in range(3):
        image = np.asarray(Image.open(tmp_path / "large/val2017" / f"{index + 1:012d}.png"))
        assert np.array_equal(image, world.scene(index).image)
    settings = json.loads((tmp_path / "large/shapes.json").read_text())
    assert {name: settings[name] for name in sizes} == sizes
    with pytest.raises(SystemExit, match="max_size: got 0.95"):
        main(["--out", str(tmp_path / "wrong"), "--max-size", "0.95"])


def test_maps_and_captions_match_the_images(written):
    annotations = written / "annotations"
    world = World(image_size=48, max_image_size=64, split="val")
    panoptic = json.loads((annotations / "panoptic_val2017.json").read_text())
    captions = COCO(str(annotations / "captions_val2017.json"))
    raw_ids = [category["id"] for category in panoptic["categories"]]
    for index, entry in enumerate(panoptic["annotations"]):
        scene = world.scene(index)
        red, green, blue = np.moveaxis(
            np.asarray(Image.open(annotations / "panoptic_val2017" / entry["file_name"]), int), 2, 0
        )
        ids = red + 256 * green + 65536 * blue
        assert np.array_equal(ids, scene.panoptic)
        semantic = np.asarray(Image.open(annotations / "semantic_val2017" / entry["file_name"]))
        for segment in entry["segments_info"]:
            mask = ids == segment["id"]
            assert mask.sum() == segment["area"]
            assert (semantic[mask] == raw_ids.index(segment["category_id"])).all()
        assert [a["caption"] for a in captions.imgToAnns[entry["image_id"]]] == [scene.caption]


def test_an_earlier_result_is_replaced_only_on_request(written, tmp_path):
    out = tmp_path / "shapes"
    main(["--out", str(out), "--num-train", "2", "--num-val", "1", "--image-format", "jpg", *SIZE])
    with pytest.raises(SystemExit, match="error: OUT: .* --overwrite"):
        main(["--out", str(out), "--num-train", "1", "--num-val", "1", *SIZE])
    assert len(list((out / "train2017").glob("*.jpg"))) == 2
    main(["--out", str(out), "--num-train", "1", "--num-val", "1", "--overwrite", *SIZE])
    assert [path.name for path in (out / "train2017").iterdir()] == ["000000000001.png"]


def test_folder_with_other_contents_is_never_overwritten(tmp_path):
    image = tmp_path / "train2017" / "holiday.jpg"
    image.parent.mkdir()
    image.write_bytes(b"x")
    with pytest.raises(SystemExit, match="has other files than this command writes"):
        main(["--out", str(tmp_path), "--overwrite"])
    assert image.exists()


def test_wrong_arguments_are_reported_without_a_traceback(tmp_path):
    with pytest.raises(SystemExit, match="image_size: got 4"):
        main(["--out", str(tmp_path / "a"), "--image-size", "4"])
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "a"), "--num-val", "0"])
    assert not (tmp_path / "a").exists()


def test_keypoints_are_those_of_the_dataset(tmp_path):
    main(["--out", str(tmp_path), "--num-train", "3", "--num-val", "1", "--image-size", "64"])
    read = CocoDetection(tmp_path / "train2017", tmp_path / "annotations" / "keypoints_train2017.json", keypoints=True)
    drawn = ShapesDetection(3, image_size=64, keypoints=True)
    assert read.keypoints == drawn.keypoints
    for index in range(3):
        ours, theirs = read[index]["target"], drawn[index]["target"]
        np.testing.assert_allclose(ours["keypoints"], theirs["keypoints"], atol=0.006)
        np.testing.assert_allclose(ours["areas"], theirs["areas"])
