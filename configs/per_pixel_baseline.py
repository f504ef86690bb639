"""The per-pixel baselines of MaskFormer on ADE20K's semantic classes (Cheng et al. 2021, section 4.2,
https://arxiv.org/abs/2107.06278).

Both use MaskFormer's backbone and pixel decoder. The first classifies every pixel; the second, PerPixelBaseline+, also
uses its transformer, with a query for each class, whose mask is the map of that class's logits.

Run:       torchrun --nproc-per-node 8 tools/train.py per_pixel_baseline_r50_ade20k
Reference: the original model zoo; mIoU in parentheses is with several scales and flips. Here: not yet run.
"""

from typing import Literal

from vitkit.configs.maskformer import config as maskformer

VARIANTS = {
    "per_pixel_baseline_r50_ade20k": (dict(), "39.2 mIoU (40.9); 31.0 M parameters"),
    "per_pixel_baseline_plus_r50_ade20k": (dict(plus=True), "41.9 mIoU (42.9); 41.2 M parameters"),
}
"""Name -> arguments of `config`, and what is published."""


def config(
    backbone: Literal["r50", "r101", "swin_tiny", "swin_small", "swin_base", "swin_large"] = "r50", plus: bool = False
):
    cfg = maskformer(backbone)
    cfg["model"] = dict(
        type="PerPixelClassification",
        backbone=cfg["model"]["backbone"],
        neck=cfg["model"]["neck"],
        head=dict(type="PerPixelBaselineHead"),
    )
    if plus:
        cfg["model"]["head"] = dict(
            type="PerPixelBaselinePlusHead", d_model=256, num_heads=8, d_ffn=2048, dropout=0.1, num_decoder_layers=6
        )
    cfg["criterion"] = dict(type="PerPixelCriterion")
    return cfg
