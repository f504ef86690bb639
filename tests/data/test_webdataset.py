"""Packs read by webdataset (https://github.com/webdataset/webdataset): images with annotations beside them."""

import json

import numpy as np
import pytest

from vitkit.apps.datasets.synthetic import write_shapes
from vitkit.io.image_files import decode_image, read_image
from vitkit.tools.data import pack

webdataset = pytest.importorskip("webdataset")


def test_webdataset_reads_the_images_and_annotations_of_a_pack(tmp_path):
    folder, out = tmp_path / "shapes", tmp_path / "pack"
    write_shapes(folder, num_train=2, num_val=6, image_size=32)
    annotations = folder / "annotations/instances_val2017.json"
    pack.main([str(folder), str(out), "--shard-size", "32K", "--labels", str(annotations), str(folder / "val2017")])
    shards = sorted(map(str, out.glob("shard-*.tar")))
    assert len(shards) > 1
    samples = {sample["__key__"]: sample for sample in webdataset.WebDataset(shards, shardshuffle=False)}
    images = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.png")}
    assert samples.keys() == images.keys()
    for key, path in images.items():
        assert np.array_equal(decode_image(samples[key]["png"], key), read_image(path))
    content = json.loads(annotations.read_text())
    class_names = {category["id"]: category["name"] for category in content["categories"]}
    for image in content["images"]:
        sample = json.loads(samples[f"val2017/{image['file_name'].removesuffix('.png')}"]["json"])
        assert {name: sample[name] for name in image} == image
        own = [a for a in content["annotations"] if a["image_id"] == image["id"]]
        assert [a["bbox"] for a in sample["annotations"]] == [a["bbox"] for a in own]
        assert [a["category"] for a in sample["annotations"]] == [class_names[a["category_id"]] for a in own]
    assert all("json" not in samples[key] for key in samples if not key.startswith("val2017/"))
