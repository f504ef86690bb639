"""Triton kernels. Triton reads TRITON_INTERPRET at import: its interpreter has a process, which forks for each case."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

CASE = """
import torch
from vitkit.kernels.deformable_attention import plain, triton

SHAPES = [(5, 7), (3, 2), (1, 1), (4, 1)]
LEVELS = [0, 1, 2, 3]  # of each group of points

def run_plain(tensors):
    tensors = [x.detach().requires_grad_() for x in tensors]
    output = plain.deformable_attend(tensors[0], SHAPES, *tensors[1:], LEVELS)
    return output.detach(), *torch.autograd.grad(output, tensors, upstream(output))

def run_triton(tensors):
    output = triton.deformable_attend(tensors[0], SHAPES, *tensors[1:], LEVELS)
    return output, *triton.deformable_attend_backward(upstream(output), tensors[0], SHAPES, *tensors[1:], LEVELS)

def upstream(output):
    return torch.linspace(-1, 1, output.numel()).view_as(output).to(output)

def inputs(num_queries, channels, dtype, batch_size=2, heads=3):
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, num_queries, heads, len(LEVELS), 2)
    values = torch.randn(batch_size, 46, heads, channels, generator=generator)
    locations = torch.rand(*shape, 2, generator=generator) * 1.6 - 0.3
    weights = torch.rand(shape, generator=generator)
    return [x.to(dtype) for x in (values, locations, weights)]
"""

SERVER = """
import json, os, sys, traceback

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            exec(json.loads(line))
        except BaseException:
            print(json.dumps(traceback.format_exc()), flush=True)
            os._exit(1)
        print(json.dumps(""), flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        print(json.dumps(f"killed by signal {os.WTERMSIG(status)}"), flush=True)
"""


@pytest.fixture(scope="module")
def interpret():
    """Return a function that runs code after CASE, each in a fork of one process; fails as the code does."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", CASE + SERVER]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def run(code):
        server.stdin.write(json.dumps(code) + "\n")
        server.stdin.flush()
        error = json.loads(server.stdout.readline())
        assert not error, error

    yield run
    server.kill()
    server.communicate()


def test_interpreted_kernels_equal_plain(interpret):
    interpret("""
for num_queries, channels, batch_size in ((3, 6, 2), (5, 8, 1), (0, 8, 2)):
    tensors = inputs(num_queries, channels, torch.float64, batch_size)
    for a, b in zip(run_triton(tensors), run_plain(tensors), strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
""")


def test_interpreted_kernels_equal_plain_with_several_groups_of_points_on_a_level(interpret):
    interpret("""
LEVELS = [0, 1, 1, 2, 3, 3, 3]
tensors = inputs(5, 6, torch.float64, batch_size=1, heads=2)
for a, b in zip(run_triton(tensors), run_plain(tensors), strict=True):
    torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
""")


def test_interpreted_kernels_process_queries_in_blocks(interpret):
    interpret("""
num_queries = triton.LAUNCHES["forward"]["tile"] // 32 + 1  # more than one block of the size of real runs
tensors = inputs(num_queries, 32, torch.float64, batch_size=1, heads=1)
for a, b in zip(run_triton(tensors), run_plain(tensors), strict=True):
    torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
triton.LAUNCHES = {name: dict(tile=32, num_warps=2) for name in triton.LAUNCHES}
tensors = inputs(6, 6, torch.float64)
for a, b in zip(run_triton(tensors), run_plain(tensors), strict=True):
    torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
""")


def test_interpreted_kernels_agree_on_pixels_and_borders(interpret):
    interpret("""
values, locations, weights = inputs(6, 8, torch.float64, batch_size=1, heads=2)
sizes = torch.tensor([(width, height) for height, width in SHAPES])[:, None]
locations = ((locations * sizes - 0.5).round() + 0.5) / sizes
locations[:, 0] = (locations[:, 0] > 0.5).to(locations)
tensors = values, locations, weights
for a, b in zip(run_triton(tensors), run_plain(tensors), strict=True):
    torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
""")


