"""Train the model of a config on the config's data. For your own images, `vitkit start` writes a config.

Examples:
    vitkit train quickstart/dino    (on drawn shapes, in minutes)
    vitkit train detr_r50 data.root=data/coco train.epochs=50    (an installed config, with other values)
    vitkit train mask2former:backbone=swin_tiny,data=ade20k,task=panoptic    (a family's config, with its arguments)
    vitkit train dfine_s_coco --write-config my_config.py    (one complete file to copy and edit)
    vitkit train my_config.py --check    (whether the parts fit each other; trains nothing)
    vitkit train --resume runs/detr_r50
    torchrun --nproc-per-node 8 -m vitkit.tools.train detr_r50    (on 8 GPUs)

The run's folder gets the weights (best.pth, last.pth), curves.png, predictions.png of the last validation, the log
(console.txt, log.jsonl), config.json (with the data's absolute paths) and run.json (command, versions, git commit and
device of each start).

Ctrl-C (SIGINT) and SIGTERM, which Slurm sends, end the run after its step: it saves a checkpoint and prints the command
that resumes it. A second ctrl-C ends it at once. If torchrun --max-restarts restarts the command, or Slurm requeues it,
it resumes its run.

The exit status is 0 when the run is complete, 1 after an error, 130 after ctrl-C and 143 after SIGTERM.
"""

import argparse
import sys
from pathlib import Path

from vitkit.errors import VitkitError, error_line
from vitkit.tools.common import a_path, add_device, add_trust, errors_in_one_line, is_override, machine_error_line


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "config",
        nargs="?",
        help="a config: the name of an installed one (vitkit/configs), a file, or FAMILY:NAME=VALUE,... "
        "(not needed with --resume)",
    )
    parser.add_argument("overrides", nargs="*", default=[], help="key.sub=value, such as train.epochs=2")
    parser.add_argument(
        "--run-dir", type=a_path, help="folder of the run (default: runs/CONFIG_NAME, numbered if taken)"
    )
    parser.add_argument("--resume", type=a_path, metavar="FOLDER", help="resume the interrupted run in this folder")
    parser.add_argument(
        "--init",
        metavar="CHECKPOINT",
        help="start from the weights of a model or a file; classes that the data also has are kept, by name",
    )
    parser.add_argument(
        "--init-partial",
        metavar="CHECKPOINT",
        help="like --init, for a model that differs by a layer: take what fits, and print a table of it",
    )
    parser.add_argument(
        "--class-map",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="with --init: a class of the checkpoint that has another name in the data; several may become one",
    )
    parser.add_argument("--verbose", action="store_true", help="print all loss terms and metrics, as in console.txt")
    add_trust(parser)
    add_device(parser)
    parser.add_argument("--print-config", action="store_true", help="print every value and where it was set, and stop")
    text = "write the config, complete, as a Python file to edit, and stop; an existing file is not replaced"
    parser.add_argument("--write-config", type=a_path, metavar="FILE", help=text)
    text = "build everything, evaluate one batch, and stop: nothing is trained or written"
    parser.add_argument("--check", action="store_true", help=text)
    args, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; values of the config are KEY=VALUE: train.epochs=2")
    if args.resume and is_override(args.config):
        args.config, args.overrides = None, [args.config, *args.overrides]
    if not args.config and not args.resume:
        parser.error("a config is needed, such as quickstart/dino")
    if args.resume and (args.init or args.init_partial or args.run_dir):
        parser.error("--resume continues a run in its own folder: it takes neither --init nor --run-dir")
    if args.init and args.init_partial:
        parser.error("--init and --init-partial are both weights to start from: give one")
    if args.class_map and not (args.init or args.init_partial):
        parser.error("--class-map names classes of weights to start from: give --init too")
    if wrong := [pair for pair in args.class_map if not all(pair.partition("="))]:
        parser.error(f"--class-map {wrong[0]}: expected OLD=NEW, such as automobile=car")
    args.class_map = dict(pair.split("=", 1) for pair in args.class_map)
    if args.check and args.resume:
        parser.error("--check is for new runs: give a config")
    return args


def main(argv: list[str] | None = None) -> None:
    """Train as the command line says; errors that a user can cause end the program with one line."""
    args = parse_args(argv)
    from vitkit import load_config
    from vitkit.apps.training.config_listing import format_config
    from vitkit.apps.training.config_writing import write_config
    from vitkit.apps.training.process_group import close_distributed, has_lost_peer, init_distributed, report_failure
    from vitkit.distributed import rank

    try:
        if args.resume:
            from vitkit.apps.training.api import check_resumable
            from vitkit.weights.locate import RUN_CONFIG

            check_resumable(args.resume)
        config = load_config(args.config or args.resume / RUN_CONFIG, args.overrides, trust=args.trust)
        if args.write_config:
            write_config(config, args.write_config)
            print(f"wrote {args.write_config}: train it by `vitkit train {args.write_config}`")
            return
        if args.print_config:
            with errors_in_one_line():
                print(format_config(config))
            return
        # What trains takes seconds to import, for which nobody should wait to be told of a wrong name.
        from vitkit.apps.training.api import FIGURES, find_start
        from vitkit.apps.training.checking import DataWarnings, check_training
        from vitkit.engine.trainer import run_training
        from vitkit.logging import setup_logging

        device = init_distributed(args.device)
        setup_logging(verbose=args.verbose)
        partial = args.init_partial is not None
        init = find_start(args.init or args.init_partial, partial=partial, class_map=args.class_map)
        if args.check:
            check_training(config, device, init=init)
            return
        run_training(
            config,
            device,
            default=Path("runs") / config.name,
            run_dir=args.run_dir,
            resume=args.resume,
            init=init,
            trust=args.trust,
            hooks=[DataWarnings()],
            **FIGURES,
        )
    except VitkitError as error:
        report_failure(error)
        sys.exit(error_line(error))
    except Exception as error:  # torchrun shows the error; it is raised again unless one line explains it
        if not has_lost_peer(error):
            report_failure(error)
        from vitkit.data.loading.loader import lost_worker

        if lost_worker(error):
            sys.exit(
                f"error (rank {rank()}): a loading process was killed ({str(error).strip()}), as systems do when "
                "memory runs out. Use fewer data.num_workers, a smaller data.images_per_gpu or, in a container, more "
                "shared memory. Resume the run with --resume."
            )
        if line := machine_error_line(error):
            sys.exit(line)
        raise
    finally:
        close_distributed()


if __name__ == "__main__":
    main()
