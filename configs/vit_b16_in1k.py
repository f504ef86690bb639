"""ViT-B/16 on ImageNet-1k from random weights, as DeiT trains it (Touvron et al. 2020, https://arxiv.org/abs/2012.12877).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/vit_b16_in1k.py
Reference: 81.8 top-1, 95.6 top-5 (original README, DeiT-B), bicubic, 224 of 256. 86.6 M parameters, 17.6
           GMACs. The original also has each image three times in a batch:
           data.repeated_augmentation=3. With a teacher: deit.py. Here: not yet run.
Fine-tune: MAE's recipe (https://arxiv.org/abs/2111.06377) from its pretrained weights, 83.6 top-1:
           model.backbone.pretrained=FILE model.backbone.classifier.pooling=mean_norm optimizer.lr=2e-3
           optimizer.layer_decay=0.65 train.epochs=100 schedule.end_factor=0.0 train.ema_decay=none
"""

from vitkit.configs.parts.imagenet import deit_augmentation, imagenet


def config():
    return dict(
        model=dict(type="Classifier", backbone=dict(type="vit_base_patch16", drop_path=0.1)),
        criterion=dict(type="ClassificationLoss", label_smoothing=0.1),
        data=imagenet(deit_augmentation(), images_per_gpu=128),
        optimizer=dict(
            type="AdamW", lr=1e-3, weight_decay=0.05, no_weight_decay=["vectors", "cls_token", "pos_embed"]
        ),
        schedule=dict(type="CosineLR", warmup_epochs=5, end_factor=0.01),
        evaluator=dict(type="ClassificationEvaluator"),
        train=dict(
            epochs=300, precision="auto", ema_decay=0.99996, reference_batch_size=1024, best_metric="top1"
        ),
    )  # fmt: skip
