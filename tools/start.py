"""Train a model on your own pictures within a given time, from nothing but the pictures and their annotations.

It reads annotations in any of the formats below, splits and checks them, times a few steps, chooses weights, image size
and epochs, writes a config with a comment on each choice, trains, evaluates, draws predictions and writes a report. The
models are those of configs/start; vitkit/data/README.md lists what they reached in which time.

ANNOTATIONS is a file or a folder: COCO, YOLO, Pascal VOC, LabelMe, CVAT, CSV, or pictures of masks (--task semantic).
It is not needed for a YOLO data.yaml, a folder with both pictures and annotations, or folders of classes.

Examples:
    vitkit start photos labels.json --hours 1
    vitkit start cells/data.yaml --hours 0.25 --dry-run
    vitkit start images masks --task semantic
    vitkit start flowers --task classification model.backbone.pretrained=resnet50.pth

ImageNet weights of Keras or Caffe, whose blocks have their stride in the first convolution, also need
model.backbone.stride_in_1x1=true, and for Keras model.backbone.pixel_mean=[0.48502,0.45796,0.40760].
"""

import argparse
import itertools
import shlex
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import vitkit
from vitkit import BACKBONES, load_config
from vitkit.devices import has_bfloat16
from vitkit.doctor import Options, diagnose, report
from vitkit.engine.api import Run
from vitkit.engine.hooks import EndAfter
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.logging import LOG_NAME
from vitkit.report import write_report
from vitkit.tools.child_runs import StepCost, time_steps
from vitkit.tools.common import add_device, errors_in_one_line, is_override
from vitkit.tools.own_data import OwnData, read_own_data
from vitkit.visualization.curves import read_log
from vitkit.words import counted

CONFIG = "config.py"
TRAINING_SHARE = 0.8
"""The fraction of the time for training; the rest is for evaluations, pictures and the report."""
TIMING_SHARE = 0.01
"""The least fraction of the time for which each of the compared settings is timed."""
PACE_SHARES = (0.1, 0.4)
"""The fractions of the training time after which the epochs are fitted to the time that they have really taken."""
FEWEST_PACED_EPOCHS = 10
"""The number of epochs below which a pause at the end of one would be too coarse."""
NUM_EVALUATIONS = 5
CHECKS = ("annotations", "images", "same_classes", "class_balance", "empty_images", "train_val_leakage", "queries")
"""Names of the checks of vitkit.doctor that take only seconds."""


@dataclass(frozen=True)
class Recipe:
    """The image sizes that are considered for a task."""

    sizes: tuple[int, ...]
    """Short sides of the validation images in pixels, the smallest first."""
    num_steps: int
    """The number of training steps that a larger size must leave time for."""
    evidence: str
    """The measurements that the recipe is based on, for a comment in the config."""
    freeze_below: int = 0
    """The number of steps below which a pretrained backbone is frozen up to res3, which halves the cost of a step."""


RECIPES = {
    "detection": Recipe(
        (256, 320, 416, 512), 4000, "vitkit/data/README.md: blood cells, 205 photos", freeze_below=1500
    ),
    "semantic": Recipe((240, 360, 480), 2000, "vitkit/data/README.md: CamVid, 367 photos"),
    "instance": Recipe((256, 320, 416), 4000, "not measured; sizes and steps are those of detection"),
    "panoptic": Recipe((256, 320, 416), 4000, "not measured; sizes and steps are those of detection"),
    "classification": Recipe((128, 224), 1500, "not measured"),
}


