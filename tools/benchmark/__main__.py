"""Compare speed and memory with other implementations.

Weights and images are random; nothing is downloaded. Implementations run in turn in one process. Compare their ratios
to the first row of each group, which are reproducible, while milliseconds vary from run to run. Each part runs in a
separate process, as earlier work affects memory allocation, and a CPU's peak memory is measured in one more per row.
The parts with models of transformers take minutes each and need that package (pip install -e '.[benchmark]'). All runs
from a clone, as the installed package does not have it.

Examples:
    python tools/benchmark --out benchmark.md
    python tools/benchmark decoding loader
    python tools/benchmark augmentation recipes --images data/coco/val2017   # how fast a core loads training images
    python tools/benchmark detr --device cuda --precision bf16
    python tools/benchmark detr --threads 1 --processor-time                 # on a busy machine
    python tools/benchmark detr dfine --compile --repeats 3                  # training steps of compiled models
    python tools/benchmark crowds --threads 1 --repeats 1                    # steps of 0 to 2,000 objects an image
    python tools/benchmark latency --threads 1 2 --models D-FINE-N RT-DETR-R18 --plot latency.png --out latency.md
    python tools/benchmark latency --models D-FINE-N --rows onnxruntime openvino --onnx YOLO11n:39.5=yolo11n.onnx
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from vitkit.errors import ConfigError, VitkitError, error_line
from vitkit.text_format import pluralize
from vitkit.tools.common import check_out, one_of, positive

if TYPE_CHECKING:
    from vitkit.tools.benchmark.timing import Measurement, OnnxFromOutside, Options

PARTS = {
    "detr": "models",
    "deformable_detr": "models",
    "dino": "models",
    "maskformer": "models",
    "mask2former": "models",
    "eomt": "models",
    "mae": "models",
    "lora": "lora",
    "rtdetr": "realtime",
    "dfine": "realtime",
    "rf_detr": "realtime",
    "masks": "masks",
    "grounding_dino": "grounding",
    "fused": "fused",
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
    "predict": "predicting",
    "lvis": "evaluating",
    "waiting": "waiting",
    "step": "parts",
    "crowds": "crowds",
}
"""Part -> the module in this package whose `measure(part, options)` returns its rows."""
ROWS = (
    *("vitkit", "vitkit-compiled", "onnxruntime", "int8", "openvino"),
    *("transformers", "transformers-compiled", "official"),
)
"""The rows of a model in the part "latency"; those with files only on a CPU."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--out", type=Path, help="file to which the table is also written, and its rows beside it, as JSON"
    )
    text = "number of rounds, whose medians are in the table (default: 9)"
    parser.add_argument("--repeats", type=positive, default=9, metavar="N", help=text)
    text = "number of PyTorch's CPU threads; with several, all is measured with each (default: PyTorch's own)"
    parser.add_argument("--threads", type=threads_or_part, nargs="+", default=[], metavar="N", help=text)
    text = "device of all parts except those that load images (default: cpu)"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=text)
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="precision of all but ONNX files (default: fp32)",
    )
    text = "measure only training steps, of models that are compiled on both sides: such as detr, dfine, grounding_dino"
    parser.add_argument("--compile", action="store_true", help=text)
    parser.add_argument("--no-memory", action="store_true", help="measure only time")
    parser.add_argument(
        "--processor-time", action="store_true", help="measure processor time, without waiting for other programs"
    )
    parser.add_argument(
        "--images", type=Path, metavar="DIR", help="folder of JPEGs to read (default: synthetic ones of 640x480)"
    )
    latency = parser.add_argument_group("options of the part latency")
    text = "real-time models to measure, or all (default: six of them, as each takes minutes)"
    latency.add_argument("--models", type=one_of(models_of_latency), nargs="+", default=[], metavar="MODEL", help=text)
    text = f"how each of them is run, {', '.join(ROWS)} (default: all that can be measured here)"
    latency.add_argument("--rows", choices=ROWS, nargs="+", default=[], metavar="ROW", help=text)
    latency.add_argument(
        "--batch", type=positive, nargs="+", default=[], metavar="N", help="images at once (default: 1)"
    )
    text = "ONNX files from outside, which take images, with their published COCO AP"
    latency.add_argument("--onnx", type=outside_file, nargs="+", default=[], metavar="NAME[:AP]=FILE", help=text)
    text = "draw published AP against milliseconds into FILE (default: latency.png)"
    latency.add_argument("--plot", nargs="?", const="latency.png", metavar="FILE", help=text)
    args = parser.parse_args(argv)
    import torch

    # Parts may follow the numbers.
    args.parts += [word for word in args.threads if word in PARTS]
    args.threads = [word for word in args.threads if word not in PARTS] or [torch.get_num_threads()]
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"no part {part!r}: expected any of {', '.join(PARTS)}")
    if args.out and args.out.suffix == ".json":
        parser.error(f"--out {args.out}: is for the table, and the rows are written beside it as .json; expected .md")
    of_models = [part for part, module in PARTS.items() if module in ("models", "realtime", "masks", "grounding")]
    if args.compile and (others := [part for part in args.parts or PARTS if part not in of_models]):
        parser.error(f"--compile: no training steps in {' '.join(others)}; expected parts among {' '.join(of_models)}")
    of_latency = {f"--{name}": getattr(args, name) for name in ("models", "rows", "batch", "onnx", "plot")}
    if args.parts and "latency" not in args.parts and (given := [name for name, value in of_latency.items() if value]):
        parser.error(f"{given[0]}: is for the part latency; expected it among {' '.join(args.parts)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU")
    return args


