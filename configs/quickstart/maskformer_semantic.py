"""A small MaskFormer on the synthetic world, the class of every pixel: no download, minutes on a CPU.

A ResNet-18 up to stride 8 from random weights, two encoder layers and three decoder layers on its last map.

Run:  python tools/train.py configs/quickstart/maskformer_semantic.py
Here: mIoU 0.899 and pixel accuracy 0.985 for seed 42; 14 processor minutes of an AMD EPYC with AVX-512. An earlier
      version reached mIoU 0.881, and with the paper's weight of 1 for labels 0.509 after as many steps and 0.918 after
      4800.
"""

from vitkit.configs.quickstart.mask2former_instance import config as mask2former_instance


def config():
    cfg = mask2former_instance()
    cfg["model"] = dict(
        type="MaskFormer", tasks=["semantic"], num_queries=12, size_divisibility=8,
        backbone=dict(type="ResNet", depth=18, norm="bn", out_features=["res2", "res3"], pretrained=False),
        neck=dict(
            type="TransformerPixelDecoder", out_channels=96, mask_channels=96, d_ffn=384, dropout=0.0, num_layers=2
        ),
        head=dict(type="MaskFormerHead", d_model=96, num_heads=8, d_ffn=384, dropout=0.0, num_decoder_layers=3),
    )  # fmt: skip
    cfg["criterion"] = dict(
        type="MaskCriterion", no_object_weight=0.1, mask_loss="focal",
        weights=dict(labels=3.0, mask=20.0, dice=1.0),
        matcher=dict(type="HungarianMaskMatcher", mask_cost="focal", cost_labels=3.0, cost_mask=20.0, cost_dice=1.0),
    )  # fmt: skip
    for split in ("train", "val"):
        cfg["data"][split]["task"] = "semantic"
    cfg["evaluator"] = dict(type="SemanticEvaluator")
    cfg["train"]["best_metric"] = "mIoU"
    return cfg
