"""Train a model on your own images within a given time, from only the images and their annotations.

It
  1. reads annotations in any of the formats below, and splits and checks them;
  2. times a few steps, and chooses weights, image size and epochs;
  3. writes a config with a comment on each choice;
  4. trains, evaluates, draws predictions and writes a report.
The models are those of configs/start; vitkit/data/measurements.md lists what they reached in which time.

ANNOTATIONS is a file or a folder: COCO, YOLO, Pascal VOC, LabelMe, CVAT, Label Studio, VIA, ODVG, CSV,
or images of masks (--task semantic).
Leave it out for a YOLO data.yaml, a folder with both images and annotations, or folders of classes.

Examples:
    vitkit start photos labels.json --hours 1
    vitkit start cells/data.yaml --hours 0.25 --dry-run
    vitkit start images masks --task semantic
    vitkit start photos labels.json --zero-shot grounding_dino_swin_tiny    # a baseline without training
    vitkit start flowers --task classification model.backbone.pretrained=resnet50.pth
    vitkit start photos labels.json model.backbone.pretrained=runs/pretrain    # from vitkit pretrain
    vitkit start photos labels.json data.channels=4        # images of 16 bits, or not RGB

ImageNet weights of Keras or Caffe, whose blocks have their stride in the first convolution, also need
model.backbone.stride_in_1x1=true, and for Keras model.backbone.pixel_mean=[0.48502,0.45796,0.40760].
"""

import argparse
import sys
from pathlib import Path

import vitkit
from vitkit.tools.common import a_path, add_device, errors_in_one_line, fraction, is_override

TASKS = ("detection", "semantic", "instance", "keypoints", "panoptic", "classification")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "folder of the images, or a file that says where they are, such as YOLO's data.yaml"
    parser.add_argument("images", type=a_path, metavar="IMAGES", help=text)
    text = "file or folder of their annotations; also key.sub=value for the config"
    parser.add_argument("rest", nargs="*", default=[], metavar="ANNOTATIONS", help=text)
    parser.add_argument("--task", choices=TASKS, default="detection", help="task to learn (default: detection)")
    parser.add_argument("--hours", type=float, default=1.0, help="wall-clock time for everything (default: 1)")
    text = "fraction of the images for validation (default: 0.2)"
    parser.add_argument("--val-fraction", type=fraction, default=0.2, metavar="FRACTION", help=text)
    text = "folder of the run (default: runs/start)"
    parser.add_argument("--run-dir", type=a_path, default=Path("runs/start"), help=text)
    text = "score this text-prompted detector first, with the class names as its text, as a baseline in the report"
    parser.add_argument("--zero-shot", metavar="MODEL", help=text)
    text = "time a few steps, choose, and write the config, but do not train"
    parser.add_argument("--dry-run", action="store_true", help=text)
    add_device(parser)
    args = parser.parse_intermixed_args(argv)
    args.overrides = [word for word in args.rest if is_override(word)]
    files = [word for word in args.rest if not is_override(word)]
    if len(files) > 1:
        parser.error(f"expected one file or folder of annotations, got {', '.join(files)}")
    args.annotations = Path(files[0]) if files else None
    if args.val_fraction in (0, 1):
        parser.error(f"--val-fraction {args.val_fraction:g}: expected a fraction between 0 and 1")
    if not 0 < args.hours < float("inf"):
        parser.error(f"--hours {args.hours:g}: expected a finite number above 0")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with errors_in_one_line():
        try:
            vitkit.start(
                args.images,
                args.annotations,
                task=args.task,
                hours=args.hours,
                val_fraction=args.val_fraction,
                run_dir=args.run_dir,
                dry_run=args.dry_run,
                zero_shot=args.zero_shot,
                device=args.device,
                overrides=args.overrides,
            )
        except KeyboardInterrupt:
            sys.exit(130)


if __name__ == "__main__":
    main()
