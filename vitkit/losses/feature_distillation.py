"""The loss of a backbone that learns the features of a frozen one."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.distributed import RatioMeter
from vitkit.errors import ConfigError
from vitkit.protocols.criterion import Criterion
from vitkit.registry import CRITERIA


@CRITERIA.register
class FeatureDistillationLoss(Criterion):
    """One minus the cosine similarity of a student's and its teacher's features, at each location and of each image.

    The cosine takes no account of a feature's scale, which differs much between tokens of large transformers.
    `meters["location_cosine"]` and `meters["image_cosine"]` are the mean similarities, -1..1.

    Args:
        location_weight, image_weight: weights of the two losses.
    Raises:
        ConfigError: a weight is negative, or both are 0.
    """

    needs_outputs = ("pred_maps", "pred_features", "teacher_map", "teacher_features")

    def __init__(self, *, location_weight: float = 1.0, image_weight: float = 1.0):
        super().__init__()
        if min(location_weight, image_weight) < 0 or location_weight + image_weight == 0:
            raise ConfigError(
                f"location_weight={location_weight}, image_weight={image_weight}: expected at least 0, and one above."
            )
        self.location_weight = location_weight
        self.image_weight = image_weight
        self.meters = {"location_cosine": RatioMeter(), "image_cosine": RatioMeter()}

    def forward(self, outputs: Mapping[str, Any], targets: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Compute the losses.

        Args:
            outputs: those of `FeatureDistillation`: pred_maps of (B, C, h, w), pred_features (B, C), teacher_map and
                teacher_features of the same shapes.
            targets: not used, as images need no labels.
        Returns:
            location: the mean over maps, images and locations; image: the mean over images.
        """
        teacher_map, teacher_features = outputs["teacher_map"].float(), outputs["teacher_features"].float()
        with torch.autocast(teacher_map.device.type, enabled=False):
            # All images have equally many locations, and all ranks equally many images.
            maps = [F.cosine_similarity(x.float(), teacher_map, dim=1).mean() for x in outputs["pred_maps"].values()]
            location = torch.stack(maps).mean()
            image = F.cosine_similarity(outputs["pred_features"].float(), teacher_features, dim=1).mean()
        for name, cosine in (("location_cosine", location), ("image_cosine", image)):
            count = torch.full_like(cosine, len(teacher_map)).detach()
            self.meters[name].add(cosine.detach() * count, count)
        return {"location": self.location_weight * (1 - location), "image": self.image_weight * (1 - image)}
