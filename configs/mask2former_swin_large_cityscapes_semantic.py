"""Mask2Former-Swin-L on Cityscapes semantic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_swin_large_cityscapes_semantic.py
           train.precision=bf16
Reference: 83.3 mIoU, 84.3 mIoU with multi-scale and flip (original model zoo). 215.5 M parameters. Here: not yet run.
Weights:   maskformer2_swin_large_IN21k_384_bs16_90k/model_final_17c1ee.pkl
"""

from vitkit.configs.mask2former_r50_cityscapes_semantic import config as base
from vitkit.configs.parts.swin import with_swin


def config():
    return with_swin(base(), "swin_large")
