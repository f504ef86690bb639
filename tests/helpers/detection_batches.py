"""Padded batches of images, and the targets of the golden files."""

import torch


def small_batch():
    torch.manual_seed(0)
    mask = torch.zeros(2, 72, 96, dtype=torch.bool)
    mask[1, 60:] = mask[1, :, 50:] = True
    images = torch.randint(0, 256, (2, 3, 72, 96), dtype=torch.uint8) * ~mask[:, None]
    return images, mask


def padded(*images, margin=0):
    """Return a batch with the images at the top left, and its padding mask."""
    height, width = (max(image.shape[d] for image in images) + margin for d in (1, 2))
    batch = torch.zeros(len(images), 3, height, width)
    mask = torch.ones(len(images), height, width, dtype=torch.bool)
    for i, image in enumerate(images):
        batch[i, :, : image.shape[1], : image.shape[2]] = image
        mask[i, : image.shape[1], : image.shape[2]] = False
    return batch, mask


def targets_of(case, variant):
    return [
        {"labels": torch.from_numpy(target["labels"]), "boxes_cxcywh": torch.from_numpy(target["boxes"])}
        for target in case.targets[variant]
    ]
