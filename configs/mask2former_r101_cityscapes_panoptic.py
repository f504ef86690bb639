"""Mask2Former-R101 on Cityscapes panoptic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_r101_cityscapes_panoptic.py
           train.precision=bf16
Reference: 62.4 PQ, 37.7 mask AP, 78.6 mIoU (original model zoo). 63.0 M parameters. Here: not yet run.
Weights:   maskformer2_R101_bs16_90k/model_final_04d286.pkl
"""

from vitkit.configs.mask2former_r50_cityscapes_panoptic import config as base


def config():
    cfg = base()
    cfg["model"]["backbone"]["depth"] = 101
    return cfg
