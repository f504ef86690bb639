"""Mask2Former-Swin-B on Cityscapes panoptic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_swin_base_cityscapes_panoptic.py
           train.precision=bf16
Reference: 66.1 PQ, 42.8 mask AP, 82.7 mIoU (original model zoo). 106.9 M parameters. Here: not yet run.
Weights:   maskformer2_swin_base_IN21k_384_bs16_90k/model_final_fa840f.pkl
"""

from vitkit.configs.mask2former_r50_cityscapes_panoptic import config as base
from vitkit.configs.parts.swin import with_swin


def config():
    return with_swin(base(), "swin_base")
