"""Check a config's data and settings before hours are spent on a run.

Every line has a verdict: ok; note, worth knowing; warn, probably not intended; fail, training would end with an error,
or could not learn its task. The exit status is 1 if anything fails (with --strict, also at a warning), otherwise 0.

Examples:
    python tools/doctor.py configs/bccd/detr.py data.root=data/bccd
    python tools/doctor.py configs/detr_r50.py data.root=data/coco --gpus 8 --memory 24 --skip overfit
    python tools/doctor.py configs/detr_r50.py --init detr_r50 data.train.annotations=own.json --json > report.json
    python tools/doctor.py configs/quickstart/detr.py --only queries learning_rate step_budget
"""

import argparse
import dataclasses
import json
import logging
import sys

import torch

from vitkit import load_config
from vitkit.doctor import CHECKS, Issue, Options, diagnose, report
from vitkit.engine.settings import require
from vitkit.tools.common import add_device, add_trust, errors_in_one_line


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="checks:\n"
        + "\n".join(f"  {name:<22}{(check.__doc__ or '').split(chr(10))[0]}" for name, check in CHECKS.items()),
    )
    parser.add_argument("config", help="a config: a file, or the name of an installed one")
    parser.add_argument("overrides", nargs="*", help="key.sub=value, such as data.root=data/coco")
    parser.add_argument("--init", metavar="CHECKPOINT", help="the weights that the run will start from")
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="number of processes that will train (default: 1)"
    )
    parser.add_argument(
        "--memory", type=float, metavar="GIB", help="memory of the device that will train (default: that of this one)"
    )
    parser.add_argument(
        "--images", type=int, default=1000, metavar="N", help="images to load of each dataset (default: 1000)"
    )
    parser.add_argument(
        "--overfit-steps", type=int, default=200, metavar="N", help="step limit of the overfit check (default: 200)"
    )
    parser.add_argument(
        "--overfit-seconds",
        type=float,
        default=120.0,
        metavar="S",
        help="time limit of the overfit check (default: 120)",
    )
    parser.add_argument("--only", nargs="+", metavar="CHECK", choices=CHECKS, help="run only these checks")
    parser.add_argument("--skip", nargs="+", metavar="CHECK", choices=CHECKS, default=[], help="skip these checks")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 also at a warning")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_trust(parser)
    add_device(parser)
    args = parser.parse_intermixed_args(argv)
    if min(args.gpus, args.images, args.overfit_steps) < 1 or (args.memory is not None and args.memory <= 0):
        parser.error("--gpus, --images and --overfit-steps are at least 1, --memory above 0")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    # The issues repeat what datasets log while they are built.
    logging.getLogger("vitkit").setLevel(logging.ERROR)
    with errors_in_one_line():
        config = load_config(args.config, args.overrides, trust=args.trust)
        require(config, "data")
        options = Options(
            device=torch.device(args.device),
            gpus=args.gpus,
            memory_gib=args.memory,
            init=args.init,
            max_images=args.images,
            overfit_steps=args.overfit_steps,
            overfit_seconds=args.overfit_seconds,
        )
        checks = [name for name in args.only or CHECKS if name not in args.skip]
        issues = list(diagnose(config, options, checks=checks))
    print(as_json(args.config, issues) if args.json else f"{args.config}\n\n{report(issues)}")
    bad = {"fail", "warn"} if args.strict else {"fail"}
    return int(any(issue.verdict in bad for issue in issues))


def as_json(config: str, issues: list[Issue]) -> str:
    """Format the issues of a config as JSON."""
    return json.dumps({"config": config, "issues": [dataclasses.asdict(issue) for issue in issues]}, indent=2)


if __name__ == "__main__":
    sys.exit(main())
