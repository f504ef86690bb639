"""Draw BLEU or another metric by source length for several models, as Bahdanau et al. 2015 do (figure 2).

Each RESULTS is the JSON that tools/test.py wrote for a translation model; its file name, or NAME, names the curve.

Example:
    python tools/compare_lengths.py rnn=rnn.json rnnsearch=rnnsearch.json transformer=transformer.json --out lengths.png
"""

import argparse
import reprlib
from collections.abc import Sequence
from pathlib import Path

from vitkit.data.io.coco_schema import is_number
from vitkit.errors import DataError
from vitkit.evaluation.base import read_results
from vitkit.evaluation.text import METRICS, LengthGroup, draw_by_length
from vitkit.tools.common import check_out, errors_in_one_line, new_file


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", metavar="[NAME=]RESULTS", help="results files that tools/test.py wrote")
    parser.add_argument("--out", type=Path, metavar="PNG", help="the plot to write (default: bleu_by_length.png)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with errors_in_one_line():
        check_out("--out", args.out)
        metric, curves = read_curves(args.results)
        args.out = args.out or new_file("bleu_by_length.png")
        args.out.parent.mkdir(parents=True, exist_ok=True)
        draw_by_length(curves, args.out, metric=METRICS[metric])
    decimals = 3 if metric == "exact_match" else 1
    for name, groups in curves.items():
        scores = "   ".join(f"{g.min_words}-{g.max_words}: {g.score:.{decimals}f} ({g.count})" for g in groups)
        print(f"{name:<20} {scores}")
    print(f"drew {args.out}")


def read_curves(texts: Sequence[str]) -> tuple[str, dict[str, list[LengthGroup]]]:
    """Return the metric, and a curve's name -> its groups.

    Raises:
        DataError: a file is not a result of a translation model, the metrics differ, or two curves have the same name.
    """
    curves: dict[str, list[LengthGroup]] = {}
    metrics: set[str] = set()
    for text in texts:
        name, metric, groups = read_curve(text)
        metrics.add(metric)
        if len(metrics) > 1:
            raise DataError(
                f"{text}: has {metric} by length, and others {min(metrics - {metric})}; expected one metric."
            )
        if name in curves:
            raise DataError(f"{text}: another curve is named {name!r} already. Name them: NAME=RESULTS.")
        curves[name] = groups
    return metrics.pop(), curves


def read_curve(text: str) -> tuple[str, str, list[LengthGroup]]:
    """Return the name of a curve, its metric and its groups.

    Raises:
        DataError: the file is not a result of a translation model.
    """
    name, _, path = text.rpartition("=")
    content = read_results(path)
    rows = content.get("by_length") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: has no results by_length, as tools/test.py writes them of a translation model.")
    metric = next((name for name in METRICS if name in rows[0]), None)
    for number, row in enumerate(rows):
        if metric is None or not all(is_number(row.get(field)) for field in ("first", "last", "count", metric)):
            raise DataError(
                f"{path}: by_length entry {number} is {reprlib.repr(row)}; expected numbers for first, last, count and "
                f"{metric or ' or '.join(METRICS)}, as tools/test.py writes them of a translation model."
            )
    groups = [LengthGroup(row["first"], row["last"], row["count"], row[metric]) for row in rows]
    return name or Path(path).stem, metric, groups


if __name__ == "__main__":
    main()
