"""A small ViT on MNIST's digits of 28 x 28 pixels, in 196 patches of 2 x 2 (Dosovitskiy et al. 2020,
https://arxiv.org/abs/2010.11929).

The images have one channel. Fashion-MNIST: data.train.name=FashionMNIST data.val.name=FashionMNIST.

Run:  python tools/train.py configs/vit_mnist.py data.root=DIR    (DIR/MNIST/raw holds the IDX files; to download them:
      data.train.download=true data.val.download=true)
Here: not yet run on MNIST, whose files were not at hand.
"""


def config():
    digits = dict(type="MNIST", folder="{root}")
    return dict(
        model=dict(
            type="Classifier",
            backbone=dict(
                type="ViT", patch_size=2, d_model=64, depth=6, num_heads=4, image_size=28, in_channels=1,
                pixel_mean=[0.1307], pixel_std=[0.3081],
            ),
        ),
        criterion=dict(type="ClassificationLoss"),
        data=dict(
            train=dict(**digits, split="train"), val=dict(**digits, split="test"), channels=1,
            images_per_gpu=128, val_images_per_gpu=250, num_workers=0,
        ),
        optimizer=dict(
            type="AdamW", lr=1e-3, weight_decay=0.05, no_weight_decay=["vectors", "cls_token", "pos_embed"]
        ),
        schedule=dict(type="CosineLR", warmup_epochs=1),
        evaluator=dict(type="ClassificationEvaluator"),
        train=dict(epochs=10, precision="auto", reference_batch_size=128, best_metric="top1"),
    )  # fmt: skip
