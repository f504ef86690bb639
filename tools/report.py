"""Write the report of a results file as one HTML page: metrics with intervals, curves, errors, images.

Results with boxes or masks need their annotations in COCO's format; results with classes or texts need nothing else.
For other tasks, and to use a config's settings, use `tools/test.py CONFIG --eval-only RESULTS --report HTML`.

Examples:
    python tools/report.py results.json --annotations instances_val.json --images val2017
    python tools/report.py results.json --out report.html
"""

import argparse
from pathlib import Path

from vitkit.tools.common import add_iou, check_out, errors_in_one_line, new_file


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the results file that tools/test.py wrote")
    parser.add_argument(
        "--annotations", type=Path, metavar="FILE", help="annotations of boxes or masks in COCO's format"
    )
    parser.add_argument("--images", type=Path, metavar="DIR", help="folder of their images (default: none are shown)")
    add_iou(parser, "of boxes or masks")
    parser.add_argument("--out", type=Path, help="the page to write (default: report.html)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    from vitkit.engine.results import score_file
    from vitkit.evaluation.report import write_report
    from vitkit.logging import setup_logging

    with errors_in_one_line():
        setup_logging()
        check_out("--out", args.out)
        evaluation = score_file(args.results, annotations=args.annotations, images=args.images, iou=args.iou or 0.5)
        print(evaluation.evaluator.table())
        facts = {"results": str(args.results)}
        out = args.out or new_file("report.html")
        path = write_report(evaluation.evaluator, out, title=args.results.stem, facts=facts)
        print(f"the report is {path} ({path.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
