"""PerPixelBaseline-R50 on ADE20K semantic segmentation (Cheng et al. 2021, section 4.2,
https://arxiv.org/abs/2107.06278).

It uses MaskFormer's backbone and pixel decoder, and classifies every pixel.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/per_pixel_baseline_r50_ade20k.py
Reference: 39.2 mIoU, 40.9 mIoU with multi-scale and flip (original model zoo). 31.0 M parameters. Here: not yet run.
Weights:   per_pixel_baseline_R50_bs16_160k/model_final_1043f3.pkl
"""

from vitkit.configs.maskformer_r50_ade20k import config as base


def config():
    cfg = base()
    cfg["model"] = dict(
        type="PerPixelClassification",
        backbone=cfg["model"]["backbone"],
        neck=cfg["model"]["neck"],
        head=dict(type="PerPixelBaselineHead"),
    )
    cfg["criterion"] = dict(type="PerPixelCriterion")
    return cfg
