"""Mask2Former-Swin-T on ADE20K semantic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_swin_tiny_ade20k_semantic.py
           train.precision=bf16
Reference: 47.7 mIoU, 49.6 mIoU with multi-scale and flip (original model zoo). 47.4 M parameters, 74 GMACs
           (paper). Here: not yet run.
Weights:   maskformer2_swin_tiny_bs16_160k/model_final_5274a6.pkl
"""

from vitkit.configs.mask2former_r50_ade20k_semantic import config as base
from vitkit.configs.parts.swin import with_swin


def config():
    return with_swin(base(), "swin_tiny")
