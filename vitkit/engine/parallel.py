"""Models on several processes: a full copy on each (DDP), or sharded among them (FSDP2)."""

import warnings
from collections.abc import Iterator, Mapping
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
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from vitkit.distributed import broadcast, is_main, world_size
from vitkit.engine.averaging import MovingAverage
from vitkit.engine.settings import TrainSettings
from vitkit.errors import ConfigError
from vitkit.nn.activation_checkpointing import find_recomputable_blocks

_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SHARDED = StateDictOptions()


def shard(model: nn.Module, device: torch.device) -> nn.Module:
    """Shard a model's weights among the ranks, in place; to be called before building its optimizer, which is then
    sharded too.

    A block's weights are gathered only while it computes. Blocks are those that support activation checkpointing.

    Raises:
        ConfigError: there is no process group, or torch cannot shard on this device.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "train.strategy=fsdp: a model is sharded over several processes, but there is only one. Start the run with "
            "torchrun --nproc-per-node …, or set train.strategy=ddp."
        )
    if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise ConfigError(
            f"train.strategy=fsdp: torch {torch.__version__} cannot shard a model over CPU processes. Use a newer "
            "one, GPUs, or train.strategy=ddp."
        )
    mesh = init_device_mesh(device.type, (world_size(),))
    for block in find_recomputable_blocks(model).values():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def is_sharded(model: nn.Module) -> bool:
    """Whether the weights are sharded among the ranks."""
    return isinstance(model, FSDPModule)


def wrap(model: nn.Module, settings: TrainSettings, device: torch.device) -> nn.Module:
    """Return the model as the loop calls it; its parameters are those of `model`."""
    if settings.compile:
        model = torch.compile(model)
    if world_size() > 1 and settings.strategy == "ddp":
        ids = None if device.index is None else [device.index]
        # Gradients of 1x1 kernels have channels-last strides, which for them mean the same memory order.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        model = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    return model


def no_sync(trained: nn.Module) -> AbstractContextManager:
    """Keep gradients local to each rank in this context; a later backward pass of the same step synchronizes them."""
    if isinstance(trained, DistributedDataParallel):
        return trained.no_sync()
    return _no_sync_of_shards(trained) if is_sharded(trained) else nullcontext()


@contextmanager
def _no_sync_of_shards(model: FSDPModule) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


@contextmanager
def full_weights(model: nn.Module) -> Iterator[None]:
    """Give every rank the full weights inside the context; ranks may then run different numbers of batches."""
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


def state_of(part: Any, model: nn.Module, *, full: bool = True) -> Mapping[str, Any]:
    """Return the state of a part of a run in the form stored in checkpoints; all ranks must call it.

    Args:
        full: gather sharded tensors: only the main process gets them, in full. Otherwise each rank gets its shards.
    """
    if is_sharded(model) and isinstance(part, Optimizer) and not part.state:
        return {}  # before its first step, torch would make a step to create the state
    if is_sharded(model) and isinstance(part, (nn.Module, Optimizer)):
        return local_state(part, model, options=_FULL if full else _SHARDED)
    return _weights_of(part).state_dict()


def _weights_of(part: Any) -> Any:
    """Return the averaged model of a moving average; anything else as it is."""
    return part.module if isinstance(part, MovingAverage) else part


def local_state(part: Any, model: nn.Module, *, options: StateDictOptions = _SHARDED) -> Mapping[str, Any]:
    """Return the state of a sharded model, of its average or its optimizer, as each rank's shards, to be overwritten in
    place."""
    if isinstance(part, Optimizer):
        return get_optimizer_state_dict(model, part, options=options)
    return get_model_state_dict(_weights_of(part), options=options)


def load_state(part: Any, state: Mapping[str, Any], model: nn.Module, *, full: bool = True) -> None:
    """Load the result of `state_of`; `full` has the same meaning, except that all ranks have the full tensors."""
    options = _FULL if full else _SHARDED
    if is_sharded(model) and isinstance(part, nn.Module):
        set_model_state_dict(_weights_of(part), dict(state), options=options)
    elif is_sharded(model) and isinstance(part, Optimizer):
        if "state" in state:
            set_optimizer_state_dict(model, part, optim_state_dict=dict(state), options=options)
    elif isinstance(part, Optimizer):
        # This run chooses the optimizer's kernels, not the saved one, which may predate the fused kernels.
        groups, saved = part.param_groups, state["param_groups"]
        if len(groups) == len(saved):  # otherwise torch reports the error
            kernels = [{"fused": group["fused"]} if "fused" in group else {} for group in groups]
            state = {**state, "param_groups": [group | kernel for group, kernel in zip(saved, kernels)]}
        part.load_state_dict(state)
        _lay_out_as_parameters(part)
    else:
        _weights_of(part).load_state_dict(state)


def load_from_main(model: nn.Module, state: Mapping[str, Tensor] | None) -> None:
    """Load full weights that only the main process has, on all ranks."""
    if is_sharded(model):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, dict(state or {}), options=options)
        return
    if is_main():
        model.load_state_dict(state)
    for value in model.state_dict().values():
        broadcast(value)


def _lay_out_as_parameters(optimizer: Optimizer) -> None:
    """Convert optimizer state to the memory format of its parameter, which `train.channels_last` may have changed.

    torch's fused optimizers read parameter, gradient and state in memory order.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
