"""A small Mask2Former on the synthetic world, a mask for every thing: no download, minutes on a CPU.

A ResNet-18 up to stride 16 from random weights, one layer in the pixel decoder, three in the head.

Run:  python tools/train.py configs/quickstart/mask2former_instance.py
Here: mask AP 0.782 and AP50 0.904 for seed 42; 9 min 28 s on 2 cores of an Intel Xeon. With train.epochs=5 0.826 and
      0.957, before optimizers were fused.
"""


def config():
    world = dict(
        type="ShapesSegmentation", task="instance", image_size=96, max_objects=3, min_size=0.2, max_size=0.5
    )  # fmt: skip
    return dict(
        model=dict(
            type="Mask2Former", tasks=["instance"], num_queries=12, num_instances=20, size_divisibility=16,
            backbone=dict(
                type="ResNet", depth=18, norm="bn", out_features=["res2", "res3", "res4"], pretrained=False
            ),
            neck=dict(
                type="DeformablePixelDecoder", out_channels=96, mask_channels=96, num_levels=2, num_layers=1,
                d_ffn=384,
            ),
            head=dict(
                type="Mask2FormerHead", d_model=96, num_heads=8, d_ffn=384, num_decoder_layers=3, num_levels=2,
            ),
        ),
        criterion=dict(
            type="MaskCriterion", no_object_weight=0.1, num_points=512,
            weights=dict(labels=2.0, mask=5.0, dice=5.0),
            matcher=dict(
                type="HungarianMaskMatcher", cost_labels=2.0, cost_mask=5.0, cost_dice=5.0, num_points=512
            ),
        ),
        data=dict(
            train=dict(
                **world, num_images=6400, split="train",
                # The eight flips and quarter turns of an image.
                transforms=dict(type="ComposedTransforms", transforms=[dict(type="D4")]),
            ),
            val=dict(**world, num_images=200, split="val"),
            images_per_gpu=8, val_images_per_gpu=50, num_workers=0,
        ),
        optimizer=dict(type="AdamW", lr=5e-4, weight_decay=0.05, no_weight_decay=["vectors"]),
        schedule=dict(type="CosineLR", warmup_steps=200),
        evaluator=dict(type="CocoEvaluator", iou_types=["segm"]),
        train=dict(
            epochs=4, clip_grad_norm=0.1, reference_batch_size=8, channels_last=True, best_metric="segm/AP",
            log_every=100,
        ),
    )  # fmt: skip
