"""Mask2Former-R101 on Cityscapes semantic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_r101_cityscapes_semantic.py
           train.precision=bf16
Reference: 80.1 mIoU, 81.9 mIoU with multi-scale and flip (original model zoo). 63.0 M parameters. Here: not yet run.
Weights:   maskformer2_R101_bs16_90k/model_final_257ce8.pkl
"""

from vitkit.configs.mask2former_r50_cityscapes_semantic import config as base


def config():
    cfg = base()
    cfg["model"]["backbone"]["depth"] = 101
    return cfg
