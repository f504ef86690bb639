"""RT-DETR (Zhao et al. 2023, https://arxiv.org/abs/2304.08069) on COCO 2017: what its sizes share."""

from vitkit.configs.parts.realtime import dfine_data

SIZES = {
    18: dict(expansion=0.5, num_decoder_layers=3),
    34: dict(expansion=0.5, num_decoder_layers=4),
    50: dict(expansion=1.0, num_decoder_layers=6),
    101: dict(expansion=1.0, num_decoder_layers=6, channels=384, d_ffn=2048),
}
"""Depth of the backbone -> sizes of the hybrid encoder and the decoder."""


def rtdetr(depth):
    """RT-DETR on a ResNet-vd of 18, 34, 50 or 101 layers; stem and batch norms of the two larger ones are frozen."""
    sizes = dict(channels=256, d_ffn=1024) | SIZES[depth]
    return dict(
        model=dict(
            type="RTDETR", num_queries=300,
            backbone=dict(
                type="ResNetVD", depth=depth, norm="bn" if depth < 50 else "frozen_bn", frozen_stem=depth >= 50,
                out_features=["res3", "res4", "res5"], pixel_mean=[0.0, 0.0, 0.0], pixel_std=[1.0, 1.0, 1.0],
            ),
            neck=dict(
                type="HybridEncoder", out_channels=sizes["channels"], num_heads=8, d_ffn=sizes["d_ffn"], num_blocks=3,
                expansion=sizes["expansion"],
            ),
            head=dict(
                type="RTDETRHead", d_model=256, num_heads=8, num_points=4, d_ffn=1024, dropout=0.0,
                num_decoder_layers=sizes["num_decoder_layers"],
            ),
            training_queries=[
                dict(type="BoxDenoising", num_queries=100, contrastive=True, label_noise=0.5, box_noise=1.0),
            ],
        ),
        criterion=dict(
            type="SetCriterion", class_loss="varifocal",
            weights=dict(labels=1.0, l1=5.0, giou=2.0),
            matcher=dict(type="HungarianMatcher", activation="sigmoid", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0),
        ),
        # D-FINE took these augmentations and squares from RT-DETR, where they last to the end.
        data=dfine_data(strong_until=72, size_repeats=3),
        optimizer=dict(type="AdamW", lr=1e-4, backbone_lr=1e-5, weight_decay=1e-4, no_weight_decay=["vectors"]),
        schedule=dict(type="ConstantLR"),
        evaluator=dict(type="CocoEvaluator", iou_types=["bbox"]),
        train=dict(
            epochs=72, clip_grad_norm=0.1, ema_decay=0.9999, ema_ramp_steps=2000, seed=42, reference_batch_size=16,
        ),
    )  # fmt: skip
