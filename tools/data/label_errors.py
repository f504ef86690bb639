"""Find labels that a detector contradicts: missing and superfluous boxes, wrong classes, badly placed boxes.

OUT.html    a page to review them, the most likely errors first, which exports the accepted corrections
OUT.json    all of them as corrections, which vitkit data convert SOURCE --images DIR --fix OUT.json applies

A model that was trained on the labels has learned some of their errors: judge each part of the data by a model that was
trained on the others.

Examples:
    vitkit data label-errors runs/detr
    vitkit data label-errors runs/detr --split train --max-labels 500 --out suspicious.html
    vitkit data label-errors configs/bccd/dino_r18.py --eval-only results.json
"""

import argparse
from collections import Counter

from vitkit.text_format import pluralize
from vitkit.tools.common import (
    a_path,
    add_device,
    add_model,
    add_trust,
    check_out,
    errors_in_one_line,
    new_file,
    positive,
    sort_model,
)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument(
        "--split", choices=("train", "val", "test"), default="val", help="split whose labels are checked (default: val)"
    )
    text = "score these predictions, which vitkit test has written, instead of running a model"
    parser.add_argument("--eval-only", type=a_path, metavar="RESULTS", help=text)
    text = "maximum number of labels to list (default: 200)"
    parser.add_argument("--max-labels", type=positive, default=200, metavar="N", help=text)
    parser.add_argument("--out", type=a_path, help="the page to write (default: label_errors.html in the run's folder)")
    add_trust(parser)
    add_device(parser)
    args = parser.parse_intermixed_args(argv)
    sort_model(args)
    args.out = args.out or new_file("label_errors.html", args.model)
    if args.out.suffix != ".html":
        parser.error(f"--out {args.out}: expected a name that ends in .html")
    if args.eval_only and args.eval_only.resolve() == args.out.with_suffix(".json").resolve():
        parser.error(f"--out {args.out}: the corrections would replace {args.eval_only}; choose another name")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    from vitkit.apps.starter.label_errors import check_labels
    from vitkit.apps.training.process_group import close_distributed, init_distributed
    from vitkit.logging import setup_logging

    try:
        with errors_in_one_line():
            check_out("--out", args.out)
            device = init_distributed(args.device)
            setup_logging()
            checked = check_labels(
                args.model,
                args.weights,
                args.out,
                split=args.split,
                results=args.eval_only,
                max_labels=args.max_labels,
                overrides=args.overrides,
                device=device,
                trust=args.trust,
            )
            if checked is None:
                return
            for note in checked.notes:
                print(note)
            counts = Counter(error.kind for error in checked.errors)
            kinds = ", ".join(f"{n} {kind}" for kind, n in counts.most_common()) or "none"
            print(f"{pluralize(len(checked.errors), 'suspicious labels')}: {kinds}")
            print(f"{args.out} shows them; {checked.corrections} has their corrections, for vitkit data convert --fix")
    finally:
        close_distributed()


if __name__ == "__main__":
    main()
