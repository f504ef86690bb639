"""A model's fused copy, which a predictor runs in the model's place."""

import logging
from typing import Any

from torch import nn

from vitkit.protocols import Fuses, Model

logger = logging.getLogger("vitkit")


class FusedCopy:
    """Keeps a fused copy of a model, see `Model.fuse`, and makes a new one if the model has changed."""

    def __init__(self) -> None:
        self._copy: nn.Module | None = None
        self._source: list[Any] = []

    def of(self, model: nn.Module) -> Any:
        """Return what computes the same as a model in less time: the copy; or the model itself, if it is in training
        mode, not a `Model`, or if one of its modules is compiled or has a hook, which would not be so in a copy."""
        if not isinstance(model, Model) or model.is_fused:
            return model
        source: list[Any] = [model]
        for part in (model, *model.children()):
            source += map(id, vars(part).values())  # settings, such as the number of detections
        for module in model.modules():
            hooks = module._forward_hooks or module._forward_pre_hooks
            if hooks or module.training or module._compiled_call_impl is not None:
                return model
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    # Every change in place, such as an optimizer's step or load_state_dict, counts the version up,
                    # but not one through `tensor.data`.
                    version = 0 if tensor.is_inference() else tensor._version
                    source += (id(tensor), tensor.data_ptr(), version)
        if source != self._source:
            self._copy, self._source = _fused_copy(model), source
        return self._copy


def _fused_copy(model: Model) -> nn.Module:
    if not any(isinstance(module, Fuses) for module in model.modules()):
        return model
    try:
        return model.fused_copy()
    except Exception as error:  # weights that are not finite, or whatever a user's own module raises when it is copied
        logger.info("%s is not fused for inference: %s", type(model).__name__, error)
        return model
