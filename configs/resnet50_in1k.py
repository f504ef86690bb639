"""ResNet-50 on ImageNet-1k (He et al. 2015, https://arxiv.org/abs/1512.03385), as torchvision trained it.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/resnet50_in1k.py
Reference: 76.13 top-1, 92.86 top-5 (torchvision's IMAGENET1K_V1), bilinear, 224 of 256. 25.6 M parameters,
           4.1 GMACs. Here: not yet run.
Weights:   resnet50-0676ba61.pth
"""

from vitkit.configs.parts.imagenet import imagenet


def config():
    return dict(
        model=dict(type="Classifier", backbone=dict(type="resnet50", pretrained=False)),
        criterion=dict(type="ClassificationLoss"),
        data=imagenet(dict(), images_per_gpu=32, interpolation="bilinear"),
        optimizer=dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=1e-4),
        schedule=dict(type="MultiStepLR", drop_at_epochs=[30, 60]),
        evaluator=dict(type="ClassificationEvaluator"),
        train=dict(epochs=90, reference_batch_size=256, best_metric="top1"),
    )
