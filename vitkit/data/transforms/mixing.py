"""Random erasing, mixup and cutmix of batches on the model's device, using timm."""

import torch
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing

from vitkit.errors import ConfigError
from vitkit.ops.images import normalize_images
from vitkit.structures import Batch


class BatchMixing:
    """Applies random erasing, then mixes each batch with itself in reverse order, as for DeiT, Swin and MViT.

    Random numbers come from the global generators, whose states are saved in checkpoints.

    Args:
        num_classes: number of classes of the labels.
        erasing, mixup, cutmix: see `ClassificationTrainTransforms`.
    """

    def __init__(self, num_classes: int, *, erasing: float = 0.0, mixup: float = 0.0, cutmix: float = 0.0):
        self.erasing = erasing
        self.mix = None
        if mixup or cutmix:
            # The criterion smooths labels, including those of batches that are not mixed.
            self.mix = Mixup(mixup, cutmix, label_smoothing=0.0, num_classes=num_classes)

    def __call__(self, batch: Batch) -> Batch:
        """Erase and mix the images of a batch; all frames of a clip are treated the same.

        Args:
            batch: images or clips, uint8, or float and already normalized; targets with `label`.
        Returns:
            the batch with images float, normalized; if they are mixed, targets also have `class_weights`,
            (num_classes,) float32 that sum to 1.
        Raises:
            ConfigError: images are to be mixed in pairs, but their number is odd.
        """
        images, targets = normalize_images(batch.inputs["images"]), batch.targets
        shape = images.shape
        images = images.flatten(1, -3)  # the frames of a clip become channels, so that all are treated the same
        if self.erasing:
            images = RandomErasing(self.erasing, mode="pixel", device=images.device)(images)
        if self.mix is not None:
            if len(batch) % 2:
                raise ConfigError(
                    f"data.images_per_gpu={len(batch)}: mixup and cutmix mix images in pairs; expected an even number."
                )
            labels = torch.tensor([target["label"] for target in targets]).to(images.device, non_blocking=True)
            images, weights = self.mix(images, labels)
            targets = [{**target, "class_weights": row} for target, row in zip(targets, weights)]
        return Batch({**batch.inputs, "images": images.view(shape)}, targets)
