"""A small ResNet learns the features of a ViT, on the synthetic world whose classes it does not see. No download,
minutes on a CPU.

The teacher is the model of vit.py, whose weights are in the package; it was trained on the six classes, which the
nearest neighbors among the student's features then tell apart.

Run:  python tools/train.py configs/quickstart/distillation.py
      vitkit train quickstart/classifier "model.backbone=dict(type='ResNet', depth=18, base_channels=32,
          pretrained='runs/distillation')"                                        # from what it has learned
Here: not yet run to its end; in 20 steps on 640 images the validation loss falls from 2.0 to 1.6.
"""


def config():
    world = dict(type="ShapesClassification", image_size=64)
    return dict(
        model=dict(
            type="FeatureDistillation", teacher="shapes_vit",
            backbone=dict(type="ResNet", depth=18, base_channels=32, pretrained=False),
        ),
        criterion=dict(type="FeatureDistillationLoss"),
        data=dict(
            train=dict(
                type="UnlabeledImages", source=dict(**world, num_images=3200, split="train"),
                # The eight flips and quarter turns of an image.
                transforms=dict(type="ComposedTransforms", transforms=[dict(type="D4")]),
            ),
            val=dict(**world, num_images=500, split="val"),
            images_per_gpu=64, val_images_per_gpu=50, num_workers=0,
        ),
        optimizer=dict(type="AdamW", lr=1e-3, weight_decay=0.05, no_weight_decay=["vectors"]),
        schedule=dict(type="CosineLR", warmup_epochs=1),
        evaluator=dict(type="NearestNeighbors"),
        train=dict(epochs=5, reference_batch_size=64, channels_last=True, best_metric="knn/top1"),
    )  # fmt: skip
