"""Sliding-window evaluation of images that are larger than a model's input."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitkit.models.mask_results import MaskResults
from vitkit.ops.mask_postprocess import Geometry, WindowMasks, merge_window_scores


def cut_windows(images: Tensor, image_sizes: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return windows that cover the images without their padding, with as little overlap as possible.

    Args:
        images: (B, C, H, W), at least as large as a window.
        image_sizes: (B, 2) int64, height and width of each image without padding.
        size: (height, width) of a window.
    Returns:
        (N, C, *size), and (N, 3) int64: the index of the image, and the top and left of the window.
    """
    windows = [
        (i, top, left)
        for i, lengths in enumerate(image_sizes.tolist())
        for top in window_starts(lengths[0], size[0])
        for left in window_starts(lengths[1], size[1])
    ]
    cut = torch.stack([images[i, :, y : y + size[0], x : x + size[1]] for i, y, x in windows])
    return cut, torch.tensor(windows)


def window_starts(length: int, size: int) -> list[int]:
    """Return the starts of windows of `size` that cover `length` with the least overlap, distributed evenly."""
    count = math.ceil(length / size)
    if count < 2:
        return [0]
    step = size - (count * size - length) / (count - 1)
    return [int(i * step) for i in range(count)]


class WindowedMaskResults(MaskResults):
    """`MaskResults` for models whose outputs may be for windows: they then have `windows`, see `cut_windows`."""

    def postprocess(self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        if "windows" not in outputs:
            return super().postprocess(outputs, image_sizes)
        bands = [self.semantic_scores(outputs, i, tuple(size)) for i, size in enumerate(image_sizes)]
        return [dict(semantic=torch.cat([scores.argmax(0) for _, scores in image])) for image in bands]

    def semantic_scores(
        self, outputs: Mapping[str, Any], index: int, original: tuple[int, int], *, within: range | None = None
    ) -> Iterator[tuple[range, Tensor]]:
        """See `MaskResults`; overlapping windows of an image are averaged."""
        if "windows" not in outputs:
            return super().semantic_scores(outputs, index, original, within=within)
        windows = [
            WindowMasks(
                outputs["pred_logits"][i].float().softmax(-1)[:, :-1], outputs["pred_masks"][i].float(), top, left
            )
            for i, (image, top, left) in enumerate(outputs["windows"].tolist())
            if image == index
        ]
        image_size = tuple(outputs["image_sizes"][index].tolist())
        return merge_window_scores(windows, Geometry(outputs["input_size"], image_size, tuple(original)), within=within)