def threads_or_part(text: str) -> int | str:
    """Parse a number of threads, or a part, which may follow the numbers."""
    return text if text in PARTS else positive(text)


def models_of_latency() -> Sequence[str]:
    from vitkit.tools.benchmark.latency import MODELS

    return ("all", *MODELS)


def outside_file(text: str) -> OnnxFromOutside:
    """Parse NAME=FILE or NAME:AP=FILE, "YOLO11n:39.5=yolo11n.onnx"."""
    from vitkit.tools.benchmark.timing import OnnxFromOutside

    label, _, path = text.partition("=")
    name, _, ap = label.partition(":")
    if not (name and path):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=FILE or NAME:AP=FILE, such as YOLO11n:39.5=a.onnx")
    try:
        published = float(ap) if ap else None
    except ValueError:
        published = math.nan
    if published is not None and not 0 <= published <= 100:
        raise argparse.ArgumentTypeError(f"{text!r}: AP is {ap!r}; expected a number in percent")
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: no file '{path}'")
    return OnnxFromOutside(name, published, Path(path))


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    parts = [part for part in PARTS if part in args.parts or not args.parts]
    try:
        if "fused" in parts and (args.device, args.precision) != ("cpu", "fp32"):
            if args.parts:
                raise ConfigError(
                    f"fused: is measured on the CPU in float32; got --device {args.device} --precision "
                    f"{args.precision}. Leave them out."
                )
            print("no rows of fused, which is measured on the CPU in float32", file=sys.stderr, flush=True)
            parts.remove("fused")
        check_out("--out", args.out)
        check_out("--plot", args.plot and Path(args.plot))
        if "latency" in parts:
            importlib.import_module("vitkit.tools.benchmark.latency").check_options(make_options(args))
    except VitkitError as error:
        sys.exit(error_line(error))
    rows: list[Measurement] = []
    tables: dict[str, list[Measurement]] = {}
    machine, header = describe_machine(args), None
    print(f"{machine}\n", flush=True)
    for part in parts:
        for threads in args.threads:
            setting = f"{pluralize(threads, 'threads')}" if len(args.threads) > 1 else ""
            print(f"measuring {part}{setting and ', '}{setting} ...", file=sys.stderr, flush=True)
            try:
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    part_rows = process.submit(measure, part, args, threads).result()
            except VitkitError as error:
                sys.exit(error_line(error))
            part_rows = [row._replace(setting=", ".join(filter(None, (row.setting, setting)))) for row in part_rows]
            rows += part_rows
            # The ratios of a part may have a heading of their own.
            tables.setdefault("latency" if part == "latency" else "", []).extend(part_rows)
            *columns, lines = markdown_table(part_rows).split("\n", 2)
            print(*(columns if columns != header else ()), lines, sep="\n", flush=True)
            header = columns
            if args.out:
                text = "\n\n".join([machine, *map(markdown_table, tables.values())])
                args.out.write_text(f"{text}\n", encoding="utf-8")
                report = {"machine": machine, "rows": [row._asdict() for row in rows]}
                args.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        from vitkit.tools.benchmark.latency_plot import plot_latencies

        try:
            plot_latencies(rows, Path(args.plot), title=machine)
        except VitkitError as error:
            sys.exit(error_line(error))


