"""Swin V2-T on ImageNet-1k at 256 x 256, windows of 8 (Liu et al. 2021, https://arxiv.org/abs/2111.09883).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/swinv2_tiny_in1k.py
Reference: 81.8 top-1, 95.9 top-5 (original README), bicubic, 256 of 292. 28.3 M parameters. Here: not yet run.
"""

from vitkit.configs.parts.imagenet import deit_augmentation, imagenet


def config():
    return dict(
        model=dict(type="Classifier", backbone=dict(type="swinv2_tiny", drop_path=0.2)),
        criterion=dict(type="ClassificationLoss", label_smoothing=0.1),
        data=imagenet(deit_augmentation(), images_per_gpu=128, size=256),
        optimizer=dict(type="AdamW", lr=1e-3, weight_decay=0.05, no_weight_decay=["vectors", "cpb_mlp", "logit_scale"]),
        schedule=dict(type="CosineLR", warmup_epochs=20, end_factor=0.01),
        evaluator=dict(type="ClassificationEvaluator"),
        train=dict(epochs=300, clip_grad_norm=5.0, precision="auto", reference_batch_size=1024, best_metric="top1"),
    )
