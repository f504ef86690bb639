"""Differences between devices: the CPU, and the accelerators that PyTorch names (cuda, mps, xpu, ...)."""

import torch


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


def emulates_bfloat16(device: torch.device) -> bool:
    """Whether the device emulates bfloat16 by conversions, which makes a step up to ten times slower than in float32.

    x86 processors have bfloat16 instructions from AVX-512 on.
    """
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the widest type in which a device sums: Apple's GPU has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


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


def total_memory(device: torch.device) -> int | None:
    """Return the size of an accelerator's memory in bytes; None if it is not reported, as on the CPU."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    if hasattr(module, "get_device_properties"):
        return module.get_device_properties(device).total_memory
    return module.recommended_max_memory() if hasattr(module, "recommended_max_memory") else None


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
