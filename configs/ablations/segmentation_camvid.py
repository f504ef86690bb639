"""From per-pixel classification to Mask2Former and EoMT on CamVid, from ImageNet weights, at equal processor time.

The recording 0006R0, 101 images by day, is held out: neighbouring frames, which a random split would distribute over
both parts, reveal each other. Per-pixel classification, MaskFormer (Cheng et al. 2021,
https://arxiv.org/abs/2107.06278, table 1) and Mask2Former (https://arxiv.org/abs/2112.01527) share backbone and pixel
decoder; known masks are those of MP-Former (https://arxiv.org/abs/2303.07336). EoMT (https://arxiv.org/abs/2503.19108)
does not run on a ResNet and has a small plain ViT from random weights, so its result is no comparison of methods.

Run:  vitkit ablate segmentation_camvid data.root=DIR    (other weights than torchvision's: see configs/parts/resnet.py)
Here: see model_zoo/ablations/segmentation_camvid.md.
"""

from vitkit.configs.parts.resnet import resnet50_for_transfer

RECORDINGS = ["0001TP_*", "0016E5_*"]
HELD_OUT = ["0006R0_*"]


def ablation():
    weights = dict(cost_labels=2.0, cost_mask=20.0, cost_dice=1.0)
    return dict(
        base="camvid/mask2former",
        metrics=["mIoU", "pixel_accuracy"],
        minutes=3.0,
        evaluations=3,
        settings={
            "model.backbone": resnet50_for_transfer(norm="frozen_bn", frozen_stages=2),
            "optimizer.backbone_lr": 1e-4,
            "data.train.names": RECORDINGS,
            "data.val.images": "{root}/images/train",
            "data.val.labels": "{root}/labels/train",
            "data.val.names": HELD_OUT,
            "data.train.transforms.crop_size": [128, 128],
            "data.train.transforms.short_sides": [120, 136, 152, 168, 184, 200, 216],
            "data.val.transforms.short_side": 160,
            "data.val.transforms.max_size": 240,
            "data.num_workers": 0,
            "schedule.warmup_steps": 40,
            "train.precision": "auto",
        },
        arms={
            "per-pixel": {"base": "camvid/per_pixel"},
            "MaskFormer": {
                "model.type": "MaskFormer",
                "model.head": dict(type="MaskFormerHead", d_model=128, num_heads=8, d_ffn=512, num_decoder_layers=3),
                "criterion": dict(
                    type="MaskCriterion", mask_loss="focal", no_object_weight=0.1,
                    weights=dict(labels=2.0, mask=20.0, dice=1.0),
                    matcher=dict(type="HungarianMaskMatcher", mask_cost="focal", **weights),
                ),
            },
            "Mask2Former": {},
            "Mask2Former + known masks": {
                "model.training_queries": [dict(type="MaskDenoising", num_queries=24)],
            },
            "EoMT, random weights": {
                "model": dict(
                    type="EoMT", tasks=["semantic"], num_queries=24, num_blocks=3,
                    backbone=dict(
                        type="ViT", patch_size=8, d_model=192, depth=8, num_heads=4, image_size=128, num_registers=4,
                        positions="patches", blocks=dict(layer_scale=0.1), pretrained=False,
                    ),
                ),
                "train.hooks": [dict(type="MaskAnnealing")],
            },
        },
    )  # fmt: skip
