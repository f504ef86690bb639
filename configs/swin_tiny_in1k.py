"""Swin-T on ImageNet-1k (Liu et al. 2021, https://arxiv.org/abs/2103.14030).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/swin_tiny_in1k.py
Reference: 81.2 top-1, 95.5 top-5 (original README), bicubic, 224 of 256. 28.3 M parameters, 4.5 GMACs.
           Here: not yet run.
"""

from vitkit.configs.parts.imagenet import deit_augmentation, imagenet


def config():
    return dict(
        model=dict(type="Classifier", backbone=dict(type="swin_tiny", drop_path=0.2)),
        criterion=dict(type="ClassificationLoss", label_smoothing=0.1),
        data=imagenet(deit_augmentation(), images_per_gpu=128),
        optimizer=dict(
            type="AdamW", lr=1e-3, weight_decay=0.05, no_weight_decay=["vectors", "relative_position_bias_table"],
        ),
        schedule=dict(type="CosineLR", warmup_epochs=20, end_factor=0.01),
        evaluator=dict(type="ClassificationEvaluator"),
        train=dict(epochs=300, clip_grad_norm=5.0, precision="auto", reference_batch_size=1024, best_metric="top1"),
    )  # fmt: skip
