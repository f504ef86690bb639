"""Differences between devices: the CPU, and the accelerators that PyTorch names (cuda, mps, xpu, ...)."""

import functools
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Literal, cast, get_args

import torch

from vitkit.errors import ConfigError, lacks_memory

Precision = Literal["fp32", "bf16", "fp16"]
"""The precision of autocast."""
_INSTRUCTION_SET_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
"""Environment variables that keep PyTorch's operators, and oneDNN's, to an older instruction set of x86."""
_WITHOUT_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")
"""oneDNN's names of instruction sets in which it emulates bfloat16."""


def accelerators() -> list[str]:
    """Return the types of the accelerators that PyTorch finds on this machine, at most one."""
    return [torch.accelerator.current_accelerator().type] if torch.accelerator.is_available() else []


def default_device() -> str:
    """Return the type of the default device: the accelerator if there is one, otherwise the CPU."""
    return next(iter(accelerators()), "cpu")


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished its work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16 by instructions that are faster than those of float32.

    Others emulate it, up to 10 times slower: x86 processors without avx512_bf16 or AMX, or kept from using them, NVIDIA
    GPUs before Ampere, Apple's first ones. Intel's avx512_bf16 alone (virtual machines may hide AMX) is half as fast.
    """
    if device.type == "cpu":
        if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _WITHOUT_BFLOAT16:
            return False
        of_amd = {"avx512_bf16"} if processor_field("vendor_id") != "GenuineIntel" else set()
        return bool(_processor_flags() & {"amx_bf16", "bf16", *of_amd})  # bf16 is Arm's
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type != "mps"


@functools.cache
def _processor_flags() -> frozenset[str]:
    """Return the processor's instruction sets by Linux's names; none on other systems."""
    return frozenset(processor_field("flags", "Features").split())


def processor_field(*names: str) -> str:
    """Return what Linux reports about the processor under one of these names; "" on other systems."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in names:
                return value.strip()
    return ""


def processor_name() -> str:
    """Return the processor's name as Linux reports it, or the best description that other systems give."""
    return processor_field("model name") or platform.processor() or platform.machine()


def describe_processor() -> str:
    """Return the processor's name and the instruction set of PyTorch's own operators, and what limits either."""
    variables = [f"{name}={os.environ[name]}" for name in _INSTRUCTION_SET_LIMITS if name in os.environ]
    return f"{processor_name()} ({', '.join([torch.backends.cpu.get_cpu_capability(), *variables])})"


def resolve_precision(precision: str, device: torch.device) -> Precision:
    """Return the precision that "auto" stands for on a device: bf16 if it `has_bfloat16`; others unchanged.

    Raises:
        ConfigError: it is unknown.
    """
    if precision == "auto":
        return "bf16" if has_bfloat16(device) else "fp32"
    if precision not in get_args(Precision):
        raise ConfigError(f"precision={precision!r}: expected {', '.join(get_args(Precision))} or auto.")
    return cast(Precision, precision)


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Return the autocast context for a precision; it does nothing for "fp32"."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "fp32")


OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError, RuntimeError)
"""The types of errors that `is_out_of_memory` examines."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device, or this machine, ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or lacks_memory(error)


def peak_memory(device: torch.device) -> int | None:
    """Return the peak number of bytes held by the device's allocator; None if it is not reported, as on the CPU.

    Apple's GPU does not report a peak, so the current number of bytes is returned.
    """
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    if hasattr(module, "max_memory_allocated"):
        return module.max_memory_allocated()
    return module.driver_allocated_memory() if hasattr(module, "driver_allocated_memory") else None


def device_name(device: torch.device) -> str:
    """Return an accelerator's product name if PyTorch reports it, otherwise the device's type."""
    module = torch.get_device_module(device) if device.type != "cpu" else None
    return module.get_device_name(device) if hasattr(module, "get_device_name") else device.type


def accelerator_rng_state() -> torch.Tensor | None:
    """Return the state of the accelerator's random number generator; None without accelerator."""
    return torch.get_device_module(default_device()).get_rng_state() if accelerators() else None


def set_accelerator_rng_state(state: torch.Tensor | None) -> None:
    """Restore what `accelerator_rng_state` returned on an accelerator of the same kind."""
    if state is not None and accelerators():
        torch.get_device_module(default_device()).set_rng_state(state)
