"""A small MAE on the synthetic world, whose classes it does not see (He et al. 2021, https://arxiv.org/abs/2111.06377).
No download, minutes on a CPU.

Run:  python tools/train.py configs/quickstart/mae.py
      vitkit explain runs/mae --image image.png     # the image, what the model saw of it, and what it made of the rest
Here: loss 0.513 on 1000 images for seed 42, where 1 is that of patches without a pattern; 4.8 processor minutes of an
      AMD EPYC, one thread, beside other work. Reconstructions continue colors, grounds and edges. Frozen features say
      little about the shape after so short a training of so small a model: knn/top1 0.196 for six classes.
      These weights are in the package: `vitkit explain shapes_mae --image image.png`; model_zoo/notebooks/7_mae.py.
"""


def config():
    world = dict(type="ShapesClassification", image_size=64)
    return dict(
        model=dict(
            type="MAE", decoder_d_model=40, decoder_depth=2, decoder_num_heads=4,
            backbone=dict(
                type="ViT", image_size=64, patch_size=8, d_model=64, depth=3, num_heads=4, positions="sincos",
                pretrained=False,
            ),
        ),
        criterion=dict(type="ReconstructionLoss"),
        data=dict(
            train=dict(
                type="UnlabeledImages", source=dict(**world, num_images=6400, split="train"),
                # The eight flips and quarter turns of an image.
                transforms=dict(type="ComposedTransforms", transforms=[dict(type="D4")]),
            ),
            val=dict(**world, num_images=1000, split="val"),
            images_per_gpu=64, val_images_per_gpu=50, num_workers=0,
        ),
        optimizer=dict(type="AdamW", lr=1e-3, betas=[0.9, 0.95], weight_decay=0.05, no_weight_decay=["vectors"]),
        schedule=dict(type="CosineLR", warmup_epochs=1),
        evaluator=dict(type="NearestNeighbors"),
        train=dict(epochs=20, reference_batch_size=64, eval_every=10, best_metric="loss"),
    )  # fmt: skip
