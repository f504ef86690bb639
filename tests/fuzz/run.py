"""Try many cases of broken input, and print how they ended.

Run it in tests/: `python -m fuzz.run --cases 10000 --seed 7`. It ends with status 1 if a case failed. `--only` names
formats, `--keep` a folder for the files of the cases that failed, and `--case FORMAT/SEED` or a kept folder runs one.
"""

import argparse
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import torch
from fuzz.isolation import KINDS
from fuzz.surfaces import FORMATS, check_folders, run_seeds, seeds_of
from fuzz.world import make_world

_PLACE = re.compile(r"\(([^()]+\.py:\d+ in [^()]+)\)")


def parse_args() -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="cases of all formats together (default: 10000)")
    parser.add_argument("--seed", type=int, default=1000, help="the first seed of each format (default: 1000)")
    parser.add_argument("--only", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="folder for the files of the cases that failed")
    parser.add_argument("--case", type=Path, metavar="DIR", help="check only this folder, DIR/FORMAT/NAME")
    parser.add_argument("--quiet", action="store_true", help="print no case, only the groups of failures")
    return parser.parse_args()


def main() -> int:
    """Run the cases, and print a table and the groups of failures."""
    args = parse_args()
    torch.set_num_threads(1)  # a fork of a process with threads may wait for one forever
    with tempfile.TemporaryDirectory() as name:
        world = make_world(Path(name, "world"))
        if args.case:
            print(
                *check_folders(
                    FORMATS[args.case.resolve().parent.name], [args.case.resolve()], world, Path(name, "case")
                )
            )
            return 0
        totals: dict[str, Counter[str]] = {}
        failures: list[str] = []
        chosen = [FORMATS[only] for only in args.only]
        for kind in chosen:
            began = time.monotonic()
            seeds = seeds_of(kind, args.cases, args.seed, chosen)
            tell = (lambda _: None) if args.quiet else lambda text: print(text[:400], flush=True)
            totals[kind.name], failed = run_seeds(kind, seeds, world, Path(name), args.keep, tell)
            failures += failed
            seconds = (time.monotonic() - began) / max(1, len(seeds))
            print(f"{kind.name}: {dict(totals[kind.name])}, {1000 * seconds:.0f} ms a case", flush=True)
    print("\n".join(table(totals)))
    print("\n".join(groups(failures)))
    return int(bool(failures))


def table(totals: dict[str, Counter[str]]) -> list[str]:
    """Return lines with the number of cases of each format by outcome."""
    columns = ("cases", *KINDS)
    rows = {**totals, "all": sum(totals.values(), Counter())}
    lines = [f"{'':<16}" + "".join(f"{column:>10}" for column in columns)]
    for name, counts in rows.items():
        numbers = (counts.total(), *(counts[kind] for kind in KINDS))
        lines.append(f"{name:<16}" + "".join(f"{number:>10}" for number in numbers))
    return lines


def groups(failures: list[str]) -> list[str]:
    """Return a line for each innermost line of vitkit that cases failed at, with their number and the first."""
    by_place = defaultdict(list)
    for failure in failures:
        head = failure.partition("\n")[0]
        place = _PLACE.search(head)
        kind = failure.split(": ", 2)[1]
        by_place[kind, place[1] if place and kind in ("traceback", "memory") else head.split(": ", 2)[2][:70]].append(
            head
        )
    ordered = sorted(by_place.items(), key=lambda item: -len(item[1]))
    return [f"{len(heads):>5} x {kind} {place}\n        {heads[0][:300]}" for (kind, place), heads in ordered]


if __name__ == "__main__":
    sys.exit(main())
