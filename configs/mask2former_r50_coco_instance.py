"""Mask2Former-R50 on COCO 2017 instance segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

The original trains in mixed precision (train.precision).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_r50_coco_instance.py train.precision=bf16
Reference: 43.7 mask AP (original model zoo). 44.0 M parameters, 226 GMACs (paper). Here: not yet run.
Weights:   maskformer2_R50_bs16_50ep/model_final_3c8ec9.pkl
"""

from vitkit.configs.parts.coco_instance import coco_instance


def config():
    return dict(
        model=dict(
            type="Mask2Former", tasks=["instance"], num_queries=100,
            backbone=dict(type="ResNet", depth=50, norm="frozen_bn"),
            neck=dict(type="DeformablePixelDecoder", out_channels=256),
            head=dict(type="Mask2FormerHead", d_model=256, num_heads=8, d_ffn=2048, num_decoder_layers=9),
        ),
        criterion=dict(
            type="MaskCriterion", no_object_weight=0.1, weights=dict(labels=2.0, mask=5.0, dice=5.0),
            matcher=dict(type="HungarianMaskMatcher", cost_labels=2.0, cost_mask=5.0, cost_dice=5.0),
        ),
        data=coco_instance(images_per_gpu=2),
        optimizer=dict(
            type="AdamW", lr=1e-4, backbone_lr=1e-5, weight_decay=0.05, no_weight_decay=["norms", "embeddings"],
        ),
        # The original's 368,750 steps of 16 images are 50 passes; it drops after 327,778 and 355,092 of them.
        schedule=dict(type="MultiStepLR", drop_at_epochs=[44.44, 48.15]),
        evaluator=dict(type="CocoEvaluator", iou_types=["segm"]),
        train=dict(epochs=50, clip_grad_norm=0.01, seed=42, reference_batch_size=16, best_metric="segm/AP"),
    )  # fmt: skip
