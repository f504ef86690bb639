"""Mask2Former-Swin-L on Cityscapes panoptic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_swin_large_cityscapes_panoptic.py
           train.precision=bf16
Reference: 66.6 PQ, 43.6 mask AP, 82.9 mIoU (original model zoo). 215.5 M parameters. Here: not yet run.
Weights:   maskformer2_swin_large_IN21k_384_bs16_90k/model_final_064788.pkl
"""

from vitkit.configs.mask2former_r50_cityscapes_panoptic import config as base
from vitkit.configs.parts.swin import with_swin


def config():
    cfg = with_swin(base(), "swin_large")
    cfg["model"]["num_queries"] = 200
    return cfg
