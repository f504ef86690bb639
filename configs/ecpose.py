"""ECPose on COCO 2017's persons (EdgeCrafter, https://arxiv.org/abs/2603.18739): ECDet's backbone and encoder, and
DETRPose's decoder of keypoints (https://arxiv.org/abs/2506.13027).

Run:       torchrun --nproc-per-node 8 tools/train.py ecpose_s_coco
Reference: the original README; parameters are with two classes, as in its files, of which the first has no objects.
           Here: not yet run. A training step of S takes 1.12 times that of ECDet-S (two images with five persons each,
           one thread).
License:   code and weights of the release edgecrafterv1 (March 2026) are under Apache-2.0. The project's later files
           are under another license, for non-commercial use: none of them is named here.
Backbones: files of that release, plain transformers without the projections.

Set model.head.keeps_positions=False and model.training_queries to a KeypointDenoising without `published_noise`, as
here, for what the paper describes; the published weights need the first to stay.

What differs from the original's training: mixup and pasted persons are drawn for batches, not for each image; images
whose persons have no labeled keypoint are used, as background; after strong augmentation stops, the moving average's
decay stays (there, it falls by 0.0001 after each evaluation that is not better); and in L and X, losses are normalized
over the whole batch (there, over each half of it, whose losses are added).
"""

from typing import Literal

from vitkit.configs.dfine import adamw
from vitkit.configs.ecdet import BACKBONES, ENCODERS, RELEASE
from vitkit.configs.parts.coco_keypoints import coco_keypoints

VARIANTS = {
    "ecpose_s_coco": (dict(size="s"), "68.9 keypoint AP, 92 epochs; 9,989,869 parameters"),
    "ecpose_m_coco": (dict(size="m"), "72.4 keypoint AP, 92 epochs; 19,981,530 parameters"),
    "ecpose_l_coco": (dict(size="l"), "73.5 keypoint AP, 74 epochs; 34,566,762 parameters"),
    "ecpose_x_coco": (dict(size="x"), "74.8 keypoint AP, 74 epochs; 51,542,634 parameters"),
}
"""Name -> arguments of `config`, and what is published. The original counts two settings as parameters, `up` and
`reg_scale`."""

DECODERS = {
    "s": dict(d_ffn=512, num_decoder_layers=3),
    "m": dict(d_ffn=512, num_decoder_layers=4),
    "l": dict(d_ffn=1024, num_decoder_layers=4),
    "x": dict(d_ffn=2048, num_decoder_layers=4),
}
"""Size -> the decoder's layers; its width is the encoder's."""

TRAINING = {
    "s": dict(lr=5e-4, backbone_lr=2.5e-5, weight_decay=1e-4, epochs=92, mosaic_until=45, strong_until=90),
    "m": dict(lr=5e-4, backbone_lr=2.5e-5, weight_decay=1e-4, epochs=92, mosaic_until=45, strong_until=90),
    "l": dict(lr=5e-4, backbone_lr=2.5e-6, weight_decay=1.25e-4, epochs=74, mosaic_until=48, strong_until=72),
    "x": dict(lr=5e-4, backbone_lr=2.5e-6, weight_decay=1.25e-4, epochs=74, mosaic_until=48, strong_until=72),
}
"""Size -> the optimizer's settings, and the epochs of `pose_data`."""


def config(size: Literal["s", "m", "l", "x"] = "s"):
    of_size = TRAINING[size]
    return dict(
        model=ecpose_model(size),
        criterion=dict(
            type="KeypointCriterion", class_loss="varifocal", focal_alpha=0.25,
            weights=dict(labels=2.0, keypoint_l1=10.0, oks=4.0),
            matcher=dict(type="HungarianKeypointMatcher", cost_labels=2.0, cost_keypoint_l1=10.0, cost_oks=4.0),
        ),
        data=pose_data(of_size["mosaic_until"], of_size["strong_until"]),
        # Only the transformer has the backbone's rate.
        optimizer=adamw(of_size, ["vectors"]) | dict(lr_multipliers={"backbone.projections.": 1.0}),
        schedule=dict(type="ConstantLR", warmup_steps=500),
        evaluator=dict(type="CocoEvaluator", iou_types=["keypoints"]),
        train=dict(
            epochs=of_size["epochs"], precision="auto", clip_grad_norm=0.1, seed=42, reference_batch_size=32,
            sync_batch_norm=True, ema_decay=0.9999, ema_ramp_steps=2000, best_metric="keypoints/AP",
        ),
    )  # fmt: skip


def ecpose_model(size):
    backbone = BACKBONES[size]
    weights = f"{RELEASE}/{backbone['pretrained'].replace('ec', 'ecpose_')}.pth"
    return dict(
        type="ECPose", num_queries=60, num_keypoints=17,
        backbone=dict(backbone, type="ECViT", pretrained=weights),
        neck=dict(type="DEIMv2Encoder", num_heads=8, block="deim", activation="silu", **ENCODERS[size]),
        head=dict(
            type="DETRPoseHead", d_model=ENCODERS[size]["out_channels"], num_heads=8, num_points=4, dropout=0.0,
            reg_max=32, reg_scale=4.0, up=0.5, keeps_positions=True, **DECODERS[size],
        ),
        training_queries=[dict(type="KeypointDenoising", num_queries=20, label_noise=0.5, noise_labels=80)],
    )  # fmt: skip


def pose_data(mosaic_until, strong_until, mosaic_from=4, size=640, images_per_gpu=4):
    """No augmentation but flips and colors, then mosaics, zooming out, mixup and pasted persons, then these without
    mosaics, then as at first."""
    jitter = dict(type="ColorJitter", brightness=[0.6, 1.4], contrast=[0.6, 1.4], saturation=[0.6, 1.4], hue=0.4, p=0.5)
    plain = _composed(jitter)
    strong = _composed(dict(type="RandomZoomOut", p=0.5, side_range=[1.0, 2.5], fill=0), jitter)
    mosaics = dict(
        type="GridMosaic", probability=0.5, tile=size // 2, rotation=0.0, translation=0.0, scale=[1.0, 1.0],
        transforms=plain, otherwise=strong,
    )  # fmt: skip
    data = coco_keypoints(images_per_gpu)
    data["train"]["transforms"] = dict(
        type="TransformsByEpoch",
        transforms=[plain, mosaics, strong, plain],
        until_epochs=[mosaic_from, mosaic_until, strong_until],
    )
    data["val"]["transforms"] = dict(type="EvalResize", size=[size, size])
    data["aspect_ratio_grouping"] = False
    data["squares"] = dict(sizes=[size])
    epochs = dict(share=[0.45, 0.55], from_epoch=mosaic_from, until_epoch=strong_until)
    data["mixup"] = dict(epochs, probability=0.25)
    # A half of the batches, and so two thirds of those that are not mixed.
    data["copy_blend"] = dict(epochs, probability=2 / 3, num_objects=3, min_area=1.0, margin=[0.0, 0.0])
    return data


def _composed(*transforms):
    flip = dict(type="HorizontalFlip", p=0.5)
    return dict(type="ComposedTransforms", min_visible=0.0, min_box_side=1.0, transforms=[*transforms, flip])
