"""Train a model.

Examples:
    python tools/train.py configs/quickstart/detr.py
    python tools/train.py configs/detr_r50.py data.root=data/coco train.epochs=50
    torchrun --nproc-per-node 8 tools/train.py configs/detr_r50.py
    python tools/train.py --resume runs/detr_r50
"""

import argparse
import json
import logging
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitkit import build_dataset, build_model, load_config, load_weights
from vitkit.config import Config, cfg_diff, format_config, save_config
from vitkit.data.loader import DataSettings, check_same_classes
from vitkit.data.mixing import TransformedLoader
from vitkit.distributed import (
    broadcast_object,
    close_distributed,
    first_rank_first,
    init_distributed,
    is_main,
    rank,
    world_size,
)
from vitkit.engine.evaluate import evaluate
from vitkit.engine.settings import TrainSettings, require
from vitkit.engine.train import LAST_NAME, train
from vitkit.errors import ConfigError, DataError, VitkitError, error_line
from vitkit.logging import LOG_NAME, setup_logging
from vitkit.nn.layers import enable_activation_checkpointing
from vitkit.registry import CRITERIA, EVALUATORS, OPTIMIZERS, SCHEDULES
from vitkit.structures import Batch
from vitkit.visualization.boxes import prediction_sheet
from vitkit.visualization.classification import classification_sheet
from vitkit.visualization.curves import plot_training
from vitkit.visualization.masks import instance_sheet, panoptic_sheet, semantic_sheet

CONFIG_NAME = "config.json"
SHEET_IMAGES = 8
SHEETS = {
    "panoptic": panoptic_sheet,
    "semantic": semantic_sheet,
    "masks": instance_sheet,
    "boxes_xyxy": prediction_sheet,
    "class_scores": classification_sheet,
}
"""A field of predictions -> what draws a sheet of them; the first field that is there decides."""
logger = logging.getLogger("vitkit")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="a config file (not needed with --resume)")
    parser.add_argument("overrides", nargs="*", help="key.sub=value, such as train.epochs=2")
    parser.add_argument("--run-dir", type=Path, help="where to write (default: runs/CONFIG_NAME, numbered if taken)")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with the stopped run in this folder")
    parser.add_argument("--init", metavar="CHECKPOINT", help="start from these weights; other classes get a new head")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--print-config", action="store_true", help="print every value and where it is from, and stop")
    args = parser.parse_intermixed_args(argv)
    if args.resume and args.config and "=" in args.config:
        args.config, args.overrides = None, [args.config, *args.overrides]
    if not args.config and not args.resume:
        parser.error("a config file is needed, such as configs/quickstart/detr.py")
    if args.resume and (args.init or args.run_dir):
        parser.error("--resume goes on with a run in its own folder: it takes neither --init nor --run-dir")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: PyTorch finds no GPU here")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        if args.resume:
            check_resumable(args.resume)
        config = load_config(args.config or args.resume / CONFIG_NAME, args.overrides)
        if args.print_config:
            print(format_config(config))
            return
        device = init_distributed(args.device)
        setup_logging()
        run(config, args, device)
    except VitkitError as error:
        sys.exit(error_line(error))
    finally:
        close_distributed()


