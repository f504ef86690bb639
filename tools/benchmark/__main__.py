"""Compare speed and memory with other implementations.

Weights and images are random; nothing is downloaded. Implementations run in turn in one process. Compare their ratios
to the first row of each group, which are reproducible, while milliseconds vary from run to run. Each part runs in a
separate process, as earlier work affects memory allocation, and a CPU's peak memory is measured in one more per row.
The parts with models of transformers take minutes each and need that package (pip install -e '.[benchmark]').

Examples:
    vitkit benchmark --out benchmark.md                                # or: python tools/benchmark --out …
    vitkit benchmark decoding loader
    vitkit benchmark augmentation recipes --images data/coco/val2017   # how fast a core loads training images
    vitkit benchmark detr --device cuda --precision bf16
    vitkit benchmark detr --threads 1 --processor-time                 # on a busy machine
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from vitkit.errors import VitkitError, error_line
from vitkit.tools.common import check_out, positive

if TYPE_CHECKING:
    from vitkit.tools.benchmark.timing import Row

PARTS = {
    "detr": "models",
    "deformable_detr": "models",
    "dino": "models",
    "maskformer": "models",
    "mask2former": "models",
    "eomt": "models",
    "mae": "models",
    "rtdetr": "realtime",
    "dfine": "realtime",
    "rf_detr": "realtime",
    "grounding_dino": "grounding",
    "latency": "latency",
    "deformable": "kernels",
    "backbones": "models",
    "clips": "clips",
    "local_relation": "kernels",
    "decoding": "text",
    "translation": "text",
    "loader": "loader",
    "augmentation": "recipes",
    "recipes": "recipes",
    "packs": "packs",
    "waiting": "waiting",
}
"""Part -> the module in this package whose `measure(part, options)` returns its rows."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--out", type=Path, help="file to which the table is also written")
    text = "number of rounds, whose medians are in the table (default: 9)"
    parser.add_argument("--repeats", type=positive, default=9, metavar="N", help=text)
    text = "number of PyTorch's CPU threads (default: PyTorch's own)"
    parser.add_argument("--threads", type=positive, metavar="N", help=text)
    text = "device of all parts except those that load images (default: cpu)"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=text)
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="precision of all but ONNX files (default: fp32)"
    )
    parser.add_argument("--no-memory", action="store_true", help="measure only time")
    parser.add_argument(
        "--processor-time", action="store_true", help="measure processor time, without waiting for other programs"
    )
    parser.add_argument(
        "--images", type=Path, metavar="DIR", help="folder of JPEGs to read (default: synthetic ones of 640x480)"
    )
    args = parser.parse_args(argv)
    import torch

    args.threads = args.threads or torch.get_num_threads()
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"no part {part!r}: expected any of {', '.join(PARTS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        check_out("--out", args.out)
    except VitkitError as error:
        sys.exit(error_line(error))
    rows: list[Row] = []
    print(f"{describe_machine(args)}\n", flush=True)
    for part in [part for part in PARTS if part in args.parts or not args.parts]:
        print(f"measuring {part} ...", file=sys.stderr, flush=True)
        try:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                part_rows = process.submit(measure, part, args).result()
        except VitkitError as error:
            sys.exit(error_line(error))
        header, ruler, *lines = markdown_table(part_rows).splitlines()
        print(*(lines if rows else (header, ruler, *lines)), sep="\n", flush=True)
        rows += part_rows
        if args.out:
            args.out.write_text(f"{describe_machine(args)}\n\n{markdown_table(rows)}\n", encoding="utf-8")


def measure(part: str, args: argparse.Namespace) -> list[Row]:
    """Measure one part in this process; return its rows."""
    import torch

    from vitkit.tools.benchmark.timing import Options

    torch.set_num_threads(args.threads)
    options = Options(
        repeats=args.repeats,
        device=args.device,
        precision=args.precision,
        memory=not args.no_memory,
        clock=time.process_time if args.processor_time else time.perf_counter,
        images=args.images,
    )
    return importlib.import_module(f"vitkit.tools.benchmark.{PARTS[part]}").measure(part, options)


def describe_machine(args: argparse.Namespace) -> str:
    """Describe the hardware, the versions and how times are measured, in one line."""
    import torch

    from vitkit.devices import processor_name

    hardware = f"{processor_name()}, {os.cpu_count()} cores, {args.threads} threads"
    if args.device == "cuda":
        hardware = f"{torch.cuda.get_device_name()}; {hardware}"
    versions = [f"Python {platform.python_version()}"]
    for package in ("vitkit", "torch", "torchvision", "transformers", "rfdetr"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    clock = "processor time" if args.processor_time else "wall time"
    return f"{hardware}; {args.precision}; {', '.join(versions)}; {clock}, medians of {args.repeats} rounds."


def markdown_table(rows: Sequence[Row]) -> str:
    """Format the rows as a table in Markdown."""
    lines = ["| | | time | ratio | peak memory | ratio |", "|---|---|---:|---:|---:|---:|"]
    previous = None
    for row in rows:
        memory = "" if row.peak_mib is None else f"{row.peak_mib:.0f} MiB"
        memory_ratio = "" if row.peak_ratio is None else f"{row.peak_ratio:.2f}"
        group = "" if row.what == previous else row.what
        ratio = f"{row.ratio:.2f}" if row.ratio >= 0.1 else f"{row.ratio:.3f}"
        lines.append(f"| {group} | {row.name} | {1000 * row.seconds:.4g} ms | {ratio} | {memory} | {memory_ratio} |")
        previous = row.what
    return "\n".join(lines)


if __name__ == "__main__":
    # The parts' processes unpickle functions by the name of their module, which must not be "__main__".
    from vitkit.tools.benchmark.__main__ import main

    main()
