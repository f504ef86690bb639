"""Compile the Triton kernels without a GPU: the resources that they use, and a lower bound of their time.

python tools/benchmark/compiled_ahead.py
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from vitkit.kernels.deformable_attention import triton as deformable
from vitkit.tools.benchmark.kernels import SHAPES_800X1333, DeformableCase, least_bytes

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
"""Target -> backend, architecture and threads of a warp: the A100; the H100 and H200; the MI300."""
DTYPES = ("fp32", "bf16", "fp16")
REGISTERS = {"sm_80": 65536, "sm_90": 65536, "gfx942": 4 * 512 * 64}
"""Target -> the number of 32-bit registers of a multiprocessor (of the four SIMDs of a compute unit)."""
MOST_WARPS = {"sm_80": 64, "sm_90": 64, "gfx942": 32}
BANDWIDTH = {"A100 80 GB": 2039e9, "H100 SXM": 3352e9, "H200": 4800e9}
"""Device -> its memory bandwidth in bytes per second, from its data sheet."""


class Resources(NamedTuple):
    """The resources that a compiled kernel uses."""

    registers: int
    """Registers per thread."""
    spilled: int
    """Bytes per thread that are spilled from registers to memory."""
    shared: int
    """Bytes of shared memory per program."""


def compile_ahead(name: str, target: str, dtype: str, *, tile: int, num_warps: int) -> CompiledKernel:
    """Compile a kernel for 8 heads of 32 channels, 4 levels and 4 points.

    Args:
        name: a name in `deformable.KERNELS`.
        tile, num_warps: see `deformable.LAUNCHES`.
    """
    kernel = deformable.KERNELS[name]
    constants = deformable.constants(8, 4, 4, 32, tile=tile, num_warps=num_warps) | {"SUM": tl.float32}
    options = {"num_warps": constants.pop("num_warps")}
    types = {"maps": "*i32", "num_pixels": "i32", "num_queries": "i32", "grad_values": "*fp32"}
    types |= dict.fromkeys(("locations", "grad_locations"), "*fp32") | dict.fromkeys(constants, "constexpr")
    signature = {argument: types.get(argument, f"*{dtype}") for argument in kernel.arg_names}
    # Pointers are aligned as torch allocates them.
    aligned = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(argument),): value for argument, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)


def resources(compiled: CompiledKernel) -> Resources:
    """Read the resources that a kernel uses from its machine code."""
    if "amdgcn" in compiled.asm:
        names = ("vgpr_count", "vgpr_spill_count", "group_segment_fixed_size")
        return Resources(*(int(re.search(rf"\.{name}:\s+(\d+)", compiled.asm["amdgcn"])[1]) for name in names))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    return Resources(*map(int, re.search(r"REG:(\d+).*STACK:(\d+) SHARED:(\d+)", text).groups()))


def resident_warps(target: str, taken: Resources, num_warps: int) -> int:
    """Return how many warps are resident on a multiprocessor; the more, the less it waits for memory."""
    threads = TARGETS[target][2]
    # Registers are allocated in multiples of eight.
    by_registers = REGISTERS[target] // (-(-taken.registers // 8) * 8 * threads)
    return min(MOST_WARPS[target], by_registers) // num_warps * num_warps


def resource_table(launches: dict[str, dict[str, int]]) -> str:
    """Compile every kernel for every target and type, and format their resources in Markdown."""
    lines = [
        "| kernel | target | type | registers | spilled | shared | resident warps |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    for name, launch in launches.items():
        for target in TARGETS:
            for dtype in DTYPES:
                taken = resources(compile_ahead(name, target, dtype, **launch))
                warps = resident_warps(target, taken, launch["num_warps"])
                lines.append(f"| {name} | {target} | {dtype} | " + " | ".join(map(str, (*taken, warps))) + " |")
    return "\n".join(lines)


def limit_table() -> str:
    """Format the minimum time of an encoder layer's deformable attention at 800x1333: its bytes over the bandwidth."""
    lines = [
        "| pass | batch | type | MB | " + " | ".join(BANDWIDTH) + " |",
        "|---|--:|---|--:" + "|--:" * len(BANDWIDTH) + "|",
    ]
    for training in (False, True):
        for batch_size in (2, 16):
            for precision in ("fp32", "bf16"):
                moved = least_bytes(DeformableCase(batch_size, training=training, shapes=SHAPES_800X1333), precision)
                times = " | ".join(f"{1e6 * moved / bandwidth:.0f} µs" for bandwidth in BANDWIDTH.values())
                passes = "forward and backward" if training else "forward"
                lines.append(f"| {passes} | {batch_size} | {precision} | {moved / 1e6:.0f} | {times} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    print(limit_table(), resource_table(deformable.LAUNCHES), sep="\n\n")


if __name__ == "__main__":
    main()
