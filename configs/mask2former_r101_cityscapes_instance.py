"""Mask2Former-R101 on Cityscapes instance segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_r101_cityscapes_instance.py
           train.precision=bf16
Reference: 38.5 mask AP (original model zoo). 63.0 M parameters. Here: not yet run.
Weights:   maskformer2_R101_bs16_90k/model_final_c2b8c8.pkl
"""

from vitkit.configs.mask2former_r50_cityscapes_instance import config as base


def config():
    cfg = base()
    cfg["model"]["backbone"]["depth"] = 101
    return cfg
