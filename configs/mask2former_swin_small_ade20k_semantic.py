"""Mask2Former-Swin-S on ADE20K semantic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_swin_small_ade20k_semantic.py
           train.precision=bf16
Reference: 51.3 mIoU, 52.4 mIoU with multi-scale and flip (original model zoo). 68.8 M parameters, 98 GMACs
           (paper). Here: not yet run.
Weights:   maskformer2_swin_small_bs16_160k/model_final_011c6d.pkl
"""

from vitkit.configs.mask2former_r50_ade20k_semantic import config as base
from vitkit.configs.parts.swin import with_swin


def config():
    return with_swin(base(), "swin_small")
