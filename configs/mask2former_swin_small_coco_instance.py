"""Mask2Former-Swin-S on COCO 2017 instance segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_swin_small_coco_instance.py
           train.precision=bf16
Reference: 46.3 mask AP (original model zoo). 68.7 M parameters, 313 GMACs (paper). Here: not yet run.
Weights:   maskformer2_swin_small_bs16_50ep/model_final_1e7f22.pkl
"""

from vitkit.configs.mask2former_r50_coco_instance import config as base
from vitkit.configs.parts.swin import with_swin


def config():
    return with_swin(base(), "swin_small")
