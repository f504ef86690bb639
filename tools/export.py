"""Write a model as one file that runs without its code: ONNX, or a program of torch.export.

MODEL is a name of the model zoo, the folder or a checkpoint of a run, or a config, whose weights follow it. The file
takes images of any size and number, unless --size says otherwise, and contains the metadata needed to use it. It is
compared with the model on pictures before it gets its final name.

NAME.onnx           the model: uint8 images in, predictions out; for a captioner or translator, only the encoder
NAME.step.onnx      for a captioner or translator, one step of the decoder
run_NAME.py         predicts with NAME.onnx; needs only onnxruntime, numpy and Pillow

Examples:
    python tools/export.py runs/detr --images photos
    python tools/export.py detr_r50 --half --out deploy/detr.onnx
    python tools/export.py configs/swin_tiny_in1k.py swin.pth --size 224x224 --quantize int8
    python tools/test.py deploy/detr.onnx data.root=data/coco    (its accuracy, on the same data as the model's)
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from vitkit import model_zoo
from vitkit.data.synthetic.world import World
from vitkit.deployment.export import (
    FORMATS,
    OPSETS,
    TOLERANCES,
    ExportedPart,
    ExportSettings,
    check_out,
    export_model,
    runner_path,
)
from vitkit.deployment.metadata import describe
from vitkit.errors import DataError
from vitkit.inference import Predictor, find_pictures, find_trained, load
from vitkit.logging import setup_logging
from vitkit.tools.common import add_model, add_trust, errors_in_one_line, sort_model
from vitkit.words import counted

NUM_PICTURES = 2


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--format", choices=tuple(FORMATS), default="onnx", help="format of the file (default: onnx)")
    parser.add_argument("--half", action="store_true", help="compute in float16")
    parser.add_argument("--quantize", choices=("int8",), help="compute matrix products in int8 (ONNX files only)")
    parser.add_argument("--out", type=Path, help="the file to write (default: NAME.onnx or NAME.pt2 in this folder)")
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    parser.add_argument("--size", type=size, metavar="HxW", help="fixed height and width of the images (default: any)")
    parser.add_argument(
        "--images", metavar="INPUT", help="pictures to compare on: a file, folder or pattern (default: synthetic ones)"
    )
    parser.add_argument("--opset", type=int, default=20, help=f"ONNX opset, {OPSETS[0]} to {OPSETS[-1]} (default: 20)")
    tolerances = ", ".join(f"{name} {value:g}" for name, value in TOLERANCES.items())
    parser.add_argument(
        "--tolerance", type=float, help=f"allowed difference, relative to the largest value (default: {tolerances})"
    )
    parser.add_argument(
        "--licence", help="licence of the weights, noted in the file (default: for models of the zoo, the one it lists)"
    )
    add_trust(parser)
    args = parser.parse_intermixed_args(argv)
    sort_model(args)
    return args


def size(text: str) -> tuple[int, int]:
    """Parse HEIGHTxWIDTH: "480x640" -> (480, 640)."""
    height, _, width = text.partition("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected HEIGHTxWIDTH in pixels, such as 480x640")
    return int(height), int(width)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    setup_logging()
    with errors_in_one_line():
        names = ("format", "half", "quantize", "size", "opset", "tolerance", "overwrite")
        settings = {name: getattr(args, name) for name in names}
        name = Path(args.model).resolve().name if Path(args.model).is_dir() else Path(args.model).stem
        out = args.out or Path(name + FORMATS[args.format])
        check_out(out, ExportSettings(**settings))
        config, weights = find_trained(args.model, args.weights, overrides=args.overrides, trust=args.trust)
        predictor = load(config, weights)
        print(predictor.report)
        metadata = describe(predictor, config, name=name, licence=args.licence or zoo_licence(weights))
        pictures = read_pictures(args.images, predictor) if isinstance(predictor, Predictor) else []
        for part in export_model(predictor, out, pictures=pictures, metadata=metadata, **settings):
            show(part, args)
        if args.format == "onnx":
            print(f"wrote {runner_path(out).name} beside it, which predicts with it without PyTorch")


def zoo_licence(weights: str | Path | None) -> str | None:
    """Return the licence of weights of the model zoo; None for others, such as those fine-tuned from them."""
    is_file = weights is not None and Path(weights).exists()
    return None if is_file else model_zoo.index().get(model_zoo.listed_name(str(weights)), {}).get("licence")


def read_pictures(source: str | None, predictor: Predictor) -> list[np.ndarray]:
    """Return the first pictures of a source; without a source, generated pictures of the synthetic world.

    Raises:
        DataError: the source has no pictures.
    """
    if source is None:
        worlds = (World(image_size=480), World(image_size=320))
        images = [world.scene(0).image for world in worlds]
        if predictor.channels is None:
            return images
        repeated = (np.tile(image, -(-predictor.channels // 3))[:, :, : predictor.channels] for image in images)
        return [predictor.to_array(image) for image in repeated]
    named = [picture for _, picture in zip(range(NUM_PICTURES), find_pictures(source).named)]
    if not named:
        raise DataError(f"--images {source}: no picture there.")
    return [predictor.to_array(picture, name) for name, picture in named]


def show(part: ExportedPart, args: argparse.Namespace) -> None:
    """Print the path of a file, and how it compares with the model."""
    megabytes = part.path.stat().st_size / 2**20
    print(f"wrote {part.path} ({megabytes:.1f} MiB)")
    shapes = sorted(set(part.shapes))
    print(
        f"  largest differences from PyTorch on {counted(len(part.shapes), 'inputs')} of shapes "
        f"{', '.join(map(str, shapes))}:"
    )
    for difference in part.differences:
        print(f"    {difference}")
    runtime, threads = "ONNX Runtime" if args.format == "onnx" else "the program", torch.get_num_threads()
    times = [f"{1e3 * seconds:.1f} ms by {name}" for name, seconds in zip((runtime, "PyTorch"), part.seconds)]
    print(f"  {part.shapes[0]}: {', '.join(times)} ({counted(threads, 'threads')})")


if __name__ == "__main__":
    main()
