"""Convert a dataset's annotations to another format, or repair them.

SOURCE is a file or a folder of COCO, YOLO (Ultralytics, Roboflow), Pascal VOC, LabelMe, CVAT, Label Studio, VIA, CSV,
or label images. The numbers before and after are printed, and what was left out or lost and why; a sheet of images, of
those that were repaired if any were, is drawn for a visual check. --fix repairs what vitkit doctor finds:

  fractions             boxes are fractions of their images
  xyxy, cxcywh, xywh    boxes are corners; center and size; corner and size
  sizes                 images have another width and height than listed, such as exchanged ones; boxes stay
  classes               class names differ by case, blanks or plural, or two ids have one name
  empty                 boxes have no area inside their image
  crowds                all objects are marked as crowd regions (iscrowd: 1)
  ignored               objects marked as ignore or difficult become crowd regions, as VOC's evaluation leaves them out
  keypoints             points lie outside their image or far outside their box, are no numbers, or have coordinates
                        without being labeled, or num_keypoints counts others: they become points without a label
  ids                   annotations have no id, or two have the same
  FILE.json             corrections of labels: [{"image": "a.jpg", "action": "add", "remove" or "change",
                        "annotation_id": 17 or null, "bbox": [x, y, w, h] or null, "category": "cat" or null}, ...];
                        "was": {"bbox": [...], "category": "cat"} finds it in a file with other ids

Captions whose phrases are located are written as ODVG's JSON lines, for GroundingDataset: --from flickr30k (the folder
of Flickr30k Entities), refcoco (its pickle, which runs no code, beside instances.json) or mdetr (MDETR's JSON).

Examples:
    vitkit data convert cells/data.yaml --out cells/annotations
    vitkit data convert VOCdevkit/VOC2012 --to yolo --out voc_as_yolo
    vitkit data convert own.json --images photos --fix fractions cxcywh --out fixed.json
    vitkit data convert lvis_v1_train.json --images coco --to odvg --out lvis
    vitkit data convert "refcoco/refs(unc).p" --from refcoco --split val --to odvg --out refcoco_odvg
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitkit.errors import ConfigError
from vitkit.tools.common import errors_in_one_line
from vitkit.tools.data.options import SOURCE_HELP, add_out, add_source, caption_formats

if TYPE_CHECKING:
    from vitkit.data.formats import AnnotatedImages


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
    add_source(parser, captions=True)
    parser.add_argument("--fix", nargs="+", default=[], metavar="FIX", help="repairs, see above")
    add_out(parser, what="folder, or for COCO's format the JSON file,")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    from vitkit.apps.datasets.contents import count_classes
    from vitkit.apps.datasets.fixing import format_issues
    from vitkit.io.coco_schema import raise_issues, segmentation_issues
    from vitkit.tools.data.annotations import check_out, read_source, write_annotations

    with errors_in_one_line():
        check_fixes(args.fix)
        if args.format in caption_formats():
            convert_captions(args)
            return
        check_out(args.out, overwrite=args.overwrite, can_be_file=args.to == "coco")
        data = read_source(
            args.source,
            args.images,
            format=args.format,
            split=args.split,
            check_segmentations=not args.fix,
            check_sizes="sizes" not in args.fix,
        )
        before = count_classes(data)
        if args.fix:
            apply_fixes(data, args.fix)
            raise_issues(segmentation_issues(data.content, required=False), data.source.name)
        for text, fixes in format_issues(data):
            print(f"  warning: {text}. Repair: --fix {' '.join(fixes)}")
        write_annotations(data, args.to, args.out, before=before)


def convert_captions(args: argparse.Namespace) -> None:
    """Write captions as ODVG's JSON lines, and print their numbers."""
    from vitkit.apps.datasets.writing import write_odvg_captions
    from vitkit.data.formats.grounding import GROUNDING_FORMATS, read_grounded
    from vitkit.tools.data.annotations import check_out

    if args.to != "odvg" or args.fix:
        raise ConfigError(f"--from {args.format}: captions are only written as ODVG. Add --to odvg, without --fix.")
    check_out(args.out, overwrite=args.overwrite)
    images = list(read_grounded(Path(args.source), args.format, args.split))
    path = args.out / f"{args.split or 'annotations'}.jsonl"
    write_odvg_captions(images, path)
    regions = [region for image in images for region in image.regions]
    num_files, num_boxes = len({image.file_name for image in images}), sum(len(r.boxes_xyxy) for r in regions)
    print(f"{args.source}: {GROUNDING_FORMATS[args.format].text}")
    print(f"{path}: {len(images)} captions of {num_files} images, {len(regions)} phrases with {num_boxes} boxes")


def check_fixes(names: Sequence[str]) -> None:
    """Raise a ConfigError if there is no such fix."""
    from vitkit.apps.datasets.fixing import FIXES

    unknown = [name for name in names if name not in FIXES and Path(name).suffix != ".json"]
    if unknown:
        raise ConfigError(f"--fix {unknown[0]}: expected {', '.join(FIXES)}, or a JSON file of corrections.")


def apply_fixes(data: AnnotatedImages, names: Sequence[str]) -> None:
    """Apply fixes in order, print what each changed, and mark the images that were changed."""
    from vitkit.apps.datasets.fixing import FIXES, apply_corrections, fingerprints

    before = fingerprints(data)
    for name in names:
        if name in FIXES:
            fix, meaning = FIXES[name]
            print(f"  {name}: {fix(data)} {meaning}")
        else:
            done = apply_corrections(data, Path(name))
            print(f"  {name}: " + ", ".join(f"{count} x {action}" for action, count in done.items()))
    data.changed |= {image_id for image_id, value in fingerprints(data).items() if value != before.get(image_id)}


if __name__ == "__main__":
    main()
