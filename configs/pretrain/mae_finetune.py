"""Classifiers from a ViT that was trained as MAE (He et al. 2021, https://arxiv.org/abs/2111.06377), on ImageNet-1k.

They read the normalized mean of the patches; the backbone's layers have rates that fall from the last to the first.
The rate is 5e-4 for ViT-B, and 1e-3 for the others, for each 256 images of a step.

Run:       torchrun --nproc-per-node 8 tools/train.py mae_vit_b16_in1k_finetune \
               model.backbone.pretrained=runs/mae_vit_b16_in1k
Reference: the original README, at 224 pixels, from the original weights (CC BY-NC 4.0): model.backbone.pretrained=
           https://dl.fbaipublicfiles.com/mae/pretrain/mae_pretrain_vit_base.pth (or large, huge).
Here:      not yet run.
"""

from typing import Literal

from vitkit.configs.parts.imagenet import deit_augmentation, imagenet

VARIANTS = {
    "mae_vit_b16_in1k_finetune": (dict(size="base"), "83.6 top-1"),
    "mae_vit_l16_in1k_finetune": (dict(size="large"), "85.9 top-1"),
    "mae_vit_h14_in1k_finetune": (dict(size="huge"), "86.9 top-1"),
}
"""Name -> arguments of `config`, and what is published."""

_SIZES = {
    "base": dict(patch_size=16, epochs=100, base_lr=5e-4, layer_decay=0.65, drop_path=0.1),
    "large": dict(patch_size=16, epochs=50, base_lr=1e-3, layer_decay=0.75, drop_path=0.2),
    "huge": dict(patch_size=14, epochs=50, base_lr=1e-3, layer_decay=0.75, drop_path=0.3),
}


def config(size: Literal["base", "large", "huge"] = "base"):
    recipe = _SIZES[size]
    backbone = f"vit_{size}_patch{recipe['patch_size']}"
    lr = recipe["base_lr"] * 1024 / 256
    return dict(
        model=dict(
            type="Classifier",
            backbone=dict(
                type=backbone, drop_path=recipe["drop_path"], classifier=dict(pooling="mean_norm", head_std=2e-5)
            ),
        ),
        criterion=dict(type="ClassificationLoss", label_smoothing=0.1),
        data=imagenet(deit_augmentation(), images_per_gpu=32),
        optimizer=dict(
            type="AdamW", lr=lr, weight_decay=0.05, layer_decay=recipe["layer_decay"],
            no_weight_decay=["vectors", "cls_token", "pos_embed"],
        ),
        schedule=dict(type="CosineLR", warmup_epochs=5, end_factor=1e-6 / lr),
        evaluator=dict(type="ClassificationEvaluator"),
        train=dict(
            epochs=recipe["epochs"], images_per_step=1024, reference_batch_size=1024, precision="auto",
            best_metric="top1",
        ),
    )  # fmt: skip
