"""Predict on images or videos: draw the predictions, and write all of them as JSON.

MODEL is a name of the model zoo, the folder or a checkpoint of a run, or a config, whose weights follow it.
INPUT is an image, a folder of images (including its subfolders), a pattern in quotes, a video, a URL, or the number of
a camera. Several may be given. For a model of clips, the images in each folder are the frames of a video.

OUT/predictions.json      at the end, all predictions; masks as COCO's run lengths; the inputs that failed
OUT/predictions.jsonl     meanwhile, a line for each image that is done; of several processes, predictions-I-of-N.jsonl
OUT/NAME.jpg              each image with its predictions drawn; OUT/NAME.mp4 for a video
OUT/NAME_frames.jsonl     the predictions of each frame of a video
OUT/NAME.png              from models of clips: frames of a video, and its best classes over time
OUT/FORMAT/               with --format, the objects as annotations to be corrected, and an order to review images in
OUT/NAME_panoptic.png     from panoptic models: segment ids, R + 256 G + 65536 B
OUT/NAME_semantic.png     from semantic models: the class of each pixel, its position in "classes" of the JSON

Errors:     an input that cannot be read or predicted is named, and the others are predicted; the exit status is 1
Resume:     repeat a killed command with --resume OUT; inputs that failed are tried again
Processes:  torchrun shares the inputs among its processes, --shard among those of an array job; the last one to finish
            merges the results

Examples:
    vitkit predict runs/detr --input photos --out runs/predict
    vitkit predict runs/detr/last.pth --input street.jpg
    vitkit predict configs/detr_r50.py weights.pth --input street.jpg "holiday/*.jpg" --threshold 0.7
    vitkit predict detr_r50 --input drive.mp4 --batch-size 8 --precision bf16 --device cuda
    vitkit predict runs/cells --input unlabeled --format cvat        # a first draft of labels, for people to correct
    vitkit predict grounding_dino_swin_tiny --input photos --text "a red car . a dog ."
    vitkit predict runs/roofs --input aerial.tif --tiles 800 --tile-overlap 200
    vitkit predict runs/detr --input archive --no-draw --batch-size 16 --workers 8 --resume runs/archive
    torchrun --nproc-per-node 8 -m vitkit.tools.predict runs/detr --input archive --resume runs/archive
    vitkit predict runs/detr --input archive --resume runs/archive --shard $SLURM_ARRAY_TASK_ID/64
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from vitkit.tools.common import (
    a_path,
    add_batch_size,
    add_device,
    add_model,
    add_overwrite,
    add_precision,
    add_runtime,
    add_tiles,
    add_trust,
    errors_in_one_line,
    fraction,
    is_override,
    one_of,
    positive,
    require_images,
    sort_model,
    tiling_of,
)
from vitkit.tools.data.options import writer_names

if TYPE_CHECKING:
    from vitkit.apps.inference.journal import Shard

TASKS = ("panoptic", "semantic", "instance", "detection", "classification", "captioning")


def an_input(text: str) -> str:
    """Return the text of an input, which is not empty."""
    a_path(text)
    return text


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    text = "files to read: images, videos, folders, patterns, URLs, or the number of a camera"
    parser.add_argument("--input", nargs="+", required=True, type=an_input, metavar="INPUT", help=text)
    text = "folder to write (default: runs/predict, or runs/predict-2 if it exists)"
    parser.add_argument("--out", type=a_path, help=text)
    text = "what a text-prompted model looks for: 'a red car. a dog.', or several phrases, each in quotes"
    parser.add_argument("--text", nargs="+", metavar="PHRASE", help=text)
    text = "treat --text as a caption: its words of at least this probability name an object (the original: 0.25)"
    parser.add_argument("--text-threshold", type=fraction, metavar="SCORE", help=text)
    text = "minimum score of the objects that are drawn, of all classes or by class, the last for all others: "
    text += "cat=0.3,dog=0.45,0.6 (default: the model's own, or 0.5)"
    parser.add_argument("--threshold", type=threshold, metavar="SCORE", help=text)
    text = "minimum score of the objects in the JSON (default: that of --threshold)"
    parser.add_argument("--json-threshold", type=threshold, metavar="SCORE", help=text)
    text = "task whose predictions are drawn, for a model with several tasks"
    parser.add_argument("--task", choices=TASKS, help=text)
    add_batch_size(parser, of="images or tiles")
    add_precision(parser)
    add_runtime(parser)
    text = "use only every Nth frame of a video (default: 1)"
    parser.add_argument("--every", type=positive, default=1, metavar="N", help=text)
    text = "format of the drawn images (default: jpg)"
    parser.add_argument("--image-format", choices=("jpg", "png"), default="jpg", help=text)
    text = "also write the objects as annotations: coco, yolo, voc, cvat, label-studio or odvg"
    parser.add_argument("--format", type=one_of(writer_names), metavar="FORMAT", help=text)
    parser.add_argument("--no-draw", action="store_true", help="write only the JSON and the maps")
    add_tiles(parser)
    text = "threads that read and prepare images while the model runs (default: 2)"
    parser.add_argument("--workers", type=positive, default=2, metavar="N", help=text)
    text = "resume the interrupted prediction in this folder, in place of --out: finished inputs are skipped"
    parser.add_argument("--resume", type=a_path, metavar="FOLDER", help=text)
    text = "predict only the Ith of N parts of the inputs, from 1; all parts write into the same OUT"
    parser.add_argument("--shard", type=shard, metavar="I/N", help=text)
    add_overwrite(parser)
    add_trust(parser)
    add_device(parser)
    args = parser.parse_intermixed_args(argv)
    sort_model(args)
    # Words after --input are inputs, also those that are meant for the config.
    args.overrides += [word for word in args.input if is_override(word)]
    args.input = [word for word in args.input if not is_override(word)]
    if not args.input:
        parser.error("--input: expected images or videos")
    if args.text is not None:
        args.overrides += [word for word in args.text if is_override(word)]
        args.text = [word for word in args.text if not is_override(word)]
        args.text = args.text[0] if len(args.text) == 1 else args.text
    elif args.text_threshold is not None:
        parser.error("--text-threshold: is for the words of a caption; give one, --text 'a dog chases the ball'")
    if args.resume and (args.out or args.overwrite):
        parser.error("--resume continues a prediction in its own folder: it takes neither --out nor --overwrite")
    if args.shard is not None and "RANK" in os.environ:
        parser.error("--shard: torchrun's processes are the shards; leave it out")
    return args


def threshold(text: str) -> float | dict[str, float]:
    """Parse "0.5", or scores of classes by name and of all others: "cat=0.3,dog=0.45,0.6"."""
    scores: dict[str, float] = {}
    start = ""  # of a class's name, which may contain commas
    for part in text.split(","):
        name, separator, score = f"{start}{part}".rpartition("=")
        if not separator and start == "" and is_number(part):
            name = "*"
        elif not separator:
            start = f"{score},"
            continue
        if name in scores:
            raise argparse.ArgumentTypeError(f"{text!r}: has two scores for {name!r}")
        scores[name], start = fraction(score), ""
    if start:
        fraction(start.removesuffix(","))  # which says what is expected
    return scores["*"] if scores.keys() == {"*"} else scores


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def shard(text: str) -> Shard:
    """Parse "2/8", the second of eight parts."""
    from vitkit.apps.inference.journal import Shard

    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected I/N, such as 1/8, the first of eight parts")
    return Shard(int(number) - 1, int(of))


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    from vitkit.apps.inference import load
    from vitkit.apps.inference.inputs import check_sources
    from vitkit.apps.inference.journal import Shard
    from vitkit.apps.inference.writing import Output, predict_files
    from vitkit.logging import setup_logging

    with errors_in_one_line():
        setup_logging()
        tiling = tiling_of(args.tiles, args.tile_overlap)
        check_sources(args.input)
        # The processes need no group: each writes its own lines, and the last one to finish merges them.
        rank, local_rank = int(os.environ.get("RANK", 0)), os.environ.get("LOCAL_RANK", "0")
        has_number = "RANK" in os.environ and args.device not in ("cpu", "mps")
        predictor = load(
            args.model,
            args.weights,
            overrides=args.overrides,
            trust=args.trust,
            device=f"{args.device}:{local_rank}" if has_number else args.device,
            precision=args.precision,
            runtime=args.runtime,
        )
        require_images(predictor, args.model)
        if args.text is not None:
            predictor = predictor.with_text(args.text, text_threshold=args.text_threshold)
        predictor.check_text()
        print(predictor.report)
        output = Output(
            folder=args.resume or args.out,
            threshold=args.threshold,
            json_threshold=args.threshold if args.json_threshold is None else args.json_threshold,
            task=args.task,
            batch_size=args.batch_size,
            every=args.every,
            image_format=args.image_format,
            draw=not args.no_draw,
            labels=args.format,
            overwrite=args.overwrite,
            resume=args.resume is not None,
            shard=args.shard or Shard(rank, int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1),
            workers=args.workers,
        )
        written = predict_files(predictor, args.input, output, name=args.model, overrides=args.overrides, tiling=tiling)
        if written is not None:
            print(f"wrote {written}{f' and the drawn files in {written.parent}' if output.draw else ''}")


if __name__ == "__main__":
    main()
