"""A small Mask2Former on CamVid's road scenes, from random weights.

367 training images of 480x360, from which training uses crops at half to full resolution; evaluation is at two thirds.

Run:  python tools/train.py configs/camvid/mask2former.py data.root=DIR    (DIR holds images/ and labels/)
Here: mIoU 0.618 on val for seed 42 (per_pixel.py: 0.581); 22 min of one core's processor time, 25 by the clock.
"""

from vitkit.configs.parts.camvid import camvid


def config():
    data = camvid(images_per_gpu=4, crop_size=(192, 192))
    data["train"]["transforms"]["short_sides"] = [180, 204, 228, 252, 276, 300, 336, 372]
    data["val"]["transforms"] = dict(type="EvalResize", short_side=240, max_size=320)
    return dict(
        model=dict(
            type="Mask2Former", tasks=["semantic"], num_queries=24,
            backbone=dict(type="ResNet", depth=18, norm="bn", pretrained=False),
            neck=dict(
                type="DeformablePixelDecoder", out_channels=128, mask_channels=128, num_layers=1, d_ffn=512,
            ),
            head=dict(type="Mask2FormerHead", d_model=128, num_heads=8, d_ffn=512, num_decoder_layers=3),
        ),
        criterion=dict(
            type="MaskCriterion", no_object_weight=0.1, num_points=1024,
            weights=dict(labels=2.0, mask=5.0, dice=5.0),
            matcher=dict(
                type="HungarianMaskMatcher", cost_labels=2.0, cost_mask=5.0, cost_dice=5.0, num_points=1024,
            ),
        ),
        data=dict(data, num_workers=1),
        optimizer=dict(type="AdamW", lr=4e-4, weight_decay=0.05, no_weight_decay=["vectors"]),
        schedule=dict(type="CosineLR", warmup_steps=300),
        evaluator=dict(type="SemanticEvaluator"),
        train=dict(
            epochs=32, eval_every=8, clip_grad_norm=0.1, reference_batch_size=4, channels_last=True,
            best_metric="mIoU", log_every=92,
        ),
    )  # fmt: skip
