"""MaskFormer-Swin-S on ADE20K semantic segmentation (Cheng et al. 2021, https://arxiv.org/abs/2107.06278).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/maskformer_swin_small_ade20k.py
Reference: 49.8 mIoU, 51.0 mIoU with multi-scale and flip (original model zoo). 63.1 M parameters, 79 GMACs
           (paper). Here: not yet run.
Weights:   maskformer_swin_small_bs16_160k/model_final_528157.pkl
"""

from vitkit.configs.maskformer_r50_ade20k import config as base
from vitkit.configs.parts.swin import maskformer_with_swin


def config():
    return maskformer_with_swin(base(), "swin_small")
