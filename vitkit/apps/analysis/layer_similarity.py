"""Similarity of the representations of layers: centered kernel alignment (CKA) with the linear kernel (Kornblith et al.
2019, https://arxiv.org/abs/1905.00414), as figures 1 and 2 of Raghu et al. 2021 (https://arxiv.org/abs/2108.08810).

CKA is a ratio of covariances of two layers' Gram matrices. From few images, the plain covariances of wide layers are
far too high, and CKA of unrelated layers nears 1. The unbiased ones (Song et al. 2012, section 3) have the same mean
for any number of images, so that they may be averaged over minibatches (Nguyen et al. 2020,
https://arxiv.org/abs/2010.15327), whose Gram matrices are all that is stored.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.kernels import use_kernels

LEAST_IMAGES = 4
"""The unbiased covariance of fewer images is not defined."""


def centered_gram(features: Tensor) -> Tensor:
    """Return the Gram matrix of features (n, ...), centered so that a mean of products is an unbiased covariance.

    Its diagonal and the sums of its rows and columns are zero. Features are centered first, which changes the result
    by rounding only.

    Returns:
        (n * n,) float64.
    """
    rows = features.flatten(1).float()
    rows = rows - rows.mean(dim=0)
    gram = (rows @ rows.mT).double().fill_diagonal_(0.0)
    n = len(gram)
    sums = gram.sum(dim=1) / (n - 2)
    gram = gram - sums[:, None] - sums + sums.sum() / (n - 1)
    return gram.fill_diagonal_(0.0).flatten()


@torch.no_grad()
def layer_grams(network: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Return the `centered_gram` of each layer's output, by module name, in the order in which layers are computed.

    Layers are the modules that return a tensor with a row for each image; one that returns another's output unchanged
    is left out, and one that is called several times counts once.
    """
    grams: dict[str, Tensor] = {}
    # Kept as an object, so that no other output gets its address.
    last: list[Tensor] = []

    def record(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if name in grams or not isinstance(output, Tensor) or not output.is_floating_point():
            return
        given = [x for x in inputs if isinstance(x, Tensor)]
        if len(output) == len(images) and output.ndim > 1 and not any(output is x for x in (*given, *last)):
            grams[name] = centered_gram(output).cpu()
            last[:] = [output]

    handles = [module.register_forward_hook(partial(record, name)) for name, module in network.named_modules() if name]
    try:
        with use_kernels("plain"):  # where a faster kernel skips a layer, nothing would be recorded
            network(images)
    finally:
        for handle in handles:
            handle.remove()
    return grams


class LayerSimilarity:
    """Accumulates the CKA of each layer of one network with each of another, or of its own, over batches of images."""

    def __init__(self) -> None:
        self._products: Tensor | None = None
        self._names: tuple[list[str], list[str]] = ([], [])
        self._squares: tuple[Tensor, Tensor] = (torch.zeros(0), torch.zeros(0))

    def update(self, grams: dict[str, Tensor], others: dict[str, Tensor]) -> None:
        """Add a batch: the results of `layer_grams` for the same images."""
        first, second = torch.stack(list(grams.values())), torch.stack(list(others.values()))
        n = round(first.shape[1] ** 0.5)
        pairs = n * (n - 3)
        squares = first.square().sum(dim=1) / pairs, second.square().sum(dim=1) / pairs
        products = first @ second.mT / pairs
        if self._products is None:
            self._names = list(grams), list(others)
            self._products, self._squares = products, squares
            return
        self._products = self._products + products
        self._squares = self._squares[0] + squares[0], self._squares[1] + squares[1]

    def compute(self) -> tuple[list[str], list[str], Tensor]:
        """Return the names of the first network's layers and of the second's, and (layers, layers) CKA: 1 for layers
        that differ by an orthogonal map and a scale, about 0 for unrelated ones. Layers whose output is the same for
        all images are left out."""
        assert self._products is not None
        kept = [(squares > 1e-12 * squares.max()).nonzero()[:, 0] for squares in self._squares]
        names = [[names[i] for i in rows] for names, rows in zip(self._names, kept)]
        norms = [squares[rows].sqrt() for squares, rows in zip(self._squares, kept)]
        return names[0], names[1], self._products[kept[0]][:, kept[1]] / (norms[0][:, None] * norms[1])


Prepare = Callable[[list[Any]], Tensor]
"""Function that makes images into the input of a network."""


def compare_layers(
    batches: Iterable[list[Any]], network: nn.Module, prepare: Prepare, other: tuple[nn.Module, Prepare] | None = None
) -> list[LayerSimilarity]:
    """Compare the layers of a network with each other; with another network, also its layers with each other, and those
    of both.

    Args:
        batches: at least `LEAST_IMAGES` images each.
    """
    results = [LayerSimilarity() for _ in range(1 if other is None else 3)]
    for images in batches:
        grams = layer_grams(network, prepare(images))
        results[0].update(grams, grams)
        if other is not None:
            theirs = layer_grams(other[0], other[1](images))
            results[1].update(theirs, theirs)
            results[2].update(grams, theirs)
    return results
