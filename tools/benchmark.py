"""Compare speed and memory with other implementations.

Random weights and images, nothing is downloaded. What is compared runs in turn in one process; ratios are to the first
row of each group, and are what counts: they hold from run to run, milliseconds do not. Each part has a process of its
own, since what ran before decides where new memory comes from, and peak memory one for each row. The parts models,
maskformer and mask2former take some minutes each and need transformers (pip install -e '.[benchmark]').

Examples:
    python tools/benchmark.py --out benchmark.md
    python tools/benchmark.py matching loader
    python tools/benchmark.py models --device cuda --precision bf16
    python tools/benchmark.py models --threads 1 --processor-time      # on a busy machine
"""

import argparse
import importlib.metadata
import multiprocessing
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from vitkit.errors import VitkitError, error_line
from vitkit.matchers import HungarianMatcher
from vitkit.tools import (
    benchmark_backbones,
    benchmark_decoding,
    benchmark_deformable,
    benchmark_loader,
    benchmark_loader_memory,
    benchmark_local_relation,
    benchmark_logging,
    benchmark_masks,
    benchmark_matching,
    benchmark_models,
    benchmark_postprocess,
)
from vitkit.tools.benchmark_timing import Row, compare

PARTS = (
    "models",
    "maskformer",
    "mask2former",
    "postprocess",
    "deformable",
    "backbones",
    "local_relation",
    "matching",
    "decoding",
    "translation_training",
    "loader",
    "loader_memory",
    "logging",
)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the table here")
    parser.add_argument("--repeats", type=int, default=9, help="rounds, of which medians are taken (default: 9)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="processor threads of PyTorch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of all but the loader")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="of models, deformable attention and text"
    )
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument(
        "--processor-time", action="store_true", help="count computing, not waiting for other programs' computing"
    )
    parser.add_argument("--images", type=Path, metavar="DIR", help="JPEGs to load (default: drawn ones of 640x480)")
    args = parser.parse_args(argv)
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"no part {part!r}: expected any of {', '.join(PARTS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    rows: list[Row] = []
    print(f"{describe_machine(args)}\n", flush=True)
    for part in PARTS if not args.parts else sorted(set(args.parts), key=PARTS.index):
        print(f"measuring {part} ...", file=sys.stderr, flush=True)
        try:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                found = process.submit(measure, part, args).result()
        except VitkitError as error:
            sys.exit(error_line(error))
        header, ruler, *lines = markdown_table(found).splitlines()
        print(*(lines if rows else (header, ruler, *lines)), sep="\n", flush=True)
        rows += found
        if args.out:
            args.out.write_text(f"{describe_machine(args)}\n\n{markdown_table(rows)}\n", encoding="utf-8")


def measure(part: str, args: argparse.Namespace) -> list[Row]:
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.processor_time else time.perf_counter
    options = dict(repeats=args.repeats, memory=not args.no_memory, clock=clock)
    texts = benchmark_decoding.Case(device=args.device, precision=args.precision)
    match part:
        case "models":
            families = benchmark_models.FAMILIES
            return [row for family in families for row in benchmark_models.measure(family, cases(args), **options)]
        case "maskformer" | "mask2former":
            family, chosen = benchmark_masks.FAMILIES[part], benchmark_masks.cases(args.device, args.precision)
            return benchmark_models.measure(family, chosen, build=benchmark_masks.step, **options)
        case "postprocess":
            return benchmark_postprocess.measure(device=args.device, **options)
        case "deformable":
            return benchmark_deformable.measure(device=args.device, precision=args.precision, **options)
        case "backbones":
            return benchmark_backbones.measure(device=args.device, precision=args.precision, **options)
        case "local_relation":
            return benchmark_local_relation.measure(device=args.device, **options)
        case "matching":
            rows = benchmark_matching.measure(repeats=args.repeats, device=args.device, clock=clock)
            return rows + measure_share(args, clock)
        case "decoding":
            return benchmark_decoding.measure_decoding(texts, repeats=args.repeats, clock=clock)
        case "translation_training":
            return benchmark_decoding.measure_training(texts, repeats=args.repeats, clock=clock)
        case "loader":
            return benchmark_loader.measure(args.images)
        case "loader_memory":
            return benchmark_loader_memory.measure()
        case "logging":
            return benchmark_logging.measure(clock=clock)
    raise AssertionError(part)


def cases(args: argparse.Namespace) -> list[benchmark_models.Case]:
    return [case._replace(device=args.device, precision=args.precision) for case in benchmark_models.CASES]


def measure_share(args: argparse.Namespace, clock: Callable[[], float]) -> list[Row]:
    """The matching of one training step beside that step."""
    case = next(case for case in cases(args) if case.training)
    matcher = HungarianMatcher(1.0, 5.0, 2.0)
    calls = {
        str(case): benchmark_models.step("vitkit DETR-R50", case),
        "its matching": benchmark_matching.matching(matcher, case.batch_size, 100, args.device),
    }
    return compare("matching in a training step", calls, repeats=args.repeats, device=args.device, clock=clock)


def describe_machine(args: argparse.Namespace) -> str:
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        named = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        processor = named[1] if named else processor
    hardware = f"{processor}, {os.cpu_count()} cores, {args.threads} threads"
    if args.device == "cuda":
        hardware = f"{torch.cuda.get_device_name()}; {hardware}"
    versions = [f"Python {platform.python_version()}"]
    for package in ("vitkit", "torch", "torchvision", "transformers"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    clock = "processor time" if args.processor_time else "wall time"
    return f"{hardware}; {args.precision}; {', '.join(versions)}; {clock}, medians of {args.repeats} rounds."


def markdown_table(rows: Sequence[Row]) -> str:
    lines = ["| | | time | ratio | peak memory | ratio |", "|---|---|---:|---:|---:|---:|"]
    what = None
    for row in rows:
        memory = "" if row.peak_mib is None else f"{row.peak_mib:.0f} MiB"
        memory_ratio = "" if row.peak_ratio is None else f"{row.peak_ratio:.2f}"
        group = "" if row.what == what else row.what
        ratio = f"{row.ratio:.2f}" if row.ratio >= 0.1 else f"{row.ratio:.3f}"
        lines.append(f"| {group} | {row.name} | {1000 * row.seconds:.4g} ms | {ratio} | {memory} | {memory_ratio} |")
        what = row.what
    return "\n".join(lines)


if __name__ == "__main__":
    main()
