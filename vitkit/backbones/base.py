"""What all backbones share: the choice of features, frozen stages, pretrained weights."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitkit.checkpoint import load_weights
from vitkit.download import cached_file
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.registry import nearest
from vitkit.structures import FeatureInfo

logger = logging.getLogger("vitkit")


def choose_features(
    owner: str, available: Mapping[str, FeatureInfo], out_features: Sequence[str] | None, *, num_classes: int | None
) -> dict[str, FeatureInfo]:
    """The features that a backbone returns, fine to coarse.

    Args:
        owner: the backbone's name in messages.
        available: all it could return, fine to coarse.
        out_features: the names wanted; None for all.
        num_classes: of a classifier, which returns logits and no features.
    Raises:
        ConfigError: a name is unknown, none is wanted, or a classifier's features are; or it has no classes.
    """
    if num_classes is not None and num_classes < 1:
        raise ConfigError(f"{owner}: num_classes={num_classes}: expected at least 1, or None for features.")
    if out_features is None:
        return dict(available)
    if num_classes is not None:
        raise ConfigError(f"{owner}: a classifier (num_classes) returns no features: leave out_features out.")
    if not out_features:
        raise ConfigError(f"{owner}: out_features is empty. {nearest('', available)}")
    for name in out_features:
        if name not in available:
            raise ConfigError(f"{owner}: unknown feature {name!r} in out_features. {nearest(name, available)}")
    return {name: info for name, info in available.items() if name in out_features}


def drop_path_rates(owner: str, drop_path: float, num_blocks: int) -> list[float]:
    """Each block's probability to be skipped in training (https://arxiv.org/abs/1603.09382): from 0 to `drop_path`.

    Raises:
        ConfigError: it is not in 0..1.
    """
    if not 0 <= drop_path < 1:
        raise ConfigError(f"{owner}: drop_path={drop_path}: expected 0 up to, not with, 1.")
    return [drop_path * i / max(num_blocks - 1, 1) for i in range(num_blocks)]


def check_images(owner: str, images: Tensor, *, least: int = 1, clips: bool = False) -> None:
    """
    Args:
        owner: the backbone's name in messages.
        least: the smallest height and width it takes, in pixels.
        clips: it takes (B, 3, T, H, W) rather than (B, 3, H, W).
    Raises:
        DataError: the images have another shape, or are smaller.
    """
    wanted = "(B, 3, T, H, W)" if clips else "(B, 3, H, W)"
    if images.ndim != 4 + clips or images.shape[1] != 3:
        raise DataError(f"{owner}: images of shape {tuple(images.shape)}: expected {wanted}.")
    height, width = images.shape[-2:]
    if min(height, width) < least:
        raise DataError(
            f"{owner}: images of {height} x {width} pixels: expected at least {least} x {least}. Resize them."
        )


class Backbone(nn.Module):
    """`backbone(images: (B, 3, H, W)) -> dict[str, Tensor]`, or logits of a classifier.

    A subclass sets
        feature_info: what it returns, fine to coarse,
        pretrained: what `load_pretrained` loads: False, nothing; a file; "https://...#sha256=PREFIX", an address with
            the first digits of its checksum; "timm/NAME", timm's weights of that name; True, the family's own choice,
        frozen_stages: how many stages are not trained, stage 0 being the stem,
    calls `freeze()` at the end of its constructor, and answers `stages()`.
    """

    class_head: tuple[str, ...] = ()
    """Prefixes of a classifier's parameters whose size follows `num_classes`."""
    optional_weights: tuple[str, ...] = ()
    """Patterns ("*.rel_pos_h") of the entries that pretrained weights may lack."""

    feature_info: dict[str, FeatureInfo]
    pretrained: bool | str = False
    frozen_stages: int = 0

    def stages(self) -> list[list[nn.Module | nn.Parameter]]:
        """What may be frozen, first the stem, then each stage."""
        raise NotImplementedError

    def norm_of(self, feature: str) -> str | None:
        """The name of the norm that only this feature passes; None if there is none."""
        return None

    def keep_features(self, names: Iterable[str]) -> None:
        """Returns no other features any more: a model says what its neck reads.

        What only the others needed would never get a gradient, which DDP does not forgive, so it is removed.
        """
        names = set(names)
        for name in self.feature_info.keys() - names:
            if self.norm_of(name):
                delattr(self, self.norm_of(name))
        self.feature_info = {name: info for name, info in self.feature_info.items() if name in names}
        self.drop_stages_after(list(self.feature_info)[-1])

    def drop_stages_after(self, feature: str) -> None:
        """Removes what is deeper than this feature, if anything is."""

    def freeze(self) -> None:
        """Takes the first `frozen_stages` out of training.

        Raises:
            ConfigError: there are not so many.
        """
        # The stem counts with the first stage, as DETR counts.
        most = len(self.stages()) - 1
        if not 0 <= self.frozen_stages <= most:
            raise ConfigError(f"{type(self).__name__}: frozen_stages {self.frozen_stages}: expected 0 to {most}.")
        for part in self._frozen():
            part.requires_grad_(False)

    def _frozen(self) -> list[nn.Module | nn.Parameter]:
        stages = self.stages()[: self.frozen_stages + 1] if self.frozen_stages else []
        return [part for stage in stages for part in stage]

    def train(self, mode: bool = True) -> "Backbone":
        super().train(mode)
        for part in self._frozen():
            if isinstance(part, nn.Module):
                part.eval()  # running statistics are frozen, too, and nothing is dropped
        return self

    def load_pretrained(self) -> str | None:
        """Loads what `pretrained` names. A run calls this at its start, unless a checkpoint follows anyway.

        Returns:
            where the weights came from, or None if `pretrained` is False.
        Raises:
            CheckpointError: the weights cannot be had, or are of another network.
        """
        if not self.pretrained:
            if self.frozen_stages:
                logger.warning(
                    "backbone: its first %d stages are random and frozen, so they never learn. To train without "
                    "pretrained weights or a checkpoint set model.backbone.frozen_stages=0.",
                    self.frozen_stages,
                )
            return None
        source = self._address() if self.pretrained is True else self.pretrained
        # A backbone has no use for the classifier, nor a classifier for one of other classes.
        report = load_weights(self, _find(source), new_class_head=True, strict=False)
        missing = [name for name in report.missing if not any(fnmatch(name, p) for p in self.optional_weights)]
        missing = [name for name in missing if not name.startswith(self.class_head or ("\0",))]
        if missing:
            raise CheckpointError(
                f"{source} does not fit this {type(self).__name__}: missing {', '.join(missing[:3])} ({len(missing)} "
                f"in all); not used: {', '.join(report.unexpected[:3]) or 'none'} ({len(report.unexpected)} in all). "
                "Are the weights of this variant?"
            )
        return source.partition("#sha256=")[0]

    def _address(self) -> str:
        """What `pretrained=True` means."""
        raise ConfigError(
            f"model.backbone.pretrained=True: {type(self).__name__} has no weights of its own. Expected a file, an "
            "address ('https://...#sha256=PREFIX') or a name of timm's ('timm/NAME')."
        )


