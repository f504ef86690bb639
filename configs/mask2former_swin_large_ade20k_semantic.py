"""Mask2Former-Swin-L on ADE20K semantic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_swin_large_ade20k_semantic.py
           train.precision=bf16
Reference: 56.1 mIoU, 57.3 mIoU with multi-scale and flip (original model zoo). 215.5 M parameters, 403
           GMACs (paper). Here: not yet run.
Weights:   maskformer2_swin_large_IN21k_384_bs16_160k_res640/model_final_6b4a3a.pkl
"""

from vitkit.configs.mask2former_r50_ade20k_semantic import config as base
from vitkit.configs.parts.ade20k import ade20k_semantic
from vitkit.configs.parts.swin import with_swin


def config():
    cfg = with_swin(base(), "swin_large")
    cfg["data"] = ade20k_semantic(images_per_gpu=2, size=640)
    return cfg
