"""Mask2Former-Swin-S on ADE20K panoptic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_swin_small_ade20k_panoptic.py
           train.precision=bf16
Reference: none published for this backbone with this recipe. Here: not yet run.
"""

from vitkit.configs.mask2former_r50_ade20k_panoptic import config as base
from vitkit.configs.parts.swin import with_swin


def config():
    return with_swin(base(), "swin_small")
