"""Mask2Former-Swin-T on COCO 2017 instance segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_swin_tiny_coco_instance.py
           train.precision=bf16
Reference: 45.0 mask AP (original model zoo). 47.4 M parameters, 232 GMACs (paper). Here: not yet run.
Weights:   maskformer2_swin_tiny_bs16_50ep/model_final_86143f.pkl
"""

from vitkit.configs.mask2former_r50_coco_instance import config as base
from vitkit.configs.parts.swin import with_swin


def config():
    return with_swin(base(), "swin_tiny")
