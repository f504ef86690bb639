"""EoMT (Kerssies et al. 2025, https://arxiv.org/abs/2503.19108): a plain ViT whose last blocks process queries.

The ViT has DINOv2's weights with registers (patches of 14 resampled to 16) or DINOv3's, whose rotary positions are
rescaled at random in training, as in its pretraining. The attention of the queries is masked at first, but no longer in
the last two epochs and in inference. Images of ADE20K are evaluated in windows of 512x512 along their long side, whose
scores are averaged where they overlap.

Run:       torchrun --nproc-per-node 8 tools/train.py eomt_large_coco_panoptic train.precision=fp16
Reference: the original model zoo, after 12 epochs (31 on ADE20K); mask AP by pycocotools. For DINOv3 the original
           publishes weights as differences from DINOv3's.
Here:      not yet run.
"""

from typing import Literal

from vitkit.configs.parts.ade20k import SEMANTIC, ade20k_semantic
from vitkit.configs.parts.coco_instance import coco_instance
from vitkit.configs.parts.coco_panoptic import PANOPTIC, coco_panoptic
from vitkit.configs.parts.eomt import covering_square, fitted_to_square
from vitkit.configs.parts.panoptic import with_instances

VARIANTS = {
    "eomt_small_coco_panoptic": (dict(size="small"), "44.7 PQ, 46.7 after 24 epochs (the weights; train.epochs=24)"),
    "eomt_base_coco_panoptic": (dict(size="base"), "50.6 PQ, 51.6 after 24 epochs (the weights; train.epochs=24)"),
    "eomt_large_coco_panoptic": (dict(size="large"), "56.0 PQ"),
    "eomt_small_coco_instance": (dict(size="small", task="coco_instance"), "none published for this size"),
    "eomt_base_coco_instance": (dict(size="base", task="coco_instance"), "none published for this size"),
    "eomt_large_coco_instance": (dict(size="large", task="coco_instance"), "45.2 mask AP"),
    "eomt_small_ade20k_semantic": (dict(size="small", task="ade20k_semantic"), "none published for this size"),
    "eomt_base_ade20k_semantic": (dict(size="base", task="ade20k_semantic"), "none published for this size"),
    "eomt_large_ade20k_semantic": (dict(size="large", task="ade20k_semantic"), "58.4 mIoU"),
    "eomt_dinov3_small_coco_panoptic": (dict(size="small", pretraining="dinov3"), "see above"),
    "eomt_dinov3_base_coco_panoptic": (dict(size="base", pretraining="dinov3"), "see above"),
    "eomt_dinov3_large_coco_panoptic": (dict(size="large", pretraining="dinov3"), "see above"),
}
"""Name -> arguments of `config`, and what is published."""


def config(
    size: Literal["small", "base", "large"] = "large",
    pretraining: Literal["dinov2", "dinov3"] = "dinov2",
    task: Literal["coco_panoptic", "coco_instance", "ade20k_semantic"] = "coco_panoptic",
):
    num_blocks = 4 if size == "large" else 3
    cfg = dict(
        model=dict(
            type="EoMT", tasks=["panoptic"], num_queries=200, num_blocks=num_blocks, **PANOPTIC,
            backbone=dict(type=f"vit_{size}_patch14_reg4_dinov2", patch_size=16, image_size=640, pretrained=True),
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
    if pretraining == "dinov3":
        cfg["model"]["backbone"] = dict(
            type=f"vit_{size}_patch16_dinov3_qkvb", image_size=640, rotary_rescale=2.0, pretrained=True
        )
        cfg["optimizer"].update(lr=2e-4, full_rate_blocks=num_blocks)
        cfg["schedule"].update(warmup_steps=2000, backbone_warmup_steps=3000)
    if task == "coco_instance":
        data = fitted_to_square(coco_instance(images_per_gpu=2), size=640)
        with_instances(cfg, data, dict(num_classes=80, things=None))
    elif task == "ade20k_semantic":
        cfg["model"].update(tasks=["semantic"], num_queries=100, things=None, **SEMANTIC)
        cfg["model"]["backbone"]["image_size"] = 512
        cfg["data"] = covering_square(ade20k_semantic(images_per_gpu=2), size=512)
        cfg["evaluator"] = dict(type="SemanticEvaluator")
        cfg["train"].update(epochs=31, best_metric="mIoU")
    return cfg
