"""Check a config's data and settings before hours are spent on a run.

Each line has a verdict:
    ok
    note    worth knowing
    warn    probably not intended
    fail    training would end with an error, or could not learn its task
The exit status is 1 if anything fails (with --strict, also after a warning), otherwise 0.

Examples:
    vitkit doctor configs/bccd/detr.py data.root=data/bccd
    vitkit doctor configs/detr_r50.py data.root=data/coco --gpus 8 --memory 24 --skip overfit
    vitkit doctor configs/detr_r50.py --init detr_r50 data.train.annotations=own.json --json > report.json
    vitkit doctor configs/quickstart/detr.py --only queries learning_rate step_budget
    vitkit doctor --list           (the checks)
    vitkit doctor --environment    (versions, devices and processor features, for a bug report)
"""

import argparse
import dataclasses
import json
import logging
import sys

from vitkit.tools.common import add_device, add_trust, errors_in_one_line, positive


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="a config: a file, or the name of an installed one")
    parser.add_argument("overrides", nargs="*", default=[], help="key.sub=value, such as data.root=data/coco")
    parser.add_argument("--init", metavar="CHECKPOINT", help="the weights that the run will start from")
    text = "number of processes that will train (default: 1)"
    parser.add_argument("--gpus", type=positive, default=1, metavar="N", help=text)
    text = "memory of the device that will train (default: that of this machine's device)"
    parser.add_argument("--memory", type=float, metavar="GIB", help=text)
    text = "maximum number of images to load of each dataset (default: 1000)"
    parser.add_argument("--max-images", type=positive, default=1000, metavar="N", help=text)
    text = "step limit of the overfit check (default: 200)"
    parser.add_argument("--overfit-steps", type=positive, default=200, metavar="N", help=text)
    text = "time limit of the overfit check (default: 120)"
    parser.add_argument("--overfit-seconds", type=float, default=120.0, metavar="S", help=text)
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="run only these checks")
    parser.add_argument("--skip", nargs="+", metavar="CHECK", default=[], help="skip these checks")
    parser.add_argument("--list", action="store_true", help="print the checks, and stop")
    text = "print versions, devices and processor features, and stop"
    parser.add_argument("--environment", action="store_true", help=text)
    parser.add_argument("--strict", action="store_true", help="exit with status 1 also after a warning")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_trust(parser)
    add_device(parser)
    args = parser.parse_intermixed_args(argv)
    if args.config is None and not (args.list or args.environment):
        parser.error("a config is needed, such as quickstart/dino")
    if args.memory is not None and args.memory <= 0:
        parser.error("--memory is above 0")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    from vitkit.apps.doctor import CHECKS, diagnose, report
    from vitkit.logging import setup_logging

    if args.list:
        print("\n".join(f"{name:<22}{(check.__doc__ or '').splitlines()[0]}" for name, check in CHECKS.items()))
        return 0
    if args.environment:
        from vitkit.apps.doctor.environment import describe_environment

        print(describe_environment())
        return 0
    setup_logging()
    # The issues repeat what datasets log while they are built. The progress of the checks goes to standard error.
    logging.getLogger("vitkit").setLevel(logging.ERROR)
    logging.getLogger("vitkit.apps.doctor").setLevel(logging.INFO)
    with errors_in_one_line():
        issues = diagnose(
            args.config,
            overrides=args.overrides,
            init=args.init,
            gpus=args.gpus,
            memory_gib=args.memory,
            max_images=args.max_images,
            overfit_steps=args.overfit_steps,
            overfit_seconds=args.overfit_seconds,
            only=args.only,
            skip=args.skip,
            device=args.device,
            trust=args.trust,
        )
    if args.json:
        content = {"config": args.config, "issues": [dataclasses.asdict(issue) for issue in issues]}
        print(json.dumps(content, indent=2))
    else:
        print(f"{args.config}\n\n{report(issues)}")
    bad = {"fail", "warn"} if args.strict else {"fail"}
    return int(any(issue.verdict in bad for issue in issues))


if __name__ == "__main__":
    sys.exit(main())
