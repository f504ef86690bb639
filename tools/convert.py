"""Convert a model's weights to other names, or a dataset's annotations to another format; --to says which.

Weights (--to official, transformers, vitkit): SOURCE is anything that vitkit loads: a name of the model zoo, a run, a
config with its weights, a folder of the transformers library or hf:OWNER/NAME. Reading the result back gives the same
weights, bit for bit. With vitkit's names, a .pth file also holds the config, the classes or vocabularies, and what
evaluation has measured, so that it can be loaded by itself. For the transformers library OUT may be a folder, which its
from_pretrained reads: config.json, weights, the preparation of images, a text model's tokens.

Annotations (--to coco, yolo, voc): SOURCE is a file or a folder of COCO, YOLO (Ultralytics, Roboflow), Pascal VOC,
LabelMe, CVAT, CSV, or label pictures. The tool prints the numbers before and after, and what was left out or lost and
why, and draws a sheet of pictures for a visual check. --fix repairs what tools/doctor.py finds:

  fractions             boxes are fractions of their images
  xyxy, cxcywh, xywh    boxes are corners; centre and size; corner and size
  sizes                 images have another width and height than listed, such as exchanged ones
  classes               class names differ by case, blanks or plural, or two ids have one name
  empty                 boxes have no area inside their image
  ids                   annotations have no id, or two have one
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

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vitkit.checkpoint import save_checkpoint
from vitkit.checkpoint.averaging import TAKEN_OVER
from vitkit.checkpoint.writing import write_safetensors
from vitkit.data.formats import AnnotatedImages
from vitkit.data.formats.fixing import FIXES, apply_corrections
from vitkit.data.formats.writing import WRITERS
from vitkit.data.io.coco_schema import raise_faults, segmentation_faults
from vitkit.errors import CheckpointError
from vitkit.inference import Predictor, Translator, find_trained, load
from vitkit.inference.load import own_checkpoint
from vitkit.interop.transformers_writing import write_folder
from vitkit.model_zoo.writing import written
from vitkit.models.detr_segmentation import DETRSegmentation
from vitkit.models.mask_results import MaskResults
from vitkit.tools.annotations import check_out, read_source, write_annotations
from vitkit.tools.common import add_model, add_trust, errors_in_one_line, sort_model
from vitkit.tools.data.options import add_source
from vitkit.words import counted

NAMES = ("official", "transformers", "vitkit")
"""The formats whose names weights may get."""
ENDINGS = (".pth", ".safetensors")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument(
        "--to", choices=(*NAMES, *WRITERS), help="whose names the weights get, or the format of the annotations"
    )
    parser.add_argument("--out", type=Path, required=True, help="the file or folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    add_trust(parser)
    of_data = parser.add_argument_group("annotations")
    add_source(of_data)
    text = "repairs of the annotations (--to is then coco by default): " + ", ".join((*FIXES, "FILE.json"))
    of_data.add_argument("--fix", nargs="+", metavar="FIX", help=text)
    args = parser.parse_intermixed_args(argv)
    args.to = args.to or ("coco" if args.fix else None)
    if args.to is None:
        parser.error(f"--to: choose one of {', '.join((*NAMES, *WRITERS))}")
    if args.to in WRITERS:
        if args.weights or args.overrides:
            parser.error(f"{args.weights}: annotations are one file or folder; their pictures are --images DIR")
        unknown = [fix for fix in args.fix or () if fix not in FIXES and Path(fix).suffix != ".json"]
        if unknown:
            parser.error(f"--fix {unknown[0]}: expected {', '.join(FIXES)}, or a JSON file of corrections")
        return args
    if args.images or args.format or args.split or args.fix:
        parser.error("--images, --from, --split and --fix are for annotations (--to coco, yolo or voc)")
    sort_model(args)
    is_folder = args.to == "transformers" and args.out.suffix not in (".pt", ".bin", ".ckpt")
    if args.out.suffix not in ENDINGS and not is_folder:
        parser.error(f"--out {args.out}: expected a name that ends in {' or '.join(ENDINGS)}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with errors_in_one_line():
        run(args)


def run(args: argparse.Namespace) -> None:
    """Load the model and write its weights; or read, repair and write annotations."""
    if args.to in WRITERS:
        check_out(args.out, overwrite=args.overwrite, can_be_file=args.to == "coco")
        data = read_source(args.model, args, check_segmentations=not args.fix)
        if args.fix:
            apply_fixes(data, args.fix)
            raise_faults(segmentation_faults(data.content, required=False), data.source.name)
        write_annotations(data, args.to, args.out)
        return
    if args.out.exists() and not args.overwrite:
        raise CheckpointError(f"--out {args.out}: exists already. Choose another name, or add --overwrite.")
    config, weights = find_trained(args.model, args.weights, overrides=args.overrides, trust=args.trust)
    loaded = load(config, weights, training_queries=True)
    if args.out.suffix not in ENDINGS:
        state, names = write_folder(args.out, loaded, config["model"])
    elif args.to == "vitkit":
        state, names = loaded.model.state_dict(), "vitkit"
        write(args.out, state, {"model": state, **beside_weights(loaded, config, weights)})
    else:
        state, names = written(loaded.model, args.to)
        # The transformers library reads files that contain only weights.
        write(args.out, state, state if args.to == "transformers" else {"model": state})
    print(f"{loaded.report}\nwrote {args.out}: {counted(len(state), 'entries')}, names of {names}")


def apply_fixes(data: AnnotatedImages, fixes: Sequence[str]) -> None:
    """Apply fixes in order, and print what each changed."""
    for name in fixes:
        if name in FIXES:
            fix, meaning = FIXES[name]
            print(f"  {name}: {fix(data)} {meaning}")
        else:
            done = apply_corrections(data, Path(name))
            print(f"  {name}: " + ", ".join(f"{count} x {action}" for action, count in done.items()))


def write(path: Path, state: Mapping[str, Tensor], checkpoint: Mapping[str, Any]) -> None:
    """Write a .safetensors file with only the weights, or a checkpoint."""
    if path.suffix == ".safetensors":
        write_safetensors(path, state)
    else:
        save_checkpoint(path, checkpoint)


def beside_weights(loaded: Predictor | Translator, config: Mapping[str, Any], weights: str | Path) -> dict[str, Any]:
    """Return the entries besides the weights with which a checkpoint can be loaded by itself."""
    more = {key: value for key, value in own_checkpoint(weights).items() if key in TAKEN_OVER}
    more["config"] = json.dumps(config)
    if isinstance(loaded, Predictor) and loaded.classes:
        has_things = isinstance(loaded.model, MaskResults | DETRSegmentation)
        more |= {"classes": list(loaded.classes), "things": list(loaded.model.things) if has_things else None}
    return more


if __name__ == "__main__":
    main()
