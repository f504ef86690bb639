"""A model's fused copy, which a predictor runs in the model's place."""

import logging
from operator import is_
from typing import Any

from torch import nn

from vitkit.protocols import Model, fuses

logger = logging.getLogger("vitkit")


class FusedCopy:
    """Keeps a fused copy of a model, see `Model.fuse`, and makes a new one if the model has changed."""

    def __init__(self) -> None:
        self._copy: nn.Module | None = None
        self._parts: list[Any] = []
        self._versions: list[int] = []

    def of(self, model: nn.Module) -> Any:
        """Return what computes the same as a model in less time: the copy; or the model itself, if it is in training
        mode, not a `Model`, or if one of its modules is compiled or has a hook, which would not be so in a copy."""
        if not isinstance(model, Model) or model.is_fused:
            return model
        # The parts are kept, not their ids, which another object may have once they are gone.
        parts: list[Any] = []
        versions: list[int] = []
        for module in model.modules():
            hooks = module._forward_hooks or module._forward_pre_hooks
            if hooks or module.training or module._compiled_call_impl is not None:
                return model
            parts.append(module)
            parts += vars(module).values()  # settings, such as the number of detections
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    parts.append(tensor)
                    # Every change in place, such as an optimizer's step or load_state_dict, counts the version up,
                    # but not one through `tensor.data`.
                    versions += (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
        same = len(parts) == len(self._parts) and all(map(is_, parts, self._parts))
        if not same or versions != self._versions:
            self._copy, self._parts, self._versions = fused_copy(model), parts, versions
        return self._copy


def fused_copy(model: Model) -> Any:
    """Return a model's fused copy; or the model itself, if there is nothing to fuse or it cannot be fused."""
    if not any(map(fuses, model.modules())):
        return model
    try:
        return model.fused_copy()
    except Exception as error:  # weights that are not finite, or whatever a user's own module raises when it is copied
        logger.info("%s is not fused for inference: %s", type(model).__name__, error)
        return model
