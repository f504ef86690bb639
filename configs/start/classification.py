"""One class for each image, from folders of a few hundred of your own photos: a ResNet, from ImageNet weights if there
are any.

Run:  vitkit start IMAGES --task classification    (IMAGES has a folder for each class)
Here: not measured on photos; `quickstart/classifier.py` is such a model on the synthetic world.
"""

from vitkit.configs.parts.resnet import resnet50_for_transfer


def config(size=224, pretrained=True, channels=None, flips=True):
    """Return the config; `size` is the side of the crop, in pixels.

    `channels` is the number of channels of images of 8 or 16 bits, which Pillow's transforms do not take; None: RGB.
    Without `flips` images are not mirrored.
    """
    flip = 0.5 if flips else 0.0
    train = dict(
        type="ClassificationTrainTransforms", size=size, scale=[0.3, 1.0], color_jitter=0.2, flip_probability=flip,
    )  # fmt: skip
    val = dict(type="ClassificationEvalTransforms", size=size)
    if channels is not None:
        crop = dict(type="RandomResizedCrop", size=[size, size], scale=[0.3, 1.0])
        train = dict(type="ComposedTransforms", transforms=[crop, dict(type="HorizontalFlip", p=flip)])
        val = dict(type="EvalResize", size=[size, size])
    if pretrained:
        backbone = resnet50_for_transfer()
    else:
        backbone = dict(type="ResNet", depth=18, norm="bn", pretrained=False)
    return dict(
        model=dict(type="Classifier", backbone=backbone),
        criterion=dict(type="ClassificationLoss", label_smoothing=0.1),
        data=dict(
            train=dict(type="ImageFolder", folder="data/own/train", transforms=train),
            val=dict(type="ImageFolder", folder="data/own/val", transforms=val),
            images_per_gpu=16, val_images_per_gpu=16, num_workers=1, channels=channels,
        ),
        optimizer=dict(type="AdamW", lr=3e-4, backbone_lr=1e-4, weight_decay=0.05, no_weight_decay=["vectors"]),
        schedule=dict(type="CosineLR", warmup_share=0.05),
        evaluator=dict(type="ClassificationEvaluator"),
        train=dict(epochs=20, reference_batch_size=16, precision="auto", channels_last=True, best_metric="top1"),
    )  # fmt: skip
