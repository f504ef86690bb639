"""Run everything that needs a GPU with one command: tests, speed, and what training reaches.

Each part runs in a separate process, for ten minutes at most, and adds its rows to a JSON file and a table beside it.
Parts that this machine has completed are skipped, and trainings are resumed, so that the command can be stopped and
restarted. The parts with tests need the repository, those with training the small datasets (see README, "Data").

Examples:
    python tools/benchmark/gpu.py                                   # all parts
    python tools/benchmark/gpu.py golden triton tuning detr --out runs/gpu.json
    python tools/benchmark/gpu.py --device cpu --tiny --out tiny.json          # the command itself, without a GPU
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vitkit import __version__
from vitkit.tools.benchmark import gpu_parts as parts
from vitkit.tools.benchmark.gpu_parts import Options, Row

GOLDEN = ["tests/backbones", "tests/models", "tests/losses", "tests/seq2seq", "-k"]
BF16_TESTS = "golden and outputs"
TINY_GOLDEN = ["tests/seq2seq/test_transformer_golden.py", "-k"]
golden_tests = partial(parts.run_tests, on_device=True)
gpu_tests = partial(parts.run_tests, tiny=["-m", "gpu", "tests/engine", "-k", "channels_last"])
PARTS: dict[str, Callable[[Options], list[Row]]] = {
    "golden": partial(golden_tests, [*GOLDEN, "golden"], tiny=[*TINY_GOLDEN, "golden"]),
    "golden_bf16": partial(golden_tests, [*GOLDEN, BF16_TESTS], tiny=[*TINY_GOLDEN, BF16_TESTS], precision="bf16"),
    "triton": partial(gpu_tests, ["-m", "gpu", "tests/kernels"]),
    "tests": partial(gpu_tests, ["-m", "gpu", "tests/engine"]),
    "tuning": parts.tune,
    "deformable": parts.measure_deformable,
    **{model: partial(parts.measure_training, model) for model in parts.FAMILIES},
    "backbones": parts.measure_backbones,
    "decoding": parts.measure_decoding,
    "curve": parts.compare_curves,
    "bccd": partial(parts.train_to_the_end, "bccd/deformable_detr", "bccd", "bbox/AP", 0.525),
    "camvid": partial(parts.train_to_the_end, "camvid/mask2former", "camvid", "mIoU", 0.618),
}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu.json"), metavar="FILE", help="results file (default: runs/gpu.json)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="device to measure (default: cuda)")
    parser.add_argument("--tiny", action="store_true", help="run the smallest form of each part")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("data"),
        metavar="DIR",
        help="holds bccd, camvid and coco_tiny (default: data)",
    )
    parser.add_argument("--minutes", type=float, default=10, help="time limit of each part (default: 10)")
    parser.add_argument("--again", action="store_true", help="also run parts that are complete")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"no part {part!r}: expected any of {', '.join(PARTS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU (--device cpu --tiny tries the command itself)")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if args.in_this_process:
        options = Options(args.device, args.tiny, args.data, args.out.parent)
        for part in args.parts:
            print(json.dumps(PARTS[part](options)))
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    records = read(args.out)
    machine = describe_machine(args.device) + (", tiny" if args.tiny else "")
    done = {record["part"] for record in records if record["machine"] == machine and "error" not in record}
    for part in args.parts or PARTS:
        if part in done and not args.again:
            print(f"{part}: done before (--again measures again)")
            continue
        print(f"{part} ...", flush=True)
        records.append(run_part(part, args) | {"machine": machine, "ended": time.strftime("%Y-%m-%d %H:%M")})
        write(args.out, records)
        print(markdown([records[-1]]), flush=True)


def run_part(part: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return a part's record: its rows, or the reason why there are none."""
    command = [sys.executable, __file__, part, "--in-this-process", "--device", args.device, "--out", str(args.out)]
    command += ["--data", str(args.data), *(["--tiny"] if args.tiny else [])]
    start = time.monotonic()
    # A new process session, so that the child's own processes can be ended with it.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=60 * args.minutes)
    except subprocess.TimeoutExpired:
        return {"part": part, "error": f"not done after {args.minutes:g} minutes"}
    finally:  # also at ctrl-C
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = round(time.monotonic() - start, 1)
    if process.returncode:
        return {"part": part, "seconds": seconds, "error": f"exit status {process.returncode}; see the console"}
    return {"part": part, "seconds": seconds, "rows": json.loads(output.splitlines()[-1])}


def describe_machine(device: str) -> str:
    """Name the device and the versions."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}, vitkit {__version__}"


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file; none if there is no file."""
    return json.loads(path.read_text()) if path.exists() else []


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Replace the file with the records, and the table beside it."""
    for target, text in ((path, json.dumps(records, indent=1)), (path.with_suffix(".md"), markdown(records))):
        temporary = target.with_name(target.name + ".part")
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(target)


def markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """Format records as a table: one line per row; a failed part has one line with its error."""
    lines = ["| part | what | figures | |", "|---|---|---|---|"]
    for record in records:
        for row in record.get("rows", [{"what": record.get("error", ""), "ok": False}]):
            figures = ", ".join(f"{name} {_text(row[name])}" for name in row if name not in ("what", "ok"))
            verdict = {True: "ok", False: "**not ok**", None: ""}[row.get("ok")]
            lines.append(f"| {record['part']} | {row['what']} | {figures} | {verdict} |")
    return "\n".join([*lines, "", *sorted({record["machine"] for record in records if "machine" in record})])


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
