"""Mask2Former-Swin-T on Cityscapes semantic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_swin_tiny_cityscapes_semantic.py
           train.precision=bf16
Reference: 82.1 mIoU, 83.0 mIoU with multi-scale and flip (original model zoo). 47.4 M parameters. Here: not yet run.
Weights:   maskformer2_swin_tiny_bs16_90k/model_final_2d58d4.pkl
"""

from vitkit.configs.mask2former_r50_cityscapes_semantic import config as base
from vitkit.configs.parts.swin import with_swin


def config():
    return with_swin(base(), "swin_tiny")
