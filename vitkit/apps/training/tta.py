"""Test-time augmentation for semantic segmentation: scores averaged over several image sizes and mirror images."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import resize

from vitkit.errors import ConfigError
from vitkit.models.mask_results import MaskResults
from vitkit.ops.images import unpadded_sizes
from vitkit.protocols.model import Model
from vitkit.registry import require_base

SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
"""Scales of MaskFormer's and Mask2Former's multi-scale results."""
_BAND_ROWS = 64  # all pixels' class scores in all sizes at once would take gigabytes
_TRAINING_OUTPUTS = ("aux_outputs", "mask_embed", "mask_features")


class MultiScaleFlip(Model):
    """A semantic model applied to every image in several sizes, each also mirrored, with the class scores of each pixel
    averaged (Cheng et al. 2021, https://arxiv.org/abs/2107.06278, section 4).

    It is evaluated like the model itself, and takes about `2 * sum(scale ** 2)` times as long: 17 with the defaults.
    All sizes are made from the image at its evaluation size; the originals make them from the stored image, which has
    more detail if it is larger.

    Args:
        model: a model with `semantic_scores`, see `MaskResults`.
        scales: factors on the size at which images are evaluated.
        flip: whether to also use each image mirrored.
    Raises:
        ConfigError: the model predicts no semantic maps, or a scale is not positive.
    """

    returns = ("semantic",)

    def __init__(self, model: Model, *, scales: Sequence[float] = SCALES, flip: bool = True):
        super().__init__()
        require_base("model", type(model), Model)
        if "semantic" not in model.tasks:
            of_task = f" of task {', '.join(model.tasks)}" if model.tasks else ""
            raise ConfigError(
                f"test-time augmentation: not defined for {type(model).__name__}{of_task}: it averages the class "
                "scores of pixels, which only semantic segmentation has. Evaluate without it"
                + (", or set model.tasks=['semantic']." if isinstance(model, MaskResults) else ".")
            )
        if not scales or min(scales) <= 0:
            raise ConfigError(f"test-time augmentation: got scales {list(scales)}; expected numbers above 0.")
        self.model = model
        self.scales = tuple(scales)
        self.flip = flip

    def forward(self, images: Tensor, padding_mask: Tensor | None = None) -> dict[str, Any]:
        """Run the model on all views of each image.

        Args:
            images, padding_mask: see the model.
        Returns:
            views: for each image, a list of the model's outputs, one for each scale: for the image, or it and its
                mirror image.
        """
        sizes = unpadded_sizes(images, padding_mask).tolist()
        return dict(
            views=[
                [self._view(image[None, :, :height, :width], scale) for scale in self.scales]
                for image, (height, width) in zip(images, sizes)
            ]
        )

    def _view(self, image: Tensor, scale: float) -> dict[str, Any]:
        size = [max(1, round(side * scale)) for side in image.shape[-2:]]
        image = resize(image, size, antialias=True)
        outputs = self.model(torch.cat([image, image.flip(-1)]) if self.flip else image)
        return {name: value for name, value in outputs.items() if name not in _TRAINING_OUTPUTS}

    def postprocess(self, outputs: Mapping[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """Return one dict per image: semantic (H, W) int64, the class of every pixel."""
        return [
            dict(semantic=self._semantic_map(views, tuple(size))) for views, size in zip(outputs["views"], image_sizes)
        ]

    def _semantic_map(self, views: Sequence[Mapping[str, Any]], size: tuple[int, int]) -> Tensor:
        bands = []
        for start in range(0, size[0], _BAND_ROWS):
            rows = range(start, min(start + _BAND_ROWS, size[0]))
            bands.append(sum(self._scores(view, size, rows) for view in views).argmax(0))
        return torch.cat(bands)

    def _scores(self, view: Mapping[str, Any], size: tuple[int, int], rows: range) -> Tensor:
        """Return scores (C, rows, W), summed over the image and its mirror image."""
        scores = torch.cat([scores for _, scores in self.model.semantic_scores(view, 0, size, within=rows)], dim=1)
        if not self.flip:
            return scores
        mirrored = [scores for _, scores in self.model.semantic_scores(view, 1, size, within=rows)]
        return scores + torch.cat(mirrored, dim=1).flip(-1)
