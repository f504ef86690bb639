"""Write the synthetic world to disk in COCO's folder layout: boxes, masks, captions, panoptic and semantic maps.

OUT/train2017/*.png                          images
OUT/annotations/instances_train2017.json     boxes, masks as RLE
OUT/annotations/captions_train2017.json      one caption per image
OUT/annotations/panoptic_train2017.json      segments, with maps in panoptic_train2017/*.png (id = R + 256 G + 65536 B)
OUT/annotations/semantic_train2017/*.png     class index per pixel; the classes are those of panoptic_train2017.json
and the same for val2017; OUT/shapes.json holds the settings with which the data was made.
"""

import argparse
import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vitkit.data.io.output import write_bytes, write_text
from vitkit.data.synthetic.shapes import image_record, instance_annotations
from vitkit.data.synthetic.world import World, panoptic_categories, thing_categories
from vitkit.errors import DataError
from vitkit.ops.label_maps import ids_to_colors
from vitkit.tools.common import errors_in_one_line

_SETTINGS = "shapes.json"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="make_shapes.py",
        description=__doc__,
        epilog="Example: python tools/make_shapes.py data/shapes --num-train 1000 --num-val 200 --image-size 128",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; it is created")
    parser.add_argument("--num-train", type=int, default=1000, help="number of training images (default: 1000)")
    parser.add_argument("--num-val", type=int, default=200, help="number of validation images (default: 200)")
    parser.add_argument("--image-size", type=int, default=128, help="height and width in pixels (default: 128)")
    parser.add_argument(
        "--max-image-size", type=int, help="draw heights and widths at random from --image-size to this"
    )
    parser.add_argument("--min-objects", type=int, default=1, help="minimum number of shapes per image (default: 1)")
    parser.add_argument("--max-objects", type=int, default=4, help="maximum number of shapes per image (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="random seed; another seed gives other images (default: 0)")
    parser.add_argument("--format", choices=("png", "jpg"), default="png", help="format of the images (default: png)")
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier run wrote to OUT")
    arguments = parser.parse_args(argv)
    if arguments.num_train < 1 or arguments.num_val < 1:
        parser.error("--num-train and --num-val must be at least 1")
    return arguments


def write_split(out: Path, name: str, world: World, num_images: int, suffix: str) -> None:
    """Write images 1 to `num_images` of a world as the split `name` ("train2017")."""
    annotations_folder = out / "annotations"
    folders = [out / name, annotations_folder / f"panoptic_{name}", annotations_folder / f"semantic_{name}"]
    for folder in folders:
        # Otherwise images of a larger earlier run would remain.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    image_folder, panoptic_folder, semantic_folder = folders
    images, instances, captions, panoptic = [], [], [], []
    for index in range(num_images):
        scene = world.scene(index)
        image_id = index + 1
        record = image_record(image_id, scene, suffix)
        map_name = Path(record["file_name"]).with_suffix(".png").name
        images.append(record)
        instances += instance_annotations(scene, image_id, len(instances) + 1)
        captions.append({"id": image_id, "image_id": image_id, "caption": scene.caption})
        panoptic.append({"image_id": image_id, "file_name": map_name, "segments_info": scene.segments_info})
        write_image(image_folder / record["file_name"], scene.image)
        write_image(panoptic_folder / map_name, ids_to_colors(scene.panoptic))
        write_image(semantic_folder / map_name, scene.semantic)
        if (index + 1) % 500 == 0 or index + 1 == num_images:
            print(f"{name}: {index + 1}/{num_images} images", flush=True)
    files = {
        "instances": {"annotations": instances, "categories": thing_categories()},
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


def make_shapes(arguments: argparse.Namespace) -> None:
    """Write both splits and the settings.

    Raises:
        ConfigError: a number is out of range.
        DataError: OUT is a file, has files of something else, or was written before and may not be overwritten.
    """
    out: Path = arguments.out
    worlds = {
        split: World(
            image_size=arguments.image_size,
            max_image_size=arguments.max_image_size,
            min_objects=arguments.min_objects,
            max_objects=arguments.max_objects,
            seed=arguments.seed,
            split=split,
        )
        for split in ("train", "val")
    }
    if out.exists() and not out.is_dir():
        raise DataError(f"OUT: {str(out)!r} is a file; expected a folder to write into.")
    if out.is_dir() and any(out.iterdir()):
        if not (out / _SETTINGS).is_file():
            # Another dataset with the same layout, such as COCO itself, must never be overwritten.
            raise DataError(f"OUT: folder {str(out)!r} holds files that this tool did not write. Choose another.")
        if not arguments.overwrite:
            raise DataError(f"OUT: folder {str(out)!r} is already written. Choose another, or add --overwrite.")
    out.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in vars(arguments).items() if name not in ("out", "overwrite")}
    write_text(out / _SETTINGS, json.dumps(settings, indent=1))
    for split, num_images in (("train", arguments.num_train), ("val", arguments.num_val)):
        write_split(out, f"{split}2017", worlds[split], num_images, f".{arguments.format}")
    print(f"Wrote {out}. Train on it with data.root={out}")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    with errors_in_one_line(OSError):
        make_shapes(arguments)


if __name__ == "__main__":
    main()