@dataclass(frozen=True)
class Choice:
    """The chosen settings of the training."""

    size: int
    precision: str
    weights: str
    """Where the backbone's initial weights come from, for a comment in the config."""
    pretrained: bool
    freezes_res3: bool = False
    epochs: int = 0
    cost: StepCost | None = None

    @property
    def steps(self) -> int:
        """The total number of training steps."""
        return round(self.epochs * self.cost.steps_per_epoch)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, help="folder of the pictures, or a file that says where they are")
    parser.add_argument("rest", nargs="*", metavar="ANNOTATIONS", help="annotations, and key.sub=value for the config")
    parser.add_argument("--task", choices=RECIPES, default="detection", help="task to learn (default: detection)")
    parser.add_argument("--hours", type=float, default=1.0, help="wall-clock time for everything (default: 1)")
    parser.add_argument(
        "--val", type=float, default=0.2, metavar="SHARE", help="share of the images for validation (default: 0.2)"
    )
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/start"), help="folder to write (default: runs/start)"
    )
    parser.add_argument("--dry-run", action="store_true", help="choose and write the config, but do not train")
    add_device(parser)
    args = parser.parse_intermixed_args(argv)
    args.overrides = [word for word in args.rest if is_override(word)]
    files = [word for word in args.rest if not is_override(word)]
    if len(files) > 1:
        parser.error(f"expected one file or folder of annotations, got {', '.join(files)}")
    args.annotations = Path(files[0]) if files else None
    if not 0 < args.val < 1:
        parser.error(f"--val {args.val:g}: expected a share between 0 and 1")
    if not args.hours > 0:
        parser.error(f"--hours {args.hours:g}: expected more than 0")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with errors_in_one_line():
        start(args)


def start(args: argparse.Namespace) -> None:
    """Do everything from reading the pictures to writing the report.

    Raises:
        VitkitError: an error that a user can cause, see vitkit/errors.py.
    """
    began, folder = time.monotonic(), free_folder(args.run_dir)
    data = read_own_data(args.task, args.images, args.annotations, share=args.val, out=folder / "data")
    print(f"data      {data.summary}", flush=True)
    choice = choose(args, data, folder)
    minutes = choice.steps * choice.cost.minutes
    print(
        f"chosen    {choice.size} pixels, {choice.precision}, {counted(choice.epochs, 'epochs')}: "
        f"{counted(choice.steps, 'steps')} of {60 * choice.cost.minutes:.2f} s, {minutes:.0f} min, which is measured "
        f"again during training\nconfig    {folder / CONFIG}",
        flush=True,
    )
    check(folder / CONFIG, args)
    if args.dry_run:
        print(f"train it  {shlex.join(['vitkit', 'train', str(folder / CONFIG)])}")
        return
    train(args, data, choice, folder)
    print(f"ended     after {(time.monotonic() - began) / 60:.0f} of {60 * args.hours:.0f} min")


def train(args: argparse.Namespace, data: OwnData, choice: Choice, folder: Path) -> None:
    """Train with the chosen settings, write the report, and print the results and possible next steps."""
    began = time.monotonic()
    try:
        choice, run = train_in_time(args, data, choice, folder)
    except KeyboardInterrupt:
        command = shlex.join(["vitkit", "test", str(folder / "run"), "--report", str(folder / "report.html")])
        sys.exit(f"interrupted; once the training has been resumed and has finished, this writes the report: {command}")
    config = load_config(folder / CONFIG)
    metric = config["train"]["best_metric"]
    trained = f"{counted(choice.epochs, 'epochs')}, {(time.monotonic() - began) / 60:.0f} min"
    evaluated = vitkit.test(run.path, device=args.device, trust=True)
    facts = {"model": str(run.path), "trained": trained}
    path = write_report(evaluated.evaluator, folder / "report.html", title=f"{args.task}: {args.images}", facts=facts)
    print(f"report    {path}")
    print(f"pictures  {run.path / 'predictions.png'}, {run.path / 'curves.png'}")
    best = max(values[metric] for values in run.history)
    print(f"reached   {metric} {best:.3f} on {counted(data.num_val, 'images')}")
    pictures = args.images if args.images.is_dir() else args.images.parent
    print(f"use it    {shlex.join(['vitkit', 'predict', str(run.path), '--input', str(pictures)])}")
    better = [str(word) for word in (args.images, args.annotations) if word is not None]
    command = ["vitkit", "start", *better, *args.overrides, "--task", args.task, "--hours", f"{4 * args.hours:g}"]
    print(f"better    {shlex.join(command)}")


