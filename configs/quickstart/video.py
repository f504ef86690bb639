"""Divided attention over space and time on clips of the synthetic world: does a shape move to the left or the right?

A clip of one direction is a clip of the other in reverse, so only the order of frames distinguishes them. No download.

Run:  python tools/train.py configs/quickstart/video.py
      (model.backbone.attention=space sees each frame by itself, and stays at chance)
Here: top-1 1.000 of 500 clips for seed 42, with attention only within frames 0.504; 5 minutes of one thread on an
      Intel Xeon beside other work. The other schemes are in model_zoo/measurements.md: 3.3 to 8.2 min.
"""


def config():
    world = dict(type="ShapesMotion", image_size=32, num_frames=4)
    return dict(
        model=dict(
            type="Classifier",
            backbone=dict(
                type="TimeSformer", attention="divided", image_size=32, num_frames=4, patch_size=8,
                d_model=64, depth=2, num_heads=4, drop_path=0.0, position_std=0.4,
            ),
        ),
        criterion=dict(type="ClassificationLoss"),
        data=dict(
            train=dict(**world, num_videos=6400, split="train"),
            val=dict(**world, num_videos=500, split="val"),
            images_per_gpu=32, val_images_per_gpu=50, num_workers=0,
        ),
        optimizer=dict(type="AdamW", lr=1e-3, weight_decay=0.05, no_weight_decay=["vectors", "cls_token", "_embed"]),
        schedule=dict(type="CosineLR", warmup_epochs=1),
        evaluator=dict(type="ClassificationEvaluator"),
        train=dict(epochs=8, clip_grad_norm=1.0, reference_batch_size=32, best_metric="top1"),
    )  # fmt: skip
