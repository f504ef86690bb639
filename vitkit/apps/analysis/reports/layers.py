"""`vitkit analyze --cka`: similarity of the layers of a model to each other and to those of another."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.apps.analysis.layer_similarity import LEAST_IMAGES, LayerSimilarity, compare_layers
from vitkit.apps.analysis.reports.similarity_plot import SimilarityPanel, plot_layer_similarity
from vitkit.apps.analysis.reports.subject import find_subject
from vitkit.apps.inference.inputs import find_images, to_array
from vitkit.apps.inference.load import load
from vitkit.errors import ConfigError, DataError
from vitkit.models.base import statistics_owner
from vitkit.ops.images import normalize_images, pixel_statistics
from vitkit.protocols.backbone import Backbone, with_defaults
from vitkit.protocols.model import child
from vitkit.weights import load_pretrained

logger = logging.getLogger("vitkit")
IMAGES_PER_BATCH = 32


@dataclass(frozen=True)
class Similarities:
    """The CKA of each pair of layers."""

    first: str
    second: str
    layers: list[str]
    """Layers of the first model, in the order in which they are computed."""
    other_layers: list[str]
    cka: list[list[float]]
    """For each layer of the first model, its CKA with each of the second's."""
    num_images: int


@dataclass(frozen=True)
class _Network:
    """A network and the preparation of its images."""

    label: str
    module: nn.Module
    size: tuple[int, int]
    statistics: Mapping[str, Sequence[float]]
    device: torch.device

    def prepare(self, images: Sequence[np.ndarray]) -> Tensor:
        """Resize images (H, W, 3) uint8 to the network's size, and normalize them as it expects."""
        resized = [
            F.interpolate(torch.from_numpy(image).permute(2, 0, 1)[None], self.size, mode="bilinear", antialias=True)
            for image in images
        ]
        return normalize_images(torch.cat(resized).to(self.device), **self.statistics)


def layer_similarity(
    model: str | Path,
    images: Any,
    other: str | Path | None = None,
    *,
    weights: str | Path | None = None,
    overrides: Sequence[str] = (),
    other_weights: str | Path | None = None,
    other_overrides: Sequence[str] = (),
    size: int | tuple[int, int] | None = None,
    batch_size: int = IMAGES_PER_BATCH,
    device: str = "cpu",
    out: str | Path | None = None,
    trust: bool = False,
) -> list[Similarities]:
    """Compare the layers of a model's backbone with each other, and with those of another's, by unbiased linear CKA.

    Args:
        model: a backbone's name, whose weights `pretrained=...` among the overrides names, or see `find_model`. Without
            weights, they are random.
        images: see `find_images`; they are resized to the size of each model, see `Subject.input_shape`.
        other: the other model; None: only the first.
        weights, overrides, other_weights, other_overrides: see `find_model`; for a backbone, overrides are `key=value`.
        size: height and width of the images, or the side of squares; None: that of each model.
        batch_size: images that are computed, and whose similarities are compared, at once.
        out: a PNG to draw.
        trust: see `find_model`.
    Returns:
        the layers of the model; with another, also the layers of that, and those of both.
    Raises:
        ConfigError: there is no such model, or it takes something other than images in color.
        DataError: there are fewer than four images.
    """
    if batch_size < LEAST_IMAGES:
        raise ConfigError(f"--batch-size {batch_size}: CKA compares images; expected at least {LEAST_IMAGES}.")
    given = [(model, weights, overrides)] + ([] if other is None else [(other, other_weights, other_overrides)])
    networks = [
        _find(name, own_weights, own, size=size, device=torch.device(device), trust=trust)
        for name, own_weights, own in given
    ]
    batches = _Batches(images, batch_size)
    second = None if other is None else (networks[1].module, networks[1].prepare)
    results = compare_layers(batches, networks[0].module, networks[0].prepare, second)
    if not batches.num_images:
        raise DataError(f"--images {images}: CKA compares images; expected at least {LEAST_IMAGES} that can be read.")
    sides = [(0, 0), (1, 1), (0, 1)][: len(results)]
    found = [
        _similarities(r, networks[i].label, networks[j].label, batches.num_images) for r, (i, j) in zip(results, sides)
    ]
    if out is not None:
        # The other model is along the x axis of the panel of both, as in figure 2.
        panels = [SimilarityPanel(s.second, s.first, s.other_layers, s.layers, np.array(s.cka)) for s in found]
        measure = f"CKA (linear, unbiased) on {batches.num_images} images"
        plot_layer_similarity(panels, out, measure=measure)
    return found


def _similarities(result: LayerSimilarity, first: str, second: str, num_images: int) -> Similarities:
    layers, other_layers, cka = result.compute()
    return Similarities(first, second, layers, other_layers, cka.tolist(), num_images)


def _find(
    name: str | Path,
    weights: str | Path | None,
    overrides: Sequence[str],
    *,
    size: int | tuple[int, int] | None,
    device: torch.device,
    trust: bool,
) -> _Network:
    subject = find_subject(name, weights, overrides=overrides, trust=trust).of_images("--cka")
    if subject.found is None or subject.found.weights is None:
        model = subject.build("cpu")
        trained = load_pretrained(model) is not None
    else:
        model, trained = load(subject.found.config, subject.found.weights, trust=trust).model, True
    shape, _ = subject.input_shape(model, size=size, frames=None, batch_size=1)
    backbone = model if subject.found is None else child(model, "backbone")
    if backbone is None:
        raise ConfigError(f"--cka: {subject.name} has no backbone, whose layers would be compared.")
    if shape[1] != 3 or with_defaults(backbone, Backbone).num_frames is not None:
        raise ConfigError(f"--cka: {subject.name} takes clips or other channels; expected a model of color images.")
    label = subject.name if trained else f"{subject.name} (random weights)"
    statistics = pixel_statistics(statistics_owner(model))
    return _Network(label, backbone.eval().to(device), (shape[-2], shape[-1]), statistics, device)


class _Batches:
    """The readable images of a source, in batches of about equal sizes."""

    def __init__(self, images: Any, batch_size: int):
        inputs = find_images(images)
        if inputs.kind == "stream":
            raise DataError(
                f"--images {images}: is a video or a camera. Expected a folder, a pattern or a list of images."
            )
        self.named, self.leaves_out_broken = list(inputs.named), inputs.leaves_out_broken
        # Rather a few images more at once than a batch of too few, which would be left out.
        self.num_batches = max(1, min(-(-len(self.named) // batch_size), len(self.named) // LEAST_IMAGES))
        self.num_images = 0
        """Number of images so far."""

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        for part in np.array_split(np.arange(len(self.named)), self.num_batches):
            batch = []
            for name, image in (self.named[i] for i in part):
                try:
                    batch.append(to_array(image, name))
                except DataError as error:
                    if not self.leaves_out_broken:
                        raise
                    logger.warning("left out: %s", error)
            if len(batch) >= LEAST_IMAGES:
                self.num_images += len(batch)
                yield batch
