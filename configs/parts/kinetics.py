"""Kinetics-400 (Kay et al. 2017, https://arxiv.org/abs/1705.06950): lists of videos with labels, and class names.

ROOT/train.txt and ROOT/val.txt have a line `PATH LABEL` for each video, with paths relative to ROOT; ROOT/classes.txt
has one name per line. Videos that are no longer available are left out, and counted.
"""

NUM_CLASSES = 400
"""Number of classes of the published models; a run uses its dataset's."""
PIXELS = dict(pixel_mean=[0.45] * 3, pixel_std=[0.225] * 3)
"""Pixel statistics that all these networks were trained with."""


def kinetics(*, num_frames, sampling_rate, images_per_gpu, train_transforms, val_transforms, num_clips=1):
    videos = dict(
        type="VideoList",
        folder="{root}",
        class_file="{root}/classes.txt",
        on_missing="skip",
        num_frames=num_frames,
        sampling_rate=sampling_rate,
    )
    return dict(
        root="data/kinetics400",
        images_per_gpu=images_per_gpu,
        val_images_per_gpu=1,  # including all its clips and crops
        num_workers=8,
        on_error="skip",
        train=dict(**videos, list_file="{root}/train.txt", temporal_jitter=True, transforms=train_transforms),
        val=dict(**videos, list_file="{root}/val.txt", num_clips=num_clips, transforms=val_transforms),
    )  # fmt: skip


def scale_jitter(size=224, short_sides=(256, 320)):
    """The augmentation of non-local networks (https://arxiv.org/abs/1711.07971) and TimeSformer."""
    return dict(type="ClipTrainTransforms", size=size, short_sides=list(short_sides))


def crops(num_crops, size=224, short_side=224):
    return dict(type="ClipEvalTransforms", size=size, short_side=short_side, num_crops=num_crops)
