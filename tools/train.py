"""Train a model.

Examples:
    python tools/train.py configs/quickstart/detr.py
    python tools/train.py configs/detr_r50.py data.root=data/coco train.epochs=50
    torchrun --nproc-per-node 8 tools/train.py configs/detr_r50.py
    python tools/train.py --resume runs/detr_r50

SIGTERM (which Slurm sends) and SIGINT (ctrl-C) end the run after its step, with a checkpoint and the command that goes
on with it; the exit status is 143 or 130 then, 0 when the run is complete and 1 after an error. A second ctrl-C ends it
at once. Restarted by torchrun --max-restarts, or requeued by Slurm, the same command goes on with its run by itself.
"""

import argparse
import json
import logging
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitkit import build_dataset, build_model, load_config, load_weights
from vitkit.checkpoint import read_checkpoint
from vitkit.config import Config, format_config, save_config
from vitkit.data.loader import DataSettings, check_same_classes, lost_worker
from vitkit.data.mixing import TransformedLoader
from vitkit.distributed import (
    broadcast_object,
    close_distributed,
    first_rank_first,
    gather_objects,
    init_distributed,
    is_main,
    lost_peer,
    rank,
    report_failure,
    world_size,
)
from vitkit.engine.checkpoints import LAST_NAME, newest_checkpoint
from vitkit.engine.evaluate import evaluate
from vitkit.engine.parallel import shard
from vitkit.engine.resuming import (
    Launch,
    launch_of_process,
    mark_launch,
    report_changes,
    restarted_run,
    resume_command,
)
from vitkit.engine.settings import TrainSettings, require
from vitkit.engine.stopping import Stopped
from vitkit.engine.train import train
from vitkit.errors import ConfigError, DataError, VitkitError, error_line
from vitkit.logging import LOG_NAME, setup_logging
from vitkit.nn.layers import enable_activation_checkpointing
from vitkit.registry import CRITERIA, EVALUATORS, OPTIMIZERS, SCHEDULES
from vitkit.structures import Batch
from vitkit.visualization.boxes import prediction_sheet
from vitkit.visualization.captions import caption_sheet
from vitkit.visualization.classification import classification_sheet
from vitkit.visualization.curves import plot_training
from vitkit.visualization.masks import instance_sheet, panoptic_sheet, semantic_sheet
from vitkit.vocabulary import Vocabulary, set_vocabularies, vocabularies_from_json, vocabularies_of

