"""RF-DETR, D-FINE and DEIMv2 in the sizes of the published models, or smaller."""

from vitkit import build_model
from vitkit.configs.deimv2 import deimv2_model
from vitkit.configs.dfine import dfine_model
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD


def rf_detr(
    *,
    resolution,
    layers,
    queries=300,
    windows=2,
    patch=16,
    groups=13,
    masks=False,
    classes=91,
    keypoints=None,
    keypoint_classes=None,
):
    points = {} if keypoints is None else dict(num_keypoints=keypoints)
    return build_model(
        dict(
            type="RFDETRSeg" if masks else "RFDETRKeypoints" if points else "RFDETR",
            **points,
            num_queries=queries,
            num_classes=classes,
            num_detections=queries,
            backbone=dict(type="WindowedViT", patch_size=patch, image_size=resolution, num_windows=windows),
            neck=dict(type="C2fProjectionPair" if points else "C2fProjection", out_channels=256),
            head=dict(type="RFDETRHead", num_decoder_layers=layers, masks=masks, keypoint_classes=keypoint_classes),
            training_queries=[dict(type="QueryGroups", groups=groups)] if groups > 1 else [],
        )
    )


def dfine(size, *, num_classes=80, num_queries=300, activation="relu", **changes):
    spec = dfine_model(size, activation, freezes=size in ("l", "x")) | changes
    # Float images are normalized by ImageNet's statistics.
    backbone = spec["backbone"] | dict(pretrained=False, pixel_mean=IMAGENET_MEAN, pixel_std=IMAGENET_STD)
    return build_model(spec | dict(backbone=backbone, num_classes=num_classes, num_queries=num_queries))


def deimv2(size, *, num_classes=80, num_queries=300, **changes):
    spec = deimv2_model(size) | changes
    backbone = spec["backbone"] | dict(pretrained=False, pixel_mean=IMAGENET_MEAN, pixel_std=IMAGENET_STD)
    return build_model(spec | dict(backbone=backbone, num_classes=num_classes, num_queries=num_queries))
