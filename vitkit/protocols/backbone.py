"""What a backbone provides: feature maps of images, and what it says about itself."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from vitkit.structures import FeatureInfo


class Backbone(Protocol):
    """Feature maps of images; registered in BACKBONES.

    It may have
        pixel_mean, pixel_std: mean and standard deviation of R, G and B that its weights expect, with pixel values in
            0..1; without them, ImageNet's,
        keep_features(names): returns only these maps from now on, and removes the modules that only the others need,
        pretrained_source(): the name of its pretrained weights, None for random ones: a file, a folder of the
            transformers library, "hf:OWNER/NAME", "https://...#sha256=PREFIX" or "timm/NAME".
            `vitkit.weights.load_pretrained` loads them into it, where
        completing_state(): a context in which it takes weights that lack some of its entries,
        load_pretrained(): in place of `pretrained_source`, loads its weights in a way of its own; returns where they
            came from, or None if they stay random. A model without a backbone may have it, for its word vectors,
        entries_to_leave_out(names): those of a classifier's entries that a backbone of feature maps has no use for, so
            that it can take a classifier's weights,
        optional_weights: patterns ("*.rel_pos_h") of the entries that such weights may lack,
        hidden_settings: its arguments, by name, that weights do not show though they are wrong for another value,
        block_names(): the names of its blocks, first to last, if they are modules of another library,
        and what it says about itself, see `BackboneFacts`.
    `BackboneBase` has those that its subclasses need.
    """

    feature_info: Mapping[str, FeatureInfo]
    """Channels and stride of each map that `forward` returns, fine to coarse."""

    def __call__(self, images: Tensor) -> Mapping[str, Tensor]:
        """Return the maps, in the order of `feature_info`.

        A backbone for clips takes (B, 3, T, H, W); its maps also have an axis of frames, before the height.
        A backbone whose `forward` also takes `padding_mask`, (B, H, W) bool with True = padding, keeps padding from
        affecting an image's maps.

        Args:
            images: (B, 3, H, W) float, normalized; any H and W.
        Returns:
            name -> (B, channels, ceil(H / stride), ceil(W / stride)).
        """


class BackboneFacts:
    """What a backbone says about itself, with the defaults for one that says nothing; read by `backbone_fact`."""

    patch_size: int | None = None
    """Side, in pixels, of the patches that are the tokens of every block of a plain vision transformer; None for
    others, which merge or pool their tokens or have none."""
    has_class_token: bool = False
    """Whether the first token is a class token, the only one of the image."""
    num_windows: int = 1
    """Number of windows along each side of the image, each of which has its own class token before its patches."""
    window_depends_on_size: bool = False
    """Whether its windows shrink to small maps, so that a graph of it holds for one size of images."""
    num_frames: int | None = None
    """Number of frames of the clips that it is made for; None: it takes images."""

    def global_attention(self) -> Sequence[nn.Module]:
        """Return the modules in which every token of an image attends to every other one, first to last."""
        return ()


_UNSTATED = BackboneFacts()


def backbone_fact(backbone: nn.Module, name: str) -> Any:
    """Return an attribute of `BackboneFacts`: the backbone's, or the default if it says nothing."""
    return getattr(backbone, name, getattr(_UNSTATED, name))
