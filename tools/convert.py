"""Convert a model's weights to other key names: the official ones, those of transformers or a toolbox, or vitkit's.

MODEL is anything that vitkit loads: a name of the model zoo, a run, a config with its weights, a folder of the
transformers library or hf:OWNER/NAME, or a checkpoint of mmdetection 3 or detrex. Reading the result back gives the
same weights, bit for bit in fp32. With vitkit's names, a file also holds the config, the classes or vocabularies, and
what evaluation has measured, so that it can be loaded by itself. For the transformers library OUT may be a folder,
which its from_pretrained reads: config.json, weights, the preparation of images, a text model's tokens, and a model
card, with the metrics that vitkit test has measured: README.md, or NAME.README.md if that is something else's.

Annotations are converted by vitkit data convert.

Examples:
    vitkit convert runs/detr --to official --out detr.pth
    vitkit convert mask2former_r50_coco_instance --to transformers --out mask2former
    vitkit convert runs/detr --to vitkit --precision fp16 --out detr.safetensors
    vitkit convert dfine_s_coco --to vitkit --classes person,dog --out person_dog.pth
    vitkit convert epoch_12.pth --to vitkit --out dino.pth
    vitkit convert runs/detr --to mmdetection --out detr.pth
    vitkit convert hf:facebook/detr-resnet-50 --to vitkit --out detr.pth
"""

import argparse

import vitkit
from vitkit.text_format import pluralize
from vitkit.tools.common import a_path, add_model, add_overwrite, add_trust, errors_in_one_line, sort_model

NAMES = ("official", "transformers", "mmdetection", "detrex", "vitkit")
ANNOTATIONS = ("coco", "yolo", "voc", "cvat", "label-studio", "odvg")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    text = f"format of the names of the weights: {', '.join(NAMES)}"
    parser.add_argument("--to", required=True, metavar="FORMAT", help=text)
    parser.add_argument("--out", type=a_path, required=True, help="the file or folder to write")
    text = "precision of the stored numbers (default: fp32)"
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help=text)
    text = "license of the weights, for the model card (default: for models of the zoo, the one it lists)"
    parser.add_argument("--license", help=text)
    text = (
        "classes to keep, in this order, as NAME,NAME,...; the model then has no others (default: all); names of all "
    )
    text += "classes of weights that do not name them"
    parser.add_argument("--classes", type=lambda names: names.split(","), metavar="NAMES", help=text)
    add_overwrite(parser)
    add_trust(parser)
    args = parser.parse_intermixed_args(argv)
    if args.to not in NAMES:
        hint = ". Annotations are converted by vitkit data convert" if args.to in ANNOTATIONS else ""
        parser.error(f"--to {args.to}: expected {', '.join(NAMES)}{hint}")
    sort_model(args)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with errors_in_one_line():
        how = dict(classes=args.classes, precision=args.precision, license=args.license, overrides=args.overrides)
        how |= dict(overwrite=args.overwrite, trust=args.trust)
        done = vitkit.convert(args.model, args.out, to=args.to, weights=args.weights, **how)
        print(f"{done.report}\nwrote {done.path}: {pluralize(done.num_entries, 'entries')}, names of {done.names}")
        if done.card is not None:
            print(f"wrote {done.card}, a model card")


if __name__ == "__main__":
    main()
