"""A small DETR on blood cells, from random weights: the measure for deformable_detr.py beside it.

Run:  python tools/train.py configs/bccd/detr.py data.root=DIR    (DIR holds images/ and annotations/)
Here: AP 0.188, AP50 0.337 (seed 42) in 17 min of one core's processor time, in which deformable_detr.py beside it
      reaches AP50 0.66. With the image size of deformable_detr.py, DETR had AP50 0.05 after the same time.
"""

from vitkit.configs.bccd.deformable_detr import config as deformable_detr


def config():
    cfg = deformable_detr()
    cfg["model"] = dict(
        type="DETR", num_queries=40,
        backbone=dict(type="ResNet", depth=18, norm="bn", out_features=["res4"], pretrained=False),
        neck=dict(type="ChannelProjection", out_channels=128),
        head=dict(
            type="DETRHead", d_model=128, num_heads=8, d_ffn=512, dropout=0.0,
            num_encoder_layers=2, num_decoder_layers=3, norm_first=True,
        ),
    )  # fmt: skip
    cfg["criterion"] = dict(
        type="SetCriterion", no_object_weight=0.1,
        weights=dict(labels=3.0, l1=5.0, giou=2.0),
        matcher=dict(type="HungarianMatcher", cost_labels=3.0, cost_l1=5.0, cost_giou=2.0),
    )  # fmt: skip
    # Smaller images allow more epochs in the same time, which it needs more than resolution.
    cfg["data"]["train"]["transforms"] = dict(
        type="DETRTrainTransforms", scales=[128, 144, 160, 176], max_size=320, crop_scales=[160, 200],
        crop_range=[110, 200],
    )  # fmt: skip
    cfg["data"]["val"]["transforms"] = dict(type="EvalResize", short_side=160, max_size=320)
    cfg["data"]["images_per_gpu"] = 8
    cfg["optimizer"] = dict(type="AdamW", lr=5e-4, weight_decay=1e-4)
    cfg["schedule"]["warmup_steps"] = 200
    cfg["train"].update(epochs=80, reference_batch_size=8)
    return cfg
