"""Run tests on another device than they were written for: VITKIT_TEST_DEVICE=cuda pytest -k golden

A module that a test calls is moved to the device with its inputs, and its outputs are moved back, so that the test can
compare them. With VITKIT_TEST_PRECISION=bf16 modules run under autocast, and golden outputs may differ by `BF16_ERROR`.
"""

import functools

import golden.weights
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

BF16_ERROR, MASK2FORMER_BF16_ERROR = 0.05, 0.15
"""The tolerated norm of an output's difference, relative to the output's norm. About fifty layers round to bfloat16's 8
bits, and Mask2Former's layers attend within masks, where rounding may flip a pixel (0.115 on a CPU)."""
BF16_SCORES = 0.25
"""The tolerated difference of scores whose order selects locations: 8 steps of bfloat16 at a score of 4."""


def install(device: torch.device, precision: str) -> None:
    """From now on, run every module that is not called by another one on the device."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    nn.Module.__call__ = _on_device(nn.Module.__call__, device, precision)
    Tensor.numpy = _to_numpy(Tensor.numpy)
    if precision == "bf16":
        golden.weights.compare = _by_norm(golden.weights.compare)
        golden.weights.pinned_topk = functools.partial(golden.weights.pinned_topk, tol=BF16_SCORES)


def _on_device(call, device: torch.device, precision: str):
    depth = 0

    @functools.wraps(call)
    def on_device(module: nn.Module, *args, **kwargs):
        nonlocal depth
        if depth:
            return call(module, *args, **kwargs)
        depth += 1
        try:
            args, kwargs = tree_map_only(Tensor, to_device, (args, kwargs))
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                outputs = call(module.to(device), *args, **kwargs)
        finally:
            depth -= 1
        return tree_map_only(Tensor, to_host, outputs)

    def to_device(x: Tensor) -> Tensor:
        return x if getattr(x, "stays_on_host", False) else x.to(device)

    def to_host(x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            x.stays_on_host = True  # such as matches, which the criterion expects there
        return x.cpu()

    return on_device


def _to_numpy(numpy):
    """Read gradients and tensors kept by hooks from any device."""

    @functools.wraps(numpy)
    def to_numpy(x: Tensor, **options):
        x = x.cpu()
        return numpy(x.float() if x.dtype == torch.bfloat16 else x, **options)

    return to_numpy


def _by_norm(compare):
    @functools.wraps(compare)
    def by_norm(case, outputs, **options):
        report = compare(case, outputs, **options)
        limit = MASK2FORMER_BF16_ERROR if "mask2former" in case.name else BF16_ERROR
        return {name: {**line, "ok": line["rel_l2"] <= limit} for name, line in report.items()}

    return by_norm
