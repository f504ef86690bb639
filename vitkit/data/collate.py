"""Samples of different sizes to one batch."""

from collections.abc import Sequence

import torch

from vitkit.structures import Batch, Sample


def collate(samples: Sequence[Sample], *, size_divisor: int = 1) -> Batch:
    """Pads the images with zeros at the right and bottom to the largest height and width among them.

    Args:
        samples: at least one; images (3, H, W) uint8.
        size_divisor: height and width of the batch are rounded up to multiples of it.
    """
    images = [sample["image"] for sample in samples]
    height, width = (max(-(-image.shape[axis] // size_divisor) for image in images) * size_divisor for axis in (1, 2))
    # Zeros go only where no image is: filling the whole batch first would write it twice.
    batch = torch.empty(len(images), 3, height, width, dtype=images[0].dtype)
    padding_mask = torch.ones(len(images), height, width, dtype=torch.bool)
    for row, mask, image in zip(batch, padding_mask, images):
        _, image_height, image_width = image.shape
        row[:, :image_height, :image_width] = image
        row[:, image_height:] = 0
        row[:, :image_height, image_width:] = 0
        mask[:image_height, :image_width] = False
    inputs = {"images": batch, "padding_mask": padding_mask}
    return Batch(inputs=inputs, targets=[sample["target"] for sample in samples])
