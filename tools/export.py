"""Write a model as one file that runs without its code: ONNX, or a program of torch.export.

MODEL is a name of the model zoo, the folder or a checkpoint of a run, or a config, whose weights follow it. The file
takes images of any size and number, unless --size says otherwise, and contains the metadata needed to use it. It is
compared with the model on images before it gets its final name.

NAME.onnx           the model: uint8 images in, predictions out; for a captioner or translator, only the encoder
NAME.step.onnx      for a captioner or translator, one step of the decoder
NAME.text.onnx      for a text-prompted detector, the text encoder; beside it NAME.tokenizer.json
run_NAME.py         predicts with NAME.onnx; needs only onnxruntime, numpy and Pillow (and tokenizers for texts)
README.md           a model card, with the metrics that vitkit test has measured

Examples:
    vitkit export runs/detr --images photos
    vitkit export detr_r50 --precision fp16 --out deploy/detr.onnx
    vitkit export configs/swin_tiny_in1k.py swin.pth --size 224x224 --precision int8
    vitkit test deploy/detr.onnx data.root=data/coco    (its accuracy, on the same data as the model's)
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import vitkit
from vitkit.apps.export_reading.settings import FORMATS, OPSETS, TOLERANCES
from vitkit.text_format import pluralize
from vitkit.tools.common import (
    a_path,
    add_model,
    add_overwrite,
    add_trust,
    errors_in_one_line,
    image_size,
    positive,
    sort_model,
)

if TYPE_CHECKING:
    from vitkit.apps.export_writing.export import ExportedPart


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--format", choices=tuple(FORMATS), default="onnx", help="format of the file (default: onnx)")
    text = "fp16: store weights and compute in float16; int8: compute matrix products in int8 (default: fp32)"
    parser.add_argument("--precision", choices=tuple(TOLERANCES), default="fp32", help=text)
    parser.add_argument("--out", type=a_path, help="the file to write (default: NAME.onnx or NAME.pt2 in this folder)")
    add_overwrite(parser)
    parser.add_argument(
        "--size", type=image_size, metavar="HxW", help="fixed height and width of the images (default: any)"
    )
    text = "folder of images to compare on (default: synthetic ones)"
    parser.add_argument("--images", type=a_path, metavar="DIR", help=text)
    text = "compare on the first N of --images (default: 2)"
    parser.add_argument("--max-images", type=positive, default=2, metavar="N", help=text)
    parser.add_argument("--opset", type=int, default=20, help=f"ONNX opset, {OPSETS[0]} to {OPSETS[-1]} (default: 20)")
    tolerances = ", ".join(f"{name} {value:g}" for name, value in TOLERANCES.items())
    parser.add_argument(
        "--tolerance", type=float, help=f"allowed difference, relative to the largest value (default: {tolerances})"
    )
    parser.add_argument(
        "--license",
        help="license of the weights, noted in the file and the card (default: that of the model zoo's weights)",
    )
    add_trust(parser)
    args = parser.parse_intermixed_args(argv)
    sort_model(args)
    return args


def main(argv: list[str] | None = None) -> None:
    args = vars(parse_args(argv))
    from vitkit.logging import setup_logging

    setup_logging()
    with errors_in_one_line():
        export = vitkit.export(args.pop("model"), args.pop("out"), **args)
        print(export.report)
        for part in export.parts:
            show(part)
        if export.runner is not None:
            print(f"wrote {export.runner.name} beside it, which predicts with it without PyTorch")
        print(f"wrote {export.card}, a model card")


def show(part: ExportedPart) -> None:
    """Print the path of a file, and how it compares with the model."""
    megabytes = part.path.stat().st_size / 2**20
    print(f"wrote {part.path} ({megabytes:.1f} MiB)")
    shapes = sorted(set(part.shapes))
    print(
        f"  largest differences from PyTorch on {pluralize(len(part.shapes), 'inputs')} of shapes "
        f"{', '.join(map(str, shapes))}:"
    )
    for difference in part.differences:
        print(f"    {difference}")
    runtime = "ONNX Runtime" if part.path.suffix == FORMATS["onnx"] else "the program"
    times = [f"{1e3 * seconds:.1f} ms by {name}" for name, seconds in zip((runtime, "PyTorch"), part.seconds)]
    print(f"  {part.shapes[0]}: {', '.join(times)}")


if __name__ == "__main__":
    main()
