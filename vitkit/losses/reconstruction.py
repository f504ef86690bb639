"""The loss of models that reconstruct removed patches of images."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkit.protocols.criterion import Criterion
from vitkit.registry import CRITERIA


@CRITERIA.register
class ReconstructionLoss(Criterion):
    """Mean squared error of the removed patches' values (He et al. 2021, https://arxiv.org/abs/2111.06377)."""

    needs_outputs = ("pred_patches", "target_patches")

    def forward(self, outputs: Mapping[str, Tensor], targets: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Compute the loss.

        Args:
            outputs: pred_patches and target_patches (B, M, P), only of the patches that the model did not see.
            targets: not read.
        Returns:
            reconstruction: the mean over the values of all patches, of which every image has equally many.
        """
        predicted, values = outputs["pred_patches"], outputs["target_patches"]
        with torch.autocast(predicted.device.type, enabled=False):
            # The values have full precision, also under autocast.
            return {"reconstruction": F.mse_loss(predicted.to(values.dtype), values)}
