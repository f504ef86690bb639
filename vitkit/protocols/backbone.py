"""The interfaces of backbones and necks: feature maps of images, and facts about themselves."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

from torch import Tensor, nn

from vitkit.structures import FeatureInfo

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Mean of R, G and B, with pixel values in 0..1; IMAGENET_STD is their standard deviation."""
IMAGENET_STD = (0.229, 0.224, 0.225)

Part = TypeVar("Part")


class Backbone:
    """Feature maps of images; registered in BACKBONES.

    A backbone in a user's own file needs `feature_info` and a call, and may have any of the rest; it need not derive
    from this class, whose defaults `with_defaults` adds. `vitkit.backbones.base.BackboneBase` has what vitkit's own
    ones share.
    """

    feature_info: Mapping[str, FeatureInfo]
    """Channels and stride of each map that `forward` returns, fine to coarse."""
    pixel_mean: Sequence[float] = IMAGENET_MEAN
    """Mean of each channel that its weights expect, with pixel values in 0..1; as many as its images have channels."""
    pixel_std: Sequence[float] = IMAGENET_STD
    """Standard deviation of each channel."""
    is_classifier: bool = False
    """Whether it returns a classifier's logits, and no maps."""
    class_head: Sequence[str] = ()
    """Prefixes of a classifier's parameters whose size depends on the number of classes."""
    frozen_stages: int = 0
    """Number of stages that are not trained."""
    frozen_stem: bool = False
    """Whether the stem is not trained even if no stage is frozen."""

    load_pretrained: Callable[[], str | None] | None = None
    """Loads its pretrained weights in a way of its own, in place of `pretrained_source`; returns where they came from,
    or None if they stay random. A model without a backbone may have it, for its word vectors."""
    optional_weights: Sequence[str] = ()
    """Patterns ("*.rel_pos_h") of the entries that pretrained weights may lack."""
    renames_itself: bool = False
    """Whether its `adapt_state` converts all names of weights, which are not matched against the official formats."""
    hidden_settings: Mapping[str, Any] = MappingProxyType({})
    """Arguments that the names and shapes of weights do not show, though the weights are wrong for another value."""

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
        raise NotImplementedError

    def keep_features(self, names: Iterable[str]) -> None:
        """Return only these maps from now on, and remove the modules that only the others need."""

    def norm_of(self, feature: str) -> str | None:
        """Return the name of the norm that is applied only to this map, or None."""
        return None

    def block_names(self) -> Sequence[str] | None:
        """Return the names of its blocks, first to last, if they are modules of another library; None: its blocks are
        those that can recompute their activations."""
        return None

    def global_attention(self) -> Sequence[nn.Module]:
        """Return the modules in which every token of an image attends to every other one, first to last."""
        return ()

    def pretrained_source(self) -> str | None:
        """Return the name of its pretrained weights, which `vitkit.weights.load_pretrained` loads; None for random
        ones: a file, a folder of the transformers library, "hf:OWNER/NAME", "https://...#sha256=PREFIX" or
        "timm/NAME"."""
        return None

    def completing_state(self) -> AbstractContextManager[Any]:
        """Return a context in which it takes weights that lack some of its entries."""
        return nullcontext()

    def entries_to_leave_out(self, names: Sequence[str]) -> list[str]:
        """Return the entries of a classifier that a backbone of maps does not need, so that it can take a
        classifier's weights."""
        return []


class Neck:
    """Turns a backbone's maps into those that a head reads; registered in NECKS, built with `feature_info`.

    If its constructor has an argument `isolate_padding`, a model sets it to True where padding must not affect the
    image; the neck must do so otherwise. It need not derive from this class, see `with_defaults`.
    """

    feature_info: Mapping[str, FeatureInfo]
    """Channels and stride of each map that it returns, fine to coarse."""
    in_features: Sequence[str] | None = None
    """Names of the backbone's maps that it reads; None: all."""

    def __call__(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> Mapping[str, Tensor]:
        """Return the neck's maps; `padding_mask` is (B, H, W) bool at the size of the images, True = padding."""
        raise NotImplementedError


def with_defaults(part: nn.Module, contract: type[Part]) -> Part:
    """Return a part with the defaults of the attributes that it leaves out.

    Args:
        contract: `Backbone` or `Neck`, from which a part of vitkit derives, and a user's own need not.
    """
    return part if isinstance(part, contract) else cast(Part, _Completed(part, contract()))


class _Completed(Generic[Part]):
    """Reads a part's attributes, and those of `defaults` that it lacks."""

    def __init__(self, part: nn.Module, defaults: Part):
        self._part, self._defaults = part, defaults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part if hasattr(self._part, name) else self._defaults, name)