CONFIG_NAME = "config.json"
SHEET_IMAGES = 8
SHEETS = {
    "panoptic": panoptic_sheet,
    "semantic": semantic_sheet,
    "masks": instance_sheet,
    "boxes_xyxy": prediction_sheet,
    "class_scores": classification_sheet,
    "text": caption_sheet,
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
        report_failure(error)
        sys.exit(error_line(error))
    except Exception as error:
        if lost_peer(error):
            sys.exit(f"error (rank {rank()}): another rank has ended, and this one with it; see that one's error.")
        report_failure(error)
        if lost_worker(error):
            sys.exit(
                f"error (rank {rank()}): a loading process was killed ({str(error).strip()}), as systems do when "
                "memory runs out. Use fewer data.num_workers, a smaller data.images_per_gpu or, in a container, more "
                "shared memory. The run goes on by --resume."
            )
        raise
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
    launches = gather_objects(launch_of_process())
    run_dir, checkpoint = broadcast_object(place_of_run(args, launches) if is_main() else None)
    if checkpoint:
        report_changes(run_dir, load_config(run_dir / CONFIG_NAME), config)

    train_set = build_dataset(data.train, data.root, where="data.train")
    val_set = build_dataset(data.val, data.root, where="data.val")
    vocabularies = share_vocabularies(train_set, val_set, checkpoint or args.init)
    classes = getattr(train_set, "classes", None)
    if classes is not None:
        check_same_classes(train_set, val_set)
    if getattr(train_set, "num_objects", None) == 0:
        raise DataError("data.train: none of its images has a usable object, so there is nothing to learn.")
    train_loader = data.train_loader(train_set, settings.seed)
    if getattr(train_set, "batch_transforms", None):
        train_loader = TransformedLoader(train_loader, train_set.batch_transforms, device)
    val_loader = data.val_loader(val_set)

    model = build_model(
        config["model"], classes=classes, things=getattr(train_set, "things", None), vocabularies=vocabularies
    )
    with first_rank_first():
        if args.init and not checkpoint:
            logger.info(load_weights(model, args.init, classes=classes, new_class_head=True))
        elif not checkpoint and hasattr(model, "load_pretrained"):
            source = model.load_pretrained()
            logger.info("backbone: %s", f"weights from {source}" if source else "random weights")
    model = prepare(model, settings).to(device)
    if settings.strategy == "fsdp":
        model = shard(model, device)
    criterion = CRITERIA.build(config["criterion"]).to(device)
    optimizer = OPTIMIZERS.build(config["optimizer"], model=model)
    steps_per_epoch = -(-len(train_loader) // settings.accumulate)
    schedule = SCHEDULES.build(
        config["schedule"], optimizer=optimizer, steps_per_epoch=steps_per_epoch, epochs=settings.epochs
    )
    warn_about_batch_size(settings, data.batch_size_per_gpu * settings.accumulate * world_size())

    if is_main():
        run_dir.mkdir(parents=True, exist_ok=True)
        mark_launch(run_dir, launches)
        num_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        say(
            f"run {run_dir}  {len(train_set)} training and {len(val_set)} validation "
            f"{getattr(train_set, 'noun', 'images')}, {size_of_task(classes, vocabularies)}  "
            f"{num_parameters / 1e6:.1f} M trainable parameters  {world_size()} x {device.type}, {settings.precision}"
        )

    def keep_config() -> None:
        # Not earlier: a config that the checkpoint does not fit would replace the one that it does.
        if is_main():
            save_config(config, run_dir / f"{CONFIG_NAME}.tmp")
            (run_dir / f"{CONFIG_NAME}.tmp").replace(run_dir / CONFIG_NAME)

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

    try:
        train(
            model, criterion, train_loader, optimizer=optimizer, schedule=schedule, settings=settings, device=device,
            run_dir=run_dir, evaluate=validate, resume=checkpoint, on_start=keep_config,
            saved_with={"config": json.dumps(config), **known_to(train_set, vocabularies)},
        )  # fmt: skip
    except Stopped as stopped:
        if is_main():
            device_type = [] if device.type == "cuda" else ["--device", device.type]
            say(f"{stopped.signal.name}: saved. Go on with:\n    {resume_command(run_dir, *device_type)}")
        raise
    if is_main():
        plot_training(run_dir / LOG_NAME, run_dir / "curves.png")
        written = sorted(path.name for path in run_dir.glob("[!.]*") if path.is_file())
        say(f"done: {', '.join(written)} are in {run_dir}")


def say(line: str) -> None:
    print(line, flush=True)


def draw_sheet(drawn: list[tuple[dict, dict]], dataset: Any, path: Path) -> None:
    """The first images' predictions beside their ground truth, where there is a sheet for such predictions."""
    draw = next((sheet for field, sheet in SHEETS.items() if field in drawn[0][0]), None)
    if draw is None or not hasattr(dataset, "image_ids"):
        return
    position = {image_id: index for index, image_id in enumerate(dataset.image_ids)}
    rows = []
    for prediction, target in drawn:
        image = dataset.load_image(position[target["image_id"]])
        on_cpu = {k: value.cpu() if isinstance(value, torch.Tensor) else value for k, value in prediction.items()}
        rows.append((image, on_cpu, target))
    draw(rows, getattr(dataset, "classes", ()), path)


def share_vocabularies(train_set: Any, val_set: Any, checkpoint: str | Path | None) -> dict[str, Vocabulary]:
    """Lets datasets of text encode with the vocabularies of the checkpoint that the weights are from, or with those
    that the first rank makes of the training text; other datasets have none."""
    if not hasattr(type(train_set), "target_vocabulary"):
        return {}
    saved = None
    if is_main():
        if checkpoint and Path(checkpoint).is_file():
            saved = read_checkpoint(checkpoint).get("vocabularies")
        saved = saved or {side: vocabulary.to_json() for side, vocabulary in vocabularies_of(train_set).items()}
    vocabularies = vocabularies_from_json(broadcast_object(saved))
    for dataset in (train_set, val_set):
        set_vocabularies(dataset, vocabularies)
    return vocabularies


def size_of_task(classes: Sequence[str] | None, vocabularies: Mapping[str, Vocabulary]) -> str:
    sizes = [f"{len(vocabulary)} {side} tokens" for side, vocabulary in vocabularies.items()]
    return ", ".join(sizes) if classes is None else f"{len(classes)} classes"


def known_to(train_set: Any, vocabularies: Mapping[str, Vocabulary]) -> dict[str, Any]:
    """What a checkpoint must say of the data for the model to be used without it."""
    names = ("classes", "category_ids", "things")
    known = {name: getattr(train_set, name) for name in names if hasattr(train_set, name)}
    if vocabularies:
        known["vocabularies"] = {side: vocabulary.to_json() for side, vocabulary in vocabularies.items()}
    return known


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def place_of_run(args: argparse.Namespace, launches: Sequence[Launch]) -> tuple[Path, Path | None]:
    """The run's folder, and the checkpoint to go on from; None starts anew."""
    if args.resume:
        checkpoint = newest_checkpoint(args.resume)
        if checkpoint is None:
            raise ConfigError(f"--resume {args.resume}: none of its checkpoints can be read.")
        return args.resume, checkpoint
    folder = restarted_run(launches, run_dir=args.run_dir, base=default_run_dir(args))
    if folder is not None and (folder / CONFIG_NAME).is_file():
        return folder, newest_checkpoint(folder)
    return new_run_dir(args), None


def default_run_dir(args: argparse.Namespace) -> Path:
    return Path("runs") / Path(args.config).stem


def new_run_dir(args: argparse.Namespace) -> Path:
    """The folder asked for, or runs/CONFIG_NAME with the first free number."""
    if args.run_dir:
        if args.run_dir.exists() and not args.run_dir.is_dir():
            raise ConfigError(f"--run-dir {args.run_dir}: is a file; expected a folder, or a name that is free.")
        if (args.run_dir / LOG_NAME).exists():
            remedy = f"Go on with it by --resume {args.run_dir}, or choose another folder."
            if newest_checkpoint(args.run_dir) is None:
                remedy = "It has no checkpoint yet. Unless it is still training, remove it, or choose another folder."
            raise ConfigError(f"--run-dir {args.run_dir}: holds a run already. {remedy}")
        return args.run_dir
    number = 1
    folder = base = default_run_dir(args)
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder


def check_resumable(folder: Path) -> None:
    lacking = [] if (folder / CONFIG_NAME).is_file() else [CONFIG_NAME]
    lacking += [] if (folder / LAST_NAME).is_file() or any(folder.glob("step_*.pth")) else [LAST_NAME]
    if lacking:
        raise ConfigError(
            f"--resume {folder}: holds no run to go on with (no {lacking[0]}). Give a run's folder; a run that was "
            "stopped before its first checkpoint is started anew, without --resume."
        )


def prepare(model: nn.Module, settings: TrainSettings) -> nn.Module:
    if settings.activation_checkpointing:
        enable_activation_checkpointing(model)
    if settings.channels_last:
        model = model.to(memory_format=torch.channels_last)
    return model


def warn_about_batch_size(settings: TrainSettings, size_per_step: int) -> None:
    reference = settings.reference_batch_size
    if reference is not None and reference != size_per_step:
        factor = size_per_step / reference
        logger.warning(
            "optimizer.lr is declared for %d images (of text: tokens) per step, this run has %d: multiply "
            "optimizer.lr (and backbone_lr) by about %.3g, or set train.accumulate so that the product fits.",
            reference, size_per_step, factor,
        )  # fmt: skip


if __name__ == "__main__":
    main()
