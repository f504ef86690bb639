"""A small two-stage Deformable DETR on blood cells (https://github.com/Shenggan/BCCD_Dataset), from random weights.

205 training images, three kinds of cells.

Run:  python tools/train.py configs/bccd/deformable_detr.py data.root=DIR    (DIR holds images/ and annotations/)
Here: AP 0.525, AP50 0.756 (seed 42) on the 87 validation images, in 61 min on one core of an AMD EPYC (busy),
      48 min of it processor time. AP by class: RBC 0.510, WBC 0.768, platelets 0.296. Platelets limit it: half of
      them are under 21 pixels wide at this size, and there are 209 to learn from. Nor is every red cell labeled.
"""


def config():
    split = dict(type="CocoDetection", images="{root}/images", bad_boxes="drop")
    return dict(
        model=dict(
            type="DeformableDETR", num_queries=60,
            backbone=dict(type="ResNet", depth=18, norm="bn", out_features=["res3", "res4"], pretrained=False),
            neck=dict(type="PyramidProjection", out_channels=128, num_levels=3),
            head=dict(
                type="DeformableDETRHead", d_model=128, num_heads=8, d_ffn=512, dropout=0.0,
                num_encoder_layers=1, num_decoder_layers=3, refine_boxes=True, two_stage=True,
            ),
        ),
        criterion=dict(
            type="SetCriterion", class_loss="focal",
            weights=dict(labels=2.0, l1=5.0, giou=2.0),
            matcher=dict(type="HungarianMatcher", activation="sigmoid", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0),
        ),
        data=dict(
            root="data/bccd",
            train=dict(
                **split, annotations="{root}/annotations/instances_train.json",
                transforms=dict(
                    type="ComposedTransforms",
                    # The result above includes slivers of cells that the crop leaves.
                    min_visible=0.0, min_box_side=0.0,
                    transforms=[
                        dict(type="HorizontalFlip"),
                        dict(type="VerticalFlip"),
                        dict(
                            type="MultiScaleCrop", scales=[224, 256, 288], max_size=400, crop_scales=[320, 384, 448],
                            crop_range=[208, 288], crop_probability=0.5,
                        ),
                        dict(type="ColorJitter", brightness=0.2, contrast=0.2, saturation=0.2, hue=0.03, p=0.8),
                    ],
                ),
            ),
            val=dict(
                **split, annotations="{root}/annotations/instances_val.json",
                transforms=dict(type="EvalResize", short_side=256, max_size=400),
            ),
            images_per_gpu=4, num_workers=1,
        ),
        optimizer=dict(type="AdamW", lr=3e-4, weight_decay=1e-4, lr_multipliers={"sampling_offsets": 0.1}),
        schedule=dict(type="CosineLR", warmup_steps=300),
        evaluator=dict(type="CocoEvaluator", iou_types=["bbox"]),
        train=dict(
            epochs=60, eval_every=10, clip_grad_norm=0.1, reference_batch_size=4, channels_last=True,
            best_metric="bbox/AP50", log_every=50,
        ),
    )  # fmt: skip
