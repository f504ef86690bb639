"""An annotated image as vitkit's and as torchvision's structure."""

import numpy as np
import torch
from torchvision import tv_tensors

from vitkit.data.transforms.annotated_image import AnnotatedImage


def scattered(seed, *, height=120, width=160):
    """Return an image of noise with boxes and their masks, as vitkit's and as torchvision's structure."""
    draw = np.random.default_rng(seed)
    corners = np.sort(draw.uniform(0, 1, (6, 2, 2)), axis=1) * (width, height)
    boxes = corners.round().reshape(-1, 4).clip(0, [width - 2, height - 2] * 2)
    boxes[:, 2:] += 2
    image = draw.integers(0, 256, (height, width, 3), np.uint8)
    masks = np.zeros((len(boxes), height, width), np.uint8)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes.astype(int)):
        mask[y0:y1, x0:x1] = 1
    sample = AnnotatedImage(image, boxes.astype(np.float32), np.arange(len(boxes)), masks)
    theirs = {
        "image": tv_tensors.Image(torch.from_numpy(image).permute(2, 0, 1)),
        "boxes": tv_tensors.BoundingBoxes(torch.from_numpy(boxes).float(), format="XYXY", canvas_size=(height, width)),
        "masks": tv_tensors.Mask(torch.from_numpy(masks)),
        "labels": torch.arange(len(boxes)),
    }
    return sample, theirs