def train_in_time(args: argparse.Namespace, data: OwnData, choice: Choice, folder: Path) -> tuple[Choice, Run]:
    """Train, with pauses in which the number of epochs is fitted to what a step takes; return the last choice, too."""
    how = dict(config=load_config(folder / CONFIG), run_dir=folder / "run")
    minutes, timed = 60 * args.hours * TRAINING_SHARE, {"minutes": 0.0, "step": 0}
    is_fixed = any(override.startswith("train.epochs=") for override in args.overrides)
    for share in () if is_fixed or choice.epochs < FEWEST_PACED_EPOCHS else PACE_SHARES:
        pause = EndAfter(minutes=max(1e-9, share * minutes - timed["minutes"]))
        run = vitkit.train(**how, device=args.device, hooks=[pause])
        now = read_log(run.path / LOG_NAME)[0][-1]
        if now["epoch"] >= choice.epochs:
            return choice, run
        pace = (now["minutes"] - timed["minutes"]) / (now["step"] - timed["step"])
        cost = replace(choice.cost, minutes=pace)
        epochs_left = max(1, int((minutes - now["minutes"]) / pace / cost.steps_per_epoch))
        choice = replace(choice, cost=cost, epochs=round(now["epoch"]) + epochs_left)
        write_config(folder / CONFIG, args, data, choice)
        print(f"paced     {60 * pace:.2f} s a step: {counted(choice.epochs, 'epochs')} in all", flush=True)
        paced = {key: load_config(folder / CONFIG)["train"][key] for key in ("epochs", "eval_every")}
        how, timed = dict(resume=run.path, train=paced), now
    return choice, vitkit.train(**how, device=args.device)


