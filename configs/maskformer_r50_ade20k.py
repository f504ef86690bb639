"""MaskFormer-R50 on ADE20K semantic segmentation (Cheng et al. 2021, https://arxiv.org/abs/2107.06278).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/maskformer_r50_ade20k.py
Reference: 44.5 mIoU, 46.7 mIoU with multi-scale and flip (original model zoo). 41.3 M parameters, 53 GMACs
           (paper). Here: not yet run.
Weights:   maskformer_R50_bs16_160k/model_final_d8dbeb.pkl
"""

from vitkit.configs.parts.ade20k import SEMANTIC, ade20k_semantic


def config():
    return dict(
        model=dict(
            type="MaskFormer", tasks=["semantic"], num_queries=100, **SEMANTIC,
            backbone=dict(type="ResNet", depth=50, norm="frozen_bn"),
            neck=dict(type="FPNPixelDecoder", out_channels=256),
            head=dict(
                type="MaskFormerHead", d_model=256, num_heads=8, d_ffn=2048, dropout=0.1, num_decoder_layers=6,
            ),
        ),
        criterion=dict(
            type="MaskCriterion", mask_loss="focal", no_object_weight=0.1,
            weights=dict(labels=1.0, mask=20.0, dice=1.0),
            matcher=dict(
                type="HungarianMaskMatcher", mask_cost="focal", cost_labels=1.0, cost_mask=20.0, cost_dice=1.0,
            ),
        ),
        data=ade20k_semantic(images_per_gpu=2),
        optimizer=dict(
            type="AdamW", lr=1e-4, backbone_lr=1e-5, weight_decay=1e-4, no_weight_decay=["norms", "embeddings"],
        ),
        schedule=dict(type="PolyLR", power=0.9),
        evaluator=dict(type="SemanticEvaluator"),
        # The original's 160,000 steps of 16 images are 126.7 passes over the 20,210 images.
        train=dict(
            epochs=127, eval_every=4, clip_grad_norm=0.01, seed=42, reference_batch_size=16, best_metric="mIoU",
        ),
    )  # fmt: skip
