"""The Triton kernels compile for GPUs that the machine does not have."""

import pytest

pytest.importorskip("vitkit.tools", reason="vitkit is not installed (pip install -e .)")
pytest.importorskip("triton.backends.nvidia")
from vitkit.kernels.deformable_attention.triton import LAUNCHES
from vitkit.tools.benchmark import compiled_ahead
from vitkit.tools.benchmark.compiled_ahead import Resources, compile_ahead, limit_table, resident_warps, resources


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Compile into a folder of the test: the user may have no home, where Triton keeps what it compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def check(name, target, dtype):
    taken = resources(compile_ahead(name, target, dtype, **LAUNCHES[name]))
    assert taken.registers <= (512 if target == "gfx942" else 255) and taken.spilled == 0
    assert taken.shared <= 48 * 1024
    assert resident_warps(target, taken, LAUNCHES[name]["num_warps"]) >= 4


@pytest.mark.parametrize("name, target, dtype", [("forward", "sm_90", "bf16"), ("backward", "gfx942", "fp32")])
def test_kernel_compiles_without_spilling_registers(name, target, dtype):
    check(name, target, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", compiled_ahead.DTYPES)
@pytest.mark.parametrize("target", compiled_ahead.TARGETS)
@pytest.mark.parametrize("name", LAUNCHES)
def test_every_kernel_compiles_for_every_target_and_dtype(name, target, dtype):
    check(name, target, dtype)


def test_resident_warps_are_limited_by_registers_or_the_device():
    assert resident_warps("sm_90", Resources(93, 0, 0), 4) == 20  # 65536 // (96 * 32) = 21
    assert resident_warps("sm_90", Resources(16, 0, 0), 4) == 64


def test_lower_bound_is_bytes_divided_by_bandwidth():
    # 22,223 locations of 256 values in and out, and 128 samples of two coordinates and a weight, 4 bytes each.
    moved = 2 * 22223 * (256 + 128 * 3 + 256) * 4
    row = next(line for line in limit_table().splitlines() if line.startswith("| forward | 2 | fp32"))
    assert row == f"| forward | 2 | fp32 | {moved / 1e6:.0f} | 78 µs | 48 µs | 33 µs |"
