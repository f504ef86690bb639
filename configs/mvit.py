"""MViT (Fan et al. 2021, https://arxiv.org/abs/2104.11227) and MViTv2 (Li et al. 2021,
https://arxiv.org/abs/2112.01526) on Kinetics-400 from random weights, for 200 epochs.

The numbers in a network's name are its frames, and how many lie from one to the next. The original trains on each video
twice in a batch (repeated augmentation), which is not done here, and states the rate for 16 clips per step, 1e-4,
multiplied by the machines. On images: mvitv2_tiny_in1k.py.

Run:       torchrun --nnodes 16 --nproc-per-node 8 … tools/train.py mvitv2_s_16x4_k400
           torchrun --nproc-per-node 8 tools/train.py mvitv2_s_16x4_k400 train.accumulate=16
Reference: the original README; 5 clips x 1 crop, GMACs are of a view. Here: not yet run.
"""

from typing import Literal

from vitkit.configs.parts.imagenet import deit_augmentation
from vitkit.configs.parts.kinetics import NUM_CLASSES, PIXELS, crops, kinetics

VARIANTS = {
    "mvitv1_b_16x4_k400": (dict(network="mvitv1_b_16x4"), "78.4 top-1, 93.5 top-5; 36.6 M parameters, 70.8 GMACs"),
    "mvitv2_s_16x4_k400": (dict(network="mvitv2_s_16x4"), "81.0 top-1, 94.6 top-5; 34.5 M parameters, 64.5 GMACs"),
    "mvitv2_b_32x3_k400": (dict(network="mvitv2_b_32x3"), "82.9 top-1, 95.7 top-5; 51.2 M parameters, 225.2 GMACs"),
}
"""Name -> arguments of `config`, and what is published."""


def config(network: Literal["mvitv1_b_16x4", "mvitv2_s_16x4", "mvitv2_b_32x3"] = "mvitv2_s_16x4"):
    num_frames, sampling_rate = (32, 3) if network == "mvitv2_b_32x3" else (16, 4)
    augmentation = deit_augmentation("rand-m7-n4-mstd0.5-inc1")
    return dict(
        model=dict(type="Classifier", num_classes=NUM_CLASSES, backbone=dict(type=network), **PIXELS),
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
