"""MAE: a ViT learns from unlabeled images by reconstructing patches that it does not see (He et al. 2021,
https://arxiv.org/abs/2111.06377).

Shapes: B batch, h x w patches, L = h * w, K patches are kept, M = L - K are removed, P = patch_size**2 * channels.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.backbones.base import check_at_least_1
from vitkit.backbones.vit import Tokens, ViT
from vitkit.backbones.vit_blocks import Block
from vitkit.errors import ConfigError, DataError
from vitkit.models.pretraining import PretrainingModel, pooled_features
from vitkit.nn.layers import Linear
from vitkit.nn.vit_positions import mae_positions, resize_positions_2d
from vitkit.protocols.criterion import Criterion
from vitkit.registry import CRITERIA, MODELS, Spec

_VARIANCE_EPS = 1e-6


@MODELS.register
class MAE(PretrainingModel):
    """A ViT that encodes a part of the patches, and a smaller one that predicts the pixels of the others.

    Images have one size, a multiple of the patch size. After training, only the backbone is of use.

    Args:
        backbone: spec of a ViT without windows and `num_classes`, or a module; MAE's has positions="sincos". From a
            spec, it is initialized as by MAE.
        mask_ratio: fraction of the patches that are removed.
        norm_pix: predict each patch's pixels minus their mean, divided by their standard deviation; False: normalized
            only as the whole image is.
        decoder_d_model, decoder_depth, decoder_num_heads: size of the decoder.
    Raises:
        ConfigError: the backbone is not such a ViT, or an argument is out of range.
    """

    def __init__(
        self,
        backbone: Spec | nn.Module,
        *,
        mask_ratio: float = 0.75,
        norm_pix: bool = True,
        decoder_d_model: int = 512,
        decoder_depth: int = 8,
        decoder_num_heads: int = 16,
    ):
        super().__init__(backbone)
        check_at_least_1(
            decoder_d_model=decoder_d_model, decoder_depth=decoder_depth, decoder_num_heads=decoder_num_heads
        )
        if decoder_d_model % decoder_num_heads or decoder_d_model % 4:
            raise ConfigError(
                f"decoder_d_model={decoder_d_model}: expected a multiple of 4 and of decoder_num_heads="
                f"{decoder_num_heads}."
            )
        _check_backbone(self.backbone)
        self.mask_ratio = mask_ratio
        self.num_kept(self.backbone.grid)
        self.norm_pix = norm_pix
        num_others, d_model = self.backbone.num_tokens, self.backbone.norm.normalized_shape[0]
        self.decoder_embed = Linear(d_model, decoder_d_model)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_d_model))
        positions = mae_positions(self.backbone.grid, decoder_d_model, num_others=num_others)
        self.register_buffer("decoder_pos_embed", positions)
        self.decoder_blocks = nn.ModuleList(
            Block(decoder_d_model, decoder_num_heads, d_mlp=4 * decoder_d_model) for _ in range(decoder_depth)
        )
        self.decoder_norm = nn.LayerNorm(decoder_d_model, eps=1e-6)
        num_values = self.backbone.patch_size**2 * self.backbone.in_channels
        if norm_pix and num_values == 1:
            raise ConfigError("norm_pix=True: a patch of one value has no standard deviation. Set norm_pix=False.")
        self.decoder_pred = Linear(decoder_d_model, num_values)
        self._initialize(with_backbone=not isinstance(backbone, nn.Module))

    def _initialize(self, *, with_backbone: bool) -> None:
        for name, part in self.named_children():
            if name != "backbone" or with_backbone:
                part.apply(_init_linear)
        nn.init.normal_(self.mask_token, std=0.02)
        if with_backbone:
            nn.init.xavier_uniform_(self.backbone.patch_embed.proj.weight.flatten(1))  # as of a linear layer
            for token in (self.backbone.cls_token, self.backbone.dist_token, self.backbone.reg_token):
                if token is not None:
                    nn.init.normal_(token, std=0.02)

    def forward(
        self, images: Tensor, padding_mask: Tensor | None = None, *, noise: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Predict the removed patches.

        Args:
            images: (B, 3, H, W) uint8 RGB, or float, normalized by ImageNet's mean and standard deviation.
            padding_mask: ignored, as all images have one size.
            noise: (B, L), by which the patches of each image are ordered: the first K are kept. None: random; in
                evaluation mode the same at every call.
        Returns:
            pred_patches, target_patches: (B, M, P), pixels in the order row, column, channel.
            removed: (B, M) int64, the number of each of these patches.
            features: only in evaluation mode, (B, d_model), see `pooled_features`.
        Raises:
            DataError: the images cannot be divided into patches.
        """
        images = self.prepare(images)
        outputs = self.predict(images, noise)
        if not self.training:
            outputs["features"] = pooled_features(self.backbone, images)
        return outputs

    def predict(self, images: Tensor, noise: Tensor | None = None) -> dict[str, Tensor]:
        """Predict the removed patches of prepared images; see `forward`."""
        size = self._grid_of(images)
        patches = split_patches(images, self.backbone.patch_size)
        kept, removed = self.choose(size, len(images), noise)
        targets = patches.take_along_dim(removed[:, :, None], dim=1)
        if self.norm_pix:
            mean, std = patch_statistics(targets)
            targets = (targets - mean) / std
        predicted = self.decode(self.encode(images, kept), kept, removed)
        return {"pred_patches": predicted, "target_patches": targets, "removed": removed}

    def choose(self, grid: tuple[int, int], num_images: int, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the numbers of the kept patches (B, K) and of the removed ones (B, M), int64."""
        shape, device = (num_images, grid[0] * grid[1]), self.mask_token.device
        if noise is None and self.training:
            noise = torch.rand(shape, device=device)
        elif noise is None:
            noise = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device)
        order, count = noise.argsort(dim=1), self.num_kept(grid)
        return order[:, :count], order[:, count:]

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Replace the decoder's fixed positions of another grid by those of this one."""
        key = f"{prefix}decoder_pos_embed"
        if key in state and state[key].shape != self.decoder_pos_embed.shape:
            state[key] = self.decoder_pos_embed

    def num_kept(self, grid: tuple[int, int]) -> int:
        """Return K for a grid of patches.

        Raises:
            ConfigError: none or all of them would be kept.
        """
        length = grid[0] * grid[1]
        count = int(length * (1 - self.mask_ratio)) if 0 < self.mask_ratio < 1 else 0
        if not 0 < count < length:
            raise ConfigError(
                f"mask_ratio={self.mask_ratio}: expected a number between 0 and 1 that keeps and removes at least one "
                f"of {grid[0]} x {grid[1]} patches, such as 0.75."
            )
        return count

    def encode(self, images: Tensor, kept: Tensor) -> Tokens:
        """Return the backbone's normalized tokens of the kept patches, (B, K) int64, which are all that it sees."""
        tokens = self.backbone.run_blocks(self.backbone.keep(self.backbone.tokens(images), kept))
        return tokens._replace(x=self.backbone.norm(tokens.x))

    def decode(self, tokens: Tokens, kept: Tensor, removed: Tensor) -> Tensor:
        """Predict the pixels of the removed patches, (B, M, P), from the tokens of the kept ones."""
        num_others, size = self.backbone.num_tokens, tokens.size
        others, encoded = self.decoder_embed(tokens.x).split((num_others, kept.shape[1]), dim=1)
        indices = kept[:, :, None].expand_as(encoded)
        patches = self.mask_token.to(encoded.dtype).expand(len(kept), size[0] * size[1], -1)
        x = torch.cat((others, patches.scatter(1, indices, encoded)), dim=1)
        table = self.decoder_pos_embed
        grid, antialias = self.backbone.grid, self.backbone.antialias
        positions = resize_positions_2d(table[:, num_others:], grid, size, antialias=antialias)
        x = x + torch.cat((table[:, :num_others], positions), dim=1)
        for block in self.decoder_blocks:
            x = block(x, size)
        x = x.take_along_dim(removed[:, :, None] + num_others, dim=1)
        return self.decoder_pred(self.decoder_norm(x))

    def _grid_of(self, images: Tensor) -> tuple[int, int]:
        """Return the number of rows and columns of patches; raise a DataError if the images' size is not a multiple of
        the patch size."""
        (height, width), side = images.shape[-2:], self.backbone.patch_size
        if height % side or width % side:
            raise DataError(
                f"MAE: images of {height} x {width} pixels: expected multiples of the patch size, {side}. Set the size "
                "of data.train.transforms to one."
            )
        return height // side, width // side


@CRITERIA.register
class ReconstructionLoss(Criterion):
    """Mean squared error of the removed patches' values."""

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


def split_patches(images: Tensor, side: int) -> Tensor:
    """Divide images into patches: (B, C, h * side, w * side) -> (B, h * w, side * side * C), in the order row, column,
    channel."""
    patches = images.unflatten(3, (-1, side)).unflatten(2, (-1, side))  # (B, C, h, side, w, side)
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def patch_statistics(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation, kept above 0, of the values of each patch, (B, L, 1)."""
    return patches.mean(dim=-1, keepdim=True), (patches.var(dim=-1, keepdim=True) + _VARIANCE_EPS).sqrt()


def _init_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _check_backbone(backbone: nn.Module) -> None:
    remedy = "Choose one such as vit_base_patch16."
    if not isinstance(backbone, ViT):
        raise ConfigError(f"backbone: MAE removes tokens of a ViT; got {type(backbone).__name__}. {remedy}")
    if not backbone.attends_globally or backbone.patch_embed.stem is not None:
        raise ConfigError(f"backbone: MAE needs a ViT without windows and stem. {remedy}")
    (height, width), side = backbone.image_size, backbone.patch_size
    if height % side or width % side:
        raise ConfigError(
            f"backbone.image_size: {height} x {width} pixels cannot be divided into patches of {side}. Expected "
            f"multiples of {side}."
        )
