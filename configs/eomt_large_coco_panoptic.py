"""EoMT-L (DINOv2, 640x640) on COCO 2017 panoptic segmentation (Kerssies et al. 2025, https://arxiv.org/abs/2503.19108).

A plain ViT-L/16 from DINOv2's weights with registers (patches of 14 resampled to 16), whose last four blocks process
200 queries. Their attention is masked at first, but no longer in the last two epochs and in inference.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/eomt_large_coco_panoptic.py train.precision=fp16
Reference: 56.0 PQ after 12 epochs (original model zoo). Here: not yet run.
Weights:   coco_panoptic_eomt_large_640/resolve/main/pytorch_model.bin
"""

from vitkit.configs.parts.coco_panoptic import PANOPTIC, coco_panoptic
from vitkit.configs.parts.eomt import fitted_to_square


def config():
    return dict(
        model=dict(
            type="EoMT", tasks=["panoptic"], num_queries=200, num_blocks=4, **PANOPTIC,
            backbone=dict(type="vit_large_patch14_reg4_dinov2", patch_size=16, image_size=640, pretrained=True),
        ),
        criterion=dict(
            type="MaskCriterion", no_object_weight=0.1, weights=dict(labels=2.0, mask=5.0, dice=5.0),
            matcher=dict(type="HungarianMaskMatcher", cost_labels=2.0, cost_mask=5.0, cost_dice=5.0),
        ),
        data=fitted_to_square(coco_panoptic(images_per_gpu=2), size=640),
        optimizer=dict(type="AdamW", lr=1e-4, weight_decay=0.05, layer_decay=0.8, layer_decay_rule="eomt"),
        schedule=dict(type="TwoStageWarmupPolyLR", warmup_steps=500, backbone_warmup_steps=1000, power=0.9),
        evaluator=dict(type="PanopticEvaluator"),
        train=dict(
            epochs=12, clip_grad_norm=0.01, seed=42, reference_batch_size=16, best_metric="PQ",
            hooks=[dict(type="MaskAnnealing")],
        ),
    )  # fmt: skip
