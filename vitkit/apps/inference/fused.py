"""A model's fused copy, which a predictor runs in the model's place."""

import logging
from collections.abc import Sequence
from functools import cache
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

from torch import Tensor, nn

from vitkit.protocols.fusing import fuses, has_hooks
from vitkit.protocols.model import Model

logger = logging.getLogger("vitkit")

_CONTENTS = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")


class FusedCopy:
    """Keeps a fused copy of a model, see `Model.fuse`, and makes a new one if the model has changed."""

    def __init__(self) -> None:
        self._copy: nn.Module | None = None
        self._modules: list[nn.Module] = []
        self._parts: list[Any] = []
        self._tensors: list[Tensor] = []
        self._counted: list[Tensor] = []
        self._versions: list[int] = []

    def of(self, model: nn.Module) -> Any:
        """Return a faster equivalent of a model: the copy; or the model itself, if it is in training mode, not a
        `Model`, or if one of its modules is compiled or has a hook, which would not be so in a copy."""
        if not isinstance(model, Model) or model.is_fused:
            return model
        if not self._is_of(model):
            modules = list(model.modules())
            for module in modules:
                if module.training:
                    _warn_of_training(type(model).__name__)
                if has_hooks(module) or module.training or module._compiled_call_impl is not None:
                    return model
            parts = _parts(modules)
            weights = chain.from_iterable((*m._parameters.values(), *m._buffers.values()) for m in modules)
            tensors = [tensor for tensor in weights if tensor is not None]
            # Tensors of inference mode have no version.
            counted = [tensor for tensor in tensors if not tensor.is_inference()]
            versions = _versions(tensors, counted)
            # The copy comes first: it may be interrupted, and another thread may ask for it meanwhile.
            self._copy = fused_copy(model)
            self._modules, self._parts = modules, parts
            self._tensors, self._counted, self._versions = tensors, counted, versions
        return self._copy

    def _is_of(self, model: nn.Module) -> bool:
        """Return whether the copy is of this model as it is now."""
        if not self._modules or self._modules[0] is not model:
            return False
        parts = _parts(self._modules)
        same = len(parts) == len(self._parts) and all(map(is_, parts, self._parts))
        return same and _versions(self._tensors, self._counted) == self._versions


@cache  # once a process, not for every image
def _warn_of_training(name: str) -> None:
    logger.warning(
        "%s predicts in training mode: dropout is on, and each batch changes the statistics of batch norms. Call "
        "model.eval() for other predictions.",
        name,
    )


def _parts(modules: Sequence[nn.Module]) -> list[Any]:
    """Return all parts of modules, as objects that stay the same until a module changes."""
    # This runs for every image, so its loops are those of functions in C. The parts are kept, not their ids, which
    # another object may have once they are gone.
    attributes = list(map(vars, modules))  # settings, too, such as the number of detections
    contents = chain.from_iterable(map(itemgetter(*_CONTENTS), attributes))
    return list(chain.from_iterable(map(dict.values, chain(attributes, contents))))


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return numbers of which one changes if a tensor does."""
    # Tensors of inference mode have no version.
    return _versions(tensors, [tensor for tensor in tensors if not tensor.is_inference()])


def _versions(tensors: Sequence[Tensor], counted: Sequence[Tensor]) -> list[int]:
    """Return numbers of which one changes if a tensor does; `counted` are those with a version."""
    # Every change in place, such as an optimizer's step or load_state_dict, counts the version up, but not one through
    # `tensor.data`.
    return [*map(Tensor.data_ptr, tensors), *map(attrgetter("_version"), counted)]


def fused_copy(model: Model) -> Any:
    """Return a model's fused copy; or the model itself, if there is nothing to fuse or it cannot be fused."""
    if not any(map(fuses, model.modules())):
        return model
    try:
        return model.fused_copy()
    except Exception as error:  # weights that are not finite, or whatever a user's own module raises when it is copied
        logger.info("%s is not fused for inference: %s", type(model).__name__, error)
        return model
