"""Describe the machine and the installed packages in one block, for a bug report."""

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import vitkit
from vitkit.devices import accelerators, device_name, has_bfloat16, processor_name
from vitkit.io.git_files import read_git_state

PACKAGES = (
    *("torchvision", "timm", "numpy", "scipy", "pillow", "opencv-python-headless", "av", "pycocotools"),
    *("albumentations", "fvcore", "onnx", "onnxruntime", "openvino", "transformers", "tokenizers"),
)
"""Packages whose versions a bug may depend on, beside torch."""
_VARIABLES = ("OMP_", "MKL_", "KMP_", "CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "VITKIT_")
"""Beginnings of the environment variables that change how models compute."""


def describe_environment() -> str:
    """Return lines of "name: value": versions, devices, processor features, and variables that change results.

    Nothing in it names the user, the machine or the working folder.
    """
    state = read_git_state(Path(vitkit.__file__).parent)
    commit = f" at commit {state['commit'][:12]}" if state and state["commit"] else ""
    rows = {
        "vitkit": f"{vitkit.__version__}{commit}",
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": platform.platform(),
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'}, cuDNN {torch.backends.cudnn.version()})",
        **{package: _version(package) for package in PACKAGES},
        "processor": f"{processor_name()}, {_usable_cores()} cores, {torch.backends.cpu.get_cpu_capability()}"
        f"{', bfloat16' if has_bfloat16(torch.device('cpu')) else ''}{_memory()}",
        "threads": f"{torch.get_num_threads()} (between operators {torch.get_num_interop_threads()})",
        "accelerators": _accelerators(),
        "variables": ", ".join(_settings()) or "none",
    }
    return "\n".join(f"{name}: {value}" for name, value in rows.items())


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return "not installed"


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> str:
    with suppress(ValueError, OSError, AttributeError):  # not every system reports it
        return f", {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    return ""


def _accelerators() -> str:
    described = []
    for kind in accelerators():
        for index in range(torch.accelerator.device_count()):
            device = torch.device(kind, index)
            memory = total_memory(device)
            size = "" if memory is None else f", {memory / 2**30:.0f} GiB"
            described.append(f"{device} {device_name(device)}{size}{', bfloat16' if has_bfloat16(device) else ''}")
    return "; ".join(described) or "none"


def _settings() -> list[str]:
    """Return NAME=value of the variables, only the name where the value is a path."""
    shown = [name for name in sorted(os.environ) if name.startswith(_VARIABLES)]
    return [name if os.sep in os.environ[name] else f"{name}={os.environ[name]}" for name in shown]


def total_memory(device: torch.device) -> int | None:
    """Return the size of an accelerator's memory in bytes; None if it is not reported, as on the CPU."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    if hasattr(module, "get_device_properties"):
        return module.get_device_properties(device).total_memory
    return module.recommended_max_memory() if hasattr(module, "recommended_max_memory") else None
