"""Figures of an MAE's reconstruction of masked patches."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.apps.explanations.explain_options import ExplainRequest, Explanation
from vitkit.apps.explanations.panels import Panel, draw_rows
from vitkit.apps.inference.predictor import Predictor
from vitkit.models.mae import MAE, patch_statistics, split_patches
from vitkit.ops.images import per_channel, pixel_statistics

NUM_MASKS = 3
"""Number of random masks, a row of the figure each."""
_GRAY = 0.5
"""What patches that the model does not see are drawn as, in 0..1."""


class Reconstruction(NamedTuple):
    """The visible patches of images, and the reconstruction from them; for drawing."""

    images: Tensor
    """(B, C, H, W) float in 0..1, the images that the model took."""
    removed: Tensor
    """(B, h, w) bool, the patches that it did not see."""
    predicted: Tensor
    """(B, C, H, W) float, the images with the removed patches as predicted; values may lie outside of 0..1."""
    errors: Tensor
    """(B,) mean squared errors of the removed patches, as in training."""


@torch.no_grad()
def explain_reconstruction(
    predictor: Predictor, image: np.ndarray, request: ExplainRequest, result: Explanation
) -> None:
    """Draw an image, what an MAE sees of it, and what it reconstructs, for several masks (figure 2 of
    https://arxiv.org/abs/2111.06377)."""
    model = predictor.model
    images = predictor.prepare([image]).to(predictor.device).inputs["images"]
    height, width = (side // model.backbone.patch_size * model.backbone.patch_size for side in images.shape[-2:])
    images = images[..., : height or None, : width or None]  # only whole patches; too small an image is an error
    num_patches = images[0, 0].numel() // model.backbone.patch_size**2
    rows, errors = [], []
    for number in range(NUM_MASKS):
        noise = torch.rand(1, num_patches, generator=torch.Generator().manual_seed(number)).to(predictor.device)
        whole, removed, predicted, error = (part[0] for part in reconstruct(model, images, noise=noise))
        hidden = F.interpolate(removed[None, None].float(), size=whole.shape[1:])[0]
        parts = {
            "image": whole,
            "what the model sees": whole.lerp(torch.full_like(whole, _GRAY), hidden),
            f"reconstruction, loss {error:.3f}": predicted,
        }
        rows.append((f"mask {number + 1}", [Panel(title=title, image=_to_rgb(part)) for title, part in parts.items()]))
        errors.append(float(error))
    given = ", with the true patches' mean and contrast" if model.norm_pix else ""
    title = f"{model.mask_ratio:.0%} of the patches are removed, and reconstructed{given}"
    draw_rows(_to_rgb(whole), rows, result.file("reconstruction.png"), title=title, panel=2.2)
    result.numbers[f"loss of the removed patches, mean of {NUM_MASKS} masks"] = sum(errors) / NUM_MASKS


@torch.no_grad()
def reconstruct(model: MAE, images: Tensor, *, noise: Tensor) -> Reconstruction:
    """Predict the removed patches of images in the values of pixels; see `MAE.forward`.

    With `norm_pix`, a predicted patch gets the mean and standard deviation of the true one.
    """
    images, side = model.prepare(images), model.backbone.patch_size
    outputs = model.predict(images, noise)
    size = images.shape[2] // side, images.shape[3] // side
    patches, removed = split_patches(images, side), outputs["removed"]
    predicted = outputs["pred_patches"].float()
    errors = (predicted - outputs["target_patches"]).square().mean(dim=(1, 2))
    if model.norm_pix:
        mean, std = patch_statistics(patches.take_along_dim(removed[:, :, None], dim=1))
        predicted = predicted * std + mean
    patches = patches.scatter(1, removed[:, :, None].expand_as(predicted), predicted)
    is_removed = torch.zeros(patches.shape[:2], dtype=torch.bool, device=images.device).scatter(1, removed, True)
    mean, std = (per_channel(values, images) for values in pixel_statistics(model.backbone).values())
    whole = join_patches(patches, size, side)
    return Reconstruction(images * std + mean, is_removed.unflatten(1, size), whole * std + mean, errors)


def join_patches(patches: Tensor, grid: tuple[int, int], side: int) -> Tensor:
    """Join patches (B, h * w, side * side * C), whose values are in the order row, column, channel, to images."""
    patches = patches.unflatten(2, (side, side, -1)).unflatten(1, grid)  # (B, h, w, side, side, C)
    return patches.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def _to_rgb(image: Tensor) -> np.ndarray:
    """Convert (C, H, W) float in 0..1 to (H, W, 3) uint8; of other channels than three, the first is drawn gray."""
    image = image if len(image) == 3 else image[:1].expand(3, -1, -1)
    return (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
