"""A small DETR on blood cells, from random weights: the measure for deformable_detr.py beside it.

Run:  python tools/train.py configs/bccd/detr.py data.root=DIR    (DIR holds images/ and annotations/)
"""

from vitkit.configs.bccd.deformable_detr import config as deformable_detr


def config():
    cfg = deformable_detr()
    cfg["model"] = dict(
        type="DETR", num_queries=60,
        backbone=dict(type="ResNet", depth=18, norm="bn", out_features=["res4"], pretrained=False),
        neck=dict(type="ChannelProjection", out_channels=128),
        head=dict(
            type="DETRHead", d_model=128, num_heads=8, d_ffn=512, dropout=0.0,
            num_encoder_layers=2, num_decoder_layers=3, norm_first=True,
        ),
    )  # fmt: skip
    cfg["criterion"] = dict(
        type="SetCriterion", no_object_weight=0.1,
        weights=dict(labels=1.0, l1=5.0, giou=2.0),
        matcher=dict(type="HungarianMatcher", cost_class=1.0, cost_l1=5.0, cost_giou=2.0),
    )  # fmt: skip
    del cfg["optimizer"]["lr_multipliers"]
    cfg["train"]["epochs"] = 70  # as long as half of deformable_detr.py's
    return cfg