def run(config: Config, args: argparse.Namespace, device: torch.device) -> None:
    """Builds everything the config names, trains, and draws what came out."""
    require(
        config, "model", "criterion", "data.train", "data.val", "optimizer", "schedule", "evaluator", "train.epochs"
    )
    settings = TrainSettings(**config["train"])
    data = DataSettings(**config["data"])
    seed_everything(settings.seed + rank())
    run_dir = args.resume or broadcast_object(new_run_dir(args) if is_main() else None)
    if args.resume:
        report_changes(run_dir / CONFIG_NAME, config)

    train_set = build_dataset(data.train, data.root, where="data.train")
    val_set = build_dataset(data.val, data.root, where="data.val")
    check_same_classes(train_set, val_set)
    if getattr(train_set, "num_objects", None) == 0:
        raise DataError("data.train: none of its images has a usable object, so there is nothing to learn.")
    train_loader = data.train_loader(train_set, settings.seed)
    if getattr(train_set, "batch_transforms", None):
        train_loader = TransformedLoader(train_loader, train_set.batch_transforms, device)
    val_loader = data.val_loader(val_set)

    model = build_model(config["model"], classes=train_set.classes, things=getattr(train_set, "things", None))
    with first_rank_first():
        if args.init:
            logger.info(load_weights(model, args.init, classes=train_set.classes, new_class_head=True))
        elif not args.resume and hasattr(model, "load_pretrained"):
            source = model.load_pretrained()
            logger.info("backbone: %s", f"weights from {source}" if source else "random weights")
    model = prepare(model, settings).to(device)
    criterion = CRITERIA.build(config["criterion"]).to(device)
    optimizer = OPTIMIZERS.build(config["optimizer"], model=model)
    steps_per_epoch = -(-len(train_loader) // settings.accumulate)
    schedule = SCHEDULES.build(
        config["schedule"], optimizer=optimizer, steps_per_epoch=steps_per_epoch, epochs=settings.epochs
    )
    warn_about_batch_size(settings, data.images_per_gpu * settings.accumulate * world_size())

    if is_main():
        run_dir.mkdir(parents=True, exist_ok=True)
        num_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        say(
            f"run {run_dir}  {len(train_set)} training and {len(val_set)} validation images, "
            f"{len(train_set.classes)} classes  {num_parameters / 1e6:.1f} M trainable parameters  "
            f"{world_size()} x {device.type}, {settings.precision}"
        )

    def keep_config() -> None:
        # Not earlier: a config that the checkpoint does not fit would replace the one that it does.
        if is_main():
            save_config(config, run_dir / CONFIG_NAME)

    def validate(evaluated: nn.Module) -> dict[str, float]:
        evaluator = EVALUATORS.build(config["evaluator"], dataset=val_set)
        drawn: list = []

        def keep_first(predictions: list, batch: Batch) -> None:
            if len(drawn) < SHEET_IMAGES:
                drawn.extend(zip(predictions, batch.targets))

        metrics = evaluate(
            evaluated, val_loader, evaluator, device=device, precision=settings.precision, criterion=criterion,
            on_batch=keep_first, progress=say if is_main() else None,
        )  # fmt: skip
        if is_main():
            say(evaluator.table())
            draw_sheet(drawn[:SHEET_IMAGES], val_set, run_dir / "predictions.png")
        return metrics

    train(
        model, criterion, train_loader, optimizer=optimizer, schedule=schedule, settings=settings, device=device,
        run_dir=run_dir, evaluate=validate, resume=run_dir / LAST_NAME if args.resume else None, on_start=keep_config,
        saved_with={
            "config": json.dumps(config), "classes": train_set.classes, "category_ids": train_set.category_ids,
        },
    )  # fmt: skip
    if is_main():
        plot_training(run_dir / LOG_NAME, run_dir / "curves.png")
        say(f"done: {', '.join(sorted(path.name for path in run_dir.iterdir() if path.is_file()))} are in {run_dir}")


def say(line: str) -> None:
    print(line, flush=True)


def draw_sheet(drawn: list[tuple[dict, dict]], dataset: Any, path: Path) -> None:
    """The first images' predictions beside their ground truth, where there is a sheet for such predictions."""
    draw = next((sheet for field, sheet in SHEETS.items() if field in drawn[0][0]), None)
    if draw is None:
        return
    position = {image_id: index for index, image_id in enumerate(dataset.image_ids)}
    rows = []
    for prediction, target in drawn:
        image = dataset.load_image(position[target["image_id"]])
        on_cpu = {k: value.cpu() if isinstance(value, torch.Tensor) else value for k, value in prediction.items()}
        rows.append((image, on_cpu, target))
    draw(rows, dataset.classes, path)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def new_run_dir(args: argparse.Namespace) -> Path:
    """The folder asked for, or runs/CONFIG_NAME with the first free number."""
    if args.run_dir:
        if args.run_dir.exists() and not args.run_dir.is_dir():
            raise ConfigError(f"--run-dir {args.run_dir}: is a file; expected a folder, or a name that is free.")
        if (args.run_dir / LOG_NAME).exists():
            raise ConfigError(
                f"--run-dir {args.run_dir}: holds a run already. Go on with it by --resume {args.run_dir}, "
                "or choose another folder."
            )
        return args.run_dir
    base = Path("runs") / Path(args.config).stem
    number = 1
    folder = base
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder


def check_resumable(folder: Path) -> None:
    for name in (CONFIG_NAME, LAST_NAME):
        if not (folder / name).is_file():
            raise ConfigError(
                f"--resume {folder}: holds no run to go on with (no {name}). Give a run's folder; a run that was "
                "stopped before its first checkpoint is started anew, without --resume."
            )


def report_changes(saved: Path, config: Config) -> None:
    changed = cfg_diff(load_config(saved), config)
    fixed = [key for key in changed if key.split(".")[0] in ("optimizer", "schedule")]
    if fixed:
        # Their saved states hold these values, so that a change would be without effect.
        raise ConfigError(
            f"--resume {saved.parent}: {', '.join(fixed)} cannot change while a run goes on. To train on with other "
            f"values start a new run from its weights: --init {saved.parent / LAST_NAME}."
        )
    for key in changed:
        logger.warning("resuming with a changed %s", key)


def prepare(model: nn.Module, settings: TrainSettings) -> nn.Module:
    if settings.activation_checkpointing:
        enable_activation_checkpointing(model)
    if settings.channels_last:
        model = model.to(memory_format=torch.channels_last)
    return model


def warn_about_batch_size(settings: TrainSettings, images_per_step: int) -> None:
    reference = settings.reference_batch_size
    if reference is not None and reference != images_per_step:
        factor = images_per_step / reference
        logger.warning(
            "optimizer.lr is declared for %d images per step, this run has %d: multiply optimizer.lr (and "
            "backbone_lr) by about %.3g, or set train.accumulate so that the product fits.",
            reference, images_per_step, factor,
        )  # fmt: skip


if __name__ == "__main__":
    main()
