"""MaskFormer-Swin-L on ADE20K semantic segmentation (Cheng et al. 2021, https://arxiv.org/abs/2107.06278).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/maskformer_swin_large_ade20k.py
Reference: 54.1 mIoU, 55.6 mIoU with multi-scale and flip (original model zoo). 211.6 M parameters, 375
           GMACs (paper). Here: not yet run.
Weights:   maskformer_swin_large_IN21k_384_bs16_160k_res640/model_final_aefa3b.pkl
"""

from vitkit.configs.maskformer_r50_ade20k import config as base
from vitkit.configs.parts.ade20k import ade20k_semantic
from vitkit.configs.parts.swin import maskformer_with_swin


def config():
    cfg = maskformer_with_swin(base(), "swin_large")
    cfg["data"] = ade20k_semantic(images_per_gpu=2, size=640)
    return cfg
