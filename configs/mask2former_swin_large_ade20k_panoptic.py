"""Mask2Former-Swin-L on ADE20K panoptic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_swin_large_ade20k_panoptic.py
           train.precision=bf16
Reference: 48.1 PQ, 34.2 mask AP, 54.5 mIoU (original model zoo). 215.5 M parameters. Here: not yet run.
Weights:   maskformer2_swin_large_IN21k_384_bs16_160k/model_final_e0c58e.pkl
"""

from vitkit.configs.mask2former_r50_ade20k_panoptic import config as base
from vitkit.configs.parts.swin import with_swin


def config():
    cfg = with_swin(base(), "swin_large")
    cfg["model"]["num_queries"] = 200
    return cfg
