"""MaskFormer-R101 on ADE20K semantic segmentation (Cheng et al. 2021, https://arxiv.org/abs/2107.06278).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/maskformer_r101_ade20k.py
Reference: 45.5 mIoU, 47.2 mIoU with multi-scale and flip (original model zoo). 60.2 M parameters, 73 GMACs
           (paper). Here: not yet run.
Weights:   maskformer_R101_bs16_160k/model_final_1aeb94.pkl
"""

from vitkit.configs.maskformer_r50_ade20k import config as base


def config():
    cfg = base()
    cfg["model"]["backbone"]["depth"] = 101
    return cfg
