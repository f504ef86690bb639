"""Collates images of different sizes, and clips."""

from collections.abc import Sequence

import numpy as np
import torch

from vitkit.structures import Batch, Sample


def collate(samples: Sequence[Sample]) -> Batch:
    """Pad images with zeros at the right and bottom to the largest height and width among them; stack clips.

    Args:
        samples: at least one; images (C, H, W) uint8 or uint16, or clips of equal size, (3, T, H, W), or
            (views, 3, T, H, W), whose views become samples of the batch.
    """
    images = [sample["image"] for sample in samples]
    if images[0].ndim > 3:
        views = [image if image.ndim == 5 else image[None] for image in images]
        targets = [sample["target"] for sample, clips in zip(samples, views) for _ in clips]
        return Batch(inputs={"images": torch.cat(views)}, targets=targets)
    height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
    # NumPy copies rows of bytes several times faster than PyTorch, and zeros are written only outside the images.
    padded = np.empty((len(images), len(images[0]), height, width), images[0].numpy().dtype)
    padding_mask = np.ones((len(images), height, width), bool)
    for row, mask, image in zip(padded, padding_mask, images):
        _, image_height, image_width = image.shape
        row[:, :image_height, :image_width] = image.numpy()
        row[:, image_height:] = 0
        row[:, :image_height, image_width:] = 0
        mask[:image_height, :image_width] = False
    inputs = {"images": torch.from_numpy(padded), "padding_mask": torch.from_numpy(padding_mask)}
    return Batch(inputs=inputs, targets=[sample["target"] for sample in samples])
