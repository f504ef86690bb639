"""The text of a text-prompted model, read and encoded once for all batches of images."""

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitkit.apps.inference.fused import versions_of
from vitkit.errors import ConfigError
from vitkit.models.text_prompted import TextPrompted, TextReading
from vitkit.protocols.fusing import has_hooks


class _Encoded(NamedTuple):
    by: Sequence[nn.Module | Tensor]
    """The network that encoded the text, and its weights."""
    state: Sequence[Any]
    """What else it depends on: their versions, the device, the precision."""
    by_size: dict[int, Any]
    """Number of images in a batch -> the text, encoded for it."""


class EncodedOnce:
    """A text as a model reads it, see `TextPrompted`, and as networks have encoded it: the model's fused copy, or the
    model itself.

    Args:
        model: what reads the text.
        text: what to look for.
    Raises:
        ConfigError: the model is not `TextPrompted`.
        DataError: it cannot read the text.
    """

    def __init__(self, model: Any, text: Any):
        if not isinstance(model, TextPrompted):
            raise ConfigError(
                f"{type(model).__name__} takes text, so it must derive from vitkit.models.text_prompted.TextPrompted."
            )
        self.text = text
        self.reading: TextReading = model.read_text(text)
        self._model = model
        self._encoded: dict[bool, _Encoded] = {}  # by the model itself: True; by a copy: False

    def by(self, network: Any, num_images: int, device: torch.device) -> Any:
        """Return the text as a network takes it for a batch of images; None if it takes a list of texts.

        It is encoded anew if the network's weights, the device or the precision of autocast have changed.
        """
        parts = [module for part in network.text_parts() for module in part.modules()]
        if not parts or network.training:
            return None
        if any(map(has_hooks, parts)):  # which see the encoder at work, and may change what it returns
            return self._encode(network, num_images, device)
        tensors = list(chain.from_iterable((*m.parameters(recurse=False), *m.buffers(recurse=False)) for m in parts))
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        state = [device, dtype, *versions_of(tensors)]
        is_model, by = network is self._model, [network, *tensors]
        kept = self._encoded.get(is_model)
        if kept is None or len(kept.by) != len(by) or not all(map(is_, kept.by, by)) or kept.state != state:
            kept = self._encoded[is_model] = _Encoded(by, state, {})
        if num_images not in kept.by_size:
            kept.by_size[num_images] = self._encode(network, num_images, device)
        return kept.by_size[num_images]

    def _encode(self, network: TextPrompted, num_images: int, device: torch.device) -> Any:
        with torch.inference_mode(False), torch.no_grad():  # so that a later run may compute gradients
            return network.encode_text(self.reading, num_images, device)
