"""Convert a model's weights to other names, or a dataset's annotations to another format; --to says which.

Weights (--to official, transformers, vitkit): SOURCE is anything that vitkit loads: a name of the model zoo, a run, a
config with its weights, a folder of the transformers library or hf:OWNER/NAME. Reading the result back gives the same
weights, bit for bit. With vitkit's names, a .pth file also holds the config, the classes or vocabularies, and what
evaluation has measured, so that it can be loaded by itself. For the transformers library OUT may be a folder, which its
from_pretrained reads: config.json, weights, the preparation of images, a text model's tokens.

Annotations (--to coco, yolo, voc): SOURCE is a file or a folder of COCO, YOLO (Ultralytics, Roboflow), Pascal VOC,
LabelMe, CVAT, CSV, or label maps. The tool prints the numbers before and after, and what was left out or lost and
why, and draws a sheet of images for a visual check. --fix repairs what `vitkit doctor` finds:

  fractions             boxes are fractions of their images
  xyxy, cxcywh, xywh    boxes are corners; centre and size; corner and size
  sizes                 images have another width and height than listed, such as exchanged ones
  classes               class names differ by case, blanks or plural, or two ids have one name
  empty                 boxes have no area inside their image
  ids                   annotations have no id, or two have the same
  FILE.json             corrections of labels: [{"image": "a.jpg", "action": "add", "remove" or "change",
                        "annotation_id": 17 or null, "bbox": [x, y, w, h] or null, "category": "cat" or null}, ...]

Examples:
    python tools/convert.py runs/detr --to official --out detr.pth
    python tools/convert.py mask2former_r50_coco_instance --to transformers --out mask2former
    python tools/convert.py hf:facebook/detr-resnet-50 --to vitkit --out detr.pth
    python tools/convert.py cells/data.yaml --to coco --out cells/annotations
    python tools/convert.py VOCdevkit/VOC2012 --to yolo --out voc_as_yolo
    python tools/convert.py own.json --images photos --fix fractions cxcywh --out fixed.json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import vitkit
from vitkit.tools.common import add_model, add_trust, errors_in_one_line, sort_model
from vitkit.words import counted

if TYPE_CHECKING:
    from vitkit.data.formats import AnnotatedImages

NAMES = ("official", "transformers", "vitkit")
"""Whose names weights may get; see `vitkit.convert`."""
WRITTEN = ("coco", "yolo", "voc")
"""The formats that annotations are written in."""
READ = (*WRITTEN, "labelme", "cvat", "csv", "instance_pictures", "semantic_pictures")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    text = "whose names the weights get, or the format of the annotations"
    parser.add_argument("--to", choices=(*NAMES, *WRITTEN), help=text)
    parser.add_argument("--out", type=Path, required=True, help="the file or folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    add_trust(parser)
    of_data = parser.add_argument_group("annotations")
    text = "folder of the images (default: where the format usually has them)"
    of_data.add_argument("--images", type=Path, metavar="DIR", help=text)
    text = "format of the annotations, if it is ambiguous: " + ", ".join(READ)
    of_data.add_argument("--from", dest="format", choices=READ, metavar="FORMAT", help=text)
    text = "read only this split: train, val or test, if the format has named splits"
    of_data.add_argument("--split", metavar="NAME", help=text)
    of_data.add_argument("--fix", nargs="+", metavar="FIX", help="repairs of the annotations, see above (--to: coco)")
    args = parser.parse_intermixed_args(argv)
    args.to = args.to or ("coco" if args.fix else None)
    if args.to is None:
        parser.error(f"--to: choose one of {', '.join((*NAMES, *WRITTEN))}")
    if args.to in NAMES and (args.images or args.format or args.split or args.fix):
        parser.error(f"--images, --from, --split and --fix are for annotations (--to {', '.join(WRITTEN)})")
    if args.to in WRITTEN and (args.weights or args.overrides):
        parser.error(f"{args.weights}: annotations are one file or folder; their images are --images DIR")
    sort_model(args)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with errors_in_one_line():
        convert_annotations(args) if args.to in WRITTEN else convert_weights(args)


def convert_weights(args: argparse.Namespace) -> None:
    """Write a model's weights with other names."""
    how = dict(overrides=args.overrides, overwrite=args.overwrite, trust=args.trust)
    done = vitkit.convert(args.model, args.out, to=args.to, weights=args.weights, **how)
    print(f"{done.report}\nwrote {done.path}: {counted(done.num_entries, 'entries')}, names of {done.names}")


def convert_annotations(args: argparse.Namespace) -> None:
    """Read, repair and write annotations."""
    from vitkit.data.io.coco_schema import raise_faults, segmentation_faults
    from vitkit.tools.annotations import check_out, read_source, write_annotations

    check_fixes(args.fix or ())
    check_out(args.out, overwrite=args.overwrite, can_be_file=args.to == "coco")
    data = read_source(args.model, args, check_segmentations=not args.fix)
    if args.fix:
        apply_fixes(data, args.fix)
        raise_faults(segmentation_faults(data.content, required=False), data.source.name)
    write_annotations(data, args.to, args.out)


def check_fixes(fixes: Sequence[str]) -> None:
    """Check the names of fixes.

    Raises:
        ConfigError: one is unknown.
    """
    from vitkit.data.formats.fixing import FIXES
    from vitkit.errors import ConfigError

    for fix in fixes:
        if fix not in FIXES and Path(fix).suffix != ".json":
            raise ConfigError(f"--fix {fix}: expected {', '.join(FIXES)}, or a JSON file of corrections.")


def apply_fixes(data: AnnotatedImages, fixes: Sequence[str]) -> None:
    """Apply fixes in order, and print what each changed."""
    from vitkit.data.formats.fixing import FIXES, apply_corrections

    for name in fixes:
        if name in FIXES:
            fix, meaning = FIXES[name]
            print(f"  {name}: {fix(data)} {meaning}")
        else:
            done = apply_corrections(data, Path(name))
            print(f"  {name}: " + ", ".join(f"{count} x {action}" for action, count in done.items()))


if __name__ == "__main__":
    main()