def test_interpreted_kernels_accumulate_low_precision_in_float32(interpret):
    interpret("""
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    tensors = inputs(5, 8, dtype, batch_size=1, heads=2)
    got, expected = run_triton(tensors), run_plain(tensors)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == dtype
        rounding = torch.finfo(dtype).eps * b.abs().max().item()
        torch.testing.assert_close(a.float(), b.float(), atol=1e-5 + rounding, rtol=0)
""")


def test_interpreted_kernels_refuse_deterministic_gradients(interpret):
    interpret("""
import warnings
tensors = inputs(2, 8, torch.float32, batch_size=1, heads=1)
torch.use_deterministic_algorithms(True)
try:
    run_triton(tensors)
except RuntimeError as error:
    assert "no deterministic backward pass" in str(error), error
else:
    raise AssertionError("not refused")
torch.use_deterministic_algorithms(True, warn_only=True)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    run_triton(tensors)
assert any("no deterministic backward pass" in str(warning.message) for warning in caught)
""")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels", [24, 32])
def test_compiled_kernels_equal_plain(dtype, channels, gpu):
    from vitkit.kernels.deformable_attention import deformable_attend, plain

    shapes = [(50, 67), (25, 34), (13, 17), (1, 1)]
    torch.manual_seed(0)
    area = sum(height * width for height, width in shapes)
    shape = (2, area, 8, len(shapes), 4)
    inputs = torch.randn(2, area, 8, channels), torch.rand(*shape, 2) * 1.2 - 0.1, torch.rand(shape)
    inputs = [x.to(gpu, dtype).requires_grad_() for x in inputs]
    results = []
    for attend in (deformable_attend, plain.deformable_attend):
        output = attend(inputs[0], shapes, *inputs[1:])
        results.append((output, *torch.autograd.grad(output, inputs, torch.ones_like(output))))
    scale = 4 * torch.finfo(dtype).eps + 1e-5
    for a, b in zip(*results):
        # If a location is within rounding error of a pixel, the two may read the pixels on different sides.
        close = (a - b).abs() <= scale * b.abs().max()
        assert close.float().mean() > 0.9999


TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
"""Target -> backend, architecture and threads of a warp: the A100; the H100 and H200; the MI300."""
REGISTERS = {"sm_80": 65536, "sm_90": 65536, "gfx942": 4 * 512 * 64}
"""Target -> the number of 32-bit registers of a multiprocessor (of the four SIMDs of a compute unit)."""


def compile_ahead(name, target, dtype):
    """Compile a kernel for 8 heads of 32 channels, 4 levels and 4 points, without a GPU."""
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vitkit.kernels.deformable_attention import triton as deformable

    kernel = deformable.KERNELS[name]
    constants = deformable.constants(8, 4, 4, 32, **deformable.LAUNCHES[name]) | {"SUM": tl.float32}
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


def resources(compiled):
    """Read from the machine code: registers and spilled bytes per thread, bytes of shared memory per program."""
    if "amdgcn" in compiled.asm:
        names = ("vgpr_count", "vgpr_spill_count", "group_segment_fixed_size")
        return [int(re.search(rf"\.{name}:\s+(\d+)", compiled.asm["amdgcn"])[1]) for name in names]
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    return [int(number) for number in re.search(r"REG:(\d+).*STACK:(\d+) SHARED:(\d+)", text).groups()]


def check_compiled(name, target, dtype, tmp_path, monkeypatch):
    pytest.importorskip("triton", minversion="3.3", reason="its compiler takes other arguments, as with torch 2.6")
    pytest.importorskip("triton.backends.nvidia")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # the user may have no home
    registers, spilled, shared = resources(compile_ahead(name, target, dtype))
    assert registers <= (512 if target == "gfx942" else 255) and spilled == 0
    assert shared <= 48 * 1024
    # Registers are allocated in multiples of eight; fewer resident warps would wait for memory.
    assert REGISTERS[target] // (-(-registers // 8) * 8 * TARGETS[target][2]) >= 4


@pytest.mark.parametrize("name, target, dtype", [("forward", "sm_90", "bf16"), ("backward", "gfx942", "fp32")])
def test_kernel_compiles_without_spilling_registers(name, target, dtype, tmp_path, monkeypatch):
    check_compiled(name, target, dtype, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_every_kernel_compiles_for_every_target_and_dtype(name, target, dtype, tmp_path, monkeypatch):
    check_compiled(name, target, dtype, tmp_path, monkeypatch)
