"""DeiT with a distillation token on ImageNet-1k (Touvron et al. 2020, https://arxiv.org/abs/2012.12877).

A ViT learns from the labels by its class token, and by its distillation token from a RegNetY-16GF, which labels the
same augmented and mixed images; its logits are the mean of both. Only training needs the teacher's weights, which timm
downloads. Soft distillation as in the paper: criterion.distillation="dict(kind='soft', weight=0.1, temperature=3.0,
divide_by='elements')". Without distillation: vit_b16_in1k.

Run:       torchrun --nproc-per-node 8 tools/train.py deit_small_distilled_patch16_in1k
           With your own classes, the teacher is a classifier of them: model.teacher=runs/large data.root=DIR
Reference: top-1 at 224 of 256 pixels, bicubic (original README); the teacher has 82.9. Here: not yet run.
"""

from typing import Literal

from vitkit.configs.parts.imagenet import deit_augmentation, imagenet

VARIANTS = {
    "deit_tiny_distilled_patch16_in1k": (dict(size="tiny"), "74.5 top-1"),
    "deit_small_distilled_patch16_in1k": (dict(size="small"), "81.2 top-1"),
    "deit_base_distilled_patch16_in1k": (dict(size="base"), "83.4 top-1"),
}
"""Name -> arguments of `config`, and what is published."""


def config(size: Literal["tiny", "small", "base"] = "base", teacher: str = "timm/regnety_160.deit_in1k"):
    return dict(
        model=dict(
            type="DistilledClassifier", teacher=teacher,
            backbone=dict(type=f"deit_{size}_distilled_patch16", drop_path=0.1),
        ),
        criterion=dict(type="ClassificationLoss", label_smoothing=0.1, distillation=dict(kind="hard", weight=0.5)),
        data=dict(imagenet(deit_augmentation(), images_per_gpu=128), repeated_augmentation=3),
        optimizer=dict(
            type="AdamW", lr=5e-4 * 1024 / 512, weight_decay=0.05,
            no_weight_decay=["vectors", "cls_token", "dist_token", "pos_embed"],
        ),
        schedule=dict(type="CosineLR", warmup_epochs=5, end_factor=0.01),
        evaluator=dict(type="ClassificationEvaluator"),
        train=dict(
            epochs=300, precision="auto", ema_decay=0.99996, reference_batch_size=1024, best_metric="top1"
        ),
    )  # fmt: skip
