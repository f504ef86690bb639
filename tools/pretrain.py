"""Train a backbone on images without labels within a given time, as the start of a detector or another model.

It checks the images, times a few steps, chooses their size and the number of epochs, writes a config, trains, and ends
with weights and a report: the loss, the nearest neighbors of some photos, and with --labeled, a folder of images for
each class, the accuracy of k nearest neighbors and of a linear classifier before and after.

PHOTOS is a folder, a pattern such as 'photos/*.jpg', or a text file with the name of an image in each line.

Methods (default: distil with --teacher, else dino):
    distil  learn the features of a frozen teacher whose weights there are: the most in a short time
    dino    a student predicts from any crop what its own moving average sees in large ones; wants thousands of photos
    mae     a ViT reconstructs the three quarters of an image that it does not see; wants fine-tuning of all layers
What each was worth for a detector with 10 to 205 labeled photos: model_zoo/ablations/few_labels.md.
That an hour on 205 photos saves labels is not shown: AP with 20 labels is 0.378 for a ResNet-18 by distil, and 0.369
from random weights with 100, a difference of +0.009 with a 95 % interval of -0.076 to +0.094. It is 0.344 by dino, and
0.369 for a small ViT by mae. From ImageNet's weights it is 0.411 (+0.042, interval +0.020 to +0.063), and 0.456 in one
run from random weights that trained for this hour themselves: with so few photos, train longer first. What an hour is
worth with thousands of photos was not measured.

Examples:
    vitkit pretrain photos --hours 1
    vitkit pretrain photos --teacher vit_small_patch16_dino --backbone resnet18
    vitkit pretrain photos --teacher resnet50=resnet50.pth             # a file of weights, no download
    vitkit pretrain photos --method mae --backbone vit_small_patch16 --labeled flowers --run-dir runs/mae
    vitkit pretrain --resume runs/pretrain                             # after ctrl-C, a kill or a lost machine
    vitkit start photos labels.json model.backbone.pretrained=runs/pretrain     # from resnet18 or resnet50; others:
    vitkit start photos labels.json model.backbone=vit_small_patch16 model.backbone.pretrained=runs/mae
"""

import argparse
import signal
import sys
from pathlib import Path

import vitkit
from vitkit.tools.common import a_path, add_device, errors_in_one_line, is_override


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rest", nargs="*", metavar="PHOTOS", help="the images, and key.sub=value for the config")
    parser.add_argument(
        "--method", metavar="NAME", help="distil, mae or dino (default: distil with --teacher, else dino)"
    )
    parser.add_argument(
        "--teacher",
        metavar="NAME",
        help="for distil: a backbone, NAME=FILE with weights of yours, or the folder of a run",
    )
    text = "the backbone to train (default: resnet18, as in vitkit start; vit_tiny_patch16 for mae)"
    parser.add_argument("--backbone", metavar="NAME", help=text)
    parser.add_argument("--hours", type=float, help="wall-clock time for everything (default: 1)")
    text = "folder with a folder of images for each class, by which the features are judged before and after"
    parser.add_argument("--labeled", metavar="CLASSES", help=text)
    text = "folder of the run (default: runs/pretrain)"
    parser.add_argument("--run-dir", type=a_path, default=Path("runs/pretrain"), help=text)
    text = "go on with the run in this folder"
    parser.add_argument("--resume", type=a_path, metavar="FOLDER", help=text)
    parser.add_argument("--dry-run", action="store_true", help="choose and write the config, but do not train")
    add_device(parser)
    args = parser.parse_intermixed_args(argv)
    args.overrides = [word for word in args.rest if is_override(word)]
    sources = [word for word in args.rest if not is_override(word)]
    if len(sources) > 1:
        parser.error(f"expected one source of images, got {', '.join(sources)}; put a pattern in quotes")
    if not sources and args.resume is None:
        parser.error("expected images to learn from, such as a folder, or --resume FOLDER")
    args.photos = sources[0] if sources else None
    if args.hours is not None and not 0 < args.hours < float("inf"):
        parser.error(f"--hours {args.hours:g}: expected a finite number above 0")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    # Outside of the training, too, it ends with a line that says how to go on.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with errors_in_one_line():
        try:
            vitkit.pretrain(
                args.photos,
                method=args.method,
                teacher=args.teacher,
                backbone=args.backbone,
                hours=args.hours,
                labeled=args.labeled,
                run_dir=args.run_dir,
                resume=args.resume,
                dry_run=args.dry_run,
                device=args.device,
                overrides=args.overrides,
            )
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    main()
