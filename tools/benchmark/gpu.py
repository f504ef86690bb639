"""Run everything that needs a GPU: tests, golden tests on the GPU, speed and memory, and two trainings.

Each part is a command that also runs by itself, and gets ten minutes. Its output goes to OUT/PART.log, or to
OUT/PART.failed.log if it fails or takes longer. Parts that have a log are skipped, and trainings are resumed, so that
the command can be stopped and restarted. It needs the repository; trainings need the data of configs/bccd and
configs/camvid.

Examples:
    python tools/benchmark/gpu.py                                          # all parts
    python tools/benchmark/gpu.py tests golden detr --out runs/gpu
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from vitkit.weights.locate import LAST_NAME

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ["pytest", "-q", "tests/backbones", "tests/models", "tests/losses", "tests/seq2seq", "-k"]
MEASURED = (
    "deformable", "detr", "deformable_detr", "dino", "mask2former",
    "rtdetr", "dfine", "rf_detr", "grounding_dino", "backbones", "decoding", "waiting", "step",
)  # fmt: skip
LATENCY = {
    f"latency_{precision}_batch{batch}": (precision, str(batch)) for precision in ("fp16", "bf16") for batch in (1, 32)
}
"""Part -> precision and batch of the real-time models, vitkit's and transformers', both compiled as CUDA graphs."""
REALTIME = ("D-FINE-N", "D-FINE-S", "RT-DETR-R18", "RF-DETR-N")
TRAININGS = {"bccd": "bccd/deformable_detr", "camvid": "camvid/mask2former"}
"""Name of the part and of its dataset -> config. Expected: bbox/AP 0.525 and mIoU 0.618, less 0.03 at most."""
PARTS = ("tests", "golden", "golden_bf16", *MEASURED, *LATENCY, *TRAININGS)


def command(part: str, out: Path, data: Path) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of `python -m` for a part, and its environment variables."""
    if part == "tests":
        return ["pytest", "-q", "-m", "gpu", "tests/engine", "tests/kernels"], {}
    if part == "golden":
        return [*GOLDEN, "golden"], {"VITKIT_TEST_DEVICE": "cuda"}
    if part == "golden_bf16":  # gradients differ by more than bfloat16's rounding of the outputs
        variables = {"VITKIT_TEST_DEVICE": "cuda", "VITKIT_TEST_PRECISION": "bf16"}
        return [*GOLDEN, "golden and outputs and not gradients"], variables
    if part in MEASURED:
        return ["vitkit.tools.benchmark", part, "--device", "cuda", "--precision", "bf16"], {}
    if part in LATENCY:
        precision, batch = LATENCY[part]
        files = [f"--{name}={out.resolve() / part}.{suffix}" for name, suffix in (("out", "md"), ("plot", "png"))]
        chosen = ["--rows", "vitkit-compiled", "transformers-compiled", "--models", *REALTIME, "--batch", batch]
        settings = ["--device", "cuda", "--precision", precision, *chosen, *files]
        return ["vitkit.tools.benchmark", "latency", *settings], {}
    run = (out / part).resolve()
    if (run / LAST_NAME).exists():
        return ["vitkit.tools.train", "--resume", str(run)], {}
    settings = [f"data.root={data.resolve() / part}", f"data.num_workers={min(8, (os.cpu_count() or 2) - 1)}"]
    return ["vitkit.tools.train", TRAININGS[part], *settings, "--run-dir", str(run)], {}


def run_part(part: str, out: Path, data: Path, *, minutes: float) -> bool:
    """Run a part's command in a new process with a time limit; return whether it succeeded."""
    arguments, variables = command(part, out, data)
    unfinished = out / f"{part}.failed.log"
    with unfinished.open("w") as log:
        # A new process session, so that the child's own processes can be ended with it.
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT, env=os.environ | variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            succeeded = process.wait(60 * minutes) == 0
        except subprocess.TimeoutExpired:
            succeeded = False
            log.write(f"not done after {minutes:g} minutes\n")
        finally:  # also at ctrl-C
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if succeeded:
        unfinished.replace(out / f"{part}.log")
    return succeeded


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the logs (default: runs/gpu)")
    parser.add_argument("--data", type=Path, default=Path("data"), help="holds bccd and camvid (default: data)")
    parser.add_argument("--minutes", type=float, default=10, help="time limit of each part (default: 10)")
    args = parser.parse_args(argv)
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"no part {part!r}: expected any of {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU (VITKIT_GPU_TESTS=cpu pytest -m gpu runs on the CPU what can run there)")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    failed = []
    for part in args.parts or PARTS:
        log = args.out / f"{part}.log"
        if log.exists():
            print(f"{part}: done before ({log})")
        elif run_part(part, args.out, args.data, minutes=args.minutes):
            print(f"{part}: {log}", *log.read_text().splitlines()[-12:], sep="\n    ", flush=True)
        else:
            failed.append(part)
            log = args.out / f"{part}.failed.log"
            print(f"{part}: failed, {log}", *log.read_text().splitlines()[-12:], sep="\n    ", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
