"""LR-Net-50 on ImageNet-1k, 7 x 7 neighborhoods and m = 8 (Hu et al. 2019, https://arxiv.org/abs/1904.11491).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/lrnet50_in1k.py
Reference: 77.3 top-1. 23.3 M parameters, 4.3 GMACs. There is no official code: rate, epochs and warm-up
           are those of ResNets with batches of 1024 (https://arxiv.org/abs/1706.02677) on a cosine, not confirmed by
           the authors. Here: not yet run.
"""

from vitkit.configs.parts.imagenet import imagenet


def config():
    return dict(
        model=dict(type="Classifier", backbone=dict(type="lrnet50")),
        criterion=dict(type="ClassificationLoss"),
        data=imagenet(dict(), images_per_gpu=128, interpolation="bilinear"),
        optimizer=dict(type="SGD", lr=0.4, momentum=0.9, weight_decay=1e-4),
        schedule=dict(type="CosineLR", warmup_epochs=10),
        evaluator=dict(type="ClassificationEvaluator"),
        train=dict(epochs=110, precision="auto", reference_batch_size=1024, best_metric="top1"),
    )
