"""Small DETRs and Deformable DETRs as configs."""


def detr_spec(**options):
    return (
        dict(
            type="DETR",
            num_queries=10,
            num_classes=3,
            backbone=dict(type="ResNet", depth=18, out_features=["res3"]),
            neck=dict(type="ChannelProjection", out_channels=32),
            head=dict(
                type="DETRHead",
                d_model=32,
                num_heads=4,
                d_ffn=64,
                dropout=0.0,
                num_encoder_layers=1,
                num_decoder_layers=3,
            ),
        )
        | options
    )


def deformable_detr_spec(*, num_levels=3, num_queries=10, head=None, **options):
    return dict(
        type="DeformableDETR",
        num_queries=num_queries,
        num_classes=3,
        backbone=dict(type="ResNet", depth=18, out_features=["res3", "res4"]),
        neck=dict(type="PyramidProjection", out_channels=32, num_levels=num_levels, num_groups=4),
        head=dict(
            type="DeformableDETRHead",
            d_model=32,
            num_heads=4,
            num_points=2,
            d_ffn=64,
            dropout=0.0,
            num_encoder_layers=1,
            num_decoder_layers=3,
            **(head or {}),
        ),
        **options,
    )
