"""Converts the masks of DETR's queries to instances and panoptic maps, as the original does."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitkit.ops.mask_postprocess import Panoptic, chunks, resize

SMALLEST_AREA = 4
"""Panoptic segments with no more than this number of pixels are dropped."""


def panoptic_map(
    probabilities: Tensor,
    masks: Tensor,
    processed: tuple[int, int],
    original: tuple[int, int],
    *,
    things: Sequence[bool],
    threshold: float,
) -> Panoptic:
    """Assign each pixel to the query with the highest mask logit; drop small segments and reassign their pixels.

    Args:
        probabilities: (Q, C + 1), the last class being "no object".
        masks: (Q, h, w) logits.
        processed: (height, width) of the image as the model saw it; `original` as it is stored.
        things: for each class, whether it has instances.
        threshold: class probability that queries have to exceed.
    """
    scores, labels = probabilities.max(-1)
    confident = (labels != probabilities.shape[-1] - 1) & (scores > threshold)
    scores, labels, masks = scores[confident], labels[confident].tolist(), masks[confident]
    # Segments of the same stuff class are only merged in the first round.
    first_of_class = [labels.index(label) if not things[label] else i for i, label in enumerate(labels)]
    chosen, owner = list(range(len(labels))), torch.zeros(processed, dtype=torch.int64)
    first_round = True
    while chosen:
        owner = mask_argmax(masks[chosen], processed).cpu()
        if first_round:
            owner = torch.tensor(first_of_class)[owner]
            first_round = False
        owner = resize_nearest(owner, original)
        areas = owner.flatten().bincount(minlength=len(chosen)).tolist()
        large = [query for query, area in zip(chosen, areas) if area > SMALLEST_AREA]
        if len(large) == len(chosen):
            break
        chosen = large
    segments = [
        dict(id=n, label=labels[q], score=float(scores[q]), is_thing=bool(things[labels[q]]))
        for n, q in enumerate(chosen, start=1)
    ]
    if not chosen:
        return Panoptic(torch.zeros(original, dtype=torch.int32), [])
    return Panoptic(owner.int() + 1, segments)


def instance_masks(masks: Tensor, padded: tuple[int, int], image: tuple[int, int], original: tuple[int, int]) -> Tensor:
    """Resize (Q, h, w) logits to (Q, H, W) bool of the original image, thresholding before the last resizing."""
    original = tuple(original)
    resized = torch.zeros(len(masks), *original, dtype=torch.bool, device=masks.device)
    for chunk in chunks(len(masks), (padded, original)):
        inside = resize(masks[chunk], padded)[:, : image[0], : image[1]].sigmoid() > 0.5
        resized[chunk] = F.interpolate(inside[:, None].float(), size=original, mode="nearest")[:, 0].bool()
    return resized


def mask_argmax(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """Return (*size) int64, the index of the highest of N > 0 masks (N, h, w) at each pixel, the first if equal."""
    best = masks.new_full(size, -torch.inf)
    owner = torch.zeros(size, dtype=torch.int64, device=masks.device)
    for chunk in chunks(len(masks), (size,)):
        value, index = resize(masks[chunk], size).max(0)
        owner = torch.where(value > best, index + chunk.start, owner)
        best = torch.maximum(best, value)
    return owner


def resize_nearest(labels: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize an (h, w) map as Pillow does, which the original uses."""
    resized = Image.fromarray(labels.int().numpy()).resize((size[1], size[0]), Image.Resampling.NEAREST)
    return torch.from_numpy(np.array(resized)).long()
