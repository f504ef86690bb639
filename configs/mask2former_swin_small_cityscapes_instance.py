"""Mask2Former-Swin-S on Cityscapes instance segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_swin_small_cityscapes_instance.py
           train.precision=bf16
Reference: 41.8 mask AP (original model zoo). 68.7 M parameters. Here: not yet run.
Weights:   maskformer2_swin_small_bs16_90k/model_final_974824.pkl
"""

from vitkit.configs.mask2former_r50_cityscapes_instance import config as base
from vitkit.configs.parts.swin import with_swin


def config():
    return with_swin(base(), "swin_small")
