"""ImageNet-1k (Russakovsky et al. 2014, https://arxiv.org/abs/1409.0575), unpacked into one folder per class."""


def imagenet(train_transforms, images_per_gpu=128, size=224, interpolation="bicubic", root="data/imagenet"):
    return dict(
        root=root,
        images_per_gpu=images_per_gpu,
        val_images_per_gpu=125,
        num_workers=8,
        train=dict(
            type="ImageFolder",
            folder="{root}/train",
            transforms=dict(
                type="ClassificationTrainTransforms", size=size, interpolation=interpolation, **train_transforms
            ),
        ),
        val=dict(
            type="ImageFolder",
            folder="{root}/val",
            transforms=dict(
                type="ClassificationEvalTransforms", size=size, crop_pct=0.875, interpolation=interpolation
            ),
        ),
    )


def deit_augmentation(rand_augment="rand-m9-mstd0.5-inc1"):
    """The augmentation of DeiT (https://arxiv.org/abs/2012.12877), which later transformers adopted."""
    return dict(rand_augment=rand_augment, erasing=0.25, mixup=0.8, cutmix=1.0)
