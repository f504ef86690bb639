"""PerPixelBaseline+-R50 on ADE20K semantic segmentation (Cheng et al. 2021, section 4.2,
https://arxiv.org/abs/2107.06278).

It uses MaskFormer's transformer with a query for each class, whose mask is the map of that class's logits.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/per_pixel_baseline_plus_r50_ade20k.py
Reference: 41.9 mIoU, 42.9 mIoU with multi-scale and flip (original model zoo). 41.2 M parameters. Here: not yet run.
Weights:   per_pixel_baseline_plus_R50_bs16_160k/model_final_833630.pkl
"""

from vitkit.configs.per_pixel_baseline_r50_ade20k import config as base


def config():
    cfg = base()
    cfg["model"]["head"] = dict(
        type="PerPixelBaselinePlusHead", d_model=256, num_heads=8, d_ffn=2048, dropout=0.1, num_decoder_layers=6
    )
    return cfg
