"""ResNet-50 with five non-local blocks on Kinetics-400 (Wang et al. 2018, https://arxiv.org/abs/1711.07971): 400,000
steps of 64 clips of 32 frames, in epochs, from ImageNet weights.

C2D has convolutions in space only, I3D in time as well.

Run:       torchrun --nproc-per-node 8 tools/train.py nonlocal_r50_c2d_k400
Reference: the original README; 10 clips x 3 crops of 256. Here: not yet run.
"""

from typing import Literal

from vitkit.configs.parts.kinetics import NUM_CLASSES, PIXELS, crops, kinetics, scale_jitter

VARIANTS = {
    "nonlocal_r50_c2d_k400": (dict(convolutions="c2d"), "73.9 top-1, 91.0 top-5"),
    "nonlocal_r50_i3d_k400": (dict(convolutions="i3d"), "74.9 top-1, 91.6 top-5"),
}
"""Name -> arguments of `config`, and what is published."""


def config(convolutions: Literal["c2d", "i3d"] = "c2d"):
    return dict(
        model=dict(
            type="Classifier", num_classes=NUM_CLASSES, **PIXELS,
            backbone=dict(type=f"nonlocal_{convolutions}_r50_5block", pretrained=True),
        ),
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
