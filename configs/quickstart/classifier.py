"""A small classifier on the synthetic world: which of six shapes is in the image. No download, minutes on a CPU.

Run:  python tools/train.py configs/quickstart/classifier.py
Here: top-1 0.999 of 1000 images for seed 42; 5.5 minutes of one core of an AMD EPYC.
"""


def config():
    world = dict(type="ShapesClassification", image_size=64)
    return dict(
        model=dict(type="Classifier", backbone=dict(type="resnet18", pretrained=False)),
        criterion=dict(type="ClassificationLoss", label_smoothing=0.1),
        data=dict(
            train=dict(
                **world, num_images=6400, split="train",
                # The eight flips and quarter turns of an image.
                transforms=dict(type="ComposedTransforms", transforms=[dict(type="D4")]),
            ),
            val=dict(**world, num_images=1000, split="val"),
            images_per_gpu=64, val_images_per_gpu=50, num_workers=0,
        ),
        optimizer=dict(type="AdamW", lr=1e-3, weight_decay=0.05, no_weight_decay=["vectors"]),
        schedule=dict(type="CosineLR", warmup_epochs=1),
        evaluator=dict(type="ClassificationEvaluator"),
        train=dict(epochs=6, reference_batch_size=64, channels_last=True, best_metric="top1"),
    )  # fmt: skip
