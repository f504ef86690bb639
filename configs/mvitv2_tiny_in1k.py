"""MViTv2-T on ImageNet-1k (Li et al. 2021, https://arxiv.org/abs/2112.01526).

Run:       torchrun --nnodes 8 --nproc-per-node 8 … tools/train.py configs/mvitv2_tiny_in1k.py, as the paper;
           torchrun --nproc-per-node 8 tools/train.py configs/mvitv2_tiny_in1k.py train.accumulate=8
Reference: 82.3 top-1 (original README), bicubic, 224 of 256. 24.2 M parameters, 4.7 GMACs. The original
           states the rate for 256 images per step, 2.5e-4, and multiplies it by the machines, here eight.
           Here: not yet run.
"""

from vitkit.configs.parts.imagenet import deit_augmentation, imagenet


def config():
    return dict(
        model=dict(type="Classifier", backbone=dict(type="mvitv2_tiny", drop_path=0.1)),
        criterion=dict(type="ClassificationLoss", label_smoothing=0.1),
        data=imagenet(deit_augmentation("rand-m9-n6-mstd0.5-inc1"), images_per_gpu=32),
        optimizer=dict(type="AdamW", lr=2e-3, weight_decay=0.05, no_weight_decay=["vectors"]),
        schedule=dict(type="CosineLR", warmup_epochs=70, end_factor=0.004),
        evaluator=dict(type="ClassificationEvaluator"),
        train=dict(epochs=300, clip_grad_norm=1.0, precision="auto", reference_batch_size=2048, best_metric="top1"),
    )
