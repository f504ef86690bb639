"""Writes the synthetic world in COCO's folder layout."""

import io
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from vitkit.data.synthetic.shapes import make_image_record, make_instance_annotations, with_keypoints
from vitkit.data.synthetic.world import SHAPE_KEYPOINTS, World, panoptic_categories, thing_categories
from vitkit.errors import ConfigError, DataError
from vitkit.io.keypoints import keypoint_fields
from vitkit.io.output import write_bytes, write_text
from vitkit.ops.label_maps import ids_to_colors

_SETTINGS = "shapes.json"


def write_shapes(
    out: str | Path,
    *,
    num_train: int = 1000,
    num_val: int = 200,
    image_format: Literal["png", "jpg"] = "png",
    overwrite: bool = False,
    **drawn: Any,
) -> None:
    """Write the synthetic world to a folder: images, boxes, masks, keypoints, captions, panoptic and semantic maps.

    Args:
        out: the folder, in which OUT/train2017, OUT/val2017 and OUT/annotations are laid out like COCO's;
            OUT/shapes.json has the settings.
        num_train, num_val: numbers of images.
        image_format: format of the images.
        overwrite: replace what was written earlier.
        drawn: image_size, max_image_size, min_objects, max_objects, min_size, max_size and seed, see `World`.
    Raises:
        ConfigError: a number is out of range.
        DataError: OUT is a file, has files of something else, or was written before and may not be overwritten.
    """
    if min(num_train, num_val) < 1:
        raise ConfigError(f"num_train={num_train}, num_val={num_val}: expected at least 1.")
    worlds = {split: World(**drawn, split=split) for split in ("train", "val")}
    drawn = {name: value for name, value in asdict(worlds["train"]).items() if name not in ("split", "pairs")}
    settings = {"num_train": num_train, "num_val": num_val, **drawn, "format": image_format}
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise DataError(f"OUT: {str(out)!r} is a file; expected a folder to write into.")
    if out.is_dir() and any(out.iterdir()):
        if not (out / _SETTINGS).is_file():
            # Another dataset with the same layout, such as COCO itself, must never be overwritten.
            raise DataError(f"OUT: folder {str(out)!r} has other files than this command writes. Choose another.")
        if not overwrite:
            raise DataError(f"OUT: folder {str(out)!r} is already written. Choose another, or add --overwrite.")
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / _SETTINGS, json.dumps(settings, indent=1))
    for split, num_images in (("train", num_train), ("val", num_val)):
        write_split(out, f"{split}2017", worlds[split], num_images, f".{image_format}")


def write_split(out: Path, name: str, world: World, num_images: int, suffix: str) -> None:
    """Write images 1 to `num_images` of a world as the split `name` ("train2017")."""
    annotations_folder = out / "annotations"
    folders = [out / name, annotations_folder / f"panoptic_{name}", annotations_folder / f"semantic_{name}"]
    for folder in folders:
        # Otherwise images of a larger earlier run would remain.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    image_folder, panoptic_folder, semantic_folder = folders
    images, instances, keypoints, captions, panoptic = [], [], [], [], []
    for index in range(num_images):
        scene = world.scene(index)
        image_id = index + 1
        record = make_image_record(image_id, scene, suffix)
        map_name = Path(record["file_name"]).with_suffix(".png").name
        images.append(record)
        objects = make_instance_annotations(scene, image_id, len(instances) + 1)
        instances += objects
        keypoints += with_keypoints(scene, objects)
        captions.append({"id": image_id, "image_id": image_id, "caption": scene.caption})
        panoptic.append({"image_id": image_id, "file_name": map_name, "segments_info": scene.segments_info})
        write_image(image_folder / record["file_name"], scene.image)
        write_image(panoptic_folder / map_name, ids_to_colors(scene.panoptic))
        write_image(semantic_folder / map_name, scene.semantic)
        if (index + 1) % 500 == 0 or index + 1 == num_images:
            print(f"{name}: {index + 1}/{num_images} images", flush=True)
    files = {
        "instances": {"annotations": instances, "categories": thing_categories()},
        "keypoints": {
            "annotations": keypoints,
            "categories": [category | keypoint_fields(SHAPE_KEYPOINTS) for category in thing_categories()],
        },
        "captions": {"annotations": captions},
        "panoptic": {"annotations": panoptic, "categories": panoptic_categories()},
    }
    for kind, content in files.items():
        content = {"info": {"description": "vitkit's synthetic world"}, "licenses": [], "images": images, **content}
        write_text(annotations_folder / f"{kind}_{name}.json", json.dumps(content))


def write_image(path: Path, pixels: np.ndarray) -> None:
    """Write an image in the format of its ending."""
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, format=Image.registered_extensions()[path.suffix], quality=95)
    write_bytes(path, encoded.getvalue())
