"""Models over several processes: whole on each (DDP), or divided among them (FSDP2)."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from vitkit.distributed import world_size
from vitkit.engine.settings import TrainSettings
from vitkit.errors import ConfigError

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_DIVIDED = StateDictOptions()


def shard(model: nn.Module, device: torch.device) -> nn.Module:
    """Divides a model's weights among the ranks, in place, before its optimiser is built, whose state is divided alike.

    A block's weights are whole only while it computes. Blocks are what `enable_activation_checkpointing` knows as such.

    Raises:
        ConfigError: there is no process group, or this torch cannot do it on this device.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "train.strategy=fsdp: there is one process, and nothing to divide a model among. Start it by torchrun "
            "--nproc-per-node …, or set train.strategy=ddp."
        )
    if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise ConfigError(
            f"train.strategy=fsdp: torch {torch.__version__} divides no model among CPU processes. Use a newer "
            "one, GPUs, or train.strategy=ddp."
        )
    mesh = init_device_mesh(device.type, (world_size(),))
    for module in model.modules():
        if hasattr(module, "recompute"):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def is_sharded(model: nn.Module) -> bool:
    """Whether the weights are divided among the ranks."""
    return isinstance(model, FSDPModule)


def wrap(model: nn.Module, settings: TrainSettings, device: torch.device) -> nn.Module:
    """The model as the loop calls it; parameters are shared with `model`."""
    if settings.compile:
        model = torch.compile(model)
    if world_size() > 1 and settings.strategy == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        # Gradients of 1x1 kernels come in channels-last strides, which for them are the same order of numbers.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        model = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    return model


def unsynchronised(trained: nn.Module) -> AbstractContextManager:
    """Within it a backward pass keeps its gradients to its own rank, as a later one of the same step shares them."""
    if isinstance(trained, DistributedDataParallel):
        return trained.no_sync()
    return _unsynchronised_shards(trained) if is_sharded(trained) else nullcontext()


@contextmanager
def _unsynchronised_shards(model: FSDPModule) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Within it every rank has all weights and computes by itself, such as another number of batches than others."""
    sharded = [module for module in model.modules() if is_sharded(module)]
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.set_reshard_after_forward(module is not model, recurse=False)
            module.reshard()


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The norm of all gradients together, the same on every rank."""
    norm = nn.utils.get_total_norm(_gradients(parameters))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip_gradients(parameters: Sequence[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scales the gradients, whose norm is given, down to a largest norm."""
    gradients = _gradients(parameters)
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.to_local().mul_(factor)


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def state_of(part: Any, model: nn.Module, *, whole: bool = True) -> Mapping[str, Any]:
    """The state of a part of a run as a checkpoint holds it; all ranks ask for it.

    Args:
        whole: of divided ones the main process alone gets it, with whole tensors; else each rank gets its own parts.
    """
    options = _WHOLE if whole else _DIVIDED
    if is_sharded(model) and part is model:
        return get_model_state_dict(model, options=options)
    if is_sharded(model) and isinstance(part, Optimizer):
        # Asked for its state before its first step, torch would make that step.
        return get_optimizer_state_dict(model, part, options=options) if part.state else {"divided": True}
    return part.module.state_dict() if isinstance(part, AveragedModel) else part.state_dict()


def load_state(part: Any, state: Mapping[str, Any], model: nn.Module, *, whole: bool = True) -> None:
    """Puts back what `state_of` gave; `whole` as there, but that all ranks have it."""
    options = _WHOLE if whole else _DIVIDED
    if is_sharded(model) and part is model:
        set_model_state_dict(model, dict(state), options=options)
    elif isinstance(part, Optimizer) and is_sharded(model):
        if "state" in state:
            set_optimizer_state_dict(model, part, optim_state_dict=dict(state), options=options)
    elif isinstance(part, Optimizer):
        # Which of its kernels it takes is this run's to say, not that of a run from before they were fused.
        own, saved = part.param_groups, state["param_groups"]
        if len(own) == len(saved):  # else torch says what is wrong
            kernels = [{"fused": group["fused"]} if "fused" in group else {} for group in own]
            state = {**state, "param_groups": [group | kernel for group, kernel in zip(saved, kernels)]}
        part.load_state_dict(state)
        _lay_out_as_parameters(part)
    else:
        (part.module if isinstance(part, AveragedModel) else part).load_state_dict(state)


def _lay_out_as_parameters(optimizer: Optimizer) -> None:
    """Gives state of another memory format its parameter's, which `train.channels_last` may have changed since.

    torch's fused optimisers read parameter, gradient and state in the order in which they lie in memory.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def divided_state(part: Any, model: nn.Module) -> Mapping[str, Any]:
    """The state of a divided model, or of its optimiser, each rank's own parts, to be overwritten in place."""
    if part is model:
        return get_model_state_dict(model, options=_DIVIDED)
    return get_optimizer_state_dict(model, part, options=_DIVIDED)
