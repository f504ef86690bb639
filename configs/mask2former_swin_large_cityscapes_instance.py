"""Mask2Former-Swin-L on Cityscapes instance segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_swin_large_cityscapes_instance.py
           train.precision=bf16
Reference: 43.7 mask AP (original model zoo). 215.5 M parameters. Here: not yet run.
Weights:   maskformer2_swin_large_IN21k_384_bs16_90k/model_final_dfa862.pkl
"""

from vitkit.configs.mask2former_r50_cityscapes_instance import config as base
from vitkit.configs.parts.swin import with_swin


def config():
    cfg = with_swin(base(), "swin_large")
    cfg["model"]["num_queries"] = 200
    return cfg
