"""Figures of an MAE's reconstruction of masked patches."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.apps.explanations.explain_options import ExplainRequest, Explanation
from vitkit.apps.explanations.panels import Panel, draw_rows
from vitkit.apps.inference.predictor import Predictor

NUM_MASKS = 3
"""Number of random masks, a row of the figure each."""
_GRAY = 0.5
"""What patches that the model does not see are drawn as, in 0..1."""


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
        whole, removed, predicted, error = (part[0] for part in model.reconstruct(images, noise=noise))
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


def _to_rgb(image: Tensor) -> np.ndarray:
    """Convert (C, H, W) float in 0..1 to (H, W, 3) uint8; of other channels than three, the first is drawn gray."""
    image = image if len(image) == 3 else image[:1].expand(3, -1, -1)
    return (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