def measure(part: str, args: argparse.Namespace, threads: int) -> list[Measurement]:
    """Measure one part in this process; return its rows."""
    import torch

    torch.set_num_threads(threads)
    return importlib.import_module(f"vitkit.tools.benchmark.{PARTS[part]}").measure(part, make_options(args))


def make_options(args: argparse.Namespace) -> Options:
    """Return the settings of the measurement."""
    from vitkit.tools.benchmark.timing import Options

    return Options(
        repeats=args.repeats,
        device=args.device,
        precision=args.precision,
        memory=not args.no_memory,
        clock=time.process_time if args.processor_time else time.perf_counter,
        images=args.images,
        models=args.models,
        rows=args.rows,
        batch_sizes=args.batch or [1],
        compiled=args.compile,
        onnx=args.onnx,
    )


def describe_machine(args: argparse.Namespace) -> str:
    """Describe the hardware, the versions and how times are measured, in one line."""
    import torch

    from vitkit.devices import describe_processor

    threads = " and ".join(pluralize(number, "threads") for number in args.threads)
    hardware = f"{describe_processor()}, {os.cpu_count()} cores, {threads}"
    if args.device == "cuda":
        hardware = f"{torch.cuda.get_device_name()}; {hardware}"
    versions = [f"Python {platform.python_version()}"]
    others = ("transformers", "rfdetr", "dfine-seg", "libreyolo")
    for package in ("vitkit", "torch", "torchvision", *others, "onnxruntime", "openvino"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    clock = "processor time" if args.processor_time else "wall time"
    return f"{hardware}; {args.precision}; {', '.join(versions)}; {clock}, medians of {args.repeats} rounds."


def markdown_table(rows: Sequence[Measurement]) -> str:
    """Format the rows as a table in Markdown; those of the part "latency" have a column of published AP instead of
    memory."""
    has_ap = any(row.published_ap is not None for row in rows)
    has_memory = not has_ap or any(row.peak_mib is not None for row in rows)
    ap, memory = [" COCO AP |", "---:|"] if has_ap else ["", ""], [" peak memory | ratio |", "---:|---:|"]
    memory = memory if has_memory else ["", ""]
    ratio = "of transformers' fastest" if has_ap and not has_memory else "ratio"
    lines = [f"| | |{ap[0]} time | {ratio} |{memory[0]}", f"|---|---|{ap[1]}---:|---:|{memory[1]}"]
    previous = None
    for row in rows:
        what = ", ".join(filter(None, (row.what, row.setting)))
        cells = ["" if what == previous else what, row.name]
        if has_ap:
            cells.append("" if row.published_ap is None else f"{row.published_ap:g}")
        if row.seconds is None:
            cells += [f"cannot run: {row.note}".replace("|", "/"), ""]
        else:
            cells += [f"{1000 * row.seconds:.4g} ms", format_ratio(row)]
        if has_memory:
            cells.append("" if row.peak_mib is None else f"{row.peak_mib:.0f} MiB")
            cells.append("" if row.peak_ratio is None else f"{row.peak_ratio:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
        previous = what
    return "\n".join(lines)


def format_ratio(row: Measurement) -> str:
    """Format a row's ratio, "0.64" or, with the extremes of its rounds, "0.64 (0.62 to 0.67)"."""
    if row.ratio is None:
        return ""
    digits = 2 if row.ratio >= 0.1 else 3
    median, *extremes = [
        "" if ratio is None else f"{ratio:.{digits}f}" for ratio in (row.ratio, row.lowest_ratio, row.highest_ratio)
    ]
    return median if set(extremes) <= {"", median} else f"{median} ({' to '.join(extremes)})"


if __name__ == "__main__":
    # The parts' processes unpickle functions by the name of their module, which must not be "__main__".
    from vitkit.tools.benchmark.__main__ import main

    main()
