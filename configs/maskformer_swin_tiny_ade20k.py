"""MaskFormer-Swin-T on ADE20K semantic segmentation (Cheng et al. 2021, https://arxiv.org/abs/2107.06278).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/maskformer_swin_tiny_ade20k.py
Reference: 46.7 mIoU, 48.8 mIoU with multi-scale and flip (original model zoo). 41.8 M parameters, 55 GMACs
           (paper). Here: not yet run.
Weights:   maskformer_swin_tiny_bs16_160k/model_final_8657a5.pkl
"""

from vitkit.configs.maskformer_r50_ade20k import config as base
from vitkit.configs.parts.swin import maskformer_with_swin


def config():
    return maskformer_with_swin(base(), "swin_tiny")