def free_folder(path: Path) -> Path:
    """Make the folder to write into, with a number after its name if a folder with contents is in the way."""
    candidates = (path if number == 1 else path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    folder = next(candidate for candidate in candidates if is_free(candidate))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def is_free(folder: Path) -> bool:
    """Whether there is nothing, or only an empty folder, such as a failed earlier start leaves behind."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def imagenet_weights(overrides: Sequence[str]) -> tuple[bool, str]:
    """Return whether the backbone starts from ImageNet weights, and why."""
    given = dict(override.split("=", 1) for override in overrides).get("model.backbone.pretrained", "true")
    if given.lower() == "false":
        return False, "random weights, as model.backbone.pretrained=false says"
    if given.lower() != "true":
        return True, f"weights of {given}"
    try:
        BACKBONES.build(dict(type="ResNet", depth=50, pretrained=True)).load_pretrained()
    except CheckpointError as error:
        print(f"weights   {error}")
        return False, "random weights: ImageNet's are not available. model.backbone.pretrained=FILE names them"
    return True, "ImageNet weights"


def choose(args: argparse.Namespace, data: OwnData, folder: Path) -> Choice:
    """Time a few steps of the smallest size in each precision, then of the largest that leaves time for enough steps.

    With time for few steps only, the backbone is frozen up to res3. The cost of a larger size is estimated as
    proportional to its pixels, a slight overestimate. The config of the choice is written into the folder.

    Raises:
        ConfigError: the time is too short for one epoch.
        TrainingError: training failed.
    """
    recipe, minutes = RECIPES[args.task], 60 * args.hours * TRAINING_SHARE
    pretrained, weights = imagenet_weights(args.overrides)

    def timed(choice: Choice) -> Choice:
        choice = replace(choice, epochs=1000, cost=None)
        write_config(folder / CONFIG, args, data, choice)
        command = ["vitkit", "train", str(folder / CONFIG), "--device", args.device]
        cost = time_steps(command, folder / "timing", minutes=60 * args.hours * TIMING_SHARE)
        settings = f"{choice.size} pixels, {choice.precision}{', frozen up to res3' * choice.freezes_res3}"
        print(f"timed     {settings}: {60 * cost.minutes:.2f} s a step", flush=True)
        epochs = int(minutes / cost.minutes / cost.steps_per_epoch)
        return replace(choice, cost=cost, epochs=epochs)

    sizes = [size for size in recipe.sizes if size <= data.short_side] or [recipe.sizes[0]]
    precisions = ("fp32", "bf16") if has_bfloat16(torch.device(args.device)) else ("fp32",)
    smallest = [timed(Choice(sizes[0], precision, weights, pretrained)) for precision in precisions]
    choice = min(smallest, key=lambda it: it.cost.minutes)
    if pretrained and choice.steps < recipe.freeze_below:
        choice = timed(replace(choice, freezes_res3=True))
    for size in reversed(sizes[1:]):
        share = (choice.size / size) ** 2
        if choice.steps * share >= recipe.num_steps and choice.epochs * share >= 1:
            larger = timed(replace(choice, size=size))
            choice = larger if larger.epochs >= 1 else choice
            break
    if choice.epochs < 1:
        hours = choice.cost.minutes * choice.cost.steps_per_epoch / 60 / TRAINING_SHARE
        raise ConfigError(
            f"--hours {args.hours:g}: too short for one epoch of {counted(data.num_train, 'images')}, which takes "
            f"{60 * hours * TRAINING_SHARE:.1f} min here. The least is --hours {hours + 0.005:.2f}."
        )
    write_config(folder / CONFIG, args, data, choice)
    return replace(choice, epochs=load_config(folder / CONFIG)["train"]["epochs"])  # an override may set them


def write_config(path: Path, args: argparse.Namespace, data: OwnData, choice: Choice) -> None:
    """Write the choices as a config, with the reason for each."""
    recipe = RECIPES[args.task]
    reason = "timing" if choice.cost is None else (
        f"{60 * choice.cost.minutes:.2f} s a step: {counted(choice.steps, 'steps')} in {TRAINING_SHARE:.0%} "
        f"of {args.hours:g} h; larger images wait for {counted(recipe.num_steps, 'steps')}"
    )  # fmt: skip
    if choice.freezes_res3:
        reason += f"; frozen up to res3, which halves a step's time, as there were fewer than {recipe.freeze_below}"
    frozen = ", frozen_stages=3" * choice.freezes_res3
    words = [str(word) for word in (args.images, args.annotations, *args.overrides) if word is not None]
    command = shlex.join(["vitkit", "start", *words, "--task", args.task, "--hours", f"{args.hours:g}"])
    lines = [
        comment(data.summary),
        comment(f"Written by: {command}"),
        comment(f"Evidence:   {recipe.evidence}"),
        "",
        *["from vitkit.config import with_overrides"] * bool(args.overrides),
        f"from vitkit.configs.start.{args.task} import config as base",
        "",
        "",
        "def config():",
        f"    {comment(choice.weights)}",
        f"    {comment(f'{choice.size} pixels: {reason}')}",
        f"    cfg = base(size={choice.size}, pretrained={choice.pretrained}{frozen})",
        textwrap.indent("\n".join(data.config_lines), "    "),
        f"    {comment(f'{choice.precision}: the faster one of float32 and bfloat16 here')}",
        f'    cfg["train"].update(epochs={choice.epochs}, precision="{choice.precision}")',
        f'    cfg["train"]["eval_every"] = {max(1, choice.epochs // NUM_EVALUATIONS)}',
    ]
    if args.overrides:
        lines += ["    # from the command line", f"    cfg = with_overrides(cfg, {args.overrides!r})"]
    path.write_text("\n".join([*lines, "    return cfg"]) + "\n", encoding="utf-8")


def comment(text: str) -> str:
    """Return a one-line comment; characters that could end the line are written as escape sequences."""
    return "# " + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def check(path: Path, args: argparse.Namespace) -> None:
    """Print the doctor's warnings and failures.

    Raises:
        DataError: a check fails, so that training would end with an error.
    """
    issues = diagnose(load_config(path), Options(device=torch.device(args.device)), checks=CHECKS)
    issues = [issue for issue in issues if issue.verdict in ("warn", "fail")]
    print(report(issues) if issues else "doctor    no issues")
    if any(issue.verdict == "fail" for issue in issues):
        raise DataError(f"the data cannot be trained on, see above; `vitkit doctor {path}` lists everything.")


if __name__ == "__main__":
    main()
