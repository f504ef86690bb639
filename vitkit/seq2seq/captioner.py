"""Base of captioners, which read an image's feature map from any backbone or from a feature file."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitkit.backbones.base import check_feature_info
from vitkit.errors import DataError
from vitkit.models.base import ModelOnBackbone, network_key
from vitkit.ops.images import normalize_images, pixel_statistics, resize_mask
from vitkit.protocols.backbone import Backbone, with_defaults
from vitkit.registry import BACKBONES, Spec
from vitkit.seq2seq.decoding import TextGenerator
from vitkit.structures import UNK


class FeatureMap(NamedTuple):
    """A backbone's features of images."""

    features: Tensor
    """(B, C, h, w)."""
    padding_mask: Tensor | None
    """(B, h, w) bool, True = padding; None: there is no padding."""

    def annotations(self) -> Tensor:
        """Return the features as a sequence of locations, (B, S, C)."""
        # A fixed memory order, whatever the backbone's: sums are then rounded identically for features from a file.
        return self.features.flatten(2).transpose(1, 2).contiguous()

    def padding(self) -> Tensor:
        """Return the padding mask as a sequence of locations, (B, S) bool, True = padding."""
        if self.padding_mask is None:
            return torch.zeros_like(self.features[:, 0], dtype=torch.bool).flatten(1)
        return self.padding_mask.flatten(1)


class Captioner(ModelOnBackbone, TextGenerator):
    """Base of models that describe an image.

    Args:
        backbone: spec or module. Its coarsest map is used (`out_features=["res4"]` gives a finer one).
        freeze_backbone: do not train the backbone, including its running statistics. Inputs may only then be features
            that `data.cache_features` stored, instead of images.
        options: the arguments of `TextGenerator`.
    """

    takes = ("images",)

    def __init__(self, backbone: Spec | nn.Module, *, freeze_backbone: bool = False, **options: Any):
        super().__init__(**options)
        self.backbone = BACKBONES.build(backbone)
        check_feature_info(self.backbone)
        self.feature, info = list(self.backbone.feature_info.items())[-1]
        self.feature_channels = info.channels
        with_defaults(self.backbone, Backbone).keep_features([self.feature])
        self.freeze_backbone = freeze_backbone
        if freeze_backbone:
            self.backbone.requires_grad_(False)
        self.backbone.weights_key = None
        self.backbone.register_load_state_dict_post_hook(_clear_weights_key)

    @property
    def has_fixed_features(self) -> bool:
        """See `Model`."""
        return self.freeze_backbone

    def train(self, mode: bool = True) -> "Captioner":
        """Set training mode; a frozen backbone stays in evaluation mode."""
        super().train(mode)
        if self.freeze_backbone:
            self.backbone.eval()
        return self

    def forward(
        self, target_in: Tensor, images: Tensor | None = None, padding_mask: Tensor | None = None, **features: Tensor
    ) -> dict[str, Tensor]:
        """Predict the word that follows each position of the caption (teacher forcing).

        Args:
            target_in: (B, T) int64, BOS and the caption's words.
            images, padding_mask, features: see `look`.
        Returns:
            logits: (B, T, V) for the words that follow.
            A model may return more, see its `describe`.
        """
        return self.describe(target_in, self.look(images, padding_mask, **features))

    def start(self, **inputs: Tensor | None) -> Any:
        """Encode a batch's images, or use their features, and return the decoder's initial state."""
        return self.start_from(self.look(**inputs))

    def describe(self, target_in: Tensor, map_: FeatureMap) -> dict[str, Tensor]:
        """Predict from a feature map; see `forward`."""
        raise NotImplementedError

    def start_from(self, map_: FeatureMap) -> Any:
        """Return the decoder's initial state for a feature map."""
        raise NotImplementedError

    def look(
        self,
        images: Tensor | None = None,
        padding_mask: Tensor | None = None,
        *,
        features: Tensor | None = None,
        features_key: Tensor | None = None,
    ) -> FeatureMap:
        """Compute the feature map, or take it from `features`.

        Args:
            images: (B, 3, H, W) uint8 RGB, zero-padded at the right and bottom; or float, already normalized.
            padding_mask: (B, H, W) bool, True = padding; None if no image is padded.
            features: (B, C, h, w), an earlier result of this method for the images.
            features_key: int64, the `weights_key()` of the model that computed them.
        Raises:
            DataError: the features are from another network, or the backbone is trained.
        """
        if features is not None:
            self._check_features(features, features_key)
            return FeatureMap(features, None)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.freeze_backbone):
            normalized = normalize_images(images, padding_mask, **pixel_statistics(self.backbone))
            map_ = self.backbone(normalized)[self.feature]
        return FeatureMap(map_, None if padding_mask is None else resize_mask(padding_mask, map_.shape[-2:]))

    @staticmethod
    def mask_unknown(logits: Tensor) -> Tensor:
        """Mask the unknown word in logits (N, V): it occurs in training, but must not be written."""
        return logits.index_fill(-1, torch.tensor(UNK, device=logits.device), float("-inf"))

    def _check_features(self, features: Tensor, features_key: Tensor | None) -> None:
        if not self.freeze_backbone:
            raise DataError(
                "features: stored features need a frozen backbone, but it is trained. Set the model's "
                "freeze_backbone=True, or leave `features` out of the datasets."
            )
        if features_key is None or int(features_key) != self.weights_key():
            raise DataError(
                f"features: the stored ones, with shape {tuple(features.shape)}, come from a backbone with other "
                f"weights than the model's (feature {self.feature!r}). Leave `features` out of the datasets: "
                "data.cache_features=FOLDER computes them with the weights that training starts from."
            )

    def weights_key(self) -> int:
        """Return a fingerprint of the backbone's weights and pixel statistics and of the map's name: 63 bits of a
        SHA-256."""
        if self.backbone.weights_key is None:
            self.backbone.weights_key = network_key(self.backbone, self.feature)
        return self.backbone.weights_key

    def fuse(self) -> "Captioner":
        """See `Model`; features that were stored before remain those of this backbone."""
        key = self.weights_key() if self.freeze_backbone else None
        super().fuse()
        self.backbone.weights_key = key
        return self

    @torch.no_grad()
    def feature_maps(self, batches: Iterator[Any], device: torch.device | str) -> Iterator[Tensor]:
        """Yield the feature maps (B, C, h, w) float32 of batches of images, to be stored."""
        self.eval()
        for batch in batches:
            batch = batch.to(device)
            yield self.look(batch.inputs["images"], batch.inputs["padding_mask"]).features.float()


def _clear_weights_key(backbone: nn.Module, _: Any) -> None:
    backbone.weights_key = None
