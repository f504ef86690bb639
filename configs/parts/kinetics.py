"""Kinetics-400 (Kay et al. 2017, https://arxiv.org/abs/1705.06950): lists of videos with labels, and class names.

ROOT/train.txt and ROOT/val.txt have a line `PATH LABEL` for each video, with paths relative to ROOT; ROOT/classes.txt
has one name per line. Videos that are no longer available are left out, and counted.
"""

from vitkit.configs.parts.imagenet import deit_augmentation

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


def mvit(backbone, num_frames, sampling_rate):
    """The training of MViT, versions 1 and 2: from random weights, for 200 epochs."""
    augmentation = deit_augmentation("rand-m7-n4-mstd0.5-inc1")
    return dict(
        model=dict(type="Classifier", num_classes=NUM_CLASSES, backbone=dict(type=backbone), **PIXELS),
        criterion=dict(type="ClassificationLoss", label_smoothing=0.1),
        data=kinetics(
            num_frames=num_frames, sampling_rate=sampling_rate, images_per_gpu=2, num_clips=5,
            train_transforms=dict(type="ClassificationTrainTransforms", size=224, **augmentation),
            val_transforms=crops(1, short_side=256),
        ),
        optimizer=dict(type="AdamW", lr=1.6e-3, weight_decay=0.05, no_weight_decay=["vectors"]),
        schedule=dict(type="CosineLR", warmup_epochs=30, end_factor=0.01),
        evaluator=dict(type="ClassificationEvaluator"),
        train=dict(
            epochs=200, clip_grad_norm=1.0, precision="auto", reference_batch_size=256, best_metric="top1"
        ),
    )  # fmt: skip


def timesformer(backbone, num_frames=8, sampling_rate=32, size=224, short_sides=(256, 320)):
    """The training of TimeSformer: 15 epochs from the weights of an image ViT."""
    return dict(
        model=dict(type="Classifier", num_classes=NUM_CLASSES, backbone=dict(type=backbone), **PIXELS),
        criterion=dict(type="ClassificationLoss"),
        data=kinetics(
            num_frames=num_frames, sampling_rate=sampling_rate, images_per_gpu=1,
            train_transforms=scale_jitter(size, short_sides),
            val_transforms=crops(3, size, size),
        ),
        optimizer=dict(type="SGD", lr=0.005, momentum=0.9, weight_decay=1e-4),
        schedule=dict(type="MultiStepLR", drop_at_epochs=[11, 14]),
        evaluator=dict(type="ClassificationEvaluator"),
        train=dict(epochs=15, precision="auto", reference_batch_size=8, best_metric="top1"),
    )  # fmt: skip


def nonlocal_r50(backbone):
    """The training of non-local networks: 400,000 steps of 64 clips of 32 frames, in epochs, from ImageNet weights."""
    return dict(
        model=dict(type="Classifier", num_classes=NUM_CLASSES, backbone=dict(type=backbone, pretrained=True), **PIXELS),
        criterion=dict(type="ClassificationLoss"),
        data=kinetics(
            num_frames=32, sampling_rate=2, images_per_gpu=8, num_clips=10,
            train_transforms=scale_jitter(),
            val_transforms=crops(3, 256, 256),
        ),
        optimizer=dict(type="SGD", lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4, no_weight_decay=["norms"]),
        schedule=dict(type="MultiStepLR", drop_at_epochs=[40, 80]),
        evaluator=dict(type="ClassificationEvaluator"),
        train=dict(epochs=107, reference_batch_size=64, best_metric="top1"),
    )  # fmt: skip
