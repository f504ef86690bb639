"""Mask2Former-Swin-S on Cityscapes panoptic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_swin_small_cityscapes_panoptic.py
           train.precision=bf16
Reference: 64.8 PQ, 40.7 mask AP, 81.8 mIoU (original model zoo). 68.7 M parameters. Here: not yet run.
Weights:   maskformer2_swin_small_bs16_90k/model_final_23efb7.pkl
"""

from vitkit.configs.mask2former_r50_cityscapes_panoptic import config as base
from vitkit.configs.parts.swin import with_swin


def config():
    return with_swin(base(), "swin_small")