def _find(source: str) -> Path | dict[str, Any]:
    """The file or state dict that `pretrained` means."""
    random_instead = "or start from random weights (model.backbone.pretrained=False)."
    if source.startswith("timm/"):
        return _timm_weights(source.removeprefix("timm/"), random_instead)
    if source.startswith(("http://", "https://", "file://")):
        url, _, checksum = source.partition("#sha256=")
        try:
            return cached_file(url, sha256_prefix=checksum)
        except CheckpointError as error:
            raise CheckpointError(
                f"model.backbone.pretrained: the weights are missing: {error} Or name a file "
                f"(model.backbone.pretrained=FILE), {random_instead}"
            ) from error
    if not Path(source).is_file():
        raise CheckpointError(
            f"model.backbone.pretrained: no file {source!r}. Give a file of weights, an address "
            f"('https://...#sha256=PREFIX'), a name of timm's ('timm/NAME'), {random_instead}"
        )
    return Path(source)


def _timm_weights(name: str, random_instead: str) -> dict[str, Tensor]:
    import timm

    if not timm.is_model_pretrained(name):
        raise CheckpointError(
            f"model.backbone.pretrained: timm {timm.__version__} has no weights named {name!r}. "
            f"{nearest(name, timm.list_pretrained())}"
        )
    try:
        return timm.create_model(name, pretrained=True).state_dict()
    except Exception as error:  # whatever the hub and its libraries raise when they cannot be reached
        raise CheckpointError(
            f"model.backbone.pretrained: timm's weights {name!r} cannot be had ({str(error).splitlines()[0]}). "
            f"Name a file (model.backbone.pretrained=FILE), {random_instead}"
        ) from error
