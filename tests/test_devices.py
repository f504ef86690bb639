"""Accelerators that the machine does not have, with stand-ins for their torch modules."""

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vitkit import devices
from vitkit.apps.doctor.environment import total_memory
from vitkit.devices import device_name, has_bfloat16, peak_memory, resolve_precision, synchronize
from vitkit.distributed import accumulation_dtype
from vitkit.engine.checkpointing import rng_state, set_rng_state
from vitkit.tools.common import add_device

CPU, MPS, XPU = torch.device("cpu"), torch.device("mps"), torch.device("xpu", 0)


@pytest.fixture
def modules(monkeypatch):
    """Return stand-ins for the used functions of torch.mps and torch.xpu, with a record of the calls."""
    calls = []
    state = torch.arange(4, dtype=torch.uint8)
    common = dict(
        synchronize=lambda: calls.append("synchronize"), get_rng_state=lambda: state, set_rng_state=calls.append
    )
    by_type = {
        "mps": SimpleNamespace(**common, driver_allocated_memory=lambda: 7, recommended_max_memory=lambda: 16),
        "xpu": SimpleNamespace(
            **common,
            max_memory_allocated=lambda: 9,
            get_device_properties=lambda device: SimpleNamespace(total_memory=64),
            get_device_name=lambda device: "a card",
        ),
    }
    monkeypatch.setattr(torch, "get_device_module", lambda device: by_type[torch.device(device).type])
    return calls


@pytest.fixture
def mps(modules, monkeypatch):
    """A machine whose accelerator is Apple's GPU."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: MPS)
    return modules


def test_memory_and_names_come_from_each_device_module(modules):
    assert (peak_memory(CPU), peak_memory(MPS), peak_memory(XPU)) == (None, 7, 9)
    assert (total_memory(CPU), total_memory(MPS), total_memory(XPU)) == (None, 16, 64)
    assert (device_name(CPU), device_name(MPS), device_name(XPU)) == ("cpu", "mps", "a card")


def test_only_accelerators_are_synchronized(modules):
    synchronize(CPU)
    assert modules == []
    synchronize(MPS)
    assert modules == ["synchronize"]


def test_mps_sums_in_float32():
    assert accumulation_dtype(MPS) == torch.float32
    assert accumulation_dtype(CPU) == accumulation_dtype(XPU) == torch.float64


@pytest.mark.parametrize(
    "maker, flags, expected",
    [
        ("AuthenticAMD", "avx2", False),
        ("AuthenticAMD", "avx2 avx512f", False),
        ("AuthenticAMD", "avx512f avx512_bf16", True),
        ("GenuineIntel", "avx512f avx512_bf16 avx512_fp16", False),
        ("GenuineIntel", "avx512f avx512_bf16 amx_tile amx_bf16", True),
        ("", "bf16", True),
    ],
)
def test_processor_computes_in_bfloat16_only_with_fast_instructions_for_it(monkeypatch, maker, flags, expected):
    monkeypatch.setattr(devices, "processor_field", lambda *names: maker)
    monkeypatch.setattr(devices, "_processor_flags", lambda: frozenset(flags.split()))
    assert has_bfloat16(CPU) is expected and has_bfloat16(XPU) and not has_bfloat16(MPS)
    assert resolve_precision("auto", CPU) == ("bf16" if expected else "fp32")
    assert resolve_precision("fp16", CPU) == "fp16"


@pytest.mark.parametrize("supported", [True, False])
def test_gpu_computes_in_bfloat16_unless_it_emulates_it(monkeypatch, supported):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported or including_emulation)
    assert has_bfloat16(torch.device("cuda", 0)) is supported


@pytest.mark.parametrize(("limit", "expected"), [("avx2", False), ("AVX512_CORE", False), ("AVX512_CORE_BF16", True)])
def test_processor_limited_to_older_instructions_does_not_compute_in_bfloat16(monkeypatch, limit, expected):
    monkeypatch.setattr(devices, "processor_field", lambda *names: "AuthenticAMD")
    monkeypatch.setattr(devices, "_processor_flags", lambda: frozenset({"avx512_bf16"}))
    monkeypatch.setattr(devices, "processor_name", lambda: "a processor")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert has_bfloat16(CPU) is expected
    assert devices.describe_processor() == f"a processor (AVX2, ONEDNN_MAX_CPU_ISA={limit})"


def test_flags_of_the_processor_are_read_from_the_system(monkeypatch):
    text = "processor : 0\nmodel name : a processor\nflags\t\t: fpu avx512_bf16\n"
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: text)
    assert devices._processor_flags.__wrapped__() == {"fpu", "avx512_bf16"}


def test_accelerator_is_the_default_device_of_the_tools(mps):
    assert devices.default_device() == "mps"
    parser = argparse.ArgumentParser()
    add_device(parser)
    assert parser.parse_args([]).device == "mps"
    assert parser.parse_args(["--device", "cpu"]).device == "cpu"


def test_unavailable_device_is_refused_by_name(mps, capsys):
    parser = argparse.ArgumentParser()
    add_device(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--device", "cuda"])
    assert "'cuda': expected cpu or mps" in capsys.readouterr().err


def test_the_accelerators_random_state_is_saved_and_restored(mps):
    state = rng_state()
    assert state["cuda"].tolist() == [0, 1, 2, 3]
    set_rng_state(state)
    assert mps[-1] is state["cuda"]
