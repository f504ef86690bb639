"""Open the two exported files of a text-prompted detector in place of its model."""

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.apps.exported.loading import ExportedFile, ExportedModel, beside, open_exported
from vitkit.errors import CheckpointError
from vitkit.heads.grounding_dino import Text
from vitkit.structures import PAD

NUM_KEPT = 64
"""The number of batches of prompts whose features are kept, those that were read last."""


class ExportedPromptedModel(ExportedModel):
    """An exported text-prompted detector in place of the model itself; its outputs are on the CPU.

    The model reads the prompts and returns its outputs as it always does, but its parts are the files.

    Args:
        file: the opened file of the detector; that of the text encoder lies beside it.
        model: a model built from the same config, whose parts are replaced.
    Raises:
        CheckpointError: the file of the text encoder is missing, or was exported from another model.
    """

    def __init__(self, file: ExportedFile, model: nn.Module):
        super().__init__(file, model)
        path = beside(file.path, file.metadata.get("text"))
        if not path.is_file():
            raise CheckpointError(
                f"{file.path}: there is no {path.name} beside it, its text encoder. Copy both files, or export the "
                "model again."
            )
        self.text_file = open_exported(path)
        if self.text_file.metadata.get("text_id") != file.metadata.get("text_id"):
            raise CheckpointError(
                f"{path}: was exported from another model than {Path(file.path).name}. Copy both files of one export."
            )
        self._features: OrderedDict[bytes, Tensor] = OrderedDict()
        # The file normalizes and pads the images itself.
        model.prepare = lambda images, padding_mask: (images, padding_mask)
        model.backbone_maps = lambda images, padding_mask: {"images": images}
        model.text_encoder = model.text_projection = nn.Identity()
        model.encode_text = self._encode_text
        model.neck, model.head = _Unchanged(), _DetectorFile(self)

    def forward(self, images: Tensor, padding_mask: Tensor | None = None, **prompts: Any) -> dict[str, Any]:
        """Return the model's outputs; the arguments are those of the model."""
        return self.model(images.cpu(), None if padding_mask is None else padding_mask.cpu(), **prompts)

    def _encode_text(self, tokens: Tensor, blocks: Tensor) -> Text:
        """Return the features of prompts, (B, T), each of which is encoded once."""
        tokens, blocks = tokens.cpu(), blocks.cpu()
        distinct, rows = torch.unique(torch.stack((tokens, blocks), dim=1), dim=0, return_inverse=True)
        key = distinct.numpy().tobytes()
        if key not in self._features:
            inputs = dict(zip(("tokens", "blocks"), (part.contiguous() for part in distinct.unbind(1))))
            self._features[key] = self.text_file.run(inputs)["text_features"]
            if len(self._features) > NUM_KEPT:
                self._features.popitem(last=False)
        self._features.move_to_end(key)
        return Text(self._features[key][rows], tokens == PAD, blocks)


class _Unchanged(nn.Module):
    """Returns its first input."""

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None) -> Mapping[str, Tensor]:
        return features


class _DetectorFile(nn.Module):
    """The detector's file as a head of the images themselves."""

    def __init__(self, model: ExportedPromptedModel):
        super().__init__()
        self.run = model.run_file

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None, *, text: Text) -> dict[str, Tensor]:
        inputs = dict(text_features=text.features, blocks=text.blocks)
        return self.run(features["images"], padding_mask, **inputs) | {"text_padding": text.padding_mask}
