"""A small DINO on the synthetic world, whose classes it does not see (Caron et al. 2021,
https://arxiv.org/abs/2104.14294). No download, minutes on a CPU.

Run:  python tools/train.py configs/quickstart/self_distillation.py
      vitkit explain runs/self_distillation --image image.png        # what the class token attends to
"""


def config():
    world = dict(type="ShapesClassification", image_size=48)
    return dict(
        model=dict(
            type="SelfDistillation", num_prototypes=512, hidden_channels=256, bottleneck_channels=64,
            backbone=dict(
                type="ViT", image_size=48, patch_size=8, d_model=96, depth=4, num_heads=3, position_offset=0.1,
                pretrained=False,
            ),
        ),
        criterion=dict(type="SelfDistillationLoss"),
        data=dict(
            train=dict(
                type="UnlabelledImages", source=dict(**world, num_images=3200, split="train"),
                transforms=dict(type="MultiCrop", size=48, small_size=24, num_small=4),
            ),
            val=dict(**world, num_images=1000, split="val"),
            images_per_gpu=64, val_images_per_gpu=50, num_workers=0,
        ),
        optimizer=dict(type="AdamW", lr=5e-4, weight_decay=0.04, no_weight_decay=["vectors"]),
        schedule=dict(type="CosineLR", warmup_epochs=1, end_factor=0.01),
        evaluator=dict(type="NearestNeighbours"),
        train=dict(
            epochs=10, reference_batch_size=64, eval_every=2, best_metric="knn/top1",
            hooks=[dict(type="SelfDistillationSchedules", momentum=0.996)],
        ),
    )  # fmt: skip
